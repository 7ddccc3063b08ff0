"""Requests that give up their rows: for good when they end, to wait again when they are preempted or a step failed.

    ended      row free at once, or dead until its last step in flight is complete
    sent back  row free at once; what steps in flight still sample for it is appended where it waits

A row is *distrusted* when a step failed that may have left anything in its blocks: nothing of it is published then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request
from hybridkv.schedule.forks import Forks
from hybridkv.schedule.inbox import Inbox
from hybridkv.schedule.limits import Finished
from hybridkv.schedule.running import InFlight, RunningRows
from hybridkv.schedule.waiting import Waiting, WaitingQueue

logger = logging.getLogger(__name__)


class RowReleaser:
    """The one that frees rows. For the worker to hear of: rows freed since the last Step.

    num_finished, num_preempted, failed_steps: so far.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        waiting: WaitingQueue,
        running: RunningRows,
        inbox: Inbox,
        forks: Forks,
    ) -> None:
        self._ended_rows: list[int] = []
        self.num_finished = self.num_preempted = self.failed_steps = 0
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._inbox = inbox
        self._forks = forks
        self._finished: list[Finished] = []
        self._distrusted: set[int] = set()

    # -- to wait again

    def preempt_last(self, in_flight: Iterable[InFlight]) -> None:
        """The last in order gives its blocks back and waits, with the steps ``in_flight`` that hold it."""
        request = self._running.requests[-1]
        logger.debug("request %r is preempted", request.request_id)
        self.num_preempted += 1
        request.num_preemptions += 1
        self._send_back([request], in_flight, written=True)

    def _send_back(self, requests: Sequence[Request], in_flight: Iterable[InFlight], *, written: bool) -> None:
        """Running ``requests`` give up their rows and wait at the front, in this order, with 0 computed.

        written: what they have computed is there, but for the steps ``in_flight``.
        """
        flights, rows = tuple(in_flight), [request.row for request in requests]
        entries = []
        for request, row in zip(requests, rows, strict=True):
            self._forks.queue_children(request)
            in_flight_steps = sum(flight.release(request, row) for flight in flights)
            if written and not in_flight_steps:
                self._cache.keep_end(request)
            self._cache.free(request)
            request.num_computed_tokens = 0
            entries.append(Waiting(request, self._running.queue_key_of(request), in_flight_steps))
        self._running.remove(rows)
        self._ended_rows += rows
        self._waiting.return_to_front(entries)

    # -- for good

    def end(self, ended: Iterable[Finished]) -> None:
        """Requests leave: from the queue at once, from their rows when no step in flight holds them.

        O(log waiting) each and their blocks; O(running) together.
        """
        rows: list[int] = []
        try:
            for one in ended:
                self._end(one, rows)
        finally:  # one that raises leaves those before it ended
            if rows:
                self._running.remove(rows)

    def _end(self, one: Finished, rows: list[int]) -> None:
        """One leaves; its row joins ``rows``, which run no longer."""
        request = one.request
        if not self._inbox.end(request):
            return
        if one.error is not None:
            logger.warning("request %r ended: %s", request.request_id, one.error, exc_info=one.error)
        self._finished.append(one)
        self.num_finished += 1
        self._forks.queue_children(request)
        if request.row < 0:
            self._waiting.remove(request)
            self._forks.remove(request)
            self._inbox.forget(request)
            return
        rows.append(request.row)
        if self._running.steps[request.row]:
            self._running.mark_dead(request.row)
        else:
            self._free(request)

    def take_ended_rows(self) -> list[int]:
        """Rows freed since the last call, in order."""
        ended, self._ended_rows = self._ended_rows, []
        return ended

    def take_finished(self) -> tuple[Finished, ...]:
        """Who ended since the last call."""
        finished, self._finished = tuple(self._finished), []
        return finished

    def free_dead(self, flight: InFlight, *, written: bool = True) -> None:
        """Dead rows of ``flight`` that no other step holds give their blocks back. written: it ran."""
        running = self._running
        if not running.num_dead:
            return
        mask = flight.held() & running.dead[flight.rows] & (running.steps[flight.rows] == 0)
        for i in mask.nonzero()[0].tolist():
            running.unmark_dead(int(flight.rows[i]))
            self._free(flight.requests[i], written=written)

    def _free(self, request: Request, *, written: bool = True) -> None:
        """Free the row; what it computed is published before, if it was ``written``."""
        if written and request.row not in self._distrusted:
            self._cache.cache_blocks(request, request.num_computed_tokens)
            self._cache.keep_end(request)
        self._distrusted.discard(request.row)
        self._ended_rows.append(request.row)
        self._cache.free(request)
        self._inbox.forget(request)

    # -- after a failure

    def take_back(self, failed: Sequence[InFlight], in_flight: Sequence[InFlight]) -> None:
        """``failed``, all from some step on, will not run; ``in_flight`` are those before them.

        What they should have written can be hit no longer; their requests return to the front of the queue with
        0 computed, in order. O(rows of the steps + blocks that they published).
        """
        self.failed_steps += len(failed)
        self._cache.revoke(failed[0].step.id)
        touched = set[int]()
        for flight in failed:
            touched.update(self._undo(flight))
        touched.update(self._distrust_moved(failed))
        requests = [request for request in self._running.requests if request.row in touched]
        self._send_back(requests, in_flight, written=False)
        for flight in failed:
            self.free_dead(flight, written=False)

    def _undo(self, flight: InFlight) -> list[int]:
        """Rows and waiting requests expect nothing more of ``flight``; its rows that still belong to those it held."""
        self._ended_rows += flight.step.finished_rows.tolist()
        held = self._running.complete(flight)
        rows = flight.rows[held]
        self._cache.rows.retract(rows, flight.step.num_scheduled[held])
        for request in flight.released.values():
            self._waiting.complete(request)
        numbers: list[int] = rows.tolist()
        if self._cache.bounds.rewrites_states:
            self._distrust(numbers)
        return numbers

    def _distrust_moved(self, failed: Sequence[InFlight]) -> set[int]:
        """Where the moves of ``failed`` ended may be anything: those blocks lose their keys. Rows that hold one."""
        rows = self._cache.forget_moved(np.concatenate([flight.moved for flight in failed]))
        self._distrust(rows)
        return rows

    def _distrust(self, rows: Iterable[int]) -> None:
        """Blocks of ``rows`` may hold anything: of those that are dead nothing more is published."""
        self._distrusted.update(row for row in rows if self._running.dead[row])
