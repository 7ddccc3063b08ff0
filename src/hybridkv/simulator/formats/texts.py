"""Formats with text. Texts become token ids, and token ids become pieces; nothing else is kept of the texts.

    sharegpt    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}
                one request for each answer; its prompt holds all earlier messages
    vllm-bench  {"prompt": text, "output_tokens": n}
                the custom data set of `vllm bench serve`; n is 256 by default
    aiperf      {"timestamp": ms, "text_input": text | "messages": [...] | "input_length": n, "output_length": n}
                aiperf's mooncake_trace without hash ids
    openai      {"time": ..., "body": {"messages": [...] | "prompt": ..., "max_tokens": n}, "response": {...}}
                or one object with the fields of the body and the time

openai: the time is ``time``, ``timestamp``, ``created_at`` or ``created``: ISO 8601, or seconds since 1970
(milliseconds from 1e11 on). ``request`` may replace ``body``. The output is the text of the response. Without it, the
output has as many new tokens as ``usage`` counts, or as ``max_tokens`` allows. Requests with different ``cache_salt``
share nothing.

A message becomes the tokens of ``<|role|>``, of its content and of a line break, each encoded separately. So earlier
messages are a prefix of the next prompt. Tools and pictures become the text of their JSON. A model's own chat template
differs by a few tokens per message.

Token ids become pieces (segment, offset, length): equal beginnings have the same pieces.

    [7 7 3 1]     ->  (0, 0, 4)
    [7 7 5]       ->  (0, 0, 2) (1, 0, 1)
    [7 7 5 9 9]   ->  (0, 0, 2) (1, 0, 1) (2, 0, 2)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import astuple
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.simulator.formats.request import (
    Format,
    MalformedLineError,
    Record,
    Sessions,
    Times,
    Tokens,
    TraceRequest,
    Turn,
    check_total,
    iso_seconds,
    read,
    request_of_lengths,
)
from hybridkv.simulator.tokens import PROMPT_SEGMENT, Piece, Pieces
from hybridkv.units import MOST_COUNT, shown

TURN_SECONDS: Final = 30.0
"""Seconds between two requests of a conversation without times. Chosen by hand."""
BENCH_OUTPUT_TOKENS: Final = 256
"""Output tokens of a prompt without a length; the default of `vllm bench`."""
BY_BYTES: Final = "bytes:"
"""Beginning of a tokenizer's name that makes one token of 1 to 4 bytes."""
_MOST_BYTES: Final = 4
_FILE: Final = "tokenizer.json"
_TIMES: Final = ("time", "timestamp", "created_at", "created")
_LEAST_MS: Final = 1e11
_MOST_MS: Final = 1e15
_ROLES: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
_ANSWERS: Final = "assistant"

Ids = NDArray[np.int32]
Encoder = Callable[[str], Ids]
"""A function from a text to its token ids, int32[n], without special tokens."""


