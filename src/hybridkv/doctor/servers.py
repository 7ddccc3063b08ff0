"""Checks of a running server, which read its metrics alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from hybridkv.cache import MissReason
from hybridkv.doctor.findings import (
    BLOCKS,
    FOUND,
    LITTLE,
    MANY,
    SALTED,
    SALTS,
    STATES_FIT,
    STATES_READ,
    TIERS,
    Diagnosis,
    Finding,
    fine,
)
from hybridkv.units import format_bytes, format_count

_MUCH: Final = 0.1
"""Share of the prompt tokens from which a reason of misses is a problem; chosen by hand, as the limits below."""
_NEVER_HIT: Final = 0.9
"""Share of the evicted resume points that were never hit, from which they are a problem."""
_FEW_HITS: Final = 0.05
"""Hits per stored resume point, below which resume points are a problem."""
_ENOUGH_TOKENS: Final = 10_000
"""Fewer prompt tokens do not show whether the cache is hit."""


class Figures(Protocol):
    """The metrics of a server at one moment. Names have no prefix."""

    def of(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples of a metric, or ``None`` without a sample.

        Args:
            name: name of the metric.
            labels: values of labels that a sample must have.
        """

    def by(self, name: str, label: str) -> Mapping[str, float]:
        """Return the sum of the samples of a metric for each value of a label.

        Args:
            name: name of the metric.
            label: name of the label.
        """


def examine_server(subject: str, now: Figures) -> Diagnosis:
    """Check the metrics of a server.

    Args:
        subject: name of the server.
        now: its metrics.
    """
    looks = (_found(now), *_reasons(now), _ends(now), _server_room(now), *_tiers(now))
    return Diagnosis.of(subject, (one for one in looks if one is not None))


def _found(now: Figures) -> Finding | None:
    """Check whether any prompt hits the cache."""
    asked, found = now.of("prefix_cache_queries_total"), now.of("prefix_cache_hits_total")
    if not asked or found is None:
        return None
    figure = f"hit rate {found / asked:.2%} of {format_count(int(asked))} prompt tokens"
    if found or asked < _ENOUGH_TOKENS:
        return fine(FOUND, figure)
    why = (
        "start it with --explain to see the reasons; hybridkv doctor TRACE shows the possible hit rate of its traffic"
        if now.of("prompt_tokens_missed_total") is None
        else "see the reasons below"
    )
    return Finding(FOUND, "No prompt has ever hit the cache.", figure, why)


def _reasons(now: Figures) -> Iterator[Finding]:
    """Yield the check of each reason of misses, if the server explains misses."""
    missed, prompts = now.by("prompt_tokens_missed_total", "reason"), now.of("prefix_cache_queries_total")
    if not missed or not prompts:
        return
    for name, reason, said, remedy in (
        (
            BLOCKS,
            MissReason.BLOCK_EDGE,
            "Hits end at block boundaries, and many shared tokens follow the last boundary.",
            "plan with --layout natural, or a smaller --block-size",
        ),
        (SALTS, MissReason.OTHER_SALT, *SALTED),
    ):
        tokens = missed.get(reason, 0.0)
        figure = f"{tokens / prompts:.2%} of the prompt tokens missed for {reason.value.replace('_', ' ')}"
        yield Finding(name, said, figure, remedy) if tokens >= _MUCH * prompts else fine(name, figure)


def _ends(now: Figures) -> Finding | None:
    """Check whether resume points are hit."""
    made, hits = now.of("kv_ends_stored_total"), now.of("kv_end_hits_total")
    gone, unused = now.of("kv_ends_evicted_total"), now.of("kv_ends_evicted_unused_total")
    if made is None or hits is None or gone is None or unused is None:
        return None
    figure = f"{format_count(int(made))} resume points stored, {format_count(int(hits))} hits of them"
    if gone:
        figure += f"; {unused / gone:.2%} of the evicted ones were never hit"
    if gone < MANY or unused < _NEVER_HIT * gone or hits >= _FEW_HITS * made:
        return fine(STATES_READ, figure)
    said = "States and blocks are kept for prompts that never come back."
    remedy = "--placement ends if an interval is set; otherwise prompts share little, or memory is too small"
    return Finding(STATES_READ, said, figure, remedy)


def _server_room(now: Figures) -> Finding | None:
    """Check whether the memory has states for hits while requests wait for memory."""
    held = now.of("kv_group_blocks", kind="state", state="held")
    free = now.of("kv_group_blocks", kind="state", state="evictable")
    if held is None or free is None:
        return None
    waits = now.of("num_requests_waiting_by_reason", reason="no_space") or 0.0
    figure = (
        f"{format_count(int(held))} blocks of states held by requests, {format_count(int(free))} kept for hits, "
        f"{format_count(int(waits))} requests wait for memory"
    )
    if free or not (waits and held):
        return fine(STATES_FIT, figure)
    said = "Memory holds states for fewer requests than could run: no state is kept for hits."
    return Finding(STATES_FIT, said, figure, "more memory, or fewer requests at once (--max-running)")


