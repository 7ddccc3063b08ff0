"""check() finds what is wrong: each corruption is seeded into a live cache that was right before."""

from collections.abc import Callable

import numpy as np
import pytest

from hybridkv.cache import BlockPool, KVCacheManager
from hybridkv.cache.spaces.one_size import FreeOrder
from hybridkv.errors import CacheError
from hybridkv.request import Request
from hybridkv.schedule import Scheduler, SchedulerLimits
from oracles import Rig, RigOptions


def live_rig() -> Rig:
    """Two groups; requests that run with steps in flight, wait and are dead; cached, unwritten and empty blocks."""
    limits = SchedulerLimits(max_running=6, max_batched_tokens=30, max_in_flight=2)
    rig = Rig(RigOptions(num_blocks=70, block_sizes=(2, 4), limits=limits))
    rig.add([0, 1] * 6, 3)
    rig.drain()
    for prompt in ([0, 1, 2, 3] * 2, [3, 2, 1, 0] * 2, [1] * 9):
        rig.add(prompt, 8)
    rig.schedule()
    rig.update()
    rig.add([2] * 7, 8)
    rig.schedule()
    rig.add([2] * 9, 8)
    rig.abort("r2")
    rig.schedule()
    rig.abort("r5")
    rig.add([3] * 4, 2)
    rig.scheduler.finish("nobody")  # the inbox is empty
    cache, oracle = rig.cache, rig.oracle
    now = cache.statistics()
    assert min(now.unwritten_blocks, len(oracle.dead), len(oracle.waiting), len(oracle.running) - 1) > 0
    assert {cache.block_pool.key_of(block) is None for block in cache.block_pool.free_order()} == {True, False}
    return rig


def rows(cache: KVCacheManager) -> list[int]:
    return sorted(request.row for request in cache.engine.resident_requests())


def held(cache: KVCacheManager, group: int = 0) -> int:
    """A block that one row holds, with a key."""
    pool = cache.block_pool
    for row in rows(cache):
        for block in cache.groups[group].rows.ids(row).tolist():
            if pool.ref_count(block) == 1 and pool.key_of(block) is not None:
                return int(block)
    raise LookupError("no such block")


def free(pool: BlockPool, *, cached: bool) -> int:
    return next(block for block in pool.free_order() if (pool.key_of(block) is not None) == cached)


