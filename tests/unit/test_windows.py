"""Sliding windows and local chunks: contracts.md section 4."""

from random import Random
from typing import Any

import numpy as np
import pytest
from kinds_support import cache_of, chunked, full, grow, hit, hit_tokens, start, table, window

from hybridkv.cache import KVCacheManager
from hybridkv.cache.index import PrefixIndex
from hybridkv.request import Request
from hybridkv.specs import KVCacheSpec

TOKENS = list(range(100, 200))


def cached(n: int = 24, chunks: tuple[int, ...] = (8, 8, 8), **known: Any) -> KVCacheManager:  # noqa: ANN401 - as cache_of
    cache = cache_of(window(), **known)
    start(cache, TOKENS[:n], chunks)
    return cache


# -- sliding window, W = 8, blocks of 4


def test_tables() -> None:
    cache = cached()
    assert table(cache) == [0, 0, 3, 4, 5, 6]
    request = cache.resident_requests()[0]
    request.append(0)
    grow(cache, request, 1)
    assert table(cache) == [0, 0, 0, 0, 5, 6, 7]


def test_hits() -> None:
    cache = cached()
    assert hit(cache, TOKENS[:25]) == (24, ([0, 0, 0, 0, 5, 6],))
    assert hit(cache, TOKENS[:24]) == (20, ([0, 0, 0, 4, 5],))
    assert hit(cache, TOKENS[:13]) == (12, ([0, 2, 3],))
    assert hit(cache, TOKENS[:5]) == (4, ([1],))


def test_eagle_looks_one_block_further_and_drops_it() -> None:
    cache = cached(use_eagle=True)
    assert [hit_tokens(cache, TOKENS[:n]) for n in (25, 24, 20, 13, 5)] == [20, 16, 12, 8, 0]


@pytest.mark.parametrize(("processed", "skipped"), [(7, 0), (8, 1), (9, 2), (12, 5)])
def test_skipped_tokens(processed: int, skipped: int) -> None:
    (group,) = cache_of(window(8, 1)).groups
    assert group.policy.droppable(processed) == skipped


def test_skipped_blocks_return_the_last_one_first_also_when_the_allocation_fails() -> None:
    cache = cache_of(window(), num_blocks=8)  # 7 usable
    request = start(cache, TOKENS[:30], (24,))
    assert table(cache) == [1, 2, 3, 4, 5, 6]
    assert cache.block_pool.free_order() == [7]
    assert cache.allocate_slots(request, 30) is None
    assert table(cache) == [0, 0, 0, 0, 5, 6]
    assert cache.block_pool.free_order() == [7, 4, 3, 2, 1]
    assert cache.plan_slots(request, 900).needed_blocks > 5  # type: ignore[union-attr]  # it does not fit
    assert table(cache) == [0, 0, 0, 0, 5, 6]  # planning drops nothing
    cache.check()


def test_dropped_blocks_make_room_for_the_same_call() -> None:
    cache = cache_of(window(), num_blocks=7)
    request = start(cache, TOKENS[:40], (24,))
    assert grow(cache, request, 16) is not None  # 4 blocks of its own come free
    assert table(cache) == [0, 0, 0, 0, 5, 6, 4, 3, 2, 1]


@pytest.mark.parametrize("spec", [window(8), window(5), chunked(8), chunked(12)])
def test_columns_are_dropped_by_the_first_call_that_may(spec: KVCacheSpec) -> None:
    cache = cache_of(spec)
    request = start(cache, TOKENS[:6], (6,))
    for token in range(40):
        request.append(token)
        may = cache.groups[0].policy.droppable(request.num_computed_tokens)
        grow(cache, request, 1)
        assert [block > 0 for block in table(cache)].index(True) == may


def test_unhashed_dropped_blocks_go_to_the_front() -> None:
    cache = cache_of(window(), num_blocks=20, enable_caching=False)
    request = start(cache, TOKENS[:40], (24,))
    grow(cache, request, 4)
    assert table(cache) == [0, 0, 0, 0, 5, 6, 4]
    assert cache.block_pool.free_order()[:3] == [3, 2, 1]


def test_a_long_row_keeps_room_for_its_window_only() -> None:
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


@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_a_window_of_at_most_a_block_needs_one_block(tokens: int) -> None:
    cache = cache_of(window(tokens))
    start(cache, TOKENS[:24], (24,))
    assert hit(cache, TOKENS[:25]) == (24, ([0, 0, 0, 0, 0, 6],))
    assert hit_tokens(cache, [1, *TOKENS[:24]]) == 0


def test_a_window_that_ends_inside_a_block() -> None:
    cache = cache_of(window(6))  # 5 tokens before the next one: two blocks
    start(cache, TOKENS[:24], (24,))
    assert hit(cache, TOKENS[:25])[1] == ([0, 0, 0, 0, 5, 6],)


def test_an_external_prefix_takes_live_blocks_only() -> None:
    cache = cache_of(window(), full())
    request = Request("a", TOKENS[:34], hasher=cache.hasher)
    assert cache.allocate_slots(request, 2, num_external_computed_tokens=32) is not None
    assert [block > 0 for block in table(cache)] == [False] * 6 + [True] * 3
    assert all(table(cache, 1))


