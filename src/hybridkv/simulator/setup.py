"""Build a replay from a plan and settings: the longest request, then cache manager, scheduler, cost model and loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from hybridkv.arguments import check_fields, integer, one_of, or_none
from hybridkv.cache import CacheOptions, KVCacheManager, placement_named, placement_of
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.eviction import EVERYBODY, TenantShares, eviction_named, eviction_of
from hybridkv.models import Model
from hybridkv.planner import Plan, plan
from hybridkv.planner.plan import ALIGN, DEFAULT_LAYOUT, NATURAL, NO_STATES
from hybridkv.request import Hasher
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.schedule.limits import short_share
from hybridkv.simulator.cost import StepCost
from hybridkv.simulator.hardware import BF16, H100, Hardware, machine_in_words, too_large, weights_named
from hybridkv.simulator.loop import Progress, SimulatedClock, Simulation
from hybridkv.simulator.outputs import Speculation
from hybridkv.simulator.report import ReplayReport
from hybridkv.simulator.tiers import DISK_BYTES_PER_S, TierMemory, require_few_blocks, require_tier_memory, transfers_of
from hybridkv.simulator.trace import RequestSource, TraceSummary
from hybridkv.units import MOST_COUNT, format_bytes, format_count, shown

TOKEN_BUDGET: Final = 8192
MOST_RUNNING: Final = 1 << 20
"""Most requests that may run at once: each is a row of preallocated arrays. Chosen by hand."""
MOST_TIME_SCALE: Final = 1e6
"""Largest factor of durations: with larger ones, sums of seconds lose precision. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a replay runs.

    Attributes:
        max_running: most requests that run at once.
        token_budget: most tokens of a step.
        time_scale: factor of the modelled durations; 0: steps take no time.
        prefix_caching: whether requests share cached prefixes.
        hardware: the machine of one rank.
        weights: format of the weights, a name of ``hardware.WEIGHT_BYTES``.
        placement: natural layout: name of the policy that chooses checkpoint positions; ``None``: the plan's.
        eviction: name of the eviction policy; ``None``: the plan's default.
        prefix_match_unit: reference layout of models with recurrent states: hits may also end inside a block, at
            multiples of so many tokens, as with vLLM's option; a divisor of the block. ``None``: at blocks only.
        step_by_step: take each step by itself, without fast-forward; the report is the same.
        shares: natural layout: the tenants' shares of the cached bytes.
        remembered_losses: number of evicted keys to remember for explanations of misses; 0: misses are not explained.
        block_times: measure how long blocks live, stay unused, and wait between hits; a Recording needs this.
        speculation: drafts of decoding requests, or ``None``. The plan's model must have room for them
            (num_speculative_tokens), and no step is fast-forwarded.
        short_share: share of a step's tokens that short requests take first, as in ``SchedulerLimits``; ``None``: the
            default of the layout.
        host_memory: evictions by value: bytes of one rank's host memory that keep resume points, or a size like
            ``"40GiB"``; ``None``: no host tier. Its rate is that of ``hardware``.
        disk_memory: bytes of one rank's disk behind the host memory, or a size; ``None``: no disk.
        disk_bytes_per_s: rate of the disk, in bytes per second for reads and for writes.

    Raises:
        ConfigError: for values out of range.
    """

    max_running: int = 256
    token_budget: int = TOKEN_BUDGET
    time_scale: float = 1.0
    prefix_caching: bool = True
    hardware: Hardware = H100
    weights: str = BF16
    placement: str | None = None
    eviction: str | None = None
    prefix_match_unit: int | None = None
    step_by_step: bool = False
    shares: TenantShares = EVERYBODY
    remembered_losses: int = 0
    block_times: bool = False
    speculation: Speculation | None = None
    short_share: float | None = None
    host_memory: str | int | None = None
    disk_memory: str | int | None = None
    disk_bytes_per_s: float = DISK_BYTES_PER_S

    def __post_init__(self) -> None:
        if self.eviction is not None:
            eviction_named(self.eviction)
        check_fields(self, one_of(TenantShares), "shares")
        check_fields(self, one_of(Hardware), "hardware")
        check_fields(self, or_none(one_of(Speculation)), "speculation")
        check_fields(self, or_none(short_share), "short_share")
        weights_named(self.weights)
        require_tier_memory(self.host_memory, self.disk_memory, self.disk_bytes_per_s)
        check_fields(self, partial(integer, least=0, most=MOST_COUNT), "remembered_losses")
        for name, most in (("max_running", MOST_RUNNING), ("token_budget", MOST_COUNT)):
            integer(f"{name} (--{name.replace('_', '-')})", getattr(self, name), 1, most)
        if self.prefix_match_unit is not None:
            integer("prefix_match_unit (--prefix-match-unit)", self.prefix_match_unit, 1, MOST_COUNT)
        if not 0 <= self.time_scale < float("inf"):
            raise ConfigError(f"time_scale (--time-scale) must be 0 or more and finite, got {self.time_scale}")
        if self.time_scale > MOST_TIME_SCALE:
            raise ConfigError(
                f"time_scale (--time-scale) must be at most {MOST_TIME_SCALE:g}, got {self.time_scale}: the "
                "seconds of longer steps lose precision"
            )


def require_placement(name: str | None, layout: str) -> None:
    """Check that a layout has a placement.

    Args:
        name: name of a placement; ``None``: the default of the layout.
        layout: name of a layout.

    Raises:
        ConfigError: for a placement that the layout does not have.
    """
    if layout == NATURAL:
        if name is not None:
            placement_named(name, align_tokens=1)  # checks the name; the real alignment comes from the plan
    elif name not in {None, ALIGN, NO_STATES}:
        raise ConfigError(
            f"the reference layout has no placement {shown(name)}: choose {ALIGN} or {NO_STATES}, or --layout {NATURAL}"
        )


def plan_for_trace(
    summary: TraceSummary,
    model: Model,
    memory: int | str,
    max_model_len: int | None = None,
    *,
    placement: str | None = None,
    windows_as_full: bool = False,
    layout: str = DEFAULT_LAYOUT,
    dcp: int = 1,
    pcp: int = 1,
    token_budget: int = TOKEN_BUDGET,
) -> Plan:
    """Make a plan for the requests of a trace. It ignores the model's own length limit, because a replay runs no model.

    Args:
        summary: counts of the trace, from ``source.summary()``.
        model: the model, from read_model.
        memory: cache memory of one rank, in bytes or as text with a unit, for example ``40GiB``.
        max_model_len: most tokens of a request; ``None``: the tokens of the longest request.
        placement: name of the placement; ``None``: the default of the layout.
        windows_as_full: whether layers with a window keep all tokens.
        layout: cache layout, ``natural`` or ``reference``.
        dcp: ranks of decode context parallelism.
        pcp: ranks of prefill context parallelism.
        token_budget: most tokens of a step; windows and chunks need room for them.

    Raises:
        ConfigError: if max_model_len is below the longest request.
        CapacityError: if the memory is too small for one request.
    """
    longest = _maximum(summary, max_model_len)
    try:
        return plan(
            replace(model, max_model_len=longest),
            memory,
            max_model_len=longest,
            max_batched_tokens=token_budget,
            placement=placement,
            windows_as_full=windows_as_full,
            layout=layout,
            dcp=dcp,
            pcp=pcp,
        )
    except CapacityError as error:
        if max_model_len is not None:
            raise
        needed = str(error).partition(", or lower")[0]
        raise CapacityError(f"{needed} (the longest request, {summary.longest_at}, sets the maximum length)") from None


def plan_with_length(
    summary: TraceSummary, plan: Plan, max_model_len: int | None = None, *, token_budget: int = TOKEN_BUDGET
) -> Plan:
    """Return a plan with another maximum length; its blocks stay the same.

    Args:
        summary: counts of the trace, from ``source.summary()``.
        plan: the plan to change.
        max_model_len: most tokens of a request; ``None``: the tokens of the longest request.
        token_budget: most tokens of a step; windows and chunks need room for them.

    Raises:
        ConfigError: if max_model_len is below the longest request.
        CapacityError: if the plan's blocks do not hold one request of the maximum length.
    """
    longest = _maximum(summary, max_model_len)
    changed = replace(
        plan,
        model=replace(plan.model, max_model_len=longest),
        limits=replace(plan.limits, max_model_len=longest, max_in_flight_tokens=token_budget),
    )
    fit = changed.capacity.tokens_that_fit
    if fit is not None and fit < longest:
        unit = plan.config.unit
        raise CapacityError(
            f"the plan's {format_count(plan.config.num_blocks)} {unit}s ({format_bytes(plan.memory_bytes)}) hold one "
            f"request of {format_count(fit)} tokens, but the maximum length is {format_count(longest)} "
            f"(the longest request has {format_count(summary.longest_tokens)}, {summary.longest_at}): "
            "make the plan with more memory"
        )
    return changed


def _maximum(summary: TraceSummary, max_model_len: int | None) -> int:
    """Return the maximum length of a request in tokens; it must not be below the longest request."""
    if max_model_len is None:
        return summary.longest_tokens
    if max_model_len < summary.longest_tokens:
        raise ConfigError(
            f"max_model_len {max_model_len} is below the {summary.longest_tokens} tokens of the longest request "
            f"({summary.longest_at}): raise it (--max-model-len), or leave it out"
        )
    return max_model_len


def simulation_of(
    plan: Plan, settings: ReplaySettings, *, hasher: Hasher | None = None, events: bool = False
) -> Simulation:
    """Build a manager, a scheduler and a cost model for ``plan``.

    Args:
        plan: the plan of model and cache.
        settings: how the replay runs.
        hasher: the hasher of block keys; simulations that serve requests of one router share it. ``None`` makes one.
        events: whether the manager records KV events.

    Raises:
        ConfigError: for settings that cannot work. With a time_scale above 0, this includes a machine that does not
            hold the weights and the cache.
    """
    cost = StepCost.of(plan, hardware=settings.hardware, time_scale=settings.time_scale, weights=settings.weights)
    if settings.time_scale:
        reason = too_large(plan.model, plan.memory_bytes, settings.hardware, settings.weights)
        if reason is not None:
            raise ConfigError(reason)
    require_few_blocks(plan, "memory (--memory)")
    speculation = settings.speculation
    limits = SchedulerLimits(
        max_running=settings.max_running,
        max_batched_tokens=settings.token_budget,
        num_speculative_tokens=0 if speculation is None else speculation.drafts,
        short_share=settings.short_share,
    )
    clock = SimulatedClock()
    options = CacheOptions(
        placement=placement_of(plan, settings.placement),
        eviction=eviction_of(plan, settings.eviction),
        hit_unit=settings.prefix_match_unit,
        shares=settings.shares,
        remembered_losses=settings.remembered_losses,
        block_times=settings.block_times,
        log_resume_points=settings.host_memory is not None,
        clock=clock,
    )
    cache = KVCacheManager(
        plan.config,
        plan.max_model_len,
        enable_caching=settings.prefix_caching,
        dcp_world_size=plan.limits.dcp,
        pcp_world_size=plan.limits.pcp,
        hasher=hasher,
        enable_kv_cache_events=events,
        options=options,
    )
    off = None if cache.enable_caching else _why_off(plan, settings)
    transfers = None
    if settings.host_memory is not None:
        if off is not None:
            raise ConfigError(
                f"host_memory (--host-memory) has no effect, as prefix caching is off ({off}): leave it out"
            )
        memory = TierMemory(settings.host_memory, settings.disk_memory, settings.disk_bytes_per_s)
        transfers = transfers_of(memory, plan, cache, options, cost=cost, token_budget=settings.token_budget)
    scheduler = Scheduler(cache, limits, clock=clock, tier=None if transfers is None else transfers.tier)
    encoder_tokens = plan.limits.max_encoder_tokens
    machine = machine_in_words(plan, settings.hardware, settings.weights, settings.time_scale)
    return Simulation(
        scheduler, cost, clock, encoder_tokens, off, settings.step_by_step, speculation, machine, transfers
    )


def _why_off(plan: Plan, settings: ReplaySettings) -> str:
    """Return the reason why prefix caching is off."""
    if not settings.prefix_caching:
        return "as asked for"
    if NO_STATES in {plan.placement, settings.placement}:
        return f"placement {NO_STATES} keeps no state to resume from"
    return "the layers of this model cannot be resumed in this layout"


def replay(
    source: RequestSource,
    plan: Plan,
    settings: ReplaySettings = ReplaySettings(),
    *,
    summary: TraceSummary | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ReplayReport:
    """Run all requests of a trace through a new scheduler and cache manager with modelled time.

    Args:
        source: the trace or workload.
        plan: the plan of model and cache, for example from ``plan_for_trace``.
        settings: how the replay runs.
        summary: counts of the trace from ``source.summary()``; ``None`` computes them.
        on_progress: called with the progress at most every 64 steps, and at the end.

    Returns:
        The report. Equal arguments give equal reports.

    Raises:
        ConfigError: for settings that cannot work, and for a request that can never fit.
        TraceError: for a malformed line.
    """
    return simulation_of(plan, settings).run(source, summary=summary, on_progress=on_progress)
