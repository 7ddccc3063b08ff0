"""Cached blocks of slabs, class by class: in which order they go, how old they are, and which are given up.

given up          no kept end needs them: the first to go
ageless           to go before those with an age
1, 2, 3 ... now   stamps: the release that each lost its last holder in
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.free_order import NOWHERE, FreeOrder, Ids

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]

AGELESS: Final = -(2**60)
"""Stamp of a block that is older than any other."""


class SlabCached:
    """Of ``num_blocks`` handles; class c has at most ``sizes[c]`` of them.

    For reading: orders, and given (how many are given up), by class; stamps and is_given of each handle; now (releases
    so far).
    """

    def __init__(self, num_blocks: int, sizes: Sequence[int]) -> None:
        self.now = 0
        self._place = np.full(num_blocks, NOWHERE, np.int32)  # of a cached block in the order of its class
        self.orders = tuple(FreeOrder(size, self._place) for size in sizes)
        self.stamps = np.zeros(num_blocks, np.int64)
        self.is_given = np.zeros(num_blocks, np.bool_)
        self.given = [0] * len(sizes)

    # -- answers

    def holds(self, block: int) -> bool:
        """Whether ``block`` is cached."""
        return self._place.item(block) != NOWHERE

    def are_in(self, ids: Ids | slice) -> Bool:
        """Which of ``ids`` are cached."""
        cached: Bool = self._place[ids] != NOWHERE
        return cached

    def oldest_stamp(self, of: int) -> int | None:
        """That of the next one of class ``of`` to go, None where there is none."""
        order = self.orders[of]
        return self.stamps.item(order.first()) if len(order) else None

    def num_given(self, ids: Int32, of: int) -> int:
        """How many of ``ids``, the oldest of class ``of``, go until the last one given up is gone."""
        if not self.given[of]:
            return 0
        return min(int(np.cumsum(self.is_given[ids]).searchsorted(self.given[of])) + 1, ids.size)

    def are_young(self, ids: Int32, age: int) -> Bool:
        """Beside which of ``ids`` a block of ``age`` is more than 1.1 times as old."""
        young: Bool = self.now - self.stamps[ids] <= (10 * age - 1) // 11
        return young

    # -- who comes and goes

    def release(self, ids: Ids) -> None:
        """``ids`` are released, one after the other."""
        if len(ids) == 1:
            self.stamps[ids.item(0)] = self.now + 1
        else:
            self.stamps[ids] = np.arange(self.now + 1, self.now + 1 + len(ids))
        self.now += len(ids)

    def append(self, of: int, ids: Ids) -> None:
        """``ids`` of class ``of``, released, are its last to go."""
        self.orders[of].append(ids)

    def remove(self, of: int, ids: Ids) -> None:
        """``ids`` of class ``of`` are cached no longer."""
        self.take_back(of, ids)
        self.orders[of].remove(ids)

    def age_first(self, of: int, ids: Ids) -> None:
        """``ids`` of class ``of`` are its first to go, and ageless."""
        self.orders[of].remove(ids)
        self.orders[of].prepend(ids)
        self.stamps[ids] = AGELESS

    def give_up(self, of: int, ids: Ids) -> None:
        """``ids`` of class ``of`` are given up."""
        self.age_first(of, ids)
        self.given[of] += len(ids) - int(np.count_nonzero(self.is_given[ids]))
        self.is_given[ids] = True

    def take_back(self, of: int, ids: Ids) -> None:
        """``ids`` of class ``of`` are given up no longer, if they were."""
        if self.given[of]:
            self.given[of] -= int(np.count_nonzero(self.is_given[ids]))
            self.is_given[ids] = False

    def move(self, of: int, sources: Int32, targets: Int32, cached: Bool) -> None:
        """Blocks of class ``of`` moved; of each, whether it is cached."""
        self.orders[of].rename(sources[cached], targets[cached])
        self.stamps[targets] = self.stamps[sources]
        self.is_given[targets] = self.is_given[sources]
        self.is_given[sources] = False
