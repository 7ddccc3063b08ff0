"""The running requests as columns, in the order they were admitted, and the steps in flight that hold their rows.

    row     [ scheduled, results in flight | free to schedule | dead: ended, results still in flight ]

A dead row keeps its blocks until the last step that reads or writes them is complete.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.request import Request
from hybridkv.schedule.limits import SchedulerLimits
from hybridkv.schedule.waiting import QueueKey
from hybridkv.step import Step

Int64 = NDArray[np.int64]

_NO_STOP = -1


@dataclass(slots=True)
class InFlight:
    """A Step whose result is not in, and whose rows it holds.

    moved: blocks, the cache's numbers, that the moves of the step end in. released: position in the step -> request
    that gave up its row since, to wait again; the row may belong to somebody else.
    """

    step: Step
    rows: Int64
    requests: tuple[Request, ...]
    moved: Int64
    released: dict[int, Request] = field(default_factory=dict)

    @property
    def num_drafts(self) -> Int64 | None:
        """Drafts of each row, int64[R]; None when there are none."""
        drafts = self.step.drafts
        return np.diff(drafts.indptr) if len(drafts.values) else None

    def release(self, request: Request, row: int) -> bool:
        """``request`` gives up ``row``; whether this step holds it."""
        for position in np.flatnonzero(self.rows == row).tolist():
            if position not in self.released and self.requests[position] is request:
                self.released[position] = request
                return True
        return False

    def held(self) -> NDArray[np.bool_]:
        """bool[R]: rows that still belong to the request they were scheduled for."""
        mask = np.ones(len(self.rows), np.bool_)
        mask[list(self.released)] = False
        return mask


class RunningRows:
    """Columns indexed by row, ``max_running`` long; rows are those of the cache manager.

    order: int64[running], rows in order of admission. pending: tokens that steps in flight sample.
    steps: steps in flight that hold the row. limit: most tokens. stop_ids: int32[rows, width], -1 filled.
    dead: ended with steps in flight. num_drafts: of the step in flight, whose result must come before the row runs
    again.
    """

    def __init__(self, limits: SchedulerLimits, max_model_len: int) -> None:
        self.order = np.empty(0, np.int64)
        self.requests: tuple[Request, ...] = ()
        self._queue_keys: list[QueueKey] = []
        self._in_turn = limits.policy == "fcfs"
        self._max_running = limits.max_running
        self._max_model_len = max_model_len
        self.pending = np.zeros(limits.max_running, np.int64)
        self.steps = np.zeros(limits.max_running, np.int64)
        self.limit = np.zeros(limits.max_running, np.int64)
        self.dead = np.zeros(limits.max_running, np.bool_)
        self.num_dead = 0
        self.num_drafts = np.zeros(limits.max_running, np.int64)
        self._stop_ids = np.full((limits.max_running, 1), _NO_STOP, np.int32)

    def __len__(self) -> int:
        """Running requests, dead ones not counted."""
        return len(self.requests)

    @property
    def seats_taken(self) -> int:
        """Rows that hold blocks."""
        return len(self.requests) + self.num_dead

    @property
    def has_seat(self) -> bool:
        """Whether one more may run."""
        return self.seats_taken < self._max_running

    @property
    def seats_free(self) -> int:
        """How many more may run."""
        return self._max_running - self.seats_taken

    def limit_tokens(self, request: Request) -> int:
        """Most tokens that ``request`` may have, prompt and output."""
        return min(request.num_prompt_tokens + request.sampling.max_tokens, self._max_model_len)

    def admit(self, request: Request, queue_key: QueueKey) -> None:
        """``request``, which has a row, runs from now on: last in order, or by priority, where ``queue_key`` says."""
        row, stops = request.row, request.stop_ids
        place = len(self._queue_keys) if self._in_turn else bisect(self._queue_keys, queue_key)
        self._queue_keys.insert(place, queue_key)
        self.order = np.insert(self.order, place, row)
        self.requests = (*self.requests[:place], request, *self.requests[place:])
        self.pending[row] = self.steps[row] = self.num_drafts[row] = 0
        self.limit[row] = self.limit_tokens(request)
        width = self._stop_ids.shape[1]
        if len(stops) > width:
            more = np.full((len(self._stop_ids), len(stops) - width), _NO_STOP, np.int32)
            self._stop_ids = np.concatenate((self._stop_ids, more), axis=1)
        self._stop_ids[row] = _NO_STOP
        self._stop_ids[row, : len(stops)] = stops

    def remove(self, rows: list[int]) -> None:
        """``rows`` run no longer."""
        keep = ~np.isin(self.order, rows)
        kept = keep.nonzero()[0].tolist()
        self.requests = tuple(self.requests[place] for place in kept)
        self._queue_keys = [self._queue_keys[place] for place in kept]
        self.order = self.order[keep]

    def queue_key_of(self, request: Request) -> QueueKey:
        """The queue key with which ``request`` was admitted."""
        return self._queue_keys[self.requests.index(request)]

    def schedule(self, flight: InFlight) -> None:
        """Rows of ``flight`` wait for it."""
        self.pending[flight.rows] += flight.step.samples
        self.steps[flight.rows] += 1
        num_drafts = flight.num_drafts
        if num_drafts is not None:
            self.num_drafts[flight.rows] = num_drafts

    def complete(self, flight: InFlight) -> NDArray[np.bool_]:
        """Rows of ``flight`` wait for it no longer; which of them still belong to the request it ran, bool[R]."""
        held = flight.held()
        self.steps[flight.rows[held]] -= 1
        self.pending[flight.rows[held & flight.step.samples]] -= 1
        if flight.num_drafts is not None:
            self.num_drafts[flight.rows[held]] = 0
        return held

    def mark_dead(self, row: int) -> None:
        """A row that was removed still has steps in flight."""
        self.dead[row] = True
        self.num_dead += 1

    def unmark_dead(self, row: int) -> None:
        """The last step of a dead row is complete."""
        self.dead[row] = False
        self.num_dead -= 1

    def may_stop(self, rows: Int64) -> bool:
        """Whether any of ``rows`` has a stop token."""
        return bool((self._stop_ids[rows] != _NO_STOP).any())

    def stops(self, rows: Int64, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether ``tokens[i]`` is a stop token of ``rows[i]``."""
        found: NDArray[np.bool_] = (self._stop_ids[rows] == tokens[:, None]).any(axis=1)
        return found
