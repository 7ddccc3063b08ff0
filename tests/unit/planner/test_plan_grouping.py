"""Measured lines of docs/contracts.md, 1, on grouping, and the sizes that pages and blocks take for it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner.config import NamedSpec
from hybridkv.planner.reference import (
    group_layers,
    group_size,
    layer_types,
    reference_layout,
    state_block_tokens,
    unify_pages,
    windows_as_full,
    with_placement,
)
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", sliding_window=128)
OTHER = replace(WINDOW, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", attention_chunk_size=64
)
CROSS = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
STATE = MambaSpec(block_size=16, shapes=((100, 64),), dtypes=("float32",))
TOKEN_BYTES = 2 * 2 * 64 * 2


def named(letter: str, spec: KVCacheSpec, count: int) -> list[NamedSpec]:
    return [(f"{letter}{i}", spec) for i in range(count)]


def names(layers: Sequence[NamedSpec]) -> list[str]:
    return [" ".join(group.layer_names) for group in group_layers(layers).groups]


def sizes(layers: Sequence[NamedSpec]) -> list[int]:
    return [len(group.layer_names) for group in group_layers(layers).groups]


def test_grouping_of_one_type_gives_one_group() -> None:
    grouping = group_layers(named("f", FULL, 32))
    assert [len(group.layer_names) for group in grouping.groups] == [32]
    assert len(grouping.page_bytes) == 32
    assert grouping.groups[0].spec == FULL


def test_grouping_matches_measurements() -> None:
    assert names(named("f", FULL, 2) + named("s", WINDOW, 3)) == ["f0 f1", "s0 s2", "s1"]
    assert sizes(named("f", FULL, 2) + named("s", WINDOW, 10)) == [2] * 6
    assert sizes(named("s", WINDOW, 12) + named("f", FULL, 13)) == [12, 13]
    assert sizes(named("f", FULL, 20) + named("s", WINDOW, 30)) == [20, 15, 15]


def test_group_size_takes_the_largest_below_one_and_a_half_times_the_fewest() -> None:
    assert group_size([5]) == 5
    assert group_size([4, 5]) == 5
    assert group_size([4, 6]) == 4
    assert group_size([2, 3, 10]) == 2


def test_grouping_orders_types_by_first_layer() -> None:
    mixed = [("a", WINDOW), ("b", FULL), ("c", OTHER), ("d", FULL), ("e", WINDOW), ("f", OTHER)]
    assert names(mixed) == ["a e", "b d", "c f"]


def test_grouping_of_mergeable_layers_keeps_the_window() -> None:
    remembered = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", sliding_window=128)
    (group,) = group_layers([("a", FULL), ("b", remembered), ("c", FULL)]).groups
    assert group.layer_names == ("a", "b", "c")
    assert group.spec == remembered


def test_grouping_of_two_remembered_windows_gives_one_uniform_type() -> None:
    # D7: the reference crashes
    one, two = replace(FULL, sliding_window=128), replace(FULL, sliding_window=64)
    (group,) = group_layers([("a", one), ("b", two), ("c", FULL)]).groups
    assert isinstance(group.spec, UniformTypeKVCacheSpecs)
    assert group.layer_specs == (one, two, FULL)
    # beside another kind they are types of their own
    layers = [("a", one), ("b", two), ("c", FULL), ("d", WINDOW), ("e", replace(FULL, attention_chunk_size=32))]
    assert names(layers) == ["a", "c", "b", "d", "e"]
    types = [[name for name, _ in members] for members in layer_types(layers)]
    assert types == [["a", "c"], ["b"], ["d"], ["e"]]


def test_grouping_keeps_equal_specs_together() -> None:
    remembered = replace(FULL, sliding_window=128)
    layers = [("a", FULL), ("b", remembered), ("c", FULL), ("d", WINDOW), ("e", remembered), ("f", WINDOW)]
    assert [[name for name, _ in members] for members in layer_types(layers)] == [["a", "c", "b", "e"], ["d", "f"]]
    # dealt over two groups; measured on the reference's own function
    assert names(layers) == ["a b", "c e", "d f"]


def test_grouping_of_two_sliding_windows_gives_two_types() -> None:
    assert names(named("s", WINDOW, 2) + named("t", OTHER, 2)) == ["s0 s1", "t0 t1"]


def test_grouping_of_different_pages_gives_one_group_with_a_tensor_per_layer() -> None:
    wide = replace(FULL, num_kv_heads=6)
    latent = MLAAttentionSpec(block_size=16, head_size=24, dtype="bfloat16")
    sink = SinkFullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", sink_len=16)
    layers = [("a", FULL), ("b", wide), ("c", latent), ("d", sink), ("e", FULL)]
    grouping = group_layers(layers)
    assert names(layers) == ["a b c d e"]
    pages = [spec.page_size_bytes for _, spec in layers]
    assert list(grouping.page_bytes) == pages
    config = reference_layout(grouping, 7)
    assert [(t.shared_by, t.size, t.block_stride_bytes) for t in config.tensors] == [
        ((name,), 7 * page, page) for (name, _), page in zip(layers, pages, strict=True)
    ]
    assert [t.offset_bytes for t in config.tensors] == [7 * sum(pages[:j]) for j in range(5)]
    assert config.arena_bytes == 7 * grouping.block_bytes == 7 * sum(pages)


def test_page_size_is_unified_by_larger_blocks() -> None:
    # measured: full + sliding with half the page: the sliding block doubles
    half = replace(WINDOW, num_kv_heads=1)
    groups = group_layers([("f", FULL), ("s", half)]).groups
    assert [group.spec for group in groups] == [FULL, replace(half, block_size=32)]
    assert {group.spec.page_size_bytes for group in groups} == {FULL.page_size_bytes}
    third = replace(FULL, num_kv_heads=6)
    assert [group.spec.block_size for group in group_layers([("f", third), ("s", WINDOW)]).groups] == [16, 48]


def test_page_that_does_not_divide_the_largest_is_padded() -> None:
    odd = replace(WINDOW, num_kv_heads=3)
    groups = group_layers([("s", odd), ("f", FULL)]).groups
    assert [group.spec for group in groups] == [odd, replace(FULL, page_size_padded=odd.page_size_bytes)]
    padded = groups[1]
    assert padded.content_bytes == FULL.page_size_bytes
    again = unify_pages([("f", padded.spec), ("s", replace(WINDOW, num_kv_heads=6))])
    assert {spec.page_size_bytes for _, spec in again} == {2 * odd.page_size_bytes}
    assert [spec.block_size for _, spec in again] == [32, 16]


@pytest.mark.parametrize(
    ("state_bytes", "block_size"),
    [
        # the page of a block of 16 tokens already covers it
        (16 * TOKEN_BYTES - 4, 16),
        (16 * TOKEN_BYTES, 16),
        (16 * TOKEN_BYTES + 4, 32),
        (50 * TOKEN_BYTES, 64),
        (1000 * TOKEN_BYTES, 1008),
    ],
)
def test_attention_block_grows_until_its_page_covers_the_state(state_bytes: int, block_size: int) -> None:
    state = replace(STATE, shapes=((state_bytes // 4,),))
    full, mamba = group_layers([("f", FULL), ("m", state)]).groups
    assert full.spec == replace(FULL, block_size=block_size)
    page = block_size * TOKEN_BYTES
    assert mamba.spec.page_size_bytes == page == full.spec.page_size_bytes
    assert (mamba.spec.block_size, mamba.content_bytes) == (block_size, state_bytes)


def test_attention_block_above_16_grows_by_its_own_size() -> None:
    state = replace(STATE, shapes=((25 * TOKEN_BYTES,),))
    sizes = {
        given: group_layers([("f", replace(FULL, block_size=given)), ("m", state)]).groups[0].spec.block_size
        for given in (8, 16, 24, 32, 256)
    }
    assert sizes == {8: 112, 16: 112, 24: 120, 32: 128, 256: 256}


def test_attention_blocks_of_all_layers_grow_to_the_largest_state() -> None:
    small, half = replace(STATE, shapes=((7,),)), replace(WINDOW, num_kv_heads=1)
    layers = [("f", FULL), ("m", STATE), ("s", half), ("n", small)]
    specs = dict(unify_pages(layers))
    block = 64  # 25,600 bytes of state, 512 a token: 50 tokens
    assert specs["f"] == replace(FULL, block_size=block)
    assert specs["s"] == replace(half, block_size=2 * block)
    for name in ("m", "n"):
        assert (specs[name].block_size, specs[name].page_size_bytes) == (block, block * TOKEN_BYTES)
    # two kinds of state are two types
    assert names(layers) == ["f", "m", "s", "n"]


def test_states_without_attention_keep_their_block_and_page() -> None:
    (group,) = group_layers(named("m", STATE, 3)).groups
    assert group.spec == STATE
    (mixed,) = group_layers([("m", STATE), ("n", replace(STATE, shapes=((7,),)))]).groups
    assert isinstance(mixed.spec, UniformTypeKVCacheSpecs)


def test_placement_sets_the_cache_mode_of_states() -> None:
    layers = with_placement([("f", FULL), ("m", STATE)], "align")
    assert [spec for _, spec in layers] == [FULL, replace(STATE, cache_mode="align")]
    assert with_placement(layers, "none") == [("f", FULL), ("m", STATE)]
    with pytest.raises(ConfigError, match="unknown cache_mode 'everywhere': use one of none, align"):
        with_placement(layers, "everywhere")


def test_windows_as_full_are_grouped_with_full_attention() -> None:
    latent = SlidingWindowMLASpec(block_size=16, head_size=24, dtype="fp8", sliding_window=8)
    layers = windows_as_full([("f", FULL), ("s", WINDOW), ("c", CHUNKED), ("l", latent), ("m", STATE), ("x", CROSS)])
    assert dict(layers) == {
        "f": FULL,
        "s": replace(FULL, sliding_window=128),
        "c": replace(FULL, attention_chunk_size=64),
        "l": MLAAttentionSpec(block_size=16, head_size=24, dtype="fp8", sliding_window=8),
        "m": STATE,
        "x": CROSS,
    }
    (group,) = group_layers(windows_as_full([("s", WINDOW), ("f", FULL), ("t", WINDOW)])).groups
    assert (group.layer_names, group.spec) == (("s", "f", "t"), replace(FULL, sliding_window=128))


def test_grouping_without_layers_is_rejected() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        group_layers([])


KINDS = st.sampled_from([FULL, WINDOW, OTHER, CHUNKED, CROSS, replace(WINDOW, num_kv_heads=1), STATE])


@given(st.lists(KINDS, min_size=1, max_size=60), st.integers(1, 50))
def test_grouping_gives_every_layer_one_tensor(specs: list[KVCacheSpec], num_blocks: int) -> None:
    layers = [(f"l{i}", spec) for i, spec in enumerate(specs)]
    grouping = group_layers(layers)
    config = reference_layout(grouping, num_blocks)
    assert sorted(n for group in config.groups for n in group.layer_names) == sorted(name for name, _ in layers)
    assert max(len(group.layer_names) for group in config.groups) == len(grouping.page_bytes) == len(config.tensors)
    for group in config.groups:
        for j, (name, spec) in enumerate(zip(group.layer_names, group.layer_specs, strict=True)):
            given = dict(layers)[name]
            assert type(spec) is type(given)
            # a block holds as many tokens or more, and never less than the layer keeps of them
            assert spec.content_bytes * given.block_size >= given.content_bytes * given.block_size
            assert spec.block_size % given.block_size == 0
            # layer j of every group lies in tensor j, whose pages are those of the layer
            assert config.tensors[j].shared_by.count(name) == 1
            assert spec.page_size_bytes == config.tensors[j].block_stride_bytes
    end = 0
    for tensor in config.tensors:
        assert (tensor.offset_bytes, tensor.size) == (end, num_blocks * tensor.block_stride_bytes)
        end += tensor.size
    assert config.arena_bytes == end == num_blocks * grouping.block_bytes


# tokens: the reference's known numbers, those of its plans in tests/golden
STATE_BLOCKS = {
    "bamba-9b": 528,
    "jamba-1.5-mini": 80,
    "nemotron-3-nano-30b-a3b": 2096,
    "nemotron-h-8b": 528,
    "qwen3-next-80b-a3b": 544,
    "qwen3.5-35b-a3b": 1056,
}


@pytest.mark.parametrize("name", STATE_BLOCKS)
def test_state_block_tokens_match_the_measurements(name: str) -> None:
    layers = [(layer.name, layer.spec) for layer in read_model(name).layers]
    assert state_block_tokens(layers) == STATE_BLOCKS[name]
    # what states are kept for, and how wide windows are, is no part of it
    assert state_block_tokens(windows_as_full(with_placement(layers, "none"))) == STATE_BLOCKS[name]
    # and it is the block of the plan
    blocks = {spec.block_size for _, spec in unify_pages(layers) if isinstance(spec, MambaSpec)}
    assert blocks == {STATE_BLOCKS[name]}


def test_state_block_tokens_without_states_are_rejected() -> None:
    with pytest.raises(ConfigError, match="the model has no recurrent layers"):
        state_block_tokens([("f", FULL), ("w", WINDOW)])
