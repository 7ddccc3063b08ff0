"""The pool: who holds each block, which blocks are free and in what order.

    block   null | referenced (ref > 0) | free, cached (ref 0, has a key) | free, empty (ref 0, no key)

What makes a block cached is the affair of BlockKeys. Where free blocks come from is the space's: a FreeOrder (one size
of blocks: empty ones are taken before cached ones, cached ones least recently used first) or a SlabSpace (several
sizes). All metadata are flat arrays indexed by block (docs/design/0001). With slabs the blocks of all
classes are numbered in one row here:

    class 0 [ 0 .. n0-1 ] class 1 [ n0 .. n0+n1-1 ] ...      ``local`` turns a number into the id within the class
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
from hybridkv.cache.spaces.one_size import FreeOrder
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.errors import BlockError, CapacityError, ConfigError
from hybridkv.units import MOST_COUNT, shown

logger = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE: Final[Int32] = np.empty(0, np.int32)

NULL_BLOCK: Final = 0


class Taken(NamedTuple):
    """Blocks that were taken, int32[n], and what was moved for them: int64[m, 2] of (source, target), in order.

    held: of each of the moves, bool[m], which of the blocks somebody holds.
    """

    ids: Int32
    moves: Sequence[Int64]
    held: Sequence[NDArray[np.bool_]]


class BlockPool:
    """``num_blocks`` blocks, 0 .. num_blocks - 1; block 0 is the null block, never handed out.

    num_groups: how many prefix indexes there are. journal: where facts are recorded.
    space: where free blocks come from, by default a FreeOrder of all but the null block. silent: groups whose keys
    make no events.
    Attributes for reading: space, keys (what the blocks carry), indexes (theirs, one a group), num_reserved (taken for
    good), epoch (grows with every take, touch and free, and with ``advance_epoch``, so that a plan can tell whether
    it is stale), moved (blocks, so far).
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        journal: Journal | None = None,
        space: SlabSpace | None = None,
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
        self.space: FreeOrder | SlabSpace = FreeOrder(num_blocks) if space is None else space
        self._reserved = [0] * len(self.bases)
        self._ref = np.zeros(num_blocks, np.int32)
        self._each_ref = self._ref.data  # quick to read and write singly

    # -- counts

    def get_num_free_blocks(self) -> int:
        """Blocks that can be taken, cached ones among them."""
        return len(self.space)

    def get_usage(self) -> float:
        """Share of what requests can hold that is held; 0 for a pool of the null block alone."""
        return self.space.usage(self._reserved)

    def get_usages(self, more: Int64) -> NDArray[np.float64]:
        """get_usage, float64[n], with ``more[i, g]`` blocks of each group g held besides, int64[n, groups]."""
        by_class = np.zeros((len(more), len(self.bases)), np.int64)
        for group, of in enumerate(self.classes):
            by_class[:, of] += more[:, group]
        return self.space.usages(self._reserved, by_class)

    @property
    def num_usable(self) -> int:
        """Units that requests can hold, blocks or slabs: all but the null one and those reserved."""
        return self.space.num_units - self.space.units(self._reserved)

    def evictable_per_group(self) -> list[int]:
        """Blocks with a key that nobody holds, per group. O(blocks)."""
        return self.keys.per_group(self._ref == 0)

    def gives(self, needs: Sequence[int]) -> bool:
        """Whether ``needs`` blocks, by group, can be taken now."""
        return not any(needs) or self.space.gives(self.by_class(needs))

    def units(self, blocks: Sequence[int]) -> int:
        """Units that ``blocks``, by group, need besides those reserved, in an empty pool."""
        held = [more + kept for more, kept in zip(self.by_class(blocks), self._reserved, strict=True)]
        return self.space.units(held) - self.space.units(self._reserved)

    def by_class(self, blocks: Sequence[int]) -> list[int]:
        """Counts of ``blocks`` by group, as counts by class."""
        if len(self.bases) == 1:
            return [sum(blocks)]
        counts = [0] * len(self.bases)
        for of, count in zip(self.classes, blocks, strict=True):
            counts[of] += count
        return counts

    def class_of(self, block: int) -> int:
        """The class of ``block``."""
        return bisect_right(self.bases, block) - 1

    def classes_of(self, ids: Int32 | Int64) -> Int64:
        """Return the class of each of ``ids``, int64[len(ids)]."""
        return self._class_bases.searchsorted(ids, "right") - 1

    def local(self, group: int, ids: Int32) -> Int32:
        """``ids`` as a Step names them: within the class of ``group``, 0 for the null block."""
        base = self.bases[self.classes[group]]
        return np.maximum(ids - base, NULL_BLOCK) if base else ids

    def local_each(self, groups: NDArray[np.integer[Any]], ids: Int32) -> Int32:
        """As ``local``, each of ``ids`` within the class of its own of ``groups``, which broadcasts."""
        if len(self.bases) == 1:
            return ids
        within: Int32 = np.maximum(ids - self._group_bases[groups], NULL_BLOCK)
        return within

    def ref_count(self, block: int) -> int:
        """How many rows hold ``block``."""
        return self._each_ref[block]

    def ref_counts(self, ids: Int32 | Int64) -> Int32:
        """How many rows hold each of ``ids``, int32[len(ids)]."""
        counts: Int32 = self._ref[ids]
        return counts

    def count_free(self, ids: Int32) -> int:
        """How many of ``ids`` nobody holds."""
        return len(ids) - int(np.count_nonzero(self._ref[ids])) if len(ids) else 0

    def cached(self) -> NDArray[np.bool_]:
        """Which blocks nobody holds and have a key, bool[num_blocks]. O(num_blocks)."""
        found: NDArray[np.bool_] = (self._ref == 0) & self.keys.are_on(np.arange(self.num_blocks))
        return found

    def free_order(self) -> list[int]:
        """Free blocks in the order they would be taken. O(num_blocks)."""
        ids: list[int] = self.space.order().tolist()
        return ids

    # -- locks and moves

    def advance_epoch(self) -> None:
        """Something changed besides the pool that plans rest on: what rows hold, or have published."""
        self.epoch += 1

    def lock(self, ids: Int32) -> None:
        """Each of ``ids``, held blocks, stays where it is until it is unlocked as often. BlockError for foreign ids."""
        self.refuse_foreign(ids)
        self.space.lock(ids)

    def unlock(self, ids: Int32) -> None:
        """Undo one lock of each of ``ids``. BlockError for one that is not locked."""
        self.refuse_foreign(ids)
        self.space.unlock(ids)

    # -- take, touch, free

    def reserve(self, n: int, group: int = 0) -> Int32:
        """Take ``n`` blocks for good, int32[n]: neither usable nor used. CapacityError if n are not free."""
        of = self.classes[group]
        if n > self.space.obtainable(of):
            raise CapacityError(
                f"{n} blocks are needed for sinks, {self.space.obtainable(of)} of {self.num_blocks} are left: "
                "plan more blocks"
            )
        ids = self.take(n, group).ids if n else np.empty(0, np.int32)
        self.space.lock(ids)  # their layers know where they lie
        self.num_reserved += n
        self._reserved[of] += n
        return ids

    def get_new_blocks(self, n: int, group: int = 0) -> Int32:
        """Take ``n`` blocks for ``group``, int32[n]; each loses its key.

        BlockError if n cannot be had, or, in slabs, not without making room: others' blocks might move, and nobody
        would tell their rows. A manager's own blocks come from ``take``.
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
        """get_new_blocks, and what was moved for them: whoever names one of those blocks must follow. BlockError."""
        of = self.classes[group]
        if not 0 <= n <= self.space.obtainable(of):
            raise BlockError(f"{n} blocks asked for, {self.space.obtainable(of)} are free: plan before taking")
        ids = self.space.take(n, of)
        moves: list[Int64] = []
        held: list[NDArray[np.bool_]] = []
        if len(ids) < n:
            ids = np.concatenate((ids, self._take_with_room(n - len(ids), of, moves, held)))
        if n == 1:
            block = ids.item(0)
            if self.keys.each_group[block] >= 0:
                self.keys.evict_one(block)
            self._each_ref[block] = 1
        else:
            cached = ids[self.keys.are_on(ids)]
            if cached.size:
                self.keys.evict(cached)
            self._ref[ids] = 1
        self.epoch += 1
        return Taken(ids, moves, held)

    def take_one(self, group: int) -> int:
        """``take`` of one block for ``group``, a group of this pool; 0, and nothing done, where room must be made."""
        block = self.space.take_one(self.classes[group])
        if block:
            if self.keys.each_group[block] >= 0:
                self.keys.evict_one(block)
            self._each_ref[block] = 1
            self.epoch += 1
        return block

    def _take_with_room(self, missing: int, of: int, moves: list[Int64], held: list[NDArray[np.bool_]]) -> Int32:
        """``missing`` blocks of class ``of``, room being made for them; those evicted lose their keys together.

        moves, held: become those of Taken.
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
                self._lose(evicted)  # before others come to lie where they were
                evicted = []
                moves.append(room.moves.astype(np.int64))
                held.append(self._ref[moves[-1][:, 0]] > 0)
                self._relocate(moves[-1])
            taken.append(self.space.take(missing, of))
            missing -= len(taken[-1])
        self._lose(evicted)
        return np.concatenate(taken)

    def _lose(self, evicted: Sequence[Int32]) -> None:
        """The blocks of all ``evicted`` can be hit no longer."""
        ids = np.concatenate(evicted) if evicted else _NONE
        if ids.size:
            self.keys.evict(ids)

    def _relocate(self, moves: Int64) -> None:
        """Blocks moved, int64[m, 2]: what is known of the sources is true of the targets from now on."""
        sources, targets = moves[:, 0], moves[:, 1]
        self.moved += len(moves)
        self.keys.follow(moves)
        self._ref[targets] = self._ref[sources]
        self._ref[sources] = 0
        self.epoch += 1

    def touch(self, ids: Int32) -> None:
        """One more holder of each of ``ids`` (distinct); free ones leave the free order. BlockError for foreign ids."""
        self.refuse_foreign(ids)
        self.hold(ids)

    def hold(self, ids: Int32) -> None:
        """``touch`` of blocks of this pool."""
        free = ids[self._ref[ids] == 0]
        if free.size:
            self.space.remove(free)
        if self.journal.times:
            self.journal.record(Used(ids.copy(), self.journal.clock()))
        self._ref[ids] += 1
        self.epoch += 1

    def free_blocks(self, ordered: Int32) -> None:
        """One holder less of each of ``ordered`` (distinct).

        Those without holder become free: without key to the front in the given order, with key to the back.
        BlockError for a foreign id, the null block or a block that nobody holds; then nothing changes.
        """
        self.refuse_foreign(ordered)
        self.release(ordered)

    def release(self, ordered: Int32) -> None:
        """free_blocks of blocks that rows held. BlockError for one that nobody holds; then nothing changes."""
        if len(ordered) < 2:
            if len(ordered):
                self.release_one(ordered.item(0))
            return
        ids = ordered.astype(np.int64)
        held = self._ref[ids]
        if np.count_nonzero(held == 1) == len(held):  # as nearly always
            self._ref[ids] = 0
        else:
            held = self._held(ids)
            self._ref[ids] = held - 1
            ids = ids[held == 1]
        cached = self.keys.are_on(ids)
        if (num_cached := np.count_nonzero(cached)) < len(cached):
            if num_cached == len(cached) - 1 and not cached[0]:  # of a row the last block, which is not full
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
        """``release`` of one block, without arrays of one element. BlockError for one that nobody holds."""
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
        """Which of ``ids``, given back one after the other, lose their last holder by it, bool[n]; some may come twice.

        None unless each of those is cached, so that it goes to the back of the free order.
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
        """One holder less of ``ids``, one after the other; ``last`` as last_releases says."""
        where = ids.astype(np.int64)
        np.subtract.at(self._ref, where, 1)
        self.space.append(where[last])
        if self.journal.blocks is not None and len(where):
            self.journal.blocks.append(Released(where[last]))
        self.epoch += 1

    def free_many(self, parts: Sequence[Int32]) -> None:
        """free_blocks of each of ``parts``, in this order; at once when no block has two holders.

        BlockError as free_blocks, and nothing changes unless a block has two holders.
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
        # what goes first: a later part before an earlier one
        self.space.prepend(ids[~cached][(-part_of[~cached]).argsort(kind="stable")])
        self.space.append(ids[cached])
        if self.journal.blocks is not None and cached.any():
            self.journal.blocks.append(Released(ids[cached][(-part_of[cached]).argsort(kind="stable")]))
        self.epoch += 1

    def _held(self, ids: Int64) -> Int32:
        """How many rows hold each of ``ids``, of this pool; BlockError unless all are held."""
        held: Int32 = self._ref[ids]
        if np.minimum.reduce(held) < 1:
            raise _double_free(int(ids[held < 1][0]))
        return held

    def refuse_foreign(self, ids: Int32) -> None:
        """BlockError unless ``ids`` is an array of blocks of this pool, the null block not among them."""
        _require_ids(ids)
        if ids.size:
            self._refuse_foreign(ids)

    def _refuse_foreign(self, ids: Int32 | Int64) -> None:
        if np.minimum.reduce(ids) <= NULL_BLOCK or np.maximum.reduce(ids) >= self.num_blocks:
            bad = ids[(ids <= NULL_BLOCK) | (ids >= self.num_blocks)]
            raise BlockError(f"block {int(bad[0])} is none of this pool's 1 .. {self.num_blocks - 1}")

    # -- keys, as far as they decide which free block goes first

    def get_cached_block(self, key: bytes, group: int = 0) -> int | None:
        """The block of ``group`` that holds the tokens behind ``key``."""
        index = self.indexes[integer("group", group, 0, len(self.indexes) - 1)]
        return index.get(instance("key", key, bytes))

    def publish(self, group: int, ids: Sequence[int] | Int32, keys: Sequence[bytes], step: int = WRITTEN) -> None:
        """Blocks ``ids`` of ``group``, held ones, can be hit under ``keys`` from now on. CacheError as BlockKeys.

        step: the step that writes them; WRITTEN when they are. O(ids).
        """
        self.keys.publish(group, ids, keys, step)

    def publish_partial(self, group: int, block: int, parent: bytes, tokens: bytes, step: int = WRITTEN) -> bool:
        """``block`` of ``group`` begins with ``tokens`` (bytes of int32) behind ``parent``, and can be hit there.

        False, and nothing done, when some block is known for these very tokens. A parent has few partial keys: the
        oldest goes.
        """
        if self.keys.knows_partial(group, parent, tokens):
            return False
        keyless = self.keys.publish_partial(group, block, parent, tokens, step)
        if keyless is not None:
            self._move_to_front(np.array([keyless], np.int32))
        return True

    def evict_blocks(self, ids: Int32) -> None:
        """Blocks of ``ids`` that have a key lose it, and so can be hit no longer; who holds them keeps them.

        A free one is then as one without key.
        """
        self.refuse_foreign(ids)
        if not ids.size:
            return
        cached = ids[self.keys.are_on(ids)]
        if cached.size:
            self.keys.evict(cached)
            self._move_to_front(cached)

    def _move_to_front(self, ids: Int32) -> None:
        """``ids`` have lost their keys: those that are free are the next to be taken."""
        free = ids[self._ref[ids] == 0]
        if free.size:
            self.space.remove(free)
            self.space.prepend(free)
        self.epoch += 1

    def unpublish_unwritten(self, ids: Int32, first_step: int) -> None:
        """Blocks that steps from ``first_step`` on should have written lose their keys."""
        self.evict_blocks(self.keys.unwritten(np.unique(ids), first_step))

    def supersede(self, blocks: Sequence[int]) -> bool:
        """A later checkpoint is kept: those of ``blocks`` flagged are evicted first. False while one is held."""
        if any(self._ref.item(block) for block in blocks):
            return False
        gone = self.keys.take_supersedable(blocks)
        if gone.size:
            self.space.age_first(gone)
        return True

    def reset_prefix_cache(self) -> bool:
        """Drop all keys, if no block is in use; the free order stays. Returns whether it was done. O(num_blocks)."""
        in_use = int(np.count_nonzero(self._ref)) - self.num_reserved
        if in_use:
            logger.warning("prefix cache not reset: %d blocks are in use", in_use)
            return False
        self.space.forget_all()
        self.keys.clear()
        self.epoch += 1
        return True


def _double_free(block: int) -> BlockError:
    return BlockError(f"double free of block {block}: nobody holds it")


def _require_ids(ids: object) -> None:
    """BlockError unless it is an array that may be of block ids."""
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise BlockError(f"blocks must be an integer array of ids, got {shown(ids)}")
