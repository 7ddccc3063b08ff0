"""Results of steps: sampled tokens go to the requests that they are of, and requests that are done end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request
from hybridkv.schedule.admission import limit_tokens
from hybridkv.schedule.departures import Departures
from hybridkv.schedule.in_flight import InFlight
from hybridkv.schedule.limits import FinishReason
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import WaitingQueue
from hybridkv.step import Csr

Int64 = NDArray[np.int64]


class Results:
    """Appends what steps sampled; who reached a stop token or its limit departs."""

    def __init__(
        self, cache: KVCacheManager, waiting: WaitingQueue, running: RunningRows, departures: Departures
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._departures = departures

    def append(self, flight: InFlight, sampled: Csr) -> Csr:
        """Append the ``sampled`` tokens of ``flight`` and end who is done; what was really appended, CSR."""
        running, rows, samples = self._running, flight.rows, flight.step.samples
        step_counts = flight.step.num_scheduled
        alive = running.settle(flight)
        self._cache.rows.settle(rows[alive], step_counts[alive])
        if running.num_dead:
            alive &= ~running.dead[rows]
        taking = samples & alive
        tokens = sampled.values if taking.sum() == len(sampled.values) else sampled.values[taking[samples]]
        owners = np.flatnonzero(taking)
        self._append_rows(flight, owners, tokens)
        late = [
            position
            for position, request in flight.detached.items()
            if self._append_waiting(request, sampled[position].tolist())
        ]
        if len(tokens) == len(sampled.values) and not late:
            return sampled
        taking[late] = True
        indptr = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(taking, out=indptr[1:])
        return Csr(indptr, sampled.values[taking[samples]])

    def _append_rows(self, flight: InFlight, owners: Int64, tokens: NDArray[np.int32]) -> None:
        running, rows = self._running, flight.rows[owners]
        self._cache.rows.append(rows, tokens)
        stopped = running.stops(rows, tokens)
        ended = stopped | (self._cache.rows.num_tokens[rows] >= running.limit[rows])
        if ended.any():
            self._departures.end(
                (flight.requests[owners[i]], FinishReason.STOP if stopped[i] else FinishReason.LENGTH)
                for i in np.flatnonzero(ended).tolist()
            )

    def _append_waiting(self, request: Request, sampled: list[int]) -> bool:
        """A result for a request that was preempted after its step was scheduled; whether a token was appended."""
        if not self._waiting.settle(request) or not sampled:
            return False  # it was aborted since, or is not done with its prompt
        token = sampled[0]
        request.append(token)
        stopped = token in request.stop_ids
        if stopped or request.num_tokens >= limit_tokens(self._cache, request):
            self._departures.end([(request, FinishReason.STOP if stopped else FinishReason.LENGTH)])
        return True