def _tiers(now: Figures) -> Iterator[Finding]:
    """Yield the checks of each tier behind the cache; without a tier, whether one would help."""
    tiers = now.by("kv_offload_tiering_read_bytes_total", "tier")
    if not tiers:
        yield from _without_tiers(now)
    for tier in tiers:
        troubles = [found for check in _TIER_CHECKS if (found := check(_TierFigures(tier, now))) is not None]
        yield from troubles or [fine(f"tier_{tier}", _TierFigures(tier, now).said)]


def _without_tiers(now: Figures) -> Iterator[Finding]:
    """Check whether prompts come back after the device has evicted them, if the server explains misses."""
    missed, prompts = now.by("prompt_tokens_missed_total", "reason"), now.of("prefix_cache_queries_total")
    if not missed or not prompts:
        return
    tokens = missed.get(MissReason.EVICTED, 0.0)
    figure = f"{tokens / prompts:.2%} of the prompt tokens missed because they were evicted"
    if tokens < _MUCH * prompts:
        yield fine(TIERS, figure)
        return
    said = "Prompts come back after the cache has evicted them, and nothing below the device keeps them."
    yield Finding(TIERS, said, figure, "--host-memory SIZE, with more than --memory; or more --memory")


@dataclass(frozen=True, slots=True)
class _TierFigures:
    """The metrics of the tier with the name ``tier``, among all metrics ``now``."""

    tier: str
    now: Figures

    def of(self, name: str) -> float:
        """Return a metric of the tier, 0 if the server has none."""
        return self.now.of(f"kv_offload_tiering_{name}", tier=self.tier) or 0.0

    @property
    def said(self) -> str:
        """What the tier did, in words."""
        loads, stores = (format_count(int(self.of(f"{one}_jobs_total"))) for one in ("promotion", "cascade"))
        hits = format_count(int(self.of("hit_tokens_total")))
        return f"{self.tier}: {stores} resume points stored, {loads} prefixes loaded, {hits} tokens hit after a load"

    def finding(self, what: str, said: str, figure: str, remedy: str) -> Finding:
        """Return a problem of the tier. what: the check."""
        return Finding(f"{what}_of_tier_{self.tier}", said, figure, remedy)


def _tier_size(figures: _TierFigures) -> Finding | None:
    """Check whether the tier holds more than the device, whose blocks it has too."""
    device, tier = figures.now.of("kv_cache_capacity_bytes"), figures.of("capacity_bytes")
    if not device or not tier or tier > device:
        return None
    said = f"The tier {figures.tier} is no larger than the device, and keeps what the device keeps too."
    figure = f"{format_bytes(int(tier))} behind {format_bytes(int(device))} on the device"
    return figures.finding(
        "size", said, figure, f"more of it than the device has, such as {format_bytes(int(4 * device))}"
    )


def _tier_loads(figures: _TierFigures) -> Finding | None:
    """Check whether the device has room for loads."""
    refused, loads = figures.of("promotion_allocation_failures_total"), figures.of("promotion_jobs_total")
    figure = f"{format_count(int(refused))} attempts to load found no room, {format_count(int(loads))} prefixes loaded"
    if refused < MANY or refused < loads:
        return None
    said = f"The device has no room for prefixes from the tier {figures.tier}, so their tokens wait or are computed."
    return figures.finding("loads", said, figure, "more --memory, or fewer requests at once (--max-running)")


def _tier_stores(figures: _TierFigures) -> Finding | None:
    """Check whether the tier has room for stores."""
    dropped, stores = figures.of("backpressure_stores_dropped_total"), figures.of("cascade_jobs_total")
    if dropped < _FEW or dropped < _MUCH * (dropped + stores):
        return None
    figure = f"{format_count(int(dropped))} of {format_count(int(dropped + stores))} stores dropped"
    said = f"The tier {figures.tier} has no room for what it should keep."
    return figures.finding("stores", said, figure, "a larger tier (--host-memory for CPU), or shorter prompts")


def _tier_failures(figures: _TierFigures) -> Finding | None:
    """Check whether transfers arrive."""
    lost = [figures.of(f"{one}_job_failures_total") for one in ("promotion", "cascade")]
    done = sum(figures.of(f"{one}_jobs_total") for one in ("promotion", "cascade"))
    if sum(lost) < LITTLE * (done + sum(lost)) or not sum(lost):
        return None
    figure = f"{format_count(int(lost[0]))} loads and {format_count(int(lost[1]))} stores lost, "
    figure += f"{format_count(int(done))} transfers arrived"
    said = f"Transfers of the tier {figures.tier} fail, and their tokens are computed again."
    return figures.finding(
        "failures", said, figure, "read the server's log, which names the cause of each lost transfer"
    )


def _tier_use(figures: _TierFigures) -> Finding | None:
    """Check whether anything that goes down comes up again."""
    stores, loads = figures.of("cascade_jobs_total"), figures.of("promotion_jobs_total")
    if stores < MANY or loads >= LITTLE * stores or figures.of("promotion_allocation_failures_total"):
        return None
    said = f"Prefixes go down to the tier {figures.tier} and hardly ever come up."
    remedy = "leave the tier out: prompts do not return, or are still on the device"
    return figures.finding("use", said, figures.said, remedy)


_TIER_CHECKS: Final = (_tier_size, _tier_loads, _tier_stores, _tier_failures, _tier_use)
_FEW: Final = 10
"""Fewer dropped stores are no problem; chosen by hand."""
