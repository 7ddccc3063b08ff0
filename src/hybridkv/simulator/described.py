"""Describe a trace without a replay, and convert any source to a token-exact trace.

``describe`` reports lengths, rates, shared prefixes, and the hits of an unlimited cache. Shares of prompts by length
count requests; hit rates count tokens. Both assume that each request ends before the next one begins. They are
therefore upper bounds for a replay with any memory.

``convert`` writes times, pieces, resume marks, tenants and hints, but no text.

    runs_of([prompt, output])   ->  [((kind, segment), offset, length), ...]
    Prefixes().add(runs)        ->  leading tokens that an earlier sequence had
"""

from __future__ import annotations

import gzip
import itertools
import json
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError, TraceError
from hybridkv.regular_files import written_whole
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.report import Distribution
from hybridkv.simulator.tokens import Pieces
from hybridkv.simulator.trace import RequestSource
from hybridkv.units import MOST_COUNT, shown

Run = tuple[Hashable, int, int]
"""A run of tokens: (identity of its segment, offset of the first token, length), both in tokens."""


class Edge:
    """An edge of the prefix tree: a run of tokens that every sequence through it has in full.

    Attributes:
        length: tokens of the run.
        children: the edges that continue it, by segment and offset of their first token.
    """

    __slots__ = ("children", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[tuple[Hashable, int], Edge] = {}


class Prefixes:
    """A prefix tree of token sequences. Memory: O(pieces)."""

    def __init__(self) -> None:
        self._root = Edge(0)

    def add(self, runs: Sequence[Run]) -> int:
        """Add a sequence and return the number of leading tokens that an earlier sequence had. O(edges on its path).

        The tree has a node after the shared tokens and after the last token.

        Args:
            runs: the sequence.
        """
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
        """Yield the edges of a sequence that was added.

        Args:
            runs: the sequence.
        """
        at = self._root
        for segment, first, tokens in runs:
            offset, end = first, first + tokens
            while offset < end:
                at = at.children[segment, offset]
                yield at
                offset += at.length

    def shared_tokens(self, request: TraceRequest) -> int:
        """Return the leading prompt tokens that an earlier request had; then add the request's prompt and output.

        The last token of the prompt never counts, because it always runs. The last token of the output is not added,
        because it is sampled but never run.

        Args:
            request: the request.
        """
        prompt = runs_of([request.prompt])
        shared = self.add(leading(prompt, request.num_prompt_tokens - 1))
        self.add(leading(runs_of([request.prompt, request.output]), request.num_tokens - 1))
        return shared


def leading(runs: Sequence[Run], tokens: int) -> list[Run]:
    """Return the first tokens of a sequence.

    Args:
        runs: the sequence.
        tokens: number of tokens to return; the whole sequence if it is shorter.
    """
    found = list[Run]()
    for segment, offset, length in runs:
        if tokens > 0:
            found.append((segment, offset, min(length, tokens)))
        tokens -= length
    return found


def runs_of(parts: Sequence[Pieces]) -> list[Run]:
    """Join pieces to one sequence. Adjacent tokens of one segment form one run.

    Args:
        parts: the pieces, for example of prompt and output.
    """
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
"""Block sizes in tokens. Size 1 counts hits that end at any token, as in the natural layout."""
_SPANS: Final = 48
"""Number of equal time spans in which arrivals are counted. Chosen by hand, for the width of a chart."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """A bin of a histogram of lengths.

    Attributes:
        least: fewest tokens of a request in the bin.
        most: most tokens of a request in the bin.
        requests: number of requests.
    """

    least: int
    most: int
    requests: int


@dataclass(frozen=True, slots=True)
class BlockHits:
    """The hits in an unlimited cache with one block size.

    Attributes:
        block_size: tokens of a block.
        hit_tokens: prompt tokens in whole shared blocks, over all requests.
        hit_rate: ``hit_tokens`` divided by all prompt tokens.
    """

    block_size: int
    hit_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TraceDescription:
    """The description of a trace.

    A shared prefix is the longest beginning of a prompt that an earlier request had in its prompt and output.

    Attributes:
        source: name of the trace or workload.
        requests: number of requests.
        bad_lines: lines that were skipped.
        seconds: time from the first request to the last.
        requests_per_s: mean rate.
        busiest_per_s: mean rate in the busiest part of ``arrivals``.
        prompt_tokens: prompt tokens of all requests.
        output_tokens: output tokens of all requests.
        longest_tokens: prompt and output tokens of the longest request.
        shared_tokens: tokens of all shared prefixes; ``None`` for a trace of lengths only.
        tenants: number of distinct tenants.
        prompt_lengths: distribution of prompt tokens per request.
        output_lengths: distribution of output tokens per request.
        shared_lengths: distribution of shared prefixes in tokens; ``None`` for a trace of lengths only.
        arrivals: number of requests in each of 48 equal parts of ``seconds``.
        prompts: histogram of prompt tokens; bins are powers of two.
        outputs: histogram of output tokens.
        shared: histogram of shared prefixes; empty for a trace of lengths only.
        hits: hits in an unlimited cache by block size; empty for a trace of lengths only.
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
        """Return the JSON document."""
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=2) + "\n"


