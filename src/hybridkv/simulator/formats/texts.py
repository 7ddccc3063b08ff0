"""Traces that hold text. It is made token ids, and these pieces of a tree, on the way in; nothing else is kept of it.

    sharegpt    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}
                a request for each answer, whose prompt is all that was said before
    vllm-bench  {"prompt": text, "output_tokens": n}
                the custom data set of `vllm bench serve`; 256 where n is not said
    aiperf      {"timestamp": ms, "text_input": text | "messages": [...] | "input_length": n, "output_length": n}
                its mooncake_trace without hash ids
    openai      {"time": ..., "body": {"messages": [...] | "prompt": ..., "max_tokens": n}, "response": {...}}
                or the body's fields beside the time's

openai, in words: the time is ``time``, ``timestamp``, ``created_at`` or ``created``: ISO 8601, or seconds since 1970
(milliseconds from 1e11 on); ``request`` may stand for ``body``. The output is the response's text, or as many new
tokens as ``usage`` counts, or as ``max_tokens`` allows. Requests with different ``cache_salt`` share nothing.

A message becomes the tokens of ``<|role|>``, of its content and of a line break, each encoded by itself, so that what
was said before is a prefix of what is asked next; tools and pictures stand as the text of their JSON. A model's own
chat template differs by some tokens a message.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.simulator.formats.encoders import Encoder
from hybridkv.simulator.formats.fields import (
    MalformedLineError,
    Record,
    check_total,
    field,
    integer,
    listed,
    text,
    tokens,
)
from hybridkv.simulator.formats.lengths import Times, iso_seconds, request_of_lengths
from hybridkv.simulator.formats.request import Reader, TraceRequest
from hybridkv.simulator.formats.sessions import Sessions
from hybridkv.simulator.formats.token_tree import TokenTree, split
from hybridkv.simulator.tokens import PROMPT_SEGMENT, Pieces
from hybridkv.units import MOST_COUNT, shown

TURN_SECONDS: Final = 30.0
"""From one request of a conversation without times to its next."""
BENCH_OUTPUT_TOKENS: Final = 256
"""Where `vllm bench` is not told: its own default."""
_TIMES: Final = ("time", "timestamp", "created_at", "created")
_LEAST_MS: Final = 1e11
_MOST_MS: Final = 1e15
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_ROLES: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
_ANSWERS: Final = "assistant"

Ids = NDArray[np.int32]
Said = tuple[str, str]
"""(role, content)."""


class _Written:
    """Texts of one pass as pieces."""

    def __init__(self, encode: Encoder) -> None:
        self.encode = encode
        self._segments = itertools.count()
        self._trees: dict[str, TokenTree] = {}

    def request(
        self, timestamp_s: float, prompt: Ids, output: Ids | int, origin: str, *, salt: str = ""
    ) -> TraceRequest:
        """One with an output in hand, or of so many tokens that occur nowhere else."""
        new = output if isinstance(output, int) else 0
        known = prompt if isinstance(output, int) else np.concatenate((prompt, output))
        if not len(prompt):
            raise MalformedLineError("the prompt must have at least 1 token")
        if len(known) + new == len(prompt):
            raise MalformedLineError("the output must have at least 1 token")
        check_total(len(known) + new)
        tree = self._trees.setdefault(salt, TokenTree(self._segments))
        asked, said = split(tree.pieces(known), len(prompt))
        said = said or ((next(self._segments), 0, new),)
        return TraceRequest(timestamp_s, Pieces(PROMPT_SEGMENT, asked), Pieces(PROMPT_SEGMENT, said), origin=origin)

    def turn(
        self, before: TraceRequest | None, timestamp_s: float, tokens: int, output: int, origin: str
    ) -> TraceRequest:
        """One that goes on behind ``before`` with so many ``tokens``, which nobody else has."""
        said = () if before is None else (*before.prompt.pieces, *before.output.pieces)
        prompt = Pieces(PROMPT_SEGMENT, (*said, (next(self._segments), 0, tokens)))
        check_total(prompt.num_tokens + output)
        return TraceRequest(
            timestamp_s, prompt, Pieces(PROMPT_SEGMENT, ((next(self._segments), 0, output),)), (), origin
        )

    def header(self, role: str) -> Ids:
        """What stands before a content."""
        return self.encode(f"<|{role}|>\n")

    def conversation(self, said: Iterable[Said]) -> Ids:
        """Messages and the header of what answers them."""
        parts = [
            part for role, content in said for part in (self.header(role), self.encode(content), self.encode("\n"))
        ]
        return np.concatenate([*parts, self.header(_ANSWERS)])


@dataclass(frozen=True, slots=True)
class ShareGptFormat:
    """Conversations without times."""

    encode: Encoder
    name = "sharegpt"
    fields = "conversations"
    timed = False

    @staticmethod
    def owns(record: Record) -> bool:
        """Whether it is a conversation."""
        return "conversations" in record

    def reader(self) -> Reader:
        """Turns without an answer, or with an empty one, make no request."""
        written = _Written(self.encode)

        def parse(record: Record, origin: str, _number: int) -> list[TraceRequest]:
            said: list[Said] = []
            made: list[TraceRequest] = []
            for one in listed(record, "conversations"):
                if not isinstance(one, Mapping):
                    raise MalformedLineError(f"a turn must be an object, not {shown(one)}")
                role, value = text(one, "from"), text(one, "value")
                role = _ROLES.get(role, role)
                output = self.encode(value)
                if role == _ANSWERS and said and len(output):
                    seconds = len(made) * TURN_SECONDS
                    made.append(written.request(seconds, written.conversation(said), output, origin))
                said.append((role, value))
            return made

        return parse


@dataclass(frozen=True, slots=True)
class BenchFormat:
    """Prompts of a benchmark, without times."""

    encode: Encoder
    name = "vllm-bench"
    fields = "prompt, output_tokens"
    timed = False

    @staticmethod
    def owns(record: Record) -> bool:
        """Whether it is text to be asked."""
        return isinstance(record.get("prompt"), str)

    def reader(self) -> Reader:
        """One request a line."""
        written = _Written(self.encode)

        def parse(record: Record, origin: str, _number: int) -> tuple[TraceRequest]:
            output = tokens(record, "output_tokens") if "output_tokens" in record else BENCH_OUTPUT_TOKENS
            return (written.request(0.0, self.encode(text(record, "prompt")), output, origin),)

        return parse


@dataclass(frozen=True, slots=True)
class AiperfFormat:
    """aiperf's mooncake_trace, where it has no hash ids."""

    encode: Encoder
    name = "aiperf"
    fields = "timestamp, text_input | messages | input_length, output_length"
    timed = True

    @staticmethod
    def owns(record: Record) -> bool:
        """Whether a prompt stands beside the output's length."""
        return any(name in record for name in ("text_input", "input_length")) or (
            "messages" in record and "output_length" in record
        )

    def reader(self) -> Reader:
        """One request a line; a turn may come some time behind the one before of its session."""
        written, sessions = _Written(self.encode), Sessions()

        def parse(record: Record, origin: str, number: int) -> tuple[TraceRequest]:
            seconds, before = sessions.turn(record)
            if "session_id" not in record and not {"messages", "text_input"} & record.keys():
                counts = tokens(record, "input_length"), tokens(record, "output_length")
                return (request_of_lengths(seconds, *counts, origin, number),)
            made = self._turn(record, written, before, seconds, origin)
            return (sessions.note(record, made if before is None else replace(made, delayed=True)),)

        return parse

    def _turn(
        self, record: Record, written: _Written, before: TraceRequest | None, seconds: float, origin: str
    ) -> TraceRequest:
        output = tokens(record, "output_length")
        if "messages" in record:
            return written.request(seconds, written.conversation(_messages(record)), output, origin)
        if "text_input" not in record:
            return written.turn(before, seconds, tokens(record, "input_length"), output, origin)
        asked = self.encode(text(record, "text_input"))
        if before is None or not len(asked):
            return written.request(seconds, asked, output, origin)
        return written.turn(before, seconds, len(asked), output, origin)


