"""Locks on referenced blocks of slabs: a slab with a locked block gives none of its blocks away."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.free_order import Ids
from hybridkv.cache.blocks.slab_holes import Part, counters
from hybridkv.errors import BlockError


class SlabLocks:
    """Of ``num_blocks`` handles in ``num_slabs`` slabs of ``classes`` classes.

    For reading: of_block; of_slab, and of_slabs on the same memory; slabs (those with locks, by class).
    """

    def __init__(self, num_blocks: int, num_slabs: int, classes: int) -> None:
        self.of_block = np.zeros(num_blocks, np.int32)
        self.of_slab, self.of_slabs = counters(num_slabs)
        self.slabs = [0] * classes

    def add(self, parts: Sequence[Part]) -> None:
        """One more on each block of ``parts``."""
        for of, where, slabs in parts:
            self.slabs[of] += self._unlocked(slabs)
            np.add.at(self.of_slabs, slabs, 1)
            self.of_block[where] += 1

    def remove(self, parts: Sequence[Part]) -> None:
        """One less on each block of ``parts``, which are locked."""
        for of, where, slabs in parts:
            self.of_block[where] -= 1
            np.add.at(self.of_slabs, slabs, -1)
            self.slabs[of] -= self._unlocked(slabs)

    def _unlocked(self, slabs: list[int] | NDArray[np.int64]) -> int:
        return int(np.count_nonzero(self.of_slabs[np.unique(slabs)] == 0))

    def refuse_unlocked(self, ids: Ids) -> None:
        """BlockError unless all of ``ids`` are locked."""
        locks: NDArray[np.int32] = self.of_block[ids]
        if not locks.all():
            raise BlockError(f"block {int(ids[locks == 0][0])} is not locked: unlock what was locked")

    def refuse_locked(self, ids: Ids) -> None:
        """BlockError if one of ``ids`` is locked: free it could be taken, and overwritten under the transfer."""
        if any(self.slabs) and self.of_block[ids].any():
            raise BlockError(
                f"block {int(ids[self.of_block[ids] > 0][0])} is locked: unlock it before its last holder goes"
            )