def describe(source: RequestSource, block_sizes: Sequence[int] = BLOCK_SIZES) -> TraceDescription:
    """Describe a source. It reads the source twice. O(pieces); memory: about 100 bytes for each new piece.

    Args:
        source: the trace or workload.
        block_sizes: block sizes in tokens, at least one; hits are counted for each of them.

    Raises:
        TraceError: for a malformed line, and if the source changes between the two passes.
        ConfigError: for invalid block sizes.
    """
    sizes = sorted({integer("block_sizes", one, 1, MOST_COUNT) for one in block_sizes})
    if not sizes:
        raise ConfigError(f"block_sizes must have at least one size, got {shown(block_sizes)}")
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
        raise TraceError(
            f"{source.name} changed from {summary.requests} to {len(times)} requests while it was read: try again when "
            "it is complete"
        )
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
    """Return the number of times in each of 48 equal parts of ``seconds``."""
    counts = [0] * _SPANS
    for time in times:
        counts[min(int((time - times[0]) / seconds * _SPANS), _SPANS - 1) if seconds else 0] += 1
    return counts


def _bins(lengths: Sequence[int]) -> tuple[LengthBin, ...]:
    """Return the bins 0, 1, 2 .. 3, 4 .. 7 and so on, without empty bins at both ends."""
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length.bit_length()] = counts.get(length.bit_length(), 0) + 1
    return tuple(
        LengthBin(1 << bits >> 1, (1 << bits) - 1, counts.get(bits, 0)) for bits in range(min(counts), max(counts) + 1)
    )


def convert(source: Iterable[TraceRequest], path: str | Path) -> int:
    """Write a source as a token-exact trace and return the number of requests.

    The file appears complete or not at all. Segments are numbered anew, so equal tokens stay equal, but the file has no
    ids of the source. O(pieces); memory: about 100 bytes for each segment.

    Args:
        source: the requests of a trace or workload.
        path: the file to write; compressed with gzip if the name ends in .gz.

    Raises:
        TraceError: for a malformed line.
        OSError: if the file cannot be written.
    """
    path, requests = Path(path), 0
    with written_whole(path) as raw, _zipped(path, raw) as file:
        for line in _lines(source):
            file.write(line)
            requests += 1
    return requests


def _zipped(path: Path, raw: BinaryIO) -> AbstractContextManager[gzip.GzipFile | BinaryIO]:
    """Return a file that writes to ``raw``, with gzip if the name of ``path`` ends in .gz. ``raw`` stays open."""
    if path.suffix != ".gz":
        return nullcontext(raw)
    return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)


def _lines(source: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Yield the line of each request."""
    numbers: defaultdict[tuple[int, int], int] = defaultdict(itertools.count().__next__)
    for request in source:
        yield json.dumps(_record(request, numbers), separators=(",", ":")).encode() + b"\n"


def _record(request: TraceRequest, numbers: defaultdict[tuple[int, int], int]) -> dict[str, object]:
    """Return the JSON object of a request. numbers: number of each segment in the file, by kind and segment."""

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
    if request.took_s is not None:
        made["took"] = round(request.took_s * 1000, 3)
    if request.marks:
        made["marks"] = list(request.marks)
    if request.tenant is not None:
        made["tenant"] = request.tenant
    if hints := request.hints.given():
        made["hints"] = hints
    return made
