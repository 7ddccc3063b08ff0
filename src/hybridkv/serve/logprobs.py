"""Log probabilities in OpenAI's two forms: columns for completions, a record a token for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from typing_extensions import TypedDict

from hybridkv.runner.sampling.logprobs import TokenLogprob
from hybridkv.serve.tokens import TokenTexts

LEAST: Final = -9999.0
"""What is said of a token that cannot come: JSON knows no infinity."""


class Columns(TypedDict):
    """Of completions: of each token its text, its log probability, those of the most probable, where its text begins.

    The first token of a prompt has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Named(TypedDict):
    """A token: its text, its log probability, its bytes where they are whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class Record(Named):
    """Of chats: an output token, and the most probable ones in its place."""

    top_logprobs: list[Named]


class ChatLogprobs(TypedDict):
    """Of an output of a chat."""

    content: list[Record]
    refusal: None


class ColumnWriter:
    """Of one output of a completion, as it grows. offset: characters in front of its first token."""

    def __init__(self, texts: TokenTexts, before: int | None, offset: int = 0) -> None:
        self._texts, self._before, self._offset = texts, before, offset

    def prompt(self, ids: Sequence[int], values: Sequence[TokenLogprob]) -> Columns:
        """Of an echoed prompt: ``values`` are those of all its tokens but the first."""
        first = self._texts.text(ids[0], None)
        made: Columns = {
            "tokens": [first],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._before, self._offset = ids[0], self._offset + len(first)
        return joined(made, self.output(values))

    def output(self, values: Sequence[TokenLogprob]) -> Columns:
        """Of tokens behind those before."""
        made: Columns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in values:
            shown = self._texts.text(one.token_id, self._before)
            best: dict[str, float] = {}
            for token, value in one.best:  # of tokens of one text the most probable is shown
                best.setdefault(self._texts.text(token, self._before), max(value, LEAST))
            best.setdefault(shown, max(one.logprob, LEAST))
            made["tokens"].append(shown)
            made["token_logprobs"].append(max(one.logprob, LEAST))
            made["top_logprobs"].append(best)
            made["text_offset"].append(self._offset)
            self._before, self._offset = one.token_id, self._offset + len(shown)
        return made


def joined(first: Columns, second: Columns) -> Columns:
    """One behind the other."""
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


class RecordWriter:
    """Of one output of a chat, as it grows."""

    def __init__(self, texts: TokenTexts, before: int | None) -> None:
        self._texts, self._before = texts, before

    def output(self, values: Sequence[TokenLogprob]) -> ChatLogprobs:
        """Of tokens behind those before."""
        content: list[Record] = []
        for one in values:
            top = [self._named(*best) for best in one.best]
            content.append({**self._named(one.token_id, one.logprob), "top_logprobs": top})
            self._before = one.token_id
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> Named:
        shown = self._texts.text(token, self._before)
        return {"token": shown, "logprob": max(value, LEAST), "bytes": self._texts.utf8(shown)}
