"""The pool: how many rows hold each block, which blocks are free, and the order in which free blocks are taken.

    block   null | held (ref > 0) | free and cached (ref 0, has a key) | free and empty (ref 0, no key)

``BlockKeys`` knows the keys. The *space* knows the free blocks: a FreeOrder (blocks of one size: empty blocks are taken
before cached ones, cached ones least recently used first) or a SlabSpace (several sizes). All metadata are flat arrays
indexed by block (docs/design/0001).

With slabs there are several *classes* of blocks, one for each block size. The pool numbers the blocks of all classes in
one row, and ``local`` turns such a number into the id within the class:

    class 0 [ 0 .. n0-1 ]   class 1 [ n0 .. n0+n1-1 ]   ...

    a request's block table, by group          slabs in memory, all of one size
    group 0 (attention)   [ 0 0 7 9 12 ]       slab 1 | 6 7 8 |   class 0: three small blocks
    group 1 (recurrent)   [ n0+4 ]             slab 2 |  n0+4 |   class 1: one large block
                                               slab 3 | (free: any class may take it)         |
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, instances, integer
from hybridkv.cache.journal import Journal, Released, Used
from hybridkv.cache.keys import WRITTEN, BlockKeys
from hybridkv.cache.spaces.one_size import FEW, FreeOrder
from hybridkv.cache.spaces.ranked_order import RankedOrder
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.errors import BlockError, CapacityError, ConfigError
from hybridkv.units import MOST_COUNT, shown

logger = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE: Final[Int32] = np.empty(0, np.int32)

NULL_BLOCK: Final = 0


class Taken(NamedTuple):
    """Blocks that were taken, and the moves that made room for them.

    Attributes:
        ids: int32[n].
        moves: int64[m, 2] arrays of (source, target), in order.
        held: bool[m] for each of ``moves``: whether some request holds the block.
    """

    ids: Int32
    moves: Sequence[Int64]
    held: Sequence[NDArray[np.bool_]]


class BlockPool:
    """Blocks 0 .. num_blocks - 1. Block 0 is the null block, which is never handed out.

    Args:
        num_blocks: Number of blocks, the null block included.
        num_groups: Number of prefix indexes.
        journal: Records facts about blocks.
        space: Where free blocks come from; by default a FreeOrder of all blocks except the null block.
        silent: Groups whose keys make no events.
        columns: By group, (tokens of a block, hash blocks of a block).

    Attributes:
        space: Where free blocks come from.
        keys: The keys of the blocks.
        indexes: The prefix indexes, one a group.
        num_reserved: Blocks that were taken for good.
        epoch: Grows with every change, so that a plan can tell whether it is stale.
        moved: Blocks moved so far.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        journal: Journal | None = None,
        space: RankedOrder | SlabSpace | None = None,
        silent: Sequence[int] = (),
        columns: Sequence[tuple[int, int]] = (),
    ) -> None:
        if integer("num_blocks", num_blocks, most=MOST_COUNT) < 1:
            raise ConfigError(f"a pool needs at least 1 block (the null block), got {num_blocks}")
        integer("num_groups", num_groups, 1, MOST_COUNT)
        self.num_blocks = num_blocks
        self.num_reserved = 0
        self.moved = 0
        self.keys = BlockKeys(num_blocks, num_groups, journal=journal, silent=silent, columns=columns)
        self.journal = self.keys.journal
        self.indexes = self.keys.indexes
        self.epoch = 0
        self.classes = (0,) * num_groups if space is None else space.class_of_group
        self.bases = (0,) if space is None else space.bases
        self._class_bases = np.array(self.bases)
        self._group_bases = np.array([self.bases[one] for one in self.classes], np.int32)
        self.space: FreeOrder | RankedOrder | SlabSpace = FreeOrder(num_blocks) if space is None else space
        self._reserved = [0] * len(self.bases)
        self._ref = np.zeros(num_blocks, np.int32)
        self._each_ref = self._ref.data  # quick to read and write singly

    # -- counts

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that can be taken, cached ones included."""
        return len(self.space)

    def get_usage(self) -> float:
        """Return held blocks divided by those that requests can hold; 0 for a pool of the null block alone."""
        return self.space.usage(self._reserved)

    def get_usages(self, more: Int64) -> NDArray[np.float64]:
        """Return ``get_usage`` with more blocks held, float64[n].

        Args:
            more: int64[n, groups], blocks of each group that would be held besides.
        """
        by_class = np.zeros((len(more), len(self.bases)), np.int64)
        for group, of in enumerate(self.classes):
            by_class[:, of] += more[:, group]
        return self.space.usages(self._reserved, by_class)

    @property
    def num_usable(self) -> int:
        """Blocks, or slabs, that requests can hold: all except the null one and reserved ones."""
        return self.space.num_units - self.space.units(self._reserved)

    def evictable_per_group(self) -> list[int]:
        """Return the number of cached blocks that no request holds, by group. O(blocks)."""
        return self.keys.per_group(self._ref == 0)

    def gives(self, needs: Sequence[int]) -> bool:
        """Return whether blocks can be taken at this moment.

        Args:
            needs: Blocks by group.
        """
        return not any(needs) or self.space.gives(self.by_class(needs))

    def units(self, blocks: Sequence[int]) -> int:
        """Return the blocks, or slabs, that blocks need in an empty pool, reserved ones not counted.

        Args:
            blocks: Blocks by group.
        """
        held = [more + kept for more, kept in zip(self.by_class(blocks), self._reserved, strict=True)]
        return self.space.units(held) - self.space.units(self._reserved)

    def by_class(self, blocks: Sequence[int]) -> list[int]:
        """Return counts by group as counts by class.

        Args:
            blocks: Counts by group.
        """
        if len(self.bases) == 1:
            return [sum(blocks)]
        counts = [0] * len(self.bases)
        for of, count in zip(self.classes, blocks, strict=True):
            counts[of] += count
        return counts

    def class_of(self, block: int) -> int:
        """Return the class of a block.

        Args:
            block: The pool's number.
        """
        return bisect_right(self.bases, block) - 1

    def classes_of(self, ids: Int32 | Int64) -> Int64:
        """Return the class of each block, int64[n].

        Args:
            ids: Numbers of the pool, int[n].
        """
        return self._class_bases.searchsorted(ids, "right") - 1

    def local(self, group: int, ids: Int32) -> Int32:
        """Return ids as a Step names them: within the class of a group, 0 for the null block.

        Args:
            group: The group.
            ids: Numbers of the pool.
        """
        base = self.bases[self.classes[group]]
        return np.maximum(ids - base, NULL_BLOCK) if base else ids

    def local_each(self, groups: NDArray[np.integer[Any]], ids: Int32) -> Int32:
        """Return ids as a Step names them, each within the class of its own group.

        Args:
            groups: The group of each id; broadcasts.
            ids: Numbers of the pool.
        """
        if len(self.bases) == 1:
            return ids
        within: Int32 = np.maximum(ids - self._group_bases[groups], NULL_BLOCK)
        return within

    def ref_count(self, block: int) -> int:
        """Return how many holders a block has.

        Args:
            block: The pool's number.
        """
        return self._each_ref[block]

    def ref_counts(self, ids: Int32 | Int64) -> Int32:
        """Return how many holders each block has, int32[n].

        Args:
            ids: Numbers of the pool, int[n].
        """
        counts: Int32 = self._ref[ids]
        return counts

    def count_free(self, ids: Int32) -> int:
        """Return how many of the blocks have no holder.

        Args:
            ids: Numbers of the pool, int32[n].
        """
        return len(ids) - int(np.count_nonzero(self._ref[ids])) if len(ids) else 0

    def cached(self) -> NDArray[np.bool_]:
        """Return which blocks have a key and no holder, bool[num_blocks]. O(num_blocks)."""
        found: NDArray[np.bool_] = (self._ref == 0) & self.keys.are_on(np.arange(self.num_blocks))
        return found

    def free_order(self) -> list[int]:
        """Return the free blocks in the order in which they would be taken. O(num_blocks)."""
        ids: list[int] = self.space.order().tolist()
        return ids

    # -- locks and moves

    def advance_epoch(self) -> None:
        """Make existing plans stale: something that they rest on changed outside the pool."""
        self.epoch += 1

    def lock(self, ids: Int32) -> None:
        """Keep held blocks in place until they are unlocked as often.

        Args:
            ids: int32[n].

        Raises:
            BlockError: A block is not one of this pool.
        """
        self.refuse_foreign(ids)
        self.space.lock(ids)

    def unlock(self, ids: Int32) -> None:
        """Undo one lock of each block.

        Args:
            ids: int32[n].

        Raises:
            BlockError: A block is not locked.
        """
        self.refuse_foreign(ids)
        self.space.unlock(ids)

    # -- take, touch, free

    def reserve(self, n: int, group: int = 0) -> Int32:
        """Take blocks for good. They count neither as usable nor as used.

        Args:
            n: Number of blocks.
            group: Their group.

        Returns:
            int32[n].

        Raises:
            CapacityError: Fewer are free.
        """
        of = self.classes[group]
        if n > self.space.obtainable(of):
            raise CapacityError(
                f"{n} blocks are needed for sinks, {self.space.obtainable(of)} of {self.num_blocks} are left: "
                "plan more blocks"
            )
        ids = self.take(n, group).ids if n else np.empty(0, np.int32)
        self.space.lock(ids)  # layers keep the addresses of their sinks
        self.num_reserved += n
        self._reserved[of] += n
        return ids

    def get_new_blocks(self, n: int, group: int = 0) -> Int32:
        """Take blocks for a group; each loses its key.

        With slabs, blocks that can be had only after moves are refused: the owners of the moved blocks could not be
        updated. A manager takes its own blocks with ``take``.

        Args:
            n: Number of blocks.
            group: Their group.

        Returns:
            int32[n].

        Raises:
            BlockError: There are fewer, or moves would be needed.
        """
        needs = [0] * len(self.classes)
        needs[integer("group", group, 0, len(self.classes) - 1)] = max(integer("n", n), 0)
        needed = self.by_class(needs)
        if needs[group] <= self.space.obtainable(self.classes[group]) and not self.space.takes_in_any_order(
            needed, lambda: False
        ):
            raise BlockError(f"{n} blocks cannot be had without making room in slabs: allocate them for a request")
        return self.take(n, group).ids

    def take(self, n: int, group: int = 0) -> Taken:
        """Take blocks for a group, and return the moves that made room. The caller updates the owners of moved blocks.

        Args:
            n: Number of blocks.
            group: Their group.

        Raises:
            BlockError: Fewer can be had.
        """
        of = self.classes[group]
        if not 0 <= n <= self.space.obtainable(of):
            raise BlockError(f"{n} blocks asked for, {self.space.obtainable(of)} are free: plan before taking")
        ids = self.space.take(n, of)
        moves: list[Int64] = []
        held: list[NDArray[np.bool_]] = []
        if len(ids) < n:
            ids = np.concatenate((ids, self._take_with_room(n - len(ids), of, moves, held)))
        if n <= FEW:
            each_group, each_ref, few = self.keys.each_group, self._each_ref, list[int]()
            for block in ids.tolist():
                each_ref[block] = 1
                if each_group[block] >= 0:
                    few.append(block)
            if few:
                self.keys.evict_few(few)
        else:
            cached = ids[self.keys.are_on(ids)]
            if cached.size:
                self.keys.evict(cached)
            self._ref[ids] = 1
        self.epoch += 1
        return Taken(ids, moves, held)

    def take_one(self, group: int) -> int:
        """Take one block for a group. Returns 0, and does nothing, if room must be made first.

        Args:
            group: A group of this pool.
        """
        block = self.space.take_one(self.classes[group])
        if block:
            if self.keys.each_group[block] >= 0:
                self.keys.evict_few((block,))
            self._each_ref[block] = 1
            self.epoch += 1
        return block

    def _take_with_room(self, missing: int, of: int, moves: list[Int64], held: list[NDArray[np.bool_]]) -> Int32:
        """Make room for ``missing`` blocks of class ``of`` and take them.

        Appends to ``moves`` and ``held``; see Taken.
        """
        taken, evicted = list[Int32](), list[Int32]()
        while missing:
            ids = self.space.take_oldest(missing, of)
            if ids.size:
                taken.append(ids)
                evicted.append(ids)
                missing -= len(ids)
                continue
            room = self.space.make_room(of, self._ref)
            evicted.append(room.evicted)
            if room.moves.size:
                self._lose(evicted)  # before moved blocks take their places
                evicted = []
                moves.append(room.moves.astype(np.int64))
                held.append(self._ref[moves[-1][:, 0]] > 0)
                self._relocate(moves[-1])
            taken.append(self.space.take(missing, of))
            missing -= len(taken[-1])
        self._lose(evicted)
        return np.concatenate(taken)

    def _lose(self, evicted: Sequence[Int32]) -> None:
        """Remove the keys of all ``evicted`` blocks."""
        ids = np.concatenate(evicted) if evicted else _NONE
        if len(ids) > FEW:
            self.keys.evict(ids)
        elif len(ids):
            self.keys.evict_few(ids.tolist())

    def _relocate(self, moves: Int64) -> None:
        """Note that blocks moved, int64[m, 2]: all facts of the sources become facts of the targets."""
        sources, targets = moves[:, 0], moves[:, 1]
        self.moved += len(moves)
        self.keys.follow(moves)
        self._ref[targets] = self._ref[sources]
        self._ref[sources] = 0
        self.epoch += 1

    def touch(self, ids: Int32) -> None:
        """Add one holder to each of the distinct blocks. Free ones leave the free order.

        Args:
            ids: int32[n].

        Raises:
            BlockError: A block is not one of this pool.
        """
        self.refuse_foreign(ids)
        self.hold(ids)

    def hold(self, ids: Int32) -> None:
        """Add one holder to each of the distinct blocks, which are known to be of this pool.

        Args:
            ids: int32[n].
        """
        held = self._ref[ids]
        if np.count_nonzero(held) < len(held):
            self.space.remove(ids if len(ids) == 1 else ids[held == 0])
        if self.journal.times:
            self.journal.record(Used(ids.copy(), self.journal.clock()))
        self._ref[ids] = held + 1
        self.epoch += 1

    def free_blocks(self, ordered: Int32) -> None:
        """Remove one holder from each of the distinct blocks.

        Blocks without holders become free: blocks without a key go to the front in the given order, blocks with a key
        to the back.

        Args:
            ordered: int32[n].

        Raises:
            BlockError: A block is foreign, the null block, or has no holder. Nothing was changed.
        """
        self.refuse_foreign(ordered)
        self.release(ordered)

    def release(self, ordered: Int32) -> None:
        """Remove one holder from each of the distinct blocks, which are known to be of this pool.

        Args:
            ordered: int32[n].

        Raises:
            BlockError: A block has no holder. Nothing was changed.
        """
        if len(ordered) < 2:
            if len(ordered):
                self.release_one(ordered.item(0))
            return
        ids = ordered.astype(np.int64)
        held = self._ref[ids]
        if np.count_nonzero(held == 1) == len(held):  # the usual case
            self._ref[ids] = 0
        else:
            held = self._held(ids)
            self._ref[ids] = held - 1
            ids = ids[held == 1]
        cached = self.keys.are_on(ids)
        if (num_cached := np.count_nonzero(cached)) < len(cached):
            if num_cached == len(cached) - 1 and not cached[0]:  # the last block of a row, which is not full
                self.space.prepend(ids[:1])
                ids = ids[1:]
            else:
                self.space.prepend(ids[~cached])
                ids = ids[cached]
        self.space.append(ids)
        if self.journal.blocks is not None and ids.size:
            self.journal.blocks.append(Released(ids))
        self.epoch += 1

    def release_one(self, block: int) -> None:
        """Remove one holder from a block, without arrays of one element.

        Args:
            block: The pool's number.

        Raises:
            BlockError: The block has no holder.
        """
        held: int = self._each_ref[block]
        if held < 1:
            raise _double_free(block)
        self._each_ref[block] = held - 1
        if held == 1:
            if self.keys.each_group[block] >= 0:
                self.space.append_one(block)
                if self.journal.blocks is not None:
                    self.journal.blocks.append(Released(np.array([block])))
            else:
                self.space.prepend_one(block)
        self.epoch += 1

    def last_releases(self, ids: Int32) -> NDArray[np.bool_] | None:
        """Return which releases take the last holder of a block, if blocks are released one after another.

        Args:
            ids: int32[n]; a block may occur twice.

        Returns:
            bool[n]. ``None`` unless all of these blocks are cached, so that they go to the back of the free order.
        """
        where = ids.astype(np.int64)
        last = self._ref[where] == 1
        if not last.all():
            order = where.argsort(kind="stable")
            first = np.diff(where[order], prepend=-1).nonzero()[0]
            nth = np.empty(len(where), np.int64)
            nth[order] = np.arange(1, len(where) + 1) - first.repeat(np.diff(first, append=len(where)))
            last = self._ref[where] == nth
        gone = where[last]
        return last if self.keys.are_on(gone).all() else None

    def release_in_turn(self, ids: Int32, last: NDArray[np.bool_]) -> None:
        """Remove one holder from blocks, one after another.

        Args:
            ids: int32[n]; a block may occur twice.
            last: The answer of ``last_releases``.
        """
        where = ids.astype(np.int64)
        np.subtract.at(self._ref, where, 1)
        self.space.append(where[last])
        if self.journal.blocks is not None and len(where):
            self.journal.blocks.append(Released(where[last]))
        self.epoch += 1

    def free_many(self, parts: Sequence[Int32]) -> None:
        """Call ``free_blocks`` for each part, in this order; in one go if no block has two holders.

        Args:
            parts: int32 arrays.

        Raises:
            BlockError: As ``free_blocks``. Nothing was changed, unless a block has two holders.
        """
        if not instances("parts", parts, np.ndarray):
            return
        if not {(part.dtype.kind, part.ndim) for part in parts} <= {("i", 1), ("u", 1)}:
            for part in parts:
                _require_ids(part)
        ids = np.concatenate(parts).astype(np.int64)
        if not ids.size:
            return
        self._refuse_foreign(ids)
        if np.maximum.reduce(self._held(ids)) > 1:
            for part in parts:
                self.free_blocks(part)
            return
        self._ref[ids] = 0
        cached = self.keys.are_on(ids)
        part_of = np.arange(len(parts)).repeat([len(part) for part in parts])
        # the first block to be taken is the last one freed: a later part precedes an earlier one
        self.space.prepend(ids[~cached][(-part_of[~cached]).argsort(kind="stable")])
        self.space.append(ids[cached])
        if self.journal.blocks is not None and cached.any():
            self.journal.blocks.append(Released(ids[cached][(-part_of[cached]).argsort(kind="stable")]))
        self.epoch += 1

    def _held(self, ids: Int64) -> Int32:
        """Return how many holders each of ``ids`` has. Raises BlockError unless all have one."""
        held: Int32 = self._ref[ids]
        if np.minimum.reduce(held) < 1:
            raise _double_free(int(ids[held < 1][0]))
        return held

    def refuse_foreign(self, ids: Int32) -> None:
        """Raise BlockError unless all are blocks of this pool, without the null block.

        Args:
            ids: An integer array.
        """
        _require_ids(ids)
        if ids.size:
            self._refuse_foreign(ids)

    def _refuse_foreign(self, ids: Int32 | Int64) -> None:
        if np.minimum.reduce(ids) <= NULL_BLOCK or np.maximum.reduce(ids) >= self.num_blocks:
            bad = ids[(ids <= NULL_BLOCK) | (ids >= self.num_blocks)]
            raise BlockError(f"block {int(bad[0])} is not one of this pool's blocks 1 .. {self.num_blocks - 1}")

    # -- keys, as far as they decide which free block goes first

    def get_cached_block(self, key: bytes, group: int = 0) -> int | None:
        """Return the block of a group that is found under a key; ``None`` without one.

        Args:
            key: Hash of the block's tokens and of all tokens before it.
            group: The group.
        """
        index = self.indexes[integer("group", group, 0, len(self.indexes) - 1)]
        return index.get(instance("key", key, bytes))

    def publish(self, group: int, ids: Sequence[int] | Int32, keys: Sequence[bytes], step: int = WRITTEN) -> None:
        """Give keys to held blocks, so that they can be hit. O(n).

        Args:
            group: Their group.
            ids: n blocks.
            keys: n keys.
            step: The step that writes them; WRITTEN if they are written.

        Raises:
            CacheError: The numbers of blocks and keys differ.
        """
        self.keys.publish(group, ids, keys, step)

    def publish_partial(self, group: int, block: int, parent: bytes, tokens: bytes, step: int = WRITTEN) -> bool:
        """Give a partial key to a block: it can be hit for its first tokens.

        A parent has few partial keys: the oldest one makes room.

        Args:
            group: The group of the block.
            block: The block.
            parent: Key of the tokens before the block.
            tokens: The block's first tokens, bytes of int32.
            step: The step that writes them; WRITTEN if they are written.

        Returns:
            False, and nothing was done, if some block is known for these very tokens.
        """
        if self.keys.knows_partial(group, parent, tokens):
            return False
        keyless = self.keys.publish_partial(group, block, parent, tokens, step)
        if keyless is not None:
            self._move_to_front(np.array([keyless], np.int32))
        return True

    def evict_blocks(self, ids: Int32) -> None:
        """Remove the keys of blocks. Holders keep the blocks; free ones become empty.

        Args:
            ids: int32[n]; blocks without a key are ignored.

        Raises:
            BlockError: A block is not one of this pool.
        """
        self.refuse_foreign(ids)
        if not ids.size:
            return
        cached = ids[self.keys.are_on(ids)]
        if cached.size:
            self.keys.evict(cached)
            self._move_to_front(cached)

    def _move_to_front(self, ids: Int32) -> None:
        """Make the free ones of ``ids``, which lost their keys, the next blocks to be taken."""
        free = ids[self._ref[ids] == 0]
        if free.size:
            self.space.remove(free)
            self.space.prepend(free)
        self.epoch += 1

    def unpublish_unwritten(self, ids: Int32, first_step: int) -> None:
        """Remove the keys of blocks that failed steps should have written.

        Args:
            ids: int32[n].
            first_step: This step and all later ones failed.
        """
        self.evict_blocks(self.keys.unwritten(np.unique(ids), first_step))

    def supersede(self, blocks: Sequence[int]) -> bool:
        """Make superseded checkpoints the first to be evicted, because a later checkpoint of the same request is kept.

        Args:
            blocks: Checkpoints of one position; only those with the supersedable flag are affected.

        Returns:
            False, and nothing was done, while one of them is held.
        """
        if any(self._ref.item(block) for block in blocks):
            return False
        gone = self.keys.take_supersedable(blocks)
        if gone.size:
            self.space.age_first(gone)
        return True

    def reset_prefix_cache(self) -> bool:
        """Remove all keys, if no block is in use. The free order stays. O(num_blocks).

        Returns:
            Whether it was done.
        """
        in_use = int(np.count_nonzero(self._ref)) - self.num_reserved
        if in_use:
            logger.warning("prefix cache not reset: %d blocks are in use", in_use)
            return False
        self.space.forget_all()
        self.keys.clear()
        self.epoch += 1
        return True


def _double_free(block: int) -> BlockError:
    return BlockError(f"double free of block {block}: no request holds it")


def _require_ids(ids: object) -> None:
    """BlockError unless it is an array that may be of block ids."""
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise BlockError(f"blocks must be an integer array of ids, got {shown(ids)}")
