"""Blocks that no kept end needs: given up in slabs, taken first, kept again; what can be had of them alone."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridkv.cache.journal import BlockFact, Cleared, Journal, Moved
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.eviction.blocks import PointBlocks
from hybridkv.planner.config import ALIGNMENT_BYTES, SlabClass, SlabLayout

Ids = NDArray[np.int32]


def space_of(slabs: int, *ks: int, most: int | None = None) -> SlabSpace:
    """``slabs`` usable ones; a class for each of ``ks``, of that many blocks a slab and one group."""
    size = ALIGNMENT_BYTES * int(np.prod(ks))
    classes = tuple(SlabClass(size // k, k, (of,)) for of, k in enumerate(ks))
    space = SlabSpace(SlabLayout(size, slabs + 1, classes, (1,) * len(ks)), most)
    space.take_unneeded_first()
    return space


def cached(space: SlabSpace, of: int, n: int) -> Ids:
    """``n`` blocks of class ``of``, cached."""
    ids = space.take(n, of)
    assert len(ids) == n
    space.append(ids)
    return ids


def nobody(space: SlabSpace) -> Ids:
    return np.zeros(space.num_blocks, np.int32)


def test_unneeded_blocks_are_taken_first_newest_first() -> None:
    space = space_of(2, 4, 4)
    ids = cached(space, 0, 8)
    space.mark_unneeded(ids[2:4])
    space.mark_unneeded(ids[5:6])
    assert (space.num_unneeded, np.flatnonzero(space.unneeded_blocks()).tolist()) == (
        [3, 0],
        sorted(ids[[2, 3, 5]].tolist()),
    )
    order = [space.make_room(0, nobody(space)).evicted.tolist()[0] for _ in range(4)]
    assert order == ids[[5, 2, 3, 0]].tolist()
    assert space.num_unneeded == [0, 0]


def test_unneeded_block_kept_again_is_the_newest() -> None:
    space = space_of(2, 4, 4)
    ids = cached(space, 0, 4)
    space.mark_unneeded(ids[:2])
    space.keep(ids)
    assert space.num_unneeded == [0, 0]
    assert not space.unneeded_blocks().any()
    assert space.lru(0).tolist() == ids[[2, 3, 0, 1]].tolist()


def test_unneeded_block_referenced_again_is_needed() -> None:
    space = space_of(2, 4, 4)
    ids = cached(space, 0, 4)
    space.mark_unneeded(ids)
    space.remove(ids[:1])
    assert space.num_unneeded == [3, 0]
    space.append(ids[:1])
    assert not space.unneeded_blocks()[ids[0]]


def test_unneeded_blocks_of_another_class_go_before_own_evictions() -> None:
    """Whatever is older: the space's own rule would evict the oldest block of class 1."""
    space = space_of(2, 4, 1)
    state = cached(space, 1, 1)
    ids = cached(space, 0, 4)
    space.mark_unneeded(ids)
    room = space.make_room(1, nobody(space))
    assert sorted(room.evicted.tolist()) == sorted(ids.tolist())
    assert state[0] in space.lru(1)


@pytest.mark.parametrize("seed", range(30))
def test_unneeded_blocks_can_be_taken_without_other_evictions(seed: int) -> None:
    """And what is not cannot: nothing is promised in vain, nothing denied."""
    random = Random(seed)
    ks = tuple(random.choice([(4, 1), (2, 3, 1), (3,), (4, 2)]))
    for needs in product(*(range(random.randrange(2, 6)) for _ in ks)):
        space = space_of(random.randrange(2, 5), *ks)
        build(space, random)
        given = set(np.flatnonzero(space.unneeded_blocks()).tolist())
        held = np.ones(space.num_blocks, np.int32)
        held[[block for of in range(len(ks)) for block in space.lru(of).tolist()]] = 0
        spared, evicted = space.spares(needs, [0] * len(ks)), set[int]()
        if not space.fits(needs):
            assert not spared
            continue
        for of, need in enumerate(needs):
            missing = need
            while missing:
                taken = space.take(missing, of)
                held[taken] = 1
                missing -= len(taken)
                if missing:
                    room = space.make_room(of, held)
                    evicted |= {int(block) for block in room.evicted} - given
                    for source, target in room.moves.tolist():
                        held[target], held[source] = held[source], 0
                        given = {target if block == source else block for block in given}
        assert spared == (not evicted), (ks, needs)


