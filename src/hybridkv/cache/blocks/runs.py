"""Runs of keys that were found one behind the other, with their blocks: what is found again is compared as arrays.

    keys     k0 k1 k2 k3 | k4 k5      looked up once, one by one; from then on the run is found by k0 and compared whole
    blocks   17 18 19 40 | 41 44      true while none of these blocks lost its key

A key says all that lies before it, so what followed k3 once follows it wherever k3 stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

LEAST_KEYS: Final = 64
"""Of a run: fewer are looked up one by one in no time."""

_MOST_EVICTIONS: Final = 1 << 30
"""Between two looks at a run: stamps of blocks are 32 bits wide."""


class Losses(Protocol):
    """Who knows which blocks lost a key; see hybridkv.cache.blocks.block_keys.BlockKeys."""

    evictions: int

    def num_kept(self, ids: Int32, evictions: int) -> int:
        """How many of the leading ``ids`` lost no key since ``evictions`` was that."""
        ...


class _Run:
    """blocks[i] was found under keys[i], and lost no key before ``evictions`` counted so many."""

    __slots__ = ("blocks", "evictions", "keys")

    def __init__(self, keys: list[bytes], blocks: Int32, evictions: int) -> None:
        self.keys, self.blocks, self.evictions = keys, blocks, evictions


class KeyRuns:
    """Runs of one index, found by their first keys. num_keys: in all of them, as often as one stands there."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._runs: dict[bytes, _Run] = {}
        self._swept = losses.evictions
        self.num_keys = 0

    def find(self, keys: Sequence[bytes], stop: int) -> list[Int32]:
        """Blocks of leading ``keys``, at most ``stop``, run by run. O(runs), and comparisons of arrays and lists."""
        parts: list[Int32] = []
        self._sweep_in_time()
        at, before = 0, None
        while at < stop and (run := self._runs.get(keys[at])) is not None:
            count = _common(run.keys, keys, at, stop)
            kept = self._losses.num_kept(run.blocks[:count], run.evictions)
            parts.append(run.blocks[:kept])
            at += kept
            if kept < count:
                self._cut(run, kept)
                break
            whole = count == len(run.keys)
            if before is not None:
                self._join(before, run)
                run = before
            if whole:  # and so was what it was joined to
                run.evictions = self._losses.evictions
            before = run if whole else None
        return parts

    def add(self, keys: Sequence[bytes], found: int, blocks: Int32) -> None:
        """``blocks`` were found under ``keys`` behind the first ``found``, which were found before. O(len(blocks)).

        They lengthen the run of just those first ones, if there is one, or are one of their own.
        """
        before = self._runs.get(keys[0]) if found else None
        new = _Run(list(keys[found : found + len(blocks)]), blocks, self._losses.evictions)
        if before is not None and len(before.keys) == found and before.keys[-1] == keys[found - 1]:
            _lengthen(before, new)
        elif len(blocks) >= LEAST_KEYS and keys[found] not in self._runs:
            self._runs[keys[found]] = new
        else:
            return
        self.num_keys += len(blocks)

    def forget_lost(self) -> None:
        """Runs are as long as their blocks have their keys. O(keys in runs)."""
        for run in list(self._runs.values()):
            kept = self._losses.num_kept(run.blocks, run.evictions)
            if kept < len(run.keys):
                self._cut(run, kept)
            run.evictions = self._losses.evictions
        self._swept = self._losses.evictions

    def shrink(self) -> None:
        """They have become too many: what was lost goes, or else all."""
        before = self.num_keys
        self.forget_lost()
        if self.num_keys > before // 2:
            self.clear()

    def clear(self) -> None:
        """There is none."""
        self._runs.clear()
        self.num_keys = 0

    def _sweep_in_time(self) -> None:
        if self._losses.evictions - self._swept > _MOST_EVICTIONS:
            self.forget_lost()

    def _cut(self, run: _Run, kept: int) -> None:
        """Only the first ``kept`` keys of ``run`` are left; a short one goes."""
        self.num_keys -= len(run.keys) - kept
        first = run.keys[0]
        del run.keys[kept:]
        run.blocks = run.blocks[:kept].copy()
        if kept < LEAST_KEYS:
            self.num_keys -= kept
            del self._runs[first]

    def _join(self, run: _Run, behind: _Run) -> None:
        """``behind`` follows ``run``, and is a part of it from now on."""
        if self._runs.pop(behind.keys[0], None) is not None:
            _lengthen(run, behind)


def _lengthen(run: _Run, behind: _Run) -> None:
    run.keys += behind.keys
    run.blocks = np.concatenate((run.blocks, behind.blocks))
    run.evictions = min(run.evictions, behind.evictions)


def _common(run: list[bytes], keys: Sequence[bytes], at: int, stop: int) -> int:
    """How many keys ``run`` and ``keys`` from ``at`` to ``stop`` begin with: where one agrees, all before it do.

    O(log keys), and O(1) where all agree.
    """
    low, high = 0, min(len(run), stop - at)
    if high and run[high - 1] == keys[at + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if run[middle] == keys[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low
