"""Slabs of one class that have holes, by how full they are: the lowest number of a queue at once, never a scan.

    queue   0 .. 7    unpinned: no block is referenced     bucket 0 is the emptiest eighth, 7 the fullest
            8 .. 15   pinned: at least one block is
            NONE      not a candidate: full, free, or another class's

A queue is a heap of slab numbers. A slab that moves on leaves a stale entry behind, which is dropped when it comes to
the top; a slab is in a heap once at most, so that a heap never outgrows the number of slabs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

BUCKETS: Final = 8
NONE: Final = -1
NO_SLAB: Final = 0
"""The null slab is nobody's candidate, so its number says that there is none."""


class SlabCandidates:
    """Out of ``num_slabs`` slabs (0 is the null slab), cut into ``blocks_per_slab`` blocks; at first none is one."""

    def __init__(self, num_slabs: int, blocks_per_slab: int) -> None:
        self._k = blocks_per_slab
        self._queue = array("b", [NONE]) * num_slabs
        self._queues: NDArray[np.int8] = np.frombuffer(self._queue, np.int8)  # the same memory, for many at once
        self._heaps: list[list[int]] = [[] for _ in range(2 * BUCKETS)]
        self._queued = [bytearray(num_slabs) for _ in range(2 * BUCKETS)]  # whether a heap has an entry for a slab

    def queue_of(self, slab: int) -> int:
        """The queue that ``slab`` is in, NONE for none."""
        return self._queue[slab]

    def put(self, slab: int, holes: int, held: int) -> None:
        """``slab`` has ``holes`` free blocks and ``held`` referenced ones now. O(log slabs) if its queue changes."""
        k = self._k
        queue = (k - holes) * BUCKETS // k + (BUCKETS if held else 0) if 0 < holes < k else NONE
        if self._queue[slab] != queue:
            self._queue[slab] = queue
            if queue != NONE:
                self._enter(slab, queue)

    def put_many(self, slabs: NDArray[np.int64], holes: NDArray[np.int32], held: NDArray[np.int32]) -> None:
        """``put`` of each of ``slabs``, some perhaps more than once; Python turns for those that change queues only."""
        queues = (self._k - holes) * BUCKETS // self._k + BUCKETS * (held > 0)
        queues[(holes == 0) | (holes == self._k)] = NONE
        changed = self._queues[slabs] != queues
        slabs, queues = slabs[changed], queues[changed]
        self._queues[slabs] = queues
        for slab, queue in zip(slabs.tolist(), queues.tolist(), strict=True):
            if queue != NONE:
                self._enter(slab, queue)

    def drop(self, slab: int) -> None:
        """``slab`` is no candidate any more."""
        self._queue[slab] = NONE

    def fullest_pinned(self) -> int:
        """The lowest slab of the fullest bucket that has pinned slabs, else NO_SLAB. O(log slabs) amortised."""
        return self._first(range(2 * BUCKETS - 1, BUCKETS - 1, -1))

    def fullest_unpinned(self) -> int:
        """The lowest slab of the fullest bucket that has unpinned slabs, else NO_SLAB. O(log slabs) amortised."""
        return self._first(range(BUCKETS - 1, -1, -1))

    def emptiest(self, locked: array[int]) -> int:
        """The lowest slab of the emptiest bucket, pinned or not, without locked blocks; else NO_SLAB.

        locked: locks on each slab's blocks. O(log slabs) amortised, O(slabs in a queue) where its first is locked.
        """
        for bucket in range(BUCKETS):
            found = [slab for queue in (bucket, BUCKETS + bucket) if (slab := self._first_unlocked(queue, locked))]
            if found:
                return min(found)
        return NO_SLAB

    def entries(self) -> Iterator[tuple[int, int]]:
        """(slab, queue) of every valid entry of a heap. O(slabs)."""
        for queue, heap in enumerate(self._heaps):
            yield from ((slab, queue) for slab in heap if self._queue[slab] == queue)

    def _enter(self, slab: int, queue: int) -> None:
        if not self._queued[queue][slab]:
            self._queued[queue][slab] = 1
            heappush(self._heaps[queue], slab)

    def _first(self, queues: Iterable[int]) -> int:
        for queue in queues:
            heap = self._heaps[queue]
            while heap:
                slab = heap[0]
                if self._queue[slab] == queue:
                    return slab
                self._queued[queue][heappop(heap)] = 0
        return NO_SLAB

    def _first_unlocked(self, queue: int, locked: array[int]) -> int:
        slab = self._first((queue,))
        if not locked[slab]:
            return slab
        return min(
            (one for one in self._heaps[queue] if self._queue[one] == queue and not locked[one]), default=NO_SLAB
        )
