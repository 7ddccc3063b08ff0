"""Formats without text: tokens are known by ids, or only lengths are known.

    mooncake      {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}
    token-exact   {"timestamp": ms, "prompt": [[segment, offset, length], ...], "output": [[...], ...]}
    azure         TIMESTAMP,ContextTokens,GeneratedTokens                        2023-11-16 18:15:46.6805900,374,44
    burstgpt      Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type        5,ChatGPT,472,18,490,...

mooncake: ``hash_ids`` has one id for each trace block of the prompt, ceil(input_length / trace block size) ids. The
tokens of a block are a function of its id. Output tokens occur nowhere else.

token-exact: ``marks`` (optional) lists resume marks as token counts, from 1 to the tokens of prompt and output. If only
lengths are known, prompt and output are both token counts. ``took`` (optional) is the time from
arrival to end in milliseconds.

mooncake and token-exact: ``tenant`` (optional) is the name of the tenant, and ``hints`` (optional) holds fields of
hybridkv.request.Hints: {"over": true, "goes_on": true, "within_s": s, "shared_tokens": n, "scratch": true,
"secret": true}.

azure: AzurePublicDataset's LLM inference traces of 2023 and 2024; times are with or without a zone. burstgpt: times are
in seconds; a failed request has no response tokens, so its line is malformed. Both count times from the first request.
Tokens of traces with only lengths occur nowhere else, so they never hit.
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
"""First hash id of tokens that occur in one line only. The ids of traces count from 0, so they are smaller."""
_Segment = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]


def _tenant_and_hints(record: Record) -> tuple[str | None, Hints]:
    """Return the tenant and the hints of a record, ``None`` and NO_HINTS if it has no such fields."""
    try:
        tenant = text("tenant", record["tenant"]) if "tenant" in record else None
        return tenant, Hints.parse(record["hints"]) if "hints" in record else NO_HINTS
    except ConfigError as error:
        raise MalformedLineError(str(error)) from None


def _check_segments(largest: int) -> None:
    """Raise MalformedLineError if a segment does not fit in 64 bits."""
    if largest > _MOST_SEGMENT:
        raise MalformedLineError(f"a segment or hash id must be at most {_MOST_SEGMENT}, got {largest}")


# -- tokens known by ids


class _Hashed(Turn, kw_only=True):
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[_Segment]


def mooncake(block_size: int) -> Format:
    """Return the format of Mooncake's traces.

    Args:
        block_size: tokens that one hash id stands for.
    """

    def parse(sessions: Sessions, record: Record, origin: str, number: int) -> tuple[TraceRequest]:
        line = read(record, _Hashed)
        timestamp_s, before = sessions.turn(line)
        prompt_tokens, output_tokens, ids = line.input_length, line.output_length, line.hash_ids
        check_total(prompt_tokens + output_tokens)
        blocks = ceil_div(prompt_tokens, block_size)
        if len(ids) != blocks:
            raise MalformedLineError(
                f"hash_ids has {len(ids)} ids, but input_length {prompt_tokens} makes {blocks} blocks of "
                f"{block_size} tokens: check --trace-block-size"
            )
        _check_segments(max(ids))
        pieces = [(one, 0, block_size) for one in ids]
        pieces[-1] = (ids[-1], 0, prompt_tokens - (blocks - 1) * block_size)
        if before is not None:  # the previous output occurs nowhere else, so tokens after it share nothing
            said = (*before.prompt.pieces, *before.output.pieces)
            pieces = [*said, (_UNSHARED + 2 * number, 0, prompt_tokens)]
            check_total(before.num_tokens + prompt_tokens + output_tokens)
        output = (
            Pieces(HASHED_BLOCK, ((_UNSHARED + 2 * number + 1, 0, output_tokens),))  # a later turn has it in its prompt
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
    took: Milliseconds | None = None


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
    took_s = None if line.took is None else line.took / 1000
    return (TraceRequest(timestamp_s, prompt, output, marks, origin, *about, took_s=took_s),)


def _pieces(given: list[Piece], name: str) -> Pieces:
    """Return the pieces of the field ``name`` without empty ones. Raises MalformedLineError if it has no token."""
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


# -- only lengths


class _Azure(Struct):
    time: str = field(name="TIMESTAMP")
    prompt: Tokens = field(name="ContextTokens")
    output: Tokens = field(name="GeneratedTokens")


class _BurstGpt(Struct):
    time: Annotated[float, Meta(ge=0, lt=86400 * 1e6)] = field(name="Timestamp")
    prompt: Tokens = field(name="Request tokens")
    output: Tokens = field(name="Response tokens")


def _rows(name: str, kind: type[_Azure | _BurstGpt]) -> Format:
    """Return a format of CSV rows with the columns of ``kind``. Times count from the first row."""

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
