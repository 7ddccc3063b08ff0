"""allocate_slots for many rows: array operations where they lead to the same, single calls elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.residents import Residents
from hybridkv.cache.slots import batch
from hybridkv.cache.slots.batch import Batch, BatchSlots, Needs
from hybridkv.cache.slots.committer import Committer
from hybridkv.cache.slots.plan import NO_BLOCKS, Refusal, SlotDemand, SlotPlan
from hybridkv.cache.slots.planner import SlotPlanner
from hybridkv.cache.slots.publisher import Publisher
from hybridkv.cache.values import KVCacheBlocks

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class BatchAllocator:
    """Serves the rows that are due, in order.

    Those not plain are planned and committed one by one. max_model_len: most tokens of a request.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        publisher: Publisher,
        residents: Residents,
        planner: SlotPlanner,
        committer: Committer,
        max_model_len: int,
    ) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._publisher = publisher
        self._residents = residents
        self._planner = planner
        self._committer = committer
        self._max_model_len = max_model_len
        self._no_hit = KVCacheBlocks((NO_BLOCKS,) * len(groups), pool)

    def allocate(self, rows: Int64, num_new_tokens: Int64 | int, num_lookahead_tokens: int) -> BatchSlots:
        """Slots for ``rows``, distinct; see KVCacheManager.allocate_batch."""
        columns, most = self._residents.columns, self._max_model_len
        end = np.minimum(columns.num_computed[rows] + num_new_tokens, most)
        total = np.minimum(end + num_lookahead_tokens, most)
        due = self._residents.due(rows, total)
        slots = batch.nothing_new(len(rows))
        if due.size:
            some = rows[due]
            computed = columns.num_computed[some]
            processed = computed - columns.in_flight[some]
            known = np.minimum(end[due], columns.num_tokens[some])
            asked = Batch(due, some, processed, computed, end[due], total[due], known)
            slots = self._allocate_due(asked, len(rows), num_lookahead_tokens)
            self._pool.advance_epoch()
        self._committer.label_rows(rows[: slots.accepted], end[: slots.accepted])
        return slots

    def _allocate_due(self, due: Batch, accepted: int, lookahead: int) -> BatchSlots:
        """Slots for the rows of ``due``. accepted: rows of the whole batch, unless one is refused.

        Runs of plain rows are served together; a row that is not, and a run that does not fit or whose order
        could be told, one by one.
        """
        needs = batch.needs_of(self._groups, due)
        needs = needs._replace(plain=needs.plain & ~self._residents.ends_due(due.rows, due.end))
        parts: list[BatchSlots] = []
        for first, last in _runs(needs.plain):
            served = self._serve(due.part(first, last), needs.part(first, last)) if needs.plain[first] else None
            if served is None:
                refusal, cells = self._each(due.part(first, last), lookahead)
                parts.append(cells)
                if refusal is not None:
                    return batch.concat(cells.accepted, parts, refusal.reason)
            else:
                parts.append(served)
        return batch.concat(accepted, parts)

    def _serve(self, rows: Batch, needs: Needs) -> BatchSlots | None:
        """All rows at once; None, and nothing done, where that is not the same as one by one."""
        drops = self._pool.in_slabs and self._drops(rows.rows, needs)
        if not self._pool.takes_in_any_order(needs.missing.sum(axis=0).tolist(), drops=drops):
            return None
        if not batch.drop(self._groups, self._pool, rows, needs.drop):
            return None
        slots = batch.take(self._groups, self._pool, rows.rows, needs.missing, rows.place)
        if self._planner.caching:
            self._publisher.publish_rows(self._groups, self._residents.columns, rows.rows, rows.known)
        self._residents.refresh_many(rows.rows)
        return slots

    def _drops(self, rows: Int64, needs: Needs) -> bool:
        """Whether any row gives a column back."""
        return any(
            bool((needs.drop[:, place] > group.rows.dropped[rows]).any()) for place, group in enumerate(self._groups)
        )

    def _each(self, rows: Batch, lookahead: int) -> tuple[Refusal | None, BatchSlots]:
        """Row after row: the refusal that ended it, None when none did, and the new cells of those before."""
        cells: list[tuple[int, int, int, Int32]] = []
        for place, row, end in zip(rows.place.tolist(), rows.rows.tolist(), rows.end.tolist(), strict=True):
            held = [group.rows.count.item(row) for group in self._groups]
            blocks = self._allocate_one(row, end, lookahead)
            if isinstance(blocks, Refusal):
                return blocks, batch.one_by_one(place, cells)
            cells += [(place, g, held[g], ids) for g, ids in enumerate(blocks) if len(ids)]
        return None, batch.one_by_one(0, cells)

    def _allocate_one(self, row: int, end_tokens: int, lookahead: int) -> tuple[Int32, ...] | Refusal:
        """Plan and commit for the request in ``row``: the new columns of each group, or why not."""
        columns = self._residents.columns
        (request,) = columns.owners(np.array([row]))
        new = max(end_tokens - columns.num_computed.item(row), 1)  # 0 at max_model_len
        plan = self._planner.plan(request, SlotDemand(new, self._no_hit, lookahead_tokens=lookahead))
        if isinstance(plan, SlotPlan):
            return self._committer.commit(plan)
        self._committer.drop_skipped(request)
        return plan


def _runs(plain: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Stretches of rows that are plain, and of those that are not."""
    cuts = (np.flatnonzero(np.diff(plain)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(plain)], strict=True)) if len(plain) else []
