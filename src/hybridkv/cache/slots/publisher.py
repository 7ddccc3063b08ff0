"""Publishing: full blocks get their keys, and the write log learns whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.block_keys import WRITTEN
from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.write_log import Run, WriteLog
from hybridkv.cache.slots import batch
from hybridkv.request import Request
from hybridkv.request_rows import RequestRows

Int64 = NDArray[np.int64]


class Publisher:
    """The one that gives keys to blocks. log: what steps in flight have promised to write."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.log = WriteLog(pool)

    def publish_row(
        self, group: CacheGroup, request: Request, columns: Int64, decided: int, *, written: bool = False
    ) -> None:
        """The blocks in ``columns`` of ``request`` can be hit from now on; ``decided`` columns are dealt with.

        Columns ascend; null ones are passed over. written: whatever step is open, they are there.
        """
        row = request.row
        group.published[row] = decided
        if not columns.size:
            return
        ids = group.rows.at(np.full(len(columns), row), columns)
        held = ids != 0
        if not held.all():
            ids, columns = ids[held], columns[held]
            if not ids.size:
                return
        step = WRITTEN if written else self.log.open_step
        self._pool.publish(group.number, ids, group.keys_at(request, columns), step)
        tells = self.log.wants_runs and not group.policy.by_digest  # events are of the decoder's tokens
        self.log.record(ids, _runs(group, request, columns, ids) if tells else [], step)

    def publish_rows(self, groups: Sequence[CacheGroup], requests: RequestRows, rows: Int64, known: Int64) -> None:
        """What each row can publish at ``known`` tokens, in (request, group) order within a group."""
        for group in groups:
            first, counts = batch.publishable(group, rows, known)
            ready = np.flatnonzero(counts)
            if ready.size:
                self._publish_ready(group, requests, rows[ready], first[ready], counts[ready])

    def _publish_ready(
        self, group: CacheGroup, requests: RequestRows, rows: Int64, first: Int64, counts: Int64
    ) -> None:
        group.published[rows] = first + counts
        if counts.max() == 1:  # decoding rows
            columns, of = first, rows
        else:
            of = np.repeat(rows, counts)
            columns = np.arange(len(of)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        ids = group.rows.at(of, columns)
        if not ids.all():
            held = ids != 0
            of, columns, ids = of[held], columns[held], ids[held]
        if not ids.size:
            return
        owners, stride = requests.owners(of), group.key_stride
        places = ((columns + 1) * stride - 1).tolist()
        keys = [request.hashes[place] for request, place in zip(owners, places, strict=True)]
        self._pool.publish(group.number, ids, keys, self.log.open_step)
        runs = _rows_runs(group, owners, columns, ids) if self.log.wants_runs else []
        self.log.record(ids, runs, self.log.open_step)


def _rows_runs(group: CacheGroup, owners: Sequence[Request], columns: Int64, ids: NDArray[np.int32]) -> list[Run]:
    """Stretches of neighbouring columns of one request."""
    rows = np.array([request.row for request in owners])
    cuts = (np.flatnonzero((np.diff(columns) != 1) | (np.diff(rows) != 0)) + 1).tolist()
    starts, stops = [0, *cuts], [*cuts, len(columns)]
    return [Run(group, owners[a], int(columns[a]), ids[a:b]) for a, b in zip(starts, stops, strict=True)]


def _runs(group: CacheGroup, request: Request, columns: Int64, ids: NDArray[np.int32]) -> list[Run]:
    """Stretches of neighbouring columns."""
    cuts = (np.flatnonzero(np.diff(columns) != 1) + 1).tolist()
    starts, stops = [0, *cuts], [*cuts, len(columns)]
    return [Run(group, request, int(columns[a]), ids[a:b]) for a, b in zip(starts, stops, strict=True)]
