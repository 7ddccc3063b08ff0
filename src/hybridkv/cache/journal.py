"""What the pool and its keys tell of blocks, as it happens."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Ids = NDArray[np.int32] | NDArray[np.int64]


class Needs(Protocol):
    """What a pool and its keys tell of blocks."""

    def all_needed(self, ids: Ids) -> bool:
        """Whether none of ``ids`` goes first when nobody holds it."""
        ...

    def release(self, ids: Ids) -> None:
        """``ids``, cached, have lost their last holders, in this order."""
        ...

    def release_one(self, block: int) -> None:
        """``release`` of one block, without an array."""
        ...

    def lose(self, ids: Ids) -> None:
        """``ids`` have lost their keys."""
        ...

    def lose_one(self, block: int) -> None:
        """``lose`` of one block, without an array."""
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

    def release_one(self, block: int) -> None:
        """Nothing."""

    def lose(self, ids: Ids) -> None:
        """Nothing."""

    def lose_one(self, block: int) -> None:
        """Nothing."""

    def follow(self, moves: Int64) -> None:
        """Nothing."""

    def clear(self) -> None:
        """Nothing."""
