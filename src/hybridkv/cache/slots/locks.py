"""Blocks in a transfer to elsewhere: held, and never moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.errors import CacheError

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class BlockLock:
    """blocks: int32, the pool's numbers, by group."""

    blocks: tuple[Int32, ...]


class Locks:
    """Locks that are held; each block has one more holder for each."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: list[BlockLock] = []

    def __iter__(self) -> Iterator[BlockLock]:
        return iter(tuple(self._held))

    def add(self, blocks: Sequence[Int32]) -> BlockLock:
        """Hold and lock ``blocks``, by group, which somebody holds."""
        lock = BlockLock(tuple(blocks))
        for ids in filter(len, lock.blocks):
            self._pool.touch(ids)
            self._pool.lock(ids)
        self._held.append(lock)
        return lock

    def release(self, lock: BlockLock) -> None:
        """Undo it. CacheError for a lock that is not held."""
        if lock not in self._held:
            raise CacheError("this lock is not held: unlock what was locked, once")
        self._held.remove(lock)
        for ids in filter(len, lock.blocks):
            self._pool.unlock(ids)
            self._pool.free_blocks(ids[::-1])
