"""Where a pool's free blocks come from: what a FreeOrder (one size) and a SlabSpace (several) both answer.

Blocks are the pool's numbers, classes those of the plan's slabs (one, 0, without slabs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Ids = NDArray[np.int32] | NDArray[np.int64]


class Weight(NamedTuple):
    """needed: units that would be in use, or taken. free: units that there are for it. A unit is a block, or a slab."""

    needed: int
    free: int


class Room(NamedTuple):
    """What making room did. evicted: int32, blocks that lose their keys. moves: int32[m, 2], (source, target)."""

    evicted: Int32
    moves: Int32


class Space(Protocol):
    """Blocks that nobody holds."""

    def __len__(self) -> int:
        """How many there are."""

    @property
    def num_units(self) -> int:
        """Blocks, or slabs, that can be had at all."""

    def usage(self, reserved: Sequence[int]) -> float:
        """Share that is held, ``reserved`` blocks by class left out on both sides."""

    def usages(self, reserved: Sequence[int], more: Int64) -> Float64:
        """usage() with ``more[i, c]`` blocks of class c held besides, int64[n, classes]; float64[n], to the bit."""

    def order(self) -> Int32:
        """Blocks that nobody holds in the order in which they would be taken, class by class."""

    def obtainable(self, of: int) -> int:
        """Blocks of class ``of`` that can be taken, everything evictable given up."""

    def weigh(self, needs: Sequence[int], freed: Sequence[int]) -> Weight:
        """needs: blocks to take, freed: blocks to be given back before, by class. They fit if needed <= free."""

    def gives(self, needs: Sequence[int]) -> bool:
        """Whether ``needs`` blocks, by class, can be taken now: they fit, and need no moves that are not to be had."""

    def units(self, blocks: Sequence[int]) -> int:
        """Units that ``blocks``, by class, take in an empty pool."""

    def takes_in_any_order(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Whether taking ``needs`` blocks, by class, gives the same whatever the order, and moves nothing.

        drops: says whether blocks are released in between; not asked where that makes no difference.
        """

    def takes_alike(self, needs: Sequence[int], drops: Callable[[], bool]) -> bool:
        """Whether taking ``needs`` blocks, by class, at once gives the same as class by class and one by one.

        As takes_in_any_order, but blocks of classes that take none may move for it.
        """

    def waits(self, needs: Sequence[int], freed: Sequence[int]) -> bool:
        """Whether what would fit needs moves that are not to be had now."""

    def take(self, n: int, of: int) -> Int32:
        """Blocks of class ``of``; fewer than ``n`` where room must be made first."""

    def take_one(self, of: int) -> int:
        """A block of class ``of``, 0 where room must be made first: ``take`` of one, without an array."""

    def begin_step(self) -> None:
        """What is moved from now on belongs to another step."""

    def next_evicted(self, n: int) -> Int32 | None:
        """All cached blocks that may be evicted while ``n`` are taken; None where nobody can tell. O(n)."""

    def take_oldest(self, n: int, of: int) -> Int32:
        """Up to ``n`` cached blocks of class ``of``, which has no other, taken as make_room and take do one by one.

        As many as make_room evicts one after the other, nobody else giving room; they are to lose their keys.
        """

    def make_room(self, of: int, ref: Int32) -> Room:
        """More can be taken for class ``of``. ref: holders of every block."""

    def remove(self, ids: Ids) -> None:
        """Blocks that nobody held get a holder."""

    def append(self, ids: Ids) -> None:
        """Blocks that lost their last holder and have a key: the last to be evicted, in this order."""

    def prepend(self, ids: Ids) -> None:
        """Blocks that lost their last holder and have no key."""

    def append_one(self, block: int) -> None:
        """``append`` of one block, without an array."""

    def prepend_one(self, block: int) -> None:
        """``prepend`` of one block, without an array."""

    def age_first(self, ids: Ids) -> None:
        """Cached blocks that are evicted before all others of their class."""

    def lock(self, ids: Ids) -> None:
        """Blocks that never move."""

    def unlock(self, ids: Ids) -> None:
        """Blocks that were locked may move again."""

    def check(self, ref: Int32, keyed: Bool) -> Iterator[str]:
        """A line for each invariant of its own that does not hold. O(blocks).

        ref: holders of every block. keyed: which blocks have a key.
        """

    def forget_all(self) -> None:
        """Cached blocks have no keys any longer."""


class ClassedSpace(Space, Protocol):
    """A space of several classes of blocks.

    num_blocks: numbers that blocks have. bases: the first of each class. class_of_group: of each group of layers.
    """

    @property
    def num_blocks(self) -> int:
        """Numbers of all classes."""

    @property
    def bases(self) -> tuple[int, ...]:
        """The first number of each class."""

    @property
    def class_of_group(self) -> tuple[int, ...]:
        """The class of each group."""

    def take_given_first(self) -> None:
        """From now on nothing is evicted but what was given up while ``spares`` says so; else as it always was."""

    def give_up(self, ids: Ids) -> None:
        """Cached blocks that no kept end needs: they are evicted before all others, whatever their class."""

    def keep(self, ids: Ids) -> None:
        """Of ``ids`` those that were given up, and are cached still, are the last to be evicted."""

    def given_up(self) -> Bool:
        """Which blocks are given up, bool[num_blocks]."""

    def has_spare(self, n: int, of: int) -> bool:
        """Whether ``n`` blocks of class ``of`` are there or given up, all of that class: ``spares``, in haste. O(1)."""

    def spares(self, needs: Sequence[int], more: Sequence[int]) -> bool:
        """Whether ``needs`` blocks, by class, can be taken with nothing evicted but what was given up.

        more: blocks of each class that might be given up besides.
        """
