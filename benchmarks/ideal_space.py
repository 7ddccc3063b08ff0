"""An ideal pool for measurements: memory by the byte, no slabs, no padding, one order of last use over all blocks.

The loss of slabs is measured against it (natural_table.py): the manager and the placement are the same, only the space
differs. Real memory cannot be divided like this, because blocks of several sizes leave holes between each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.spaces.one_size import NOWHERE, Bool, FreeOrder, Ids, Room, Weight
from hybridkv.errors import BlockError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_OLDEST = -(1 << 60)
_NO_MOVES = np.empty((0, 2), np.int32)


class IdealSpace:
    """``memory_bytes`` for blocks of ``block_bytes[c]`` bytes in class c: it has the methods of a SlabSpace."""

    def __init__(self, memory_bytes: int, block_bytes: Sequence[int], class_of_group: Sequence[int]) -> None:
        self._bytes = tuple(block_bytes)
        self.class_of_group = tuple(class_of_group)
        counts = [memory_bytes // size + 1 for size in self._bytes]
        self.bases = tuple(sum(counts[:of]) for of in range(len(counts)))
        self.num_blocks = sum(counts)
        self.num_units = memory_bytes
        self._empty = [list(range(count - 1, 0, -1)) for count in counts]
        self._lru = [FreeOrder(count, np.full(count, NOWHERE, np.int32)) for count in counts]
        self._stamps = [np.zeros(count, np.int64) for count in counts]
        self._referenced = [0] * len(counts)
        self._given = np.zeros(self.num_blocks, np.bool_)
        self._now = 0

    def _used(self) -> int:
        held = [ref + len(lru) for ref, lru in zip(self._referenced, self._lru, strict=True)]
        return self.units(held)

    def __len__(self) -> int:
        """Blocks that are cached."""
        return sum(map(len, self._lru))

    def units(self, blocks: Sequence[int]) -> int:
        """Bytes."""
        return sum(count * size for count, size in zip(blocks, self._bytes, strict=True))

    def usage(self, reserved: Sequence[int]) -> float:
        """Bytes held over all bytes."""
        return (self.units(self._referenced) - self.units(reserved)) / (self.num_units - self.units(reserved))

    def usages(self, reserved: Sequence[int], more: Int64) -> NDArray[np.float64]:
        """Return the usage, 0 to 1, for each row of ``more``: with ``more[i, c]`` more blocks of class c held."""
        held: Int64 = self.units(self._referenced) - self.units(reserved) + more @ np.array(self._bytes)
        return held / (self.num_units - self.units(reserved))

    def order(self) -> Int32:
        """Return the cached blocks by class, the next to be evicted first."""
        parts = [lru.order() + base for lru, base in zip(self._lru, self.bases, strict=True)]
        return np.concatenate(parts).astype(np.int32)

    def obtainable(self, of: int) -> int:
        """Blocks that fit when all that is cached goes."""
        return (self.num_units - self.units(self._referenced)) // self._bytes[of]

    def weigh(self, needs: Sequence[int], freed: Sequence[int]) -> Weight:
        """Bytes held then, against all bytes."""
        held = [ref + n - f for ref, n, f in zip(self._referenced, needs, freed, strict=True)]
        return Weight(self.units(held), self.num_units)

    def gives(self, needs: Sequence[int]) -> bool:
        """As many bytes are not held."""
        return self.units(self._referenced) + self.units(needs) <= self.num_units

    def takes_in_any_order(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Where nothing must be evicted."""
        return self._used() + self.units(needs) <= self.num_units and not drops()

    def takes_alike(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Return the ids unchanged, because nothing moves."""
        return self.takes_in_any_order(needs, drops)

    def waits(self, needs: Sequence[int], freed: Sequence[int]) -> bool:  # noqa: ARG002 - nothing moves
        """Never: nothing moves."""
        return False

    def take(self, n: int, of: int) -> Int32:
        """Blocks for which bytes are free."""
        n = min(n, (self.num_units - self._used()) // self._bytes[of])
        empty = self._empty[of]
        ids = np.array(empty[len(empty) - n :][::-1], np.int64)
        del empty[len(empty) - n :]
        self._referenced[of] += n
        return (ids + self.bases[of]).astype(np.int32)

    def take_one(self, of: int) -> int:
        """Take a block if its bytes are free; return 0 otherwise."""
        ids = self.take(1, of)
        return ids.item(0) if ids.size else 0

    def begin_step(self) -> None:
        """Nothing: nothing moves."""

    def next_evicted(self, n: int) -> Int32 | None:  # noqa: ARG002 - as above
        """Nobody asks."""
        return None

    def take_oldest(self, n: int, of: int) -> Int32:  # noqa: ARG002 - as above
        """None: the oldest goes, whoever asks."""
        return np.empty(0, np.int32)

    def make_room(self, of: int, ref: Int32) -> Room:  # noqa: ARG002 - the oldest goes, whoever asks
        """Evict the least recently used block of any class."""
        able = [i for i, lru in enumerate(self._lru) if len(lru)]
        if not able:
            raise BlockError("nothing can be evicted: weigh before taking")
        oldest = min(able, key=lambda i: int(self._stamps[i][self._lru[i].first()]))
        block = self._lru[oldest].first()
        self._lru[oldest].remove(np.array([block]))
        self._given[block + self.bases[oldest]] = False
        self._empty[oldest].append(block)
        return Room(np.array([block + self.bases[oldest]], np.int32), _NO_MOVES)

    def remove(self, ids: Ids) -> None:
        """Take cached blocks out of the order, because they have a holder."""
        self._given[ids] = False
        for of, local in self._parts(ids):
            self._lru[of].remove(local)
            self._referenced[of] += len(local)

    def append(self, ids: Ids) -> None:
        """Blocks lose their last holder and have a key."""
        for of, local in self._parts(ids):
            self._lru[of].append(local)
            self._stamps[of][local] = np.arange(self._now, self._now + len(local))
            self._now += len(local)
            self._referenced[of] -= len(local)

    def append_one(self, block: int) -> None:
        """``append`` of one."""
        self.append(np.array([block]))

    def prepend_one(self, block: int) -> None:
        """``prepend`` of one."""
        self.prepend(np.array([block]))

    def prepend(self, ids: Ids) -> None:
        """Blocks lose their last holder and have no key."""
        for of, local in self._parts(ids):
            self._empty[of] += local.tolist()[::-1]
            self._referenced[of] -= len(local)

    def age_first(self, ids: Ids) -> None:
        """Blocks that go before all others."""
        for of, local in self._parts(ids):
            self._lru[of].remove(local)
            self._lru[of].prepend(local)
            self._stamps[of][local] = _OLDEST

    def take_unneeded_first(self) -> None:
        """Return True: it always fits."""

    def mark_unneeded(self, ids: Ids) -> None:
        """Blocks that no kept end needs go before all others."""
        self.age_first(ids)
        self._given[ids] = True

    def keep(self, ids: Ids) -> None:
        """Those of them that were given up are the youngest."""
        again = ids[self._given[ids]]
        self._given[again] = False
        for of, local in self._parts(again):
            self._lru[of].remove(local)
            self._lru[of].append(local)
            self._stamps[of][local] = np.arange(self._now, self._now + len(local))
            self._now += len(local)

    def unneeded_blocks(self) -> Bool:
        """Which blocks are."""
        return self._given.copy()

    def has_spare(self, n: int, of: int) -> bool:
        """As ``spares``, of one class."""
        none = [0] * len(self.bases)
        return self.spares([*none[:of], n, *none[of + 1 :]], none)

    def spares(self, needs: Sequence[int], more: Sequence[int]) -> bool:
        """Whether the bytes are there without what ends need."""
        given = [int(np.count_nonzero(part)) for part in np.split(self._given, self.bases[1:])]
        freed = [a + b for a, b in zip(given, more, strict=True)]
        return self._used() - self.units(freed) + self.units(needs) <= self.num_units

    def lock(self, ids: Ids) -> None:
        """Nothing: nothing moves."""

    def unlock(self, ids: Ids) -> None:
        """Nothing: nothing moves."""

    def check(self, ref: Int32, keyed: Bool) -> Iterator[str]:  # noqa: ARG002 - a measurement checks nothing
        """Nothing is checked in a measurement."""
        return iter(())

    def forget_all(self) -> None:
        """Note that cached blocks lost their keys."""
        self._given.fill(False)  # noqa: FBT003 - numpy's own signature
        for of, lru in enumerate(self._lru):
            local = lru.order()
            lru.remove(local)
            self._empty[of] += local.tolist()

    def _parts(self, ids: Ids) -> Iterator[tuple[int, Int64]]:
        where = ids.astype(np.int64)
        classes = np.searchsorted(self.bases, where, side="right") - 1
        for of in np.unique(classes).tolist():
            yield of, where[classes == of] - self.bases[of]
