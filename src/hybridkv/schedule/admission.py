"""Who may come in: whether a request can run at all, and whether it fits now."""

from __future__ import annotations

import logging

from hybridkv.cache import Admission, KVCacheManager, Refusal, SlotPlan
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.request import Request
from hybridkv.schedule.waiting import Waiting
from hybridkv.units import format_bytes

logger = logging.getLogger(__name__)


def limit_tokens(cache: KVCacheManager, request: Request) -> int:
    """Most tokens that ``request`` may have, prompt and output."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, cache.max_model_len)


def refuse_impossible(cache: KVCacheManager, request: Request) -> None:
    """ConfigError or CapacityError for a request that could not run even alone."""
    if request.hasher is not cache.hasher:
        raise ConfigError(f"request {request.request_id!r}: construct it with hasher=cache.hasher")
    if request.row >= 0 or request.num_computed_tokens:
        raise ConfigError(f"request {request.request_id!r} runs or has run before: make a new Request of its tokens")
    if request.num_tokens >= cache.max_model_len:
        raise ConfigError(
            f"request {request.request_id!r} has {request.num_tokens} tokens, max_model_len is "
            f"{cache.max_model_len}: shorten the prompt or raise max_model_len"
        )
    tokens = limit_tokens(cache, request) - 1  # the last token of all is never computed
    needed = sum(group.policy.columns(tokens) for group in cache.groups)
    usable = cache.block_pool.num_blocks - 1
    if needed <= usable:
        return
    block_bytes = cache.config.arena_bytes // cache.config.num_blocks
    size = f", {format_bytes((needed + 1) * block_bytes)} with the null block" if block_bytes else ""
    raise CapacityError(
        f"request {request.request_id!r} may reach {tokens} tokens: {needed} blocks{size}; the pool has {usable}: "
        "give it more memory, or lower max_tokens"
    )


def plan_admission(
    cache: KVCacheManager, entry: Waiting, budget_tokens: int, reserve_blocks: int
) -> tuple[SlotPlan, int] | None:
    """Slots for the first chunk of a waiting request, and its tokens; None while it does not fit.

    All its known tokens must fit, and ``reserve_blocks`` besides, so that it is not preempted at once.
    The look-up is remembered in ``entry`` and made anew only when it may have changed.
    """
    request, evictions = entry.request, cache.block_pool.evictions
    if entry.hit is None or not cache.is_longest_hit(request, entry.hit, entry.evictions):
        entry.hit, entry.hit_tokens = cache.get_computed_blocks(request)
        entry.evictions = evictions
    count = min(request.num_tokens - entry.hit_tokens, budget_tokens)
    admission = Admission(request.num_tokens, reserve_blocks)
    plan = cache.plan_slots(request, count, entry.hit_tokens, entry.hit, admission=admission)
    if isinstance(plan, Refusal):
        logger.debug("request %s is not admitted: %s", request.request_id, plan)
        return None
    return plan, count
