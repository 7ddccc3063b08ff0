"""The space of a pool with slabs: which blocks are free, which are evicted next, and which class gives a slab to which.

    memory        | slab 1 | slab 2 | slab 3 | ...          all slabs have one size
    class 0       | 0 1 2  |        | 6 7 8  |              a slab of small blocks
    class 1       |        |   b    |                       a slab of one large block

    block of an owned slab   referenced | cached (free, has a key, in the LRU of its class) | hole (free, no key)

    take a block    from the slabs' holes (slab_holes); if there are none, make room and try again
    make room       the other class with the oldest cached block gives a slab, if that block is older than 1.1 times the
                    own oldest one, or if there is no own one; else the own oldest block is evicted
    unneeded        cached blocks that no kept resume point needs go first: own ones, then those of a class that has a
                    slab of them and holes; no other block is evicted while ``spares`` returns True
    give a slab     evict the oldest blocks until a slab is whole or there are holes for one; then move the live blocks
                    of the emptiest slab, referenced ones too, into other holes: at most k - 1 moves for k blocks

docs/design/0010 has the rule and its measurements. Every set of blocks that ``fits`` can be taken: after each
make_room, take returns at least one block more. With one class and k = 1 the ids equal those of FreeOrder. Keys, rows
and holders are the concern of the pool.

Cached blocks of each class are ordered by stamps:

    unneeded          no kept resume point needs them: evicted first
    ageless           evicted before those with an age
    1, 2, 3 ... now   the number of the release in which each block lost its last holder
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import sub
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.spaces.one_size import NOWHERE, FreeOrder, Ids, Room, Weight
from hybridkv.cache.spaces.slab_holes import BUCKETS, NO_SLAB, NONE, QUEUES, Part, SlabHoles, counters
from hybridkv.errors import BlockError, CacheError
from hybridkv.planner.config import SlabLayout

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]

AGELESS: Final = -(2**60)
"""Stamp of a block that is older than any other."""


_NONE: Final = np.empty(0, np.int32)
_NO_MOVES: Final = np.empty((0, 2), np.int32)


class SlabSpace:
    """The slabs of a layout. At first all are free, and slab 1 is taken first.

    Args:
        layout: The classes of blocks and the number of slabs.
        max_moved_bytes: After so many moved bytes in a step, requests that need more moves wait; ``None``: no bound.

    Attributes:
        num_blocks: Size of arrays indexed by block.
        num_slabs: Usable slabs, without the null slab.
        ks: By class, blocks of a slab.
        bases: By class, the number of its first block.
        class_of_group: By group, its class.
        referenced, holes, num_unneeded: By class, numbers of blocks.
        slabs, locked_slabs: By class, owned slabs, and those with locked blocks.
        moved_blocks, transfers: By class, blocks moved and slabs given to other classes, so far.
        stamps, is_unneeded, locks: By block.
        slab_locks: By slab, locks on its blocks.
        now: Releases so far.
    """

    def __init__(self, layout: SlabLayout, max_moved_bytes: int | None = None) -> None:
        total = layout.num_slabs
        self._block_bytes = [one.block_bytes for one in layout.classes]
        self._max_moved_bytes, self._moved_bytes, self._is_spent = max_moved_bytes, 0, False
        self.ks = tuple(one.blocks_per_slab for one in layout.classes)
        self.num_slabs = total - 1
        self.class_of_group = tuple(
            next(of for of, one in enumerate(layout.classes) if group in one.groups)
            for group in range(len(layout.kernel_blocks))
        )
        self._holes = SlabHoles(total, self.ks)
        self.num_blocks, self.bases = self._holes.num_blocks, self._holes.bases
        self.referenced, self.holes, self.slabs = self._holes.referenced, self._holes.holes, self._holes.slabs
        self.moved_blocks, self.transfers = [0] * len(self.ks), [0] * len(self.ks)
        self.now = 0
        self._place = np.full(self.num_blocks, NOWHERE, np.int32)  # place of a cached block in its class's order
        self._lru = tuple(FreeOrder(total * k, self._place) for k in self.ks)
        self.stamps = np.zeros(self.num_blocks, np.int64)
        self._each_place, self._each_stamp = self._place.data, self.stamps.data  # quick to read and write singly
        self.is_unneeded = np.zeros(self.num_blocks, np.bool_)
        self.num_unneeded, self._unneeded_first = [0] * len(self.ks), False
        self.locks = np.zeros(self.num_blocks, np.int32)
        self.slab_locks, self._all_slab_locks = counters(total)  # on the same memory
        self.locked_slabs = [0] * len(self.ks)

    # -- counts

    def __len__(self) -> int:
        """Return the blocks of owned slabs that are not referenced."""
        return sum(self.holes) + sum(self.cached)

    @property
    def cached(self) -> list[int]:
        """Cached blocks of each class. O(classes)."""
        return [len(lru) for lru in self._lru]

    @property
    def num_units(self) -> int:
        """Usable slabs."""
        return self.num_slabs

    def usage(self, reserved: Sequence[int]) -> float:
        """Return the slabs that referenced blocks fill / usable slabs, without ``reserved`` blocks."""
        usable = self.num_slabs - self.units(reserved)
        filled = 0.0
        for held, kept, k in zip(self.referenced, reserved, self.ks, strict=True):
            filled += (held - kept) / k
        return filled / usable if usable else 0.0

    def usages(self, reserved: Sequence[int], more: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``usage`` with ``more[i, c]`` blocks of each class referenced besides, float64[n].

        It equals that of single calls to the last bit.
        """
        usable, filled = self.num_slabs - self.units(reserved), np.zeros(len(more))
        for of, k in enumerate(self.ks):
            filled += (self.referenced[of] + more[:, of] - reserved[of]) / k
        return filled / usable if usable else filled * 0.0

    def order(self) -> Int32:
        """Return the unreferenced blocks of owned slabs: holes, then cached blocks, class by class. O(blocks)."""
        parts: list[Ids] = []
        for of, k in enumerate(self.ks):
            first = self.bases[of]
            holes = np.flatnonzero(self._holes.is_hole[first : first + (self.num_slabs + 1) * k]) + first
            parts += [holes, self.lru(of)]
        return np.concatenate(parts).astype(np.int32)

    def lru(self, of: int) -> Int32:
        """Return the cached blocks of class ``of``, the next to be evicted first. O(blocks of the class)."""
        ids: Int32 = self._lru[of].order()
        return ids

    def free_slabs(self) -> list[int]:
        """Return the free slabs, the next to be taken last. O(slabs)."""
        slabs: list[int] = self._holes.free_slabs().tolist()
        return slabs

    def owner(self, slab: int) -> int:
        """Return the class that owns ``slab``; -1 for a free one and for the null slab."""
        return self._holes.owner[slab]

    def check(self, ref: Int32, keyed: Bool) -> Iterator[str]:
        """Yield a line for each broken invariant.

        O(blocks). ``ref`` has the holders of each block, ``keyed`` whether it has a key.
        """
        return _check(self, ref, keyed)

    # -- will it do (docs/design/0010)

    def needed_slabs(self, more: Sequence[int]) -> int:
        """Return the slabs for the referenced blocks and ``more[c]`` blocks of each class c. O(classes)."""
        return sum(self._wants(more))

    def fits(self, more: Sequence[int]) -> bool:
        """Return whether ``more[c]`` blocks of each class c can be taken, with make_room if take falls short.

        The answer is exact. Without locks it is needed_slabs(more) <= num_slabs. A class with more slabs than it wants
        can give them, except those with a locked block. Blocks that fit without moves always fit.
        """
        missing, found = 0, self._holes.num_free
        for of, want in enumerate(self._wants(more)):
            if want > self.slabs[of]:
                missing += want - self.slabs[of]
            else:
                found += min(self.slabs[of] - want, self.slabs[of] - self.locked_slabs[of])
        return missing <= found

    def fits_without_moves(self, more: Sequence[int]) -> bool:
        """Return whether holes, free slabs and each class's own cached blocks suffice. O(classes)."""
        wants = zip(self._wants(more), self.slabs, strict=True)
        return sum(max(0, want - slabs) for want, slabs in wants) <= self._holes.num_free

    def weigh(self, needs: Sequence[int], freed: Sequence[int]) -> Weight:
        """Return the slabs that all referenced blocks would fill, and all slabs.

        Exact, because live blocks can be packed.
        """
        return Weight(self.needed_slabs(_less(needs, freed)), self.num_slabs)

    def waits(self, needs: Sequence[int], freed: Sequence[int]) -> bool:
        """Return whether blocks fit only after moves that locked blocks, or the bound of this step, forbid."""
        more = _less(needs, freed)
        return not self.fits(more) or (self._is_spent and not self.fits_without_moves(more))

    def gives(self, needs: Sequence[int]) -> bool:
        """Return whether ``needs`` blocks, by class, can be taken at this moment."""
        return not self.waits(needs, [0] * len(needs))

    def units(self, blocks: Sequence[int]) -> int:
        """Return the slabs that ``blocks``, by class, fill in an empty pool."""
        slabs = 0
        for count, k in zip(blocks, self.ks, strict=True):
            slabs += -(-count // k)
        return slabs

    def obtainable(self, of: int) -> int:
        """Return the blocks of class ``of`` that can be taken if cached blocks go and referenced ones are packed."""
        others = 0
        for one, k in enumerate(self.ks):
            if one != of:
                others += -(-self.referenced[one] // k)
        return (self.num_slabs - others) * self.ks[of] - self.referenced[of]

    def takes_in_any_order(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Return whether taking ``needs`` blocks, by class, gives the same blocks in any order, and moves none.

        This holds in three cases: all classes but one take from their current slabs, and that one needs free slabs
        besides; there is one class, whose blocks are evicted in order; each class evicts only its own blocks. ``drops``
        says whether blocks are released in between; it is called only if that matters.
        """
        if len(self.ks) == 1 and not self._unneeded_first:
            return needs[0] <= self.obtainable(0) and (self.ks[0] == 1 or not drops())
        if self._holes.takes_in_any_order(needs) and not drops():
            return True
        return self._keeps_slabs(needs, drops)

    def takes_alike(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Return whether taking ``needs`` blocks at once gives the same blocks as class by class and one by one.

        Unlike in takes_in_any_order, blocks of classes that take none may move: if one class alone takes, it asks for
        room as often and in the same order. If moves are bounded, a late call may have to wait, so the answer is False.
        """
        if self.takes_in_any_order(needs, drops):
            return True
        alone = self._max_moved_bytes is None and sum(map(bool, needs)) == 1
        return alone and self.fits(needs) and not drops()

    def _keeps_slabs(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Return whether no class gets a slab that another one might have got, with releases in between.

        Released blocks are younger than all that are evicted, but they may leave a slab of holes without a referenced
        block.
        """
        free, taking = self._holes.num_free, [of for of, need in enumerate(needs) if need]
        if free and (len(taking) > 1 or drops()):
            return False
        for of in taking:
            missing = needs[of] - self.holes[of] - free * self.ks[of]
            if missing > 0 and not self._evicts_own(missing, of):
                return False
        return not any(self.holes[of] for of in taking) or not drops()

    def _evicts_own(self, n: int, of: int) -> bool:
        """Return whether class ``of`` evicts its ``n`` oldest blocks, whatever happens in between.

        Meanwhile time passes, and the oldest blocks of other classes become younger ones; both favour the own blocks.
        """
        ids = self._oldest(n, of)
        if ids.size < n:
            return False
        first = self._count_unneeded(ids, of)
        if self._unneeded_first:
            return first == n
        others = [stamp for one in range(len(self.ks)) if one != of and (stamp := self.oldest_stamp(one)) is not None]
        return not others or first == n or not self._are_young(ids[first:], self.now - min(others)).any()

    def _wants(self, more: Sequence[int]) -> list[int]:
        return [-(-(held + n) // k) for held, n, k in zip(self.referenced, more, self.ks, strict=True)]

    # -- take, hold, release

    def take(self, n: int, of: int) -> Int32:
        """Take ``n`` blocks of class ``of``, or fewer if room must be made first. O(n + slabs touched).

        The blocks do not depend on how they are asked for: take(3) is take(1) three times.
        """
        return self._holes.take(n, of)

    def take_one(self, of: int) -> int:
        """Take a block of class ``of``; 0 if room must be made first."""
        ids = self._holes.take(1, of)
        return ids.item(0) if ids.size else 0

    def append_one(self, block: int) -> None:
        """Cache one referenced block, without arrays of one element."""
        holes, of = self._holes, bisect_right(self.bases, block) - 1
        slab = (block - self.bases[of]) // self.ks[of]
        if self._each_place[block] != NOWHERE:
            raise BlockError(f"block {block} is cached: no request holds it")
        if not holes.owns(block, slab, of):
            raise BlockError(f"block {block} is free: no request holds it")
        if any(self.locked_slabs):
            self._refuse_locked(np.array([block]))
        self.now += 1
        self._each_stamp[block] = self.now
        self._lru[of].append_one(block)
        holes.hold_one(slab, of, -1)

    def prepend_one(self, block: int) -> None:
        """Make one referenced block a hole."""
        self.prepend(np.array([block]))

    def remove(self, ids: Ids) -> None:
        """Make cached blocks ``ids`` (distinct, of any classes) referenced again. O(ids)."""
        if len(ids) == 1:
            self._remove_one(ids.item(0))
            return
        for of, some in self._cached_by_class(ids):
            self._uncache(of, some)
            self._holes.hold(self._holes.part(of, some), 1)

    def _remove_one(self, block: int) -> None:
        """Make one cached block referenced again, without arrays of one element."""
        if not 0 <= block < self.num_blocks or self._each_place[block] == NOWHERE:
            self._cached_by_class(np.array([block]))  # raises
        of = bisect_right(self.bases, block) - 1
        if self.num_unneeded[of] and self.is_unneeded[block]:
            self.num_unneeded[of] -= 1
            self.is_unneeded[block] = False
        self._lru[of].remove_one(block)
        self._holes.hold_one((block - self.bases[of]) // self.ks[of], of, 1)

    def append(self, ids: Ids) -> None:
        """Cache referenced blocks ``ids`` (distinct, of any classes), which have keys. O(ids) amortised.

        Each is a release: ``now`` grows by 1 and becomes the block's stamp, so the youngest has age 0.
        """
        parts = self._referenced_parts(ids)
        self._refuse_locked(ids)
        self._stamp(ids)
        for part in parts:
            self._lru[part.of].append(part.ids)
            self._holes.hold(part, -1)

    def prepend(self, ids: Ids) -> None:
        """Make referenced blocks ``ids`` (distinct, of any classes), which have no keys, holes. O(ids).

        Slabs that become whole are free. The one whose last block comes first in ``ids`` is taken first.
        """
        parts = self._referenced_parts(ids)
        self._refuse_locked(ids)
        whole = [self._holes.make_holes(part, held=True) for part in parts]
        if len(whole) == 1:
            self._holes.push(whole[0])
        elif whole:
            last = {self._holes.slab_of(block): i for i, block in enumerate(ids.tolist())}
            self._holes.push(sorted((slab for slabs in whole for slab in slabs), key=last.__getitem__))

    def age_first(self, ids: Ids) -> None:
        """Make cached blocks ``ids`` the next of their classes to be evicted, in this order. O(ids)."""
        for of, some in self._cached_by_class(ids):
            self._age_first(of, some)

    def _age_first(self, of: int, ids: Ids) -> None:
        self._lru[of].remove(ids)
        self._lru[of].prepend(ids)
        self.stamps[ids] = AGELESS

    def take_unneeded_first(self) -> None:
        """Evict only unneeded blocks from now on, as long as ``spares`` returns True."""
        self._unneeded_first = True

    def mark_unneeded(self, ids: Ids) -> None:
        """Mark cached blocks ``ids``, which no kept resume point needs: they go first, in this order. O(ids)."""
        for of, some in self._cached_by_class(ids):
            self._age_first(of, some)
            self.num_unneeded[of] += len(some) - int(np.count_nonzero(self.is_unneeded[some]))
            self.is_unneeded[some] = True

    def keep(self, ids: Ids) -> None:
        """Make those of ``ids`` that are unneeded and still cached the last of their classes to go. O(ids)."""
        ids = ids[self.is_unneeded[ids]]
        if not len(ids):
            return
        self._stamp(ids)
        for of, some in self._cached_by_class(ids):
            self._uncache(of, some)
            self._lru[of].append(some)

    def unneeded_blocks(self) -> Bool:
        """Return which blocks are unneeded, bool[num_blocks]."""
        return self.is_unneeded.copy()

    def forget_all(self) -> None:
        """Make all cached blocks holes, class by class and oldest first. O(blocks).

        Slabs that become whole are taken after those that are already free, in the order in which they became whole.
        """
        whole: list[int] = []
        for of, lru in enumerate(self._lru):
            ids = lru.order()
            self._uncache(of, ids)
            whole.extend(self._holes.make_holes(self._holes.part(of, ids), held=False))
        self._holes.push_below(whole)

    def are_cached(self, ids: Ids | slice) -> Bool:
        """Return which of ``ids`` are cached."""
        cached: Bool = self._place[ids] != NOWHERE
        return cached

    def _stamp(self, ids: Ids) -> None:
        """Stamp ``ids`` as released one after another."""
        if len(ids) == 1:
            self.stamps[ids.item(0)] = self.now + 1
        else:
            self.stamps[ids] = np.arange(self.now + 1, self.now + 1 + len(ids))
        self.now += len(ids)

    def _uncache(self, of: int, ids: Ids) -> None:
        """Remove ``ids`` of class ``of`` from the cached blocks."""
        self._take_back(of, ids)
        self._lru[of].remove(ids)

    def _take_back(self, of: int, ids: Ids) -> None:
        """Remove the unneeded marks of ``ids`` of class ``of``."""
        if self.num_unneeded[of]:
            self.num_unneeded[of] -= int(np.count_nonzero(self.is_unneeded[ids]))
            self.is_unneeded[ids] = False

    def _cached_by_class(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Return ``ids`` by class. Raises BlockError unless all are cached. O(ids)."""
        found = self._holes.by_class(ids)
        if np.count_nonzero(cached := self.are_cached(ids)) < len(ids):
            raise BlockError(f"block {int(ids[~cached][0])} is not cached: a hit cannot have returned it")
        return found

    def _referenced_parts(self, ids: Ids) -> list[Part]:
        """Return ``ids`` by class. Raises BlockError unless all are referenced. O(ids)."""
        parts = self._holes.parts(ids)
        if np.count_nonzero(cached := self.are_cached(ids)):
            raise BlockError(f"block {int(ids[cached][0])} is cached: no request holds it")
        for part in parts:
            if (block := self._holes.find_unowned(part)) is not None:
                raise BlockError(f"block {block} is free: no request holds it")
        return parts

    # -- locks

    def lock(self, ids: Ids) -> None:
        """Keep referenced blocks ``ids`` (distinct) in place, and referenced, until they are unlocked as often.

        O(ids).
        """
        for of, where, slabs in self._referenced_parts(ids):
            self.locked_slabs[of] += self._num_unlocked(slabs)
            np.add.at(self._all_slab_locks, slabs, 1)
            self.locks[where] += 1

    def unlock(self, ids: Ids) -> None:
        """Remove one lock from each of ``ids`` (distinct). Raises BlockError for a block without a lock. O(ids)."""
        locks: Int32 = self.locks[ids]
        if not locks.all():
            raise BlockError(f"block {int(ids[locks == 0][0])} is not locked: unlock each lock once")
        for of, where, slabs in self._referenced_parts(ids):
            self.locks[where] -= 1
            np.add.at(self._all_slab_locks, slabs, -1)
            self.locked_slabs[of] -= self._num_unlocked(slabs)

    def _num_unlocked(self, slabs: list[int] | NDArray[np.int64]) -> int:
        return int(np.count_nonzero(self._all_slab_locks[np.unique(slabs)] == 0))

    def _refuse_locked(self, ids: Ids) -> None:
        """Raise BlockError if one of ``ids`` is locked. A free block could be overwritten during the transfer."""
        if any(self.locked_slabs) and self.locks[ids].any():
            raise BlockError(
                f"block {int(ids[self.locks[ids] > 0][0])} is locked: unlock it before its last holder goes"
            )

    # -- room

    def begin_step(self) -> None:
        """Begin a new step for the bound on moved bytes."""
        self._moved_bytes, self._is_spent = 0, False

    def make_room(self, of: int, ref: Int32) -> Room:
        """Evict, or evict and move, until class ``of`` can take a block. Call it when take fell short.

        O(classes + k), and O(1) a block amortised. The caller moves its own data of the blocks.

        Args:
            of: The class that needs a block.
            ref: Holders of each block.

        Raises:
            CacheError: No class can give room. ``fits`` says so before.
        """
        if self.num_unneeded[of]:
            return Room(self._evict(of), _NO_MOVES)
        if self._unneeded_first and (spare := self._spare_giver(of)) is not None:
            return self._reclaim(spare, ref)
        giver, own = self._oldest_giver(of), self.oldest_stamp(of)
        if giver is not None and (own is None or self._much_older(giver, own)):
            return self._reclaim(giver, ref)
        if own is not None:
            return Room(self._evict(of), _NO_MOVES)
        giver = max(self._givers(of), key=lambda one: (self.holes[one] // self.ks[one], -one), default=None)
        if giver is None:
            raise CacheError(f"no class has a slab for class {of}: ask fits() and plan before taking")
        return self._reclaim(giver, ref)

    def next_evicted(self, n: int) -> Int32 | None:
        """Return all cached blocks that may be evicted while ``n`` are taken; ``None`` if unknown. O(n)."""
        return self._lru[0].leading(n) if len(self.ks) == 1 and not self._unneeded_first else None

    def take_oldest(self, n: int, of: int) -> Int32:
        """Take up to ``n`` cached blocks of class ``of``, which has no others, as make_room and take would one by one.

        Takes as many as make_room evicts in a row before another class gives room. The caller removes their keys. O(n +
        classes).
        """
        if self.holes[of] or self._holes.num_free:
            return _NONE
        ids = self._oldest(n, of)
        ids = ids[: self._num_evicted(ids, of)]
        if ids.size:
            self._uncache(of, ids)
            self._holes.hold_again(self._holes.part(of, ids))
        return ids

    def _num_evicted(self, ids: Int32, of: int) -> int:
        """Return how many of ``ids``, the oldest of class ``of``, go before another class gives a slab."""
        first = self._count_unneeded(ids, of)
        if self._unneeded_first:
            return first
        giver = self._oldest_giver(of)
        if giver is None or (self._is_spent and self.ks[giver] > 1):
            return int(ids.size)
        young = self._are_young(ids[first:], self.now - self.stamps.item(self._lru[giver].first()))
        return first + (int(young.argmax()) if young.any() else young.size)

    def _oldest(self, n: int, of: int) -> Int32:
        """Return the ``n`` oldest blocks of class ``of``, or only the unneeded ones if these are fewer and go first.

        Thousands of stale entries may lie between these and the next block. Not reading them takes 3% off a step of
        ``hazard`` (``eviction_cost.py --steps 1000``).
        """
        unneeded = self.num_unneeded[of]
        if self._unneeded_first and unneeded < n:
            ids = self._lru[of].leading(unneeded)
            if np.count_nonzero(self.is_unneeded[ids]) == unneeded:
                return ids
        return self._lru[of].leading(n)

    def oldest_stamp(self, of: int) -> int | None:
        """Return the stamp of the next cached block of class ``of`` to go; ``None`` without one."""
        order = self._lru[of]
        return self.stamps.item(order.first()) if len(order) else None

    def _count_unneeded(self, ids: Int32, of: int) -> int:
        """Return how many of ``ids``, the oldest of class ``of``, go until the last unneeded one is gone."""
        if not self.num_unneeded[of]:
            return 0
        return min(int(self.is_unneeded[ids].cumsum().searchsorted(self.num_unneeded[of])) + 1, ids.size)

    def _are_young(self, ids: Int32, age: int) -> Bool:
        """Return which of ``ids`` are so young that a block of ``age`` is more than 1.1 times as old."""
        young: Bool = self.now - self.stamps[ids] <= (10 * age - 1) // 11
        return young

    def _givers(self, of: int) -> Iterator[int]:
        """Yield the other classes with a slab's worth of unreferenced blocks, and a slab without locked blocks."""
        for one, k in enumerate(self.ks):
            if one != of and self.holes[one] + len(self._lru[one]) >= k and self.slabs[one] > self.locked_slabs[one]:
                yield one

    def has_spare(self, n: int, of: int) -> bool:
        """Return whether class ``of`` has ``n`` holes and unneeded blocks: a quick form of ``spares``."""
        return self.holes[of] + self.num_unneeded[of] >= n

    def spares(self, needs: Sequence[int], more: Sequence[int]) -> bool:
        """Return whether ``needs`` blocks, by class, can be taken by evicting only unneeded blocks. O(classes).

        ``more`` blocks of each class might become unneeded besides. Slabs of holes and unneeded blocks pass to other
        classes, if moves are allowed.
        """
        wanted, found = 0, self._holes.num_free
        for of, (need, besides, k) in enumerate(zip(needs, more, self.ks, strict=True)):
            left = self.holes[of] + self.num_unneeded[of] + besides - need
            if left < 0:
                wanted += -(left // k)
            elif k == 1 or not self._is_spent:
                found += min(left // k, self.slabs[of] - self.locked_slabs[of])
        return wanted <= found

    def _spare_giver(self, of: int) -> int | None:
        """Return the other class that gives a slab without losing needed blocks, the one with most to give."""
        able = [
            (self.holes[one] + self.num_unneeded[one] - k, -one)
            for one, k in enumerate(self.ks)
            if one != of
            and self.holes[one] + self.num_unneeded[one] >= k
            and self.slabs[one] > self.locked_slabs[one]
            and (k == 1 or not self._is_spent)
        ]
        return -max(able)[1] if able else None

    def _oldest_giver(self, of: int) -> int | None:
        stamps = [(stamp, one) for one in self._givers(of) if (stamp := self.oldest_stamp(one)) is not None]
        return min(stamps)[1] if stamps else None

    def _much_older(self, giver: int, own: int) -> bool:
        """Return whether the oldest cached block of ``giver`` is more than 1.1 times as old as one of stamp ``own``."""
        if self._is_spent and self.ks[giver] > 1:
            return False
        stamp = self.stamps.item(self._lru[giver].first())
        return 10 * (self.now - stamp) > 11 * (self.now - own)

    def _evict(self, of: int) -> Int32:
        """Make the oldest cached block a hole. If its slab is then whole, the slab is free."""
        ids = self._lru[of].take(1)
        self._take_back(of, ids)
        self._holes.push(self._holes.make_holes(self._holes.part(of, ids), held=False))
        return ids

    def _reclaim(self, giver: int, ref: Int32) -> Room:
        """Take a slab from class ``giver``."""
        self.transfers[giver] += 1
        evicted = _NONE
        if self.holes[giver] < self.ks[giver]:
            evicted, is_free = self._evict_for_a_slab(giver)
            if is_free:
                return Room(evicted, _NO_MOVES)
        return Room(evicted, self._empty(self._victim(giver), giver, ref))

    def _evict_for_a_slab(self, of: int) -> tuple[Int32, bool]:
        """Evict the oldest blocks until there are holes for a slab, or a slab is whole.

        Returns them, and whether one is whole.
        """
        k, found = self.ks[of], Counter[int]()
        part = self._holes.part(of, self._lru[of].leading(k - self.holes[of]))
        for count, slab in enumerate(part.slabs, 1):
            found[slab] += 1
            if found[slab] + self._holes.num_holes[slab] == k:
                part = Part(of, part.ids[:count], part.slabs[:count])
                break
        self._uncache(of, part.ids)
        whole = self._holes.make_holes(part, held=False)
        self._holes.push(whole)
        return part.ids.astype(np.int32), bool(len(whole))

    def _victim(self, giver: int) -> int:
        """Return the slab to empty: unlocked, of the emptiest bucket; a full one only if all with holes are locked."""
        slab = self._holes.emptiest(giver, self.slab_locks)
        if slab != NO_SLAB:
            return slab
        return int(np.flatnonzero((self._holes.owners == giver) & (self._all_slab_locks == 0))[0])

    def _empty(self, victim: int, of: int, ref: Int32) -> Int32:
        """Move the live blocks of ``victim`` into other holes of class ``of``, which frees the slab.

        Returns the moves.
        """
        rows = self._holes.blocks_of(victim, of)
        sources = ((~self._holes.is_hole[rows]).nonzero()[0] + rows.start).astype(np.int32)
        held = ref[sources] > 0
        targets = self._holes.empty(victim, of, sources, held)
        self._lru[of].rename(sources[~held], targets[~held])
        self.stamps[targets] = self.stamps[sources]
        self.is_unneeded[targets] = self.is_unneeded[sources]
        self.is_unneeded[sources] = False
        self.moved_blocks[of] += len(sources)
        self._moved_bytes += len(sources) * self._block_bytes[of]
        self._is_spent = self._max_moved_bytes is not None and self._moved_bytes >= self._max_moved_bytes
        return np.stack((sources, targets), axis=1)


def _less(needs: Sequence[int], freed: Sequence[int]) -> list[int]:
    return list(map(sub, needs, freed))


# -- invariants, rebuilt from the states of single blocks and compared with the counts


def _check(space: SlabSpace, ref: Int32, keyed: Bool) -> Iterator[str]:
    """Yield the broken invariants; see SlabSpace.check."""
    if len(ref) != space.num_blocks:
        yield f"holders of {len(ref)} blocks were given, the space has {space.num_blocks}"
        return
    holes = space._holes
    yield from _free(space, keyed)
    counted = ("holes", holes.all_holes), ("referenced blocks", holes.all_held), ("locks", np.array(space.slab_locks))
    for name, counts in counted:
        wrong = np.flatnonzero((holes.owners < 0) & (counts != 0))
        yield from (f"slab {slab} has no owner and counts {counts[slab]} {name}" for slab in wrong.tolist())
    for of, (base, k) in enumerate(zip(space.bases, space.ks, strict=True)):
        rows = slice(base, base + k * (space.num_slabs + 1))
        hole, cached = holes.is_hole[rows].reshape(-1, k), space.are_cached(rows).reshape(-1, k)
        held, locks = (ref[rows] > 0).reshape(-1, k), space.locks[rows].reshape(-1, k)
        yield from _blocks(space, of, {"hole": hole, "cached": cached, "referenced": held})
        for slab, i in np.argwhere((locks > 0) & ~held)[:1].tolist():
            yield f"block {base + slab * k + i} of class {of} is locked but not referenced"
        owned = holes.owners == of
        for (name, counts), found in zip(counted, (hole, held, locks), strict=True):
            wrong = np.flatnonzero(owned & (counts != found.sum(axis=1)))
            yield from (f"slab {slab} of class {of} counts {counts[slab]} {name}" for slab in wrong.tolist())
        for name, count, there in (
            ("slabs", space.slabs[of], owned),
            ("holes", space.holes[of], hole),
            ("cached blocks", space.cached[of], cached),
            ("referenced blocks", space.referenced[of], held),
            ("slabs with locks", space.locked_slabs[of], owned & (locks > 0).any(axis=1)),
        ):
            if count != np.count_nonzero(there):
                yield f"class {of} counts {count} {name}, there are {np.count_nonzero(there)}"
        yield from _queues(space, of, hole.sum(axis=1).tolist(), held.sum(axis=1).tolist())
        yield from _lru(space, of)


def _free(space: SlabSpace, keyed: Bool) -> Iterator[str]:
    """Check that the stack has every unowned slab once, and that exactly the cached blocks have keys."""
    holes = space._holes
    free, unowned = sorted(space.free_slabs()), (np.flatnonzero(holes.owners[1:] < 0) + 1).tolist()
    if free != unowned:
        yield f"slabs {free} are on the stack, {unowned} have no owner"
    if holes.owner[0] >= 0:
        yield f"the null slab belongs to class {holes.owner[0]}"
    for block in space.order().tolist():
        waits = bool(space.are_cached(slice(block, block + 1))[0])
        if waits != keyed[block]:
            yield f"block {block} is free; it has a key: {not waits}, it waits to be evicted: {waits}"


def _blocks(space: SlabSpace, of: int, states: dict[str, Bool]) -> Iterator[str]:
    """Check that blocks of owned slabs are in one of ``states``, others in no state.

    An owned slab must have live blocks.
    """
    owned, in_states = space._holes.owners == of, sum(state.astype(np.int8) for state in states.values())
    for slab, i in np.argwhere(in_states != owned[:, None])[:1].tolist():
        found = [name for name, state in states.items() if state[slab, i]]
        block = space.bases[of] + slab * space.ks[of] + i
        owner = f"a slab of class {space.owner(slab)}" if space.owner(slab) >= 0 else "a slab without owner"
        yield f"block {block} of class {of} lies in {owner} and is {' and '.join(found) or 'nothing'}"
    for slab in np.flatnonzero(owned & states["hole"].all(axis=1)).tolist():
        yield f"slab {slab} has no live block but belongs to class {of}"


def _queues(space: SlabSpace, of: int, holes: list[int], held: list[int]) -> Iterator[str]:
    """Check that every slab with holes, and no other, is in its queue once.

    ``holes`` and ``held`` are those of each slab.
    """
    k, first = space.ks[of], of * QUEUES
    expected = {
        slab: (k - free) * BUCKETS // k + (BUCKETS if pins else 0)
        for slab, (free, pins) in enumerate(zip(holes, held, strict=True))
        if 0 < free < k
    }
    for slab, number in enumerate(space._holes.queues):
        queue = number - first if 0 <= number - first < QUEUES else NONE
        if queue != expected.get(slab, NONE):
            yield f"slab {slab} is in queue {queue} of class {of}, not in {expected.get(slab, NONE)}"
    entries = sorted(
        (slab, queue)
        for queue, heap in enumerate(space._holes.heaps[first : first + QUEUES])
        for slab in heap
        if space._holes.queues[slab] == first + queue
    )
    if not {slab for slab, _ in entries} >= set(expected) or len(set(entries)) != len(entries):
        yield f"the queues of class {of} have {entries}, not {sorted(expected.items())}"


def _lru(space: SlabSpace, of: int) -> Iterator[str]:
    """Check that an LRU is in the order of its stamps, none later than ``now``, and that each block is in it once."""
    ids = space.lru(of)
    stamps = space.stamps[ids]
    if (stamps[1:] < stamps[:-1]).any() or (stamps > space.now).any():
        yield f"the LRU of class {of} is not in the order of its stamps {stamps.tolist()}, {space.now} being the last"
    if len(ids) != space.cached[of] or len(np.unique(ids)) != len(ids):
        yield f"the LRU of class {of} has {len(ids)} entries, {space.cached[of]} are counted"
