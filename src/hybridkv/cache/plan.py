"""Slot plans: which blocks a request needs for its next tokens, or why it must wait. Nothing is changed here.

    tokens  [ computed before | hit | external | new | lookahead ]
            0                                        ^ end       ^ total
                                             known tokens are published up to min(end, tokens of the request)

``Slots.commit`` carries a plan out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, integer
from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.holds import Loads
from hybridkv.cache.keys import WRITTEN
from hybridkv.cache.lookup import Hit
from hybridkv.cache.policies import Demand, GroupPlan, RowFacts
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import Publisher
from hybridkv.cache.residents import Residents
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import Keeps, RequestLimits
from hybridkv.units import MOST_COUNT

Int32 = NDArray[np.int32]

_NO_BLOCKS = np.empty(0, np.int32)
_BOUNDED_BY_LENGTH = attrgetter("bounded_by_length")


class Reason(StrEnum):
    """Why slots were refused.

    Attributes:
        NO_SPACE: There are not enough blocks.
        FRAGMENTED: The blocks fit only after moves between slabs, but this step may make no more moves, or locked
            blocks forbid them.
        ADMISSION_LIMIT: The blocks fit, but not together with all known tokens of the request or with the reserve.
        PREFIX_NOT_WRITTEN: The cached prefix ends with a state, or inside a block, that the step being made writes. A
            copy before its forward would come too early.
    """

    NO_SPACE = "no_space"
    FRAGMENTED = "fragmented"
    ADMISSION_LIMIT = "admission_limit"
    PREFIX_NOT_WRITTEN = "prefix_not_written"


class Refusal(NamedTuple):
    """A refused demand. Nothing was changed.

    Attributes:
        reason: Why it was refused.
        group: The group that asked for most blocks, or whose prefix is not written.
        needed_blocks: Blocks of all groups together, or slabs, that were needed.
        free_blocks: Blocks, or slabs, that were free.
        takes: By group, blocks that fit at this moment; only for a refusal because of later needs.
    """

    reason: Reason
    group: int
    needed_blocks: int
    free_blocks: int
    takes: tuple[int, ...] = ()


class SlotPlan(NamedTuple):
    """The blocks that ``request`` needs to hold ``total_tokens`` tokens.

    Attributes:
        epoch: Epoch of the pool at which the plan is valid.
        request: The request.
        total_tokens: Its tokens with room for drafts.
        certain_tokens: Its computed tokens after the step, without drafts.
        groups: One GroupPlan a group.
        sources: By group, the block from which its new last column, or its state, is copied; 0 for no copy.
        hit_tokens: Tokens of the adopted hit.
        computed_tokens: Tokens before the new ones.
        known_tokens: Tokens that may be published.
        begins: The request holds no row yet.
        encodes: Blocks for the encoder's output are taken; the worker that runs the first tokens must write them.
        loads: Nothing is computed; the computed tokens are loaded from elsewhere.
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
    loads: bool = False


class Admission(NamedTuple):
    """Conditions for a request that is about to start, beyond its first tokens.

    Attributes:
        full: All tokens of the request must fit within these limits.
        steps: Steps that may be in flight. 0: count only the states that the first tokens take.
        reserve_blocks: Blocks (slabs, if there are any) that must stay free after all its tokens.
        chunk_reserve: Blocks that must stay free after the first tokens, because running requests that cannot give way
            still need them.
        tokens: Tokens of the request; by default those of ``full``.
        encoder_tokens: Tokens of its encoder output; by default those of ``full``.
    """

    full: RequestLimits
    steps: int = 1
    reserve_blocks: int = 0
    chunk_reserve: int = 0
    tokens: int | None = None
    encoder_tokens: int | None = None


class SlotDemand(NamedTuple):
    """The arguments of ``allocate_slots``, checked.

    ``brings_all``: rings and the encoder's output are loaded with the external tokens.
    """

    new_tokens: int
    hit: Hit
    external_tokens: int = 0
    lookahead_tokens: int = 0
    delayed: bool = False
    encoder_tokens: int = 0
    brings_all: bool = False


