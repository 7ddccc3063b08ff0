"""Text and tokens of requests, in threads beside the event loop; and the text of single tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from starlette.requests import Request

from hybridkv.errors import ConfigError
from hybridkv.runner.chat import chat_ids
from hybridkv.runner.inputs import encode
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.text_bound import TextBound
from hybridkv.serve.bodies import ChatMessage, TemplateBody
from hybridkv.serve.errors import ApiError
from hybridkv.serve.keys import tenant_of
from hybridkv.serve.leaving import while_there
from hybridkv.serve.turns import SHORT, Piece, Turns

T = TypeVar("T")

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Tokens:
    """The tokenizer of a server, used in threads beside the event loop.

    Args:
        loaded: the model that is served.
        max_model_len: tokens of prompt and output together; no longer text is tokenized.
    """

    def __init__(self, loaded: LoadedModel, max_model_len: int) -> None:
        self._loaded, self._most = loaded, max_model_len
        self._bound = TextBound.of(loaded.tokenizer)
        self._turns = Turns(parallel=bool(getattr(loaded.tokenizer, "is_fast", False)))

    async def run(self, request: Request, pieces: Iterable[Piece[T]]) -> list[T]:
        """Return what ``pieces`` give, in turns with other clients. ClientGoneError if that of ``request`` leaves."""
        client = tenant_of(request).salt, request.client and request.client.host
        return await while_there(request.receive, self._turns.run(client, pieces))

    async def ids(self, request: Request, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the token ids of each of ``prompts``.

        Raises ApiError 400 for a prompt that cannot fit the model, ConfigError as encode, ClientGoneError as run.
        """
        for one in prompts:
            if not isinstance(one, str):
                self.require_room(one)
            elif self._bound is not None and self._bound.spaces_count:  # which is told by the length
                self._require_room_for_text(one)
        if sum(SHORT if isinstance(one, str) else len(one) for one in prompts) < SHORT:
            return self._encoded(prompts)
        pieces = [Piece(sum(map(len, some)), partial(self._encoded, some)) for some in _grouped(prompts)]
        return [one for some in await self.run(request, pieces) for one in some]

    async def conversation(self, request: Request, messages: Sequence[ChatMessage], reads: TemplateBody) -> list[int]:
        """Return the token ids of a conversation.

        Raises ApiError 400 for one that cannot fit the model, ConfigError as chat_ids and for tool calls whose
        arguments are no JSON object, ClientGoneError as run.
        """
        tools = (
            None if reads.tools is None or reads.tool_choice == "none" else [one.model_dump() for one in reads.tools]
        )
        check = None if self._bound is None else self._require_room_for_text

        def work() -> list[int]:
            said = [_message(one) for one in messages]
            return chat_ids(self._loaded, said, tools=tools, names=reads.chat_template_kwargs, check=check)

        (ids,) = await self.run(request, [Piece(len(await request.body()), work)])
        return ids

    def require_room(self, ids: Sequence[int]) -> None:
        """Raise ApiError 400 for more token ids than the model has room for."""
        if len(ids) > self._most:
            raise too_long(self._loaded.name, f"{len(ids)} tokens do", self._most)

    def close(self) -> None:
        """Begin nothing more."""
        self._turns.close()

    def _require_room_for_text(self, given: str) -> None:
        if self._bound is not None and self._bound.exceeded(given, self._most):
            raise too_long(self._loaded.name, f"a text of {len(given)} characters does", self._most)

    def _encoded(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        for one in prompts:
            if isinstance(one, str):
                self._require_room_for_text(one)
        return [encode(self._loaded, one) for one in prompts]


def too_long(name: str, what: str, most: int) -> ApiError:
    """Return the error for ``what`` ("9 tokens do") that a model of ``most`` tokens has no room for."""
    return ApiError(
        400,
        f"{what} not fit: {name} has {most} tokens for prompt and output together",
        code="context_length_exceeded",
    )


def _grouped(prompts: Iterable[str | list[int]]) -> Iterator[list[str | list[int]]]:
    """Neighbours that are short together; long ones alone."""
    group: list[str | list[int]] = []
    size = 0
    for one in prompts:
        if group and size + len(one) > SHORT:
            yield group
            group, size = [], 0
        group.append(one)
        size += len(one)
    yield group


def _message(given: ChatMessage) -> dict[str, Any]:
    """As chat templates know it: content as one text, a developer as the system, arguments of calls as objects."""
    made: dict[str, Any] = {"role": "system" if given.role == "developer" else given.role}
    content = given.content
    made["content"] = "\n".join(one.text for one in content) if isinstance(content, list) else content or ""
    if given.name is not None:
        made["name"] = given.name
    if given.tool_call_id is not None:
        made["tool_call_id"] = given.tool_call_id
    if given.tool_calls:
        made["tool_calls"] = [one.model_dump() for one in given.tool_calls]
        for call in made["tool_calls"]:
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return made


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"arguments of a tool call are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("arguments of a tool call must be a JSON object")
    return found


class TokenTexts:
    """What single tokens are called. tokenizer: None for ids alone; as_ids: ``token_id:7``, whatever there is."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False) -> None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        self._tokenizer: Any = None if as_ids else tokenizer

    def text(self, token: int, before: int | None) -> str:
        """``token`` as text behind the token ``before``: a space in front of a word is the word's."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        if before is not None:
            shown = self._decode([before])
            together = self._decode([before, token])
            if together.startswith(shown) and not shown.endswith(_REPLACEMENT):
                return together[len(shown) :]
        return self._decode([token])

    @staticmethod
    def utf8(text: str) -> list[int] | None:
        """The bytes of a token's text; None for one that is a part of a character."""
        return None if _REPLACEMENT in text else list(text.encode())

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
