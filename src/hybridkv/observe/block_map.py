"""Where in memory lies what: every block that somebody holds or that has a key, in the order of their addresses.

arena   [ slab or block | ... ]      natural layout: number - base of its class -> slab, and place within the slab
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
    """Of a block that is not free: cached and held by nobody, pinned, or held by requests."""

    CACHED = 1
    PINNED = 2
    RUNNING = 3


@dataclass(frozen=True, slots=True, eq=False)
class BlockMap:
    """Blocks that are not free, by address. blocks: the pool's numbers; starts, ends: bytes in the arena, int64[n].

    groups: of layers, int16[n], -1 for none (sinks). states: BlockState, uint8[n].
    """

    blocks: Int64
    starts: Int64
    ends: Int64
    groups: NDArray[np.int16]
    states: NDArray[np.uint8]

    def at(self, offsets: Int64) -> Int64:
        """Which of the blocks lies at each of ``offsets``, bytes, int64[m]; -1 for free memory. O(m log n)."""
        found = np.searchsorted(self.starts, offsets, side="right") - 1
        if len(self.starts):
            found[offsets >= self.ends[found]] = -1  # what lies before the first one is -1 already, or is found to be
        return np.where(found >= 0, found, -1)


def block_map(config: KVCacheConfig, pool: BlockPool, groups: Sequence[CacheGroup], pins: Pins) -> BlockMap:
    """As memory is now. O(num_blocks + blocks of rows and pins)."""
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
    of = np.searchsorted(pool.bases, blocks, side="right") - 1  # blocks of a class fill the arena, whoever owns it
    size_of = np.zeros(len(pool.bases), np.int64)
    size_of[list(pool.classes)] = [config.block_bytes_of(group) for group in range(len(pool.classes))]
    starts = (blocks - np.array(pool.bases)[of]) * size_of[of]
    ends = starts + size_of[of]
    order = np.argsort(starts, kind="stable")
    blocks = blocks[order]
    return BlockMap(blocks, starts[order], ends[order], owner[blocks], states[blocks])
