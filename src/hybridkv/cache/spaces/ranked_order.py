"""The free blocks of one size under ranked eviction: blocks that nothing needs, then those of kept resume points.

    taken first                                                                       taken last
    [ empty | unneeded, in the order in which they became so ][ needed, least recently used first ]
      ^ first                                                   ^ needed

The eviction policy says which cached blocks no kept resume point needs, and evicts resume points before blocks are
taken. A needed block is taken only if no eviction of a resume point frees a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.spaces.one_size import NOWHERE, FreeOrder, Ids, Room, Weight
from hybridkv.errors import BlockError

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]


class RankedOrder:
    """Free blocks 1 .. num_blocks - 1, at first all empty; 0 is the null block. Its methods are those of SlabSpace.

    Args:
        num_blocks: Blocks, the null block included.
        num_groups: Groups, which share the blocks.

    Attributes:
        num_blocks: Size of arrays indexed by block.
        bases, class_of_group: The one class of blocks, as in SlabSpace.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_blocks = num_blocks
        self.bases, self.class_of_group = (0,), (0,) * num_groups
        self._first = FreeOrder(num_blocks)
        self._needed = FreeOrder(num_blocks, np.full(num_blocks, NOWHERE, np.int32))
        self._is_needed = np.zeros(num_blocks, np.bool_)  # in self._needed
        self._each_needed = self._is_needed.data
        self._is_unneeded = np.zeros(num_blocks, np.bool_)  # cached, in self._first

    # -- counts

    def __len__(self) -> int:
        """Return the number of free blocks."""
        return self._first.count + self._needed.count

    @property
    def num_units(self) -> int:
        """All blocks except the null block."""
        return self.num_blocks - 1

    def usage(self, reserved: Sequence[int]) -> float:
        """Return held blocks / all except the null block, without ``reserved`` ones."""
        usable = self.num_units - sum(reserved)
        return 1.0 - len(self) / usable if usable else 0.0

    def usages(self, reserved: Sequence[int], more: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``usage`` with ``more[i, 0]`` blocks held besides, float64[n]; equal to the last bit."""
        usable = self.num_units - sum(reserved)
        shares: NDArray[np.float64] = 1.0 - (len(self) - more.sum(axis=1)) / max(usable, 1)
        return shares if usable else np.zeros(len(more))

    def obtainable(self, of: int = 0) -> int:  # noqa: ARG002 - there is one class of blocks
        """Return the number of blocks that can be taken."""
        return len(self)

    def weigh(self, needs: Sequence[int], freed: Sequence[int]) -> Weight:
        """Return the blocks to take, and the free ones with ``freed``."""
        return Weight(sum(needs), self._first.count + self._needed.count + sum(freed))

    def gives(self, needs: Sequence[int]) -> bool:
        """Return whether so many blocks are free."""
        return sum(needs) <= self._first.count + self._needed.count

    def waits(self, needs: Sequence[int], freed: Sequence[int]) -> bool:  # noqa: ARG002 - no block moves
        """Return False: no block moves."""
        return False

    def units(self, blocks: Sequence[int]) -> int:
        """Return the number of ``blocks``."""
        return sum(blocks)

    def takes_in_any_order(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Return whether no resume point is evicted for ``needs``, and nothing is released meanwhile."""
        return sum(needs) <= len(self._first) and not drops()

    takes_alike = takes_in_any_order  # no block moves

    def has_spare(self, n: int, of: int) -> bool:  # noqa: ARG002 - there is one class of blocks
        """Return whether ``n`` blocks are empty or unneeded."""
        return n <= self._first.count

    def spares(self, needs: Sequence[int], more: Sequence[int]) -> bool:
        """Return whether ``needs`` blocks are empty or unneeded, with ``more`` that might become so."""
        return sum(needs) <= self._first.count + sum(more)

    def next_evicted(self, n: int) -> Int32 | None:  # noqa: ARG002 - the answer of ranked eviction
        """Return ``None``: the ranking of resume points says it, when blocks are taken."""
        return None

    def order(self) -> Int32:
        """Return all free blocks in the order in which they would be taken. O(blocks)."""
        return np.concatenate((self._first.order(), self._needed.order()))

    def unneeded_blocks(self) -> Bool:
        """Return which blocks are unneeded, bool[num_blocks]."""
        return self._is_unneeded.copy()

    # -- take and release

    def take(self, n: int, of: int = 0) -> Int32:  # noqa: ARG002 - there is one class of blocks
        """Take the first ``n`` blocks, int32[n]. The caller knows that there are n."""
        ids = self._first.take(min(n, len(self._first)))
        self._is_unneeded[ids] = False
        if len(ids) < n:
            late = self._needed.take(n - len(ids))
            self._is_needed[late] = False
            ids = np.concatenate((ids, late))
        return ids

    def take_one(self, of: int = 0) -> int:  # noqa: ARG002 - as above
        """Take the first block; 0 without one."""
        block = self._first.take_one()
        if block:
            self._is_unneeded[block] = False
        elif block := self._needed.take_one():
            self._each_needed[block] = False
        return block

    def take_oldest(self, n: int, of: int) -> Int32:  # noqa: ARG002 - as above
        """Return no blocks: ``take`` can take all free blocks."""
        return np.empty(0, np.int32)

    def make_room(self, of: int, ref: Int32) -> Room:  # noqa: ARG002 - as above
        """Raise BlockError: ``take`` can take all free blocks."""
        raise BlockError("no block is free: plan before taking")

    def remove(self, ids: Ids) -> None:
        """Remove free blocks: they are held from now on. O(ids)."""
        needed = self._is_needed[ids]
        count = int(np.count_nonzero(needed))
        if count < len(ids):
            first = ids[~needed] if count else ids
            self._first.remove(first)
            self._is_unneeded[first] = False
        if count:
            late = ids[needed] if count < len(ids) else ids
            self._needed.remove(late)
            self._is_needed[late] = False

    def append(self, ids: Ids) -> None:
        """Append released blocks with keys, as needed ones until ``mark_unneeded``."""
        self._needed.append(ids)
        self._is_needed[ids] = True

    def append_one(self, block: int) -> None:
        """Append one released block with a key."""
        self._needed.append_one(block)
        self._each_needed[block] = True

    def prepend(self, ids: Ids) -> None:
        """Prepend empty blocks: they are taken first, in this order."""
        self._first.prepend(ids)

    def prepend_one(self, block: int) -> None:
        """Prepend one empty block."""
        self._first.prepend_one(block)

    def mark_unneeded(self, ids: Ids) -> None:
        """Make cached blocks ``ids``, which no kept resume point needs, the last unneeded ones, in this order."""
        ids = ids[self._is_needed[ids]]
        if len(ids):
            self._needed.remove(ids)
            self._is_needed[ids] = False
            self._first.append(ids)
            self._is_unneeded[ids] = True

    def keep(self, ids: Ids) -> None:
        """Make those of ``ids`` that are unneeded and still cached the last to be taken. O(ids)."""
        ids = ids[self._is_unneeded[ids]]
        if len(ids):
            self._first.remove(ids)
            self._is_unneeded[ids] = False
            self.append(ids)

    def forget_all(self) -> None:
        """Make all cached blocks empty, in the order in which they would be taken. O(blocks)."""
        late = self._needed.order()
        if late.size:
            self._needed.remove(late)
            self._is_needed[late] = False
            self._first.append(late)
        self._is_unneeded[:] = False

    def take_unneeded_first(self) -> None:
        """Do nothing: unneeded blocks are always taken first."""

    def begin_step(self) -> None:
        """Do nothing: no block moves."""

    def age_first(self, ids: Ids) -> None:
        """Do nothing: the eviction policy marks unneeded blocks instead."""

    def lock(self, ids: Ids) -> None:
        """Do nothing: no block ever moves."""

    def unlock(self, ids: Ids) -> None:
        """Do nothing: no block ever moves."""

    # -- invariants

    def check(self, ref: Int32, keyed: Bool) -> Iterator[str]:
        """Yield a line for each violated invariant. O(blocks). ``ref``: holders of each block; ``keyed``: has a key."""
        first, needed = self._first.order(), self._needed.order()
        order = np.concatenate((first, needed))
        free = np.flatnonzero(ref[1:] == 0) + 1
        for block in np.setxor1d(free, order).tolist():
            yield f"block {block} has {ref[block]} holders; it is in the free order: {block in order}"
        for block in np.flatnonzero(np.bincount(order, minlength=1) > 1).tolist():
            yield f"block {block} is in the free order twice"
        if (np.diff(keyed[first].astype(np.int8)) < 0).any():
            yield "an unneeded block would be taken before an empty one"
        expected = np.zeros_like(self._is_needed)
        expected[needed] = True
        yield from (f"block {one} is needed by mistake" for one in np.flatnonzero(expected != self._is_needed).tolist())
        expected[:] = False
        expected[first[keyed[first]]] = True
        wrong = np.flatnonzero(expected != self._is_unneeded).tolist()
        yield from (f"block {one} is marked as unneeded: {self._is_unneeded[one]}" for one in wrong)
        if not keyed[needed].all():
            yield "a block without a key is kept for a resume point"
