"""The space of a pool with slabs: what is free, what goes first, and which class gives a slab to which.

    block of an owned slab   referenced | cached (free, has a key, stands in its class LRU) | hole (free, no key)

    take a block    slab_holes; when nothing is left make room and ask again
    make room       the other class with the oldest cached block gives a slab if that is older than 1.1 times the own
                    oldest one, or there is no own one; else the own oldest one is evicted
    given up        cached blocks that no kept resume point needs: the first to go, own ones, then those of a class
                    that has a slab of them and holes; nothing else is evicted while ``spares`` says so
    give a slab     evict the oldest until a slab is whole or there are holes for one; then the live blocks of the
                    emptiest slab, referenced ones too, move into other holes: at most k - 1 moves for k blocks

Rule and measurements: docs/design/0010. What fits can be taken: after each make_room take gives at least one block
more. With one class and k = 1 the ids are those of FreeOrder. Keys, rows and holders are the concern of the pool.

Cached blocks are ordered class by class:

    given up          no kept resume point needs them: the first to go
    ageless           to go before those with an age
    1, 2, 3 ... now   stamps: the release in which each lost its last holder
"""

from __future__ import annotations

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
    """The slabs of ``layout``. At first all are free, slab 1 to be taken first.

    max_moved_bytes: once so much, at least 1, was moved since ``begin_step``, what needs more moves waits; None: no
    bound.

    For reading: num_blocks (what arrays over handles need), num_slabs (usable: without the null slab), ks and bases of
    the classes, class_of_group; per class referenced, holes and given (blocks; the last are those given up), slabs
    (owned), locked_slabs (with locks), moved_blocks and transfers (slabs given to other classes), both so far; of each
    handle stamps, is_given and locks; slab_locks of each slab; now (releases so far).
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
        self._place = np.full(self.num_blocks, NOWHERE, np.int32)  # of a cached block in the order of its class
        self._lru = tuple(FreeOrder(total * k, self._place) for k in self.ks)
        self.stamps = np.zeros(self.num_blocks, np.int64)
        self._each_place, self._each_stamp = self._place.data, self.stamps.data  # quick to read and write singly
        self.is_given = np.zeros(self.num_blocks, np.bool_)
        self.given, self._given_first = [0] * len(self.ks), False
        self.locks = np.zeros(self.num_blocks, np.int32)
        self.slab_locks, self._all_slab_locks = counters(total)  # on the same memory
        self.locked_slabs = [0] * len(self.ks)

    # -- counts

    def __len__(self) -> int:
        """Blocks of owned slabs that are not referenced."""
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
        """Slabs that referenced blocks would fill / usable ones, those ``reserved`` left out of both; 0 without any."""
        usable = self.num_slabs - self.units(reserved)
        filled = 0.0
        for held, kept, k in zip(self.referenced, reserved, self.ks, strict=True):
            filled += (held - kept) / k
        return filled / usable if usable else 0.0

    def usages(self, reserved: Sequence[int], more: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same with ``more[i, c]`` blocks of each class c referenced besides, float64[n], to the bit."""
        usable, filled = self.num_slabs - self.units(reserved), np.zeros(len(more))
        for of, k in enumerate(self.ks):
            filled += (self.referenced[of] + more[:, of] - reserved[of]) / k
        return filled / usable if usable else filled * 0.0

    def order(self) -> Int32:
        """Blocks of owned slabs that nobody holds: holes, then those cached, class by class. O(blocks)."""
        parts: list[Ids] = []
        for of, k in enumerate(self.ks):
            first = self.bases[of]
            holes = np.flatnonzero(self._holes.is_hole[first : first + (self.num_slabs + 1) * k]) + first
            parts += [holes, self.lru(of)]
        return np.concatenate(parts).astype(np.int32)

    def lru(self, of: int) -> Int32:
        """Cached blocks of class ``of``, the next to be evicted first. O(blocks of the class)."""
        ids: Int32 = self._lru[of].order()
        return ids

    def free_slabs(self) -> list[int]:
        """Free slabs, the next to be taken last. O(slabs)."""
        slabs: list[int] = self._holes.free_slabs().tolist()
        return slabs

    def owner(self, slab: int) -> int:
        """The class that owns ``slab``, -1 for a free one and for the null slab."""
        return self._holes.owner[slab]

    def check(self, ref: Int32, keyed: Bool) -> Iterator[str]:
        """A line for each invariant that does not hold. O(handles). ref: holders of each handle. keyed: have a key."""
        return _check(self, ref, keyed)

    # -- will it do (docs/design/0010)

    def needed_slabs(self, more: Sequence[int]) -> int:
        """Slabs for what is referenced and ``more[c]`` blocks of each class c. O(classes)."""
        return sum(self._wants(more))

    def fits(self, more: Sequence[int]) -> bool:
        """Whether ``more[c]`` blocks of each class c can be taken, with make_room whenever take falls short.

        Exact: without locks it says needed_slabs(more) <= num_slabs; a class that has slabs beyond its want can give
        them, but none with a locked block. Whatever fits without moves fits. O(classes).
        """
        missing, found = 0, self._holes.num_free
        for of, want in enumerate(self._wants(more)):
            if want > self.slabs[of]:
                missing += want - self.slabs[of]
            else:
                found += min(self.slabs[of] - want, self.slabs[of] - self.locked_slabs[of])
        return missing <= found

    def fits_without_moves(self, more: Sequence[int]) -> bool:
        """Whether holes, free slabs and each class's own cached blocks suffice for ``more[c]`` of each. O(classes)."""
        wants = zip(self._wants(more), self.slabs, strict=True)
        return sum(max(0, want - slabs) for want, slabs in wants) <= self._holes.num_free

    def weigh(self, needs: Sequence[int], freed: Sequence[int]) -> Weight:
        """Slabs that all referenced blocks fill then, against all slabs: exact, as live blocks can be packed."""
        return Weight(self.needed_slabs(_less(needs, freed)), self.num_slabs)

    def waits(self, needs: Sequence[int], freed: Sequence[int]) -> bool:
        """Whether what fits by weight needs moves that locked blocks, or the bound of this step, forbid."""
        more = _less(needs, freed)
        return not self.fits(more) or (self._is_spent and not self.fits_without_moves(more))

    def gives(self, needs: Sequence[int]) -> bool:
        """Whether ``needs`` blocks, by class, can be taken now: they fit, without moves where none are to be had."""
        return not self.waits(needs, [0] * len(needs))

    def units(self, blocks: Sequence[int]) -> int:
        """Slabs that ``blocks``, by class, fill in an empty pool."""
        slabs = 0
        for count, k in zip(blocks, self.ks, strict=True):
            slabs += -(-count // k)
        return slabs

    def obtainable(self, of: int) -> int:
        """Blocks of class ``of`` that can be taken when all that is cached goes and what is referenced is packed."""
        others = 0
        for one, k in enumerate(self.ks):
            if one != of:
                others += -(-self.referenced[one] // k)
        return (self.num_slabs - others) * self.ks[of] - self.referenced[of]

    def takes_in_any_order(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Whether taking ``needs`` blocks, by class, gives the same whatever the order, and moves nothing.

        So it is where all classes but one take from their current slabs, and that one needs but free slabs besides; and
        where there is one class alone, whose blocks are evicted in their order, or each evicts but its own.
        drops: says whether blocks are released in between; not asked where that makes no difference.
        """
        if len(self.ks) == 1 and not self._given_first:
            return needs[0] <= self.obtainable(0) and (self.ks[0] == 1 or not drops())
        if self._holes.takes_in_any_order(needs) and not drops():
            return True
        return self._keeps_slabs(needs, drops)

    def takes_alike(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Whether taking ``needs`` blocks at once gives the same as class by class and one by one.

        Unlike in takes_in_any_order, blocks of classes that take none may move for it: one class alone takes, and asks
        as often, in the same order, whoever gives it slabs. Where moves are bounded who asks late may have to wait.
        """
        if self.takes_in_any_order(needs, drops):
            return True
        alone = self._max_moved_bytes is None and sum(map(bool, needs)) == 1
        return alone and self.fits(needs) and not drops()

    def _keeps_slabs(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Whether no class gets a slab that another one might have got, whatever is released with a key meanwhile.

        What is released is younger than all that is evicted, but it may leave a slab of holes with nobody in it.
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
        """Whether class ``of`` evicts its ``n`` oldest, whoever else evicts, and releases, in between.

        That lets time pass, and others' oldest be younger ones; both make these younger beside them.
        """
        ids = self._oldest(n, of)
        if ids.size < n:
            return False
        first = self._num_given(ids, of)
        if self._given_first:
            return first == n
        others = [stamp for one in range(len(self.ks)) if one != of and (stamp := self.oldest_stamp(one)) is not None]
        return not others or first == n or not self._are_young(ids[first:], self.now - min(others)).any()

    def _wants(self, more: Sequence[int]) -> list[int]:
        return [-(-(held + n) // k) for held, n, k in zip(self.referenced, more, self.ks, strict=True)]

    # -- take, hold, release

    def take(self, n: int, of: int) -> Int32:
        """``n`` blocks of class ``of``, or fewer when room has to be made first; they are referenced now.

        The same blocks however they are asked for: take(3) is take(1) three times. O(n + slabs touched).
        """
        return self._holes.take(n, of)

    def take_one(self, of: int) -> int:
        """A block of class ``of``, 0 where room has to be made first."""
        ids = self._holes.take(1, of)
        return ids.item(0) if ids.size else 0

    def append_one(self, block: int) -> None:
        """``append`` of one block, without arrays of one element."""
        holes, of = self._holes, self._holes.class_of(block)
        if self._each_place[block] != NOWHERE:
            raise BlockError(f"block {block} is cached: nobody holds it")
        if not holes.owns(block):
            raise BlockError(f"block {block} is free: nobody holds it")
        if any(self.locked_slabs):
            self._refuse_locked(np.array([block]))
        self.now += 1
        self._each_stamp[block] = self.now
        self._lru[of].append_one(block)
        holes.hold_one(block, of, -1)

    def prepend_one(self, block: int) -> None:
        """``prepend`` of one."""
        self.prepend(np.array([block]))

    def remove(self, ids: Ids) -> None:
        """Cached blocks ``ids`` (distinct, of any classes) are referenced again. O(ids)."""
        for of, some in self._cached_by_class(ids):
            self._uncache(of, some)
            self._holes.hold(self._holes.part(of, some), 1)

    def append(self, ids: Ids) -> None:
        """Referenced blocks ``ids`` (distinct, of any classes), which have keys, are cached: each the youngest so far.

        Each is a release: ``now`` grows by 1 and is the block's stamp, so that the youngest is of age 0. O(ids)
        amortised.
        """
        parts = self._referenced_parts(ids)
        self._refuse_locked(ids)
        self._stamp(ids)
        for part in parts:
            self._lru[part.of].append(part.ids)
            self._holes.hold(part, -1)

    def prepend(self, ids: Ids) -> None:
        """Referenced blocks ``ids`` (distinct, of any classes), which have no keys, become holes.

        Slabs that are whole then are free: of them the one whose last block stands first in ``ids`` is taken first.
        O(ids).
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
        """Cached blocks ``ids`` are the next of their classes to be evicted, in this order, and ageless. O(ids)."""
        for of, some in self._cached_by_class(ids):
            self._age_first(of, some)

    def _age_first(self, of: int, ids: Ids) -> None:
        self._lru[of].remove(ids)
        self._lru[of].prepend(ids)
        self.stamps[ids] = AGELESS

    def take_given_first(self) -> None:
        """From now on nothing is evicted but what was given up while ``spares`` says so; else as it always was."""
        self._given_first = True

    def give_up(self, ids: Ids) -> None:
        """Cached blocks ``ids``, which no kept end needs, are the first to go of all classes, in this order. O(ids)."""
        for of, some in self._cached_by_class(ids):
            self._age_first(of, some)
            self.given[of] += len(some) - int(np.count_nonzero(self.is_given[some]))
            self.is_given[some] = True

    def keep(self, ids: Ids) -> None:
        """Of ``ids`` those that were given up, and are cached still, are the last of their classes to go. O(ids)."""
        ids = ids[self.is_given[ids]]
        if not len(ids):
            return
        self._stamp(ids)
        for of, some in self._cached_by_class(ids):
            self._uncache(of, some)
            self._lru[of].append(some)

    def given_up(self) -> Bool:
        """Which blocks are given up, bool[num_blocks]."""
        return self.is_given.copy()

    def forget_all(self) -> None:
        """All cached blocks become holes, class by class and oldest first.

        Slabs that are whole then are taken after those that are free already, in the order in which they became so.
        O(handles).
        """
        whole: list[int] = []
        for of, lru in enumerate(self._lru):
            ids = lru.order()
            self._uncache(of, ids)
            whole.extend(self._holes.make_holes(self._holes.part(of, ids), held=False))
        self._holes.push_below(whole)

    def are_cached(self, ids: Ids | slice) -> Bool:
        """Which of ``ids`` are cached."""
        cached: Bool = self._place[ids] != NOWHERE
        return cached

    def _stamp(self, ids: Ids) -> None:
        """``ids`` are released, one after the other."""
        if len(ids) == 1:
            self.stamps[ids.item(0)] = self.now + 1
        else:
            self.stamps[ids] = np.arange(self.now + 1, self.now + 1 + len(ids))
        self.now += len(ids)

    def _uncache(self, of: int, ids: Ids) -> None:
        """``ids`` of class ``of`` are cached no longer."""
        self._take_back(of, ids)
        self._lru[of].remove(ids)

    def _take_back(self, of: int, ids: Ids) -> None:
        """``ids`` of class ``of`` are given up no longer, if they were."""
        if self.given[of]:
            self.given[of] -= int(np.count_nonzero(self.is_given[ids]))
            self.is_given[ids] = False

    def _cached_by_class(self, ids: Ids) -> list[tuple[int, Ids]]:
        """``ids`` by class. BlockError, before anything changes, unless all are cached. O(ids)."""
        found = self._holes.by_class(ids)
        if np.count_nonzero(cached := self.are_cached(ids)) < len(ids):
            raise BlockError(f"block {int(ids[~cached][0])} is not cached: nobody could have hit it")
        return found

    def _referenced_parts(self, ids: Ids) -> list[Part]:
        """``ids`` by class. BlockError, before anything changes, unless all are referenced. O(ids)."""
        parts = self._holes.parts(ids)
        if np.count_nonzero(cached := self.are_cached(ids)):
            raise BlockError(f"block {int(ids[cached][0])} is cached: nobody holds it")
        for part in parts:
            if (block := self._holes.find_unowned(part)) is not None:
                raise BlockError(f"block {block} is free: nobody holds it")
        return parts

    # -- locks

    def lock(self, ids: Ids) -> None:
        """Referenced blocks ``ids`` (distinct) stay where they are, and referenced, until unlocked as often. O(ids)."""
        for of, where, slabs in self._referenced_parts(ids):
            self.locked_slabs[of] += self._num_unlocked(slabs)
            np.add.at(self._all_slab_locks, slabs, 1)
            self.locks[where] += 1

    def unlock(self, ids: Ids) -> None:
        """One lock less on each of ``ids`` (distinct). BlockError for one that is not locked. O(ids)."""
        locks: Int32 = self.locks[ids]
        if not locks.all():
            raise BlockError(f"block {int(ids[locks == 0][0])} is not locked: unlock what was locked")
        for of, where, slabs in self._referenced_parts(ids):
            self.locks[where] -= 1
            np.add.at(self._all_slab_locks, slabs, -1)
            self.locked_slabs[of] -= self._num_unlocked(slabs)

    def _num_unlocked(self, slabs: list[int] | NDArray[np.int64]) -> int:
        return int(np.count_nonzero(self._all_slab_locks[np.unique(slabs)] == 0))

    def _refuse_locked(self, ids: Ids) -> None:
        """BlockError if one of ``ids`` is locked: free it could be taken, and overwritten under the transfer."""
        if any(self.locked_slabs) and self.locks[ids].any():
            raise BlockError(
                f"block {int(ids[self.locks[ids] > 0][0])} is locked: unlock it before its last holder goes"
            )

    # -- room

    def begin_step(self) -> None:
        """What is moved from now on belongs to another step."""
        self._moved_bytes, self._is_spent = 0, False

    def make_room(self, of: int, ref: Int32) -> Room:
        """Evict, or evict and move, until class ``of`` can take a block: to be called when take fell short.

        ref: holders of each handle, to tell what is referenced; the caller moves its entries with the blocks.
        CacheError when nobody has anything to give, which ``fits`` foretells. O(classes + k), O(1) a block amortised.
        """
        if self.given[of]:
            return Room(self._evict(of), _NO_MOVES)
        if self._given_first and (spare := self._spare_giver(of)) is not None:
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
        """All cached blocks that may be evicted while ``n`` are taken; None where nobody can tell. O(n)."""
        return self._lru[0].leading(n) if len(self.ks) == 1 and not self._given_first else None

    def take_oldest(self, n: int, of: int) -> Int32:
        """Up to ``n`` cached blocks of class ``of``, which has no other, taken as make_room and take do one by one.

        As many as make_room evicts one after the other, nobody else giving room; they are to lose their keys.
        O(n + classes).
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
        """How many of ``ids``, the oldest of class ``of``, make_room evicts before somebody else gives a slab."""
        first = self._num_given(ids, of)
        if self._given_first:
            return first
        giver = self._oldest_giver(of)
        if giver is None or (self._is_spent and self.ks[giver] > 1):
            return int(ids.size)
        young = self._are_young(ids[first:], self.now - self.stamps.item(self._lru[giver].first()))
        return first + (int(young.argmax()) if young.any() else young.size)

    def _oldest(self, n: int, of: int) -> Int32:
        """Return the ``n`` oldest of class ``of``; those given up alone where they are fewer, and nothing else may go.

        Thousands of outdated entries may lie between these and the next: not to look at them takes 3% off a step of
        ``hazard`` (``eviction_cost.py --steps 1000``).
        """
        given = self.given[of]
        if self._given_first and given < n:
            ids = self._lru[of].leading(given)
            if np.count_nonzero(self.is_given[ids]) == given:
                return ids
        return self._lru[of].leading(n)

    def oldest_stamp(self, of: int) -> int | None:
        """That of the next cached block of class ``of`` to go, None where there is none."""
        order = self._lru[of]
        return self.stamps.item(order.first()) if len(order) else None

    def _num_given(self, ids: Int32, of: int) -> int:
        """How many of ``ids``, the oldest of class ``of``, go until the last one given up is gone."""
        if not self.given[of]:
            return 0
        return min(int(self.is_given[ids].cumsum().searchsorted(self.given[of])) + 1, ids.size)

    def _are_young(self, ids: Int32, age: int) -> Bool:
        """Which of ``ids`` are so young that a block of ``age`` is more than 1.1 times as old."""
        young: Bool = self.now - self.stamps[ids] <= (10 * age - 1) // 11
        return young

    def _givers(self, of: int) -> Iterator[int]:
        """Other classes that have a slab's worth of blocks that nobody holds, and a slab without locked blocks."""
        for one, k in enumerate(self.ks):
            if one != of and self.holes[one] + len(self._lru[one]) >= k and self.slabs[one] > self.locked_slabs[one]:
                yield one

    def has_spare(self, n: int, of: int) -> bool:
        """Whether ``n`` blocks of class ``of`` are there or given up, all of that class: ``spares``, in haste."""
        return self.holes[of] + self.given[of] >= n

    def spares(self, needs: Sequence[int], more: Sequence[int]) -> bool:
        """Whether ``needs`` blocks, by class, can be taken with nothing evicted but what was given up. O(classes).

        more: blocks of each class that might be given up besides. Slabs of nothing but holes and blocks given up pass
        on, where moves allow it.
        """
        wanted, found = 0, self._holes.num_free
        for of, (need, besides, k) in enumerate(zip(needs, more, self.ks, strict=True)):
            left = self.holes[of] + self.given[of] + besides - need
            if left < 0:
                wanted += -(left // k)
            elif k == 1 or not self._is_spent:
                found += min(left // k, self.slabs[of] - self.locked_slabs[of])
        return wanted <= found

    def _spare_giver(self, of: int) -> int | None:
        """The other class that gives a slab without losing what is needed, the one with most to give."""
        able = [
            (self.holes[one] + self.given[one] - k, -one)
            for one, k in enumerate(self.ks)
            if one != of
            and self.holes[one] + self.given[one] >= k
            and self.slabs[one] > self.locked_slabs[one]
            and (k == 1 or not self._is_spent)
        ]
        return -max(able)[1] if able else None

    def _oldest_giver(self, of: int) -> int | None:
        stamps = [(stamp, one) for one in self._givers(of) if (stamp := self.oldest_stamp(one)) is not None]
        return min(stamps)[1] if stamps else None

    def _much_older(self, giver: int, own: int) -> bool:
        """Whether the oldest cached block of ``giver`` is more than 1.1 times as old as one of stamp ``own``."""
        if self._is_spent and self.ks[giver] > 1:
            return False
        stamp = self.stamps.item(self._lru[giver].first())
        return 10 * (self.now - stamp) > 11 * (self.now - own)

    def _evict(self, of: int) -> Int32:
        """The oldest cached block becomes a hole; if its slab is whole then, that is free."""
        ids = self._lru[of].take(1)
        self._take_back(of, ids)
        self._holes.push(self._holes.make_holes(self._holes.part(of, ids), held=False))
        return ids

    def _reclaim(self, giver: int, ref: Int32) -> Room:
        """Class ``giver`` gives a slab."""
        self.transfers[giver] += 1
        evicted = _NONE
        if self.holes[giver] < self.ks[giver]:
            evicted, is_free = self._evict_for_a_slab(giver)
            if is_free:
                return Room(evicted, _NO_MOVES)
        return Room(evicted, self._empty(self._victim(giver), giver, ref))

    def _evict_for_a_slab(self, of: int) -> tuple[Int32, bool]:
        """The oldest become holes until there are enough for a slab, or one is whole, and free: who, and whether so."""
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
        """The slab to be emptied: unlocked, of the emptiest bucket; a full one only if all with holes are locked."""
        slab = self._holes.emptiest(giver, self.slab_locks)
        if slab != NO_SLAB:
            return slab
        return int(np.flatnonzero((self._holes.owners == giver) & (self._all_slab_locks == 0))[0])

    def _empty(self, victim: int, of: int, ref: Int32) -> Int32:
        """The live blocks of ``victim`` move into other holes of class ``of``; the slab is free then. The moves."""
        rows = self._holes.blocks_of(victim, of)
        sources = ((~self._holes.is_hole[rows]).nonzero()[0] + rows.start).astype(np.int32)
        held = ref[sources] > 0
        targets = self._holes.empty(victim, of, sources, held)
        self._lru[of].rename(sources[~held], targets[~held])
        self.stamps[targets] = self.stamps[sources]
        self.is_given[targets] = self.is_given[sources]
        self.is_given[sources] = False
        self.moved_blocks[of] += len(sources)
        self._moved_bytes += len(sources) * self._block_bytes[of]
        self._is_spent = self._max_moved_bytes is not None and self._moved_bytes >= self._max_moved_bytes
        return np.stack((sources, targets), axis=1)


def _less(needs: Sequence[int], freed: Sequence[int]) -> list[int]:
    return list(map(sub, needs, freed))


# -- invariants, rebuilt from the states of single blocks and compared with the counts


def _check(space: SlabSpace, ref: Int32, keyed: Bool) -> Iterator[str]:
    """See SlabSpace.check."""
    if len(ref) != space.num_blocks:
        yield f"holders of {len(ref)} blocks were given, the space has {space.num_blocks}"
        return
    holes = space._holes
    yield from _free(space, keyed)
    counted = ("holes", holes.all_holes), ("referenced blocks", holes.all_held), ("locks", np.array(space.slab_locks))
    for name, counts in counted:
        wrong = np.flatnonzero((holes.owners < 0) & (counts != 0))
        yield from (f"slab {slab} is nobody's and counts {counts[slab]} {name}" for slab in wrong.tolist())
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
    """The stack has every slab that nobody owns, once; what waits to be evicted has a key, and so the other way."""
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
    """Blocks of owned slabs are in one of ``states``, others in none; an owned slab has live blocks."""
    owned, in_states = space._holes.owners == of, sum(state.astype(np.int8) for state in states.values())
    for slab, i in np.argwhere(in_states != owned[:, None])[:1].tolist():
        what = [name for name, state in states.items() if state[slab, i]]
        block = space.bases[of] + slab * space.ks[of] + i
        whose = f"a slab of class {space.owner(slab)}" if space.owner(slab) >= 0 else "a slab that nobody owns"
        yield f"block {block} of class {of} lies in {whose} and is {' and '.join(what) or 'nothing'}"
    for slab in np.flatnonzero(owned & states["hole"].all(axis=1)).tolist():
        yield f"slab {slab} has no live block but belongs to class {of}"


def _queues(space: SlabSpace, of: int, holes: list[int], held: list[int]) -> Iterator[str]:
    """Every slab with holes, and no other, is in the queue that it belongs in, once. holes, held: of each slab."""
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
    """An LRU is in the order of its stamps, none of which is of the future; each block stands in it once."""
    ids = space.lru(of)
    stamps = space.stamps[ids]
    if (stamps[1:] < stamps[:-1]).any() or (stamps > space.now).any():
        yield f"the LRU of class {of} is not in the order of its stamps {stamps.tolist()}, {space.now} being the last"
    if len(ids) != space.cached[of] or len(np.unique(ids)) != len(ids):
        yield f"the LRU of class {of} has {len(ids)} entries, {space.cached[of]} are counted"
