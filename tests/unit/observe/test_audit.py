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
    assert {cache.block_pool.keys.key_of(block) is None for block in cache.block_pool.free_order()} == {True, False}
    return rig


def rows(cache: KVCacheManager) -> list[int]:
    return sorted(request.row for request in cache.engine.resident_requests())


def held(cache: KVCacheManager, group: int = 0) -> int:
    """A block that one row holds, with a key."""
    pool = cache.block_pool
    for row in rows(cache):
        for block in cache.groups[group].rows.ids(row).tolist():
            if pool.ref_count(block) == 1 and pool.keys.key_of(block) is not None:
                return int(block)
    raise LookupError("no such block")


def free(pool: BlockPool, *, cached: bool) -> int:
    return next(block for block in pool.free_order() if (pool.keys.key_of(block) is not None) == cached)


def ids(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


def put(target: object, key: object, value: object) -> None:
    """An assignment as an expression."""
    target[key] = value  # type: ignore[index]


def in_row(cache: KVCacheManager, column: int, block: int) -> None:
    """``block`` stands in a column of the first row of group 0."""
    table = cache.groups[0].rows
    table.cells[table.start[rows(cache)[0]] + column] = block


def twice_in_the_free_order(cache: KVCacheManager) -> None:
    order = cache.block_pool.space
    real = order.order()
    order.order = lambda: np.concatenate((real[:1], real))  # type: ignore[method-assign]  # the ring itself forbids it


def free_count(cache: KVCacheManager) -> None:
    order = cache.block_pool.space
    assert isinstance(order, FreeOrder)
    order.count += 1


def cached_before_empty(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    block = free(pool, cached=True)
    pool.space.remove(ids(block))
    pool.space.prepend(ids(block))


def indexed_twice(cache: KVCacheManager) -> None:
    index = cache.block_pool.indexes[0]
    key, block = next(index.entries())
    index._others.setdefault(key, []).append(block)


def key_that_is_not_indexed(cache: KVCacheManager) -> None:
    pool = cache.block_pool
    block = free(pool, cached=False)
    pool.keys._keys[block] = b"k" * 32
    pool.keys._group[block] = 0


def extents_that_overlap(cache: KVCacheManager) -> None:
    table = cache.groups[0].rows
    first, second = rows(cache)[:2]
    table.room[first] = abs(int(table.start[second] - table.start[first])) + 1
    if table.start[first] > table.start[second]:
        table.room[second] = table.room[first]


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


def unwritten_by_another_step(cache: KVCacheManager) -> None:
    keys = cache.block_pool.keys
    keys._step[int(np.flatnonzero(keys._step >= 0)[0])] += 40


CORRUPTIONS: dict[str, Callable[[KVCacheManager], object]] = {
    "has reference count 2, but 1 holders": lambda cache: put(cache.block_pool._ref, held(cache), 2),
    "a block is in the free order twice": twice_in_the_free_order,
    "has no holder but is not in the free order": lambda cache: cache.block_pool.space.remove(
        ids(free(cache.block_pool, cached=False))
    ),
    "is held or null but is in the free order": lambda cache: cache.block_pool.space.append(ids(held(cache))),
    "blocks are counted as free": free_count,
    "a cached block would be taken before an empty one": cached_before_empty,
    "is indexed under a key in group 0 that it does not have": lambda cache: put(
        cache.block_pool.indexes[0]._first,
        next(cache.block_pool.indexes[0].entries())[0],
        free(cache.block_pool, cached=False),
    ),
    "is indexed twice": indexed_twice,
    "has a key that is not in the index": key_that_is_not_indexed,
    "is indexed in group 0, but its key is of group 1": lambda cache: put(cache.block_pool.keys._group, held(cache), 1),
    "has a key without a group": lambda cache: put(cache.block_pool.keys._group, held(cache), -1),
    "has another key than its tokens": lambda cache: in_row(cache, 0, cache.groups[0].rows.ids(rows(cache)[1])[0]),
    "is held in 2 groups": lambda cache: in_row(cache, 0, cache.groups[1].rows.ids(rows(cache)[0])[0]),
    "has a null column that it has not dropped": lambda cache: in_row(cache, 0, 0),
    "holds an id outside the pool": lambda cache: in_row(cache, 0, 999),
    "holds a block twice": lambda cache: in_row(cache, 1, cache.groups[0].rows.ids(rows(cache)[0])[0]),
    "two rows of group 0 overlap": extents_that_overlap,
    "outside its": lambda cache: put(cache.groups[0].rows.room, np.argmax(cache.groups[0].rows.start), 1 << 20),
    "holds more than it has room for": lambda cache: put(cache.groups[0].rows.room, rows(cache)[0], 1),
    "holds blocks but no request has it": blocks_of_nobody,
    "computed tokens in only": too_few_blocks,
    "published columns, more than it has full blocks": published_too_high,
    "expects its next event at": lambda cache: put(cache._residents._next_event, rows(cache)[0], 1 << 20),
    "the rows and the list of resident requests differ": lambda cache: put(
        cache._residents._by_id, "ghost", Request("ghost", [1], hasher=cache.hasher)
    ),
    "but this request has row": lambda cache: setattr(cache.engine.resident_requests()[0], "row", 40),
    "hashes for": lambda cache: cache.engine.resident_requests()[0].hashes.pop(),
    "which does not write it": unwritten_by_another_step,
    "waits to be written but has no key": lambda cache: put(
        cache.block_pool.keys._step, free(cache.block_pool, cached=False), cache._parts.publisher.in_flight[0]
    ),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_check_reports_each_corruption(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.observe.audit._SHOWN", 1000)
    rig = live_rig()
    rig.scheduler.check()
    CORRUPTIONS[message](rig.cache)
    with pytest.raises(CacheError, match=message):
        rig.cache.check()


def test_check_with_many_violations_shows_the_first() -> None:
    cache = live_rig().cache
    cache.block_pool._ref += 1
    with pytest.raises(CacheError, match=r"the cache is inconsistent: .* and [0-9]+ more$"):
        cache.check()


def row_that_is_dead_and_runs(sched: Scheduler) -> None:
    sched._running.dead[sched._running.order[0]] = True
    sched._running.num_dead += 1


def order_mixed_up(sched: Scheduler) -> None:
    sched._running.order = sched._running.order[::-1].copy()


def steps_miscounted(sched: Scheduler) -> None:
    sched._running.steps[sched._running.order[0]] += 1


def samples_miscounted(sched: Scheduler) -> None:
    sched._running.pending[sched._running.order[0]] += 1


def a_known_request_lost(sched: Scheduler) -> None:
    sched._waiting.remove(sched._waiting.entries()[0].request)


def a_turn_lost(sched: Scheduler) -> None:
    sched._waiting._queue_keys.clear()


def waits_with_a_row(sched: Scheduler) -> None:
    request = sched._waiting.entries()[0].request
    sched.cache.allocate_slots(request, 1)
    sched._running.dead[request.row] = True  # so that the row is accounted for
    sched._running.num_dead += 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (row_that_is_dead_and_runs, "are dead, but"),
        (order_mixed_up, "the order of running requests and their rows differ"),
        (steps_miscounted, "differ from the steps in flight"),
        (samples_miscounted, "differ from the steps in flight"),
        (a_known_request_lost, "the known requests differ"),
        (a_turn_lost, "waits, but its key is not in the heap"),
        (waits_with_a_row, "a request that waits holds a row"),
    ],
)
def test_scheduler_check_reports_each_corruption(corrupt: Callable[[Scheduler], None], message: str) -> None:
    rig = live_rig()
    rig.scheduler.check()
    corrupt(rig.scheduler)
    with pytest.raises(CacheError, match=message):
        rig.scheduler.check()
