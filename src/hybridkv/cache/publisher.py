"""Publishing: full blocks get their keys, and the write log learns whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import batch
from hybridkv.cache.group import CacheGroup
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.write_log import Run, WriteLog
from hybridkv.request import Request, RequestRows

Int64 = NDArray[np.int64]


class Publisher:
    """The one that gives keys to blocks. log: what steps in flight have promised to write."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.log = WriteLog(pool)

    def publish_row(self, group: CacheGroup, request: Request, first: int, last: int) -> None:
        """Columns first .. last-1 of ``request`` can be hit from now on."""
        start = group.rows.start.item(request.row)
        ids = group.rows.cells[start + first : start + last].copy()
        self._pool.publish(group.number, ids, group.key_run(request, first, last), self.log.open_step)
        group.published[request.row] = last
        self.log.record(ids, [Run(group, request, first, ids)] if self.log.wants_runs else [])

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
        starts = np.cumsum(counts) - counts
        if counts.max() == 1:  # decoding rows
            ids = group.rows.at(rows, first)
        else:
            column = np.arange(int(counts.sum())) + np.repeat(first - starts, counts)
            ids = group.rows.at(np.repeat(rows, counts), column)
        group.published[rows] = first + counts
        spans = list(zip(requests.owners(rows), first.tolist(), (first + counts).tolist(), strict=True))
        keys = [key for request, start, stop in spans for key in group.key_run(request, start, stop)]
        self._pool.publish(group.number, ids, keys, self.log.open_step)
        runs = []
        if self.log.wants_runs:
            runs = [
                Run(group, request, start, ids[at : at + stop - start])
                for at, (request, start, stop) in zip(starts.tolist(), spans, strict=True)
            ]
        self.log.record(ids, runs)
