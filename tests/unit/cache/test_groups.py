"""All groups together: docs/contracts.md, 5, and groups that publish nothing."""

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.request import Request
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from kinds_support import (
    cache_of,
    config,
    encoder_only,
    evict,
    flagged,
    full,
    hit,
    hit_tokens,
    hits,
    mla,
    sink,
    start,
    state,
    table,
    window,
)

PROMPT = list(range(100))


def test_eagle_group_with_flag_drops_alone() -> None:
    cache = flagged((full(), False), (window(), True), num_blocks=100)
    start(cache, PROMPT[:24], (24,))
    assert hit(cache, PROMPT[:25]) == (20, ([1, 2, 3, 4, 5], [0, 0, 0, 10, 11]))


def test_eagle_group_drops_again_at_a_lowered_candidate() -> None:
    """The second window allows 36 at most; there the first one lacks the block past the edge, so 32 it is."""
    cache = flagged((full(), False), (window(8), True), (window(16), False), num_blocks=100)
    request = start(cache, PROMPT[:64], (64,))
    assert hit_tokens(cache, PROMPT[:65]) == 60
    for column in (9, 13):
        evict(cache, request, 2, column)
    assert hit_tokens(cache, PROMPT[:65]) == 36
    evict(cache, request, 1, 9)
    assert hit_tokens(cache, PROMPT[:65]) == 32


def test_eagle_group_that_dropped_does_not_drop_twice() -> None:
    """The second window, which drops too, allows 32: the first one is not asked for the column behind it, 8."""
    cache = cache_of(window(8), window(16, 8), use_eagle=True)
    request = start(cache, PROMPT[:64], (64,))
    evict(cache, request, 1, 5)
    assert hits(cache, (65,)) == {65: (32, 56)}
    evict(cache, request, 0, 8)
    assert hits(cache, (65,)) == {65: (32, 56)}


@pytest.mark.parametrize(
    ("specs", "chunks", "expected"),
    [
        ((full(4), window(8)), (24,), {16: 12, 20: 16, 23: 16, 24: 20, 25: 20, 29: 20}),
        ((full(4), window(8)), (26,), {22: 16, 25: 20}),
        ((full(4), window(8, 8)), (24,), {16: 8, 20: (8, 16), 23: (8, 16), 24: 16, 25: 16}),
        ((full(4), window(8, 8)), (28,), {20: (8, 16), 24: 16, 27: 16, 28: (16, 24), 29: (16, 24)}),
        ((full(16), window(8)), (64,), {48: 32, 63: 32, 64: 48, 65: 48, 81: 48}),
        ((full(16), window(8)), (60,), {33: 16, 48: 32, 60: 32, 65: 32}),
        ((full(16), window(8)), (72,), {64: 48, 80: 48}),
        ((full(8), window(8)), (60,), {41: 32, 48: 40, 49: 40, 56: 48, 61: 48}),
        ((full(4), window(8), window(16)), (64,), {60: 56, 63: 56, 64: 60, 65: 60}),
        ((full(16), window(8), window(16)), (72,), {33: 16, 48: 32, 64: 48, 80: 48}),
        ((full(16), window(8), window(16, 8)), (72,), {33: 16, 48: 32, 64: 48, 80: 48}),
        ((window(8), window(16, 8)), (64,), {56: 48, 60: (48, 56), 63: (48, 56), 64: 56, 65: 56}),
        ((window(8), state()), (16, 16, 16, 16, 8), {33: 16, 48: 32, 52: 48, 64: 48, 68: 64, 80: 64}),
        ((full(16), state()), (64, 16, 20), {80: 64, 81: 64, 82: 64, 96: 80, 113: 80}),
        ((full(16), state()), (80, 20), {81: (0, 64), 96: 80}),
        ((full(16), state()), (96, 4), {80: (0, 64), 96: (0, 80), 113: (0, 80)}),
        ((full(16), state(), window(20, 16)), (64, 16, 20), {65: (0, 48), 80: 64, 96: 80, 113: 80}),
    ],
)
def test_eagle_hits_and_branch_points_match_measurements(
    specs: tuple[KVCacheSpec, ...], chunks: tuple[int, ...], expected: dict[int, int | tuple[int, int]]
) -> None:
    """As vLLM 0.32 was measured; it does not floor the branch point of a window beside states (28 for 16)."""
    cache = cache_of(*specs, use_eagle=True)
    start(cache, PROMPT[: sum(chunks)], chunks)
    wanted = {n: value if isinstance(value, tuple) else (value, 0) for n, value in expected.items()}
    assert hits(cache, expected) == wanted


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((True, False), {64: (48, 0), 80: (48, 0)}),
        (
            (False, True),
            {33: (16, 32), 48: (32, 0), 49: (32, 48), 52: (48, 0), 65: (48, 64), 67: (48, 64), 68: (64, 0)},
        ),
    ],
)
def test_hits_with_one_eagle_group_match_measurements(
    flags: tuple[bool, bool], expected: dict[int, tuple[int, int]]
) -> None:
    cache = flagged((full(16), flags[0]), (window(8), flags[1]))
    start(cache, PROMPT[:72], (72,))
    assert hits(cache, expected) == expected


