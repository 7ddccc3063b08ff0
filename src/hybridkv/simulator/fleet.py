"""Several replicas of one plan, and the router that chooses a replica for each request.

    round-robin     each replica in turn
    least-loaded    the replica with the fewest running and waiting requests
    affinity        the replica that got the last request whose whole prompt this one begins with, as if a session were
                    bound to its replica; without such a request, least-loaded
    prefix          the replica with the fewest tokens to run before the first token of the request: the request's
                    uncached tokens, and those of earlier requests without a first token; then least-loaded
    prefix:S        the same, with an index that knows the caches of S seconds ago
    raw:S           the same, with an index of raw events

``prefix`` looks up each request in every cache. ``prefix:S`` keeps an index of exact KV events, as routers outside of
an engine do; it does not know partial blocks. Raw events describe blocks of attention alone, so an index of them also
counts prefixes whose recurrent state is evicted.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from hybridkv.arguments import integer
from hybridkv.cache import BlockRemoved, BlockStored, KVCacheEvent
from hybridkv.errors import ConfigError
from hybridkv.observe.block_index import BlockIndex
from hybridkv.observe.prefixes import ExactEvents, without_resume_points
from hybridkv.planner import Plan
from hybridkv.request import Request
from hybridkv.simulator.loop import Progress, Replica, run_replicas, with_known_hits
from hybridkv.simulator.report import Distribution, GroupReport, ReplayReport
from hybridkv.simulator.setup import ReplaySettings, simulation_of
from hybridkv.simulator.trace import RequestSource, TraceSummary
from hybridkv.tiers import HostTierStatistics
from hybridkv.units import shown

ROUND_ROBIN: Final = "round-robin"
LEAST_LOADED: Final = "least-loaded"
AFFINITY: Final = "affinity"
PREFIX: Final = "prefix"
RAW: Final = "raw"
ROUTERS: Final = (ROUND_ROBIN, LEAST_LOADED, AFFINITY, PREFIX, f"{PREFIX}:SECONDS", f"{RAW}:SECONDS")
_MOST_DELAY_S: Final = 1e6
"""Largest delay of an index, in seconds: 11 days, longer than any trace needs. Chosen by hand."""


class Router(Protocol):
    """The policy that chooses a replica for each request.

    Attributes:
        events: whether the policy needs the KV events of the caches.
    """

    events: bool = False

    def choose(self, request: Request, replicas: Sequence[Replica], now_s: float) -> int:
        """Return the index of the replica for a request. O(replicas), and a lookup in each of them for ``prefix``.

        Args:
            request: the request that arrives.
            replicas: the replicas.
            now_s: time of its arrival, in seconds of the trace.
        """

    def heard(self, at: int, replica: Replica) -> None:
        """Note that a replica took steps. Policies that need events read them here.

        Args:
            at: index of the replica.
            replica: the replica.
        """


def router_named(name: str) -> Callable[[], Router]:
    """Return a function that makes a new router.

    Args:
        name: ``round-robin``, ``least-loaded``, ``affinity``, ``prefix``, or ``prefix:S`` or ``raw:S`` with a delay of
            S seconds, 0 to 1e6.

    Raises:
        ConfigError: for an unknown name, and for a delay out of range.
    """
    if name == ROUND_ROBIN:
        return _RoundRobin
    if name == LEAST_LOADED:
        return _LeastLoaded
    if name == AFFINITY:
        return _Affinity
    if name == PREFIX:
        return lambda: _PrefixAware(None)
    kind, _, seconds = name.partition(":")
    try:
        delay_s = float(seconds)
    except ValueError:
        kind, delay_s = "", math.nan
    if kind not in {PREFIX, RAW}:
        raise ConfigError(f"unknown router {shown(name)}: use one of {', '.join(ROUTERS)}, for example {PREFIX}:0.5")
    if not 0 <= delay_s <= _MOST_DELAY_S:
        raise ConfigError(
            f"the delay of router {shown(name)} must lie in 0 .. {_MOST_DELAY_S:.0f} seconds: use for example "
            f"{PREFIX}:0.5"
        )
    return lambda: _PrefixAware(_EventIndex(delay_s), exact=kind == PREFIX)


class _RoundRobin(Router):
    def __init__(self) -> None:
        self._chosen = 0

    def choose(self, _request: Request, replicas: Sequence[Replica], _now_s: float) -> int:
        self._chosen += 1
        return (self._chosen - 1) % len(replicas)


class _LeastLoaded(Router):
    def __init__(self) -> None:
        self._sent = Counter[int]()

    def choose(self, _request: Request, replicas: Sequence[Replica], _now_s: float) -> int:
        chosen = min(range(len(replicas)), key=lambda at: (len(replicas[at].live), self._sent[at], at))
        self._sent[chosen] += 1
        return chosen


class _Affinity(Router):
    """Keeps the requests of a session at one replica."""

    def __init__(self) -> None:
        self._least_loaded: Router = router_named(LEAST_LOADED)()
        self._replicas: dict[bytes, int] = {}  # by the hash of the last full block of a prompt

    def choose(self, request: Request, replicas: Sequence[Replica], now_s: float) -> int:
        found = (self._replicas[key] for key in reversed(request.hashes) if key in self._replicas)
        chosen = next(found, None)
        if chosen is None:
            chosen = self._least_loaded.choose(request, replicas, now_s)
        if request.hashes:
            self._replicas[request.hashes[-1]] = chosen
        return chosen


class _PrefixAware(Router):
    """The routers ``prefix``, ``prefix:S`` and ``raw:S``.

    ``index`` estimates hits, from ``exact`` or raw events. Without an index, the caches themselves are asked.
    """

    def __init__(self, index: _EventIndex | None, *, exact: bool = True) -> None:
        self._index, self._exact = index, exact
        self._filters: dict[int, Callable[[Sequence[KVCacheEvent]], list[KVCacheEvent]]] = {}
        self.events = index is not None
        self._sent = Counter[int]()
        self._pending: dict[int, dict[str, int]] = {}  # by replica: uncached tokens of requests without a first token

    def choose(self, request: Request, replicas: Sequence[Replica], now_s: float) -> int:
        costs = []
        for at, replica in enumerate(replicas):
            pending = self._pending.setdefault(at, {})
            for request_id in [one for one in pending if one not in replica.live or replica.live[one].has_begun]:
                del pending[request_id]
            known = self._known(request, at, replica, now_s)
            missing = request.num_prompt_tokens - known
            costs.append((missing + sum(pending.values()), len(replica.live), self._sent[at], at, missing))
        *_, chosen, missing = min(costs)
        self._pending[chosen][request.request_id] = missing
        self._sent[chosen] += 1
        return chosen

    def _known(self, request: Request, at: int, replica: Replica, now_s: float) -> int:
        """Return the estimated prompt tokens that replica ``at`` has in its cache."""
        if self._index is not None:
            return min(self._index.known_tokens(request, at, now_s), request.num_prompt_tokens - 1)
        cache = replica.scheduler.cache
        return cache.find_hit(request).tokens if cache.enable_caching else 0

    def heard(self, at: int, replica: Replica) -> None:
        if self._index is not None:
            cache = replica.scheduler.cache
            if at not in self._filters:
                self._filters[at] = ExactEvents(cache.config).filter if self._exact else without_resume_points
            self._index.add(at, self._filters[at](cache.take_events()), replica.clock.now_s)


class _EventIndex:
    """An index of the blocks of each replica, from KV events that arrive ``delay_s`` seconds late."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._arriving: dict[int, deque[tuple[float, KVCacheEvent]]] = {}
        self._indices: dict[int, BlockIndex] = {}

    def add(self, at: int, events: Sequence[KVCacheEvent], now_s: float) -> None:
        """Add the events that replica ``at`` published at ``now_s``."""
        self._arriving.setdefault(at, deque()).extend((now_s + self._delay_s, one) for one in events)

    def known_tokens(self, request: Request, at: int, now_s: float) -> int:
        """Return the leading tokens of ``request`` that the index has for replica ``at``, in the best of its groups."""
        arriving, index = self._arriving.get(at, deque()), self._indices.setdefault(at, BlockIndex())
        while arriving and arriving[0][0] <= now_s:
            match arriving.popleft()[1]:
                case BlockStored() as event:
                    index.store(event.group_idx, event.block_size, event.block_hashes)
                case BlockRemoved() as event:
                    index.remove(event.group_idx, event.block_hashes)
                case _:
                    index.clear()
        return index.known_tokens(request.hashes, 1 if request.hasher is None else request.hasher.block_size)


