"""Results of a replay: the report, samples over time, and explained misses.

ReplayReport   Counts of the scheduler and latencies in simulated time. Equal inputs give byte-equal documents, because
               wall time is not part of the report.
Recording      look(now) after each step -> at most MOST_SAMPLES samples. When there are more, it drops every other one
               and doubles the interval between samples.
               end(...) -> one row for each finished request.
               A fast-forward is sampled only before and after it: no request begins or ends within it.
Explained      {"request": 7, "origin": "line 8", ..., "prompt_tokens": 900, "hit_tokens": 512,
                "misses": [{"first": 512, ...}]}. The hit tokens and the tokens of the misses add up to the prompt.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Miss, MissReason, ResumePointStatistics, TenantStatistics
from hybridkv.errors import ConfigError
from hybridkv.regular_files import written_whole
from hybridkv.schedule import Scheduler
from hybridkv.simulator.formats import TraceRequest
from hybridkv.tiers import HostTierStatistics

SCHEMA: Final = "hybridkv.replay"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and nearest-rank percentiles of values, rounded to 6 digits after the point; zeros without values.

    Attributes:
        mean: arithmetic mean.
        p50: median.
        p90: 90th percentile.
        p99: 99th percentile.
    """

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """Return the distribution of some values. O(n log n).

        Args:
            values: the values, in any order.
        """
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)

        def percentile(share: int) -> float:
            return round(ordered[max(math.ceil(len(ordered) * share / 100) - 1, 0)], 6)

        return cls(round(math.fsum(ordered) / len(ordered), 6), percentile(50), percentile(90), percentile(99))


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Counts of one group's blocks.

    Attributes:
        kind: class of the group's spec.
        layers: number of entries; a layer with an indexer has two.
        block_size: tokens of a block.
        published: blocks that got a key, so that requests can hit them.
        evictions: keys that were evicted.
        cached_blocks: blocks with a key at the end.
        copies: blocks that were copied before a forward, because the original can be hit and must not be written.
    """

    kind: str
    layers: int
    block_size: int
    published: int
    evictions: int
    cached_blocks: int
    copies: int


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        source: name of the trace or workload.
        requests: number of requests.
        prompt_tokens: prompt tokens of all requests.
        output_tokens: output tokens of all requests.
        longest_tokens: prompt and output tokens of the longest request.
        bad_lines: lines of the trace that were skipped.
        hit_tokens: prompt tokens found in the cache at the first admission of each request; ``None`` for a trace of
            lengths only.
        computed_tokens: tokens that ran, including tokens computed again after a preemption.
        preemptions: number of preemptions.
        peak_usage: largest share of blocks in use, 0 to 1.
        steps: number of steps.
        mean_running: mean rows of a step.
        simulated_s: end of the last step, in seconds of the trace.
        time_to_first_token_s: time from arrival to the end of the step that sampled the first token.
        time_per_output_token_s: mean time per token after the first, for requests with at least two output tokens.
        machine: the machines of the modelled times, in words.
        timed: whether steps take time. If not, both latencies are zeros, and null in the document.
        caching_off: the reason why no request could hit, or ``None``.
        groups: counts of each group, in the order of the plan.
        refusals: how often the scheduler did not admit a waiting request, by reason; at most once per step and request.
        moves: blocks that moved between slabs.
        moved_bytes: bytes of the moved blocks.
        checkpoints: natural layout: positions at which a state was stored.
        declined_checkpoints: natural layout: positions without memory for a state.
        ends: counts of resume points by kind, if the eviction ranks them; as in CacheStatistics.
        missed_tokens: tokens that evicted resume points would have saved; ``None`` for a trace of lengths only.
        missed_a_gib_more: estimated part of ``missed_tokens`` that one GiB more would have saved; ``None`` for a trace
            of lengths only.
        tenants: counts of each tenant, if there are shares.
        misses: prompt tokens that were not hit, by MissReason, if misses are explained.
        drafted_tokens: verified drafts, if there is speculation.
        accepted_tokens: accepted drafts, if there is speculation.
        host_tier: counts of the host tier; ``None`` without one, and for a trace of lengths only.
    """

    source: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    longest_tokens: int
    bad_lines: int
    hit_tokens: int | None
    computed_tokens: int
    preemptions: int
    peak_usage: float
    steps: int
    mean_running: float
    simulated_s: float
    time_to_first_token_s: Distribution
    time_per_output_token_s: Distribution
    machine: str = ""
    timed: bool = True
    caching_off: str | None = None
    groups: tuple[GroupReport, ...] = ()
    refusals: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    moved_bytes: int = 0
    checkpoints: int = 0
    declined_checkpoints: int = 0
    ends: tuple[ResumePointStatistics, ...] = ()
    missed_tokens: int | None = 0
    missed_a_gib_more: int | None = 0
    tenants: tuple[TenantStatistics, ...] = ()
    misses: dict[str, int] = field(default_factory=dict)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    host_tier: HostTierStatistics | None = None

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens divided by prompt tokens; ``None`` for a trace of lengths only."""
        if self.hit_tokens is None:
            return None
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def without_hits(self) -> ReplayReport:
        """Return the report without values that depend on token ids, for a trace of lengths only."""
        unknown = replace(self, hit_tokens=None, missed_tokens=None, missed_a_gib_more=None)
        return replace(unknown, ends=(), tenants=(), misses={}, host_tier=None)

    def to_dict(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Return the document: schema, settings, every field and the hit rate.

        Args:
            settings: settings to write into the document.
        """
        counts = asdict(self)
        if not counts.pop("timed"):
            counts |= {"time_to_first_token_s": None, "time_per_output_token_s": None}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "source": counts.pop("source"),
            "settings": dict(settings),
            **counts,
            "hit_rate": self.hit_rate,
        }

    def to_json(self, settings: Mapping[str, object]) -> str:
        """Return the document as JSON text, with one line for each value.

        Args:
            settings: settings to write into the document.
        """
        return json.dumps(self.to_dict(settings), indent=2) + "\n"


