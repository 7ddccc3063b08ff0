"""What kept ends need: a block that none needs, and nobody holds, can never be hit with profit and goes first.

    counts[block]   how many kept ends need it; who keeps ends counts (hybridkv.cache.slots.judged)

A block that loses its key is needed by nobody any longer: ``take_lost`` says which of them some end still counted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.space import ClassedSpace

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Ids = NDArray[np.int32] | NDArray[np.int64]

_NONE = np.empty(0, np.int32)


class Needs(Protocol):
    """What a pool and its keys tell of blocks."""

    def all_needed(self, ids: Ids) -> bool:
        """Whether none of ``ids`` goes first when nobody holds it."""
        ...

    def release(self, ids: Ids) -> None:
        """``ids``, cached, have lost their last holders, in this order."""
        ...

    def lose(self, ids: Ids) -> None:
        """``ids`` have lost their keys."""
        ...

    def follow(self, moves: Int64) -> None:
        """Blocks moved, int64[m, 2] of (source, target)."""
        ...

    def clear(self) -> None:
        """No block has a key."""
        ...


class NoNeeds:
    """Nobody counts: blocks go in the order of their last use."""

    def all_needed(self, ids: Ids) -> bool:  # noqa: ARG002 - the answer of needs
        """Always."""
        return True

    def release(self, ids: Ids) -> None:
        """Nothing."""

    def lose(self, ids: Ids) -> None:
        """Nothing."""

    def follow(self, moves: Int64) -> None:
        """Nothing."""

    def clear(self) -> None:
        """Nothing."""


class BlockNeeds:
    """Counts for the blocks of ``space``. block_bytes: of each class.

    For reading: both, counts, cleared (how often all keys were lost at once).
    """

    def __init__(self, space: ClassedSpace, block_bytes: Sequence[int]) -> None:
        self.space = space
        space.take_given_first()
        self.block_bytes = tuple(block_bytes)
        self.counts = np.zeros(space.num_blocks, np.int32)
        self.cleared = 0
        self._lost: list[int] = []

    def add(self, ids: Ids) -> None:
        """One more end needs each of ``ids``, distinct ones with keys; those that were given up are kept again."""
        new = ids[self.counts[ids] == 0]
        self.counts[ids] += 1
        if new.size:
            self.space.keep(new)

    def drop(self, ids: Ids) -> Ids:
        """One end less needs each of ``ids``, distinct; those that none needs now."""
        self.counts[ids] -= 1
        loose: Ids = ids[self.counts[ids] == 0]
        return loose

    def all_needed(self, ids: Ids) -> bool:
        """Whether some end needs each of ``ids``."""
        return bool(self.counts[ids].all())

    def release(self, ids: Ids) -> None:
        """Those that no end needs are given up."""
        loose = ids[self.counts[ids] == 0]
        if loose.size:
            self.space.give_up(loose)

    def lose(self, ids: Ids) -> None:
        """No end needs them, whatever it counted on."""
        needed = ids[self.counts[ids] > 0]
        if needed.size:
            self._lost += needed.tolist()
            self.counts[needed] = 0

    def take_lost(self) -> list[int]:
        """Blocks that were lost though ends needed them, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def follow(self, moves: Int64) -> None:
        """Counts go with the blocks."""
        sources, targets = moves[:, 0], moves[:, 1]
        self.counts[targets] = self.counts[sources]
        self.counts[sources] = 0

    def clear(self) -> None:
        """No end needs any block."""
        self.counts.fill(0)
        self._lost = []
        self.cleared += 1
