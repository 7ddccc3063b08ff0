"""Every rule of the space of slabs, worked by hand; with one class and k = 1 it is the free order."""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from slab_model import OracleSlabs

from hybridkv.cache.blocks.free_order import FreeOrder
from hybridkv.cache.blocks.slab_space import SlabSpace
from hybridkv.cache.blocks.space import Room
from hybridkv.errors import BlockError, CacheError, ConfigError
from hybridkv.planner.slabs import ALIGNMENT_BYTES, SlabClass, SlabLayout


def ids(*blocks: int) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)


def layout(num_slabs: int, ks: Sequence[int]) -> SlabLayout:
    slab_bytes = ALIGNMENT_BYTES * math.lcm(*ks)
    classes = tuple(SlabClass(slab_bytes // k, k, (group,)) for group, k in enumerate(ks))
    return SlabLayout(slab_bytes, num_slabs, classes, (1,) * len(ks))


def cached_in(space: SlabSpace) -> NDArray[np.bool_]:
    """Which blocks the space itself takes for cached."""
    keyed = np.zeros(space.num_blocks, np.bool_)
    keyed[np.concatenate([space.lru(of) for of in range(len(space.ks))])] = True
    return keyed


class Kept:
    """A space and what a pool would know: who is held. Checked after every call."""

    def __init__(self, num_slabs: int, *ks: int) -> None:
        self.space = SlabSpace(layout(num_slabs, ks))
        self.ref = np.zeros(self.space.num_blocks, np.int32)

    def check(self) -> None:
        assert list(self.space.check(self.ref, cached_in(self.space))) == []

    def take(self, n: int, of: int = 0) -> list[int]:
        blocks = self.space.take(n, of)
        assert blocks.dtype == np.int32
        self.ref[blocks] = 1
        self.check()
        return [int(block) for block in blocks]

    def fill(self, slabs: int, of: int = 0) -> None:
        """Take all blocks of the next ``slabs`` slabs."""
        assert len(self.take(slabs * self.space.ks[of], of)) == slabs * self.space.ks[of]

    def append(self, *blocks: int) -> None:
        self.ref[list(blocks)] = 0
        self.space.append(ids(*blocks))
        self.check()

    def prepend(self, *blocks: int) -> None:
        self.ref[list(blocks)] = 0
        self.space.prepend(ids(*blocks))
        self.check()

    def remove(self, *blocks: int) -> None:
        self.ref[list(blocks)] = 1
        self.space.remove(ids(*blocks))
        self.check()

    def make_room(self, of: int = 0) -> tuple[list[int], list[list[int]]]:
        room = self.space.make_room(of, self.ref)
        assert isinstance(room, Room)
        assert room.evicted.dtype == np.int32
        assert room.moves.dtype == np.int32
        assert room.moves.shape[1:] == (2,)
        for source, target in room.moves:
            self.ref[target], self.ref[source] = self.ref[source], 0
        self.check()
        return room.evicted.tolist(), room.moves.tolist()

    def lru(self, of: int = 0) -> list[int]:
        return [int(block) for block in self.space.lru(of)]


# -- ids and counts


def test_all_slabs_but_the_null_slab_are_free_at_first() -> None:
    space = SlabSpace(layout(4, (3, 1)))
    assert (space.num_blocks, space.bases, space.ks, space.num_slabs) == (16, (0, 12), (3, 1), 3)
    assert space.class_of_group == (0, 1)
    assert space.free_slabs() == [3, 2, 1]
    assert [space.owner(slab) for slab in range(4)] == [-1] * 4
    assert (len(space), space.usage([0] * len(space.ks))) == (0, 0.0)
    assert list(space.check(np.zeros(16, np.int32), np.zeros(16, np.bool_))) == []


def test_counts() -> None:
    kept = Kept(6, 4, 1)
    kept.take(5)
    kept.take(2, 1)
    kept.append(4, 6, 24 + 3)
    kept.prepend(5)
    space = kept.space
    assert (space.referenced, space.holes, space.cached, space.slabs) == ([2, 1], [4, 0], [2, 1], [2, 2])
    assert len(space) == 7
    assert space.usage((0, 0)) == pytest.approx((2 / 4 + 1 / 1) / 5)
    assert [space.owner(slab) for slab in range(1, 6)] == [0, 0, 1, 1, -1]
    assert [space._holes.holes_of(slab).tolist() for slab in (1, 2, 3, 5)] == [[5], [9, 10, 11], [], []]
    assert space.now == 3


def test_the_null_slab_alone_gives_nothing() -> None:
    kept = Kept(1, 3, 1)
    assert (kept.take(1), kept.take(2, 1)) == ([], [])
    assert (kept.space.usage((0, 0)), kept.space.fits((0, 0)), kept.space.fits((1, 0))) == (0.0, True, False)
    with pytest.raises(CacheError, match="ask fits"):
        kept.make_room()


def test_more_blocks_than_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="plan larger slabs"):
        SlabSpace(layout(2**29, (5,)))


# -- take


def test_a_fresh_slab_yields_neighbours() -> None:
    kept = Kept(4, 3)
    assert kept.take(7) == [3, 4, 5, 6, 7, 8, 9]
    assert kept.take(5) == [10, 11]
    assert kept.take(1) == []
    assert kept.take(0) == []


def test_blocks_of_classes_have_ids_of_their_own() -> None:
    kept = Kept(4, 3, 2)
    assert kept.take(4) == [3, 4, 5, 6]
    assert kept.take(3, 1) == [12 + 6, 12 + 7]


def test_holes_of_pinned_slabs_go_before_free_slabs_the_fullest_bucket_first() -> None:
    kept = Kept(6, 8)
    kept.fill(4)
    kept.prepend(30)  # slab 3: bucket 7
    kept.prepend(20)  # slab 2: bucket 7
    kept.prepend(10, 12, 13)  # slab 1: bucket 5
    assert kept.take(6) == [20, 30, 10, 12, 13, 40]


def test_a_bucket_is_an_eighth_of_a_slab() -> None:
    kept = Kept(5, 16)
    kept.fill(3)
    kept.prepend(16, 17)  # 14 of 16 live: bucket 7
    kept.prepend(32)  # 15 live: bucket 7 too, and the number decides
    assert kept.take(3) == [16, 17, 32]
    kept.prepend(16, 17, 18)  # 13 live: bucket 6
    kept.prepend(48, 49)  # 14 live: bucket 7
    assert kept.take(3) == [48, 49, 16]


def test_many_blocks_at_once_go_to_the_same_buckets() -> None:
    kept = Kept(6, 80)
    kept.fill(4)
    kept.prepend(*range(160, 199))  # slab 2, 41 of 80 live: bucket 4
    kept.prepend(*range(80, 120))  # slab 1, 40 live: bucket 4
    kept.prepend(*range(240, 319))  # slab 3, 1 live: bucket 0, pinned
    assert kept.take(81) == [*range(80, 120), *range(160, 199), 240, 241]


def test_the_last_of_several_slabs_is_the_one_taken_from_last() -> None:
    kept = Kept(5, 8)
    assert kept.take(16) == list(range(8, 24))
    kept.prepend(8)
    kept.prepend(16, 17)
    assert kept.take(3) == [16, 17, 8]


def test_the_slab_taken_from_last_is_taken_from_again() -> None:
    kept = Kept(5, 8)
    kept.fill(3)
    kept.prepend(8, 9, 10)
    kept.prepend(16)
    assert kept.take(2) == [16, 8]
    kept.prepend(24)  # slab 3 is fuller than slab 1 now
    assert kept.take(3) == [9, 10, 24]


def test_the_slab_taken_from_last_is_left_when_nobody_holds_a_block_of_it() -> None:
    kept = Kept(5, 4)
    kept.fill(1)
    kept.take(2)  # slab 2
    kept.prepend(4)
    kept.append(8, 9)
    assert kept.take(1) == [4]
    assert kept.take(1) == [12]
    kept.remove(8)  # slab 2 is pinned again, but slab 3 was taken from last
    assert kept.take(4) == [13, 14, 15, 10]


def test_a_slab_that_was_given_up_is_not_the_one_taken_from_last() -> None:
    kept = Kept(4, 4, 2)
    kept.fill(1)
    assert kept.take(1) == [8]
    kept.prepend(8)
    assert kept.take(1, 1) == [16 + 4]
    kept.prepend(5)
    assert kept.take(2) == [5, 12]
    assert kept.space.owner(2) == 1


def test_free_slabs_go_before_holes_of_slabs_with_cached_blocks_only() -> None:
    kept = Kept(5, 8)
    kept.fill(3)
    kept.append(*range(8, 15))
    kept.prepend(15)  # slab 1: bucket 7, unpinned
    kept.append(*range(17, 24))
    kept.prepend(16)  # slab 2: the same
    kept.append(*range(24, 28))
    kept.prepend(*range(28, 32))  # slab 3: bucket 4
    assert kept.take(9) == [*range(32, 40), 15]
    assert kept.take(3) == [16, 28, 29]
    assert kept.space.cached == [18]


# -- released and held again


def test_released_blocks_are_cached_in_order_and_found_again() -> None:
    kept = Kept(4, 3)
    kept.take(6)
    kept.append(5, 3, 8)
    assert kept.lru() == [5, 3, 8]
    kept.remove(3)
    kept.append(3, 4)
    assert kept.lru() == [5, 8, 3, 4]
    assert kept.space._cached.stamps[kept.lru()].tolist() == [1, 3, 4, 5]
    assert kept.space.now == 5
    assert kept.space.holes == [0]


def test_a_whole_slab_is_free_at_once_and_taken_next() -> None:
    kept = Kept(5, 2, 1)
    kept.take(4)
    kept.prepend(3)
    assert kept.space.free_slabs() == [4, 3]
    kept.prepend(2)
    assert kept.space.free_slabs() == [4, 3, 1]
    assert kept.take(1, 1) == [10 + 1]


@pytest.mark.parametrize("more", [0, 20])
def test_of_slabs_that_get_whole_together_the_first_is_taken_first(more: int) -> None:
    """With many blocks too, which are counted by arrays."""
    kept = Kept(5 + more, 2)
    kept.take(8 + 2 * more)
    rest = [block for slab in range(5, 5 + more) for block in (2 * slab, 2 * slab + 1)]
    kept.prepend(2, 4, 5, 6, 3, 8, 9, 7, *rest)  # slab 2, 1, 4, 3
    assert kept.space.free_slabs() == [*range(4 + more, 4, -1), 3, 4, 1, 2]


def test_blocks_of_several_classes_in_one_call() -> None:
    kept = Kept(6, 2, 1)
    kept.take(4)
    kept.take(2, 1)
    assert kept.take(1, 1) == [12 + 5]
    kept.append(2, 12 + 4, 3)
    assert (kept.lru(0), kept.lru(1)) == ([2, 3], [16])
    kept.space.age_first(ids(16, 3))
    kept.remove(3, 16)
    assert (kept.lru(0), kept.lru(1)) == ([2], [])
    kept.prepend(12 + 3, 4, 12 + 4, 5, 12 + 5)
    assert kept.space.free_slabs() == [5, 2, 4, 3]
    assert kept.space.now == 3


def test_forgotten_blocks_are_taken_after_what_is_free_the_oldest_first() -> None:
    kept = Kept(7, 2, 1)
    kept.take(6)
    kept.take(2, 1)
    kept.append(14 + 5, 6, 4, 2, 5, 3, 14 + 4)
    kept.space.forget_all()
    kept.check()
    assert kept.space.free_slabs() == [4, 5, 1, 2, 6]
    assert (kept.space.cached, kept.space.holes, kept.space.referenced) == ([0, 0], [1, 0], [1, 0])


def test_a_superseded_block_is_the_first_to_go_and_older_than_any() -> None:
    kept = Kept(8, 1)
    kept.fill(5)
    kept.append(1, 2, 3, 4)
    kept.space.age_first(ids(4, 2))
    kept.check()
    assert kept.lru() == [4, 2, 1, 3]
    kept.space.age_first(ids(3))
    assert kept.lru() == [3, 4, 2, 1]
    assert kept.make_room() == ([3], [])
    kept.remove(4)
    kept.append(4)
    assert kept.lru() == [2, 1, 4]


@pytest.mark.parametrize(
    ("call", "blocks", "message"),
    [
        ("remove", (2,), "block 2 is not cached"),
        ("remove", (4, 6), "block 6 is not cached"),
        ("age_first", (5,), "block 5 is not cached"),
        ("append", (4,), "block 4 is cached"),
        ("append", (7,), "block 7 is free"),
        ("prepend", (2, 5), "block 5 is free"),
        ("prepend", (8,), "block 8 is free"),
        ("prepend", (0,), "block 0 is free"),
        ("lock", (4,), "block 4 is cached"),
        ("unlock", (2,), "block 2 is not locked"),
        ("append", (12,), "block 12 is none of the 12"),
        ("remove", (-1,), "block -1 is none of the 12"),
        ("append", (3,), "block 3 is locked"),
        ("prepend", (2, 3), "block 3 is locked"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_blocks_in_another_state_are_refused(call: str, blocks: tuple[int, ...], message: str, many: bool) -> None:
    """Before anything changes. With many ids too, which are looked at with arrays."""
    kept = Kept(6, 2)
    kept.take(5)
    kept.append(4)
    kept.prepend(5)
    kept.space.lock(ids(3))
    given = ids(*blocks * 33) if many else ids(*blocks)
    with pytest.raises(BlockError, match=message):
        getattr(kept.space, call)(given)
    kept.check()
    assert (kept.lru(), kept.space.referenced, kept.space.now) == ([4], [3], 1)


# -- room


def aged(releases: int) -> Kept:
    """Two classes of k = 1 and no free slab: block 7 of class 1 is of stamp 1, block 2 of class 0 of stamp 3."""
    kept = Kept(5, 1, 1)
    kept.take(2)
    kept.take(2, 1)
    kept.append(5 + 3)
    kept.append(1)
    kept.append(2)
    kept.remove(1)
    while kept.space.now < releases:
        kept.append(5 + 4)
        kept.remove(5 + 4)
    return kept


def test_the_other_class_gives_when_its_oldest_is_more_than_a_tenth_older() -> None:
    assert aged(22).make_room() == ([8], [])  # 21 against 19 releases
    assert aged(23).make_room() == ([2], [])  # 22 against 20: 1.1 times as old, not more
    assert aged(22).make_room(1) == ([8], [])


def test_the_youngest_block_is_of_age_0() -> None:
    kept = Kept(3, 1, 1)
    kept.take(1)
    kept.take(1, 1)
    kept.append(3 + 2, 1)
    assert kept.make_room() == ([5], [])  # 1 release ago, against none


def test_a_class_without_cached_blocks_gets_a_slab_however_young() -> None:
    kept = Kept(3, 1, 1)
    kept.take(1)
    kept.take(1, 1)
    kept.append(3 + 2)
    assert kept.make_room() == ([5], [])
    assert kept.take(1) == [2]
    assert kept.space.transfers == [0, 1]


def test_the_class_with_the_oldest_block_gives_the_lowest_of_equals() -> None:
    kept = Kept(5, 1, 1, 1)
    kept.take(2)
    kept.take(1, 1)
    kept.take(1, 2)
    kept.append(10 + 4, 5 + 3)
    assert kept.make_room() == ([14], [])
    kept.take(1)
    kept.prepend(4)
    kept.take(1, 2)
    kept.append(14)
    kept.space.age_first(ids(14))
    kept.space.age_first(ids(8))
    assert kept.make_room() == ([8], [])


def test_two_ageless_blocks_are_equally_old() -> None:
    kept = Kept(3, 1, 1)
    kept.take(1)
    kept.take(1, 1)
    kept.append(3 + 2, 1)
    kept.space.age_first(ids(1, 5))
    assert kept.make_room() == ([1], [])


def test_who_has_less_than_a_slab_that_nobody_holds_gives_nothing() -> None:
    kept = Kept(4, 1, 3)
    kept.take(1)
    kept.take(6, 1)
    kept.append(4 + 6, 4 + 7, 1)
    assert kept.make_room() == ([1], [])
    assert kept.take(1) == [1]
    kept.append(4 + 9)  # three of the six
    assert kept.make_room() == ([10, 11, 13], [[12, 13]])


def test_the_own_oldest_block_is_evicted_and_its_slab_may_be_whole() -> None:
    kept = Kept(3, 2)
    kept.take(4)
    kept.append(4, 2, 5)
    assert kept.make_room() == ([4], [])
    assert kept.space.free_slabs() == []
    kept.append(3)
    assert kept.make_room() == ([2], [])
    assert kept.make_room() == ([5], [])
    assert kept.space.free_slabs() == [2]
    assert kept.space.transfers == [0]


def test_giving_evicts_until_a_slab_is_whole_or_there_are_holes_for_one() -> None:
    kept = Kept(4, 1, 2)
    kept.take(1)
    kept.take(4, 1)
    kept.append(10, 11, 8)
    kept.prepend(9)
    assert kept.make_room() == ([10], [[8, 10]])
    assert (kept.space.moved_blocks, kept.space.transfers) == ([0, 1], [0, 1])
    kept = Kept(5, 1, 3)
    kept.take(1)
    kept.take(9, 1)
    kept.append(11, 12, 13, 14)
    kept.prepend(15)
    assert kept.make_room() == ([11, 12], [[13, 15]])
    kept = Kept(4, 1, 2)
    kept.take(1)
    kept.take(4, 1)
    kept.append(10, 11, 8, 9)
    assert kept.make_room() == ([10, 11], [])
    assert kept.lru(1) == [8, 9]
    assert (kept.space.moved_blocks, kept.space.transfers) == ([0, 0], [0, 1])


def test_a_slab_whose_only_live_block_is_evicted_is_given() -> None:
    kept = Kept(5, 1, 4)
    kept.take(1)
    kept.take(12, 1)
    kept.append(13)
    kept.prepend(14, 15, 16)
    assert kept.make_room() == ([13], [])


def test_nothing_is_evicted_while_there_are_holes_for_a_slab() -> None:
    kept = Kept(4, 1, 4)
    kept.take(1)
    kept.take(8, 1)
    kept.append(4 + 8)
    kept.prepend(4 + 9, 4 + 10, 4 + 12, 4 + 13)
    assert kept.make_room() == ([], [[12, 16], [15, 17]])
    assert kept.space.free_slabs() == [2]
    assert (kept.lru(1), kept.space.moved_blocks, kept.space.transfers) == ([16], [0, 2], [0, 1])


def test_the_emptiest_slab_is_emptied_the_lowest_of_equals() -> None:
    kept = Kept(6, 8, 1)
    kept.fill(4)
    kept.take(1, 1)
    kept.prepend(8, *range(24, 27), *range(34, 37), 16)  # slabs 1 and 2 have a hole, 3 and 4 have three
    evicted, moves = kept.make_room(1)
    assert (evicted, [source for source, _ in moves]) == ([], [27, 28, 29, 30, 31])
    assert [target for _, target in moves] == [8, 16, 34, 35, 36]


def test_a_slab_of_cached_blocks_may_be_the_emptiest() -> None:
    kept = Kept(5, 4, 1)
    kept.fill(3)
    kept.take(1, 1)
    kept.append(8, 9)
    kept.prepend(10, 11)  # slab 2: bucket 4, unpinned
    kept.prepend(4, 12)  # slabs 1 and 3: bucket 6
    assert kept.make_room(1) == ([], [[8, 4], [9, 12]])


def test_live_blocks_move_into_pinned_slabs_first_the_fullest_of_them() -> None:
    kept = Kept(7, 8, 1)
    kept.fill(5)
    kept.take(1, 1)
    kept.append(8)
    kept.append(9)
    kept.prepend(*range(10, 15))  # slab 1, to be emptied: 8 and 9 cached, 15 held
    kept.append(*range(17, 24))
    kept.prepend(16)  # slab 2: bucket 7, but unpinned
    kept.prepend(24, 25)  # slab 3: bucket 6
    kept.prepend(39)  # slab 4: bucket 7
    assert kept.make_room(1) == ([], [[8, 39], [9, 24], [15, 25]])
    assert kept.lru() == [39, 24, *range(17, 24)]
    assert kept.space.free_slabs() == [1]


def test_a_slab_gets_pinned_by_what_moves_in() -> None:
    kept = Kept(6, 4, 1)
    kept.fill(3)
    kept.take(1, 1)
    kept.append(10, 11, 12, 13, 14, 15)
    kept.prepend(5, 6, 7)  # slab 1, to be emptied: 4 is held
    kept.prepend(8, 9)  # slab 2: unpinned
    assert kept.make_room(1) == ([], [[4, 8]])
    assert kept.space.free_slabs() == [5, 1]
    assert kept.take(2) == [9, 4]


def test_a_moved_block_keeps_its_age() -> None:
    kept = Kept(6, 1, 2)
    kept.take(1)
    kept.take(6, 1)
    assert kept.take(2) == [5]
    kept.append(10)
    kept.append(14)
    kept.prepend(11, 13)
    assert kept.make_room() == ([], [[10, 13]])
    assert kept.lru(1) == [13, 14]
    assert kept.space._cached.stamps[[13, 14]].tolist() == [1, 2]


def test_locked_blocks_do_not_move_and_their_slabs_do_not_go() -> None:
    kept = Kept(5, 4, 1)
    kept.fill(3)
    kept.take(1, 1)
    kept.prepend(4, 5, 6)  # slab 1: only 7 is held
    kept.prepend(8, 9)  # slab 2
    kept.space.lock(ids(7))
    kept.space.lock(ids(7))
    kept.space.unlock(ids(7))
    kept.check()
    assert kept.make_room(1) == ([], [[10, 4], [11, 5]])


def test_among_slabs_with_a_locked_lowest_the_next_of_the_bucket_is_emptied() -> None:
    kept = Kept(5, 4, 1)
    kept.fill(3)
    kept.take(1, 1)
    kept.prepend(4, 5, 8, 9, 12, 13)
    kept.space.lock(ids(6))
    assert [source for source, _ in kept.make_room(1)[1]] == [10, 11]


def test_a_full_slab_is_emptied_when_all_with_holes_are_locked() -> None:
    kept = Kept(6, 2, 1)
    kept.fill(4)
    kept.take(1, 1)
    kept.append(6)
    kept.prepend(2, 4)
    kept.space.lock(ids(3, 5))
    assert kept.make_room(1) == ([], [[6, 2], [7, 4]])
    assert kept.lru() == [2]


def test_without_cached_blocks_who_has_most_whole_slabs_of_holes_gives() -> None:
    kept = Kept(11, 1, 2, 3)
    kept.take(1)
    kept.take(6, 1)  # slabs 2, 3 and 4, from 15 on
    kept.take(18, 2)  # slabs 5 to 10, from 48 on
    kept.prepend(15, 17, 48, 51, 54, 57, 60, 63)  # 2 holes of 2, 6 of 3
    assert kept.make_room() == ([], [[49, 51], [50, 54]])
    kept.take(1)
    kept.prepend(52)  # 2 of 2, 4 of 3
    assert kept.make_room() == ([], [[16, 17]])


def test_room_for_nobody_is_a_misuse() -> None:
    kept = Kept(4, 2, 1)
    kept.fill(2)
    kept.take(1, 1)
    kept.prepend(2)
    assert not kept.space.fits((0, 1))
    with pytest.raises(CacheError, match="no class has a slab for class 1"):
        kept.make_room(1)
    kept.prepend(4)
    with pytest.raises(CacheError, match="no class has a slab for class 0"):
        kept.make_room(0)  # what it has itself, it need not ask for
    kept.space.lock(ids(3, 5))
    assert not kept.space.fits((0, 1))
    with pytest.raises(CacheError, match="no class has a slab for class 1"):
        kept.make_room(1)


# -- will it do


def test_needed_slabs_are_rounded_up_class_by_class() -> None:
    kept = Kept(6, 4, 1)
    kept.take(5)
    kept.append(8)
    space = kept.space
    assert [space.needed_slabs(more) for more in ((0, 0), (1, 0), (0, 3), (5, 1))] == [1, 2, 4, 4]
    assert space.needed_slabs((0, 3), 2) == 6
    assert space.fits((4, 3))
    assert not space.fits((5, 3))
    assert not space.fits((0, 5))


def test_what_fits_without_moves() -> None:
    kept = Kept(4, 2, 1)
    kept.fill(2)
    kept.append(2)
    kept.prepend(4)
    space = kept.space
    assert space.fits((0, 2))
    assert not space.fits_without_moves((0, 2))
    assert space.fits_without_moves((0, 1))
    assert space.fits_without_moves((2, 1))
    assert not space.fits_without_moves((3, 1))
    assert space.fits_without_moves((4, 0))


def test_locked_slabs_are_nobodys_to_give() -> None:
    kept = Kept(5, 2, 1)
    kept.fill(4)
    kept.prepend(3, 5, 7, 9)
    space = kept.space
    assert space.fits((0, 2))
    space.lock(ids(2, 4, 6))
    assert space.fits((0, 1))
    assert not space.fits((0, 2))
    assert space.fits((2, 1))
    assert not space.fits((3, 1))
    space.unlock(ids(4))
    assert space.fits((0, 2))


# -- one class, k = 1


class TestFreeOrder:
    """The ids of the pool without slabs: empty ones at the front, cached ones at the back."""

    @pytest.mark.parametrize("seed", range(40))
    def test_is_the_free_order_call_by_call(self, seed: int) -> None:
        random = Random(seed)
        size = random.choice((2, 3, 8, 40, 200))
        kept, order = Kept(size, 1), FreeOrder(size)
        held: list[int] = []
        cached: list[int] = []
        for _ in range(120):
            action = random.choice(("take", "take", "remove", "append", "append", "prepend", "evict", "reset"))
            if action == "take":
                n = random.choice((1, 2, random.randint(0, len(order)))) if len(order) > 1 else len(order)
                blocks = self._take(kept, n)
                assert blocks == order.take(n).tolist()
                held += blocks
                cached = [block for block in cached if block not in blocks]
            elif action == "reset":
                kept.space.forget_all()
                cached = []
            elif action in ("append", "prepend") and held:
                blocks = random.sample(held, random.randint(1, len(held)))
                getattr(kept, action)(*blocks)
                getattr(order, action)(ids(*blocks))
                held = [block for block in held if block not in blocks]
                cached += blocks if action == "append" else []
            elif action in ("remove", "evict") and cached:
                blocks = random.sample(cached, random.randint(1, len(cached)))
                kept.remove(*blocks)
                order.remove(ids(*blocks))
                cached = [block for block in cached if block not in blocks]
                if action == "remove":
                    held += blocks
                else:
                    kept.prepend(*blocks)
                    order.prepend(ids(*blocks))
            assert kept.space.free_slabs()[::-1] + kept.lru() == order.order().tolist()

    @staticmethod
    def _take(kept: Kept, n: int) -> list[int]:
        blocks = kept.take(n)
        while len(blocks) < n:
            evicted, moves = kept.make_room()
            assert (len(evicted), moves) == (1, [])
            blocks += kept.take(n - len(blocks))
        return blocks

    def test_reset_keeps_the_order(self) -> None:
        kept = Kept(7, 1)
        kept.fill(5)
        kept.prepend(2)
        kept.append(4, 1, 5, 3)
        kept.space.forget_all()
        kept.check()
        assert kept.take(6) == [2, 6, 4, 1, 5, 3]


# -- the oracle is pleasant


def test_the_oracle_is_driven_with_plain_ints() -> None:
    oracle = OracleSlabs(4, (2, 1))
    assert oracle.take(4, 0) == [2, 3, 4, 5]
    assert oracle.take(2, 1) == [8 + 3]
    oracle.append([4])
    oracle.prepend([3])
    assert oracle.make_room(1) == ([4], [(2, 4)])
    assert (oracle.take(3, 1), oracle.lru(0), oracle.free_slabs()) == ([9], [], [])
    assert (oracle.needed_slabs((1, 0)), oracle.fits((0, 0)), oracle.fits((1, 0))) == (4, True, False)
