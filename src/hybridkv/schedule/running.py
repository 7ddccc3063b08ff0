"""The running requests as columns, in the order they were admitted.

    row     [ scheduled, results in flight | free to schedule | dead: ended, results still in flight ]

A dead row keeps its blocks until the last step that reads or writes them is complete.
"""

from __future__ import annotations

from bisect import bisect

import numpy as np
from numpy.typing import NDArray

from hybridkv.request import Request
from hybridkv.schedule.in_flight import InFlight
from hybridkv.schedule.waiting import QueueKey

Int64 = NDArray[np.int64]

_NO_STOP = -1


class RunningRows:
    """Columns indexed by row, ``max_running`` long; rows are those of the cache manager.

    order: int64[running], rows in order of admission. pending: tokens that steps in flight sample.
    steps: steps in flight that hold the row. limit: most tokens. stop_ids: int32[rows, width], -1 filled.
    dead: ended with steps in flight. proposed: drafts for the next step. drafted: drafts of the step in flight, whose
    result must come before the row runs again.
    """

    def __init__(self, max_running: int) -> None:
        self.order = np.empty(0, np.int64)
        self.requests: tuple[Request, ...] = ()
        self._queue_keys: list[QueueKey] = []
        self.pending = np.zeros(max_running, np.int64)
        self.steps = np.zeros(max_running, np.int64)
        self.limit = np.zeros(max_running, np.int64)
        self.dead = np.zeros(max_running, np.bool_)
        self.num_dead = 0
        self.proposed = np.zeros(max_running, np.int64)
        self.drafted = np.zeros(max_running, np.int64)
        self._stop_ids = np.full((max_running, 1), _NO_STOP, np.int32)

    def __len__(self) -> int:
        """Running requests, dead ones not counted."""
        return len(self.requests)

    @property
    def seats_taken(self) -> int:
        """Rows that hold blocks."""
        return len(self.requests) + self.num_dead

    def admit(self, request: Request, limit_tokens: int, queue_key: QueueKey, *, last: bool = True) -> None:
        """``request``, which has a row, runs from now on: ``last`` in order, or where its ``queue_key`` says."""
        row, stops = request.row, request.stop_ids
        place = len(self._queue_keys) if last else bisect(self._queue_keys, queue_key)
        self._queue_keys.insert(place, queue_key)
        self.order = np.insert(self.order, place, row)
        self.requests = (*self.requests[:place], request, *self.requests[place:])
        self.pending[row] = self.steps[row] = self.proposed[row] = self.drafted[row] = 0
        self.limit[row] = limit_tokens
        width = self._stop_ids.shape[1]
        if len(stops) > width:
            more = np.full((len(self._stop_ids), len(stops) - width), _NO_STOP, np.int32)
            self._stop_ids = np.concatenate((self._stop_ids, more), axis=1)
        self._stop_ids[row] = _NO_STOP
        self._stop_ids[row, : len(stops)] = stops

    def remove(self, rows: list[int]) -> None:
        """``rows`` run no longer."""
        keep = ~np.isin(self.order, rows)
        kept = np.flatnonzero(keep).tolist()
        self.requests = tuple(self.requests[place] for place in kept)
        self._queue_keys = [self._queue_keys[place] for place in kept]
        self.order = self.order[keep]

    def queue_key_of(self, request: Request) -> QueueKey:
        """The queue key with which ``request`` was admitted."""
        return self._queue_keys[self.requests.index(request)]

    def complete(self, flight: InFlight) -> NDArray[np.bool_]:
        """Rows of ``flight`` wait for it no longer; which of them still belong to the request it ran, bool[R]."""
        attached = flight.attached()
        self.steps[flight.rows[attached]] -= 1
        self.pending[flight.rows[attached & flight.step.samples]] -= 1
        if flight.drafted is not None:
            self.drafted[flight.rows[attached]] = 0
        return attached

    def mark_dead(self, row: int) -> None:
        """A row that was removed still has steps in flight."""
        self.dead[row] = True
        self.num_dead += 1

    def unmark_dead(self, row: int) -> None:
        """The last step of a dead row is complete."""
        self.dead[row] = False
        self.num_dead -= 1

    def stops(self, rows: Int64, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether ``tokens[i]`` is a stop token of ``rows[i]``."""
        found: NDArray[np.bool_] = (self._stop_ids[rows] == tokens[:, None]).any(axis=1)
        return found
