"""The two formats of a trace line, each a small class with ``owns`` and ``parse``.

    Mooncake      {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}
                  one id per trace block of the prompt, ceil(input_length / trace block size) of them; inside a
                  block the tokens are a function of the id; outputs are tokens that occur nowhere else
    token-exact   {"timestamp": ms, "prompt": [[segment, offset, length], ...], "output": [[...], ...]}
                  optionally "marks": [token count, ...], where the caller wants a state kept and a hit to be
                  able to end (natural layout): 1 .. tokens of prompt and output, in any order
    of both       optionally "tenant": name, on whose share of memory it counts, and "hints": what the caller knows of
                  when its prefix is wanted again (hybridkv.request.Hints), any of
                  {"over": true, "goes_on": true, "within_s": s, "shared_tokens": n, "scratch": true, "secret": true}

Other fields are left alone. Every count is checked: a request has at least one prompt and one output token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints
from hybridkv.simulator.tokens import HASHED_BLOCK, NEW_OUTPUT, PROMPT_SEGMENT, Piece, Pieces
from hybridkv.units import MOST_COUNT, ceil_div, shown

_MAX_SEGMENT: Final = (1 << 64) - 1
_PIECE_LENGTH: Final = 3


class MalformedLineError(Exception):
    """What is wrong with a line; whoever knows file and line number says so in a TraceError."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    timestamp_s: seconds since the trace began. prompt, output: tokens as pieces, ids on demand.
    marks: token counts, ascending, at which the caller wants a state kept. origin: where it stands, for messages.
    tenant, hints: as Request has them.
    """

    timestamp_s: float
    prompt: Pieces
    output: Pieces
    marks: tuple[int, ...] = ()
    origin: str = ""
    tenant: str | None = None
    hints: Hints = NO_HINTS

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.prompt.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output."""
        return self.output.num_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt.num_tokens + self.output.num_tokens


@dataclass(frozen=True, slots=True)
class MooncakeFormat:
    """Mooncake JSON lines. block_size: tokens that one hash id stands for."""

    block_size: int
    fields = "timestamp, input_length, output_length, hash_ids"

    @staticmethod
    def owns(record: dict[str, object]) -> bool:
        """Whether the line is of this format, complete or not."""
        return "hash_ids" in record or "input_length" in record

    def parse(self, record: dict[str, object], origin: str, number: int) -> TraceRequest:
        """The request of line ``number``. Raises MalformedLineError."""
        timestamp_s = _timestamp_s(record)
        prompt_tokens = _count(record, "input_length")
        output_tokens = _count(record, "output_length")
        _check_total(prompt_tokens + output_tokens)
        hash_ids = _list(record, "hash_ids")
        blocks = ceil_div(prompt_tokens, self.block_size)
        if len(hash_ids) != blocks:
            raise MalformedLineError(
                f"hash_ids has {len(hash_ids)} ids, but input_length {prompt_tokens} makes {blocks} blocks of "
                f"{self.block_size} tokens: is --trace-block-size right?"
            )
        ids = [_integer(one, "a hash id", _MAX_SEGMENT) for one in hash_ids]
        pieces = [(one, 0, self.block_size) for one in ids]
        pieces[-1] = (ids[-1], 0, prompt_tokens - (blocks - 1) * self.block_size)
        return TraceRequest(
            timestamp_s,
            Pieces(HASHED_BLOCK, tuple(pieces)),
            Pieces(NEW_OUTPUT, ((number, 0, output_tokens),)),
            origin=origin,
            tenant=_tenant(record),
            hints=_hints(record),
        )


@dataclass(frozen=True, slots=True)
class PieceFormat:
    """The token-exact format."""

    fields = "timestamp, prompt, output"

    @staticmethod
    def owns(record: dict[str, object]) -> bool:
        """Whether the line is of this format, complete or not."""
        return "prompt" in record or "output" in record

    def parse(self, record: dict[str, object], origin: str, _number: int) -> TraceRequest:
        """The request of one line. Raises MalformedLineError."""
        timestamp_s = _timestamp_s(record)
        prompt = _pieces(record, "prompt")
        output = _pieces(record, "output")
        total = prompt.num_tokens + output.num_tokens
        _check_total(total)
        return TraceRequest(timestamp_s, prompt, output, _marks(record, total), origin, _tenant(record), _hints(record))


def _field(record: dict[str, object], name: str) -> object:
    if name not in record:
        raise MalformedLineError(f"the field {name!r} is missing")
    return record[name]


def _list(record: dict[str, object], name: str) -> list[object]:
    value = _field(record, name)
    if not isinstance(value, list):
        raise MalformedLineError(f"{name} must be a list, not {shown(value)}")
    return value


def _integer(value: object, what: str, most: int, *, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise MalformedLineError(f"{what} must be an integer, not {shown(value)}")
    if not least <= value <= most:
        raise MalformedLineError(f"{what} must lie in {least} .. {most}, got {shown(value)}")
    return value


def _count(record: dict[str, object], name: str) -> int:
    """A number of tokens, at least 1."""
    value = _integer(_field(record, name), name, MOST_COUNT, least=-MOST_COUNT)
    if value < 1:
        raise MalformedLineError(f"{name} must be at least 1 token, got {value}")
    return value


def _timestamp_s(record: dict[str, object]) -> float:
    """Milliseconds in the line, seconds out."""
    value = _field(record, "timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedLineError(f"timestamp must be a number of milliseconds, not {shown(value)}")
    # the bound keeps integers of any size out of float(), and sums of seconds exact to a microsecond
    if not (0 <= value < 1e15 and math.isfinite(value)):
        raise MalformedLineError(f"timestamp must lie in 0 .. 1e15 milliseconds, got {shown(value)}")
    return value / 1000


def _pieces(record: dict[str, object], name: str) -> Pieces:
    """Pieces of ``name``; those without tokens are dropped, but one token must remain."""
    pieces: list[Piece] = []
    for one in _list(record, name):
        if not isinstance(one, list) or len(one) != _PIECE_LENGTH:
            raise MalformedLineError(f"a piece of {name} must be [segment, offset, length], not {shown(one)}")
        segment = _integer(one[0], f"a segment of {name}", _MAX_SEGMENT)
        offset = _integer(one[1], f"an offset of {name}", MOST_COUNT)
        length = _integer(one[2], f"a length of {name}", MOST_COUNT)
        if length:
            pieces.append((segment, offset, length))
    if not pieces:
        raise MalformedLineError(f"{name} must have at least 1 token")
    return Pieces(PROMPT_SEGMENT, tuple(pieces))


def _marks(record: dict[str, object], most: int) -> tuple[int, ...]:
    """Token counts of ``marks`` up to ``most``, ascending and distinct; none where the field is not there."""
    if "marks" not in record:
        return ()
    return tuple(sorted({_integer(one, "a mark", most, least=1) for one in _list(record, "marks")}))


def _tenant(record: dict[str, object]) -> str | None:
    """The name in the field, None where it is not there."""
    if "tenant" not in record:
        return None
    try:
        return text("tenant", record["tenant"])
    except ConfigError as error:
        raise MalformedLineError(str(error)) from None


def _hints(record: dict[str, object]) -> Hints:
    """Those of the field, NO_HINTS where it is not there."""
    if "hints" not in record:
        return NO_HINTS
    try:
        return Hints.parse(record["hints"])
    except ConfigError as error:
        raise MalformedLineError(str(error)) from None


def _check_total(tokens: int) -> None:
    if tokens > MOST_COUNT:
        raise MalformedLineError(f"a request of {tokens} tokens is longer than {MOST_COUNT}")
