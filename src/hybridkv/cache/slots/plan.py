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

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.policies import Demand, GroupPlan, RowFacts
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.values import KVCacheBlocks
from hybridkv.errors import ConfigError, StalePlanError
from hybridkv.request import Request
from hybridkv.specs import Keeps, RequestLimits

NO_BLOCKS = np.empty(0, np.int32)


class Reason(StrEnum):
    """Why slots were refused.

    no_space: there are not so many blocks. fragmented: it fits, but for moves that the step may not make any more, or
    that locked blocks forbid. admission_limit: it fits now, all known tokens or the watermark besides do not.
    prefix_not_written: the cached prefix ends with a state, or inside a block, that the step now made is to write;
    a copy made before its forward would come too early.
    """

    NO_SPACE = "no_space"
    FRAGMENTED = "fragmented"
    ADMISSION_LIMIT = "admission_limit"
    PREFIX_NOT_WRITTEN = "prefix_not_written"


class Refusal(NamedTuple):
    """Nothing was changed. group: the one that asked for most, or whose prefix is not written.

    needed_blocks, free_blocks: of all groups together, or slabs.
    """

    reason: Reason
    group: int
    needed_blocks: int
    free_blocks: int


class SlotPlan(NamedTuple):
    """One GroupPlan a group for ``request`` to hold ``total_tokens``; valid while the epoch is ``epoch``.

    certain_tokens: tokens that are computed then, drafts left out. sources: by group, the block that its new last
    column, or its state, is copied from; 0: none. hit_tokens: those adopted. computed_tokens: those before the
    new ones. known_tokens: those that may be published. begins: the request holds no row yet. encodes: blocks for the
    encoder's output are taken, which whoever runs the first tokens must write.
    """

    epoch: int
    request: Request
    total_tokens: int
    certain_tokens: int
    groups: tuple[GroupPlan, ...]
    sources: tuple[int, ...] = ()
    hit_tokens: int = 0
    computed_tokens: int = 0
    known_tokens: int = 0
    begins: bool = False
    encodes: bool = False


class Admission(NamedTuple):
    """What an admission asks beyond its first tokens.

    full: all tokens of the request must fit, as these limits say. steps: that may be in flight.
    reserve_blocks: blocks (slabs, where there are any) that must stay free besides.
    """

    full: RequestLimits
    steps: int = 1
    reserve_blocks: int = 0


class SlotDemand(NamedTuple):
    """What allocate_slots is asked for, checked."""

    new_tokens: int
    hit: KVCacheBlocks
    hit_tokens: int = 0
    external_tokens: int = 0
    lookahead_tokens: int = 0
    delayed: bool = False
    encoder_tokens: int = 0


def check_wanted(request: Request, wanted: SlotDemand, groups: Sequence[CacheGroup], *, caching: bool) -> None:
    """ConfigError when there is nothing to allocate, or what is handed over cannot be adopted.

    StalePlanError for a hit whose blocks were evicted since the look-up.
    """
    name = request.request_id
    if wanted.new_tokens <= 0:
        raise ConfigError(f"nothing to allocate for {name!r}: num_new_tokens is {wanted.new_tokens}")
    if min(wanted.external_tokens, wanted.lookahead_tokens, wanted.encoder_tokens) < 0:
        raise ConfigError(f"token counts for {name!r} must not be negative")
    if wanted.encoder_tokens and not any(group.kind.spec.keeps == Keeps.ENCODER for group in groups):
        raise ConfigError("num_encoder_tokens needs a group of cross-attention layers; this model has none")
    if request.encoder is not None and wanted.encoder_tokens not in {0, request.num_encoder_tokens}:
        raise ConfigError(
            f"num_encoder_tokens for {name!r} is {wanted.encoder_tokens}, but its encoder input has "
            f"{request.num_encoder_tokens}: hand over the latter"
        )
    hit = any(len(ids) for ids in wanted.hit.ids) or any(wanted.hit.sources)
    if request.row >= 0 and (hit or wanted.external_tokens):
        raise ConfigError(f"{name!r} holds blocks already: hits and external tokens are adopted by a new row only")
    if hit and not caching and not wanted.hit.is_fork:
        raise ConfigError("hits handed over while caching is off: construct the manager with enable_caching=True")
    if wanted.hit_tokens and not hit:
        raise ConfigError(f"{wanted.hit_tokens} hit tokens without their blocks: hand over new_computed_blocks")
    if hit:
        _check_hit(request, wanted, groups)
        if wanted.hit.is_stale:
            raise StalePlanError(f"blocks of the hit handed over for {name!r} were evicted since: look up again")


