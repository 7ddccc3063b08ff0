"""Several replicas of one plan behind a router: the price, and the worth, of routing."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hybridkv.arguments import integer
from hybridkv.planner import Plan
from hybridkv.simulator.loop import Progress, Replica, run_replicas, told_of
from hybridkv.simulator.report import Distribution, GroupReport, ReplayReport
from hybridkv.simulator.routing import ROUND_ROBIN, router_named
from hybridkv.simulator.setup import ReplaySettings, simulation_of
from hybridkv.simulator.trace import RequestSource, TraceSummary

MOST_REPLICAS: Final = 1024
_EACH: Final = ("requests", "prompt_tokens", "hit_tokens", "hit_rate", "preemptions")
"""Of each replica, in documents."""
_ADDED: Final = (
    *("requests", "prompt_tokens", "output_tokens", "hit_tokens", "computed_tokens", "preemptions", "steps"),
    *("moves", "moved_bytes", "checkpoints", "declined_checkpoints", "missed_tokens", "missed_a_gib_more"),
)
_DEFAULT: Final = ReplaySettings()


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What came of several replicas.

    whole: of all together, but for what is told of single caches (ends, tenants). replicas: each by itself.
    first_token_s, per_token_s: float64, of each request, NaN for an output of one token.
    """

    router: str
    whole: ReplayReport
    replicas: tuple[ReplayReport, ...]
    first_token_s: array[float]
    per_token_s: array[float]

    def within(self, first_token_s: float, per_token_s: float) -> int:
        """Requests whose first token, and each of the others in the mean, came within these seconds."""
        pairs = zip(self.first_token_s, self.per_token_s, strict=True)
        return sum(first <= first_token_s and not later > per_token_s for first, later in pairs)

    def to_dict(self, settings: Mapping[str, object]) -> dict[str, object]:
        """The document of a replay; of several replicas also the router, and what each found."""
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
    """``source`` through ``replicas`` caches and schedulers of ``plan``; ``router`` chooses for each request.

    One replica is replay. Errors as there, and ConfigError for a router that nobody knows.
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
    each = [replace(run.report(source.name), caching_off=first.caching_off, machine=first.machine) for run in runs]
    firsts, laters = array("d"), array("d")
    for run in runs:
        firsts += run.first_token_s
        laters += run.per_token_s
    whole = each[0] if count == 1 else _together(runs, each, firsts, laters)
    reports = [told_of(one, counted) for one in (whole, *each)]
    return FleetReport(router, replace(reports[0], bad_lines=counted.bad_lines), tuple(reports[1:]), firsts, laters)


def _together(
    runs: Sequence[Replica], each: Sequence[ReplayReport], firsts: Sequence[float], laters: Sequence[float]
) -> ReplayReport:
    """Counts added up, shares at most, latencies of all requests."""
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
    )


def _group(same: Sequence[GroupReport]) -> GroupReport:
    published, evictions, cached, copies = (
        sum(getattr(one, name) for one in same) for name in ("published", "evictions", "cached_blocks", "copies")
    )
    return replace(same[0], published=published, evictions=evictions, cached_blocks=cached, copies=copies)


def _counts(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    found = Counter[str]()
    for one in each:
        found.update(one)
    return dict(sorted(found.items()))
