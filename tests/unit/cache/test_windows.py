"""Sliding windows and local chunks: docs/contracts.md, 4."""

from random import Random

import numpy as np
import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.cache.index import PrefixIndex
from hybridkv.request import Request
from hybridkv.specs import KVCacheSpec
from kinds_support import cache_of, chunked, evict, full, grow, hit_tokens, hits, published, start, table, window

TOKENS = list(range(100, 200))


# -- sliding window, W = 8, blocks of 4


def test_window_run_with_eagle_ends_on_the_common_alignment() -> None:
    """vLLM 0.32 cuts a leading run twice and loses an alignment for a block: it gives 0, 16 and, at last, 16."""
    cache = cache_of(full(16), window(40), use_eagle=True)
    request = start(cache, range(64), (64,))
    assert hits(cache, (33, 48, 65)) == {33: (16, 0), 48: (32, 0), 65: (48, 0)}
    evict(cache, request, 1, 9)
    assert hits(cache, (65,)) == {65: (32, 48)}


@pytest.mark.parametrize("spec", [window(), chunked()])
def test_refusal_keeps_blocks_that_a_step_in_flight_reads(spec: KVCacheSpec) -> None:
    cache = cache_of(spec, num_blocks=8)
    request = start(cache, TOKENS[:60], (8, 16))
    cache.rows.in_flight[request.row] = 16
    before = table(cache)
    assert cache.allocate_slots(request, 30) is None
    assert sum(block > 0 for block in table(cache)) == {True: 4, False: 6}[spec == chunked()]
    assert before[-4:] == table(cache)[-4:]
    cache.rows.in_flight[request.row] = 0
    assert cache.allocate_slots(request, 30) is None
    assert sum(block > 0 for block in table(cache)) == {True: 0, False: 2}[spec == chunked()]


def test_window_blocks_dropped_during_a_transfer_are_not_published() -> None:
    """The row keeps an extent for its window: what lies before it belongs to others."""
    cache = cache_of(window())
    other = start(cache, range(500, 600), (100,), "other")
    request = Request("a", TOKENS, hasher=cache.hasher)
    for _ in range(25):
        cache.allocate_slots(request, 4, delay_cache_blocks=True)
        request.num_computed_tokens += 4
    live = [column for column, block in enumerate(table(cache)) if block]
    cache.cache_blocks(request, 100)
    assert published(cache, request) == live == [22, 23, 24]
    assert published(cache, other) == list(range(25))
    cache.check()


def test_window_row_with_long_context_keeps_its_window_only() -> None:
    cache = KVCacheManager(cache_of(window(64, 4), num_blocks=300).config, 200_000)
    request = Request("a", np.arange(100_000) % 50_000, hasher=cache.hasher)
    for _ in range(0, 100_000, 500):
        cache.allocate_slots(request, 500)
        request.num_computed_tokens += 500
    (group,) = cache.groups
    assert group.rows.count.item(request.row) == 25_000
    assert group.rows.room.item(request.row) <= 512
    assert len(group.rows.cells) <= 4096
    assert np.count_nonzero(group.rows.ids(request.row)) <= 142
    cache.check()


def test_external_prefix_takes_live_blocks_only() -> None:
    cache = cache_of(window(), full())
    request = Request("a", TOKENS[:34], hasher=cache.hasher)
    assert cache.allocate_slots(request, 2, num_external_computed_tokens=32) is not None
    assert [block > 0 for block in table(cache)] == [False] * 6 + [True] * 3
    assert all(table(cache, 1))


def test_window_hit_made_stale_by_external_load_is_not_adopted() -> None:
    cache = cache_of(full(), window())
    start(cache, TOKENS[:24], (24,))
    request = Request("b", TOKENS[:50], hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(request)
    assert tokens == 24
    cache.allocate_slots(request, 2, tokens, blocks, num_external_computed_tokens=16)
    assert [block > 0 for block in table(cache, 1, "b")] == [False] * 8 + [True] * 3
    assert all(table(cache, 0, "b"))


def test_external_load_far_after_a_hit_leaves_null_columns() -> None:
    cache = cache_of(window())
    start(cache, TOKENS[:24], (24,))
    request = Request("b", TOKENS[:60], hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(request)
    cache.allocate_slots(request, 2, tokens, blocks, num_external_computed_tokens=30)
    assert [block > 0 for block in table(cache, 0, "b")] == [False] * 11 + [True] * 3
    request.num_computed_tokens = 56
    cache.check()
    grow(cache, request, 4)


# -- the search


class Counted(PrefixIndex):
    """Counts the keys that are looked up."""

    asked = 0

    def leading_run(self, keys, stop=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - as above it
        run = super().leading_run(keys, stop)
        self.asked += len(run) + 1
        return run


def test_window_miss_costs_one_look_up_per_window() -> None:
    """docs/defects.md, F: a failed look-up must not ask for every block, and not anew in every step."""
    cache = KVCacheManager(cache_of(window(1024, 16)).config, 200_000)
    request = Request("a", np.arange(131_072) % 50_000, hasher=cache.hasher)
    index = Counted(cache.block_pool.keys)
    cache.groups[0].index = index
    found = cache.find_hit(request)
    assert found.tokens == 0
    assert index.asked <= 8192 // 64 + 1
    before = index.asked
    assert cache.is_longest_hit(request, found)
    assert index.asked == before


def test_truncated_request_is_looked_up_again() -> None:
    cache = cache_of(full(), window())
    start(cache, TOKENS[:20], (20,))
    one = Request("one", TOKENS[:4], hasher=cache.hasher)
    for token in [*TOKENS[4:20], *range(30)]:
        one.append(token)
    found = cache.find_hit(one)
    assert found.tokens == 20
    one.truncate(13)
    assert not cache.is_longest_hit(one, found)
    assert cache.find_hit(one).tokens == 12


def test_window_look_up_asks_each_column_at_most_twice() -> None:
    cache = cache_of(window(80, 4), num_blocks=400)
    request = start(cache, list(range(600)), (600,))
    random = Random(3)
    group = cache.groups[0]
    for column in random.sample(range(150), 40):
        block = group.index.get(group.keys(request)[column])
        assert block is not None
        cache.block_pool.evict_blocks(np.array([block], np.int32))
    index = Counted(cache.block_pool.keys)
    index._first, index._others = group.index._first, group.index._others
    group.index = index
    hit_tokens(cache, list(range(600)))
    assert index.asked <= 2 * 150
