"""Describe a trace without a replay, and convert any source to a token-exact trace.

``describe`` reports lengths, rates, shared prefixes, and the hits of a cache that forgets nothing. Shares of prompts by
length count requests; hit rates count tokens. Both assume that every request has ended before the next begins, so they
bound a replay in any memory from above.

``convert`` writes times, pieces, marks, tenants and hints, but no text.

    runs_of([prompt, output])   ->  [((kind, segment), offset, length), ...]
    Prefixes().add(runs)        ->  leading tokens that were there before
"""

from __future__ import annotations

import gzip
import itertools
import json
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError, TraceError
from hybridkv.regular_files import written_whole
from hybridkv.request import NO_HINTS
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.report import Distribution
from hybridkv.simulator.tokens import Pieces
from hybridkv.simulator.trace import RequestSource
from hybridkv.units import MOST_COUNT, shown

Run = tuple[Hashable, int, int]
"""(what tells its segment from others, offset, length), in tokens."""


class Edge:
    """Tokens that follow another edge of the prefix tree; each request that passes through has them all."""

    __slots__ = ("children", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[tuple[Hashable, int], Edge] = {}


class Prefixes:
    """A tree of every run of tokens that was added, from the first token on. Memory: O(pieces)."""

    def __init__(self) -> None:
        self._root = Edge(0)

    def add(self, runs: Sequence[Run]) -> int:
        """Add ``runs``; return how many leading tokens were there before. Edges end there and after the last token."""
        at, shared, new = self._root, 0, False
        for segment, first, tokens in runs:
            offset, length = first, tokens
            while length:
                edge = at.children.get((segment, offset))
                if edge is None:
                    new = True
                    edge = at.children[segment, offset] = Edge(length)
                elif edge.length > length:
                    rest = Edge(edge.length - length)
                    rest.children, edge.children = edge.children, {(segment, offset + length): rest}
                    edge.length = length
                shared += 0 if new else edge.length
                at, offset, length = edge, offset + edge.length, length - edge.length
        return shared

    def path(self, runs: Sequence[Run]) -> Iterator[Edge]:
        """Return the edges of ``runs``, which were added."""
        at = self._root
        for segment, first, tokens in runs:
            offset, end = first, first + tokens
            while offset < end:
                at = at.children[segment, offset]
                yield at
                offset += at.length

    def shared_tokens(self, request: TraceRequest) -> int:
        """Return the leading tokens of the prompt that are there, without its last one, which always runs; then add it.

        The last token of its output is not added, because it is sampled and never run.
        """
        prompt = runs_of([request.prompt])
        shared = self.add(leading(prompt, request.num_prompt_tokens - 1))
        self.add(leading(runs_of([request.prompt, request.output]), request.num_tokens - 1))
        return shared


def leading(runs: Sequence[Run], tokens: int) -> list[Run]:
    """Return the first ``tokens`` tokens of ``runs``."""
    found = list[Run]()
    for segment, offset, length in runs:
        if tokens > 0:
            found.append((segment, offset, min(length, tokens)))
        tokens -= length
    return found


def runs_of(parts: Sequence[Pieces]) -> list[Run]:
    """Return the runs of ``parts`` in sequence; adjacent tokens of one segment form one run."""
    runs = list[Run]()
    for pieces in parts:
        for number, offset, length in pieces.pieces:
            segment = pieces.kind, number
            if runs and runs[-1][0] == segment and runs[-1][1] + runs[-1][2] == offset:
                runs[-1] = (segment, runs[-1][1], runs[-1][2] + length)
            else:
                runs.append((segment, offset, length))
    return runs


SCHEMA: Final = "hybridkv.trace"
VERSION: Final = 1
BLOCK_SIZES: Final = (1, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens of a block. 1: hits that end at any token, as in the natural layout."""
_SPANS: Final = 48
"""Of time, in which arrivals are counted."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """The number of requests with ``least`` to ``most`` tokens."""

    least: int
    most: int
    requests: int


@dataclass(frozen=True, slots=True)
class BlockHits:
    """The hits of blocks of ``block_size`` tokens in an endless cache."""

    block_size: int
    hit_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TraceDescription:
    """The description of a trace.

    seconds: from the first request to the last. arrivals: requests in equal parts of that time.
    prompt_tokens, output_tokens, shared_tokens: of all requests. prompts, outputs, shared: of single requests, in bins
    of powers of two; shared is the longest beginning of a prompt that an earlier request had, outputs included. For a
    trace of lengths only, shared_tokens and shared_lengths are None, and shared and hits are empty. busiest_per_s:
    mean rate in the busiest part. tenants: number of distinct names.
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
        """Return the document as text."""
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=2) + "\n"


def describe(source: RequestSource, block_sizes: Sequence[int] = BLOCK_SIZES) -> TraceDescription:
    """Describe a source in two passes. O(pieces); about 100 bytes are kept for each new piece.

    Args:
        source: the trace or workload.
        block_sizes: block sizes, in tokens, for which hits are counted.

    Raises:
        TraceError: as iterating does.
        ConfigError: for invalid block sizes.
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
    """Return the number of times in each of equal parts."""
    counts = [0] * _SPANS
    for time in times:
        counts[min(int((time - times[0]) / seconds * _SPANS), _SPANS - 1) if seconds else 0] += 1
    return counts


def _bins(lengths: Sequence[int]) -> tuple[LengthBin, ...]:
    """Return bins 0, 1, 2 .. 3, 4 .. 7 and so on, from the first to the last that is not empty."""
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length.bit_length()] = counts.get(length.bit_length(), 0) + 1
    return tuple(
        LengthBin(1 << bits >> 1, (1 << bits) - 1, counts.get(bits, 0)) for bits in range(min(counts), max(counts) + 1)
    )


_NO_HINTS = asdict(NO_HINTS)


def convert(source: RequestSource, path: str | Path) -> int:
    """Write a source as a token-exact trace; return the number of requests.

    The file appears complete or not at all. Segments are numbered in order, so equal tokens stay equal and ids of the
    source are not written. O(pieces); about 100 bytes are kept for each segment.

    Args:
        source: the trace or workload.
        path: the file to write; gzip if it ends in .gz.

    Raises:
        TraceError: as iterating does.
        OSError: if the file cannot be written.
    """
    path, requests = Path(path), 0
    with written_whole(path) as raw, _zipped(path, raw) as file:
        for line in _lines(source):
            file.write(line)
            requests += 1
    return requests


def _zipped(path: Path, raw: BinaryIO) -> AbstractContextManager[gzip.GzipFile | BinaryIO]:
    """Yield a file that writes to ``raw``, compressed if ``path`` says so; ``raw`` itself stays open."""
    if path.suffix != ".gz":
        return nullcontext(raw)
    return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)


def _lines(source: RequestSource) -> Iterator[bytes]:
    numbers: defaultdict[tuple[int, int], int] = defaultdict(itertools.count().__next__)
    for request in source:
        yield json.dumps(_record(request, numbers), separators=(",", ":")).encode() + b"\n"


def _record(request: TraceRequest, numbers: defaultdict[tuple[int, int], int]) -> dict[str, object]:
    def numbered(run: Pieces) -> list[list[int]] | int:
        if not request.tokens_known:
            return run.num_tokens
        return [[numbers[run.kind, segment], offset, length] for segment, offset, length in run.pieces]

    milliseconds = round(request.timestamp_s * 1000, 3)
    made: dict[str, object] = {
        "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
        "prompt": numbered(request.prompt),
        "output": numbered(request.output),
    }
    if request.marks:
        made["marks"] = list(request.marks)
    if request.tenant is not None:
        made["tenant"] = request.tenant
    hints = {name: value for name, value in asdict(request.hints).items() if value != _NO_HINTS[name]}
    if hints:
        made["hints"] = hints
    return made
