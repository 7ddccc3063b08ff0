"""Metrics of an engine: counts for Prometheus, with the names that vLLM's dashboards use; and samples of the page.

    statistics(), read when a client asks       -> Snapshot -> families        not on the path of a step
    answers, as they pass the event loop        -> RequestMetrics -> tallies -> families

Names begin with a prefix of this library. With the prefix ``vllm`` they are vLLM's where both count the same.

Samples for the page are made only while a client listens. They contain no prompts and no salts, and their length has a
bound, however many requests there are.

    listener --- latest(), once a second ---> Live ---> between two steps: Look ---> JSON
    listener --- latest() ------------------>  '--- the same sample, while it is fresh
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from prometheus_client.core import Metric

from hybridkv.cache import EDGES_S, CacheStatistics, MissReason
from hybridkv.errors import CacheError, ConfigError
from hybridkv.observe.block_map import BlockMap, block_map
from hybridkv.runner.async_engine import AsyncEngine
from hybridkv.runner.completion import Completion
from hybridkv.runner.engine import Engine
from hybridkv.schedule import SchedulerStatistics, WaitReason
from hybridkv.serve.families import Families
from hybridkv.serve.tiers import TierSnapshot, cached_by_source, tier_families, tiers_of
from hybridkv.units import shown

PREFIX: Final = "hybridkv"
EVERY_S: Final = 1.0
"""Seconds between two samples of a listener."""
MOST_CELLS: Final = 2048
"""Cells of the map of memory."""
MOST_REQUESTS: Final = 40
"""Running requests in a sample, and as many waiting ones."""
MOST_ENDED: Final = 20
"""Requests in a sample that ended within _ENDED_FOR_S seconds and took longest."""
LATENCY_S: Final = 10.0
"""The latencies of a sample are those of requests that ended within as many seconds."""
_FRESH: Final = 0.8
_ENDED_FOR_S: Final = 5.0  # a listener that skips a sample sees them in the next
_REMEMBERED: Final = 2000
_STATES: Final = " cpr"
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKENS: Final = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


def metrics_prefix(name: str, value: object) -> str:
    """Check ``value`` as the prefix of names. ConfigError if Prometheus does not allow it."""
    if not isinstance(value, str) or not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", value):
        raise ConfigError(f"{name} must be letters, digits and underscores, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an engine at one moment.

    Attributes:
        scheduler: the scheduler's counts.
        cache: the cache's counts.
        usage: the share of the cache that requests hold, 0 to 1.
        kinds: for each group, what it keeps.
        sizes: for each group, bytes of a block.
        explains: whether misses have reasons.
        waits: how many requests wait, by reason.
        capacity_bytes: bytes of the cache's memory.
        tiers: the tiers behind the cache.
    """

    scheduler: SchedulerStatistics
    cache: CacheStatistics
    usage: float
    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    explains: bool
    waits: Mapping[WaitReason, int]
    capacity_bytes: int
    tiers: tuple[TierSnapshot, ...]

    @classmethod
    def of(cls, engine: Engine) -> Snapshot:
        """Read ``engine``, in its own thread. O(blocks + waiting * log waiting)."""
        config, cache = engine.plan.config, engine.cache
        kinds = tuple(str(one.spec.keeps) for one in config.groups)
        sizes = tuple(config.block_bytes_of(number) for number in range(len(kinds)))
        waits = Counts(one.reason for one in engine.scheduler.waits())
        explains, counts = cache.misses is not None, (engine.statistics(), cache.statistics(), cache.usage)
        return cls(*counts, kinds, sizes, explains, waits, config.arena_bytes, tiers_of(engine))


