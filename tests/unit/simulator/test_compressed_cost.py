"""Bytes and operations of a step with compressed caches by hand: rates, an indexer's choice, compressors and rings.

A step has rows (computed, scheduled). The arithmetic of each number is written out.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assumed import plan_of
from hybridkv.models import Layer, Model, read_model
from hybridkv.planner import Plan, plan
from hybridkv.simulator.cost import CacheTraffic, Operations, _grouped, state_reads
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import CircularBufferSpec, FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from hybridkv.step import Step
from small_steps import small_step

LATENT = MLAAttentionSpec(block_size=16, head_size=5, dtype="bfloat16", tokens_per_state=4)  # 10 bytes a latent
KEYS = MLAAttentionSpec(
    block_size=16, head_size=3, dtype="uint8", tokens_per_state=4, cache_role=SparseCacheRole.INDEXER
)
SUMS = SlidingWindowMLASpec(block_size=4, head_size=6, dtype="float32", sliding_window=8)
RING = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=7, head_size_v=0, dtype="bfloat16")
TWICE = FullAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=1, dtype="uint8", tokens_per_state=Fraction(1, 2)
)  # 2 bytes a state, 2 states a token


def step(*rows: tuple[int, int]) -> Step:
    """A Step of rows (computed, scheduled)."""
    computed, scheduled = zip(*rows, strict=True)
    return small_step(scheduled=scheduled, num_computed=np.array(computed, np.int32))


def plan_with(*layers: Layer, heads: int = 3, **limits: Any) -> Plan:  # noqa: ANN401 - arguments of plan
    facts: dict[str, Any] = {"max_model_len": 4096, "vocab_size": 100, "parameters": 1, "active_parameters": 1}
    model = Model("m", "m", layers, dtype="bfloat16", block_size=16, query_heads=heads, **facts)
    return plan(model, "1GiB", **limits)


def layer(spec: KVCacheSpec, **facts: Any) -> Layer:  # noqa: ANN401 - fields of Layer
    return Layer("a", spec, 0, **facts)


@pytest.mark.parametrize(
    ("one", "moved"),
    [
        # 11 + 2 = 13 tokens have 3 whole groups of 4, 30 + 1 have 7: 10 latents of 10 bytes
        pytest.param(layer(LATENT), (3 + 7) * 10, id="a state for 4 tokens"),
        # 2 queries of at most 1 latent each, then 1 query: 2 + 1 latents
        pytest.param(layer(LATENT, top_states=1), (2 * 1 + 1) * 10, id="1 state chosen"),
        # 2 queries of at most 2 latents choose 4, and there are 3; then 2 of 7
        pytest.param(layer(LATENT, top_states=2), (3 + 2) * 10, id="2 states chosen"),
        # plain latents: 2 * 5 of 13, and 5 of 31
        pytest.param(layer(replace(LATENT, tokens_per_state=1), top_states=5), (10 + 5) * 10, id="5 tokens chosen"),
        # the indexer reads every key: 3 bytes each
        pytest.param(layer(KEYS, index_heads=2), (3 + 7) * 3, id="an indexer's keys"),
        # 2 + 1 new rows of 6 float32: written once, and read by 8 / 4 groups
        pytest.param(layer(replace(SUMS, pools=4)), (2 + 1) * (1 + 2) * 24, id="a compressor's rows"),
        # the same rows without a compressor are a window of latents: min(13, 2 + 7) + min(31, 1 + 7)
        pytest.param(layer(SUMS), (9 + 8) * 24, id="a window of latents"),
        # 8 rows of 7 elements of 2 bytes, for each of two requests
        pytest.param(layer(RING), 2 * 8 * 7 * 2, id="a ring"),
        # 13 + 31 tokens of 2 states of 2 bytes
        pytest.param(layer(TWICE), (13 + 31) * 2 * 2, id="2 states a token"),
        # 3 states are 2 tokens of 2 states: 2 queries choose 4 tokens of 13, 1 query chooses 2 of 31
        pytest.param(layer(TWICE, top_states=3), (4 + 2) * 2 * 2, id="3 of 2 states a token"),
        # the owner and two more layers
        pytest.param(layer(LATENT, read_by=("b", "c")), 3 * (3 + 7) * 10, id="read by two more"),
    ],
)
def test_bytes_of_compressed_caches_match_hand_calculation(one: Layer, moved: int) -> None:
    assert CacheTraffic.of(plan_with(one)).bytes_of(step((11, 2), (30, 1))) == moved


@pytest.mark.parametrize(
    ("one", "made"),
    [
        # a latent and 3 heads: 4 * 5 * 3 = 60. Tokens 12, 13 see 3 latents each, token 31 sees 7
        pytest.param(layer(LATENT), (3 + 3 + 7) * 60, id="a state for 4 tokens"),
        pytest.param(layer(LATENT, top_states=2), (2 + 2 + 2) * 60, id="2 states chosen"),
        # 5 of 12, 13 and 31 tokens
        pytest.param(layer(replace(LATENT, tokens_per_state=1), top_states=5), 3 * 5 * 60, id="5 tokens chosen"),
        # 2 heads of the indexer and keys of 3 elements: 2 * 3 * 2 for each key
        pytest.param(layer(KEYS, index_heads=2), (3 + 3 + 7) * 12, id="an indexer's keys"),
        pytest.param(layer(KEYS), 0, id="an indexer with unknown heads"),
        pytest.param(layer(replace(SUMS, pools=4)), 0, id="a compressor's rows"),
        pytest.param(layer(RING), 0, id="a ring"),
        # 2 * (1 + 1) elements * 3 heads for each of 2 states of 12, 13 and 31 tokens
        pytest.param(layer(TWICE), (12 + 13 + 31) * 2 * 4 * 3, id="2 states a token"),
        pytest.param(layer(LATENT, read_by=("b", "c")), 3 * (3 + 3 + 7) * 60, id="read by two more"),
    ],
)
def test_operations_of_compressed_caches_match_hand_calculation(one: Layer, made: int) -> None:
    found = Operations.of(plan_with(one)).of_rows(np.array([11, 30]), np.array([2, 1]))
    assert found == made


def test_context_parallel_ranks_share_tokens_but_not_whole_caches_and_rings() -> None:
    rows = step((11, 2), (30, 1))
    limits: dict[str, Any] = {"dcp": 2, "layout": "reference"}
    assert CacheTraffic.of(plan_with(layer(LATENT), **limits)).bytes_of(rows) == (3 + 7) * 10 / 2
    whole = layer(replace(LATENT, dcp_sharded=False))
    assert CacheTraffic.of(plan_with(whole, **limits)).bytes_of(rows) == (3 + 7) * 10
    assert CacheTraffic.of(plan_with(layer(RING), **limits)).bytes_of(rows) == 2 * 8 * 7 * 2
    # each rank has the indexer's 2 heads and scores its half of the keys; or all of them
    shared, alone = (layer(replace(KEYS, dcp_sharded=sharded), index_heads=2) for sharded in (True, False))
    counts = [Operations.of(plan_with(one, **limits)).of_rows(np.array([30]), np.array([1])) for one in (shared, alone)]
    assert counts == [7 * 12 / 2, 7 * 12]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(1, 20), st.integers(1, 9), st.integers(0, 7))
def test_pairs_and_reads_of_groups_equal_a_count(computed: list[int], steps: int, tokens: int, most: int) -> None:
    def seen(position: int) -> int:
        return min(position // tokens, most) if most else position // tokens

    for one in computed:
        assert _grouped(np.array([one]), tokens, most)[0] == sum(seen(p) for p in range(1, one + 1))
    found = state_reads(np.array(computed), np.arange(1, steps + 1), tokens, most)
    assert found.tolist() == [sum(seen(one + more) for one in computed) for more in range(1, steps + 1)]


DEEPSEEK_4 = {"model_type": "deepseek_v4", "num_hidden_layers": 43, "vocab_size": 1000}


def test_decode_step_of_deepseek_v4_matches_hand_calculation() -> None:
    made = plan_of(read_model(DEEPSEEK_4, dtype="bf16", block_size=256), "100GiB", max_model_len=65_536)
    traffic, operations = CacheTraffic.of(made), Operations.of(made)
    # 43 windows of 128 latents of 512 * 2 bytes. 20 layers at a rate of 4: 512 (index_topk) of 50,000 / 4 = 12,500
    # latents, all 12,500 keys of 128 + 4 bytes, and a compressor's rows of two groups: 2 * 2 * (512 + 128) float32,
    # written once and read twice. 23 layers at a rate of 128: 390 latents, rows of 2 * 512 float32, read once
    four = 20 * (512 * 1024 + 12_500 * 132 + 3 * 2 * 2 * 640 * 4)
    many = 23 * (390 * 1024 + 2 * 2 * 512 * 4)
    assert traffic.bytes_of(step((49_999, 1))) == 43 * 128 * 1024 + four + many
    # 64 heads: 4 * 512 for each latent; 64 heads of the indexer (index_n_heads): 2 * 132 for each key
    pairs = 43 * 128 + 20 * 512 + 23 * 390
    assert operations.of_rows(np.array([49_999]), np.array([1])) == pairs * 4 * 512 * 64 + 20 * 12_500 * 2 * 132 * 64


def test_decode_step_of_deepseek_32_reads_2048_tokens_and_all_keys() -> None:
    made = plan_of(read_model("deepseek-v3.2"), "100GiB", max_model_len=65_536)
    # 61 layers: 2,048 (index_topk) latents of (512 + 64) * 2 bytes, and 50,000 keys of 128 + 4 bytes
    assert CacheTraffic.of(made).bytes_of(step((49_999, 1))) == 61 * (2048 * 1152 + 50_000 * 132)
    # fewer tokens than the indexer chooses: all are read
    assert CacheTraffic.of(made).bytes_of(step((999, 1))) == 61 * 1000 * (1152 + 132)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=4), st.integers(1, 40))
def test_several_decode_steps_are_bit_equal_to_single_steps(computed: list[int], steps: int) -> None:
    traffic, operations = CacheTraffic.of(DEEPSEEK_PLAN), Operations.of(DEEPSEEK_PLAN)
    start = np.array(computed, np.int64)
    singly = [step(*((one + more, 1) for one in computed)) for more in range(steps)]
    assert traffic.decode_bytes(start, steps).tolist() == [traffic.bytes_of(one) for one in singly]
    ones = np.ones(len(computed), np.int64)
    assert operations.of_decodes(start, steps).tolist() == [operations.of_rows(start + m, ones) for m in range(steps)]


DEEPSEEK_PLAN = plan_of(read_model({**DEEPSEEK_4, "num_hidden_layers": 4}, dtype="bf16"), "10GiB", max_model_len=8192)

FACTS = [
    # (config, end of a layer's name, most states, heads of the indexer, tokens that a compressor pools)
    (DEEPSEEK_4, ".3.self_attn", (512, 0, 0)),
    (DEEPSEEK_4, ".3.self_attn.indexer.k_cache", (0, 64, 0)),
    (DEEPSEEK_4, ".3.self_attn.indexer.compressor.state_cache", (0, 0, 4)),
    (DEEPSEEK_4, ".4.self_attn", (0, 0, 0)),
    (DEEPSEEK_4, ".4.self_attn.compressor.state_cache", (0, 0, 128)),
    ({"model_type": "glm5_next_text", "num_hidden_layers": 45}, ".3.self_attn", (2048, 0, 0)),
    ({"model_type": "glm5_next_text", "num_hidden_layers": 45}, ".3.self_attn.indexer.k_cache", (0, 32, 0)),
    ({"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "index_topk": 99}, ".0.self_attn", (99, 0, 0)),
    ({"model_type": "glm_moe_dsa", "num_hidden_layers": 78}, ".0.self_attn.indexer", (0, 32, 0)),
]


@pytest.mark.parametrize(("config", "name", "facts"), FACTS)
def test_layers_carry_the_facts_of_their_config(config: dict[str, Any], name: str, facts: tuple[int, ...]) -> None:
    (found,) = (one for one in read_model(config, dtype="bf16").layers if one.name.endswith(name))
    assert (found.top_states, found.index_heads, found.pools) == facts


def test_minimax_m3_chooses_blocks_and_splits_the_heads_of_its_indexer() -> None:
    sparse = {
        "sparse_index_dim": 128,
        "sparse_attention_freq": [0, 1],
        "sparse_num_index_heads": 8,
        "sparse_topk_blocks": 4,
        "sparse_block_size": 64,
    }
    config = {"model_type": "minimax_m3_text", "num_hidden_layers": 2, "sparse_attention_config": sparse}
    config |= {"num_key_value_heads": 4, "num_attention_heads": 64, "head_dim": 128, "vocab_size": 1000}
    plain, indexed, keys = read_model(config, dtype="bf16", tp=2).layers
    assert (plain.top_states, indexed.top_states, keys.index_heads) == (0, 4 * 64, 8 // 2)