MOST_REPLICAS: Final = 1024
"""Most replicas of a replay; each has a cache manager in memory. Chosen by hand."""
_EACH: Final = ("requests", "prompt_tokens", "hit_tokens", "hit_rate", "preemptions")
"""Counts of each replica in a document."""
_ADDED: Final = (
    *("requests", "prompt_tokens", "output_tokens", "hit_tokens", "computed_tokens", "preemptions", "steps"),
    *("moves", "moved_bytes", "checkpoints", "declined_checkpoints", "missed_tokens", "missed_a_gib_more"),
)
"""Counts of the whole report that are sums over the replicas."""
_DEFAULT: Final = ReplaySettings()


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The report of several replicas.

    Attributes:
        router: name of the router.
        whole: report of all replicas together, without counts that belong to one cache (resume points, tenants).
        replicas: report of each replica.
        first_token_s: time to first token of each request in seconds, float64[requests], grouped by replica.
        per_token_s: time per output token of each request in seconds, float64[requests], in the same order; NaN for an
            output of one token.
    """

    router: str
    whole: ReplayReport
    replicas: tuple[ReplayReport, ...]
    first_token_s: array[float]
    per_token_s: array[float]

    def within(self, first_token_s: float, per_token_s: float) -> int:
        """Return the number of requests that meet both aims. O(requests).

        Args:
            first_token_s: limit of the time to first token, in seconds.
            per_token_s: limit of the mean time per later output token, in seconds.
        """
        pairs = zip(self.first_token_s, self.per_token_s, strict=True)
        return sum(first <= first_token_s and not later > per_token_s for first, later in pairs)

    def to_dict(self, settings: Mapping[str, object]) -> dict[str, object]:
        """Return the document of ``whole``. For several replicas it adds the router and the counts of each replica.

        Args:
            settings: settings to write into the document.
        """
        document = self.whole.to_dict(settings)
        if len(self.replicas) > 1:
            document["router"] = self.router
            document["replicas"] = [{name: getattr(one, name) for name in _EACH} for one in self.replicas]
        return document


def replay_replicas(
    source: RequestSource,
    plan: Plan,
    settings: ReplaySettings = _DEFAULT,
    *,
    replicas: int = 1,
    router: str = ROUND_ROBIN,
    summary: TraceSummary | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> FleetReport:
    """Replay a trace through several replicas; a router chooses one for each request.

    Args:
        source: the trace or workload.
        plan: the plan of each replica.
        settings: how each replica runs.
        replicas: number of replicas, 1 to 1024. One replica gives the report of ``replay``.
        router: name of the router, as ``router_named`` takes it.
        summary: counts of the trace from ``source.summary()``; ``None`` computes them.
        on_progress: called with the progress at most every 64 steps, and at the end.

    Raises:
        ConfigError: for settings that cannot work, an unknown router, and a request that can never fit.
        TraceError: for a malformed line.
    """
    count = integer("replicas", replicas, 1, MOST_REPLICAS)
    route = router_named(router)()
    first = simulation_of(plan, settings, events=route.events)
    hasher = first.scheduler.cache.hasher
    more = [simulation_of(plan, settings, hasher=hasher, events=route.events) for _ in range(count - 1)]
    runs = [one.replica() for one in (first, *more)]
    run_replicas(
        source,
        runs,
        lambda request, now_s: route.choose(request, runs, now_s),
        on_progress,
        lambda at: route.heard(at, runs[at]),
    )
    counted = source.summary() if summary is None else summary
    each = [run.report(source.name) for run in runs]
    firsts, laters = array("d"), array("d")
    for run in runs:
        firsts += run.first_token_s
        laters += run.per_token_s
    whole = each[0] if count == 1 else _together(runs, each, firsts, laters)
    reports = [with_known_hits(one, counted) for one in (whole, *each)]
    return FleetReport(router, replace(reports[0], bad_lines=counted.bad_lines), tuple(reports[1:]), firsts, laters)


def _together(
    runs: Sequence[Replica], each: Sequence[ReplayReport], firsts: Sequence[float], laters: Sequence[float]
) -> ReplayReport:
    """Merge the reports of several replicas: sums of counts, maxima of shares, and latencies of all requests."""
    added: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in _ADDED}
    steps = added["steps"]
    return replace(
        each[0],
        **added,
        longest_tokens=max(one.longest_tokens for one in each),
        peak_usage=max(one.peak_usage for one in each),
        mean_running=round(sum(run.row_steps for run in runs) / steps, 6) if steps else 0.0,
        simulated_s=max(one.simulated_s for one in each),
        time_to_first_token_s=Distribution.of(firsts),
        time_per_output_token_s=Distribution.of([one for one in laters if not math.isnan(one)]),
        groups=tuple(_group(same) for same in zip(*(one.groups for one in each), strict=True)),
        refusals=_counts([one.refusals for one in each]),
        misses=_counts([one.misses for one in each]),
        ends=(),
        tenants=(),
        host_tier=_tiers([one.host_tier for one in each]),
    )


def _tiers(each: Sequence[HostTierStatistics | None]) -> HostTierStatistics | None:
    """Return the sums of the counts of the replicas' host tiers; ``None`` without tiers."""
    given = [one for one in each if one is not None]
    names = HostTierStatistics.__dataclass_fields__
    return HostTierStatistics(**{name: sum(getattr(one, name) for one in given) for name in names}) if given else None


def _group(same: Sequence[GroupReport]) -> GroupReport:
    """Merge the reports of one group from all replicas."""
    names = ("published", "evictions", "cached_blocks", "copies")
    added: dict[str, Any] = {name: sum(getattr(one, name) for one in same) for name in names}
    return replace(same[0], **added)


def _counts(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of counts by name, sorted by name."""
    found = Counter[str]()
    for one in each:
        found.update(one)
    return dict(sorted(found.items()))
