"""allocate_slots for many rows: array operations where they lead to the same, single calls elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import batch
from hybridkv.cache.batch import Batch, BatchSlots, Needs
from hybridkv.cache.group import CacheGroup
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import Publisher
from hybridkv.cache.residents import Residents

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

AllocateOne = Callable[[int, int], Sequence[Int32] | None]
"""Row and new tokens -> new columns per group, None when they do not fit."""


class BatchAllocator:
    """Serves the rows that are due, in order. publishes: whether full blocks get keys."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        publisher: Publisher,
        residents: Residents,
        *,
        publishes: bool,
    ) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._publisher = publisher
        self._residents = residents
        self._publishes = publishes

    def allocate(self, due: Batch, accepted: int, one: AllocateOne) -> BatchSlots:
        """Slots for the rows of ``due``. accepted: rows of the whole batch, unless one is refused.

        Runs of plain rows are served together; a row that is not, and a run that does not fit or whose order
        could be told, one by one.
        """
        needs = batch.needs_of(self._groups, due)
        parts: list[BatchSlots] = []
        for first, last in _runs(needs.plain):
            served = self._serve(due.part(first, last), needs.part(first, last)) if needs.plain[first] else None
            if served is None:
                refused, cells = self._each(due.part(first, last), one)
                parts.append(cells)
                if refused is not None:
                    return batch.concat(refused, parts)
            else:
                parts.append(served)
        return batch.concat(accepted, parts)

    def _serve(self, rows: Batch, needs: Needs) -> BatchSlots | None:
        """All rows at once; None, and nothing done, where that is not the same as one by one."""
        if int(needs.missing.sum()) > self._pool.get_num_free_blocks():
            return None
        if not batch.drop(self._groups, self._pool, rows, needs.drop):
            return None
        slots = batch.take(self._groups, self._pool, rows.rows, needs.missing, rows.place)
        if self._publishes:
            self._publisher.publish_rows(self._groups, self._residents.columns, rows.rows, rows.known)
        self._residents.refresh_many(rows.rows)
        return slots

    def _each(self, rows: Batch, one: AllocateOne) -> tuple[int | None, BatchSlots]:
        """Row after row: the place of the one that was refused, None when none was, and the new cells."""
        cells: list[tuple[int, int, int, Int32]] = []
        for place, row, end in zip(rows.place.tolist(), rows.rows.tolist(), rows.end.tolist(), strict=True):
            held = [group.rows.count.item(row) for group in self._groups]
            blocks = one(row, end)
            if blocks is None:
                return place, batch.one_by_one(place, cells)
            cells += [(place, g, held[g], ids) for g, ids in enumerate(blocks) if len(ids)]
        return None, batch.one_by_one(0, cells)


def _runs(plain: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Stretches of rows that are plain, and of those that are not."""
    cuts = (np.flatnonzero(np.diff(plain)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(plain)], strict=True)) if len(plain) else []
