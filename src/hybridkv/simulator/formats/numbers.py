"""Traces without text: tokens known by ids, or lengths alone, whose tokens occur nowhere else and hit nothing.

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
    azure         TIMESTAMP,ContextTokens,GeneratedTokens                        2023-11-16 18:15:46.6805900,374,44
    burstgpt      Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type        5,ChatGPT,472,18,490,...

azure: AzurePublicDataset's LLM inference traces of 2023 and 2024; times with or without a zone. burstgpt: seconds;
lines of requests that failed have no response tokens and are malformed here: skip them. Times count from the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from hybridkv.arguments import text
from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints
from hybridkv.simulator.formats.request import (
    Format,
    MalformedLineError,
    Milliseconds,
    Reader,
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
from hybridkv.simulator.tokens import HASHED_BLOCK, NEW_OUTPUT, PROMPT_SEGMENT, Piece, Pieces
from hybridkv.units import MOST_COUNT, ceil_div

_MOST_SEGMENT: Final = (1 << 64) - 1
_UNSHARED: Final = 1 << 63
"""Blocks from here on are of one line alone; traces count theirs from 0."""
_Segment = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]


def _tenant_and_hints(record: Record) -> tuple[str | None, Hints]:
    """Return the tenant and hints of a record, or None and NO_HINTS."""
    try:
        tenant = text("tenant", record["tenant"]) if "tenant" in record else None
        return tenant, Hints.parse(record["hints"]) if "hints" in record else NO_HINTS
    except ConfigError as error:
        raise MalformedLineError(str(error)) from None


def _check_segments(largest: int) -> None:
    if largest > _MOST_SEGMENT:
        raise MalformedLineError(f"a segment or hash id must be at most {_MOST_SEGMENT}")


# -- tokens known by ids


class _Hashed(Turn, kw_only=True):
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[_Segment]


def mooncake(block_size: int) -> Format:
    """Mooncake JSON lines. block_size: tokens that one hash id stands for."""

    def parse(sessions: Sessions, record: Record, origin: str, number: int) -> tuple[TraceRequest]:
        line = read(record, _Hashed)
        timestamp_s, before = sessions.turn(line)
        prompt_tokens, output_tokens, ids = line.input_length, line.output_length, line.hash_ids
        check_total(prompt_tokens + output_tokens)
        blocks = ceil_div(prompt_tokens, block_size)
        if len(ids) != blocks:
            raise MalformedLineError(
                f"hash_ids has {len(ids)} ids, but input_length {prompt_tokens} makes {blocks} blocks of "
                f"{block_size} tokens: is --trace-block-size right?"
            )
        _check_segments(max(ids))
        pieces = [(one, 0, block_size) for one in ids]
        pieces[-1] = (ids[-1], 0, prompt_tokens - (blocks - 1) * block_size)
        if before is not None:  # behind an output that nobody else has, nothing is shared
            said = (*before.prompt.pieces, *before.output.pieces)
            pieces = [*said, (_UNSHARED + 2 * number, 0, prompt_tokens)]
            check_total(before.num_tokens + prompt_tokens + output_tokens)
        output = (
            Pieces(HASHED_BLOCK, ((_UNSHARED + 2 * number + 1, 0, output_tokens),))  # for a turn to come
            if "session_id" in record
            else Pieces(NEW_OUTPUT, ((number, 0, output_tokens),))
        )
        prompt, about = Pieces(HASHED_BLOCK, tuple(pieces)), _tenant_and_hints(record)
        return (sessions.note(line, TraceRequest(timestamp_s, prompt, output, (), origin, *about, before is not None)),)

    fields = "timestamp, input_length, output_length, hash_ids"
    return Format("mooncake", fields, lambda record: "hash_ids" in record, lambda: partial(parse, Sessions()))


class _Exact(Struct):
    timestamp: Milliseconds
    prompt: Tokens | list[tuple[_Segment, _Count, _Count]]
    output: Tokens | list[tuple[_Segment, _Count, _Count]]
    marks: list[Annotated[int, Meta(ge=1)]] = []


def _parse_exact(record: Record, origin: str, number: int) -> tuple[TraceRequest]:
    line = read(record, _Exact)
    timestamp_s, marks, about = line.timestamp / 1000, tuple(sorted(set(line.marks))), _tenant_and_hints(record)
    if isinstance(line.prompt, int) and isinstance(line.output, int):
        lengths = request_of_lengths(timestamp_s, line.prompt, line.output, origin, number)
        prompt, output = lengths.prompt, lengths.output
    elif isinstance(line.prompt, list) and isinstance(line.output, list):
        prompt, output = _pieces(line.prompt, "prompt"), _pieces(line.output, "output")
        check_total(prompt.num_tokens + output.num_tokens)
    else:
        raise MalformedLineError("prompt and output must both be lists of pieces, or both counts of tokens")
    if marks and marks[-1] > prompt.num_tokens + output.num_tokens:
        raise MalformedLineError(f"a mark must lie in 1 .. {prompt.num_tokens + output.num_tokens}, got {marks[-1]}")
    return (TraceRequest(timestamp_s, prompt, output, marks, origin, *about),)


def _pieces(given: list[Piece], name: str) -> Pieces:
    """Return the pieces of field ``name`` without empty ones; at least one token must remain."""
    pieces = tuple(one for one in given if one[2])
    if not pieces:
        raise MalformedLineError(f"{name} must have at least 1 token")
    _check_segments(max(segment for segment, _, _ in pieces))
    return Pieces(PROMPT_SEGMENT, pieces)


TOKEN_EXACT: Final = Format(
    "token-exact",
    "timestamp, prompt, output",
    lambda record: isinstance(record.get("prompt"), list) or "output" in record,
    lambda: _parse_exact,
)


# -- lengths alone


class _Azure(Struct):
    time: str = field(name="TIMESTAMP")
    prompt: Tokens = field(name="ContextTokens")
    output: Tokens = field(name="GeneratedTokens")


class _BurstGpt(Struct):
    time: Annotated[float, Meta(ge=0, lt=86400 * 1e6)] = field(name="Timestamp")
    prompt: Tokens = field(name="Request tokens")
    output: Tokens = field(name="Response tokens")


def _rows(name: str, kind: type[_Azure | _BurstGpt]) -> Format:
    """Rows of a CSV file. kind: the columns that are read. Times count from the first row."""

    def parse(since_first: Callable[[float], float], record: Record, origin: str, number: int) -> tuple[TraceRequest]:
        line = read(record, kind, from_text=True)
        seconds = iso_seconds(line.time) if isinstance(line.time, str) else line.time
        return (request_of_lengths(since_first(seconds), line.prompt, line.output, origin, number),)

    def reader() -> Reader:
        return partial(parse, Times().since_first)

    columns = kind.__struct_encode_fields__
    return Format(name, ", ".join(columns), lambda record: record.keys() >= {*columns}, reader, in_rows=True)


AZURE: Final = _rows("azure", _Azure)
BURSTGPT: Final = _rows("burstgpt", _BurstGpt)
