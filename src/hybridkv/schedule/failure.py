"""Steps that failed: what they should have written is taken back, and their requests wait again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.schedule.in_flight import InFlight
from hybridkv.schedule.row_releaser import RowReleaser
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import WaitingQueue


class Failures:
    """Undoes steps that brought no result."""

    def __init__(
        self, cache: KVCacheManager, waiting: WaitingQueue, running: RunningRows, releaser: RowReleaser
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._releaser = releaser

    def take_back(self, failed: Sequence[InFlight], in_flight: Sequence[InFlight]) -> None:
        """``failed``, all from some step on, will not run; ``in_flight`` are those before them.

        What they should have written can be hit no longer; their requests return to the front of the queue with
        0 computed, in order. O(rows of the steps + blocks that they published).
        """
        self._cache.revoke(failed[0].step.id)
        touched = set[int]()
        for flight in failed:
            touched.update(self._undo(flight))
        touched.update(self._distrust_moved(failed))
        requests = [request for request in self._running.requests if request.row in touched]
        self._releaser.send_back(requests, in_flight, written=False)
        self._releaser.free_failed(failed)

    def _undo(self, flight: InFlight) -> list[int]:
        """Rows and waiting requests expect nothing more of ``flight``; its rows that still belong to those it held."""
        self._releaser.ended_rows += flight.step.finished_rows.tolist()
        attached = self._running.complete(flight)
        rows = flight.rows[attached]
        if self._cache.placement is not None:  # running states are rewritten in place
            self._releaser.distrust(rows.tolist())
        self._cache.rows.retract(rows, flight.step.num_scheduled[attached])
        for request in flight.detached.values():
            self._waiting.complete(request)
        held: list[int] = rows.tolist()
        return held

    def _distrust_moved(self, failed: Sequence[InFlight]) -> set[int]:
        """Where the moves of ``failed`` ended may be anything: those blocks lose their keys. Rows that hold one."""
        moved = np.concatenate([flight.moved for flight in failed])
        rows = self._cache.forget_moved(moved)
        self._releaser.distrust(rows)
        return rows
