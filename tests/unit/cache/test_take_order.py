"""What takes_in_any_order promises: all taken, then all given back, is what any order of single calls leaves.

And takes_alike, but that blocks may move for it.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from test_slab_model import space_of
from test_unneeded_blocks import facts_of

from hybridkv.cache.journal import Journal
from hybridkv.cache.pool import BlockPool
from hybridkv.eviction.blocks import PointBlocks

WAYS = ("told", "takes", "takes and frees", "evicts", "evicts and frees")
KS = [(1,), (3,), (1, 1), (2, 1), (4, 3), (3, 1, 2)]


def pool_of(seed: int) -> tuple[BlockPool, list[int], PointBlocks | None]:
    """A pool of some history, what is held in it, as often as it is, cached all of it, and what resume points need."""
    random = Random(seed)
    ks = random.choice(KS)
    space = space_of(random.randrange(3, 7), ks)
    ranked = random.random() < 0.3
    pool = BlockPool(space.num_blocks, len(ks), space=space, journal=Journal(ranked=ranked))
    needs = PointBlocks([], pool, space, [1] * len(ks)) if ranked else None
    for step in range(random.randrange(15, 70)):
        if needs is not None:
            needs.read(facts_of(pool))
        group, held = random.randrange(len(ks)), held_in(pool)
        if not pool.gives([int(one == group) for one in range(len(ks))]) or (
            len(held) > space.num_slabs and random.random() < 0.4
        ):
            pool.free_blocks(np.array(random.sample(sorted(set(held)), 2), np.int32))
            continue
        block = pool.take(1, group).ids
        pool.publish(group, block, [b"%d" % step])
        if needs is not None and random.random() < 0.7:
            needs.read(facts_of(pool))
            needs._add(block, 0)
        if random.random() < 0.2:
            pool.touch(block)
    if random.random() < 0.6:  # much is cached
        pool.release(np.array(random.sample(blocks := sorted(set(held_in(pool))), len(blocks) * 3 // 4), np.int32))
    if needs is not None:
        needs.read(facts_of(pool))
    return pool, held_in(pool), needs


def held_in(pool: BlockPool) -> list[int]:
    """Each block as often as it is held."""
    blocks: list[int] = np.repeat(np.arange(pool.num_blocks), pool.ref_counts(np.arange(pool.num_blocks))).tolist()
    return blocks


def usage_after(
    pool: BlockPool, single: Sequence[tuple[str, int]]
) -> tuple[list[list[int]], list[list[list[int]]], float]:
    """Take and give back one by one: the blocks by group, what moved for them, and the largest usage on the way."""
    taken, moves, peak = [list[int]() for _ in pool.classes], list[list[list[int]]](), pool.get_usage()
    for what, number in single:
        if what == "take":
            found = pool.take(1, number)
            taken[number] += found.ids.tolist()
            moves += [some.tolist() for some in found.moves]
        else:
            pool.free_blocks(np.array([number], np.int32))
        peak = max(peak, pool.get_usage())
    return taken, moves, peak


def more_after(single: Sequence[tuple[str, int]], freed: NDArray[np.bool_], pool: BlockPool) -> NDArray[np.int64]:
    """By call and group, how many more blocks are held behind it."""
    more, drops = np.zeros((len(single) + 1, len(pool.classes)), np.int64), iter(freed.tolist())
    for at, (what, number) in enumerate(single, 1):
        group = number if what == "take" else pool.class_of(number)
        more[at, group] = 1 if what == "take" else -next(drops)
    return more.cumsum(axis=0)


def compared(seed: int, *, alike: bool = False) -> str:
    """Both ways from the same beginning; which case that was. alike: blocks may move."""
    (at_once, held, kept), (one_by_one, _, _) = pool_of(seed), pool_of(seed)
    random = Random(-seed)
    needs = [random.choice((0, 1, 1, 2)) for _ in at_once.classes]
    gone = random.sample(held, random.randrange(min(len(held), 3) + 1)) if random.random() < 0.6 else []
    ids = np.array(gone, np.int32)
    last = at_once.last_releases(ids)
    takes = at_once.space.takes_alike if alike else at_once.space.takes_in_any_order
    if last is None or not (kept is None or kept.all_needed(ids[last])):
        return "told"
    if not (at_once.gives(needs) and takes(at_once.by_class(needs), lambda: bool(gone))):
        return "told"
    single = [("take", group) for group, need in enumerate(needs) for _ in range(need)] + [
        ("free", one) for one in gone
    ]
    random.shuffle(single)
    ids = np.array([number for what, number in single if what == "free"], np.int32)
    last = at_once.last_releases(ids)
    assert last is not None
    usages, evictions = at_once.get_usages(more_after(single, last, at_once)), at_once.keys.evictions
    found = [at_once.take(need, group) for group, need in enumerate(needs)]
    taken, moves = [some.ids.tolist() for some in found], [part.tolist() for some in found for part in some.moves]
    at_once.release_in_turn(ids, last)
    assert usage_after(one_by_one, single) == (taken, moves, usages.max())
    assert alike or not moves
    assert usages[-1] == at_once.get_usage()
    assert at_once.free_order() == one_by_one.free_order()
    assert at_once.keys.evictions == one_by_one.keys.evictions
    spaces = [pool.space for pool in (at_once, one_by_one)]
    assert len({(space.now, tuple(space.stamps.tolist()), tuple(space.free_slabs())) for space in spaces}) == 1  # type: ignore[union-attr]  # a SlabSpace
    if moves:
        return "moves"
    return f"{'evicts' if at_once.keys.evictions > evictions else 'takes'}{' and frees' if gone else ''}"


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 6000), marks=pytest.mark.thorough)])
def test_takes_in_any_order_leave_the_same_space(seeds: range) -> None:
    met = Counter(map(compared, seeds))
    assert min(met[what] for what in WAYS) > 2, met


@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 6000), marks=pytest.mark.thorough)])
def test_takes_of_one_class_with_moves_leave_the_same_space(seeds: range) -> None:
    met = Counter(compared(seed, alike=True) for seed in seeds)
    assert min(met[what] for what in (*WAYS, "moves")) > 2, met
