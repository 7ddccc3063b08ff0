"""What a request needs, decided without touching anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.block_keys import WRITTEN
from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.write_log import WriteLog
from hybridkv.cache.slots.coordinator import Coordinator
from hybridkv.cache.slots.plan import (
    Admission,
    Reason,
    Refusal,
    SlotDemand,
    SlotPlan,
    check_wanted,
    demand_of,
    freed_blocks,
    largest_group,
    later_blocks,
    needed_blocks,
    unwritten_prefix,
)
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import Request
from hybridkv.request_rows import RequestRows
from hybridkv.specs import Keeps

Int32 = NDArray[np.int32]


class SlotPlanner:
    """Adds up what the policies of all groups say. caching: whether anything is published.

    retention: see KVCacheManager.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        log: WriteLog,
        rows: RequestRows,
        coordinator: Coordinator,
        max_model_len: int,
        caching: bool,
        retention: int | None,
    ) -> None:
        self._groups = tuple(groups)
        self._encoded = tuple(group for group in groups if group.kind.spec.keeps is Keeps.ENCODER)
        self._pool = pool
        self._log = log
        self._rows = rows
        self._coordinator = coordinator
        self._max_model_len = max_model_len
        self.caching = caching
        self._retention = retention

    def edges(self, request: Request) -> tuple[int, ...] | None:
        """Where ``request`` may be resumed, in tokens, if retention asks for it; None when it publishes nothing."""
        if not (self.caching and request.writes_prefix_cache):
            return None
        return () if self._retention is None else self._coordinator.resumed_at(request)

    def plan(self, request: Request, wanted: SlotDemand, admission: Admission | None = None) -> SlotPlan | Refusal:
        """One GroupPlan a group, or why not. ConfigError for a demand that makes no sense."""
        groups, pool, row = self._groups, self._pool, request.row
        check_wanted(request, wanted, groups, caching=self.caching)
        self._check_hit(request, wanted)
        in_flight = self._rows.in_flight.item(row) if row >= 0 else 0
        demand = demand_of(request, wanted, in_flight, self._max_model_len, self.edges(request))
        if row < 0 and demand.by_digest:
            for group in self._encoded:  # the keys to publish: a hasher may fail here, and not when the plan is done
                request.encoder_keys(group.policy.block_size)
        facts = [group.facts(row) for group in groups]
        adopted = self._adopted(request, wanted)
        plans = tuple(
            group.policy.plan(known, ids, demand) for group, known, ids in zip(groups, facts, adopted, strict=True)
        )
        sources = self._sources(wanted)
        freed = freed_blocks(groups, facts, plans, row, pool)
        needs = needed_blocks(plans, sources, pool)
        needed, free = pool.weigh(needs, freed)
        if needed > free:
            return Refusal(Reason.NO_SPACE, largest_group(plans), needed, free)
        step = self._log.open_step
        blocked = None
        if step != WRITTEN and not wanted.hit.is_fork:  # what a fork shares was written before
            blocked = unwritten_prefix(groups, plans, sources, pool, step)
        if blocked is not None:
            return Refusal(Reason.PREFIX_NOT_WRITTEN, blocked, needed, free)
        if admission is not None:
            kept = needed_blocks(plans, (0,) * len(plans), pool)  # sources are held for this step alone
            later = later_blocks(groups, plans, admission)
            in_all = pool.weigh([now + then for now, then in zip(kept, later, strict=True)], freed).needed
            if in_all + admission.reserve_blocks > free:
                return Refusal(Reason.ADMISSION_LIMIT, largest_group(plans), in_all + admission.reserve_blocks, free)
        if pool.waits(needs, freed):
            return Refusal(Reason.FRAGMENTED, largest_group(plans), needed, free)
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
            encodes=any(plan.take for plan, group in zip(plans, groups, strict=True) if group in self._encoded),
        )

    def _adopted(self, request: Request, wanted: SlotDemand) -> Sequence[Int32]:
        """Blocks that a new row begins with, by group: those handed over, and the encoder's output if it is there.

        All groups have it or none, so that what is published is never written again.
        """
        reads = self.caching and wanted.encoder_tokens and not request.skip_reading_prefix_cache
        if not reads or request.row >= 0 or wanted.hit.is_fork:
            return wanted.hit.ids
        found = {group: group.encoded(request) for group in self._encoded}
        if not all(len(ids) for ids in found.values()):
            return wanted.hit.ids
        return [found.get(group, ids) for group, ids in zip(self._groups, wanted.hit.ids, strict=True)]

    def _check_hit(self, request: Request, wanted: SlotDemand) -> None:
        """BlockError for blocks that are not the pool's, ConfigError unless the request's tokens are what they hold.

        Of each group the last whole block is looked at, whose key is of all tokens before, and what is copied. Of a
        fork, the tokens and extra keys of the parent.
        """
        hit = wanted.hit
        if not (wanted.hit_tokens or any(hit.sources)):
            return
        for ids in hit.ids:
            self._pool.refuse_foreign(ids[ids != 0])
        if hit.parent is not None:
            own = request.begins_as(hit.parent, wanted.hit_tokens)
        else:
            sources = hit.sources or (0,) * len(self._groups)
            own = all(
                self._holds(group, request, ids, source, wanted.hit_tokens)
                for group, ids, source in zip(self._groups, hit.ids, sources, strict=True)
            )
        if not own:
            raise ConfigError(
                f"the hit handed over for {request.request_id!r} holds other tokens: hand over what "
                "get_computed_blocks returned for this request"
            )

    def _holds(self, group: CacheGroup, request: Request, ids: Int32, source: int, tokens: int) -> bool:
        """Whether a hit of ``tokens`` tokens of ``request`` may begin with ``ids`` and be copied from ``source``."""
        if len(ids) and ids[-1] and self._pool.key_of(int(ids[-1])) != group.keys(request)[len(ids) - 1]:
            return False
        view, policy = group.view(request), group.policy
        try:
            found = policy.source(view, tokens)
        except CacheError:  # nothing is known that its last column could be copied from
            return False
        if source == found or not (source and found):
            return source == found
        if policy.keeps_state:
            return view.is_state(source, tokens)
        return view.begins(source, *divmod(tokens, policy.block_size))

    def _sources(self, wanted: SlotDemand) -> tuple[int, ...]:
        """What is copied, by group: a state only where no later one is loaded from elsewhere."""
        sources = wanted.hit.sources or (0,) * len(self._groups)
        if not wanted.external_tokens:
            return sources
        return tuple(
            0 if group.policy.keeps_state else source for group, source in zip(self._groups, sources, strict=True)
        )