def _check_hit(request: Request, wanted: SlotDemand, groups: Sequence[CacheGroup]) -> None:
    """ConfigError unless the blocks of a hit are as many as its tokens say, in as many groups."""
    if wanted.hit_tokens >= request.num_tokens:
        raise ConfigError(f"a hit of {wanted.hit_tokens} tokens leaves nothing to compute of {request.num_tokens}")
    if len(wanted.hit.ids) != len(groups):
        raise ConfigError(f"a hit needs blocks of {len(groups)} groups, got {len(wanted.hit.ids)}")
    for group, ids in zip(groups, wanted.hit.ids, strict=True):
        policy = group.policy
        if policy.by_digest and wanted.hit.is_fork:
            continue
        ends_inside = (
            policy.publishes and not policy.copies and wanted.hit_tokens % policy.block_size and not wanted.hit.is_fork
        )
        if len(ids) != policy.hit_columns(wanted.hit_tokens) or ends_inside:
            raise ConfigError(
                f"a hit of {wanted.hit_tokens} tokens needs {wanted.hit_tokens / policy.block_size:g} blocks in "
                f"group {group.number}, got {len(ids)}: hand over what get_computed_blocks returned"
            )


def demand_of(
    request: Request, wanted: SlotDemand, in_flight: int, max_model_len: int, edges: tuple[int, ...] | None
) -> Demand:
    """``wanted`` in tokens. edges: where the request may be resumed; None when it publishes nothing."""
    before = request.num_computed_tokens
    computed = before + wanted.hit_tokens + wanted.external_tokens
    end = min(computed + wanted.new_tokens, max_model_len)
    certain = min(end, request.num_tokens)
    return Demand(
        processed=before - in_flight,
        hit=before + wanted.hit_tokens,
        computed=computed,
        end=end,
        total=min(end + wanted.lookahead_tokens, max_model_len),
        known=0 if edges is None or wanted.delayed else certain,
        certain=certain,
        encoder=wanted.encoder_tokens,
        by_digest=request.encoder is not None and edges is not None and not wanted.delayed,
        edges=edges or (),
    )


def needed_blocks(plans: Sequence[GroupPlan], sources: Sequence[int], pool: BlockPool) -> list[int]:
    """Blocks that ``plans`` use up, by group: those taken, and hits and sources that nobody holds now."""
    needs = []
    for plan, source in zip(plans, sources, strict=True):
        touched = pool.count_free(plan.reuse[plan.reuse != 0]) if len(plan.reuse) else 0
        needs.append(plan.take + touched + (source != 0 and not pool.ref_count(source)))
    return needs


def freed_blocks(
    groups: Sequence[CacheGroup], facts: Sequence[RowFacts], plans: Sequence[GroupPlan], row: int, pool: BlockPool
) -> list[int]:
    """Blocks of dropped columns that nobody else holds, by group."""
    freed = []
    for group, before, plan in zip(groups, facts, plans, strict=True):
        gone = group.rows.span(row, before.dropped, plan.drop) if plan.drop > before.dropped else NO_BLOCKS
        freed.append(int(np.count_nonzero(pool.ref_counts(gone[gone != 0]) == 1)) if len(gone) else 0)
    return freed


def largest_group(plans: Sequence[GroupPlan]) -> int:
    """The group that takes most."""
    return max(range(len(plans)), key=lambda group: plans[group].take)


def later_blocks(groups: Sequence[CacheGroup], plans: Sequence[GroupPlan], admission: Admission) -> list[int]:
    """What an admitted request may need besides, up to its peak, by group."""
    return [
        max(group.peak_blocks(admission.full, admission.steps) - int(np.count_nonzero(plan.reuse)) - plan.take, 0)
        for group, plan in zip(groups, plans, strict=True)
    ]


def unwritten_prefix(
    groups: Sequence[CacheGroup], plans: Sequence[GroupPlan], sources: Sequence[int], pool: BlockPool, step: int
) -> int | None:
    """The first group whose hit is a state, or is copied, and has yet to be written by ``step``, now scheduled."""
    for group, plan, source in zip(groups, plans, sources, strict=True):
        copied = int(plan.reuse[-1]) if group.policy.keeps_state and len(plan.reuse) else source
        if copied and pool.keys.step_of(copied) == step:
            return group.number
    return None