Float64 = NDArray[np.float64]

MOST_SAMPLES: Final = 1024
"""Most samples of a recording: more than the pixels of a chart need. Chosen by hand."""
_FIRST_INTERVAL_S: Final = 1 / 16
"""Seconds between samples at first; a power of two, so that doubled intervals are exact. Chosen by hand."""
_REASONS: Final = tuple(MissReason)


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns of n samples.

    Attributes:
        time_s: seconds of the trace, float64[n].
        running: running requests, int64[n].
        waiting: waiting requests, int64[n].
        prompt_tokens: prompt tokens of all requests that began so far, int64[n].
        hit_tokens: hit tokens of all requests that began so far, int64[n].
        held: blocks that requests hold, int64[n, groups].
        evictable: cached blocks that no request holds, int64[n, groups].
        usage: share of blocks in use, 0 to 1, float64[n].
        missed: missed tokens so far by MissReason, int64[n, reasons]; zeros if misses are not explained.
    """

    time_s: Float64
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    held: NDArray[np.int64]
    evictable: NDArray[np.int64]
    usage: Float64
    missed: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Columns of all requests in the order in which they finished, float64[requests].

    Attributes:
        arrival_s: time of arrival, in seconds of the trace.
        begun_s: start of the first step of the request, in seconds of the trace.
        first_token_s: time of the first output token, in seconds of the trace.
        end_s: time of the last output token, in seconds of the trace.
        prompt_tokens: prompt tokens.
        hit_tokens: prompt tokens found in the cache.
        output_tokens: output tokens.
    """

    arrival_s: Float64
    begun_s: Float64
    first_token_s: Float64
    end_s: Float64
    prompt_tokens: Float64
    hit_tokens: Float64
    output_tokens: Float64


@dataclass(frozen=True, slots=True)
class Recorded:
    """A complete recording.

    Attributes:
        samples: the samples.
        requests: times and tokens of each request.
        idle: cached blocks at the end, by group and by bucket of seconds without a hit (EDGES_S).
    """

    samples: Samples
    requests: RequestTimes
    idle: tuple[tuple[int, ...], ...]