class BatchSlots(NamedTuple):
    """New cells of a batch, in the order in which the blocks were taken.

    Attributes:
        accepted: The first rows, which got their slots. All rows from there on are refused.
        owner: int32[cells], index into the rows of the batch.
        group: int32[cells].
        column: int32[cells].
        block: int32[cells], the pool's numbers.
        reason: Why the first refused row was refused; ``None`` if no row was.
    """

    accepted: int
    owner: Int32
    group: Int32
    column: Int32
    block: Int32
    reason: Reason | None = None


class SlotPlanner:
    """Adds up the answers of the policies of all groups. Changes nothing.

    Args:
        pool: The blocks.
        residents: The resident requests and the groups.
        publisher: Knows which tokens are published.
        loads: Rows that are being loaded; they get no slots.
        max_model_len: Most tokens of a request.
    """

    def __init__(
        self, pool: BlockPool, residents: Residents, *, publisher: Publisher, loads: Loads, max_model_len: int
    ) -> None:
        groups = residents.groups
        self.max_model_len = max_model_len
        self._groups = groups
        self._no_facts = (RowFacts(),) * len(groups)
        self._none = (0,) * len(groups)
        self._encoded = tuple(group for group in groups if group.kind.spec.keeps is Keeps.ENCODER)
        self._pool = pool
        self._request_rows = residents.request_rows
        self._publisher = publisher
        self.loads = loads

    def plan(self, request: Request, wanted: SlotDemand, admission: Admission | None = None) -> SlotPlan | Refusal:
        """Plan ``wanted`` for ``request``, or say why it is refused. Raises ConfigError for an impossible demand."""
        groups, pool, row = self._groups, self._pool, request.row
        if self.loads.of_row:
            self.loads.refuse(request)
        _check_wanted(request, wanted, groups, caching=self._publisher.publishes)
        in_flight = self._request_rows.in_flight.item(row) if row >= 0 else 0
        demand = _demand_of(request, wanted, in_flight, self.max_model_len, self._publisher.boundaries(request))
        if row < 0 and demand.by_digest:
            for group in self._encoded:  # the keys to publish: a hasher may fail here, and not when the plan is done
                request.encoder_keys(group.policy.block_size)
        facts = self._no_facts if row < 0 else [group.facts(row) for group in groups]
        adopted = self._adopted(request, wanted)
        plans = tuple(
            [group.policy.plan(known, ids, demand) for group, known, ids in zip(groups, facts, adopted, strict=True)]
        )
        sources = self._sources(wanted, plans)
        freed = self._none if row < 0 else _freed_blocks(groups, facts, plans, row, pool)
        kept = _needed_blocks(plans, pool)
        needs = _with_sources(kept, sources, pool)
        taken, given_back = pool.by_class(needs), pool.by_class(freed)
        needed, free = pool.space.weigh(taken, given_back)
        if needed > free:
            return Refusal(Reason.NO_SPACE, _largest_group(plans), needed, free)
        step = self._publisher.open_step
        blocked = None
        if step != WRITTEN and wanted.hit.parent is None:  # what a fork shares was written before
            blocked = _unwritten_prefix(groups, plans, sources, pool, step)
        if blocked is not None:
            return Refusal(Reason.PREFIX_NOT_WRITTEN, blocked, needed, free)
        if admission is not None:
            later = _later_blocks(groups, plans, row, demand.computed, admission)
            both = pool.by_class([now + then for now, then in zip(kept, later, strict=True)])
            in_all = pool.space.weigh(both, given_back).needed
            wanted_blocks = max(in_all + admission.reserve_blocks, needed + admission.chunk_reserve)
            if wanted_blocks > free:
                return Refusal(Reason.ADMISSION_LIMIT, _largest_group(plans), wanted_blocks, free, tuple(needs))
        if pool.space.waits(taken, given_back):
            return Refusal(Reason.FRAGMENTED, _largest_group(plans), needed, free)
        return SlotPlan(
            pool.epoch,
            request,
            demand.total,
            demand.certain,
            plans,
            sources,
            demand.hit,
            demand.computed,
            demand.known,
            begins=row < 0,
            encodes=bool(self._encoded) and any(plans[group.number].take for group in self._encoded),
            loads=wanted.delayed and not wanted.new_tokens,
        )

    def peak_blocks(
        self, limits: RequestLimits, max_in_flight: int, tokens: int | None = None, encoder_tokens: int | None = None
    ) -> int:
        """Return the most blocks, or slabs, that one request holds at once, steps in flight included.

        Args:
            limits: Bounds of the request.
            max_in_flight: Most steps in flight.
            tokens: Tokens of the request; by default ``limits.max_model_len``.
            encoder_tokens: Tokens of its encoder output; by default ``limits.max_encoder_tokens``.
        """
        if type(limits) is not RequestLimits:
            instance("limits", limits, RequestLimits)
        tokens = limits.max_model_len if tokens is None else tokens
        for name, count in (("max_in_flight", max_in_flight), ("tokens", tokens)):
            if type(count) is not int or not 1 <= count <= MOST_COUNT:
                integer(name, count, 1, MOST_COUNT)
        encoder = limits.max_encoder_tokens if encoder_tokens is None else encoder_tokens
        if any(map(_BOUNDED_BY_LENGTH, self._groups)):
            limits = replace(limits, max_model_len=tokens, max_encoder_tokens=encoder)
        return self._pool.units([group.peak_blocks(limits, max_in_flight, tokens, encoder) for group in self._groups])

    def blocks_to_come(self, request: Request, limits: RequestLimits) -> int:
        """Return the most blocks that ``request`` may still take; see EngineSide.blocks_to_come."""
        row, whole = request.row, Admission(limits, 0)
        unread = [0 if row < 0 else group.rows.each_dropped[row] for group in self._groups]
        come = [max(most, 0) for most in _unheld(self._groups, row, unread, whole)]
        for number, group in enumerate(self._groups if row >= 0 else ()):
            if group.states is not None and not group.states.rotates:  # its next state needs a column of its own
                columns = group.policy.most_columns(limits.max_model_len, limits.max_encoder_tokens)
                come[number] = min(max(columns - group.rows.each_count[row], 0), 1)
        return self._pool.units(come)

    def _adopted(self, request: Request, wanted: SlotDemand) -> Sequence[Int32]:
        """Return the blocks with which a new row begins, by group: the hit, and a cached encoder output.

        The encoder output is used only if all of its groups have it. Else published blocks would be written again.
        """
        reads = self._publisher.publishes and wanted.encoder_tokens and not request.skip_reading_prefix_cache
        ids = [part.blocks for part in wanted.hit.groups]
        if not reads or request.row >= 0 or wanted.hit.parent is not None:
            return ids
        found = {group: group.encoded(request) for group in self._encoded}
        if not all(map(len, found.values())):
            return ids
        return [found.get(group, blocks) for group, blocks in zip(self._groups, ids, strict=True)]

    def _sources(self, wanted: SlotDemand, plans: Sequence[GroupPlan]) -> tuple[int, ...]:
        """Return the blocks to copy from, by group.

        With tokens that are loaded from elsewhere, no state is copied, and no block whose column is then null.
        """
        sources = wanted.hit.sources or self._none
        if not wanted.external_tokens:
            return sources
        loaded, whole = wanted.hit.tokens + wanted.external_tokens, self.loads.whole
        if loaded % whole and not wanted.brings_all:
            raise ConfigError(
                f"external tokens up to {loaded} end inside a state of {whole} tokens (tokens_per_state): load up to "
                f"{loaded // whole * whole}"
            )
        return tuple(
            0 if group.kind.in_place or plan.skips else source
            for group, plan, source in zip(self._groups, plans, sources, strict=True)
        )


