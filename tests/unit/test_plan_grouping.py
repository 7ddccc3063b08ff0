"""Measured lines of contracts.md section 1 on grouping, with full attention and a windowed spec of the test's own."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.plan.grouping import NamedSpec, group_layers, group_size
from hybridkv.plan.layout import block_bytes, reference_layout
from hybridkv.specs import AttentionSpec, FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, RequestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec(AttentionSpec):
    sliding_window: int

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        tokens = min(self.sliding_window - 1 + limits.max_in_flight_tokens, limits.max_model_len)
        return (-(-tokens // self.block_size) + 1) * self.page_size_bytes


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
WINDOW = WindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", sliding_window=128)
OTHER = WindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", sliding_window=64)


def named(letter: str, spec: KVCacheSpec, count: int) -> list[NamedSpec]:
    return [(f"{letter}{i}", spec) for i in range(count)]


def names(layers: Sequence[NamedSpec]) -> list[str]:
    return [" ".join(group.layer_names) for group in group_layers(layers).groups]


def sizes(layers: Sequence[NamedSpec]) -> list[int]:
    return [len(group.layer_names) for group in group_layers(layers).groups]


def test_one_type_is_one_group() -> None:
    grouping = group_layers(named("f", FULL, 32))
    assert [len(group.layer_names) for group in grouping.groups] == [32]
    assert grouping.group_size == 32
    assert grouping.groups[0].spec == FULL


def test_measured_groupings() -> None:
    assert names(named("f", FULL, 2) + named("s", WINDOW, 3)) == ["f0 f1", "s0 s2", "s1"]
    assert sizes(named("f", FULL, 2) + named("s", WINDOW, 10)) == [2] * 6
    assert sizes(named("s", WINDOW, 12) + named("f", FULL, 13)) == [12, 13]
    assert sizes(named("f", FULL, 20) + named("s", WINDOW, 30)) == [20, 15, 15]


def test_group_size_takes_the_most_when_it_is_less_than_one_and_a_half_times_the_fewest() -> None:
    assert group_size([5]) == 5
    assert group_size([4, 5]) == 5
    assert group_size([4, 6]) == 4
    assert group_size([2, 3, 10]) == 2


def test_types_follow_the_order_of_their_first_layer() -> None:
    mixed = [("a", WINDOW), ("b", FULL), ("c", OTHER), ("d", FULL), ("e", WINDOW), ("f", OTHER)]
    assert names(mixed) == ["a e", "b d", "c f"]


def test_layers_that_merge_share_a_group_and_keep_the_window() -> None:
    remembered = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", sliding_window=128)
    (group,) = group_layers([("a", FULL), ("b", remembered), ("c", FULL)]).groups
    assert group.layer_names == ("a", "b", "c")
    assert group.spec == remembered


def test_full_attention_and_mla_of_equal_pages_are_two_types() -> None:
    latent = MLAAttentionSpec(block_size=16, head_size=256, dtype="bfloat16")
    assert latent.page_size_bytes == FULL.page_size_bytes
    assert names([("a", FULL), ("b", latent), ("c", FULL), ("d", latent)]) == ["a c", "b d"]


def test_pages_that_differ_are_refused() -> None:
    half = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match="4096, 8192 bytes"):
        group_layers([("a", FULL), ("b", half)])


def test_no_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        group_layers([])


KINDS = st.sampled_from([FULL, WINDOW, OTHER])


@given(st.lists(KINDS, min_size=1, max_size=60), st.integers(1, 50))
def test_every_layer_has_one_place(specs: list[KVCacheSpec], num_blocks: int) -> None:
    layers = [(f"l{i}", spec) for i, spec in enumerate(specs)]
    grouping = group_layers(layers)
    config = reference_layout(grouping, num_blocks)
    assert sorted(n for group in config.groups for n in group.layer_names) == sorted(name for name, _ in layers)
    assert all(dict(layers)[name] == group.spec for group in config.groups for name in group.layer_names)
    assert max(len(group.layer_names) for group in config.groups) == grouping.group_size == len(config.tensors)
    # layer j of every group shares tensor j
    for j, tensor in enumerate(config.tensors):
        assert tensor.shared_by == tuple(g.layer_names[j] for g in config.groups if j < len(g.layer_names))
        assert (tensor.offset_bytes, tensor.block_stride_bytes) == (j * tensor.size, FULL.page_size_bytes)
        assert tensor.size == num_blocks * FULL.page_size_bytes
    assert config.arena_bytes == num_blocks * block_bytes(grouping)