@dataclass(frozen=True, slots=True)
class OpenAiFormat:
    """Logs of requests in OpenAI's forms. salts: whether those of different ``cache_salt`` share nothing."""

    encode: Encoder
    salts: bool = True
    name = "openai"
    fields = "time, body (messages or prompt, max_tokens), response"
    timed = True

    @staticmethod
    def owns(record: Record) -> bool:
        """Whether it has a body, or is one with a time."""
        return any(name in record for name in ("body", "request", "messages")) or (
            isinstance(record.get("prompt"), str) and any(name in record for name in _TIMES)
        )

    def reader(self) -> Reader:
        """One request a line; times count from the first."""
        written, times = _Written(self.encode), Times()

        def parse(record: Record, origin: str, _number: int) -> tuple[TraceRequest]:
            body = _object(record, "body") or _object(record, "request") or record
            salt = body.get("cache_salt", "") if self.salts else ""
            made = written.request(
                0.0, self._prompt(body, written), self._output(record, body), origin, salt=json.dumps(salt)
            )
            return (_at(made, times.since_first(_seconds(record))),)

        return parse

    def _prompt(self, body: Record, written: _Written) -> Ids:
        if "messages" in body:
            said = list(_messages(body))
            if "tools" in body:
                said.insert(0, ("tools", json.dumps(body["tools"], sort_keys=True)))
            return written.conversation(said)
        asked = field(body, "prompt")
        if isinstance(asked, str):
            return self.encode(asked)
        if isinstance(asked, list):
            return np.array([integer(one, "a token of prompt", MOST_COUNT) for one in asked], np.int32)
        raise MalformedLineError(f"prompt must be text or token ids, not {shown(asked)}")

    def _output(self, record: Record, body: Record) -> Ids | int:
        answer = _object(record, "response") or {}
        answer = _object(answer, "body") or answer
        for choice in _objects(answer.get("choices"))[:1]:
            said = (_object(choice, "message") or {}).get("content") or choice.get("text")
            if isinstance(said, str) and said:
                return self.encode(said)
        usage = _object(answer, "usage") or _object(record, "usage") or {}
        for counts, name in ((usage, "completion_tokens"), (usage, "output_tokens"), *((body, one) for one in _LIMITS)):
            if counts.get(name) is not None:
                return tokens(counts, name)
        raise MalformedLineError("nothing says how long the output is: no text in response, no usage, no max_tokens")


