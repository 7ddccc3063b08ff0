"""Which blocks are free and which slab belongs to whom, in plain Python: lists, dicts and full scans.

A block is a handle: the blocks of all classes in one row, class c from ``bases[c]`` on, slab by slab. Written from the
rule alone (docs/design/0008), it foretells every id, eviction and move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.planner.slabs import SlabLayout

HOLE, REFERENCED, CACHED = "hole", "referenced", "cached"
_SUPERSEDED = -(2**60)


class OracleRoom(NamedTuple):
    """What making room did: blocks evicted, in order, and then blocks moved, (source, target) in order."""

    evicted: list[int]
    moves: list[tuple[int, int]]


class OracleSlabs:
    """state: of every block in a slab that has an owner. free: slabs nobody owns, the next one last.

    lru: of each class, blocks with a key that nobody holds, the next to be evicted first. stamps: when each of those
    was released; ``now`` counts releases. current: the slab that each class took from last. locked: blocks that stay
    where they are.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self.ks = [one.blocks_per_slab for one in layout.classes]
        self.bases = [layout.num_slabs * sum(self.ks[:of]) for of in range(len(self.ks))]
        self.num_slabs = layout.num_slabs - 1
        self.free = list(range(self.num_slabs, 0, -1))
        self.owner: dict[int, int] = {}
        self.state: dict[int, str] = {}
        self.lru: list[list[int]] = [[] for _ in self.ks]
        self.stamps: dict[int, int] = {}
        self.current: list[int | None] = [None for _ in self.ks]
        self.now = 0
        self.locked: set[int] = set()

    # -- answers

    def class_of(self, block: int) -> int:
        """The class that a handle belongs to."""
        return max(of for of, base in enumerate(self.bases) if base <= block)

    def slab_of(self, block: int) -> int:
        """The slab that a handle lies in."""
        of = self.class_of(block)
        return (block - self.bases[of]) // self.ks[of]

    def blocks(self, slab: int, of: int) -> list[int]:
        """Handles of a slab, ascending."""
        first = self.bases[of] + slab * self.ks[of]
        return list(range(first, first + self.ks[of]))

    def count(self, of: int, state: str) -> int:
        """Blocks of a class that are in ``state``."""
        return sum(self.class_of(block) == of for block, one in self.state.items() if one == state)

    def needed_slabs(self, more: Sequence[int] | None = None) -> int:
        """Fewest slabs for all that is referenced, and ``more[c]`` blocks of every class c."""
        more = more or [0] * len(self.ks)
        return sum(-(-(self.count(of, REFERENCED) + more[of]) // k) for of, k in enumerate(self.ks))

    def fits(self, more: Sequence[int]) -> bool:
        """Whether take and make_room will give ``more[c]`` blocks of every class c."""
        return self.needed_slabs(more) <= self.num_slabs

    # -- taking

    def take(self, n: int, of: int) -> list[int]:
        """``n`` blocks, or fewer: then make room and ask again."""
        taken: list[int] = []
        while len(taken) < n:
            slab = self._choose(of)
            if slab is None:
                break
            self.current[of] = slab
            taken.append(self._holes(slab, of)[0])
            self.state[taken[-1]] = REFERENCED
        return taken

    def _choose(self, of: int) -> int | None:
        current = self.current[of]
        mine = current is not None and self.owner.get(current) == of
        if current is not None and mine and self._pinned(current, of) and self._holes(current, of):
            return current
        with_holes = self._with_holes(of)
        pinned = [slab for slab in with_holes if self._pinned(slab, of)]
        if pinned:
            return self._fullest(pinned, of)
        if self.free:
            slab = self.free.pop()
            self.owner[slab] = of
            self.state.update(dict.fromkeys(self.blocks(slab, of), HOLE))
            return slab
        return self._fullest(with_holes, of) if with_holes else None

    def _with_holes(self, of: int) -> list[int]:
        return sorted(slab for slab, owner in self.owner.items() if owner == of and self._holes(slab, of))

    def _holes(self, slab: int, of: int) -> list[int]:
        return [block for block in self.blocks(slab, of) if self.state[block] == HOLE]

    def _pinned(self, slab: int, of: int) -> bool:
        return any(self.state[block] == REFERENCED for block in self.blocks(slab, of))

    def _bucket(self, slab: int, of: int) -> int:
        return (self.ks[of] - len(self._holes(slab, of))) * 8 // self.ks[of]

    def _fullest(self, slabs: Sequence[int], of: int) -> int:
        return min(slabs, key=lambda slab: (-self._bucket(slab, of), slab))

    # -- who holds what

    def remove(self, blocks: Sequence[int]) -> None:
        """Cached blocks get a holder."""
        for block in blocks:
            self.lru[self.class_of(block)].remove(block)
            del self.stamps[block]
            self.state[block] = REFERENCED

    def append(self, blocks: Sequence[int]) -> None:
        """Blocks with a key lose their last holder: to the back, in this order."""
        for block in blocks:
            self.now += 1
            self.state[block] = CACHED
            self.stamps[block] = self.now
            self.lru[self.class_of(block)].append(block)

    def prepend(self, blocks: Sequence[int]) -> None:
        """Blocks without a key lose their last holder: holes. Slabs that became whole first are taken first."""
        whole = []
        for block in blocks:
            self.state[block] = HOLE
            of, slab = self.class_of(block), self.slab_of(block)
            if self._is_whole(slab, of):
                whole.append((slab, of))
        for slab, of in reversed(whole):
            self._give_back(slab, of)

    def age_first(self, blocks: Sequence[int]) -> None:
        """Cached blocks become the first to be evicted, in this order."""
        for block in reversed(blocks):
            of = self.class_of(block)
            self.lru[of].remove(block)
            self.lru[of].insert(0, block)
            self.stamps[block] = _SUPERSEDED

    def forget_all(self) -> None:
        """All cached blocks become holes, below the stack: class after class, of each the oldest on top."""
        before, self.free = self.free, []
        for of in reversed(range(len(self.ks))):
            cached = list(self.lru[of])
            self.lru[of] = []
            for block in cached:
                del self.stamps[block]
            self.prepend(cached)
        self.free += before

    def _is_whole(self, slab: int, of: int) -> bool:
        return len(self._holes(slab, of)) == self.ks[of]

    def _give_back(self, slab: int, of: int) -> None:
        del self.owner[slab]
        for block in self.blocks(slab, of):
            del self.state[block]
        self.free.append(slab)
        if self.current[of] == slab:
            self.current[of] = None

    # -- making room

    def make_room(self, of: int) -> OracleRoom:
        """At least a hole or a free slab more, or less to wait for. IndexError where nothing can be given."""
        others = [other for other in range(len(self.ks)) if other != of and self._can_give(other)]
        cached = [other for other in others if self.lru[other]]
        oldest = min(cached, key=lambda other: (self._oldest(other), other), default=None)
        if oldest is not None and (not self.lru[of] or self._older(oldest, of)):
            return self._reclaim(oldest)
        if self.lru[of]:
            block = self.lru[of][0]
            self._evict(block)
            return OracleRoom([block], [])
        loose = [other for other in others if self.count(other, HOLE) >= self.ks[other]]
        if not loose:
            raise IndexError(f"no room for class {of}")
        return self._reclaim(min(loose, key=lambda other: (-(self.count(other, HOLE) // self.ks[other]), other)))

    def _can_give(self, of: int) -> bool:
        movable = any(one == of and self._is_movable(slab, of) for slab, one in self.owner.items())
        return movable and self.count(of, HOLE) + self.count(of, CACHED) >= self.ks[of]

    def _is_movable(self, slab: int, of: int) -> bool:
        return self.locked.isdisjoint(self.blocks(slab, of))

    def _oldest(self, of: int) -> int:
        return self.stamps[self.lru[of][0]]

    def _older(self, of: int, than: int) -> bool:
        """Whether the oldest block of a class is older than 1.1 times that of another."""
        return 10 * (self.now - self._oldest(of)) > 11 * (self.now - self._oldest(than))

    def _evict(self, block: int) -> bool:
        """A cached block becomes a hole; whether its slab is whole now."""
        before = len(self.free)
        self.remove([block])
        self.prepend([block])
        return len(self.free) > before

    def _reclaim(self, of: int) -> OracleRoom:
        """A slab of a class becomes free: by evicting its oldest, or by moving what lives in its sparsest slab."""
        evicted: list[int] = []
        while self.count(of, HOLE) < self.ks[of]:
            evicted.append(self.lru[of][0])
            if self._evict(evicted[-1]):
                return OracleRoom(evicted, [])
        victim = self._victim(of)
        moves = []
        for block in self.blocks(victim, of):
            if self.state[block] != HOLE:
                moves.append((block, self._target(victim, of)))
                self._rename(*moves[-1])
        self._give_back(victim, of)
        return OracleRoom(evicted, moves)

    def _victim(self, of: int) -> int:
        """The sparsest slab that has a hole; without such, the first."""
        mine = [slab for slab, one in self.owner.items() if one == of and self._is_movable(slab, of)]
        with_holes = [slab for slab in mine if self._holes(slab, of)]
        return min(with_holes or mine, key=lambda slab: (self._bucket(slab, of) if with_holes else 0, slab))

    def _target(self, victim: int, of: int) -> int:
        slabs = [slab for slab in self._with_holes(of) if slab != victim]
        pinned = [slab for slab in slabs if self._pinned(slab, of)]
        return self._holes(self._fullest(pinned or slabs, of), of)[0]

    def _rename(self, source: int, target: int) -> None:
        self.state[target], self.state[source] = self.state[source], HOLE
        if self.state[target] == CACHED:
            lru = self.lru[self.class_of(source)]
            lru[lru.index(source)] = target
            self.stamps[target] = self.stamps.pop(source)
