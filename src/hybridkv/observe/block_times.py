"""How long blocks keep their keys, how long nobody came before they lost them, and how long between two hits.

    first key ---- hit -- gap -- hit ------- idle ------- no key
      '--------------------- lifetime --------------------'

Nobody keeps it unless it is asked for.
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
"""Seconds that end a bucket, they among them; one more has all above."""
_MOST_ADDED: Final = 1024


@dataclass(frozen=True, slots=True)
class TimeCounts:
    """counts: of each bucket of EDGES_S and of what is above. sum_s: of all, seconds."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class BlockTimeStatistics:
    """So far. lifetime: of blocks that lost their keys. idle: of them, since a hit or the first key. gap: of hits."""

    lifetime: TimeCounts
    idle: TimeCounts
    gap: TimeCounts


class _Histogram:
    """What is added is binned in one go, many at once."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(EDGES_S) + 1, np.int64)
        self._sum_s = 0.0
        self._added: list[Float64] = []

    def add(self, seconds: Float64) -> None:
        """O(seconds)."""
        self._added.append(seconds)
        if len(self._added) == _MOST_ADDED:
            self._bin()

    def _bin(self) -> None:
        seconds = np.concatenate([np.empty(0), *self._added])
        self._added = []
        self._counts += np.bincount(np.searchsorted(EDGES_S, seconds), minlength=len(self._counts))
        self._sum_s += float(seconds.sum())

    def counts(self) -> TimeCounts:
        """As they are now."""
        self._bin()
        return TimeCounts(tuple(self._counts.tolist()), self._sum_s)


class BlockTimes:
    """Of ``num_blocks`` blocks. clock: seconds. 16 bytes a block; all calls O(ids), but for ``clear``."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = np.full(num_blocks, np.nan)  # of blocks that have a key
        self._hit = np.full(num_blocks, np.nan)  # last, or begun
        self._lifetime, self._idle, self._gap = _Histogram(), _Histogram(), _Histogram()

    def read(self, fact: Fact) -> None:
        """Note what happened to blocks. O(ids), O(blocks) where all lost their keys."""
        match fact:
            case Named(ids, now):  # those that had a key before are not new
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
        """Blocks that have a key, int64. O(blocks)."""
        return np.flatnonzero(~np.isnan(self._begun))

    def idle(self, ids: Ids) -> tuple[int, ...]:
        """How many of ``ids``, which have keys, nobody came for how long, by bucket of EDGES_S and above."""
        places = np.searchsorted(EDGES_S, self._clock() - self._hit[ids])
        return tuple(np.bincount(places, minlength=len(EDGES_S) + 1).tolist())

    def idle_s(self, ids: Sequence[int], now: float) -> Float64:
        """Return how long no request used ``ids``, seconds, float64[len(ids)]; NaN for those without a key."""
        found: Float64 = now - self._hit[np.array(ids, np.int64)]
        return found

    def statistics(self) -> BlockTimeStatistics:
        """So far."""
        return BlockTimeStatistics(self._lifetime.counts(), self._idle.counts(), self._gap.counts())