class Recording:
    """Samples of a replay.

    Args:
        scheduler: the replayed scheduler; its cache must measure block times.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._samples: list[tuple[float, ...]] = []
        self._groups = len(scheduler.cache.groups)
        self._interval_s, self._next_s = _FIRST_INTERVAL_S, 0.0
        self._requests = tuple(array("d") for _ in RequestTimes.__dataclass_fields__)

    def look(self, now_s: float, *, last: bool = False) -> None:
        """Take a sample if the interval has passed. O(blocks) for a sample.

        Args:
            now_s: current time, in seconds of the trace.
            last: take the sample in any case.
        """
        if now_s < self._next_s and not last:
            return
        self._samples.append(self._sample(now_s))
        if len(self._samples) > MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._interval_s *= 2
        self._next_s = now_s + self._interval_s

    def _sample(self, now_s: float) -> tuple[float, ...]:
        scheduler = self._scheduler
        counts, kept = scheduler.statistics(), scheduler.cache.statistics()
        return (
            now_s,
            counts.running,
            counts.waiting,
            counts.prompt_tokens,
            counts.hit_tokens,
            scheduler.cache.usage,
            *(group.held_blocks for group in kept.groups),
            *(group.evictable_blocks for group in kept.groups),
            *(counts.misses.get(reason, 0) for reason in _REASONS),
        )

    def end(self, times: tuple[float, float, float, float], tokens: tuple[int, int, int]) -> None:
        """Record a finished request.

        Args:
            times: arrival, start, first token and end, in seconds of the trace.
            tokens: prompt tokens, hit tokens and output tokens.
        """
        for column, value in zip(self._requests, (*times, *tokens), strict=True):
            column.append(value)

    def recorded(self) -> Recorded:
        """Return all samples and requests so far."""
        table = np.array(self._samples, np.float64).reshape(len(self._samples), -1)
        time_s, running, waiting, prompt, hit, usage = table[:, :6].T
        held, evictable, missed = np.split(table[:, 6:].astype(np.int64), (self._groups, 2 * self._groups), axis=1)
        running, waiting, prompt, hit = (column.astype(np.int64) for column in (running, waiting, prompt, hit))
        samples = Samples(time_s, running, waiting, prompt, hit, held, evictable, usage, missed)
        idle = self._scheduler.cache.engine.idle_blocks()
        return Recorded(samples, RequestTimes(*map(np.array, self._requests)), idle)


AT_MOST: Final = "at_most"
ESTIMATE: Final = "estimate"
_ROWS_AT_ONCE: Final = 4096
_PARQUET: Final = ".parquet"


@dataclass(frozen=True, slots=True)
class Explained:
    """The misses of one request when it began.

    Attributes:
        number: number of the request in the trace, from 0.
        trace: the request.
        begun_s: time when it began, in seconds of the trace.
        hit_tokens: prompt tokens found in the cache.
        misses: the misses, in the order of the prompt.
    """

    number: int
    trace: TraceRequest
    begun_s: float
    hit_tokens: int
    misses: tuple[Miss, ...]

    def to_dict(self, *, in_order: bool) -> dict[str, object]:
        """Return the JSON object of the request.

        Args:
            in_order: whether the cache evicts in order of use (KVCacheManager.evicts_in_order). ``more_bytes`` of a
                miss is then an upper bound, otherwise an estimate.
        """
        return {
            "request": self.number,
            "origin": self.trace.origin,
            "arrival_s": self.trace.timestamp_s,
            "begun_s": round(self.begun_s, 6),
            "prompt_tokens": self.trace.num_prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "misses": [_facts(miss, AT_MOST if in_order else ESTIMATE) for miss in self.misses],
        }


def _facts(miss: Miss, bound: str) -> dict[str, object]:
    """Return the known facts of a miss; ``bound`` describes its ``more_bytes``."""
    facts = {name: value for name, value in asdict(miss).items() if value is not None}
    interval = facts.pop("interval", None)
    if "more_bytes" in facts:
        facts["more_bytes_is"] = bound
    if interval is not None:
        facts |= {"placement": f"interval:{interval}", "state_at": miss.interval_state}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in facts.items()}


@contextmanager
def explained_file(path: Path, *, in_order: bool) -> Iterator[Callable[[Explained], None]]:
    """Yield a function that writes one request. At the end, the file exists in full or not at all.

    Args:
        path: the file to write: Parquet if the name ends in .parquet, otherwise JSON lines.
        in_order: whether the cache evicts in order of use, as in ``Explained.to_dict``.

    Raises:
        ConfigError: for Parquet without pyarrow, and if the file cannot be written.
    """
    rows: list[dict[str, object]] = []
    form = _parquet if path.suffix == _PARQUET else _lines
    try:
        with written_whole(path) as file, form(file) as write:

            def add(explained: Explained) -> None:
                rows.append(explained.to_dict(in_order=in_order))
                if len(rows) == _ROWS_AT_ONCE:
                    write(rows)
                    rows.clear()

            yield add
            write(rows)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path} could not be written ({reason}): name another file (--explain-to)") from error


@contextmanager
def _lines(file: Any) -> Iterator[Callable[[list[dict[str, object]]], None]]:  # noqa: ANN401 - a binary file
    """Yield a function that writes rows as JSON lines."""
    yield lambda rows: file.writelines((json.dumps(row) + "\n").encode() for row in rows)


@contextmanager
def _parquet(file: Any) -> Iterator[Callable[[list[dict[str, object]]], None]]:  # noqa: ANN401 - as above
    """Yield a function that writes rows as Parquet, with a column of tokens for each reason: sums need no unnesting."""
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'hybridkv[parquet]', or name a .jsonl file") from error
    whole, seconds, text = pa.int64(), pa.float64(), pa.string()
    one = {"first": whole, "tokens": whole, "reason": text, "group": whole, "ago_s": seconds, "more_bytes": whole}
    one |= {"more_bytes_is": text, "idle_s": seconds, "by": text, "nearest_state": whole, "placement": text}
    columns = {"request": whole, "origin": text, "arrival_s": seconds, "begun_s": seconds, "prompt_tokens": whole}
    columns |= {"hit_tokens": whole, **{reason.value: whole for reason in MissReason}}
    misses = pa.list_(pa.struct([*one.items(), ("state_at", whole)]))
    schema = pa.schema([*columns.items(), ("misses", misses)])

    def write(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row |= {reason.value: 0 for reason in MissReason}
            for miss in row["misses"]:
                row[miss["reason"]] += miss["tokens"]
        writer.write_table(pa.Table.from_pylist(rows, schema))

    with parquet.ParquetWriter(file, schema) as writer:
        yield write
