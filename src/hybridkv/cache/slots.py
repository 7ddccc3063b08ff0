"""Slots for one request: what is missing is planned without touching anything, then committed as planned.

tokens  [ computed before | hit | external | new | lookahead ]
        0                                        ^ end       ^ total
                                         known tokens are published up to min(end, tokens of the request)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from hybridkv.cache.blocks import KVCacheBlocks
from hybridkv.cache.group import CacheGroup
from hybridkv.cache.policies import Demand, GroupPlan, RowFacts
from hybridkv.cache.pool import BlockPool
from hybridkv.errors import ConfigError, StalePlanError
from hybridkv.request import Request
from hybridkv.specs import Keeps, RequestLimits


class Reason(StrEnum):
    """Why slots were refused."""

    NO_SPACE = "no_space"
    ADMISSION_LIMIT = "admission_limit"
    STATE_NOT_READABLE = "state_not_readable"


class Refusal(NamedTuple):
    """Nothing was changed. group: the one that asked for most; blocks: of all groups together."""

    reason: Reason
    group: int
    needed_blocks: int
    free_blocks: int


class SlotPlan(NamedTuple):
    """One GroupPlan a group for ``request`` to hold ``total_tokens``; valid while the epoch is ``epoch``.

    certain_tokens: tokens that are computed then, drafts left out.
    """

    epoch: int
    request: Request
    total_tokens: int
    certain_tokens: int
    groups: tuple[GroupPlan, ...]


class Admission(NamedTuple):
    """What an admission asks beyond its first tokens.

    full: all tokens of the request must fit, as these limits say. steps: that may be in flight.
    reserve_blocks: blocks that must stay free besides.
    """

    full: RequestLimits
    steps: int = 1
    reserve_blocks: int = 0


class Ask(NamedTuple):
    """What allocate_slots is asked for, checked."""

    new_tokens: int
    hit: KVCacheBlocks
    hit_tokens: int = 0
    external_tokens: int = 0
    lookahead_tokens: int = 0
    delayed: bool = False
    encoder_tokens: int = 0


def check_ask(request: Request, ask: Ask, groups: Sequence[CacheGroup], *, caching: bool) -> None:
    """ConfigError when there is nothing to allocate, or what is handed over cannot be adopted.

    StalePlanError for a hit whose blocks were evicted since the look-up.
    """
    name = request.request_id
    if ask.new_tokens <= 0:
        raise ConfigError(f"nothing to allocate for {name!r}: num_new_tokens is {ask.new_tokens}")
    if min(ask.external_tokens, ask.lookahead_tokens, ask.encoder_tokens) < 0:
        raise ConfigError(f"token counts for {name!r} must not be negative")
    if ask.encoder_tokens and not any(group.kind.spec.keeps == Keeps.ENCODER for group in groups):
        raise ConfigError("num_encoder_tokens needs a group of cross-attention layers; this model has none")
    hit = any(len(ids) for ids in ask.hit.ids)
    if request.row >= 0 and (hit or ask.external_tokens):
        raise ConfigError(f"{name!r} holds blocks already: hits and external tokens are adopted by a new row only")
    if hit and not caching:
        raise ConfigError("hits handed over while caching is off: construct the manager with enable_caching=True")
    if ask.hit_tokens and not hit:
        raise ConfigError(f"{ask.hit_tokens} hit tokens without their blocks: hand over new_computed_blocks")
    if hit:
        _check_hit(request, ask, groups)
        if ask.hit.is_stale:
            raise StalePlanError(f"blocks of the hit handed over for {name!r} were evicted since: look up again")


def _check_hit(request: Request, ask: Ask, groups: Sequence[CacheGroup]) -> None:
    """ConfigError unless the blocks of a hit are as many as its tokens say, in as many groups."""
    if ask.hit_tokens >= request.num_tokens:
        raise ConfigError(f"a hit of {ask.hit_tokens} tokens leaves nothing to compute of {request.num_tokens}")
    if len(ask.hit.ids) != len(groups):
        raise ConfigError(f"a hit needs blocks of {len(groups)} groups, got {len(ask.hit.ids)}")
    for group, ids in zip(groups, ask.hit.ids, strict=True):
        policy = group.policy
        if len(ids) != policy.hit_columns(ask.hit_tokens) or (policy.publishes and ask.hit_tokens % policy.block_size):
            raise ConfigError(
                f"a hit of {ask.hit_tokens} tokens needs {ask.hit_tokens / policy.block_size:g} blocks in "
                f"group {group.number}, got {len(ids)}: hand over what get_computed_blocks returned"
            )


def demand_of(request: Request, ask: Ask, in_flight: int, max_model_len: int, edges: tuple[int, ...] | None) -> Demand:
    """``ask`` in tokens. edges: where the request may be resumed; None when it publishes nothing."""
    before = request.num_computed_tokens
    computed = before + ask.hit_tokens + ask.external_tokens
    end = min(computed + ask.new_tokens, max_model_len)
    certain = min(end, request.num_tokens)
    return Demand(
        processed=before - in_flight,
        hit=before + ask.hit_tokens,
        computed=computed,
        end=end,
        total=min(end + ask.lookahead_tokens, max_model_len),
        known=0 if edges is None or ask.delayed else certain,
        certain=certain,
        encoder=ask.encoder_tokens,
        edges=edges or (),
    )


def needed_blocks(plans: Sequence[GroupPlan], pool: BlockPool) -> int:
    """Free blocks that ``plans`` use up: those taken, and hits that nobody holds now."""
    return sum(plan.take + (pool.count_free(plan.reuse[plan.reuse != 0]) if len(plan.reuse) else 0) for plan in plans)


def freed_blocks(
    groups: Sequence[CacheGroup], facts: Sequence[RowFacts], plans: Sequence[GroupPlan], row: int, pool: BlockPool
) -> int:
    """Blocks of dropped columns that nobody else holds."""
    freed = 0
    for group, before, plan in zip(groups, facts, plans, strict=True):
        if plan.drop > before.dropped:
            gone = group.rows.span(row, before.dropped, plan.drop)
            freed += int(np.count_nonzero(pool.ref_counts(gone[gone != 0]) == 1))
    return freed


def largest_group(plans: Sequence[GroupPlan]) -> int:
    """The group that takes most."""
    return max(range(len(plans)), key=lambda group: plans[group].take)


def admission_shortfall(
    groups: Sequence[CacheGroup], plans: Sequence[GroupPlan], admission: Admission, needed: int, free: int
) -> Refusal | None:
    """The refusal when the whole request and the reserve do not fit into ``free`` blocks."""
    later = 0
    for group, plan in zip(groups, plans, strict=True):
        peak = group.peak_blocks(admission.full, admission.steps)
        later += max(peak - int(np.count_nonzero(plan.reuse)) - plan.take, 0)
    wanted = needed + later + admission.reserve_blocks
    if wanted <= free:
        return None
    return Refusal(Reason.ADMISSION_LIMIT, largest_group(plans), wanted, free)


def unreadable_state(
    groups: Sequence[CacheGroup], plans: Sequence[GroupPlan], pool: BlockPool, step: int
) -> int | None:
    """The first group whose hit is a state that ``step``, the one being scheduled, has yet to write."""
    for group, plan in zip(groups, plans, strict=True):
        if group.policy.keeps_state and len(plan.reuse) and pool.step_of(int(plan.reuse[-1])) == step:
            return group.number
    return None
