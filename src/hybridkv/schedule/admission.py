"""Who may come in: whether a request can run at all, and whether it fits now."""

from __future__ import annotations

import logging
from collections.abc import Collection

from hybridkv.cache import Admission, CommonHit, KVCacheManager, Refusal, SlotPlan
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.request import Request
from hybridkv.schedule.chunks import Chunks, Split
from hybridkv.schedule.limits import SchedulerLimits
from hybridkv.schedule.split import AlignSplit, StopSplit
from hybridkv.schedule.waiting import Waiting
from hybridkv.specs import RequestLimits
from hybridkv.units import format_bytes

logger = logging.getLogger(__name__)


def limit_tokens(cache: KVCacheManager, request: Request) -> int:
    """Most tokens that ``request`` may have, prompt and output."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, cache.max_model_len)


def most_of(cache: KVCacheManager, limits: SchedulerLimits, request: Request, tokens: int) -> RequestLimits:
    """What bounds the blocks of ``request`` while it computes ``tokens`` tokens, room for drafts included."""
    return RequestLimits(
        max_model_len=max(min(tokens + limits.num_lookahead_tokens, cache.max_model_len), 1),
        max_in_flight_tokens=(limits.max_batched_tokens + limits.num_lookahead_tokens) * limits.max_in_flight,
        dcp=cache.dcp_world_size,
        pcp=cache.pcp_world_size,
        max_encoder_tokens=request.num_encoder_tokens,
    )


def admission_of(cache: KVCacheManager, limits: SchedulerLimits, request: Request, *, alone: bool) -> Admission:
    """All known tokens of ``request`` must fit, and the watermark besides unless it is ``alone``."""
    reserve = 0 if alone else int(limits.watermark * cache.usable_blocks)
    return Admission(most_of(cache, limits, request, request.num_tokens), limits.max_in_flight, reserve)


def refuse_impossible(cache: KVCacheManager, limits: SchedulerLimits, request: Request) -> None:
    """ConfigError or CapacityError for a request that could not run even alone."""
    cache.refuse_stranger(request)
    if request.num_encoder_tokens and not cache.reads_encoder:
        raise ConfigError(f"request {request.request_id!r} has an encoder input, but the model has no cross attention")
    if request.row >= 0 or request.num_computed_tokens:
        raise ConfigError(f"request {request.request_id!r} runs or has run before: make a new Request of its tokens")
    if request.num_tokens >= cache.max_model_len:
        raise ConfigError(
            f"request {request.request_id!r} has {request.num_tokens} tokens, max_model_len is "
            f"{cache.max_model_len}: shorten the prompt or raise max_model_len"
        )
    tokens = limit_tokens(cache, request) - 1  # the last token of all is never computed
    most = most_of(cache, limits, request, tokens)
    needed = cache.peak_blocks(most, limits.max_in_flight)
    usable = cache.promised_blocks
    if needed <= usable:
        return
    unit = cache.config.unit
    unit_bytes = cache.config.arena_bytes // cache.config.num_blocks
    size = f", {format_bytes((needed + 1) * unit_bytes)} with the null {unit}" if unit_bytes else ""
    raise CapacityError(
        f"request {request.request_id!r} may reach {tokens} tokens: {needed} {unit}s{size}; the pool has {usable}: "
        "give it more memory, or lower max_tokens"
    )


def plan_admission(
    cache: KVCacheManager,
    limits: SchedulerLimits,
    chunks: Chunks,
    entry: Waiting,
    budget_tokens: int,
    *,
    alone: bool,
) -> tuple[SlotPlan, int, int] | Refusal | None:
    """Slots for the first chunk of a waiting request, its hit and its new tokens; why not, while it does not fit.

    None when the step's budget is too small for a chunk.

    All its known tokens must fit, and the watermark besides unless it is ``alone``, so that it is not
    preempted at once. The look-up is remembered in ``entry`` and made anew only when it may have changed.
    """
    request, evictions = entry.request, cache.evictions
    if entry.hit is None or not cache.is_longest_hit(request, entry.hit, entry.evictions):
        entry.hit, entry.evictions = cache.look_up(request), evictions
        request.branch_tokens = entry.hit.branch_tokens
    planned = _plan_hit(cache, limits, chunks, request, entry.hit, budget_tokens=budget_tokens, alone=alone)
    if (
        isinstance(planned, Refusal) and alone and any(entry.hit.sources)
    ):  # what is copied may be in the way of the copy
        planned = _plan_hit(cache, limits, chunks, request, None, budget_tokens=budget_tokens, alone=alone)
    return planned


def _plan_hit(
    cache: KVCacheManager,
    limits: SchedulerLimits,
    chunks: Chunks,
    request: Request,
    hit: CommonHit | None,
    *,
    budget_tokens: int,
    alone: bool,
) -> tuple[SlotPlan, int, int] | Refusal | None:
    """plan_admission behind ``hit``."""
    hit_tokens = 0 if hit is None else hit.tokens
    count = chunks.first(request, hit_tokens, budget_tokens)
    if not count:
        return None
    plan = cache.plan_slots(
        request,
        count,
        hit_tokens,
        None if hit is None else cache.blocks_of(hit),
        num_lookahead_tokens=limits.num_lookahead_tokens,
        num_encoder_tokens=request.num_encoder_tokens,
        admission=admission_of(cache, limits, request, alone=alone),
    )
    if isinstance(plan, Refusal):
        logger.debug("request %s is not admitted: %s", request.request_id, plan)
        return plan
    return plan, hit_tokens, count


def split_of(cache: KVCacheManager, limits: SchedulerLimits, forking: Collection[str]) -> Split | None:
    """How chunks are cut for states that are kept; None where they may end anywhere.

    forking: ids of requests that branch before the last of their known tokens.
    """
    if cache.placement is not None:
        return StopSplit(cache.stops, limits.segments, forking)
    if not cache.state_alignment:
        return None
    return AlignSplit(cache.state_alignment, limits.max_batched_tokens, cache.drops_for_eagle)