def ids(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


def ref_count_too_high(cache: KVCacheManager) -> None:
    cache.block_pool._ref[held(cache)] += 1


def twice_in_the_free_order(cache: KVCacheManager) -> None:
    order = cache.block_pool.space
    real = order.order()
    order.order = lambda: np.concatenate((real[:1], real))  # type: ignore[method-assign]  # the ring itself forbids it


def missing_from_the_free_order(cache: KVCacheManager) -> None:
    cache.block_pool.space.remove(ids(free(cache.block_pool, cached=False)))


def held_in_the_free_order(cache: KVCacheManager) -> None:
    cache.block_pool.space.append(ids(held(cache)))


def free_count(cache: KVCacheManager) -> None:
    order = cache.block_pool.space
    assert isinstance(order, FreeOrder)
    order._count += 1


def cached_before_empty(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    block = free(pool, cached=True)
    pool.space.remove(ids(block))
    pool.space.prepend(ids(block))


def key_of_another_block(cache: KVCacheManager) -> None:
    index = cache.block_pool.indexes[0]
    key = next(iter(index._first))
    index._first[key] = free(cache.block_pool, cached=False)


def indexed_twice(cache: KVCacheManager) -> None:
    index = cache.block_pool.indexes[0]
    key, block = next(index.entries())
    index._others.setdefault(key, []).append(block)


def key_that_is_not_indexed(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    block = free(pool, cached=False)
    pool.keys._keys[block] = b"k" * 32
    pool.keys._group[block] = 0


def index_of_another_group(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    pool.keys._group[held(cache)] = 1


def key_without_group(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    pool.keys._group[held(cache)] = -1


def another_requests_block(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    first, second = rows(cache)[:2]
    table.cells[table.start[first]] = table.ids(second)[0]


def another_groups_block(cache: KVCacheManager) -> None:
    one, two = (group.rows for group in cache.groups)
    row = rows(cache)[0]
    one.cells[one.start[row]] = two.ids(row)[0]


def null_in_a_row(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    table.cells[table.start[rows(cache)[0]]] = 0


def foreign_id_in_a_row(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    table.cells[table.start[rows(cache)[0]]] = 999


def the_same_block_twice_in_a_row(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    start = table.start[rows(cache)[0]]
    table.cells[start + 1] = table.cells[start]


def extents_that_overlap(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    first, second = rows(cache)[:2]
    table.room[first] = abs(int(table.start[second] - table.start[first])) + 1
    if table.start[first] > table.start[second]:
        table.room[second] = table.room[first]


def an_extent_outside(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    table.room[np.argmax(table.start)] = len(table.cells) + 1


def more_than_there_is_room_for(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    table.room[rows(cache)[0]] = 1


def blocks_of_nobody(cache: KVCacheManager) -> None:
    pool, table = cache.block_pool, cache.groups[0].rows
    row = next(row for row in range(cache.rows.capacity) if cache.rows.requests[row] is None)
    table.extend(row, pool.get_new_blocks(1))


def too_few_blocks(cache: KVCacheManager) -> None:
    pool, group, row = cache.block_pool, cache.groups[0], rows(cache)[0]
    last = group.rows.ids(row)[-1:]
    group.rows.count[row] -= 1
    group.published[row] = min(group.published[row], group.rows.count[row])
    pool.free_blocks(last)
    cache._residents.refresh(row)


def published_too_high(cache: KVCacheManager) -> None:
    group, row = cache.groups[0], rows(cache)[0]
    group.published[row] = group.rows.count[row] + 1
    cache._residents.refresh(row)


def next_event(cache: KVCacheManager) -> None:
    cache._residents._next_event[rows(cache)[0]] += 1


def a_resident_too_many(cache: KVCacheManager) -> None:
    cache._residents._by_id["ghost"] = Request("ghost", [1], hasher=cache.hasher)


def a_row_mixed_up(cache: KVCacheManager) -> None:
    cache.engine.resident_requests()[0].row += 1


def a_hash_too_few(cache: KVCacheManager) -> None:
    cache.engine.resident_requests()[0].hashes.pop()


def unwritten_by_another_step(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    pool.keys._step[int(np.flatnonzero(pool.keys._step >= 0)[0])] += 40


def unwritten_without_key(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    pool.keys._step[free(pool, cached=False)] = cache.write_log.in_flight[0]


CORRUPTIONS: tuple[tuple[Callable[[KVCacheManager], None], str], ...] = (
    (ref_count_too_high, "has ref count 2, 1 rows hold it"),
    (twice_in_the_free_order, "a block stands twice in the free order"),
    (missing_from_the_free_order, "is held by nobody but not in the free order"),
    (held_in_the_free_order, "is held or null but stands in the free order"),
    (free_count, "blocks are counted as free"),
    (cached_before_empty, "a cached block would be taken before an empty one"),
    (key_of_another_block, "is indexed under a key in group 0 that it does not carry"),
    (indexed_twice, "is indexed twice"),
    (key_that_is_not_indexed, "carries a key that the index does not know"),
    (index_of_another_group, "is indexed in group 0, its key is of group 1"),
    (key_without_group, "has a key without group"),
    (another_requests_block, "carries another key than its tokens"),
    (another_groups_block, "is held in 2 groups"),
    (null_in_a_row, "has a null column that it has not dropped"),
    (foreign_id_in_a_row, "holds an id outside the pool"),
    (the_same_block_twice_in_a_row, "holds a block twice"),
    (extents_that_overlap, "two rows of group 0 overlap"),
    (an_extent_outside, "outside its"),
    (more_than_there_is_room_for, "holds more than it has room for"),
    (blocks_of_nobody, "holds blocks but belongs to nobody"),
    (too_few_blocks, "computed tokens in"),
    (published_too_high, "published columns, more than full ones"),
    (next_event, "expects its next event at"),
    (a_resident_too_many, "the rows and the list of resident requests differ"),
    (a_row_mixed_up, "which says row"),
    (a_hash_too_few, "hashes for"),
    (unwritten_by_another_step, "which does not write it"),
    (unwritten_without_key, "waits to be written but has no key"),
)


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS, ids=[corrupt.__name__ for corrupt, _ in CORRUPTIONS])
def test_check_finds(corrupt: Callable[[KVCacheManager], None], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.observe.audit._SHOWN", 1000)
    rig = live_rig()
    rig.scheduler.check()
    corrupt(rig.cache)
    with pytest.raises(CacheError, match=message):
        rig.cache.check()


def test_the_first_violations_are_shown() -> None:
    cache = live_rig().cache
    cache.block_pool._ref += 1
    with pytest.raises(CacheError, match=r"the cache is inconsistent: .* and [0-9]+ more$"):
        cache.check()


def row_that_is_dead_and_runs(sched: Scheduler) -> None:
    sched._running.dead[sched._running.order[0]] = True
    sched._running.num_dead += 1


def dead_rows_miscounted(sched: Scheduler) -> None:
    sched._running.num_dead += 1


def order_mixed_up(sched: Scheduler) -> None:
    sched._running.order = sched._running.order[::-1].copy()


def steps_miscounted(sched: Scheduler) -> None:
    sched._running.steps[sched._running.order[0]] += 1


def samples_miscounted(sched: Scheduler) -> None:
    sched._running.pending[sched._running.order[0]] += 1


def a_known_request_lost(sched: Scheduler) -> None:
    sched._waiting.remove(sched._waiting.requests()[0])


def a_turn_lost(sched: Scheduler) -> None:
    sched._waiting._queue_keys.clear()


def waits_with_a_row(sched: Scheduler) -> None:
    request = sched._waiting.requests()[0]
    sched.cache.allocate_slots(request, 1)
    sched._running.dead[request.row] = True  # so that the row is accounted for
    sched._running.num_dead += 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (row_that_is_dead_and_runs, "are dead, but"),
        (dead_rows_miscounted, "the order of running requests and their rows differ"),
        (order_mixed_up, "the order of running requests and their rows differ"),
        (steps_miscounted, "the steps in flight differ"),
        (samples_miscounted, "the steps in flight differ"),
        (a_known_request_lost, "the requests known are not those"),
        (a_turn_lost, "waits, and nobody would try it"),
        (waits_with_a_row, "a request waits and holds a row"),
    ],
)
def test_check_of_a_scheduler_finds(corrupt: Callable[[Scheduler], None], message: str) -> None:
    rig = live_rig()
    rig.scheduler.check()
    corrupt(rig.scheduler)
    with pytest.raises(CacheError, match=message):
        rig.scheduler.check()
