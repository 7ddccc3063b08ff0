"""Counts of an engine as Prometheus reads them, under the names that dashboards of vLLM know.

    statistics(), asked for when somebody looks -> Snapshot -> families        nothing of it is on a step's path
    answers, as the event loop sees them come   -> RequestMetrics -> tallies -> families

Names begin with a prefix of ours; with ``vllm`` for one, they are those of vLLM where both count the same.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from hybridkv.cache import EDGES_S, MissReason
from hybridkv.cache.statistics import CacheStatistics
from hybridkv.errors import ConfigError
from hybridkv.runner.completion import Completion
from hybridkv.runner.engine import Engine
from hybridkv.schedule import SchedulerStatistics, WaitReason
from hybridkv.units import shown

PREFIX: Final = "hybridkv"
_MODEL: Final = "model_name"
_SECONDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKENS: Final = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


def metrics_prefix(name: str, value: object) -> str:
    """``value`` as the beginning of names. ConfigError for what Prometheus takes for none."""
    if not isinstance(value, str) or not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", value):
        raise ConfigError(f"{name} must be letters, digits and underscores, got {shown(value)}")
    return value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an engine says of itself at one moment. kinds: what each of the plan's groups keeps; sizes: of its blocks.

    explains: whether misses have reasons. waits: how many wait, by reason.
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
        """Of now, in the engine's own thread. O(blocks + waiting * log waiting)."""
        config, cache = engine.plan.config, engine.cache
        kinds = tuple(str(one.spec.keeps) for one in config.groups)
        sizes = tuple(config.block_bytes_of(number) for number in range(len(kinds)))
        waits = Counts(one.reason for one in engine.scheduler.waits())
        return cls(engine.statistics(), cache.statistics(), cache.usage, kinds, sizes, cache.explains, waits)


class Tally:
    """A histogram of one thread. Prometheus's client has one for several, whose locks cost more than a bin does.

    edges: end a bucket each, and are in it; one more has all above.
    """

    def __init__(self, name: str, said: str, edges: Sequence[float]) -> None:
        self._name, self._said, self._edges = name, said, edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """``value``, so many times. O(log edges)."""
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def family(self, model_name: str) -> Metric:
        """As Prometheus reads it."""
        made = HistogramMetricFamily(self._name, self._said, labels=[_MODEL])
        made.add_metric([model_name], _buckets(self._edges, self._counts), self._sum)
        return made


class RequestMetrics:
    """What came of requests, as the event loop saw it: of one server.

    heard: told of each that ends, when it was asked for, when its output began, and when it ended (monotonic clock).
    """

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix, self.model_name = prefix, model_name
        self.heard: Callable[[Completion, float, float, float], object] | None = None
        self.output_tokens = 0
        self._tallies: list[Tally] = []
        self.first_token = self._tally("time_to_first_token_seconds", "Until the first token.", _SECONDS)
        self.next_token = self._tally("inter_token_latency_seconds", "Between an output's tokens.", _SECONDS)
        self._per_token = self._tally(
            "request_time_per_output_token_seconds", "Of a request: behind its first token, a token.", _SECONDS
        )
        self._queued = self._tally("request_queue_time_seconds", "Until it first ran.", _SECONDS)
        self._whole = self._tally("e2e_request_latency_seconds", "Until its end.", _SECONDS)
        self._prompt = self._tally("request_prompt_tokens", "Of its prompt.", _TOKENS)
        self._output = self._tally("request_generation_tokens", "Of its output.", _TOKENS)
        self._ended = Counts[str]()

    def _tally(self, name: str, said: str, edges: Sequence[float]) -> Tally:
        self._tallies.append(Tally(f"{self._prefix}:{name}", said, edges))
        return self._tallies[-1]

    def ended(self, done: Completion, begun: float, first: float) -> None:
        """An output has ended. begun, first: when it was asked for and began to come, on the monotonic clock."""
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

    def families(self) -> Iterator[Metric]:
        """All of it."""
        for one in self._tallies:
            yield one.family(self.model_name)
        tokens = CounterMetricFamily(f"{self._prefix}:generation_tokens", "Output tokens.", labels=[_MODEL])
        tokens.add_metric([self.model_name], self.output_tokens)
        yield tokens
        ended = CounterMetricFamily(
            f"{self._prefix}:request_success", "Requests that ended.", labels=[_MODEL, "finished_reason"]
        )
        for reason, count in self._ended.items():
            ended.add_metric([self.model_name, reason], count)
        yield ended


