"""Slabs as plain lists and dicts: who has which slab, which block is what, who gives when room is short.

Everything is found by looking at everything, by the rule alone (docs/design/0008). A block is a plain int: block i of
slab s of class c is ``bases[c] + s * ks[c] + i``; slab 0 is the null slab, whose blocks never appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from hybridkv.cache.spaces.slabs import SlabSpace

HOLE, HELD, CACHED = "hole", "held", "cached"
HYSTERESIS = Fraction(11, 10)
FOREVER = 2**60


def holes_of(space: SlabSpace, slab: int) -> list[int]:
    """Return the holes of ``slab`` of the library's own space, ascending; none of a free slab."""
    of = space.owner(slab)
    if of < 0:
        return []
    rows = space._holes.blocks_of(slab, of)
    found: list[int] = (np.flatnonzero(space._holes.is_hole[rows]) + rows.start).tolist()
    return found


class OracleSlabs:
    """``num_slabs`` slabs (the null slab is one of them), which class c cuts into ``ks[c]`` blocks.

    state: of the blocks of owned slabs. owner: class of a slab, None when it is free. stack: free slabs, top last.
    lrus: cached blocks of each class, the next to be evicted first. stamp: when a block was released, in releases.
    locks: how often a block is locked. current: the slab that a class took from last. moved: blocks of each class that
    were moved; transfers: slabs that each class gave to others.
    """

    def __init__(self, num_slabs: int, ks: Sequence[int]) -> None:
        self.num_slabs = num_slabs
        self.ks = list(ks)
        self.bases = [num_slabs * sum(ks[:of]) for of in range(len(ks))]
        self.owner: dict[int, int | None] = dict.fromkeys(range(1, num_slabs))
        self.stack = list(range(num_slabs - 1, 0, -1))
        self.state: dict[int, str] = {}
        self.lrus: list[list[int]] = [[] for _ in ks]
        self.stamp: dict[int, int] = {}
        self.locks: dict[int, int] = {}
        self.current: list[int | None] = [None] * len(ks)
        self.now = 0
        self.moved = [0] * len(ks)
        self.transfers = [0] * len(ks)

    # -- looking

    def class_of(self, block: int) -> int:
        """The class that ``block`` is of."""
        return max(of for of, base in enumerate(self.bases) if base <= block)

    def slab_of(self, block: int) -> int:
        """The slab that ``block`` lies in."""
        of = self.class_of(block)
        return (block - self.bases[of]) // self.ks[of]

    def blocks_of(self, slab: int, *states: str) -> list[int]:
        """Blocks of an owned ``slab`` in one of ``states`` (any when none is given), ascending."""
        of = self.owner[slab]
        if of is None:
            return []
        first = self.bases[of] + slab * self.ks[of]
        blocks = range(first, first + self.ks[of])
        return [block for block in blocks if not states or self.state[block] in states]

    def slabs_of(self, of: int) -> list[int]:
        """Slabs that class ``of`` owns, ascending."""
        return [slab for slab in range(1, self.num_slabs) if self.owner[slab] == of]

    def count(self, of: int, *states: str) -> int:
        """Blocks of class ``of`` in one of ``states``."""
        return sum(len(self.blocks_of(slab, *states)) for slab in self.slabs_of(of))

    def lru(self, of: int) -> list[int]:
        """Cached blocks of class ``of``, the next to be evicted first."""
        return list(self.lrus[of])

    def free_slabs(self) -> list[int]:
        """Free slabs, the next to be taken last."""
        return list(self.stack)

    def pinned(self, slab: int) -> bool:
        """Whether somebody holds a block of ``slab``."""
        return bool(self.blocks_of(slab, HELD))

    def locked(self, slab: int) -> bool:
        """Whether a block of ``slab`` must stay where it is."""
        return any(block in self.locks for block in self.blocks_of(slab))

    def bucket(self, slab: int) -> int:
        """How full ``slab`` is, in eighths."""
        live = len(self.blocks_of(slab, HELD, CACHED))
        return live * 8 // len(self.blocks_of(slab))

    def with_holes(self, of: int, *, pinned: bool) -> list[int]:
        """Slabs of class ``of`` with holes, fullest bucket first, then by number."""
        slabs = [slab for slab in self.slabs_of(of) if self.blocks_of(slab, HOLE) and self.pinned(slab) == pinned]
        return sorted(slabs, key=lambda slab: (-self.bucket(slab), slab))

    # -- taking

    def take(self, n: int, of: int) -> list[int]:
        """At most ``n`` blocks of class ``of``, fewer when room has to be made first."""
        taken: list[int] = []
        while len(taken) < n:
            slab = self._slab_to_take_from(of)
            if slab is None:
                break
            self.current[of] = slab
            block = self.blocks_of(slab, HOLE)[0]
            self.state[block] = HELD
            taken.append(block)
        return taken

    def _slab_to_take_from(self, of: int) -> int | None:
        pinned = self.with_holes(of, pinned=True)
        if pinned:
            return self.current[of] if self.current[of] in pinned else pinned[0]
        if self.stack:
            slab = self.stack.pop()
            self.owner[slab] = of
            self.state.update(dict.fromkeys(self.blocks_of(slab), HOLE))
            return slab
        return next(iter(self.with_holes(of, pinned=False)), None)

    # -- released and held again

    def remove(self, blocks: Iterable[int]) -> None:
        """Cached blocks are held again."""
        for block in blocks:
            self.lrus[self.class_of(block)].remove(block)
            self.state[block] = HELD

    def append(self, blocks: Iterable[int]) -> None:
        """Held blocks are cached from now on, each younger than the one before."""
        for block in blocks:
            self.now += 1
            self.stamp[block] = self.now
            self.state[block] = CACHED
            self.lrus[self.class_of(block)].append(block)

    def prepend(self, blocks: Iterable[int]) -> None:
        """Held blocks are holes from now on; of the slabs that they leave empty, the first is the next to be taken."""
        self.stack += reversed(self._make_holes(blocks))

    def age_first(self, blocks: Iterable[int]) -> None:
        """Cached blocks are the first to be evicted, in this order, and older than any other."""
        for block in reversed(list(blocks)):
            lru = self.lrus[self.class_of(block)]
            lru.remove(block)
            lru.insert(0, block)
            self.stamp[block] = -FOREVER

    def forget_all(self) -> None:
        """Cached blocks are holes; slabs that are empty now are taken after those that are free already."""
        cached = [block for lru in self.lrus for block in lru]
        self.lrus = [[] for _ in self.ks]
        self.stack = self._make_holes(cached)[::-1] + self.stack

    def _make_holes(self, blocks: Iterable[int]) -> list[int]:
        """The slabs that this leaves without live blocks, in that order; they are nobody's."""
        empty = []
        for block in blocks:
            self.state[block] = HOLE
            slab = self.slab_of(block)
            if not self.blocks_of(slab, HELD, CACHED):
                self._disown(slab)
                empty.append(slab)
        return empty

    def _disown(self, slab: int) -> None:
        for block in self.blocks_of(slab):
            del self.state[block]
        self.current = [None if current == slab else current for current in self.current]
        self.owner[slab] = None

    # -- locks

    def lock(self, blocks: Iterable[int]) -> None:
        """Held blocks stay where they are."""
        for block in blocks:
            self.locks[block] = self.locks.get(block, 0) + 1

    def unlock(self, blocks: Iterable[int]) -> None:
        """One lock less on each of ``blocks``."""
        for block in blocks:
            self.locks[block] -= 1
            if not self.locks[block]:
                del self.locks[block]

    # -- room

    def make_room(self, of: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The blocks evicted and the moves (source, target) that give class ``of`` a hole or a free slab."""
        givers = [
            other
            for other in range(len(self.ks))
            if other != of
            and self.count(other, HOLE, CACHED) >= self.ks[other]
            and any(not self.locked(slab) for slab in self.slabs_of(other))
        ]
        aged = [other for other in givers if self.lrus[other]]
        if aged:
            oldest = min(aged, key=lambda other: (self.stamp[self.lrus[other][0]], other))
            if not self.lrus[of] or self._age(oldest) > HYSTERESIS * self._age(of):
                return self._reclaim(oldest)
        if self.lrus[of]:
            return [self._evict(of)], []
        whole = {other: self.count(other, HOLE) // self.ks[other] for other in givers}
        if not any(whole.values()):
            raise IndexError(f"nobody has a slab for class {of}")
        return self._reclaim(max(whole, key=lambda other: (whole[other], -other)))

    def _age(self, of: int) -> int:
        return self.now - self.stamp[self.lrus[of][0]]

    def _evict(self, of: int) -> int:
        block = self.lrus[of].pop(0)
        self.stack += self._make_holes([block])
        return block

    def _reclaim(self, giver: int) -> tuple[list[int], list[tuple[int, int]]]:
        self.transfers[giver] += 1
        evicted: list[int] = []
        free = len(self.stack)
        while self.count(giver, HOLE) < self.ks[giver]:
            evicted.append(self._evict(giver))
            if len(self.stack) > free:
                return evicted, []
        victim = self._victim(giver)
        moves = [self._move(block, victim, giver) for block in self.blocks_of(victim, HELD, CACHED)]
        self._disown(victim)
        self.stack.append(victim)
        self.moved[giver] += len(moves)
        return evicted, moves

    def _victim(self, giver: int) -> int:
        unlocked = [slab for slab in self.slabs_of(giver) if not self.locked(slab)]
        sparse = [slab for slab in unlocked if self.blocks_of(slab, HOLE)]
        return min(sparse or unlocked, key=lambda slab: (self.bucket(slab), slab))

    def _move(self, source: int, victim: int, of: int) -> tuple[int, int]:
        slabs = self.with_holes(of, pinned=True) + self.with_holes(of, pinned=False)
        slab = next(slab for slab in slabs if slab != victim)
        target = self.blocks_of(slab, HOLE)[0]
        self.state[target] = self.state[source]
        self.state[source] = HOLE
        if self.state[target] == CACHED:
            self.lrus[of] = [target if block == source else block for block in self.lrus[of]]
            self.stamp[target] = self.stamp[source]
        return source, target

    # -- will it do

    def needed_slabs(self, more: Sequence[int]) -> int:
        """Slabs for what is held and ``more[c]`` blocks of each class c."""
        return sum(self._wants(more))

    def fits(self, more: Sequence[int]) -> bool:
        """Whether ``more[c]`` blocks of each class c can be taken, room being made."""
        if self.needed_slabs(more) > self.num_slabs - 1:
            return False
        return not self.locks or self.fits_without_moves(more) or self._fits_around_locks(more)

    def fits_without_moves(self, more: Sequence[int]) -> bool:
        """Whether holes, free slabs and each class's own cached blocks suffice."""
        short = [max(0, n - self.count(of, HOLE, CACHED)) for of, n in enumerate(more)]
        return sum(-(-n // k) for n, k in zip(short, self.ks, strict=True)) <= len(self.stack)

    def _fits_around_locks(self, more: Sequence[int]) -> bool:
        missing, found = 0, len(self.stack)
        for of, want in enumerate(self._wants(more)):
            slabs = self.slabs_of(of)
            if want > len(slabs):
                missing += want - len(slabs)
            else:
                found += min(len(slabs) - want, sum(not self.locked(slab) for slab in slabs))
        return missing <= found

    def _wants(self, more: Sequence[int]) -> list[int]:
        return [-(-(self.count(of, HELD) + n) // self.ks[of]) for of, n in enumerate(more)]
