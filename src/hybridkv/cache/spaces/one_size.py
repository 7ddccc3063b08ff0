"""The order in which free blocks of one size are taken: a ring of ids with lazy removal.

    ring    [ .. | 4 5 6 7 3 2 1 | .. ]      entry i of the order lies at ring[i % capacity]
                   ^ head         ^ tail
    place   block -> the i of its valid entry, NOWHERE if the block is not free

An entry is stale if its block was touched or freed again since: then ``place`` has another i. Taking skips stale
entries. When the ring is full, the valid entries are written anew, which is amortised O(1) a block. Positions grow
without end and start at 0 after that. The order is that of a doubly linked list at the cost of array slices
(docs/design/0001).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import BlockError

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
Ids = NDArray[np.int32] | NDArray[np.int64]  # indexing is faster with 64 bits


class Weight(NamedTuple):
    """Units that would be in use or taken (``needed``), and units that there are for them (``free``).

    A unit is a block or a slab.
    """

    needed: int
    free: int


class Room(NamedTuple):
    """The result of making room.

    Attributes:
        evicted: int32, blocks that lose their keys.
        moves: int32[m, 2], (source, target).
    """

    evicted: Int32
    moves: Int32


NOWHERE: Final = np.iinfo(np.int32).min
FEW: Final = 8
"""Up to so many blocks, taking them one by one takes less time than arrays; 16 take as long."""

_SPAN: Final = 64
_FARTHEST: Final = np.iinfo(np.int32).max


class FreeOrder:
    """Free blocks among ``num_blocks``, at first 1 .. num_blocks - 1 (0 is the null block).

    As the space of a pool it has one class of blocks, and the methods of a SlabSpace that the pool calls.

    ``place`` has the position of every block. If it is given, the order starts empty, holds at most ``num_blocks``
    blocks, and ids reach as far as ``place``. Orders that never hold the same block may share one. ``count`` is the
    number of free blocks.
    """

    def __init__(self, num_blocks: int, place: Int32 | None = None) -> None:
        self._capacity = num_blocks + num_blocks // 2 + 64
        self._ring = np.empty(self._capacity, np.int32)
        if place is not None:
            self._place = place
            self._head = self._tail = self.count = 0
            self._each_ring, self._each_place = self._ring.data, self._place.data
            return
        self._ring[: num_blocks - 1] = np.arange(1, num_blocks, dtype=np.int32)
        self._place = np.arange(-1, num_blocks - 1, dtype=np.int32)
        self._place[0] = NOWHERE
        self._head = 0
        self._tail = num_blocks - 1
        self.count = num_blocks - 1
        self._each_ring, self._each_place = self._ring.data, self._place.data

    def __len__(self) -> int:
        """Return the number of free blocks."""
        return self.count

    def __contains__(self, block: int) -> bool:
        return bool(self._place[block] != NOWHERE)

    @property
    def num_units(self) -> int:
        """All blocks except the null block."""
        return len(self._place) - 1

    def usage(self, reserved: Sequence[int]) -> float:
        """Return held blocks / all except the null block, without ``reserved`` ones."""
        usable = self.num_units - sum(reserved)
        return 1.0 - self.count / usable if usable else 0.0

    def usages(self, reserved: Sequence[int], more: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``usage`` with ``more[i, 0]`` blocks held besides, float64[n]; equal to the last bit."""
        usable = self.num_units - sum(reserved)
        shares: NDArray[np.float64] = 1.0 - (self.count - more.sum(axis=1)) / max(usable, 1)
        return shares if usable else np.zeros(len(more))

    def obtainable(self, of: int = 0) -> int:  # noqa: ARG002 - there is one class of blocks
        """Return the number of blocks that can be taken."""
        return self.count

    def weigh(self, needs: Sequence[int], freed: Sequence[int]) -> Weight:
        """Return the blocks to take, and the free ones with ``freed``."""
        return Weight(sum(needs), self.count + sum(freed))

    def gives(self, needs: Sequence[int]) -> bool:
        """Return whether so many blocks are free."""
        return sum(needs) <= self.count

    def units(self, blocks: Sequence[int]) -> int:
        """Return the number of ``blocks``."""
        return sum(blocks)

    def takes_in_any_order(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:  # noqa: ARG002 - as above
        """Return whether so many are free: there is one order."""
        return sum(needs) <= self.count

    takes_alike = takes_in_any_order  # no block moves

    def waits(self, needs: Sequence[int], freed: Sequence[int]) -> bool:  # noqa: ARG002 - as above
        """Return False: no block moves."""
        return False

    def next_evicted(self, n: int) -> Int32 | None:
        """Return the first ``n`` blocks in order."""
        return self.leading(n)

    def take_oldest(self, n: int, of: int) -> Int32:  # noqa: ARG002 - as above
        """Return no blocks: ``take`` can take all free blocks."""
        return np.empty(0, np.int32)

    def make_room(self, of: int, ref: Int32) -> Room:  # noqa: ARG002 - as above
        """Raise BlockError: ``take`` can take all free blocks."""
        raise BlockError("no block is free: plan before taking")

    def check(self, ref: Int32, keyed: Bool) -> Iterator[str]:
        """Check that the free blocks are those without holders, and that empty ones come before cached ones."""
        order = self.order()
        free = np.flatnonzero(ref[1:] == 0) + 1
        for block in np.setdiff1d(free, order).tolist():
            yield f"block {block} has no holder but is not in the free order"
        if (np.diff(keyed[order].astype(np.int8)) < 0).any():
            yield "a cached block would be taken before an empty one"

    def begin_step(self) -> None:
        """Do nothing: no block moves."""

    def age_first(self, ids: Ids) -> None:
        """Do nothing: the order is that of the last use."""

    def lock(self, ids: Ids) -> None:
        """Do nothing: no block ever moves."""

    def unlock(self, ids: Ids) -> None:
        """Do nothing: no block ever moves."""

    def forget_all(self) -> None:
        """Do nothing: the order stays."""

    def take(self, n: int, of: int = 0) -> Int32:  # noqa: ARG002 - as above
        """Take the first ``n`` blocks, int32[n]. The caller knows that there are n."""
        if n <= FEW:
            return self._take_few(n)
        out, self._head = self._leading(n)
        self._place[out.astype(np.int64)] = NOWHERE
        self.count -= n
        return out

    def _take_few(self, n: int) -> Int32:
        """Take the first ``n`` blocks one by one."""
        ring, place, capacity, i = self._each_ring, self._each_place, self._capacity, self._head
        blocks: list[int] = []
        while len(blocks) < n:
            block = ring[i % capacity]
            if place[block] == i:
                place[block] = NOWHERE
                blocks.append(block)
            i += 1
        self._head = i
        self.count -= n
        return np.array(blocks, np.int32)

    def leading(self, n: int) -> Int32:
        """Return the blocks that ``take`` of at most ``n`` would take, int32. O(n) amortised."""
        n = min(n, self.count)
        if n:
            self.first()  # moves the head past stale entries, which each call would read again
        return self._leading(n)[0]

    def _leading(self, n: int) -> tuple[Int32, int]:
        """Return the first ``n`` blocks, and the position after them."""
        parts: list[Int32] = []
        head = self._head
        missing = span = n
        while missing:
            stop = min(head + span, self._tail)
            ids, valid = self._valid(head, stop)
            if ids.size > missing:
                stop = head + int(valid.nonzero()[0][missing])
                ids = ids[:missing]
            parts.append(ids)
            head = stop
            missing -= ids.size
            span = max(2 * span, _SPAN)  # stale entries were among them: look further at once
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.int32)]), head

    def take_one(self, of: int = 0) -> int:  # noqa: ARG002 - as above
        """Take the first block; 0 without one."""
        if not self.count:
            return 0
        ring, place, capacity, i = self._each_ring, self._each_place, self._capacity, self._head
        while True:
            block: int = ring[i % capacity]
            if place[block] == i:
                break
            i += 1
        self._head = i + 1
        place[block] = NOWHERE
        self.count -= 1
        return block

    def first(self) -> int:
        """Return the block that would be taken first. The caller knows that there is one. O(1) amortised."""
        ring, place, capacity, i = self._each_ring, self._each_place, self._capacity, self._head
        while True:
            block: int = ring[i % capacity]
            if place[block] == i:
                self._head = i  # stale entries are skipped once
                return block
            i += 1

    def rename(self, source: Ids, target: Ids) -> None:
        """Put ``target[i]``, not free, in the place of the free ``source[i]``. O(ids)."""
        places = self._place[source]
        self._ring[places % self._capacity] = target
        self._place[source] = NOWHERE
        self._place[target] = places

    def remove(self, ids: Ids) -> None:
        """Remove free blocks, wherever they are in the order. O(ids)."""
        self._place[ids] = NOWHERE
        self.count -= len(ids)

    def remove_one(self, block: int) -> None:
        """Remove one free block."""
        self._each_place[block] = NOWHERE
        self.count -= 1

    def append(self, ids: Ids) -> None:
        """Append ``ids``: they are taken last, in this order."""
        n = len(ids)
        if self._tail + n - self._head > self._capacity or self._tail + n > _FARTHEST:
            self._compact()
        self._write(self._tail, ids)
        self._tail += n
        self.count += n

    def prepend(self, ids: Ids) -> None:
        """Prepend ``ids``: they are taken first, in this order."""
        n = len(ids)
        if self._tail + n - self._head > self._capacity or n - self._head >= _FARTHEST:
            self._compact()
        self._head -= n
        self._write(self._head, ids)
        self.count += n

    def append_one(self, block: int) -> None:
        """Append one block."""
        if self._tail + 1 - self._head > self._capacity or self._tail + 1 > _FARTHEST:
            self._compact()
        self._each_ring[self._tail % self._capacity] = block
        self._each_place[block] = self._tail
        self._tail += 1
        self.count += 1

    def prepend_one(self, block: int) -> None:
        """Prepend one block."""
        if self._tail + 1 - self._head > self._capacity or 1 - self._head >= _FARTHEST:
            self._compact()
        self._head -= 1
        self._each_ring[self._head % self._capacity] = block
        self._each_place[block] = self._head
        self.count += 1

    def order(self) -> Int32:
        """Return all free blocks in the order in which they would be taken. O(ring)."""
        return self._valid(self._head, self._tail)[0]

    def _valid(self, start: int, stop: int) -> tuple[Int32, NDArray[np.bool_]]:
        """Return the ids of the valid entries in start .. stop-1, a new array, and which entries they are."""
        first, last = start % self._capacity, stop - start + start % self._capacity
        if last <= self._capacity:
            window = self._ring[first:last]
        else:
            window = np.concatenate((self._ring[first:], self._ring[: last - self._capacity]))
        valid = self._place[window.astype(np.int64)] == np.arange(start, stop)
        return window[valid], valid

    def _write(self, start: int, ids: Ids) -> None:
        first = start % self._capacity
        if len(ids) == 1:
            self._ring[first] = block = ids[0]
            self._place[block] = start
            return
        room = self._capacity - first
        self._ring[first : first + len(ids)] = ids[:room]
        if len(ids) > room:
            self._ring[: len(ids) - room] = ids[room:]
        # int32 like the column: converting from 64 bits takes longer than the assignment
        self._place[ids] = np.arange(start, start + len(ids), dtype=np.int32)

    def _compact(self) -> None:
        ids = self.order()
        self._head, self._tail = 0, len(ids)
        self._ring[: len(ids)] = ids
        self._place[ids] = np.arange(len(ids), dtype=np.int32)