def _check_wanted(request: Request, wanted: SlotDemand, groups: Sequence[CacheGroup], *, caching: bool) -> None:
    """Raise ConfigError if there is nothing to allocate, or if the hit cannot be adopted."""
    name = request.request_id
    if wanted.new_tokens <= 0:
        _check_load(request, wanted, replays=any(group.kind.replays for group in groups))
    if min(wanted.external_tokens, wanted.lookahead_tokens, wanted.encoder_tokens) < 0:
        raise ConfigError(f"token counts for {name!r} must not be negative")
    if wanted.encoder_tokens and not any(group.kind.spec.keeps == Keeps.ENCODER for group in groups):
        raise ConfigError("num_encoder_tokens needs a group of cross-attention layers; this model has none")
    if request.encoder is not None and wanted.encoder_tokens not in {0, request.num_encoder_tokens}:
        raise ConfigError(
            f"num_encoder_tokens for {name!r} is {wanted.encoder_tokens}, but its encoder input has "
            f"{request.num_encoder_tokens}: pass the latter"
        )
    hit = wanted.hit.tokens
    if request.row >= 0 and (hit or wanted.external_tokens):
        raise ConfigError(f"{name!r} holds blocks already: hits and external tokens are adopted by a new row only")
    if hit and not caching and wanted.hit.parent is None:
        raise ConfigError("a hit was passed in, but caching is off: construct the manager with enable_caching=True")


