"""What a replay looked like on the way: samples of the cache and the queue, and when each request did what.

    steps -> look(now) -> at most MOST_SAMPLES samples: when there are more, every other one goes and the next are
                          twice as far apart
    ends  -> end(...)  -> a row for each request

A stride is looked at before and behind, never within: nobody comes or goes there, and what it wrote is as old as its
end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import MissReason
from hybridkv.schedule import Scheduler

Float64 = NDArray[np.float64]

MOST_SAMPLES: Final = 1024
_FIRST_INTERVAL_S: Final = 1 / 16
_REASONS: Final = tuple(MissReason)


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns of n samples.

    time_s: float64[n]. running, waiting: requests, int64[n]. prompt_tokens, hit_tokens: of requests that began so far,
    int64[n]. held, evictable: blocks of each group, int64[n, groups]. usage: float64[n]. missed: tokens by MissReason
    so far, int64[n, reasons], zeros where misses are not explained.
    """

    time_s: Float64
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    held: NDArray[np.int64]
    evictable: NDArray[np.int64]
    usage: Float64
    missed: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Columns of all requests, in the order of their ends, float64[requests]: seconds of the trace, and tokens.

    begun_s: when the first step began that it was in.
    """

    arrival_s: Float64
    begun_s: Float64
    first_token_s: Float64
    end_s: Float64
    prompt_tokens: Float64
    hit_tokens: Float64
    output_tokens: Float64


@dataclass(frozen=True, slots=True)
class Recorded:
    """All of it. idle: by group, how many cached blocks nobody came for how long, at the end (EDGES_S)."""

    samples: Samples
    requests: RequestTimes
    idle: tuple[tuple[int, ...], ...]


class Recording:
    """Of a replay over ``scheduler``, whose cache counts block times."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._samples: list[tuple[float, ...]] = []
        self._groups = len(scheduler.cache.groups)
        self._interval_s, self._next_s = _FIRST_INTERVAL_S, 0.0
        self._requests = tuple(array("d") for _ in RequestTimes.__dataclass_fields__)

    def look(self, now_s: float, *, last: bool = False) -> None:
        """A sample, if it is time for one, or the ``last``. O(blocks)."""
        if now_s < self._next_s and not last:
            return
        self._samples.append(self._sample(now_s))
        if len(self._samples) > MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._interval_s *= 2
        self._next_s = now_s + self._interval_s

    def _sample(self, now_s: float) -> tuple[float, ...]:
        scheduler = self._scheduler
        counts, kept = scheduler.statistics(), scheduler.cache.statistics()
        return (
            now_s,
            counts.running,
            counts.waiting,
            counts.prompt_tokens,
            counts.hit_tokens,
            scheduler.cache.usage,
            *(group.held_blocks for group in kept.groups),
            *(group.evictable_blocks for group in kept.groups),
            *(counts.misses.get(reason, 0) for reason in _REASONS),
        )

    def end(self, times: tuple[float, float, float, float], tokens: tuple[int, int, int]) -> None:
        """A request: when it arrived, began, said its first token and ended; tokens of prompt, hit and output."""
        for column, value in zip(self._requests, (*times, *tokens), strict=True):
            column.append(value)

    def recorded(self) -> Recorded:
        """So far."""
        table = np.array(self._samples, np.float64).reshape(len(self._samples), -1)
        time_s, running, waiting, prompt, hit, usage = table[:, :6].T
        held, evictable, missed = np.split(table[:, 6:].astype(np.int64), (self._groups, 2 * self._groups), axis=1)
        running, waiting, prompt, hit = (column.astype(np.int64) for column in (running, waiting, prompt, hit))
        samples = Samples(time_s, running, waiting, prompt, hit, held, evictable, usage, missed)
        idle = self._scheduler.cache.engine.idle_blocks()
        return Recorded(samples, RequestTimes(*map(np.array, self._requests)), idle)
