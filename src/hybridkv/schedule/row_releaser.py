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
from hybridkv.schedule.counts import Counts
from hybridkv.schedule.forks import Branching
from hybridkv.schedule.in_flight import InFlight
from hybridkv.schedule.inbox import Inbox
from hybridkv.schedule.limits import Finished
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import Waiting, WaitingQueue

logger = logging.getLogger(__name__)


class RowReleaser:
    """The one that frees rows. ended_rows: those freed since the last Step was issued, for the worker to hear of."""

    def __init__(
        self,
        cache: KVCacheManager,
        waiting: WaitingQueue,
        running: RunningRows,
        *,
        inbox: Inbox,
        branching: Branching,
        counts: Counts,
    ) -> None:
        self.ended_rows: list[int] = []
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._inbox = inbox
        self._branching = branching
        self._counts = counts
        self._finished: list[Finished] = []
        self._distrusted: set[int] = set()

    # -- to wait again

    def send_back(self, requests: Sequence[Request], in_flight: Iterable[InFlight], *, written: bool) -> None:
        """Running ``requests`` give up their rows and wait at the front, in this order, with 0 computed.

        written: what they have computed is there, but for the steps ``in_flight``.
        """
        flights, rows = tuple(in_flight), [request.row for request in requests]
        entries = []
        for request, row in zip(requests, rows, strict=True):
            self._branching.orphan(request)
            in_flight_steps = sum(flight.detach(request, row) for flight in flights)
            if written and not in_flight_steps:
                self._cache.keep_end(request)
            self._cache.free(request)
            request.num_computed_tokens = 0
            entries.append(Waiting(request, self._running.queue_key_of(request), in_flight_steps))
        self._running.remove(rows)
        self.ended_rows += rows
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
        self._counts.finished += 1
        self._branching.orphan(request)
        if request.row < 0:
            self._waiting.remove(request)
            self._branching.remove(request)
            self._inbox.forget(request)
            return
        rows.append(request.row)
        if self._running.steps[request.row]:
            self._running.mark_dead(request.row)
        else:
            self._release(request)

    def take_finished(self) -> tuple[Finished, ...]:
        """Who ended since the last call."""
        finished, self._finished = tuple(self._finished), []
        return finished

    def free_dead(self, flight: InFlight) -> None:
        """Dead rows of ``flight``, which ran, that no other step holds give their blocks back."""
        running = self._running
        if not running.num_dead:
            return
        mask = flight.attached() & running.dead[flight.rows] & (running.steps[flight.rows] == 0)
        for i in np.flatnonzero(mask).tolist():
            running.unmark_dead(int(flight.rows[i]))
            self._release(flight.requests[i])

    def _release(self, request: Request) -> None:
        """Publish what is written, and free the row."""
        if request.row not in self._distrusted:
            self._cache.cache_blocks(request, request.num_computed_tokens)
            self._cache.keep_end(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        self._distrusted.discard(request.row)
        self.ended_rows.append(request.row)
        self._cache.free(request)
        self._inbox.forget(request)

    # -- after a failure

    def distrust(self, rows: Iterable[int]) -> None:
        """Blocks of ``rows`` may hold anything: of those that are dead nothing more is published."""
        self._distrusted.update(row for row in rows if self._running.dead[row])

    def free_failed(self, failed: Iterable[InFlight]) -> None:
        """Dead rows that only ``failed`` steps held give their blocks back, unpublished."""
        running = self._running
        for flight in failed:
            attached = flight.attached()
            for i, row in enumerate(flight.rows.tolist()):
                if attached[i] and running.dead[row] and not running.steps[row]:
                    running.unmark_dead(row)
                    self._free(flight.requests[i])
