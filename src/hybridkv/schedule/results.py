"""Results of steps: sampled tokens go to the requests that they are of, and requests that are done end.

drafts    [ d0 | d1 | d2 ]                 of a row with K known tokens, all computed by the step
sampled   [ d0 | d1 | x  ]                 two accepted, and what the model drew behind them
appended  [ d0 | d1 ]                      as far as the request goes on: d1 is a stop token here
computed  K + 2: the drafts accepted and appended; what lies behind is overwritten
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.errors import HashError, WorkerError
from hybridkv.request import MAX_TOKEN_ID, Request
from hybridkv.schedule.limits import Finished, FinishReason
from hybridkv.schedule.row_releaser import RowReleaser
from hybridkv.schedule.running import InFlight, RunningRows
from hybridkv.schedule.waiting import WaitingQueue
from hybridkv.step import Csr, Step, StepResult

Int64 = NDArray[np.int64]
Ended = dict[int, tuple[FinishReason, HashError | None]]
"""Who is done, by place in the step, and why."""


class Results:
    """Appends what steps sampled; who reached a stop token or its limit ends."""

    def __init__(
        self, cache: KVCacheManager, waiting: WaitingQueue, running: RunningRows, releaser: RowReleaser
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._releaser = releaser

    def append(self, flight: InFlight, sampled: Csr) -> Csr:
        """Append the ``sampled`` tokens of ``flight`` and end who is done; what was really appended, CSR."""
        running, rows = self._running, flight.rows
        num_drafts, held = flight.num_drafts, running.complete(flight)
        self._cache.rows.complete(rows[held], flight.step.num_scheduled[held])
        alive = held & ~running.dead[rows] if running.num_dead else held
        taken = flight.step.samples & alive
        appended = taken.astype(np.int64)
        if num_drafts is None:
            ended = self._append_one(rows, taken.nonzero()[0], sampled, appended)
        else:
            ended = self._append_several(rows, taken.nonzero()[0], sampled, appended)
            kept = np.minimum(np.diff(sampled.indptr) - 1, appended)
            some = (held & (num_drafts > 0)).nonzero()[0]
            self._cache.accept_drafts(rows[some], num_drafts[some], kept[some])  # what is not kept was never there
        if ended:
            self._releaser.end(Finished(flight.requests[i], *ended[i]) for i in sorted(ended))
        for place, request in flight.released.items():
            appended[place] = self._append_waiting(request, sampled[place].tolist())
        if appended.sum() == len(sampled.values):
            return sampled
        return _heads(sampled, appended)

    # -- running rows

    def _append_one(self, rows: Int64, places: Int64, sampled: Csr, appended: Int64) -> Ended:
        """The one token of each of the ``places`` in the step; who is done, and why."""
        tokens = sampled.values if len(places) == len(sampled.values) else sampled.values[sampled.indptr[places]]
        return self._append_rows(rows[places], places, tokens, appended)

    def _append_several(self, rows: Int64, places: Int64, sampled: Csr, appended: Int64) -> Ended:
        """Token after token of all ``places``, up to where each is done. ``appended``: tokens of each, is filled in."""
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
        """One token for each of ``rows``: the places of those that are done, and why.

        ``appended`` is one less where the token could not be taken.
        """
        running = self._running
        failed = self._cache.rows.append(rows, tokens)
        stopped = running.stops(rows, tokens)
        done = stopped | (self._cache.rows.num_tokens[rows] >= running.limit[rows])
        if not (failed or done.any()):
            return {}
        ended: Ended = {
            places.item(i): (FinishReason.STOP if stopped[i] else FinishReason.LENGTH, None)
            for i in done.nonzero()[0].tolist()
        }
        for i in np.flatnonzero(np.isin(rows, list(failed))).tolist():
            appended[places[i]] -= 1
            ended[places.item(i)] = FinishReason.ERROR, failed[rows.item(i)]
        return ended

    # -- requests that wait again meanwhile

    def _append_waiting(self, request: Request, sampled: list[int]) -> int:
        """A result for a request that gave up its row after its step was scheduled; how many tokens were appended."""
        if not self._waiting.complete(request):
            return 0  # it was aborted since
        for count, token in enumerate(sampled, 1):
            try:
                request.append(token)
            except HashError as error:
                self._releaser.end([Finished(request, FinishReason.ERROR, error)])
                return count - 1
            stopped = token in request.stop_ids
            if stopped or request.num_tokens >= self._running.limit_tokens(request):
                self._releaser.end([Finished(request, FinishReason.STOP if stopped else FinishReason.LENGTH)])
                return count
        return len(sampled)


def _heads(lists: Csr, counts: Int64) -> Csr:
    """The first ``counts[i]`` of each list."""
    indptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    place = np.arange(int(indptr[-1])) - np.repeat(indptr[:-1], counts)
    return Csr(indptr, lists.values[np.repeat(lists.indptr[:-1], counts) + place])


def check_result(step: Step, result: StepResult) -> None:
    """WorkerError unless ``result`` has the accepted drafts and one token, 0 or more, for each row that samples."""
    if type(result.id) is not int or type(result.schema_version) is not int:
        raise WorkerError(f"step {step.id}: id and schema_version of its result must be integers")
    if result.schema_version > step.schema_version:
        raise WorkerError(
            f"the result of step {result.id} has schema {result.schema_version}, newer than {step.schema_version}: "
            "upgrade hybridkv on this side"
        )
    if result.id != step.id:
        raise WorkerError(f"the result of step {result.id} came where step {step.id} is next: hand results in in order")
    sampled = result.sampled
    if not isinstance(sampled, Csr) or not _is_row(sampled.indptr) or not _is_row(sampled.values):
        raise WorkerError(f"step {step.id}: the result must hold sampled tokens as a Csr of integer arrays")
    if len(sampled) != len(step.rows):
        raise WorkerError(f"step {step.id} has {len(step.rows)} rows, its result {len(sampled)}")
    indptr = sampled.indptr
    if indptr[0] != 0 or indptr[-1] != len(sampled.values) or (indptr[1:] < indptr[:-1]).any():
        raise WorkerError(
            f"step {step.id}: the result has {len(result.sampled.values)} tokens, its indptr ends at {indptr[-1]}"
        )
    _check_counts(step, result)
    if (sampled.values > MAX_TOKEN_ID).any():
        raise WorkerError(f"step {step.id}: sampled tokens must be integers up to 2**31 - 1")
    if sampled.values.size and sampled.values.min() < 0:
        raise WorkerError(f"step {step.id}: token {sampled.values.min()} was sampled: ids are 0 or more")


def _is_row(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"


def _check_counts(step: Step, result: StepResult) -> None:
    """WorkerError unless rows have as many tokens as they sample and accept, and accepted drafts are the drafts."""
    counts = np.diff(result.sampled.indptr)
    if result.num_accepted is not None and not np.array_equal(result.num_accepted, counts):
        raise WorkerError(f"step {step.id}: num_accepted of the result must be the number of its tokens of each row")
    if not len(step.drafts.values):
        if not np.array_equal(counts, step.samples):
            raise WorkerError(f"step {step.id}: the result must hold one token for each row that samples, none else")
        return
    if result.num_accepted is None:
        raise WorkerError(f"step {step.id} has drafts: its result must say num_accepted")
    num_drafts = np.diff(step.drafts.indptr)
    if not (np.array_equal(counts > 0, step.samples) and (counts <= num_drafts + 1).all()):
        raise WorkerError(
            f"step {step.id}: the result must hold 1 .. drafts + 1 tokens for each row that samples, none else"
        )
    kept = np.maximum(counts - 1, 0)
    owner = np.repeat(np.arange(len(kept)), kept)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(kept) - kept, kept)
    sampled = result.sampled.values[result.sampled.indptr[owner] + place]
    wrong = owner[sampled != step.drafts.values[step.drafts.indptr[owner] + place]]
    if wrong.size:
        row = step.rows[wrong[0]]
        raise WorkerError(f"step {step.id}: tokens accepted of row {row} are not its drafts: accept equal ones only")
