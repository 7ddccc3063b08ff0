"""The pool: who holds each block, which blocks are free and in what order, which can be hit.

    block   null | referenced (ref > 0) | free, cached (ref 0, has a key) | free, empty (ref 0, no key)
    free order: empty blocks are taken before cached ones, cached ones least recently used first

All metadata are flat arrays indexed by block id (architecture.md, decision 1).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.events import AllBlocksCleared, BlockRemoved, KVCacheEvent
from hybridkv.cache.free_order import FreeOrder
from hybridkv.cache.index import PrefixIndex
from hybridkv.errors import BlockError, CacheError, CapacityError, ConfigError

logger = logging.getLogger(__name__)

Int32 = NDArray[np.int32]

NULL_BLOCK: Final = 0
WRITTEN: Final = -1


def _wrapped(count: int) -> np.int32:
    """``count`` modulo 2**32 as a signed number, so that differences of close counts are right."""
    return np.int32((count + (1 << 31)) % (1 << 32) - (1 << 31))


class BlockPool:
    """``num_blocks`` blocks, ids 0 .. num_blocks - 1; id 0 is the null block, never handed out.

    num_groups: how many prefix indexes there are. enable_events: collect what take_events returns.
    Attributes for reading: indexes, num_reserved (blocks taken for good), evictions (keys lost so far, grows
    with a reset too), keys_given and keys_lost (so far, per group), epoch (changes with every take, touch and
    free, so that a plan can tell whether it is stale).
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, *, enable_events: bool = False) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a pool needs at least 1 block (the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_reserved = 0
        self.indexes = tuple(PrefixIndex() for _ in range(num_groups))
        self.epoch = 0
        self.evictions = 0
        self._free = FreeOrder(num_blocks)
        self._ref = np.zeros(num_blocks, np.int32)
        self._group = np.full(num_blocks, -1, np.int16)  # of a block's key; -1: no key
        self._keys = np.full(num_blocks, None, np.object_)  # bytes, or None for a block without key
        self._step = np.full(num_blocks, WRITTEN, np.int32)  # the step that will write a published block
        self.keys_given = [0] * num_groups
        self.keys_lost = [0] * num_groups
        self._lost = np.zeros(num_blocks, np.int32)  # evictions when it last lost its key, modulo 2**32
        self._events: list[KVCacheEvent] | None = [] if enable_events else None

    # -- counts

    def get_num_free_blocks(self) -> int:
        """Blocks that can be taken, cached ones among them."""
        return len(self._free)

    def get_usage(self) -> float:
        """Referenced blocks / all blocks but the null block; 0 for a pool of the null block alone."""
        return 1.0 - len(self._free) / self.num_usable if self.num_usable else 0.0

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold: all but the null block and those reserved."""
        return self.num_blocks - 1 - self.num_reserved

    def ref_count(self, block: int) -> int:
        """How many rows hold ``block``."""
        return self._ref.item(block)

    def ref_counts(self, ids: Int32) -> Int32:
        """How many rows hold each of ``ids``, int32[len(ids)]."""
        counts: Int32 = self._ref[ids]
        return counts

    def count_free(self, ids: Int32) -> int:
        """How many of ``ids`` nobody holds."""
        return len(ids) - int(np.count_nonzero(self._ref[ids])) if len(ids) else 0

    def key_of(self, block: int) -> bytes | None:
        """The key under which ``block`` can be hit, None when it cannot."""
        key: bytes | None = self._keys.item(block)
        return key

    def group_of(self, block: int) -> int:
        """The group of the key of ``block``, -1 without key."""
        return self._group.item(block)

    def step_of(self, block: int) -> int:
        """The step that ``block`` waits for, WRITTEN when for none."""
        return self._step.item(block)

    def free_order(self) -> list[int]:
        """Free blocks in the order they would be taken. O(num_blocks)."""
        ids: list[int] = self._free.order().tolist()
        return ids

    def cached_blocks(self) -> list[int]:
        """Blocks with a key, per group. O(num_blocks)."""
        counts: list[int] = np.bincount(self._group[self._group >= 0], minlength=len(self.indexes)).tolist()
        return counts

    def unwritten_blocks(self) -> int:
        """Published blocks whose step is in flight. O(num_blocks)."""
        return int(np.count_nonzero(self._step != WRITTEN))

    # -- take, touch, free

    def reserve(self, n: int) -> Int32:
        """Take ``n`` blocks for good, int32[n]: neither usable nor used. CapacityError if n are not free."""
        if n > len(self._free):
            raise CapacityError(
                f"{n} blocks are needed for sinks, {len(self._free)} of {self.num_blocks} are left: plan more blocks"
            )
        ids = self.get_new_blocks(n) if n else np.empty(0, np.int32)
        self.num_reserved += n
        return ids

    def get_new_blocks(self, n: int) -> Int32:
        """Take ``n`` blocks from the front, int32[n]; each loses its key. BlockError if n are not free."""
        if not 0 <= n <= len(self._free):
            raise BlockError(f"{n} blocks asked for, {len(self._free)} are free: plan before taking")
        ids = self._free.take(n)
        if n == 1:
            if self._group.item(ids.item(0)) >= 0:
                self._evict(ids)
        else:
            cached = ids[self._group[ids] >= 0]
            if cached.size:
                self._evict(cached)
        self._ref[ids] = 1
        self.epoch += 1
        return ids

    def touch(self, ids: Int32) -> None:
        """One more holder of each of ``ids`` (distinct); free ones leave the free order."""
        free = ids[self._ref[ids] == 0]
        if free.size:
            self._free.remove(free)
        self._ref[ids] += 1
        self.epoch += 1

    def free_blocks(self, ordered: Int32) -> None:
        """One holder less of each of ``ordered`` (distinct).

        Those without holder become free: without key to the front in the given order, with key to the back.
        BlockError for a foreign id, the null block or a block that nobody holds; then nothing changes.
        """
        if not ordered.size:
            return
        ids = ordered.astype(np.int64)
        held = self._held(ids)
        if np.maximum.reduce(held) > 1:
            self._ref[ids] = held - 1
            ids = ids[held == 1]
        else:
            self._ref[ids] = 0
        cached = self._group[ids] >= 0
        if cached.all():
            self._free.append(ids)
        else:
            self._free.prepend(ids[~cached])
            self._free.append(ids[cached])
        self.epoch += 1

    def frees_to_back(self, ids: Int32) -> bool:
        """Whether freeing ``ids`` puts each at the back of the free order: cached, distinct, held once."""
        where = ids.astype(np.int64)
        held_once = (self._ref[where] == 1).all() and (self._group[where] >= 0).all()
        return bool(held_once) and len(np.unique(where)) == len(where)

    def free_many(self, parts: Sequence[Int32]) -> None:
        """free_blocks of each of ``parts``, in this order; at once when no block has two holders.

        BlockError as free_blocks, and nothing changes unless a block has two holders.
        """
        if not parts:
            return
        ids = np.concatenate(parts).astype(np.int64)
        if not ids.size:
            return
        if np.maximum.reduce(self._held(ids)) > 1:
            for part in parts:
                self.free_blocks(part)
            return
        self._ref[ids] = 0
        cached = self._group[ids] >= 0
        part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[~cached]
        self._free.prepend(ids[~cached][np.argsort(-part_of, kind="stable")])  # a later part goes before an earlier one
        self._free.append(ids[cached])
        self.epoch += 1

    def _held(self, ids: NDArray[np.int64]) -> Int32:
        """How many rows hold each of ``ids``; BlockError unless all are the pool's and held."""
        self._refuse_foreign(ids)
        held: Int32 = self._ref[ids]
        if np.minimum.reduce(held) < 1:
            raise BlockError(f"double free of block {int(ids[held < 1][0])}: nobody holds it")
        return held

    def refuse_foreign(self, ids: Int32) -> None:
        """BlockError unless all of ``ids`` are blocks of this pool, the null block not among them."""
        if ids.size:
            self._refuse_foreign(ids)

    def _refuse_foreign(self, ids: Int32 | NDArray[np.int64]) -> None:
        if np.minimum.reduce(ids) <= NULL_BLOCK or np.maximum.reduce(ids) >= self.num_blocks:
            bad = ids[(ids <= NULL_BLOCK) | (ids >= self.num_blocks)]
            raise BlockError(f"block {int(bad[0])} is none of this pool's 1 .. {self.num_blocks - 1}")

    # -- keys

    def publish(self, group: int, ids: Sequence[int] | Int32, keys: Sequence[bytes], step: int = WRITTEN) -> None:
        """Blocks ``ids`` of ``group`` can be hit under ``keys`` from now on. CacheError when the numbers differ.

        step: the step that writes them; WRITTEN when they are. O(ids).
        """
        if len(ids) != len(keys):
            raise CacheError(f"{len(ids)} blocks but {len(keys)} keys: publish takes one key for each block")
        if len(ids) == 1:
            self._publish_one(group, int(ids[0]), keys[0], step)
            return
        self.keys_given[group] += len(ids)
        where = np.asarray(ids, np.int64)
        self._keys[where] = np.fromiter(keys, np.object_, len(keys))
        self._group[where] = group
        if step != WRITTEN:
            self._step[where] = step
        self.indexes[group].add(keys, where.tolist())

    def _publish_one(self, group: int, block: int, key: bytes, step: int) -> None:
        """Publish without arrays of one element."""
        self.keys_given[group] += 1
        self._keys[block] = key
        self._group[block] = group
        if step != WRITTEN:
            self._step[block] = step
        self.indexes[group].add((key,), [block])

    def get_cached_block(self, key: bytes, group: int = 0) -> int | None:
        """The block of ``group`` that holds the tokens behind ``key``."""
        return self.indexes[group].get(key)

    def evict_blocks(self, ids: Int32) -> None:
        """Blocks of ``ids`` that have a key lose it, and so can be hit no longer; who holds them keeps them.

        A free one goes to the front of the free order, as it would have without key.
        """
        if not ids.size:
            return
        self._refuse_foreign(ids)
        cached = ids[self._group[ids] >= 0]
        if not cached.size:
            return
        self._evict(cached)
        free = cached[self._ref[cached] == 0]
        if free.size:
            self._free.remove(free)
            self._free.prepend(free)
        self.epoch += 1

    def _evict(self, ids: Int32) -> None:
        """Drop the keys of ``ids``, which all have one."""
        where = ids.astype(np.int64)
        blocks, keys, groups = ids.tolist(), self._keys[where].tolist(), self._group[where].tolist()
        if None in keys:
            block = blocks[keys.index(None)]
            raise CacheError(f"block {block} belongs to the index of group {self.group_of(block)} but has no key")
        if len(self.indexes) == 1:
            self.indexes[0].remove_many(keys, blocks)
            self.keys_lost[0] += len(blocks)
        else:
            for block, key, group in zip(blocks, keys, groups, strict=True):
                self.indexes[group].remove(key, block)
                self.keys_lost[group] += 1
        if self._events is not None:
            written = (self._step[where] == WRITTEN).tolist()
            self._events += [
                BlockRemoved(block_hashes=(key,), group_idx=group)
                for key, group, done in zip(keys, groups, written, strict=True)
                if done
            ]
        self._keys[where] = None
        self._group[where] = -1
        self._step[where] = WRITTEN
        self.evictions += len(blocks)
        self._lost[ids] = _wrapped(self.evictions)

    def kept_keys_since(self, ids: Int32, evictions: int) -> bool:
        """Whether none of ``ids`` lost its key since ``self.evictions`` was ``evictions``. No look-up in the index."""
        if self.evictions == evictions:
            return True
        return not bool((self._lost[ids] - _wrapped(evictions) > 0).any())

    # -- published, then written

    def mark_written(self, ids: Int32, step: int) -> NDArray[np.bool_]:
        """The step that writes ``ids`` is done. bool[len(ids)]: which of them still wait for that very step.

        One that was evicted in the meantime, or published anew by a later step, is not among them.
        """
        now: NDArray[np.bool_] = self._step[ids] == step
        self._step[ids[now]] = WRITTEN
        return now

    def unpublish_unwritten(self, ids: Int32, first_step: int) -> None:
        """Blocks that steps from ``first_step`` on should have written lose their keys."""
        ids = np.unique(ids)
        self.evict_blocks(ids[self._step[ids] >= first_step])

    def all_written(self, ids: Int32) -> bool:
        """Whether each of ``ids`` has been written; the null block is."""
        return bool((self._step[ids] == WRITTEN).all())

    def is_written(self, block: int) -> bool:
        """Whether a published block has been written."""
        return self._step.item(block) == WRITTEN

    # -- everything

    def reset_prefix_cache(self) -> bool:
        """Drop all keys, if no block is in use; the free order stays. Returns whether it was done. O(num_blocks)."""
        in_use = self.num_usable - len(self._free)
        if in_use:
            logger.warning("prefix cache not reset: %d blocks are in use", in_use)
            return False
        for group, count in enumerate(self.cached_blocks()):
            self.keys_lost[group] += count
            self.indexes[group].clear()
        self._keys.fill(None)
        self._group.fill(-1)
        self._step.fill(WRITTEN)
        self._emit(AllBlocksCleared())
        self.epoch += 1
        self.evictions += 1
        self._lost.fill(_wrapped(self.evictions))
        return True

    def emit_stored(self, event: KVCacheEvent) -> None:
        """Collect an event of a block that was written."""
        self._emit(event)

    @property
    def events_enabled(self) -> bool:
        """Whether events are collected."""
        return self._events is not None

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, oldest first; empty when they are off."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def _emit(self, event: KVCacheEvent) -> None:
        if self._events is not None:
            self._events.append(event)
