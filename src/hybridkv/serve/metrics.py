"""What is told of an engine: counts for Prometheus, by the names that dashboards of vLLM know; the page's samples.

    statistics(), asked for when a client looks -> Snapshot -> families        nothing of it is on a step's path
    answers, as the event loop sees them come   -> RequestMetrics -> tallies -> families

Names begin with a prefix of ours; with ``vllm`` for one, they are those of vLLM where both count the same.

Samples for the page are made only while a client listens. Neither prompts nor salts are in one, and its length has a
bound, however many requests there are.

    listener --- latest(), once a second ---> Live ---> between two steps: Look ---> JSON
    listener --- latest() ------------------>  '--- the same one, where it is fresh
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from hybridkv.cache import EDGES_S, CacheStatistics, MissReason
from hybridkv.errors import CacheError, ConfigError
from hybridkv.observe.block_map import BlockMap, block_map
from hybridkv.runner.async_engine import AsyncEngine
from hybridkv.runner.completion import Completion
from hybridkv.runner.engine import Engine
from hybridkv.schedule import SchedulerStatistics, WaitReason
from hybridkv.units import shown

PREFIX: Final = "hybridkv"
EVERY_S: Final = 1.0
"""Seconds between two samples of a listener."""
MOST_CELLS: Final = 2048
"""Cells of the map of memory."""
MOST_REQUESTS: Final = 40
"""Requests that run, and as many that wait, that are told one by one."""
MOST_ENDED: Final = 20
"""Of requests that ended a moment ago: those that took longest."""
_FRESH: Final = 0.8
_ENDED_FOR_S: Final = 5.0  # a listener that skips a sample sees them in the next
_REMEMBERED: Final = 2000
_STATES: Final = " cpr"
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_MODEL: Final = "model_name"
_SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of labels, and the number."""
_TOKENS: Final = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


