"""Free blocks of several sizes in one memory: slabs that pass between classes, and moves that empty them.

The rule is that of architecture.md, decision 4 (settled by simulation): a block is taken from a slab that has
referenced blocks, the fullest first; then from a free slab; then from one that holds cached blocks only. When there is
none of these, the class whose least recently used block is oldest gives room: the asking one by evicting a block,
another by giving up a slab, emptied by eviction and by moves of live blocks.

    a block of a slab that its class owns is a hole | referenced | cached (in its class's order of last use)
    slab 0  the null slab: nobody's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.free_order import FreeOrder
from hybridkv.cache.slab_buckets import NOWHERE, SlabBuckets
from hybridkv.cache.space import Ids, Room, Weight
from hybridkv.errors import BlockError
from hybridkv.plan.slabs import SlabLayout
from hybridkv.units import ceil_div

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

HYSTERESIS: Final = 1.1
"""How much older another class's oldest block must be before it gives a slab."""

_OLDEST: Final = -(1 << 60)
_FREE, _NULL = -1, -2
_FEW: Final = 32


class SlabClassSpace:
    """One class: its order of last use, its slabs with holes and its counts. Slabs are numbers, blocks local ids."""

    def __init__(self, num_slabs: int, k: int, base: int) -> None:
        self.k = k
        self.base = base
        self.lru = FreeOrder.empty(num_slabs * k)
        self.stamps = np.zeros(num_slabs * k, np.int64)
        self.hole = np.zeros(num_slabs * k, np.bool_)
        self.pinned = SlabBuckets(num_slabs, k)
        self.unpinned = SlabBuckets(num_slabs, k)
        self.current = 0
        self.referenced = self.holes = self.slabs = self.moved = 0

    @property
    def oldest(self) -> int:
        """The stamp of the block that would be evicted first."""
        return self.stamps.item(self.lru.first())

    def holes_of(self, slab: int) -> Int64:
        """Local ids of the holes of ``slab``, ascending."""
        return slab * self.k + np.flatnonzero(self.hole[slab * self.k : (slab + 1) * self.k])


