"""Map memory addresses to blocks, for every block that is held or has a key.

    arena   [ block of class 0 ][ block of class 0 ] ...     reference layout: one class of blocks
            [ slab             ][ slab             ] ...     natural layout: each class divides a slab into its blocks

In the map, a block starts at byte (block id - base of its class) x bytes of a block of the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.holds import Pins
from hybridkv.cache.pool import BlockPool
from hybridkv.planner import KVCacheConfig

Int64 = NDArray[np.int64]


class BlockState(IntEnum):
    """State of a block that is not free: cached without a holder, pinned, or held by a request."""

    CACHED = 1
    PINNED = 2
    RUNNING = 3


@dataclass(frozen=True, slots=True, eq=False)
class BlockMap:
    """The blocks that are not free, ordered by address.

    Attributes:
        blocks: block ids, int64[n].
        starts: byte offset of each block in the arena, int64[n].
        ends: byte offset after each block, int64[n].
        groups: group that owns each block, int16[n]; -1 for sinks, which belong to no group.
        states: BlockState of each block, uint8[n].
    """

    blocks: Int64
    starts: Int64
    ends: Int64
    groups: NDArray[np.int16]
    states: NDArray[np.uint8]

    def at(self, offsets: Int64) -> Int64:
        """Return the index of the block at each of ``offsets``, int64[m]; -1 for free memory. O(m log n).

        Args:
            offsets: byte offsets in the arena, int64[m].
        """
        found = np.searchsorted(self.starts, offsets, side="right") - 1
        if len(self.starts):
            found[offsets >= self.ends[found]] = -1  # an offset before the first block has index -1
        return np.where(found >= 0, found, -1)


def block_map(config: KVCacheConfig, pool: BlockPool, groups: Sequence[CacheGroup], pins: Pins) -> BlockMap:
    """Return the map of the blocks of a cache at this time. O(num_blocks + blocks of rows and pins).

    Args:
        config: the config of the cache's plan.
        pool: the block pool.
        groups: the cache groups, by number.
        pins: the pinned prefixes.
    """
    numbers = np.arange(pool.num_blocks)
    held = pool.ref_counts(numbers) > 0
    owner = np.full(pool.num_blocks, -1, np.int16)
    states = np.where(held, BlockState.RUNNING, 0).astype(np.uint8)
    states[pool.cached()] = BlockState.CACHED
    for group in groups:
        owner[pool.keys.in_group(group.number)] = group.number
        for row in np.flatnonzero(group.rows.count).tolist():
            owner[group.rows.held(row)] = group.number
    for pin in pins:
        for number, ids in enumerate(pin.blocks):
            owner[ids], states[ids] = number, BlockState.PINNED
    blocks = np.flatnonzero(states)
    of = np.searchsorted(pool.bases, blocks, side="right") - 1  # the class of each block, by its id
    size_of = np.zeros(len(pool.bases), np.int64)
    size_of[list(pool.classes)] = [config.block_bytes_of(group) for group in range(len(pool.classes))]
    starts = (blocks - np.array(pool.bases)[of]) * size_of[of]
    ends = starts + size_of[of]
    order = np.argsort(starts, kind="stable")
    blocks = blocks[order]
    return BlockMap(blocks, starts[order], ends[order], owner[blocks], states[blocks])