def _check_load(request: Request, wanted: SlotDemand, *, replays: bool) -> None:
    """Raise ConfigError unless a demand without new tokens asks for blocks of external tokens.

    Look-ahead after a hit counts too: the load then writes the block of the last token, which is computed again. Where
    a window is computed again (``replays``), so does a hit: the step may end before new tokens.
    """
    name = request.request_id
    last = bool(wanted.hit.tokens and (wanted.lookahead_tokens or replays))
    if wanted.new_tokens < 0 or not (wanted.external_tokens > 0 or last):
        raise ConfigError(f"nothing to allocate for {name!r}: num_new_tokens is {wanted.new_tokens}")
    if not (wanted.delayed or replays):
        raise ConfigError(
            f"{name!r} computes no token while its external tokens are loaded: pass delay_cache_blocks=True, and call "
            "finish_load when they have arrived"
        )
    if wanted.encoder_tokens and not wanted.brings_all:
        raise ConfigError(f"the encoder of {name!r} does not run while its tokens are loaded: compute a token with it")
    if wanted.hit.tokens + wanted.external_tokens >= request.num_tokens:
        raise ConfigError(
            f"{wanted.external_tokens} external tokens after {wanted.hit.tokens} leave nothing to compute of "
            f"{request.num_tokens}: load at most all but the last token"
        )


def _demand_of(
    request: Request, wanted: SlotDemand, in_flight: int, max_model_len: int, boundaries: tuple[int, ...] | None
) -> Demand:
    """Return ``wanted`` as token counts.

    Args:
        request: The request.
        wanted: The arguments of ``allocate_slots``.
        in_flight: Computed tokens of its steps in flight.
        max_model_len: Most tokens of a request.
        boundaries: Positions at which the request may be resumed; ``None`` if it publishes nothing.
    """
    before = request.num_computed_tokens
    computed = before + wanted.hit.tokens + wanted.external_tokens
    end = min(computed + wanted.new_tokens, max_model_len)
    certain = min(end, request.num_tokens)
    return Demand(
        processed=before - in_flight,
        hit=before + wanted.hit.tokens,
        computed=computed,
        end=end,
        total=min(end + wanted.lookahead_tokens, max_model_len),
        known=0 if boundaries is None or wanted.delayed else certain,
        certain=certain,
        encoder=wanted.encoder_tokens,
        by_digest=request.encoder is not None and boundaries is not None and not wanted.delayed,
        boundaries=boundaries or (),
    )