class SlabSpace:
    """The blocks of ``layout``, class after class in one row of numbers (see hybridkv.cache.pool).

    max_moved_bytes: once so much was moved since ``begin_step``, moves are avoided; None: never.
    """

    def __init__(self, layout: SlabLayout, max_moved_bytes: int | None = None) -> None:
        self.num_slabs = layout.num_slabs
        ks = [one.blocks_per_slab for one in layout.classes]
        self.bases = tuple(layout.num_slabs * sum(ks[:of]) for of in range(len(ks)))
        self.num_blocks = layout.num_slabs * sum(ks)
        self.classes = tuple(SlabClassSpace(layout.num_slabs, k, base) for k, base in zip(ks, self.bases, strict=True))
        self._block_bytes = [one.block_bytes for one in layout.classes]
        self._free = list(range(layout.num_slabs - 1, 0, -1))
        self._owner = [_NULL] + [_FREE] * (layout.num_slabs - 1)
        self._holes = [0] * layout.num_slabs
        self._refs = [0] * layout.num_slabs
        self._locks = [0] * layout.num_slabs
        self._locked: dict[int, int] = {}
        self._now = 0
        self._max_moved_bytes = max_moved_bytes
        self.moved_bytes = 0

    # -- answers

    def __len__(self) -> int:
        """Blocks of slabs in use that nobody holds."""
        return sum(one.holes + len(one.lru) for one in self.classes)

    @property
    def num_units(self) -> int:
        """Slabs but the null slab."""
        return self.num_slabs - 1

    @property
    def free_slabs(self) -> tuple[int, ...]:
        """Slabs that belong to no class, the next to be taken last."""
        return tuple(self._free)

    def units(self, blocks: Sequence[int]) -> int:
        """Slabs that ``blocks``, by class, fill."""
        return sum(ceil_div(count, one.k) for count, one in zip(blocks, self.classes, strict=True))

    def usage(self, reserved: Sequence[int]) -> float:
        """Referenced blocks in slabs, over all slabs; those reserved left out of both."""
        usable = self.num_units - self.units(reserved)
        held = sum((one.referenced - kept) / one.k for one, kept in zip(self.classes, reserved, strict=True))
        return held / usable if usable else 0.0

    def obtainable(self, of: int) -> int:
        """Blocks that class ``of`` can get when all that is cached goes and what is referenced is packed."""
        others = sum(ceil_div(one.referenced, one.k) for i, one in enumerate(self.classes) if i != of)
        mine = self.classes[of]
        return (self.num_units - others) * mine.k - mine.referenced

    def weigh(self, needs: Sequence[int], freed: Sequence[int]) -> Weight:
        """Slabs that all referenced blocks fill then, against all slabs: exact, as live blocks can be packed."""
        counts = [one.referenced + n - f for one, n, f in zip(self.classes, needs, freed, strict=True)]
        return Weight(self.units(counts), self.num_units)

    def takes_in_any_order(self, needs: Sequence[int], *, drops: bool) -> bool:
        """Where every class but one takes from its current slab, and that one needs no more than free slabs besides."""
        if drops:
            return False
        lacking = []
        for of, (one, need) in enumerate(zip(self.classes, needs, strict=True)):
            slab = one.current
            there = self._holes[slab] if slab and self._owner[slab] == of and self._refs[slab] else 0
            if need > there:
                lacking.append(ceil_div(need - there, one.k))
        return len(lacking) < 2 and sum(lacking) <= len(self._free)

    def waits(self, needs: Sequence[int], freed: Sequence[int]) -> bool:
        """Whether room takes moves, and the step has made too many or locked blocks may be in the way."""
        if not (self._locked or self._is_spent):
            return False
        more = [n - f for n, f in zip(needs, freed, strict=True)]
        lacking = [
            ceil_div(max(n - one.holes - len(one.lru), 0), one.k) for n, one in zip(more, self.classes, strict=True)
        ]
        if sum(lacking) <= len(self._free):
            return False
        return self._is_spent or sum(lacking) > len(self._free) + sum(map(self._movable, range(len(more)), more))

    def _movable(self, of: int, more: int) -> int:
        """Slabs without locked blocks that class ``of`` can spare."""
        one = self.classes[of]
        spare = one.slabs - ceil_div(one.referenced + max(more, 0), one.k)
        return max(min(spare, sum(o == of and not locks for o, locks in zip(self._owner, self._locks, strict=True))), 0)

    @property
    def _is_spent(self) -> bool:
        return self._max_moved_bytes is not None and self.moved_bytes >= self._max_moved_bytes

    def order(self) -> Int32:
        """Blocks that nobody holds: those of free slabs left out, holes of each class before what it has cached."""
        parts = [one.base + np.concatenate((np.flatnonzero(one.hole), one.lru.order())) for one in self.classes]
        return np.concatenate(parts).astype(np.int32)

    # -- taking

    def begin_step(self) -> None:
        """Moves are counted anew."""
        self.moved_bytes = 0

    def take(self, n: int, of: int) -> Int32:
        """Blocks of class ``of``, at most ``n``: holes and free slabs; int32. How takes are grouped changes nothing."""
        one, parts = self.classes[of], list[Int64]()
        while n:
            if one.k == 1 and self._free:
                parts.append(self._take_slabs(min(n, len(self._free)), of))
            else:
                slab = self._choose(of)
                if slab is None:
                    break
                parts.append(self._fill(slab, n, one))
            n -= len(parts[-1])
        taken = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return (taken + one.base).astype(np.int32)

    def _take_slabs(self, n: int, of: int) -> Int64:
        """``n`` free slabs as blocks of a class with k = 1."""
        slabs = self._free[: -n - 1 : -1]
        del self._free[-n:]
        one = self.classes[of]
        for slab in slabs:
            self._owner[slab], self._refs[slab] = of, 1
        one.slabs += n
        one.referenced += n
        return np.array(slabs, np.int64)

    def _choose(self, of: int) -> int | None:
        """The slab that the next block of class ``of`` comes from."""
        one, slab = self.classes[of], self.classes[of].current
        if slab and self._owner[slab] == of and self._holes[slab] and self._refs[slab]:
            return slab
        found = one.pinned.fullest()
        if found is None and self._free:
            found = self._open(self._free.pop(), of)
        if found is None:
            found = one.unpinned.fullest()
        one.current = found or 0
        return found

    def _open(self, slab: int, of: int) -> int:
        """A free slab becomes the class's, all holes."""
        one = self.classes[of]
        self._owner[slab], self._holes[slab], self._refs[slab] = of, one.k, 0
        one.hole[slab * one.k : (slab + 1) * one.k] = True
        one.holes += one.k
        one.slabs += 1
        self._sort(slab, one)
        return slab

    def _fill(self, slab: int, n: int, one: SlabClassSpace) -> Int64:
        """At most ``n`` holes of ``slab``, the lowest first, become referenced."""
        ids = one.holes_of(slab)[:n]
        one.hole[ids] = False
        self._holes[slab] -= len(ids)
        self._refs[slab] += len(ids)
        one.holes -= len(ids)
        one.referenced += len(ids)
        self._sort(slab, one)
        return ids

    def _sort(self, slab: int, one: SlabClassSpace) -> None:
        """Where ``slab`` is found from now on."""
        bucket = one.pinned.bucket_of(self._holes[slab])
        is_pinned = self._refs[slab] > 0
        one.pinned.put(slab, bucket if is_pinned else NOWHERE)
        one.unpinned.put(slab, NOWHERE if is_pinned else bucket)

    # -- holders come and go

    def remove(self, ids: Ids) -> None:
        """Cached blocks get a holder."""
        for of, local in self._parts(ids):
            one = self.classes[of]
            one.lru.remove(local)
            one.referenced += len(local)
            for slab, count in self._slabs(local, one):
                self._refs[slab] += count
                self._sort(slab, one)

    def append(self, ids: Ids) -> None:
        """Blocks lose their last holder and have a key: the last of their class to be evicted."""
        for of, local in self._parts(ids):
            one = self.classes[of]
            one.lru.append(local)
            one.stamps[local] = np.arange(self._now, self._now + len(local))
            self._now += len(local)
            one.referenced -= len(local)
            for slab, count in self._slabs(local, one):
                self._refs[slab] -= count
                self._sort(slab, one)

    def prepend(self, ids: Ids) -> None:
        """Blocks lose their last holder and have no key: holes. Slabs of holes alone are free; the first is on top."""
        for of, local in self._parts(ids):
            one, whole = self.classes[of], list[int]()
            one.hole[local] = True
            one.referenced -= len(local)
            one.holes += len(local)
            for slab, count in self._slabs(local, one):
                self._refs[slab] -= count
                self._holes[slab] += count
                if self._holes[slab] == one.k:
                    whole.append(slab)
                else:
                    self._sort(slab, one)
            if whole:
                backwards, from_end = np.unique(local[::-1] // one.k, return_index=True)
                place = dict(zip(backwards.tolist(), from_end.tolist(), strict=True))
                for slab in sorted(whole, key=place.__getitem__):  # the one that became whole last goes lowest
                    self._close(slab, of)

    def _close(self, slab: int, of: int) -> None:
        """``slab``, all holes, belongs to nobody any longer."""
        one = self.classes[of]
        one.pinned.put(slab, NOWHERE)
        one.unpinned.put(slab, NOWHERE)
        one.hole[slab * one.k : (slab + 1) * one.k] = False
        one.holes -= self._holes[slab]
        one.slabs -= 1
        self._owner[slab], self._holes[slab], self._refs[slab] = _FREE, 0, 0
        if one.current == slab:
            one.current = 0
        self._free.append(slab)

    def age_first(self, ids: Ids) -> None:
        """Cached blocks that are evicted before all others."""
        for of, local in self._parts(ids):
            one = self.classes[of]
            one.lru.remove(local)
            one.lru.prepend(local)
            one.stamps[local] = _OLDEST

    def forget_all(self) -> None:
        """Cached blocks are holes; slabs that become free lie below those that are, the least recently used on top."""
        free, self._free = self._free, []
        for one in self.classes:
            local = one.lru.order()
            one.lru.remove(local)
            one.referenced += len(local)
            for slab, count in self._slabs(local, one):
                self._refs[slab] += count
            self.prepend(local.astype(np.int64) + one.base)
        self._free += free

    def lock(self, ids: Ids) -> None:
        """Blocks, of which each may be locked several times, that never move."""
        for of, local in self._parts(ids):
            for block in local.tolist():
                handle = block + self.bases[of]
                self._locked[handle] = self._locked.get(handle, 0) + 1
                self._locks[block // self.classes[of].k] += 1

    def unlock(self, ids: Ids) -> None:
        """Undoes one lock of each. BlockError for a block that is not locked."""
        for of, local in self._parts(ids):
            for block in local.tolist():
                handle = block + self.bases[of]
                if handle not in self._locked:
                    raise BlockError(f"block {block} is not locked: unlock what was locked, once")
                self._locked[handle] -= 1
                self._locks[block // self.classes[of].k] -= 1
                if not self._locked[handle]:
                    del self._locked[handle]

    # -- room

    def make_room(self, of: int, ref: Int32) -> Room:
        """More can be taken for class ``of``. O(k). BlockError where nothing can give: weigh before taking."""
        mine, other = self.classes[of], self._oldest_giver(of)
        if other is not None and self._gives_first(other, of):
            return self._reclaim(other, ref)
        if len(mine.lru):
            block = mine.lru.first()
            self._evict(block, of)
            return Room(np.array([block + mine.base], np.int32), _NO_MOVES)
        if other is None:
            other = self._packing_giver(of)
        if other is None:
            raise BlockError("no slab can be had: plan before taking")
        return self._reclaim(other, ref)

    def _oldest_giver(self, of: int) -> int | None:
        """The other class that can give a slab and whose oldest block is oldest."""
        able = [i for i, one in enumerate(self.classes) if i != of and len(one.lru) and self._can_give(i)]
        return min(able, key=lambda i: (self.classes[i].oldest, i), default=None)

    def _gives_first(self, other: int, of: int) -> bool:
        """Whether ``other`` gives a slab although class ``of`` may have something to evict."""
        mine, their = self.classes[of], self.classes[other]
        if not len(mine.lru):
            return True
        if self._is_spent and their.k > 1:
            return False
        return self._now - their.oldest > HYSTERESIS * (self._now - mine.oldest)

    def _packing_giver(self, of: int) -> int | None:
        """The other class with the most slabs' worth of holes."""
        able = [i for i, one in enumerate(self.classes) if i != of and one.holes >= one.k and self._can_give(i)]
        return max(able, key=lambda i: (self.classes[i].holes // self.classes[i].k, -i), default=None)

    def _can_give(self, of: int) -> bool:
        one = self.classes[of]
        if one.holes + len(one.lru) < one.k:
            return False
        return not self._locked or any(
            owner == of and not locks for owner, locks in zip(self._owner, self._locks, strict=True)
        )

    def _evict(self, block: int, of: int) -> bool:
        """The least recently used block becomes a hole; whether its slab is free then."""
        one = self.classes[of]
        slab = block // one.k
        one.lru.remove(np.array([block]))
        one.hole[block] = True
        one.holes += 1
        self._holes[slab] += 1
        if self._holes[slab] == one.k:
            self._close(slab, of)
            return True
        self._sort(slab, one)
        return False

    def _reclaim(self, of: int, ref: Int32) -> Room:
        """Class ``of`` gives up a slab: evictions until one is free or could be, then moves."""
        one, evicted = self.classes[of], list[int]()
        while one.holes < one.k:
            evicted.append(one.lru.first() + one.base)
            if self._evict(one.lru.first(), of):
                return Room(np.array(evicted, np.int32), _NO_MOVES)
        moves = self._empty(self._victim(of), of, ref)
        return Room(np.array(evicted, np.int32), np.array(moves, np.int32).reshape(-1, 2))

    def _victim(self, of: int) -> int:
        """The sparsest slab without locked blocks."""
        one = self.classes[of]
        if not self._locked:
            found = [slab for slab in (one.pinned.sparsest(), one.unpinned.sparsest()) if slab is not None]
            return min(found)[1]
        free = [s for s, owner in enumerate(self._owner) if owner == of and not self._locks[s]]
        return min(free, key=lambda slab: (self._holes[slab] == 0, one.pinned.bucket_of(self._holes[slab]), slab))

    def _empty(self, victim: int, of: int, ref: Int32) -> list[tuple[int, int]]:
        """Move the live blocks of ``victim`` into holes of other slabs, pinned ones first; (source, target) each."""
        one, moves = self.classes[of], list[tuple[int, int]]()
        one.pinned.put(victim, NOWHERE)
        one.unpinned.put(victim, NOWHERE)
        first = victim * one.k
        for source in (first + np.flatnonzero(~one.hole[first : first + one.k])).tolist():
            slab = one.pinned.fullest()
            if slab is None:
                slab = one.unpinned.fullest()
            if slab is None:
                raise BlockError(f"slab {victim} cannot be emptied: its class has no other hole")
            target = one.holes_of(slab).item(0)
            one.hole[target], one.hole[source] = False, True
            self._holes[slab] -= 1
            self._holes[victim] += 1
            if ref.item(source + one.base):
                self._refs[slab] += 1
                self._refs[victim] -= 1
            else:
                one.lru.rename(source, target)
                one.stamps[target] = one.stamps[source]
            self._sort(slab, one)
            moves.append((source + one.base, target + one.base))
        one.moved += len(moves)
        self.moved_bytes += len(moves) * self._block_bytes[of]
        self._close(victim, of)
        return moves

    # -- inside

    def _parts(self, ids: Ids) -> Iterator[tuple[int, Int64]]:
        """(class, local ids) of ``ids``, in order within a class."""
        where = ids.astype(np.int64)
        if not where.size:
            return
        if len(self.classes) == 1:
            yield 0, where
            return
        classes = np.searchsorted(self.bases, where, side="right") - 1
        for of in np.unique(classes).tolist():
            yield of, where[classes == of] - self.bases[of]

    def _slabs(self, local: Int64 | Int32, one: SlabClassSpace) -> list[tuple[int, int]]:
        """(slab, how many of ``local`` lie in it), by slab."""
        if len(local) < _FEW:
            counts: dict[int, int] = {}
            for block in local.tolist():
                counts[block // one.k] = counts.get(block // one.k, 0) + 1
            return sorted(counts.items())
        slabs, numbers = np.unique(local // one.k, return_counts=True)
        return list(zip(slabs.tolist(), numbers.tolist(), strict=True))

    # -- invariants

    def is_cached(self, block: int) -> bool:
        """Whether ``block`` waits to be evicted."""
        of = int(np.searchsorted(self.bases, block, side="right")) - 1
        return block - self.bases[of] in self.classes[of].lru

    def check(self, ref: Int32) -> Iterator[str]:
        """A line for each thing that does not hold. ref: holders of every block. O(blocks)."""
        if sorted(self._free) != [slab for slab, owner in enumerate(self._owner) if owner == _FREE]:
            yield "the free slabs are not those that nobody owns"
        if self._owner[0] != _NULL:
            yield "the null slab was given away"
        for of, one in enumerate(self.classes):
            mine = np.array([owner == of for owner in self._owner], np.bool_)
            held = ref[one.base : one.base + len(one.hole)] > 0
            cached = np.zeros(len(one.hole), np.bool_)
            cached[one.lru.order()] = True
            states = one.hole.astype(np.int8) + held + cached
            owned = np.repeat(mine, one.k)
            for block in np.flatnonzero(states != owned).tolist():
                yield f"block {block} of class {of} is {states[block]} of hole, held and cached; owned: {owned[block]}"
            per_slab = [part.reshape(-1, one.k).sum(axis=1) for part in (one.hole, held)]
            for slab in np.flatnonzero(mine).tolist():
                if (self._holes[slab], self._refs[slab]) != (per_slab[0][slab], per_slab[1][slab]):
                    yield f"slab {slab} counts {self._holes[slab]} holes and {self._refs[slab]} held blocks wrongly"
                bucket = one.pinned.bucket_of(self._holes[slab])
                pinned = self._refs[slab] > 0
                wanted = (bucket, NOWHERE) if pinned else (NOWHERE, bucket)
                if (one.pinned.get(slab), one.unpinned.get(slab)) != wanted:
                    yield f"slab {slab} of class {of} is in the wrong bucket"
            counts = (int(one.hole.sum()), int(held.sum()), int(mine.sum()))
            if counts != (one.holes, one.referenced, one.slabs):
                yield f"class {of} counts {one.holes, one.referenced, one.slabs}, there are {counts}"


_NO_MOVES: Int32 = np.empty((0, 2), np.int32)
