"""What a trace holds, without a replay, and any source as a token-exact trace.

describe tells lengths, rates, what prompts share, and what a cache that forgets nothing hits. Shares of prompts by
length count requests; hit rates count tokens. Both suppose that every request has ended before the next begins, so that
a replay in any memory finds at most that, and less where requests run side by side.

convert writes times, pieces, marks, tenants and hints, and nothing that was text.

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
    """Tokens that go on behind another edge: who comes through here has them all."""

    __slots__ = ("children", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[tuple[Hashable, int], Edge] = {}


class Prefixes:
    """Every run of tokens that was added, from the first token on. Memory: O(pieces)."""

    def __init__(self) -> None:
        self._root = Edge(0)

    def add(self, runs: Sequence[Run]) -> int:
        """How many of the leading tokens were there before; an edge ends behind them, and one behind the last token."""
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
        """The edges of ``runs``, which were added."""
        at = self._root
        for segment, first, tokens in runs:
            offset, end = first, first + tokens
            while offset < end:
                at = at.children[segment, offset]
                yield at
                offset += at.length

    def shared_tokens(self, request: TraceRequest) -> int:
        """Leading tokens of its prompt that can be found, the last one aside, which runs; then it is added.

        Not the last token of its output, which is sampled and never run.
        """
        prompt = runs_of([request.prompt])
        shared = self.add(leading(prompt, request.num_prompt_tokens - 1))
        self.add(leading(runs_of([request.prompt, request.output]), request.num_tokens - 1))
        return shared


def leading(runs: Sequence[Run], tokens: int) -> list[Run]:
    """The first ``tokens``."""
    found = list[Run]()
    for segment, offset, length in runs:
        if tokens > 0:
            found.append((segment, offset, min(length, tokens)))
        tokens -= length
    return found


def runs_of(parts: Sequence[Pieces]) -> list[Run]:
    """Of ``parts``, one behind the other; what goes on in the same segment is one run."""
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


_NO_HINTS = asdict(NO_HINTS)


def convert(source: RequestSource, path: str | Path) -> int:
    """Write ``source`` to ``path``, gzip where it ends in .gz, and say how many requests.

    The file is there whole or not at all. Segments are numbered as they come: equal tokens stay equal, and no id of the
    source is told. O(pieces); some 100 bytes are kept for each segment. Raises TraceError as iterating does, OSError
    where it cannot be written.
    """
    path, requests = Path(path), 0
    with written_whole(path) as raw, _zipped(path, raw) as file:
        for line in _lines(source):
            file.write(line)
            requests += 1
    return requests


def _zipped(path: Path, raw: BinaryIO) -> AbstractContextManager[gzip.GzipFile | BinaryIO]:
    """What writes to ``raw`` as the name of ``path`` says; ``raw`` itself stays open."""
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