def encoder_named(name: str) -> Encoder:
    """Return the encoder of a name.

    Args:
        name: ``bytes:N`` for one token of each N bytes of UTF-8, with N from 1 to 4; otherwise a tokenizer.json, or a
            folder with one.

    Raises:
        ConfigError: for another name, for an unreadable file, and if the tokenizers library is not installed.
    """
    if name.startswith(BY_BYTES):
        digits = name.removeprefix(BY_BYTES)
        if digits not in {str(one) for one in range(1, _MOST_BYTES + 1)}:
            raise ConfigError(f"unknown tokenizer {shown(name)}: use bytes:1 to bytes:{_MOST_BYTES}")
        return _bytes_encoder(int(digits))
    path = Path(name)
    path = path / _FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"no tokenizer at {path}: name a {_FILE}, a folder with one, or bytes:4 (tokens of four bytes)"
        )
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  # an extra
    except ImportError:
        raise ConfigError("reading text needs tokenizers: pip install 'hybridkv[traces]', or use bytes:4") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises nothing narrower
        raise ConfigError(f"{path} is not a readable tokenizer: {error}: name a {_FILE} of Hugging Face") from None
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _bytes_encoder(size: int) -> Encoder:
    """Return an encoder that makes a token of every ``size`` bytes of UTF-8."""

    def encode(text: str) -> Ids:
        raw = text.encode(errors="surrogatepass")
        columns = np.zeros((-(-len(raw) // size), _MOST_BYTES), np.uint8)
        padded = np.frombuffer(raw + bytes(-len(raw) % size), np.uint8)
        columns[:, :size] = padded.reshape(-1, size)
        return columns.view("<i4").astype(np.int32).ravel()

    return encode


class _Branch:
    """An edge of the tree: tokens of a segment from ``offset`` on. ``next``: the edges after it, by first token."""

    __slots__ = ("ids", "next", "offset", "segment")

    def __init__(self, segment: int, offset: int, ids: Ids) -> None:
        self.segment = segment
        self.offset = offset
        self.ids = ids
        self.next: dict[int, _Branch] = {}

    def cut(self, tokens: int) -> None:
        """Split the branch after ``tokens`` tokens; the rest becomes the only branch that follows."""
        rest = _Branch(self.segment, self.offset + tokens, self.ids[tokens:])
        rest.next, self.next = self.next, {int(rest.ids[0]): rest}
        self.ids = self.ids[:tokens]


class TokenTree:
    """A radix tree of the token sequences of one pass that may share prefixes.

    Args:
        segments: numbers of new segments.
    """

    def __init__(self, segments: Iterator[int]) -> None:
        self._segments = segments
        self._first: dict[int, _Branch] = {}

    def pieces(self, ids: Ids) -> list[Piece]:
        """Return token ids as pieces, and add new tokens to the tree. O(n); a new token takes 4 bytes.

        Args:
            ids: the token ids, int32[n].
        """
        found: list[Piece] = []
        following, at = self._first, 0
        while at < len(ids):
            branch = following.get(int(ids[at]))
            if branch is None:
                segment = next(self._segments)
                following[int(ids[at])] = _Branch(segment, 0, ids[at:].copy())
                found.append((segment, 0, len(ids) - at))
                break
            shared = _alike(branch.ids, ids[at:])
            if shared < len(branch.ids) and at + shared < len(ids):
                branch.cut(shared)
            if found and found[-1][0] == branch.segment:
                found[-1] = (branch.segment, found[-1][1], found[-1][2] + shared)
            else:
                found.append((branch.segment, branch.offset, shared))
            following, at = branch.next, at + shared
        return found


def _alike(one: Ids, other: Ids) -> int:
    """Return the number of equal leading tokens."""
    most = min(len(one), len(other))
    different = np.flatnonzero(one[:most] != other[:most])
    return int(different[0]) if different.size else most


def split(pieces: list[Piece], tokens: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Split pieces after a number of tokens. O(pieces).

    Args:
        pieces: the pieces.
        tokens: the tokens of the first part.

    Returns:
        The pieces of the first part, and those of the rest.
    """
    first: list[Piece] = []
    rest: list[Piece] = []
    for segment, offset, length in pieces:
        taken = min(max(tokens, 0), length)
        if taken:
            first.append((segment, offset, taken))
        if taken < length:
            rest.append((segment, offset + taken, length - taken))
        tokens -= length
    return tuple(first), tuple(rest)


class _Written:
    """Makes requests from the texts of one pass. Requests with the same salt share prefixes."""

    def __init__(self, encode: Encoder) -> None:
        self.encode = encode
        self._segments = itertools.count()
        self._trees: dict[str, TokenTree] = {}

    def request(
        self, timestamp_s: float, prompt: Ids, output: Ids | int, origin: str, *, salt: str = ""
    ) -> TraceRequest:
        """Return a request. ``output``: its token ids, or the number of its tokens, which occur nowhere else."""
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
        """Return a request with ``tokens`` new prompt tokens, which follow the prompt and the output of ``before``."""
        said = () if before is None else (*before.prompt.pieces, *before.output.pieces)
        prompt = Pieces(PROMPT_SEGMENT, (*said, (next(self._segments), 0, tokens)))
        check_total(prompt.num_tokens + output)
        answer = Pieces(PROMPT_SEGMENT, ((next(self._segments), 0, output),))
        return TraceRequest(timestamp_s, prompt, answer, origin=origin)

    def conversation(self, said: Iterable[tuple[str, str]]) -> Ids:
        """Return the token ids of messages, pairs of role and content, and of the header of the answer."""
        texts = [text for role, content in said for text in (f"<|{role}|>\n", content, "\n")]
        return np.concatenate([self.encode(text) for text in (*texts, f"<|{_ANSWERS}|>\n")])


class _Message(Struct):
    role: str
    content: str | list[Any] | None = None
    tool_calls: Any = None

    @property
    def said(self) -> tuple[str, str]:
        """Role and content of the message; content other than text is written as JSON."""
        content = self.content if isinstance(self.content, str) else "".join(map(_part, self.content or ()))
        return self.role, content + (json.dumps(self.tool_calls, sort_keys=True) if self.tool_calls else "")


def _part(part: object) -> str:
    """Return the text of a part of a message, or its JSON if it has no text."""
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else json.dumps(part, sort_keys=True)


class _SharedTurn(Struct):
    role: str = field(name="from")
    value: str


class _Conversation(Struct):
    conversations: list[_SharedTurn]


def sharegpt(encode: Encoder) -> Format:
    """Return the format of ShareGPT's conversations, which have no times. An empty answer makes no request.

    Args:
        encode: encoder of texts.
    """

    def parse(written: _Written, record: Record, origin: str, _number: int) -> list[TraceRequest]:
        said: list[tuple[str, str]] = []
        made: list[TraceRequest] = []
        for one in read(record, _Conversation).conversations:
            role, output = _ROLES.get(one.role, one.role), encode(one.value)
            if role == _ANSWERS and said and len(output):
                seconds = len(made) * TURN_SECONDS
                made.append(written.request(seconds, written.conversation(said), output, origin))
            said.append((role, one.value))
        return made

    return Format(
        "sharegpt",
        "conversations",
        lambda record: "conversations" in record,
        lambda: partial(parse, _Written(encode)),
        timed=False,
    )


class _Asked(Struct):
    prompt: str
    output_tokens: Tokens = BENCH_OUTPUT_TOKENS


def vllm_bench(encode: Encoder) -> Format:
    """Return the format of the custom data set of `vllm bench serve`, which has no times.

    Args:
        encode: encoder of texts.
    """

    def parse(written: _Written, record: Record, origin: str, _number: int) -> tuple[TraceRequest]:
        line = read(record, _Asked)
        return (written.request(0.0, encode(line.prompt), line.output_tokens, origin),)

    return Format(
        "vllm-bench",
        "prompt, output_tokens",
        lambda record: isinstance(record.get("prompt"), str),
        lambda: partial(parse, _Written(encode)),
        timed=False,
    )


class _Sent(Turn, kw_only=True):
    output_length: Tokens
    input_length: Tokens | UnsetType = UNSET
    text_input: str | UnsetType = UNSET
    messages: list[_Message] | UnsetType = UNSET


def aiperf(encode: Encoder) -> Format:
    """Return the format of aiperf's mooncake_trace without hash ids, one request or turn of a session per line.

    Args:
        encode: encoder of texts.
    """

    def parse(written: _Written, sessions: Sessions, record: Record, origin: str, number: int) -> tuple[TraceRequest]:
        line = read(record, _Sent)
        seconds, before = sessions.turn(line)
        output, asked = line.output_length, np.empty(0, np.int32)
        if line.messages is not UNSET:
            asked, tokens = written.conversation(one.said for one in line.messages), 0
        elif line.text_input is not UNSET:
            asked = encode(line.text_input)
            tokens = 0 if before is None else len(asked)
        elif line.input_length is not UNSET:
            tokens = line.input_length
            if line.session_id is UNSET:
                return (request_of_lengths(seconds, tokens, output, origin, number),)
        else:
            raise MalformedLineError("a line needs one of the fields 'text_input', 'messages' and 'input_length'")
        if tokens:
            made = written.turn(before, seconds, tokens, output, origin)
        else:
            made = written.request(seconds, asked, output, origin)
        return (sessions.note(line, replace(made, delayed=before is not None)),)

    def owns(record: Record) -> bool:
        """Return whether the record has a prompt and the output's length."""
        return "text_input" in record or "input_length" in record or {"messages", "output_length"} <= record.keys()

    fields = "timestamp, text_input | messages | input_length, output_length"
    return Format("aiperf", fields, owns, lambda: partial(parse, _Written(encode), Sessions()))


class _Body(Struct):
    messages: list[_Message] | None = None
    prompt: str | list[Annotated[int, Meta(ge=0, le=MOST_COUNT)]] | None = None
    tools: Any = UNSET
    cache_salt: Any = ""


class _Usage(Struct):
    completion_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class _Limits(Struct):
    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None


def openai(encode: Encoder, *, salts: bool = True) -> Format:
    """Return the format of logs of requests to OpenAI's API, one request per line.

    Args:
        encode: encoder of texts.
        salts: whether requests with different ``cache_salt`` share nothing.
    """

    def parse(written: _Written, times: Times, record: Record, origin: str, _number: int) -> tuple[TraceRequest]:
        given = _object(record, "body") or _object(record, "request") or record
        body = read(given, _Body)
        if body.messages is not None:
            tools = [] if body.tools is UNSET else [("tools", json.dumps(body.tools, sort_keys=True))]
            prompt = written.conversation([*tools, *(one.said for one in body.messages)])
        elif body.prompt is not None:
            prompt = encode(body.prompt) if isinstance(body.prompt, str) else np.array(body.prompt, np.int32)
        else:
            raise MalformedLineError("a body needs one of the fields 'messages' and 'prompt'")
        salt = json.dumps(body.cache_salt if salts else "")
        made = written.request(0.0, prompt, _output(record, given, encode), origin, salt=salt)
        return (replace(made, timestamp_s=times.since_first(_seconds(record))),)

    def owns(record: Record) -> bool:
        """Return whether the record has a body, or is a body with a time."""
        timed = isinstance(record.get("prompt"), str) and not record.keys().isdisjoint(_TIMES)
        return timed or not record.keys().isdisjoint(("body", "request", "messages"))

    fields = "time, body (messages or prompt, max_tokens), response"
    return Format("openai", fields, owns, lambda: partial(parse, _Written(encode), Times()))


def _output(record: Record, body: Record, encode: Encoder) -> Ids | int:
    """Return the token ids of the output, or their number. Raises MalformedLineError if both are unknown."""
    answer = _object(record, "response") or {}
    answer = _object(answer, "body") or answer
    choices = answer.get("choices")
    choice = next((one for one in choices if isinstance(one, Mapping)), {}) if isinstance(choices, list) else {}
    said = (_object(choice, "message") or {}).get("content") or choice.get("text")
    if isinstance(said, str) and said:
        return encode(said)
    usage = _object(answer, "usage") or _object(record, "usage") or {}
    for counts, kind in ((usage, _Usage), (body, _Limits)):
        for count in astuple(read(counts, kind)):
            if count is not None:
                return int(count)
    raise MalformedLineError("the output's length is unknown: give a text in response, a count in usage, or max_tokens")


def _seconds(record: Record) -> float:
    """Return the time of a record in seconds since 1970. Raises MalformedLineError for a missing or invalid time."""
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
    """Return the object in the field ``name``, ``None`` if there is no object."""
    value = record.get(name)
    return value if isinstance(value, Mapping) else None
