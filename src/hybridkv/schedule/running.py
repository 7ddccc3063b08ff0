"""RunningRows: the running requests as columns, the steps in flight that use their rows, and how rows are freed.

A row is in one of these states:

    idle        its request runs, and no step in flight uses the row
    scheduled   its request runs, and steps in flight use the row
    dead        its request ended, and steps in flight use the row

A dead row keeps its blocks until the last step that reads or writes them is complete. A request that is preempted, or
whose step failed, loses its row at once. Tokens that steps in flight still sample for it are appended while it waits.
A dead row is *distrusted* if a failed step may have left wrong data in its blocks. These blocks are not published.

The result of a step with drafts, for a row with K known tokens before them:

    drafts    [ d0 | d1 | d2 ]                 the step computes all of them
    sampled   [ d0 | d1 | x  ]                 two drafts are accepted; the model sampled x after them
    appended  [ d0 | d1 ]                      d1 is a stop token here, so the request ends there
    computed  K + 2                            appended drafts count; later steps overwrite d2
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.errors import CacheError, HashError, WorkerError
from hybridkv.request import MAX_TOKEN_ID, Request
from hybridkv.schedule.limits import Finished, FinishReason, SchedulerLimits
from hybridkv.schedule.queue import QueueKey, Waiting, WaitingQueue
from hybridkv.step import Csr, Step, StepResult

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]
Ended = dict[int, tuple[FinishReason, HashError | None]]
"""Finish reason, and the error if there is one, of each request that is done, by its place in the step."""

_NO_STOP = -1


@dataclass(slots=True)
class InFlight:
    """A Step that has no result yet, and the rows it holds.

    Attributes:
        step: the Step.
        rows: int64[R], rows of the Step.
        requests: requests of the rows when the Step was scheduled.
        moved: int64[n], pool numbers of the blocks to which the step moves other blocks.
        num_drafts: int64[R], drafts of each row; omitted if the step has no drafts.
        held: bool[R], rows that still belong to the request that they were scheduled for.
        released: requests that lost their row since and wait again, by place in the step. Another request may have the
            row meanwhile.
    """

    step: Step
    rows: Int64
    requests: tuple[Request, ...]
    moved: Int64
    num_drafts: Int64 | None
    held: NDArray[np.bool_]
    released: dict[int, Request] = field(default_factory=dict)

    def release(self, request: Request, row: int) -> bool:
        """Record that ``request`` lost ``row``; return whether this step held it."""
        for position in np.flatnonzero((self.rows == row) & self.held).tolist():
            if self.requests[position] is request:
                self.released[position] = request
                self.held[position] = False
                return True
        return False


class RunningRows:
    """The running requests, and columns of numbers about them, indexed by row of the cache manager.

    Attributes:
        order: int64[running], rows of running requests in order of admission, or of priority.
        requests: the running requests in the same order.
        pending: int64[max_rows], tokens that steps in flight sample for the row.
        steps: int64[max_rows], steps in flight that hold the row.
        limit: int64[max_rows], most tokens of its request, prompt and output.
        num_drafts: int64[max_rows], drafts of the row in flight. The row runs again only after their result.
        dead: bool[max_rows], rows of ended requests that steps in flight still hold.
        num_dead: number of dead rows.
        num_finished: requests that ended so far.
        num_preempted: preemptions so far.
        failed_steps: steps that failed so far.
    """

    def __init__(self, cache: KVCacheManager, limits: SchedulerLimits, waiting: WaitingQueue, *, max_rows: int) -> None:
        self._cache = cache
        self._waiting = waiting
        self._in_turn = limits.policy == "fcfs"
        self._max_running = limits.max_running
        self.order = np.empty(0, np.int64)
        self.requests: tuple[Request, ...] = ()
        self._queue_keys: list[QueueKey] = []
        self._max_rows = max_rows
        self.pending = np.zeros(max_rows, np.int64)
        self.steps = np.zeros(max_rows, np.int64)
        self.limit = np.zeros(max_rows, np.int64)
        self.num_drafts = np.zeros(max_rows, np.int64)
        self.dead = np.zeros(max_rows, np.bool_)
        self.num_dead = 0
        self._stop_ids = np.full((max_rows, 1), _NO_STOP, np.int32)  # stop tokens of each row, padded
        self.num_finished = self.num_preempted = self.failed_steps = 0
        self._ended_rows: list[int] = []
        self._finished: list[Finished] = []
        self._distrusted: set[int] = set()

    @property
    def seats_taken(self) -> int:
        """Number of rows that hold blocks, dead ones included."""
        return len(self.requests) + self.num_dead

    @property
    def seats_free(self) -> int:
        """Number of requests that can still be admitted before max_running rows are taken."""
        return self._max_running - len(self.requests) - self.num_dead

    def limit_tokens(self, request: Request) -> int:
        """Return the most tokens that ``request`` may have, prompt and output."""
        return min(request.num_prompt_tokens + request.sampling.max_tokens, self._cache.max_model_len)

    def admit(self, request: Request, queue_key: QueueKey) -> None:
        """Add ``request``, which has a row, at the end of the order; with "priority", at the place of ``queue_key``."""
        row, stops = request.row, request.stop_ids
        place = len(self._queue_keys) if self._in_turn else bisect(self._queue_keys, queue_key)
        self._queue_keys.insert(place, queue_key)
        self.order = np.concatenate((self.order[:place], [row], self.order[place:]))
        self.requests = (*self.requests[:place], request, *self.requests[place:])
        self.pending[row] = self.steps[row] = self.num_drafts[row] = 0
        self.limit[row] = self.limit_tokens(request)
        width = self._stop_ids.shape[1]
        if len(stops) > width:
            more = np.full((len(self._stop_ids), len(stops) - width), _NO_STOP, np.int32)
            self._stop_ids = np.concatenate((self._stop_ids, more), axis=1)
        self._stop_ids[row] = _NO_STOP
        if stops:
            self._stop_ids[row, : len(stops)] = stops

    def _remove(self, rows: list[int]) -> None:
        """Remove ``rows`` from the running requests."""
        runs = np.ones(self._max_rows, np.bool_)  # a mask by row takes a sixth of the time of np.isin
        runs[rows] = False
        keep = runs[self.order]
        kept = keep.tolist()
        self.requests = tuple(compress(self.requests, kept))
        self._queue_keys = list(compress(self._queue_keys, kept))
        self.order = self.order[keep]

    def schedule(self, flight: InFlight) -> None:
        """Record that the rows of ``flight`` wait for its result."""
        self.pending[flight.rows] += flight.step.samples
        self.steps[flight.rows] += 1
        if flight.num_drafts is not None:
            self.num_drafts[flight.rows] = flight.num_drafts

    def _complete(self, flight: InFlight) -> NDArray[np.bool_]:
        """Record that the rows of ``flight`` no longer wait for it; return its ``held``, bool[R]."""
        held = flight.held
        self.steps[flight.rows[held]] -= 1
        self.pending[flight.rows[held & flight.step.samples]] -= 1
        if flight.num_drafts is not None:
            self.num_drafts[flight.rows[held]] = 0
        return held

    def may_stop(self, rows: Int64) -> bool:
        """Return whether a request of ``rows`` has stop tokens."""
        return bool((self._stop_ids[rows] != _NO_STOP).any())

    # -- results

    def append(self, flight: InFlight, sampled: Csr) -> Csr:
        """Append the ``sampled`` tokens of ``flight``, end requests that are done, and return the appended tokens."""
        rows, num_drafts, held = flight.rows, flight.num_drafts, self._complete(flight)
        self._cache.rows.in_flight[rows[held]] -= flight.step.num_scheduled[held]
        alive = held & ~self.dead[rows] if self.num_dead else held
        taken = flight.step.samples & alive
        appended, places = taken.astype(np.int64), taken.nonzero()[0]
        if num_drafts is None:  # one token each
            tokens = sampled.values if len(places) == len(sampled.values) else sampled.values[sampled.indptr[places]]
            ended = self._append_rows(rows[places], places, tokens, appended)
        else:
            ended = self._append_several(rows, places, sampled, appended)
            kept = np.minimum(np.diff(sampled.indptr) - 1, appended)
            some = (held & (num_drafts > 0)).nonzero()[0]
            self._cache.accept_drafts(rows[some], num_drafts[some], kept[some])  # drafts not appended count as rejected
        if ended:
            self.end(Finished(flight.requests[i], *ended[i]) for i in sorted(ended))
        for place, request in flight.released.items():
            appended[place] = self._append_waiting(request, sampled[place].tolist())
        if appended.sum() == len(sampled.values):
            return sampled
        return _heads(sampled, appended)

    def _append_several(self, rows: Int64, places: Int64, sampled: Csr, appended: Int64) -> Ended:
        """Append several tokens to each row, the first of all rows first, until its request is done.

        Args:
            rows: int64[R], rows of the step.
            places: int64[n], places in the step of the rows that take tokens.
            sampled: sampled tokens of each row.
            appended: int64[R], receives the number of appended tokens of each row.

        Returns:
            Requests that are done.
        """
        ended: Ended = {}
        counts, taken = np.diff(sampled.indptr), 0
        while places.size:
            appended[places] = taken + 1
            done = self._append_rows(rows[places], places, sampled.values[sampled.indptr[places] + taken], appended)
            taken += 1
            ended |= done
            goes_on = counts[places] > taken
            if done:
                goes_on &= ~np.isin(places, list(done))
            places = places[goes_on]
        return ended

    def _append_rows(self, rows: Int64, places: Int64, tokens: NDArray[np.int32], appended: Int64) -> Ended:
        """Append one token to each of ``rows``; return the requests that are done, by ``places``.

        Subtracts one from ``appended`` for a row whose token could not be hashed.
        """
        failed = self._cache.rows.append(rows, tokens)
        stopped = np.logical_or.reduce(self._stop_ids[rows] == tokens[:, None], axis=1)
        done = stopped | (self._cache.rows.num_tokens[rows] >= self.limit[rows])
        if not (failed or np.count_nonzero(done)):
            return {}
        ended: Ended = {
            places.item(i): (FinishReason.STOP if stopped[i] else FinishReason.LENGTH, None)
            for i in done.nonzero()[0].tolist()
        }
        for i in np.flatnonzero(np.isin(rows, list(failed))).tolist() if failed else ():
            appended[places[i]] -= 1
            ended[places.item(i)] = FinishReason.ERROR, failed[rows.item(i)]
        return ended

    def _append_waiting(self, request: Request, sampled: list[int]) -> int:
        """Append ``sampled`` to a request that lost its row since; return how many tokens were appended."""
        if not self._waiting.complete(request):
            return 0  # the request ended meanwhile
        for count, token in enumerate(sampled, 1):
            try:
                request.append(token)
            except HashError as error:
                self.end([Finished(request, FinishReason.ERROR, error)])
                return count - 1
            stopped = token in request.stop_ids
            if stopped or request.num_tokens >= self.limit_tokens(request):
                self.end([Finished(request, FinishReason.STOP if stopped else FinishReason.LENGTH)])
                return count
        return len(sampled)

    # -- preemption

    def preempt_last(self, in_flight: Iterable[InFlight]) -> None:
        """Preempt the last running request: free its blocks and queue it again."""
        request = self.requests[-1]
        logger.debug("request %r is preempted", request.request_id)
        self.num_preempted += 1
        request.num_preemptions += 1
        self._send_back([request], in_flight, written=True)

    def _send_back(self, requests: Sequence[Request], in_flight: Iterable[InFlight], *, written: bool) -> None:
        """Free the rows of running ``requests``, and queue these at the front, in this order, with 0 computed tokens.

        Args:
            requests: running requests.
            in_flight: steps that may still sample tokens for them.
            written: whether their blocks are valid, so that a resume point is kept if no step in flight holds the row.
        """
        flights, rows = tuple(in_flight), [request.row for request in requests]
        entries = []
        for request, row in zip(requests, rows, strict=True):
            self._waiting.queue_children(request)
            in_flight_steps = sum(flight.release(request, row) for flight in flights)
            if written and not in_flight_steps:
                self._cache.keep_resume_point(request)
            self._cache.free(request)
            request.num_computed_tokens = 0
            entries.append(Waiting(request, self._queue_keys[self.requests.index(request)], in_flight_steps))
        self._remove(rows)
        self._ended_rows += rows
        self._waiting.return_to_front(entries)

    # -- end of requests

    def end(self, ended: Iterable[Finished]) -> None:
        """End requests. A queued one leaves the queue; a running one frees its row when no step in flight holds it.

        Costs O(log waiting + blocks) for each request, and O(running) once.
        """
        rows: list[int] = []
        try:
            for one in ended:
                self._end(one, rows)
        finally:  # if a request raises, the requests before it have ended all the same
            if rows:
                self._remove(rows)

    def _end(self, one: Finished, rows: list[int]) -> None:
        """End one request; add its row to ``rows``, which the caller removes."""
        request = one.request
        if not self._waiting.end(request):
            return
        if one.error is not None:
            logger.warning("request %r ended: %s", request.request_id, one.error, exc_info=one.error)
        self._finished.append(one)
        self.num_finished += 1
        if request.row < 0:
            self._waiting.remove(request)
            self._waiting.forget(request)
            return
        rows.append(request.row)
        if self.steps[request.row]:
            self.dead[request.row] = True
            self.num_dead += 1
        else:
            self._free(request)

    def take_ended_rows(self) -> list[int]:
        """Return the rows freed since the last call, in order."""
        ended, self._ended_rows = self._ended_rows, []
        return ended

    def take_finished(self) -> tuple[Finished, ...]:
        """Return the requests that ended since the last call."""
        finished, self._finished = tuple(self._finished), []
        return finished

    def free_dead(self, flight: InFlight, *, written: bool = True) -> None:
        """Free the dead rows of ``flight`` that no other step holds. written: whether the step was executed."""
        mask = flight.held & self.dead[flight.rows] & (self.steps[flight.rows] == 0)
        for i in mask.nonzero()[0].tolist():
            self.dead[flight.rows[i]] = False
            self.num_dead -= 1
            self._free(flight.requests[i], written=written)

    def _free(self, request: Request, *, written: bool = True) -> None:
        """Free the row of an ended request; publish its blocks before, if they were ``written`` and can be trusted."""
        if written and request.row not in self._distrusted:
            if not self._cache.bounds.keeps_resume_points:  # a resume point publishes them itself
                self._cache.cache_blocks(request, request.num_computed_tokens)
            self._cache.keep_resume_point(request)
        self._distrusted.discard(request.row)
        self._ended_rows.append(request.row)
        self._cache.free(request)
        self._waiting.forget(request)

    # -- after a failure

    def take_back(self, failed: Sequence[InFlight], in_flight: Sequence[InFlight]) -> None:
        """Undo failed steps: unpublish their blocks, and return their requests in order to the front of the queue.

        O(rows of the steps + blocks that they published).

        Args:
            failed: a step in flight and all later ones.
            in_flight: the steps before them, which may still bring results.
        """
        self.failed_steps += len(failed)
        self._cache.revoke(failed[0].step.id)
        touched = set[int]()
        for flight in failed:
            touched.update(self._undo(flight))
        moved = self._cache.fields.forget_moved(np.concatenate([flight.moved for flight in failed]))
        self._distrust(moved)  # the data there is unknown, so these blocks lost their keys
        touched |= moved
        requests = [request for request in self.requests if request.row in touched]
        self._send_back(requests, in_flight, written=False)
        for flight in failed:
            self.free_dead(flight, written=False)

    def _undo(self, flight: InFlight) -> list[int]:
        """Undo the counts of a failed step, report its freed rows again, and return the rows that it still holds."""
        self._ended_rows += flight.step.finished_rows.tolist()
        held = self._complete(flight)
        rows = flight.rows[held]
        self._cache.rows.num_computed[rows] -= flight.step.num_scheduled[held]
        self._cache.rows.in_flight[rows] -= flight.step.num_scheduled[held]
        for request in flight.released.values():
            self._waiting.complete(request)
        numbers: list[int] = rows.tolist()
        if self._cache.bounds.rewrites_states:
            self._distrust(numbers)
        return numbers

    def _distrust(self, rows: Iterable[int]) -> None:
        """Publish no more blocks of the dead rows among ``rows``, because their data is unknown."""
        self._distrusted.update(row for row in rows if self.dead[row])

    # -- invariants

    def check(self, in_flight: Iterable[InFlight], *, others: frozenset[int]) -> None:
        """Raise CacheError unless rows that hold blocks run or are dead, and their counts agree with ``in_flight``.

        ``others``: rows that loads of a tier hold.
        """
        resident = {request.row for request in self._cache.engine.resident_requests()} - others
        dead, rows = set(np.flatnonzero(self.dead).tolist()), set(self.order.tolist())
        if rows & dead or (rows | dead) != resident:
            raise CacheError(f"rows {sorted(rows)} run and {sorted(dead)} are dead, but {sorted(resident)} hold blocks")
        if len(dead) != self.num_dead or [request.row for request in self.requests] != self.order.tolist():
            raise CacheError("the order of running requests and their rows differ")
        steps, pending, num_drafts = (np.zeros_like(self.steps) for _ in range(3))
        for flight in in_flight:
            held = flight.held
            steps[flight.rows[held]] += 1
            pending[flight.rows[held & flight.step.samples]] += 1
            if flight.num_drafts is not None:
                num_drafts[flight.rows[held]] += flight.num_drafts[held]
        live = sorted(resident)
        pairs = (steps, self.steps), (pending, self.pending), (num_drafts, self.num_drafts)
        if not all(np.array_equal(found[live], expected[live]) for found, expected in pairs):
            raise CacheError("the counts of rows differ from the steps in flight")


def _heads(lists: Csr, counts: Int64) -> Csr:
    """Return the first ``counts[i]`` values of each list."""
    indptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    place = np.arange(int(indptr[-1])) - np.repeat(indptr[:-1], counts)
    return Csr(indptr, lists.values[np.repeat(lists.indptr[:-1], counts) + place])


def check_result(step: Step, result: StepResult) -> None:
    """Raise WorkerError unless ``result`` has accepted drafts and one more token for each row that samples."""
    if type(result.id) is not int or type(result.schema_version) is not int:
        raise WorkerError(f"step {step.id}: id and schema_version of the result must be integers")
    if result.schema_version > step.schema_version:
        raise WorkerError(
            f"the result of step {result.id} has schema {result.schema_version}, newer than {step.schema_version}: "
            "upgrade hybridkv on this side"
        )
    if result.id != step.id:
        raise WorkerError(
            f"got the result of step {result.id}, but step {step.id} is next: pass results in the order of their steps"
        )
    sampled = result.sampled
    if not isinstance(sampled, Csr) or not _is_row(sampled.indptr) or not _is_row(sampled.values):
        raise WorkerError(f"step {step.id}: the result must hold sampled tokens as a Csr of integer arrays")
    if len(sampled) != len(step.rows):
        raise WorkerError(f"step {step.id} has {len(step.rows)} rows, but its result has {len(sampled)}")
    indptr = sampled.indptr
    if indptr[0] != 0 or indptr[-1] != len(sampled.values) or np.count_nonzero(indptr[1:] < indptr[:-1]):
        raise WorkerError(
            f"step {step.id}: indptr of the result must rise from 0 to its number of tokens, {len(sampled.values)}, "
            f"but it ends at {indptr[-1]}"
        )
    _check_counts(step, result)
    if np.count_nonzero(sampled.values > MAX_TOKEN_ID):
        raise WorkerError(
            f"step {step.id}: the result has token {sampled.values.max()}, but token ids are at most 2**31 - 1"
        )
    if np.count_nonzero(sampled.values < 0):
        raise WorkerError(f"step {step.id}: the result has token {sampled.values.min()}, but token ids are 0 or more")


def _is_row(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"


def _check_counts(step: Step, result: StepResult) -> None:
    """Raise WorkerError unless rows have as many tokens as they sample, and accepted drafts equal the proposed ones."""
    counts = result.sampled.indptr[1:] - result.sampled.indptr[:-1]
    if result.num_accepted is not None and not np.array_equal(result.num_accepted, counts):
        raise WorkerError(f"step {step.id}: num_accepted of the result must be the number of tokens of each row")
    if not len(step.drafts.values):
        if np.count_nonzero(counts != step.samples):
            raise WorkerError(f"step {step.id}: the result must hold one token for each row that samples, no others")
        return
    if result.num_accepted is None:
        raise WorkerError(f"step {step.id} has drafts, so its result must set num_accepted")
    num_drafts = np.diff(step.drafts.indptr)
    if not (np.array_equal(counts > 0, step.samples) and (counts <= num_drafts + 1).all()):
        raise WorkerError(
            f"step {step.id}: the result must hold 1 .. drafts + 1 tokens for each row that samples, no others"
        )
    kept = np.maximum(counts - 1, 0)
    wrong = _heads(result.sampled, kept).values != _heads(step.drafts, kept).values
    if wrong.any():
        row = np.repeat(step.rows, kept)[wrong.argmax()]
        raise WorkerError(
            f"step {step.id}: tokens accepted for row {row} differ from its drafts: accept equal ones only"
        )