# -- kinds that publish nothing


def test_encoder_tokens_without_cross_attention_are_rejected() -> None:
    cache = cache_of(full())
    with pytest.raises(ConfigError, match="needs a group of cross-attention"):
        cache.allocate_slots(Request("a", PROMPT, hasher=cache.hasher), 4, num_encoder_tokens=3)


def test_encoder_only_group_holds_nothing_and_accepts_every_hit() -> None:
    cache = cache_of(encoder_only(3), full())
    start(cache, PROMPT[:20], (20,))
    assert cache.get_block_ids("a") == ([], [1, 2, 3, 4, 5])
    assert hit(cache, PROMPT[:20]) == (16, ([], [1, 2, 3, 4]))
    again = Request("b", PROMPT[:20], hasher=cache.hasher)
    blocks, tokens = cache.get_computed_blocks(again)
    assert cache.allocate_slots(again, 4, tokens, blocks) is not None
    cache.check()


# -- kinds that are full attention


def test_sink_blocks_are_reserved_and_not_counted_as_used() -> None:
    """Their blocks belong to the layer: taken for good, in no row, neither used nor usable."""
    cache = cache_of(sink(4, 6), full(), num_blocks=20)
    assert [ids.tolist() for ids in cache.sink_blocks] == [[1, 2], []]
    assert cache.usage == 0
    assert cache.statistics().num_blocks == 17
    request = start(cache, PROMPT[:20], (20,))
    assert table(cache) == [3, 4, 5, 6, 7]
    assert hit_tokens(cache, PROMPT[:20]) == 16
    cache.free(request)
    assert cache.reset_prefix_cache()
    assert hit_tokens(cache, PROMPT[:20]) == 0
    assert not {1, 2} & set(cache.block_pool.free_order())
    cache.check()


def test_pool_too_small_for_sinks_is_rejected() -> None:
    with pytest.raises(CapacityError, match="3 blocks are needed for sinks, 2 of 3 are left"):
        cache_of(sink(4, 9), num_blocks=3)


def test_full_like_specs_hit_as_full_attention() -> None:
    as_full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=8)
    wide = FullAttentionSpec(block_size=4, num_kv_heads=3, head_size=2, dtype="float32")
    uniform = UniformTypeKVCacheSpecs(block_size=4, layers=(("x", full()), ("y", wide)))
    for spec in (mla(), as_full, uniform):
        cache = KVCacheManager(config(40, spec), 100)
        start(cache, PROMPT[:24], (8, 8, 8))
        assert table(cache) == [1, 2, 3, 4, 5, 6]
        assert hit(cache, PROMPT[:24]) == (20, ([1, 2, 3, 4, 5],))


def test_uniform_window_group_drops_skipped_blocks() -> None:
    wide = window(8)
    uniform = UniformTypeKVCacheSpecs(block_size=4, layers=(("x", window(8)), ("y", wide)))
    cache = KVCacheManager(config(40, uniform), 100)
    start(cache, PROMPT[:24], (8, 8, 8))
    assert table(cache) == [0, 0, 3, 4, 5, 6]


# -- what is remembered of a search
