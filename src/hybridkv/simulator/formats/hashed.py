"""Tokens known by ids: Mooncake's lines and the token-exact form, each a small class with ``owns`` and ``reader``.

    mooncake      {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}
                  one id per trace block of the prompt, ceil(input_length / trace block size) of them; inside a
                  block the tokens are a function of the id; outputs are tokens that occur nowhere else
    token-exact   {"timestamp": ms, "prompt": [[segment, offset, length], ...], "output": [[...], ...]}
                  optionally "marks": [token count, ...], where the caller wants a state kept and a hit to be
                  able to end (natural layout): 1 .. tokens of prompt and output, in any order; prompt and output may
                  be counts of tokens instead, both of them, where nothing but their lengths is known
    of both       optionally "tenant": name, on whose share of memory it counts, and "hints": what the caller knows of
                  when its prefix is wanted again (hybridkv.request.Hints), any of
                  {"over": true, "goes_on": true, "within_s": s, "shared_tokens": n, "scratch": true, "secret": true}

Other fields are left alone. Every count is checked: a request has at least one prompt and one output token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints
from hybridkv.simulator.formats.fields import (
    MOST_SEGMENT,
    MalformedLineError,
    Record,
    check_total,
    integer,
    listed,
    seconds_of_ms,
    tokens,
)
from hybridkv.simulator.formats.lengths import request_of_lengths
from hybridkv.simulator.formats.request import Reader, TraceRequest
from hybridkv.simulator.formats.sessions import Sessions
from hybridkv.simulator.tokens import HASHED_BLOCK, NEW_OUTPUT, PROMPT_SEGMENT, Piece, Pieces
from hybridkv.units import MOST_COUNT, ceil_div, shown

_PIECE_LENGTH: Final = 3
_UNSHARED: Final = 1 << 63
"""Blocks from here on are of one line alone; traces count theirs from 0."""


@dataclass(frozen=True, slots=True)
class MooncakeFormat:
    """Mooncake JSON lines. block_size: tokens that one hash id stands for."""

    block_size: int
    name = "mooncake"
    fields = "timestamp, input_length, output_length, hash_ids"
    timed = True

    @staticmethod
    def owns(record: Record) -> bool:
        """Whether the line is of this format, complete or not."""
        return "hash_ids" in record

    def reader(self) -> Reader:
        """Each line by itself, but for turns of a session that come behind another."""
        return partial(self._parse, Sessions())

    def _parse(self, sessions: Sessions, record: Record, origin: str, number: int) -> tuple[TraceRequest]:
        timestamp_s, before = sessions.turn(record)
        prompt_tokens = tokens(record, "input_length")
        output_tokens = tokens(record, "output_length")
        check_total(prompt_tokens + output_tokens)
        hash_ids = listed(record, "hash_ids")
        blocks = ceil_div(prompt_tokens, self.block_size)
        if len(hash_ids) != blocks:
            raise MalformedLineError(
                f"hash_ids has {len(hash_ids)} ids, but input_length {prompt_tokens} makes {blocks} blocks of "
                f"{self.block_size} tokens: is --trace-block-size right?"
            )
        ids = [integer(one, "a hash id", MOST_SEGMENT) for one in hash_ids]
        pieces = [(one, 0, self.block_size) for one in ids]
        pieces[-1] = (ids[-1], 0, prompt_tokens - (blocks - 1) * self.block_size)
        if before is not None:  # behind an output that nobody else has, nothing is shared
            said = (*before.prompt.pieces, *before.output.pieces)
            pieces = [*said, (_UNSHARED + 2 * number, 0, prompt_tokens)]
            check_total(before.num_tokens + prompt_tokens + output_tokens)
        output = (
            Pieces(HASHED_BLOCK, ((_UNSHARED + 2 * number + 1, 0, output_tokens),))  # for a turn to come
            if "session_id" in record
            else Pieces(NEW_OUTPUT, ((number, 0, output_tokens),))
        )
        prompt, tenant, hints = Pieces(HASHED_BLOCK, tuple(pieces)), _tenant(record), _hints(record)
        made = TraceRequest(timestamp_s, prompt, output, (), origin, tenant, hints, before is not None)
        return (sessions.note(record, made),)


@dataclass(frozen=True, slots=True)
class PieceFormat:
    """The token-exact format."""

    name = "token-exact"
    fields = "timestamp, prompt, output"
    timed = True

    @staticmethod
    def owns(record: Record) -> bool:
        """Whether the line is of this format, complete or not."""
        return isinstance(record.get("prompt"), list) or "output" in record

    def reader(self) -> Reader:
        """Each line by itself."""
        return self._parse

    @staticmethod
    def _parse(record: Record, origin: str, number: int) -> tuple[TraceRequest]:
        timestamp_s = seconds_of_ms(record)
        if isinstance(record.get("prompt"), int):
            made = request_of_lengths(timestamp_s, tokens(record, "prompt"), tokens(record, "output"), origin, number)
            marks = _marks(record, made.num_tokens)
            return (replace(made, marks=marks, tenant=_tenant(record), hints=_hints(record)),)
        prompt = _pieces(record, "prompt")
        output = _pieces(record, "output")
        total = prompt.num_tokens + output.num_tokens
        check_total(total)
        marks = _marks(record, total)
        return (TraceRequest(timestamp_s, prompt, output, marks, origin, _tenant(record), _hints(record)),)


def _pieces(record: Record, name: str) -> Pieces:
    """Pieces of ``name``; those without tokens are dropped, but one token must remain."""
    pieces: list[Piece] = []
    for one in listed(record, name):
        if not isinstance(one, list) or len(one) != _PIECE_LENGTH:
            raise MalformedLineError(f"a piece of {name} must be [segment, offset, length], not {shown(one)}")
        segment = integer(one[0], f"a segment of {name}", MOST_SEGMENT)
        offset = integer(one[1], f"an offset of {name}", MOST_COUNT)
        length = integer(one[2], f"a length of {name}", MOST_COUNT)
        if length:
            pieces.append((segment, offset, length))
    if not pieces:
        raise MalformedLineError(f"{name} must have at least 1 token")
    return Pieces(PROMPT_SEGMENT, tuple(pieces))


def _marks(record: Record, most: int) -> tuple[int, ...]:
    """Token counts of ``marks`` up to ``most``, ascending and distinct; none where the field is not there."""
    if "marks" not in record:
        return ()
    return tuple(sorted({integer(one, "a mark", most, least=1) for one in listed(record, "marks")}))


def _tenant(record: Record) -> str | None:
    """The name in the field, None where it is not there."""
    if "tenant" not in record:
        return None
    try:
        return text("tenant", record["tenant"])
    except ConfigError as error:
        raise MalformedLineError(str(error)) from None


def _hints(record: Record) -> Hints:
    """Those of the field, NO_HINTS where it is not there."""
    if "hints" not in record:
        return NO_HINTS
    try:
        return Hints.parse(record["hints"])
    except ConfigError as error:
        raise MalformedLineError(str(error)) from None