def test_hits_that_an_external_load_makes_stale_are_not_adopted() -> None:
    cache = cache_of(full(), window())
    start(cache, TOKENS[:24], (24,))
    request = Request("b", TOKENS[:50], hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(request)
    assert tokens == 24
    cache.allocate_slots(request, 2, tokens, blocks, num_external_computed_tokens=16)
    assert [block > 0 for block in table(cache, 1, "b")] == [False] * 8 + [True] * 3
    assert all(table(cache, 0, "b"))


def test_an_external_load_far_behind_a_hit_leaves_null_columns() -> None:
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


def test_a_prompt_never_seen_costs_a_look_up_a_window() -> None:
    """goals.md 3: a failed look-up must not ask for every block, and not anew in every step."""
    cache = KVCacheManager(cache_of(window(1024, 16)).config, 200_000)
    request = Request("a", np.arange(131_072) % 50_000, hasher=cache.hasher)
    index = Counted()
    cache.groups[0].index = index
    found = cache.find_hit(request)
    assert found.tokens == 0
    assert index.asked <= 8192 // 64 + 1
    before = index.asked
    assert cache.is_longest_hit(request, found, cache.block_pool.evictions)
    assert index.asked == before


def test_a_request_that_was_cut_is_looked_up_anew() -> None:
    cache = cache_of(full(), window())
    start(cache, TOKENS[:20], (20,))
    one = Request("one", TOKENS[:4], hasher=cache.hasher)
    for token in [*TOKENS[4:20], *range(30)]:
        one.append(token)
    found = cache.find_hit(one)
    assert found.tokens == 20
    one.truncate(13)
    assert not cache.is_longest_hit(one, found, cache.block_pool.evictions)
    assert cache.find_hit(one).tokens == 12


def test_no_column_is_looked_up_more_than_twice() -> None:
    cache = cache_of(window(80, 4), num_blocks=400)
    request = start(cache, list(range(600)), (600,))
    random = Random(3)
    group = cache.groups[0]
    for column in random.sample(range(150), 40):
        block = group.index.get(group.keys(request)[column])
        assert block is not None
        cache.block_pool.evict_blocks(np.array([block], np.int32))
    index = Counted()
    index._first, index._others = group.index._first, group.index._others
    group.index = index
    hit_tokens(cache, list(range(600)))
    assert index.asked <= 2 * 150


@pytest.mark.parametrize("seed", range(60))
def test_hits_are_those_of_the_definition(seed: int) -> None:
    """Against every aligned edge tried in turn, with keys missing at random; a remembered hit stays the longest."""
    random = Random(seed)
    size, tokens = random.choice((2, 4)), random.randint(1, 14)
    chunks = random.random() < 0.4
    spec = chunked(max(tokens, 2), size) if chunks else window(tokens, size)
    cache = cache_of(spec)
    prompt = list(range(40))
    request = start(cache, prompt, (40,))
    group = cache.groups[0]
    kept = set(range(40 // size))
    for _ in range(12):
        column = random.randrange(40 // size)
        block = group.index.get(group.keys(request)[column])
        if block is not None:
            cache.block_pool.evict_blocks(np.array([block], np.int32))
            kept.discard(column)
        limit = random.randint(2, 40)
        probe = Request("probe", prompt[:limit], hasher=cache.hasher)
        found = cache.find_hit(probe)
        assert found.tokens == longest(kept, size, limit - 1, tokens if not chunks else max(tokens, 2), chunks=chunks)
        assert cache.is_longest_hit(probe, found, cache.block_pool.evictions)


def longest(kept: set[int], size: int, limit: int, tokens: int, *, chunks: bool) -> int:
    for end in range(limit // size, 0, -1):
        n = end * size
        first = n // tokens * tokens if chunks else max(n - tokens + 1, 0)
        live = set(range(first // size, end)) or {end - 1}  # nothing is read: one block must prove the prefix
        if live <= kept:
            return n
    return 0


# -- chunks of 8, blocks of 4


def test_chunks_alone() -> None:
    cache = cache_of(chunked())
    request = start(cache, TOKENS[:30], (8,))
    assert table(cache) == [1, 2]
    tables = []
    for chunk in (6, 8, 8):
        grow(cache, request, chunk)
        tables.append(table(cache))
    assert tables == [[0, 0, 3, 4], [0, 0, 3, 4, 5, 6], [0, 0, 0, 0, 5, 6, 7, 8]]
    expected = {5: 4, 8: 4, 9: 8, 13: 12, 16: 12, 17: 16, 21: 20, 25: 24, 29: 28}
    assert {n: hit_tokens(cache, (TOKENS[:30] + [0] * 9)[:n]) for n in expected} == expected
    assert hit(cache, TOKENS[:13])[1] == ([0, 0, 3],)
    assert hit(cache, TOKENS[:17])[1] == ([0, 0, 0, 0],)


def test_chunks_beside_full_attention() -> None:
    cache = cache_of(full(), chunked(16))
    request = start(cache, TOKENS[:40], (40,))
    group = cache.groups[1]
    block = group.index.get(group.keys(request)[5])
    assert block is not None
    cache.block_pool.evict_blocks(np.array([block], np.int32))
    assert [hit_tokens(cache, TOKENS[:n]) for n in (21, 25, 29, 33)] == [20, 20, 20, 32]
    assert hit(cache, TOKENS[:33])[1][1] == [0] * 8


def test_a_chunk_that_begins_inside_a_block() -> None:
    cache = cache_of(chunked(12, 8))
    start(cache, TOKENS[:48], (48,))
    assert hit(cache, TOKENS[:17]) == (16, ([0, 2],))  # tokens 12 .. 15 lie in column 1
    assert hit(cache, TOKENS[:41]) == (40, ([0, 0, 0, 0, 5],))
