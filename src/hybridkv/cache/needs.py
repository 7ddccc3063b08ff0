"""What kept ends need: a block that none needs, and nobody holds, can never be hit with profit and goes first.

    counts[block]   how many kept ends need it; who keeps ends counts (hybridkv.cache.slots.judged)
    payers[block]   of several tenants the one whose end needed it first; who it is charged to until none needs it

A block that loses its key is needed by nobody any longer: ``take_lost`` says which of them some end still counted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.spaces.space import ClassedSpace

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


class Weights:
    """Bytes that each tenant is charged, not followed for a single one.

    For reading: of, by number; changed, the tenants whose bytes were changed, until the one reader clears it.
    """

    __slots__ = ("changed", "of")

    def __init__(self, tenants: int) -> None:
        self.of = [0] * tenants
        self.changed = set[int]()

    def add(self, tenant: int, size: int) -> None:
        """Charge ``tenant`` for ``size`` bytes more, or less where it is negative."""
        self.of[tenant] += size
        self.changed.add(tenant)

    def replace(self, sizes: Sequence[int]) -> None:
        """Charge each tenant for so many bytes. O(tenants)."""
        self.of[:] = sizes
        self.changed.update(range(len(sizes)))


class BlockNeeds:
    """Counts for the blocks of ``space``. block_bytes: of each class. tenants: among whom ``weights`` tells apart.

    For reading: both, counts, and each (the same, quick to read singly); weights; cleared (how often all keys were lost
    at once).
    """

    def __init__(self, space: ClassedSpace, block_bytes: Sequence[int], tenants: int = 1) -> None:
        self.space = space
        space.take_given_first()
        self.block_bytes = tuple(block_bytes)
        self.counts = np.zeros(space.num_blocks, np.int32)
        self.each = self.counts.data
        self._sizes = np.array(block_bytes, np.int64)
        self.weights = Weights(tenants)
        self.payers = np.zeros(space.num_blocks if tenants > 1 else 0, np.int32)
        self.cleared = 0
        self._lost: dict[int, int] = {}

    def add(self, ids: Ids, tenant: int) -> None:
        """One more end of ``tenant`` needs each of ``ids``, distinct, with keys; those given up are kept again."""
        counts = self.counts[ids]
        new = ids[counts == 0]
        self.counts[ids] = counts + 1
        if new.size:
            if self.payers.size:
                self.payers[new] = tenant
                self.weights.add(tenant, self._bytes_of(new))
            self.space.keep(new)

    def recount(self, ends: Sequence[tuple[int, Ids]]) -> None:
        """Ends of these tenants, each of which needs these blocks, are all there are. O(blocks and what ends need).

        Of two blocks with one key the first may have been lost: the other one, given up before, is needed in its place.
        """
        unneeded = self.counts == 0
        self.counts.fill(0)
        for _, needed in ends:
            np.add.at(self.counts, needed, 1)
        again = np.flatnonzero(unneeded & (self.counts > 0))
        self.space.keep(again)
        for tenant, needed in reversed(ends) if self.payers.size else ():
            self.payers[np.intersect1d(again, needed)] = tenant
        self.weights.replace(self.charged())

    def _bytes_of_each(self, ids: Ids) -> Int64:
        sizes: Int64 = self._sizes[np.searchsorted(self.space.bases, ids, side="right") - 1]
        return sizes

    def _bytes_of(self, ids: Ids) -> int:
        return int(self._bytes_of_each(ids).sum())

    def hand_on(self, ids: Ids, tenant: int) -> None:
        """``tenant`` is charged for ``ids``, which its ends need, from now on."""
        if self.payers.size:
            self._discharge(ids)
            self.payers[ids] = tenant
            self.weights.add(tenant, self._bytes_of(ids))

    def _discharge(self, ids: Ids) -> None:
        if self.payers.size:
            self.take_off(ids, {})

    def take_off(self, ids: Ids, taken: dict[int, int]) -> None:
        """Of several tenants charge none for ``ids``, and add to ``taken`` what each was charged. O(ids log ids)."""
        payers, place = np.unique(self.payers[ids], return_inverse=True)
        sizes = np.zeros(payers.size, np.int64)
        np.add.at(sizes, place, self._bytes_of_each(ids))
        for tenant, size in zip(payers.tolist(), sizes.tolist(), strict=True):
            self.weights.add(tenant, -size)
            taken[tenant] = taken.get(tenant, 0) + size

    def put_back(self, taken: dict[int, int]) -> None:
        """Charge each tenant again for what ``take_off`` has added to ``taken``."""
        for tenant, size in taken.items():
            self.weights.add(tenant, size)

    def charged(self) -> list[int]:
        """``weights`` counted anew. O(blocks + tenants)."""
        sizes = np.zeros(len(self.weights.of), np.int64)
        if self.payers.size:
            needed = np.flatnonzero(self.counts)
            np.add.at(sizes, self.payers[needed], self._bytes_of_each(needed))
        found: list[int] = sizes.tolist()
        return found

    def drop(self, ids: Ids) -> Ids:
        """One end less needs each of ``ids``, distinct; those that none needs now."""
        counts = self.counts[ids] - 1
        self.counts[ids] = counts
        loose: Ids = ids[counts == 0]
        self._discharge(loose)
        return loose

    def all_needed(self, ids: Ids) -> bool:
        """Whether some end needs each of ``ids``."""
        return bool(self.counts[ids].all())

    def release(self, ids: Ids) -> None:
        """Those that no end needs are given up."""
        loose = ids[self.counts[ids] == 0]
        if loose.size:
            self.space.give_up(loose)

    def release_one(self, block: int) -> None:
        """It is given up if no end needs it."""
        if not self.each[block]:
            self.space.give_up(np.array([block]))

    def lose(self, ids: Ids) -> None:
        """No end needs them, whatever it counted on."""
        if not (self.counts.item(ids.item(0)) if len(ids) == 1 else self.counts[ids].any()):
            return
        needed = ids[self.counts[ids] > 0]
        self._lost.update(zip(needed.tolist(), self.counts[needed].tolist(), strict=True))
        self._discharge(needed)
        self.counts[needed] = 0

    def lose_one(self, block: int) -> None:
        """As ``lose``."""
        if self.each[block]:
            self.lose(np.array([block]))

    @property
    def has_lost(self) -> bool:
        """Whether ``take_lost`` says any."""
        return bool(self._lost)

    def take_lost(self) -> dict[int, int]:
        """Return the blocks that lost their keys since the last call, with how many ends needed each: 1 or more."""
        lost, self._lost = self._lost, {}
        return lost

    def follow(self, moves: Int64) -> None:
        """Counts go with the blocks, and so do blocks that are lost and not yet taken by ``take_lost``."""
        sources, targets = moves[:, 0], moves[:, 1]
        if self._lost:
            moved = dict(moves.tolist())
            self._lost = {moved.get(block, block): count for block, count in self._lost.items()}
        self.counts[targets] = self.counts[sources]
        self.counts[sources] = 0
        if self.payers.size:
            self.payers[targets] = self.payers[sources]

    def clear(self) -> None:
        """No end needs any block."""
        self.counts.fill(0)
        self.weights.replace([0] * len(self.weights.of))
        self._lost = {}
        self.cleared += 1
