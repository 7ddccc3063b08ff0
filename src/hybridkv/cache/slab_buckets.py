"""Slabs of one class that have holes, by how full they are: the fullest, or the sparsest, in O(1) amortised.

    bucket   0 (nearly empty) .. 7 (nearly full): (k - holes) * 8 // k; within a bucket the lowest slab first

Heaps with lazy deletion: a slab's entry counts only in the bucket that ``_bucket`` says it is in now.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final

BUCKETS: Final = 8
NOWHERE: Final = -1


class SlabBuckets:
    """num_slabs: of the arena; k: blocks of a slab."""

    def __init__(self, num_slabs: int, k: int) -> None:
        self._k = k
        self._bucket = [NOWHERE] * num_slabs
        self._heaps: list[list[int]] = [[] for _ in range(BUCKETS)]

    def bucket_of(self, holes: int) -> int:
        """Where a slab with ``holes`` holes belongs, NOWHERE for a full one."""
        return (self._k - holes) * BUCKETS // self._k if holes else NOWHERE

    def put(self, slab: int, bucket: int) -> None:
        """``slab`` is in ``bucket`` from now on, or NOWHERE."""
        if self._bucket[slab] == bucket:
            return
        self._bucket[slab] = bucket
        if bucket == NOWHERE:
            return
        heap = self._heaps[bucket]
        heappush(heap, slab)
        if len(heap) > 2 * len(self._bucket):
            heap[:] = {one for one in heap if self._bucket[one] == bucket}
            heapify(heap)

    def get(self, slab: int) -> int:
        """The bucket of ``slab``."""
        return self._bucket[slab]

    def fullest(self) -> int | None:
        """The lowest slab of the fullest bucket that has one."""
        return self._lowest(range(BUCKETS - 1, -1, -1))

    def sparsest(self) -> tuple[int, int] | None:
        """(bucket, slab): the lowest slab of the emptiest bucket that has one."""
        slab = self._lowest(range(BUCKETS))
        return None if slab is None else (self._bucket[slab], slab)

    def _lowest(self, buckets: Iterable[int]) -> int | None:
        for bucket in buckets:
            heap = self._heaps[bucket]
            while heap and self._bucket[heap[0]] != bucket:
                heappop(heap)
            if heap:
                return heap[0]
        return None