def metrics_prefix(name: str, value: object) -> str:
    """Check ``value`` as the beginning of names. ConfigError if Prometheus takes no such name."""
    if not isinstance(value, str) or not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", value):
        raise ConfigError(f"{name} must be letters, digits and underscores, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an engine at one moment.

    kinds: what each of the plan's groups keeps; sizes: bytes of its blocks. explains: whether misses have reasons.
    waits: how many requests wait, by reason.
    """

    scheduler: SchedulerStatistics
    cache: CacheStatistics
    usage: float
    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    explains: bool
    waits: Mapping[WaitReason, int]

    @classmethod
    def of(cls, engine: Engine) -> Snapshot:
        """Look at ``engine``, in its own thread. O(blocks + waiting * log waiting)."""
        config, cache = engine.plan.config, engine.cache
        kinds = tuple(str(one.spec.keeps) for one in config.groups)
        sizes = tuple(config.block_bytes_of(number) for number in range(len(kinds)))
        waits = Counts(one.reason for one in engine.scheduler.waits())
        return cls(engine.statistics(), cache.statistics(), cache.usage, kinds, sizes, cache.misses is not None, waits)


class Families:
    """Makes families of one server: their names have its prefix, their samples its model's name.

    samples: a number, or values of ``labels`` and the number, one by one.
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self.prefix, self.model_name = prefix, model_name

    def gauge(self, name: str, said: str, samples: float | Samples, *labels: str) -> Metric:
        """Return a gauge."""
        return self._filled(GaugeMetricFamily, name, said, samples, labels)

    def counter(self, name: str, said: str, samples: float | Samples, *labels: str) -> Metric:
        """Return a counter."""
        return self._filled(CounterMetricFamily, name, said, samples, labels)

    def histogram(self, name: str, said: str, edges: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        """Return a histogram. counts: of each bucket, which an edge ends; the last has no end. total: of all values."""
        made = HistogramMetricFamily(f"{self.prefix}:{name}", said, labels=[_MODEL])
        ends = [*map(floatToGoString, edges), "+Inf"]
        made.add_metric([self.model_name], list(zip(ends, map(float, accumulate(counts)), strict=True)), total)
        return made

    def _filled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        said: str,
        samples: float | Samples,
        labels: Sequence[str],
    ) -> Metric:
        family = kind(f"{self.prefix}:{name}", said, labels=[_MODEL, *labels])
        for values, number in [((), samples)] if isinstance(samples, int | float) else samples:
            family.add_metric([self.model_name, *values], number)
        return family


class Tally:
    """A histogram of one thread. Prometheus's client has one for several, whose locks cost more than a bin does.

    edges: end a bucket each, and are in it; one more has all above.
    """

    def __init__(self, name: str, said: str, edges: Sequence[float]) -> None:
        self._name, self._said, self._edges = name, said, edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` so many times. O(log edges)."""
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def family(self, families: Families) -> Metric:
        """Return the histogram as Prometheus reads it."""
        return families.histogram(self._name, self._said, self._edges, self._counts, self._sum)


class RequestMetrics:
    """Counts of the requests of one server, as the event loop saw them.

    heard: told of each that ends, when it was asked for, when its output began, and when it ended (monotonic clock).
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self.families = Families(prefix, model_name)
        self.heard: Callable[[Completion, float, float, float], object] | None = None
        self.output_tokens = 0
        self.first_token = Tally("time_to_first_token_seconds", "Until the first token.", _SECONDS)
        self.next_token = Tally("inter_token_latency_seconds", "Between an output's tokens.", _SECONDS)
        self._per_token = Tally(
            "request_time_per_output_token_seconds", "Of a request: behind its first token, a token.", _SECONDS
        )
        self._queued = Tally("request_queue_time_seconds", "Until it first ran.", _SECONDS)
        self._whole = Tally("e2e_request_latency_seconds", "Until its end.", _SECONDS)
        self._prompt = Tally("request_prompt_tokens", "Of its prompt.", _TOKENS)
        self._output = Tally("request_generation_tokens", "Of its output.", _TOKENS)
        self._ended = Counts[str]()

    def ended(self, done: Completion, begun: float, first: float) -> None:
        """Count an output that ended. begun, first: when it was asked for and began to come, on the monotonic clock."""
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
        """Give all families."""
        times = self.first_token, self.next_token, self._per_token, self._queued, self._whole
        for one in (*times, self._prompt, self._output):
            yield one.family(self.families)
        yield self.families.counter("generation_tokens", "Output tokens.", self.output_tokens)
        ended = (((reason,), count) for reason, count in self._ended.items())
        yield self.families.counter("request_success", "Requests that ended.", ended, "finished_reason")


class Watch:
    """Times of one output as it comes. begun: when it was asked for, on the monotonic clock."""

    def __init__(self, metrics: RequestMetrics, begun: float) -> None:
        self._metrics, self._begun = metrics, begun
        self._first = self._last = 0.0

    def came(self, tokens: int, done: Completion | None) -> None:
        """Count so many tokens, and maybe the end."""
        now = time.monotonic()
        if tokens and not self._first:
            self._first = now
            self._metrics.first_token.add(now - self._begun)
        elif tokens:
            # those that came at once, as accepted drafts do, share the time
            self._metrics.next_token.add((now - self._last) / tokens, tokens)
        self._last = now
        self._metrics.output_tokens += tokens
        if done is not None:
            self._metrics.ended(done, self._begun, self._first or now)


class SnapshotCollector:
    """The families of ``snapshot``, and of ``requests``."""

    def __init__(self, snapshot: Snapshot, requests: RequestMetrics) -> None:
        self._now, self._requests, self._made = snapshot, requests, requests.families

    def collect(self) -> Iterator[Metric]:
        """Give all families."""
        yield from self._requests.collect()
        yield from self._scheduler(self._now.scheduler)
        yield from self._cache(self._now.cache)

    def _scheduler(self, now: SchedulerStatistics) -> Iterator[Metric]:
        made = self._made
        yield made.gauge("num_requests_running", "Requests that run.", now.running)
        yield made.gauge("num_requests_waiting", "Requests that wait.", now.waiting)
        waits = (((reason,), self._now.waits.get(reason, 0)) for reason in WaitReason)
        yield made.gauge("num_requests_waiting_by_reason", "Requests that wait, by what for.", waits, "reason")
        for name, said, value in (
            ("prompt_tokens", "Prompt tokens of requests that came in.", now.prompt_tokens),
            ("prompt_tokens_cached", "Those of them found in the cache.", now.hit_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.hit_tokens),
            ("requests_finished", "Requests that ended, aborted ones among them.", now.requests_finished),
            ("num_preemptions", "Requests that gave their blocks back and wait again.", now.preemptions),
            ("spec_decode_num_draft_tokens", "Drafts that the model verified.", now.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that it accepted.", now.accepted_tokens),
            ("computed_tokens", "Tokens that ran, those computed again included.", now.computed_tokens),
            ("engine_steps", "Steps scheduled.", now.steps),
            ("engine_failed_steps", "Steps that brought no result.", now.failed_steps),
        ):
            yield made.counter(name, said, value)
        sources = [(("local_compute",), now.prompt_tokens - now.hit_tokens), (("local_cache_hit",), now.hit_tokens)]
        accepted = (((str(place),), value) for place, value in enumerate(now.accepted_by_position))
        refused = (((reason,), value) for reason, value in now.refusals.items())
        for name, said, samples, label in (
            ("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place.", accepted, "position"),
            ("admission_refusals", "Looks at a waiting request that did not come in.", refused, "reason"),
            ("prompt_tokens_by_source", "Prompt tokens, computed here or found.", sources, "source"),
        ):
            yield made.counter(name, said, samples, label)
        if self._now.explains:
            missed = (((reason,), now.misses.get(reason, 0)) for reason in MissReason)
            yield made.counter("prompt_tokens_missed", "Prompt tokens not found, by reason.", missed, "reason")

    def _cache(self, now: CacheStatistics) -> Iterator[Metric]:
        made, kinds = self._made, self._now.kinds
        yield made.gauge("kv_cache_usage_perc", "Share of the cache that requests hold, 0 to 1.", self._now.usage)
        yield made.gauge("kv_cache_peak_usage_perc", "The most of it so far.", self._now.scheduler.peak_usage)
        yield made.gauge("kv_cache_pinned_blocks", "Blocks held by pins.", now.pinned_blocks)
        groups = [((str(number), kind), now.groups[number]) for number, kind in enumerate(kinds)]
        blocks = [
            ((*group, state), getattr(one, f"{state}_blocks"))
            for group, one in groups
            for state in ("held", "cached", "evictable")
        ]
        yield made.gauge("kv_group_blocks", "Blocks of a group: see docs.", blocks, "group", "kind", "state")
        sizes = [(group, size) for (group, _), size in zip(groups, self._now.sizes, strict=True)]
        yield made.gauge("kv_group_block_bytes", "Of one block of a group.", sizes, "group", "kind")
        for name, said in (
            ("published", "Keys given to blocks of a group."),
            ("evictions", "Keys that a group's blocks lost."),
        ):
            counts = [(group, getattr(one, name)) for group, one in groups]
            yield made.counter(f"kv_group_{name}", said, counts, "group", "kind")
        yield made.counter("kv_moved_blocks", "Blocks that passed from slab to slab.", now.moved_blocks)
        if now.ends:  # some eviction ranks them
            yield from self._kept_ends(now)
        if now.times is not None:
            for name, said, times in (
                ("lifetime", "From a block's first key until it lost its keys.", now.times.lifetime),
                ("idle_before_evict", "From its last hit, or first key, until then.", now.times.idle),
                ("reuse_gap", "Between two hits of a block.", now.times.gap),
            ):
                yield made.histogram(f"kv_block_{name}_seconds", said, EDGES_S, times.counts, times.sum_s)

    def _kept_ends(self, now: CacheStatistics) -> Iterator[Metric]:
        """Where prompts can be resumed, by kind."""
        kept = (((one.kind,), one.kept) for one in now.ends)
        yield self._made.gauge("kv_ends", "Ends kept now: where prompts can be resumed.", kept, "kind")
        for name, said, field in (
            ("kv_ends_stored", "Ends that were kept.", "made"),
            ("kv_end_hits", "Hits of kept ends.", "hits"),
            ("kv_end_misses", "Prompts that ends given up would have been hit by.", "missed"),
            ("kv_ends_declined", "Ends not kept for want of worth.", "declined"),
            ("kv_ends_evicted", "Ends given up.", "given_up"),
            ("kv_ends_evicted_unused", "Those never hit.", "unused"),
        ):
            counts = (((one.kind,), getattr(one, field)) for one in now.ends)
            yield self._made.counter(name, said, counts, "kind")


# samples for the page


class Look(NamedTuple):
    """At an engine, in its own thread: values alone, as requests go on while they are told.

    told: what the page reads of them. cell_bytes: of the smallest block.
    """

    told: dict[str, Any]
    blocks: BlockMap
    num_blocks: int
    arena_bytes: int
    cell_bytes: int


class _Ended(NamedTuple):
    """A request that ended at ``at``. told: what the page reads of it, but for its id and how long ago that is."""

    id: str
    at: float
    whole_s: float
    told: list[float]


class Ages:
    """Since when each block has been in its state, as far as anybody looked; 9 bytes a block once somebody did."""

    def __init__(self) -> None:
        self._states = np.zeros(0, np.uint8)
        self._since = np.zeros(0)

    def of(self, blocks: BlockMap, num_blocks: int, now: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds of each of ``blocks``, float64[n]. O(num_blocks)."""
        if len(self._states) != num_blocks:
            self._states, self._since = np.zeros(num_blocks, np.uint8), np.full(num_blocks, now)
        states = np.zeros_like(self._states)
        states[blocks.blocks] = blocks.states
        self._since[states != self._states] = now
        self._states = states
        ages: np.ndarray[Any, np.dtype[np.float64]] = now - self._since[blocks.blocks]
        return ages


class Live:
    """Samples of ``engine`` for those who listen. samples: made so far; listeners: now."""

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
        """A sample a second, for one listener, until it is ``over`` or the engine ends."""
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
        """The newest sample, made anew unless it is fresh: JSON in at most some ten thousand bytes."""
        async with self._lock:
            if not self._latest or time.monotonic() - self._made_at > _FRESH * EVERY_S:
                look = await self._engine.between_steps(_look)
                self._made_at = time.monotonic()
                self.samples += 1
                self._latest = json.dumps(self._told(look), separators=(",", ":"), allow_nan=False).encode()
            return self._latest

    def _told(self, look: Look) -> dict[str, Any]:
        """``look`` as the page reads it."""
        ended = [one for one in self._ended if self._made_at - one.at < _ENDED_FOR_S]
        slowest = sorted(ended, key=lambda one: -one.whole_s)[:MOST_ENDED]
        return {
            "time": round(time.time(), 3),
            "model": self._metrics.families.model_name,
            "output": self._metrics.output_tokens,
            **look.told,
            "map": self._map(look),
            "slowest": [[one.id, round(self._made_at - one.at, 4), *one.told] for one in slowest],
        }

    def _map(self, look: Look) -> dict[str, str]:
        """A letter a cell of equal bytes, for the block in its middle: state, group, and age, twice as much a digit."""
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


def _look(engine: Engine) -> Look:
    """In the engine's thread. O(num_blocks)."""
    cache, scheduler, snapshot = engine.cache, engine.scheduler, Snapshot.of(engine)
    now, arena_bytes = snapshot.scheduler, cache.config.arena_bytes
    told = {
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
    return Look(told, blocks, cache.block_pool.num_blocks, arena_bytes, min(snapshot.sizes))
