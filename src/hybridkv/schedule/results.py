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
from hybridkv.errors import HashError
from hybridkv.request import Request
from hybridkv.schedule.admission import limit_tokens
from hybridkv.schedule.in_flight import InFlight
from hybridkv.schedule.limits import Finished, FinishReason
from hybridkv.schedule.row_releaser import RowReleaser
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import WaitingQueue
from hybridkv.step import Csr

Int64 = NDArray[np.int64]
Ended = dict[int, FinishReason | HashError]
"""Who is done, by place in the step, and why."""


class Results:
    """Appends what steps sampled; who reached a stop token or its limit departs."""

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
        drafted, attached = flight.drafted, running.complete(flight)
        self._cache.rows.complete(rows[attached], flight.step.num_scheduled[attached])
        alive = attached & ~running.dead[rows] if running.num_dead else attached
        taken = flight.step.samples & alive
        appended = taken.astype(np.int64)
        if drafted is None:
            ended = self._append_one(rows, np.flatnonzero(taken), sampled, appended)
        else:
            ended = self._append_several(rows, np.flatnonzero(taken), sampled, appended)
            self._accept_drafts(
                rows, attached & (drafted > 0), drafted, np.minimum(np.diff(sampled.indptr) - 1, appended)
            )
        if ended:
            self._releaser.end(_finished(flight.requests[i], ended[i]) for i in sorted(ended))
        for place, request in flight.detached.items():
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
            places.item(i): FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            for i in np.flatnonzero(done).tolist()
        }
        for i in np.flatnonzero(np.isin(rows, list(failed))).tolist():
            appended[places[i]] -= 1
            ended[places.item(i)] = failed[rows.item(i)]
        return ended

    def _accept_drafts(self, rows: Int64, mask: NDArray[np.bool_], drafted: Int64, kept: Int64) -> None:
        """Of the drafts that the rows of ``mask`` computed, those not ``kept`` were never there."""
        some = np.flatnonzero(mask)
        self._cache.accept_drafts(rows[some], drafted[some], kept[some])

    # -- requests that were preempted meanwhile

    def _append_waiting(self, request: Request, sampled: list[int]) -> int:
        """A result for a request that was preempted after its step was scheduled; how many tokens were appended."""
        if not self._waiting.complete(request):
            return 0  # it was aborted since
        for count, token in enumerate(sampled, 1):
            try:
                request.append(token)
            except HashError as error:
                self._releaser.end([_finished(request, error)])
                return count - 1
            stopped = token in request.stop_ids
            if stopped or request.num_tokens >= limit_tokens(self._cache, request):
                self._releaser.end([Finished(request, FinishReason.STOP if stopped else FinishReason.LENGTH)])
                return count
        return len(sampled)


def _finished(request: Request, why: FinishReason | HashError) -> Finished:
    return Finished(request, FinishReason.ERROR, why) if isinstance(why, HashError) else Finished(request, why)


def _heads(lists: Csr, counts: Int64) -> Csr:
    """The first ``counts[i]`` of each list."""
    indptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    place = np.arange(int(indptr[-1])) - np.repeat(indptr[:-1], counts)
    return Csr(indptr, lists.values[np.repeat(lists.indptr[:-1], counts) + place])