class Watch:
    """Times of one output as it comes. begun: when it was asked for, on the monotonic clock."""

    def __init__(self, metrics: RequestMetrics, begun: float) -> None:
        self._metrics, self._begun = metrics, begun
        self._first = self._last = 0.0

    def came(self, tokens: int, done: Completion | None) -> None:
        """So many tokens, and maybe the end."""
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
    """``snapshot`` as families, and with them what came of requests."""

    def __init__(self, snapshot: Snapshot, requests: RequestMetrics, prefix: str, model_name: str) -> None:
        self._snapshot, self._requests = snapshot, requests
        self._prefix, self._model_name = prefix, model_name

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        now = self._snapshot
        yield from self._requests.families()
        yield from self._gauges(now)
        yield from self._counters(now.scheduler)
        yield from self._groups(now)
        yield from self._kept_ends(now.cache)
        yield from self._misses(now)
        yield from self._times(now.cache)

    def _gauge(self, name: str, said: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}:{name}", said, labels=[_MODEL, *labels])

    def _counter(self, name: str, said: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"{self._prefix}:{name}", said, labels=[_MODEL, *labels])

    def _gauges(self, now: Snapshot) -> Iterator[Metric]:
        for name, said, value in (
            ("num_requests_running", "Requests that run.", now.scheduler.running),
            ("num_requests_waiting", "Requests that wait.", now.scheduler.waiting),
            ("kv_cache_usage_perc", "Share of the cache that requests hold, 0 to 1.", now.usage),
            ("kv_cache_peak_usage_perc", "The most of it so far.", now.scheduler.peak_usage),
            ("kv_cache_pinned_blocks", "Blocks held by pins.", now.cache.pinned_blocks),
        ):
            gauge = self._gauge(name, said)
            gauge.add_metric([self._model_name], value)
            yield gauge
        waits = self._gauge("num_requests_waiting_by_reason", "Requests that wait, by what for.", "reason")
        for reason in WaitReason:
            waits.add_metric([self._model_name, reason], now.waits.get(reason, 0))
        yield waits

    def _counters(self, now: SchedulerStatistics) -> Iterator[Metric]:
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
            counter = self._counter(name, said)
            counter.add_metric([self._model_name], value)
            yield counter
        accepted = self._counter("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place.", "position")
        for position, value in enumerate(now.accepted_by_position):
            accepted.add_metric([self._model_name, str(position)], value)
        yield accepted
        refused = self._counter("admission_refusals", "Looks at a waiting request that did not come in.", "reason")
        for reason, value in now.refusals.items():
            refused.add_metric([self._model_name, reason], value)
        yield refused
        sources = self._counter("prompt_tokens_by_source", "Prompt tokens, computed here or found.", "source")
        sources.add_metric([self._model_name, "local_compute"], now.prompt_tokens - now.hit_tokens)
        sources.add_metric([self._model_name, "local_cache_hit"], now.hit_tokens)
        yield sources

    def _groups(self, now: Snapshot) -> Iterator[Metric]:
        blocks = self._gauge("kv_group_blocks", "Blocks of a group: see docs.", "group", "kind", "state")
        size = self._gauge("kv_group_block_bytes", "Of one block of a group.", "group", "kind")
        published = self._counter("kv_group_published", "Keys given to blocks of a group.", "group", "kind")
        evicted = self._counter("kv_group_evictions", "Keys that a group's blocks lost.", "group", "kind")
        for number, (group, kind) in enumerate(zip(now.cache.groups, now.kinds, strict=True)):
            labels = [self._model_name, str(number), kind]
            blocks.add_metric([*labels, "held"], group.held_blocks)
            blocks.add_metric([*labels, "cached"], group.cached_blocks)
            blocks.add_metric([*labels, "evictable"], group.evictable_blocks)
            size.add_metric(labels, now.sizes[number])
            published.add_metric(labels, group.published)
            evicted.add_metric(labels, group.evictions)
        yield from (blocks, size, published, evicted)
        moved = self._counter("kv_moved_blocks", "Blocks that passed from slab to slab.")
        moved.add_metric([self._model_name], now.cache.moved_blocks)
        yield moved

    def _kept_ends(self, now: CacheStatistics) -> Iterator[Metric]:
        """Where prompts can be resumed, by kind; nothing where no eviction ranks them."""
        kept = self._gauge("kv_ends", "Ends kept now: where prompts can be resumed.", "kind")
        if not now.ends:
            return
        for one in now.ends:
            kept.add_metric([self._model_name, one.kind], one.kept)
        yield kept
        for name, said, counts in (
            ("kv_ends_stored", "Ends that were kept.", [one.made for one in now.ends]),
            ("kv_end_hits", "Hits of kept ends.", [one.hits for one in now.ends]),
            ("kv_end_misses", "Prompts that ends given up would have been hit by.", [one.missed for one in now.ends]),
            ("kv_ends_declined", "Ends not kept for want of worth.", [one.declined for one in now.ends]),
            ("kv_ends_evicted", "Ends given up.", [one.given_up for one in now.ends]),
            ("kv_ends_evicted_unused", "Those never hit.", [one.unused for one in now.ends]),
        ):
            counter = self._counter(name, said, "kind")
            for one, value in zip(now.ends, counts, strict=True):
                counter.add_metric([self._model_name, one.kind], value)
            yield counter

    def _misses(self, now: Snapshot) -> Iterator[Metric]:
        """Prompt tokens not found, by reason, where misses are explained."""
        if now.explains:
            missed = self._counter("prompt_tokens_missed", "Prompt tokens not found, by reason.", "reason")
            for reason in MissReason:
                missed.add_metric([self._model_name, reason], now.scheduler.misses.get(reason, 0))
            yield missed

    def _times(self, now: CacheStatistics) -> Iterator[Metric]:
        """Of blocks, where they are counted."""
        if now.times is None:
            return
        for name, said, counts in (
            ("kv_block_lifetime_seconds", "From a block's first key until it lost its keys.", now.times.lifetime),
            ("kv_block_idle_before_evict_seconds", "From its last hit, or first key, until then.", now.times.idle),
            ("kv_block_reuse_gap_seconds", "Between two hits of a block.", now.times.gap),
        ):
            family = HistogramMetricFamily(f"{self._prefix}:{name}", said, labels=[_MODEL])
            family.add_metric([self._model_name], _buckets(EDGES_S, counts.counts), counts.sum_s)
            yield family


def _buckets(edges: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Name and all up to its end, of each bucket, as Prometheus has them."""
    names = [*map(floatToGoString, edges), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