def _at(request: TraceRequest, seconds: float) -> TraceRequest:
    return TraceRequest(seconds, request.prompt, request.output, origin=request.origin)


def _seconds(record: Record) -> float:
    for name in _TIMES:
        value: Any = record.get(name)
        if isinstance(value, str):
            return iso_seconds(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 <= value < _MOST_MS:
                raise MalformedLineError(f"{name} must lie in 0 .. {_MOST_MS:g}, got {shown(value)}")
            return value / 1000 if value >= _LEAST_MS else float(value)
    raise MalformedLineError(f"no time: one of {', '.join(_TIMES)} must be ISO 8601, or seconds since 1970")


def _object(record: Record, name: str) -> Record | None:
    value = record.get(name)
    return value if isinstance(value, Mapping) else None


def _objects(value: object) -> list[Record]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _messages(record: Record) -> Iterator[Said]:
    """Role and content of each; what is no text is the text of its JSON."""
    for one in listed(record, "messages"):
        if not isinstance(one, Mapping):
            raise MalformedLineError(f"a message must be an object, not {shown(one)}")
        content = "".join(_parts(one.get("content")))
        if one.get("tool_calls"):
            content += json.dumps(one["tool_calls"], sort_keys=True)
        yield text(one, "role"), content


def _parts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            told = part.get("text") if isinstance(part, Mapping) else None
            yield told if isinstance(told, str) else json.dumps(part, sort_keys=True)
    elif content is not None:
        raise MalformedLineError(f"a content must be text or a list of parts, not {shown(content)}")