def _needed_blocks(plans: Sequence[GroupPlan], pool: BlockPool) -> list[int]:
    """Return the free blocks that ``plans`` use up, by group: blocks to take, and free blocks of hits."""
    return [plan.take + (pool.count_free(plan.reuse[plan.reuse != 0]) if len(plan.reuse) else 0) for plan in plans]


def _with_sources(needs: list[int], sources: Sequence[int], pool: BlockPool) -> list[int]:
    """Return ``needs``, by group, with the free blocks among ``sources``, which are held for this step alone."""
    if not any(sources):
        return needs
    return [need + (source != 0 and not pool.ref_count(source)) for need, source in zip(needs, sources, strict=True)]


def _freed_blocks(
    groups: Sequence[CacheGroup], facts: Sequence[RowFacts], plans: Sequence[GroupPlan], row: int, pool: BlockPool
) -> list[int]:
    """Return the blocks that become free with the dropped columns, by group."""
    freed = []
    for group, before, plan in zip(groups, facts, plans, strict=True):
        gone = group.rows.span(row, before.dropped, plan.drop) if plan.drop > before.dropped else _NO_BLOCKS
        freed.append(int(np.count_nonzero(pool.ref_counts(gone[gone != 0]) == 1)) if len(gone) else 0)
    return freed


def _largest_group(plans: Sequence[GroupPlan]) -> int:
    """Return the group that takes most blocks."""
    return max(range(len(plans)), key=lambda group: plans[group].take)


def _later_blocks(
    groups: Sequence[CacheGroup], plans: Sequence[GroupPlan], row: int, computed_tokens: int, admission: Admission
) -> list[int]:
    """Return the blocks that an admitted request may still need up to its peak, by group.

    ``row`` is -1, or the row into which the request was loaded. Columns that no layer reads after ``computed_tokens``
    are never taken. Without this, a long hit would count the whole peak of a window, however few tokens follow.
    """
    unread = [
        plan.drop
        if row >= 0 or group.holds_all or group.states is not None
        else group.policy.droppable(computed_tokens)
        for group, plan in zip(groups, plans, strict=True)
    ]
    return [
        max(most - (int(np.count_nonzero(plan.reuse)) if len(plan.reuse) else 0) - plan.take, 0)
        for most, plan in zip(_unheld(groups, row, unread, admission), plans, strict=True)
    ]


def _unheld(groups: Sequence[CacheGroup], row: int, unread: Sequence[int], admission: Admission) -> list[int]:
    """Return the blocks of a request at its peak, without those in its columns from ``unread`` on.

    ``row`` -1: no row yet. ``unread``: leading columns that the request no longer reads, by group.
    """
    full, tokens, encoder = admission.full, admission.tokens, admission.encoder_tokens
    tokens = full.max_model_len if tokens is None else tokens
    encoder = full.max_encoder_tokens if encoder is None else encoder
    if (tokens, encoder) != (full.max_model_len, full.max_encoder_tokens) and any(map(_BOUNDED_BY_LENGTH, groups)):
        full = replace(full, max_model_len=tokens, max_encoder_tokens=encoder)
    unheld = []
    for group, columns in zip(groups, unread, strict=True):
        held = 0 if row < 0 else int(np.count_nonzero(group.rows.ids(row)[columns:]))
        unheld.append(group.peak_blocks(full, admission.steps, tokens, encoder, columns) - held)
    return unheld


def _unwritten_prefix(
    groups: Sequence[CacheGroup], plans: Sequence[GroupPlan], sources: Sequence[int], pool: BlockPool, step: int
) -> int | None:
    """Return the first group whose hit is copied from a block that ``step``, still being made, will write."""
    for group, plan, source in zip(groups, plans, sources, strict=True):
        # a state that is adopted ends the reused columns; they end with a null one if a state is copied from source
        copied = (int(plan.reuse[-1]) if group.states is not None and len(plan.reuse) else 0) or source
        if copied and pool.keys.step_of(copied) == step:
            return group.number
    return None
