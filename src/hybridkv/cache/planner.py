"""What a request needs, decided without touching anything."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.coordinator import Coordinator
from hybridkv.cache.group import CacheGroup
from hybridkv.cache.pool import WRITTEN, BlockPool
from hybridkv.cache.slots import (
    Admission,
    Ask,
    Reason,
    Refusal,
    SlotPlan,
    admission_shortfall,
    check_ask,
    demand_of,
    freed_blocks,
    largest_group,
    needed_blocks,
    unreadable_state,
)
from hybridkv.cache.write_log import WriteLog
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.request_rows import RequestRows


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
        self._pool = pool
        self._log = log
        self._rows = rows
        self._coordinator = coordinator
        self._max_model_len = max_model_len
        self._caching = caching
        self._retention = retention

    def edges(self, request: Request) -> tuple[int, ...] | None:
        """Where ``request`` may be resumed, in tokens, if retention asks for it; None when it publishes nothing."""
        if not (self._caching and request.writes_prefix_cache):
            return None
        return () if self._retention is None else self._coordinator.resumed_at(request)

    def plan(self, request: Request, ask: Ask, admission: Admission | None, epoch: int) -> SlotPlan | Refusal:
        """One GroupPlan a group, or why not. ConfigError for an ask that makes no sense."""
        groups, pool, row = self._groups, self._pool, request.row
        check_ask(request, ask, groups, caching=self._caching)
        for group, ids in zip(groups, ask.hit.ids, strict=True):
            pool.refuse_foreign(ids[ids != 0])
            if len(ids) and ids[-1] and pool.key_of(int(ids[-1])) != group.keys(request)[len(ids) - 1]:
                raise ConfigError(
                    f"the hit handed over for {request.request_id!r} holds other tokens: hand over what "
                    "get_computed_blocks returned for this request"
                )
        in_flight = self._rows.in_flight.item(row) if row >= 0 else 0
        demand = demand_of(request, ask, in_flight, self._max_model_len, self.edges(request))
        facts = [group.facts(row) for group in groups]
        plans = tuple(
            group.policy.plan(known, ids, demand) for group, known, ids in zip(groups, facts, ask.hit.ids, strict=True)
        )
        free = pool.get_num_free_blocks() + freed_blocks(groups, facts, plans, row, pool)
        needed = needed_blocks(plans, pool)
        if needed > free:
            return Refusal(Reason.NO_SPACE, largest_group(plans), needed, free)
        step = self._log.open_step
        if step != WRITTEN and (blocked := unreadable_state(groups, plans, pool, step)) is not None:
            return Refusal(Reason.STATE_NOT_READABLE, blocked, needed, free)
        if admission is not None:
            short = admission_shortfall(groups, plans, admission, needed, free)
            if short is not None:
                return short
        return SlotPlan(epoch, request, demand.total, demand.certain, plans)