class Tally:
    """A histogram for one thread. Prometheus' client has one with locks, which cost more than counting.

    Bucket i includes ``edges[i]``, and one more bucket has all larger values.
    """

    def __init__(self, name: str, said: str, edges: Sequence[float]) -> None:
        self._name, self._said, self._edges = name, said, edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times. O(log edges)."""
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def family(self, families: Families) -> Metric:
        """Return the histogram as a Prometheus family."""
        return families.histogram(self._name, self._said, self._edges, [((), self._counts, self._sum)])


class RequestMetrics:
    """Counts of the requests of one server, as the event loop sees them.

    Attributes:
        heard: called for each output that ends, with the times of its request, first token and end (monotonic clock).
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self.families = Families(prefix, model_name)
        self.heard: Callable[[Completion, float, float, float], object] | None = None
        self.output_tokens = 0
        self.first_token = Tally("time_to_first_token_seconds", "Time to first token.", _SECONDS)
        self.next_token = Tally("inter_token_latency_seconds", "Time between two tokens of an output.", _SECONDS)
        self._per_token = Tally(
            "request_time_per_output_token_seconds", "Time per output token after the first.", _SECONDS
        )
        self._queued = Tally("request_queue_time_seconds", "Time until a request first ran.", _SECONDS)
        self._whole = Tally("e2e_request_latency_seconds", "Time until the end of an output.", _SECONDS)
        self._prompt = Tally("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output = Tally("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._ended = Counts[str]()

    def ended(self, done: Completion, begun: float, first: float) -> None:
        """Count an output that ended. ``begun``, ``first``: times of its request and first token (monotonic clock)."""
        now, tokens = time.monotonic(), len(done.token_ids)
        self._whole.add(now - begun)
        self._queued.add(done.queue_seconds)
        self._prompt.add(len(done.prompt_token_ids))
        self._output.add(tokens)
        if tokens > 1:
            self._per_token.add((now - first) / (tokens - 1))
        self._ended[str(done.finish_reason)] += 1
        if self.heard is not None:
            self.heard(done, begun, first, now)

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        times = self.first_token, self.next_token, self._per_token, self._queued, self._whole
        for one in (*times, self._prompt, self._output):
            yield one.family(self.families)
        yield self.families.counter("generation_tokens", "Output tokens.", self.output_tokens)
        ended = (((reason,), count) for reason, count in self._ended.items())
        yield self.families.counter("request_success", "Requests that ended.", ended, "finished_reason")


class Watch:
    """Measures one output as it arrives; ``begun`` is the time of its request on the monotonic clock."""

    def __init__(self, metrics: RequestMetrics, begun: float) -> None:
        self._metrics, self._begun = metrics, begun
        self._first = self._last = 0.0

    def came(self, tokens: int, done: Completion | None) -> None:
        """Count new tokens, and the end if ``done`` is given."""
        now = time.monotonic()
        if tokens and not self._first:
            self._first = now
            self._metrics.first_token.add(now - self._begun)
        elif tokens:
            # tokens that arrive together, such as accepted drafts, share the time
            self._metrics.next_token.add((now - self._last) / tokens, tokens)
        self._last = now
        self._metrics.output_tokens += tokens
        if done is not None:
            self._metrics.ended(done, self._begun, self._first or now)


class SnapshotCollector:
    """The families of ``snapshot`` and of ``requests``."""

    def __init__(self, snapshot: Snapshot, requests: RequestMetrics) -> None:
        self._now, self._requests, self._made = snapshot, requests, requests.families

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._requests.collect()
        yield from self._scheduler(self._now.scheduler)
        yield from self._cache(self._now.cache)
        if self._now.tiers:
            yield from tier_families(self._made, self._now.tiers)

    def _scheduler(self, now: SchedulerStatistics) -> Iterator[Metric]:
        made = self._made
        yield made.gauge("num_requests_running", "Running requests.", now.running)
        yield made.gauge("num_requests_waiting", "Waiting requests.", now.waiting)
        waits = (((reason,), self._now.waits.get(reason, 0)) for reason in WaitReason)
        yield made.gauge("num_requests_waiting_by_reason", "Waiting requests, by reason.", waits, "reason")
        for name, said, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests.", now.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens of admitted requests that hit the cache.", now.hit_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens that hit the prefix cache.", now.hit_tokens),
            ("requests_finished", "Requests that ended, aborted ones included.", now.requests_finished),
            ("num_preemptions", "Preemptions: requests that lost their blocks and wait again.", now.preemptions),
            ("spec_decode_num_draft_tokens", "Drafts that the model verified.", now.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that the model accepted.", now.accepted_tokens),
            ("computed_tokens", "Computed tokens, recomputed ones included.", now.computed_tokens),
            ("engine_steps", "Steps scheduled.", now.steps),
            ("engine_failed_steps", "Steps that failed.", now.failed_steps),
        ):
            yield made.counter(name, said, value)
        sources = [(("local_compute",), now.prompt_tokens - now.hit_tokens), (("local_cache_hit",), now.hit_tokens)]
        accepted = (((str(place),), value) for place, value in enumerate(now.accepted_by_position))
        refused = (((reason,), value) for reason, value in now.refusals.items())
        for name, said, samples, label in (
            ("spec_decode_num_accepted_tokens_per_pos", "Accepted drafts, by position.", accepted, "position"),
            ("admission_refusals", "Attempts to admit a waiting request that failed, by reason.", refused, "reason"),
            ("prompt_tokens_by_source", "Prompt tokens, by source: computed here or a cache hit.", sources, "source"),
        ):
            yield made.counter(name, said, samples, label)
        yield cached_by_source(made, now.hit_tokens, self._now.tiers)
        if self._now.explains:
            missed = (((reason,), now.misses.get(reason, 0)) for reason in MissReason)
            yield made.counter(
                "prompt_tokens_missed", "Prompt tokens that missed the cache, by reason.", missed, "reason"
            )

    def _cache(self, now: CacheStatistics) -> Iterator[Metric]:
        made, kinds = self._made, self._now.kinds
        yield made.gauge("kv_cache_usage_perc", "Share of the cache that requests hold, 0 to 1.", self._now.usage)
        yield made.gauge(
            "kv_cache_peak_usage_perc",
            "The largest share of the cache that requests held.",
            self._now.scheduler.peak_usage,
        )
        yield made.gauge("kv_cache_capacity_bytes", "Bytes of the cache's memory.", self._now.capacity_bytes)
        yield made.gauge("kv_cache_pinned_blocks", "Pinned blocks.", now.pinned_blocks)
        groups = [((str(number), kind), now.groups[number]) for number, kind in enumerate(kinds)]
        blocks = [
            ((*group, state), getattr(one, f"{state}_blocks"))
            for group, one in groups
            for state in ("held", "cached", "evictable", "partial")
        ]
        yield made.gauge(
            "kv_group_blocks", "Blocks of a group, by state (docs/metrics.md).", blocks, "group", "kind", "state"
        )
        sizes = [(group, size) for (group, _), size in zip(groups, self._now.sizes, strict=True)]
        yield made.gauge("kv_group_block_bytes", "Bytes of a block of a group.", sizes, "group", "kind")
        for name, said in (
            ("published", "Keys published for blocks of a group."),
            ("evictions", "Evictions: keys that blocks of a group lost."),
        ):
            counts = [(group, getattr(one, name)) for group, one in groups]
            yield made.counter(f"kv_group_{name}", said, counts, "group", "kind")
        yield made.counter("kv_moved_blocks", "Blocks that moved from slab to slab.", now.moved_blocks)
        if now.ends:  # only some eviction policies count them
            yield from self._kept_ends(now)
        if now.times is not None:
            for name, said, times in (
                ("lifetime", "Time from a block's first key to its eviction.", now.times.lifetime),
                ("idle_before_evict", "Time from a block's last hit, or first key, to its eviction.", now.times.idle),
                ("reuse_gap", "Time between two hits of a block.", now.times.gap),
            ):
                samples = [((), times.counts, times.sum_s)]
                yield made.histogram(f"kv_block_{name}_seconds", said, EDGES_S, samples)

    def _kept_ends(self, now: CacheStatistics) -> Iterator[Metric]:
        """Yield the counts of resume points, by kind."""
        kept = (((one.kind,), one.kept) for one in now.ends)
        yield self._made.gauge("kv_ends", "Resume points that are kept now.", kept, "kind")
        for name, said, field in (
            ("kv_ends_stored", "Resume points that were stored.", "made"),
            ("kv_end_hits", "Hits of resume points.", "hits"),
            ("kv_end_misses", "Prompts that an evicted resume point would have served.", "missed"),
            ("kv_ends_declined", "Resume points that were not stored, for their low value.", "declined"),
            ("kv_ends_evicted", "Evicted resume points.", "given_up"),
            ("kv_ends_evicted_unused", "Evicted resume points that were never hit.", "unused"),
        ):
            counts = (((one.kind,), getattr(one, field)) for one in now.ends)
            yield self._made.counter(name, said, counts, "kind")


# samples for the page


class Look(NamedTuple):
    """A look at an engine, in its own thread. It holds values only, because requests continue while it is reported.

    Attributes:
        fields: the fields of a sample.
        blocks: the map of memory.
        num_blocks: of the pool.
        arena_bytes: of the memory.
        cell_bytes: of the smallest block.
    """

    fields: dict[str, Any]
    blocks: BlockMap
    num_blocks: int
    arena_bytes: int
    cell_bytes: int


class _Ended(NamedTuple):
    """A request that ended at ``at``; ``fields`` has the fields of its sample after the id and the time since then."""

    id: str
    at: float
    whole_s: float
    fields: list[float]


class Ages:
    """How long each block has been in its state, as far as it was observed; 9 bytes a block once a client listens."""

    def __init__(self) -> None:
        self._states = np.zeros(0, np.uint8)
        self._since = np.zeros(0)

    def of(self, blocks: BlockMap, num_blocks: int, now: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the seconds of each of ``blocks``, float64[n]. O(num_blocks)."""
        if len(self._states) != num_blocks:
            self._states, self._since = np.zeros(num_blocks, np.uint8), np.full(num_blocks, now)
        states = np.zeros_like(self._states)
        states[blocks.blocks] = blocks.states
        self._since[states != self._states] = now
        self._states = states
        ages: np.ndarray[Any, np.dtype[np.float64]] = now - self._since[blocks.blocks]
        return ages


class Live:
    """Samples of ``engine`` for listeners.

    Attributes:
        samples: how many were made.
        listeners: clients that listen.
    """

    def __init__(self, engine: AsyncEngine, metrics: RequestMetrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._ages = Ages()
        self._ended: deque[_Ended] = deque(maxlen=_REMEMBERED)
        self._lock = asyncio.Lock()
        self._latest, self._made_at = b"", 0.0
        self.listeners = self.samples = 0
        metrics.heard = self._hear

    def _hear(self, done: Completion, begun: float, first: float, now: float) -> None:
        if self.listeners:
            times = (round(one, 4) for one in (done.queue_seconds, first - begun, now - begun))
            counts = len(done.prompt_token_ids), done.hit_tokens, len(done.token_ids), done.preemptions
            self._ended.append(_Ended(done.request_id, now, now - begun, [*times, *counts]))

    async def events(self, over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield a sample every second, for one listener, until ``over`` returns true or the engine ends."""
        self.listeners += 1
        try:
            while not over():
                yield b"data: " + await self.latest() + b"\n\n"
                await asyncio.sleep(EVERY_S)
        except CacheError:  # of an engine that was closed
            return
        finally:
            self.listeners -= 1
            if not self.listeners:
                self._ended.clear()
                self._ages = Ages()

    async def latest(self) -> bytes:
        """Return the newest sample, at most about ten thousand bytes of JSON. Make a new one unless it is fresh."""
        async with self._lock:
            if not self._latest or time.monotonic() - self._made_at > _FRESH * EVERY_S:
                look = await self._engine.between_steps(_look)
                self._made_at = time.monotonic()
                self.samples += 1
                self._latest = json.dumps(self._sample(look), separators=(",", ":"), allow_nan=False).encode()
            return self._latest

    def _sample(self, look: Look) -> dict[str, Any]:
        """Return ``look`` with the fields that the page reads."""
        recent = [one for one in self._ended if self._made_at - one.at < LATENCY_S]
        ended = [one for one in recent if self._made_at - one.at < _ENDED_FOR_S]
        slowest = sorted(ended, key=lambda one: -one.whole_s)[:MOST_ENDED]
        times = [(one.fields[1], one.whole_s - one.fields[1], one.fields[5]) for one in recent]
        return {
            "time": round(time.time(), 3),
            "model": self._metrics.families.model_name,
            "output": self._metrics.output_tokens,
            "ttft": _percentiles([first for first, _, _ in times]),
            "tpot": _percentiles([later / (tokens - 1) for _, later, tokens in times if tokens > 1]),
            **look.fields,
            "map": self._map(look),
            "slowest": [[one.id, round(self._made_at - one.at, 4), *one.fields] for one in slowest],
        }

    def _map(self, look: Look) -> dict[str, str]:
        """Return state, group and age of the block in the middle of each cell, one character a cell.

        Cells have equal bytes. Age digit d stands for 2 ** d - 1 seconds or more.
        """
        blocks, cells = look.blocks, min(MOST_CELLS, max(look.arena_bytes // max(look.cell_bytes, 1), 1))
        middles = ((np.arange(cells) + 0.5) * (look.arena_bytes / cells)).astype(np.int64)
        there = blocks.at(middles)
        ages = self._ages.of(blocks, look.num_blocks, self._made_at)
        if not len(ages):
            return {"states": " " * cells, "groups": "0" * cells, "ages": "0" * cells}
        digits = np.log2(ages + 1).astype(np.int64).clip(0, 9)[there]
        digits[there < 0] = 0
        states = np.where(there < 0, 0, blocks.states[there])
        groups = np.where(there < 0, 0, blocks.groups[there].clip(0, len(_DIGITS) - 1))
        return {
            "states": "".join(_STATES[one] for one in states.tolist()),
            "groups": "".join(_DIGITS[one] for one in groups.tolist()),
            "ages": "".join(map(str, digits.tolist())),
        }


def _percentiles(seconds: Sequence[float]) -> list[float] | None:
    """Return the nearest-rank 50th and 99th percentile; ``None`` without values. O(n log n)."""
    if not seconds:
        return None
    return [round(float(one), 6) for one in np.percentile(seconds, (50, 99), method="inverted_cdf")]


def _look(engine: Engine) -> Look:
    """Look at the engine, in its thread. O(num_blocks)."""
    cache, scheduler, snapshot = engine.cache, engine.scheduler, Snapshot.of(engine)
    now, arena_bytes = snapshot.scheduler, cache.config.arena_bytes
    fields = {
        "running": now.running,
        "waiting": now.waiting,
        "waits": {str(reason): count for reason, count in snapshot.waits.items()},
        "seats": engine.options.max_running,
        "usage": snapshot.usage,
        "queries": now.prompt_tokens,
        "hits": now.hit_tokens,
        "misses": {str(one): now.misses.get(one, 0) for one in MissReason} if snapshot.explains else None,
        "preemptions": now.preemptions,
        "evictions": snapshot.cache.evictions,
        "ended": now.requests_finished,
        "arena": arena_bytes,
        "groups": [
            [kind, size, one.held_blocks, one.cached_blocks, one.evictable_blocks, one.published, one.evictions]
            for kind, size, one in zip(snapshot.kinds, snapshot.sizes, snapshot.cache.groups, strict=True)
        ],
        "tiers": [one.in_sample() for one in snapshot.tiers],
        "runs": [
            [
                *(one.request_id, one.num_prompt_tokens, one.first_hit_tokens or 0),
                *(one.num_computed_tokens, one.num_output_tokens, one.num_preemptions),
            ]
            for one in scheduler.running_requests()[:MOST_REQUESTS]
        ],
        "queue": [
            [one.request.request_id, one.request.num_tokens, str(one.reason)]
            for one in scheduler.waits()[:MOST_REQUESTS]
        ],
    }
    blocks = block_map(cache.config, cache.block_pool, cache.groups, cache.pins)
    return Look(fields, blocks, cache.block_pool.num_blocks, arena_bytes, min(snapshot.sizes))
