"""What a trace holds, without replaying it: lengths, rates, what prompts share, what a cache that forgets nothing hits.

Shares of prompts by length count requests; hit rates count tokens. Both suppose that every request has ended before the
next begins, so that a replay in any memory finds at most that, and less where requests run side by side.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError, TraceError
from hybridkv.simulator.prefixes import Prefixes
from hybridkv.simulator.report import Distribution
from hybridkv.simulator.trace import RequestSource
from hybridkv.units import MOST_COUNT, shown

SCHEMA: Final = "hybridkv.trace"
VERSION: Final = 1
BLOCK_SIZES: Final = (1, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens of a block. 1: hits that end at any token, as in the natural layout."""
_SPANS: Final = 48
"""Of time, in which arrivals are counted."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Requests with ``least`` .. ``most`` tokens of something."""

    least: int
    most: int
    requests: int


@dataclass(frozen=True, slots=True)
class BlockHits:
    """What blocks of ``block_size`` tokens find in an endless cache."""

    block_size: int
    hit_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TraceDescription:
    """seconds: from the first request to the last. arrivals: requests in equal parts of that time.

    prompt_tokens, output_tokens, shared_tokens: of all requests. prompts, outputs, shared: of single requests, binned
    by powers of two; shared is the beginning of a prompt that one before had, its outputs included. Of a trace of
    lengths alone nobody knows what is shared: shared_tokens and shared_lengths are None, shared and hits empty.
    busiest_per_s: mean rate in the busiest of the parts. tenants: distinct names.
    """

    source: str
    requests: int
    bad_lines: int
    seconds: float
    requests_per_s: float
    busiest_per_s: float
    prompt_tokens: int
    output_tokens: int
    longest_tokens: int
    shared_tokens: int | None
    tenants: int
    prompt_lengths: Distribution
    output_lengths: Distribution
    shared_lengths: Distribution | None
    arrivals: tuple[int, ...]
    prompts: tuple[LengthBin, ...]
    outputs: tuple[LengthBin, ...]
    shared: tuple[LengthBin, ...]
    hits: tuple[BlockHits, ...]

    def to_json(self) -> str:
        """The document."""
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=2) + "\n"


def describe(source: RequestSource, block_sizes: Sequence[int] = BLOCK_SIZES) -> TraceDescription:
    """What ``source`` holds, in two passes. O(pieces), and some 100 bytes kept for each piece seen for the first time.

    Raises TraceError as iterating does, ConfigError for block sizes that are none.
    """
    sizes = sorted({integer("block_sizes", one, 1, MOST_COUNT) for one in block_sizes})
    if not sizes:
        raise ConfigError(f"block_sizes must name one, got {shown(block_sizes)}")
    summary = source.summary()
    prefixes, times = Prefixes(), array("d")
    prompts, outputs, shared = array("q"), array("q"), array("q")
    tenants: set[str] = set()
    for request in source:
        times.append(request.timestamp_s)
        prompts.append(request.num_prompt_tokens)
        outputs.append(request.num_output_tokens)
        shared.append(prefixes.shared_tokens(request))
        if request.tenant is not None:
            tenants.add(request.tenant)
    if len(times) != summary.requests:
        raise TraceError(f"{source.name} changed while it was read")
    seconds = times[-1] - times[0]
    arrivals = _parts(times, seconds)
    known = summary.tokens_known
    hits = [(size, sum(one // size * size for one in shared)) for size in sizes] if known else []
    return TraceDescription(
        source=source.name,
        requests=summary.requests,
        bad_lines=summary.bad_lines,
        seconds=round(seconds, 6),
        requests_per_s=round(len(times) / seconds, 6) if seconds else 0.0,
        busiest_per_s=round(max(arrivals) / (seconds / _SPANS), 6) if seconds else 0.0,
        prompt_tokens=summary.prompt_tokens,
        output_tokens=summary.output_tokens,
        longest_tokens=summary.longest_tokens,
        shared_tokens=sum(shared) if known else None,
        tenants=len(tenants),
        prompt_lengths=Distribution.of(prompts),
        output_lengths=Distribution.of(outputs),
        shared_lengths=Distribution.of(shared) if known else None,
        arrivals=tuple(arrivals),
        prompts=_bins(prompts),
        outputs=_bins(outputs),
        shared=_bins(shared) if known else (),
        hits=tuple(BlockHits(size, hit, hit / summary.prompt_tokens) for size, hit in hits),
    )


def _parts(times: Sequence[float], seconds: float) -> list[int]:
    """How many lie in each of equal parts."""
    counts = [0] * _SPANS
    for time in times:
        counts[min(int((time - times[0]) / seconds * _SPANS), _SPANS - 1) if seconds else 0] += 1
    return counts


def _bins(lengths: Sequence[int]) -> tuple[LengthBin, ...]:
    """0, 1, 2 .. 3, 4 .. 7 and so on, from the first that holds any to the last."""
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length.bit_length()] = counts.get(length.bit_length(), 0) + 1
    return tuple(
        LengthBin(1 << bits >> 1, (1 << bits) - 1, counts.get(bits, 0)) for bits in range(min(counts), max(counts) + 1)
    )