@pytest.mark.parametrize("seed", range(30))
def test_oldest_blocks_taken_at_once_match_single_takes(seed: int) -> None:
    ks = Random(seed).choice([(4, 1), (2, 3, 1), (3,), (1,)])
    one_by_one, at_once = space_of(6, *ks), space_of(6, *ks)
    for space in (one_by_one, at_once):
        if seed % 2:
            space.take_unneeded_first()
        for _ in range(4):
            build(space, random := Random(seed))
    for of in random.choices(range(len(ks)), k=20):
        while len(ids := at_once.take(1, of)):
            assert ids.tolist() == one_by_one.take(1, of).tolist()
        ids = at_once.take_oldest(random.randrange(1, 6), of)
        for block in ids.tolist():
            room = one_by_one.make_room(of, np.ones(one_by_one.num_blocks, np.int32))
            assert (room.evicted.tolist(), room.moves.size, one_by_one.take(1, of).tolist()) == ([block], 0, [block])
        assert [at_once.lru(one).tolist() for one in range(len(ks))] == [
            one_by_one.lru(one).tolist() for one in range(len(ks))
        ]
        assert at_once.num_unneeded == one_by_one.num_unneeded
        assert at_once.unneeded_blocks().tolist() == one_by_one.unneeded_blocks().tolist()
        at_once.append(ids)
        one_by_one.append(ids)


def build(space: SlabSpace, random: Random) -> None:
    """Some blocks are referenced, some cached, some of those given up."""
    for _ in range(random.randrange(12)):
        of = random.randrange(len(space.ks))
        ids = space.take(random.randrange(1, 4), of)
        if len(ids) and random.random() < 0.8:
            space.append(ids)
            if random.random() < 0.6:
                space.mark_unneeded(ids[: random.randrange(len(ids) + 1)])


# -- counted


def facts_of(pool: BlockPool) -> list[BlockFact]:
    """What happened to blocks since the last call."""
    assert pool.journal.blocks is not None
    found = pool.journal.blocks.copy()
    pool.journal.blocks.clear()
    return found


def counted(slabs: int, k: int) -> tuple[SlabSpace, BlockPool, PointBlocks]:
    space = space_of(slabs, k)
    pool = BlockPool(space.num_blocks, space=space, journal=Journal(ranked=True))
    return space, pool, PointBlocks([], pool, space, [1])


def test_released_block_without_need_is_unneeded() -> None:
    space, pool, needs = counted(2, 4)
    ids = pool.get_new_blocks(4)
    pool.publish(0, ids, [bytes([i]) for i in range(4)])
    needs._add(ids[:2], 0)
    assert (needs.all_needed(ids), needs.all_needed(ids[:2])) == (False, True)
    pool.free_blocks(ids)
    assert needs.read(facts_of(pool))[0] == {}
    assert np.flatnonzero(space.unneeded_blocks()).tolist() == ids[2:].tolist()
    assert needs._drop(ids[:1]).tolist() == ids[:1].tolist()
    needs._add(ids[3:], 0)
    assert not space.unneeded_blocks()[ids[3]]


def test_unneeded_block_released_twice_takes_its_last_place() -> None:
    found = []
    for at_once in (True, False):
        space, pool, needs = counted(3, 4)
        ids = pool.get_new_blocks(8)
        pool.publish(0, ids, [bytes([i]) for i in range(8)])
        for released, held in ((ids[:4], ids[1:2]), (ids[4:], ids[4:5]), (ids[[4, 1]], ids[:0])):
            pool.free_blocks(released)
            if at_once:
                needs.read(facts_of(pool))
            pool.touch(held)
        needs.read(facts_of(pool))
        found.append([space.make_room(0, nobody(space)).evicted.tolist() for _ in range(8)])
    assert found[0] == found[1]


def test_block_without_key_has_no_need() -> None:
    _, pool, needs = counted(2, 4)
    ids = pool.get_new_blocks(3)
    pool.publish(0, ids, [b"a", b"b", b"c"])
    needs._add(ids[:2], 0)
    pool.evict_blocks(ids[1:])
    moved = Moved(np.array([[int(ids[1]), 7]]))  # before anybody asked
    assert needs.read([*facts_of(pool), moved])[0] == {7: 1}
    pool.free_blocks(ids)
    assert pool.reset_prefix_cache()
    assert isinstance(facts_of(pool)[-1], Cleared)
    assert not needs.counts[ids[1:]].any()
