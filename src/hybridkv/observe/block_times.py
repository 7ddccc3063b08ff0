"""Measure how long blocks keep their keys, how long they were unused before eviction, and the time between hits.

    first key ---- hit -- gap -- hit ------- idle ------- no key
      '--------------------- lifetime --------------------'

A manager keeps these times only if it was made with ``block_times``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.journal import Cleared, Fact, Ids, Lost, Moved, Named, Used

Float64 = NDArray[np.float64]

EDGES_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
"""Inclusive upper boundaries of histogram buckets, in seconds; one more bucket has all larger values."""
_MOST_ADDED: Final = 1024
"""Arrays that wait before they are binned together, chosen by hand."""


@dataclass(frozen=True, slots=True)
class TimeCounts:
    """A histogram of times.

    Attributes:
        counts: number of values in each bucket of EDGES_S, and last the number of larger values.
        sum_s: sum of all values, seconds.
    """

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class BlockTimeStatistics:
    """Times of blocks since the cache was made.

    Attributes:
        lifetime: from the first key of a block to the loss of its keys.
        idle: from the last hit of a block, or its first key, to the loss of its keys.
        gap: between two hits of a block, or its first key and its first hit.
    """

    lifetime: TimeCounts
    idle: TimeCounts
    gap: TimeCounts


class _Histogram:
    """Counts values in the buckets of EDGES_S; it bins many arrays at once because one at a time is slower."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(EDGES_S) + 1, np.int64)
        self._sum_s = 0.0
        self._added: list[Float64] = []

    def add(self, seconds: Float64) -> None:
        """Add values, float64[n]. Amortized O(n)."""
        self._added.append(seconds)
        if len(self._added) == _MOST_ADDED:
            self._bin()

    def _bin(self) -> None:
        seconds = np.concatenate([np.empty(0), *self._added])
        self._added = []
        self._counts += np.bincount(np.searchsorted(EDGES_S, seconds), minlength=len(self._counts))
        self._sum_s += float(seconds.sum())

    def counts(self) -> TimeCounts:
        """Return the counts of all values added so far."""
        self._bin()
        return TimeCounts(tuple(self._counts.tolist()), self._sum_s)


class BlockTimes:
    """The times of the blocks of one pool. Takes 16 bytes a block.

    Args:
        num_blocks: blocks of the pool.
        clock: returns the time in seconds.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = np.full(num_blocks, np.nan)  # time of the first key; NaN for blocks without a key
        self._hit = np.full(num_blocks, np.nan)  # time of the last hit, or of the first key
        self._lifetime, self._idle, self._gap = _Histogram(), _Histogram(), _Histogram()

    def read(self, fact: Fact) -> None:
        """Record a fact about blocks. O(ids); O(blocks) if all blocks lost their keys."""
        match fact:
            case Named(ids, now):  # a block that already had a key keeps its times
                new = ids[np.isnan(self._begun[ids])]
                self._begun[new] = self._hit[new] = now
            case Used(ids, now):  # blocks without a key do not count
                cached = ids[~np.isnan(self._begun[ids])]
                self._gap.add(now - self._hit[cached])
                self._hit[cached] = now
            case Lost(ids, now):
                self._end(ids, now)
            case Cleared(now):
                self._end(self.kept(), now)
            case Moved(moves):
                sources, targets = moves[:, 0], moves[:, 1]
                for column in (self._begun, self._hit):
                    column[targets] = column[sources]
                    column[sources] = np.nan
            case _:
                pass

    def _end(self, ids: Ids, now: float) -> None:
        self._lifetime.add(now - self._begun[ids])
        self._idle.add(now - self._hit[ids])
        self._begun[ids] = self._hit[ids] = np.nan

    def kept(self) -> NDArray[np.int64]:
        """Return the ids of the blocks that have a key, int64[n]. O(blocks)."""
        return np.flatnonzero(~np.isnan(self._begun))

    def idle(self, ids: Ids) -> tuple[int, ...]:
        """Return a histogram of the idle times of ``ids``, which have keys, by bucket of EDGES_S and above. O(ids)."""
        places = np.searchsorted(EDGES_S, self._clock() - self._hit[ids])
        return tuple(np.bincount(places, minlength=len(EDGES_S) + 1).tolist())

    def idle_s(self, ids: Sequence[int], now: float) -> Float64:
        """Return how long no request used ``ids``, seconds, float64[len(ids)]; NaN for those without a key."""
        found: Float64 = now - self._hit[np.array(ids, np.int64)]
        return found

    def statistics(self) -> BlockTimeStatistics:
        """Return the times since the cache was made."""
        return BlockTimeStatistics(self._lifetime.counts(), self._idle.counts(), self._gap.counts())
