from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv import planner
from hybridkv.cache import KVCacheManager
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.models import Layer, Model, read_model
from hybridkv.planner import capacity_of
from hybridkv.planner.reference import group_layers, reference_layout
from hybridkv.request import Request
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RequestLimits,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from hybridkv.units import GiB

plan = partial(planner.plan, layout="reference")

TINY: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100,
    "vocab_size": 50,
    "dtype": "float16",
}
# 3 layers of 2 (K, V) * 16 tokens * 2 heads * 8 elements * 2 bytes
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 2


def tiny(**options: int) -> Model:
    return read_model(TINY, **options)  # type: ignore[arg-type]  # sizes only


def test_plan_with_least_memory_holds_a_request_and_sinks() -> None:
    spec = SinkFullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="bfloat16", sink_len=9)
    model = Model("m", "m", (Layer("a", spec, 0),), 40, 50, "bfloat16", 1, 1, 4)
    least = (1 + 3 + 10) * 64  # the null block, three of sinks, ten of 40 tokens
    with pytest.raises(CapacityError, match=f"{least} bytes: 14 blocks"):
        plan(model, least - 1, max_model_len=40)
    planned = plan(model, least, max_model_len=40)
    assert planned.capacity.longest_context == 40
    cache = KVCacheManager(planned.config, 40)
    assert cache.allocate_slots(Request("r", range(40), hasher=cache.hasher), 40) is not None


def test_plan_capacity_matches_hand_calculation() -> None:
    # 100 tokens are 7 blocks, the null block is an eighth; 5 bytes are left over
    made = plan(tiny(), 20 * BLOCK_BYTES + 5)
    holds = made.capacity
    assert made.max_model_len == 100
    assert (holds.num_blocks, holds.block_bytes) == (20, BLOCK_BYTES)
    assert (holds.arena_bytes, holds.unused_bytes, holds.padding_bytes) == (20 * BLOCK_BYTES, 5, 0)
    assert holds.tokens_that_fit == 19 * 16
    assert holds.longest_context == 100
    assert holds.concurrency == 19 / 7
    (group,) = holds.groups
    assert (group.kind, group.layers, group.block_size) == ("FullAttentionSpec", 3, 16)
    assert (group.page_bytes, group.block_bytes, group.padding_bytes) == (BLOCK_BYTES // 3, BLOCK_BYTES, 0)
    assert group.blocks_per_request == 7


def test_plan_capacity_with_padded_group_is_counted() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float16")
    other = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=4, dtype="float16", attention_chunk_size=4096
    )
    grouping = group_layers([("a", full), ("b", full), ("c", other), ("d", other), ("e", other)])
    assert [group.layer_names for group in grouping.groups] == [("a", "b"), ("c", "e"), ("d",)]
    config = reference_layout(grouping, 13)
    holds = capacity_of(config, config.arena_bytes, RequestLimits(48))
    page = full.page_size_bytes
    assert [group.padding_bytes for group in holds.groups] == [0, 0, page]
    # 3 blocks in each of 3 groups, of which the last wastes half
    assert holds.padding_bytes == 3 * page
    # a request of n tokens takes ceil(n / 16) blocks of each group: 12 usable blocks hold 64 tokens
    assert holds.tokens_that_fit == 64
    assert holds.concurrency == 12 / 9


def test_plan_with_too_little_memory_names_need_and_fit() -> None:
    with pytest.raises(CapacityError) as raised:
        plan(read_model("llama-3-8b"), GiB)
    # 512 blocks of 2 MiB and the null block; without it 511 blocks of 16 tokens fit
    assert f"({513 * 2 * 2**20} bytes: 513 blocks of 2 MiB, one of them always empty)" in str(raised.value)
    assert str(raised.value).endswith(
        "raise memory (--memory) to that, or lower max_model_len (--max-model-len) to 8176"
    )
    assert plan(read_model("llama-3-8b"), 513 * 2 * 2**20).config.num_blocks == 513
    assert plan(read_model("llama-3-8b"), GiB, max_model_len=8176).config.num_blocks == 512
    with pytest.raises(CapacityError, match=r"to that$"):
        plan(read_model("llama-3-8b"), "1MiB")


def test_plan_beyond_the_model_length_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"use at most 100, or raise max_position_embeddings"):
        plan(tiny(), "1MiB", max_model_len=101)
    unlimited = replace(tiny(), max_model_len=None)
    assert plan(unlimited, "1MiB", max_model_len=101).max_model_len == 101
    with pytest.raises(ConfigError, match="--max-model-len"):
        plan(unlimited, "1MiB")


@pytest.mark.parametrize("wrong", [{"max_model_len": 0}, {"max_model_len": -1}, {"max_batched_tokens": -1}])
def test_plan_with_invalid_limits_is_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        plan(tiny(), "1MiB", **wrong)  # type: ignore[arg-type]  # numbers only


@pytest.mark.parametrize("memory", [0, -1, "0GiB", "much"])
def test_plan_with_invalid_memory_is_rejected(memory: int | str) -> None:
    with pytest.raises(ConfigError, match="size"):
        plan(tiny(), memory)


FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16")
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16", sliding_window=8)
CHUNKED = ChunkedLocalAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16", attention_chunk_size=8)
CROSS = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float16")
STATE = MambaSpec(block_size=4, shapes=((37,),), dtypes=("float32",))
LENGTH = 100


def model_of(specs: list[KVCacheSpec], max_encoder_tokens: int = 0) -> Model:
    layers = tuple(Layer(f"l{i}", spec, i) for i, spec in enumerate(specs))
    return replace(tiny(), layers=layers, max_encoder_tokens=max_encoder_tokens)


def test_plan_without_full_attention_fits_any_length() -> None:
    choices: list[list[KVCacheSpec]] = [[WINDOW, WINDOW], [STATE], [STATE, WINDOW], [CHUNKED, STATE]]
    for specs in choices:
        holds = plan(model_of(specs), "1MiB").capacity
        assert holds.tokens_that_fit is None
        assert holds.longest_context == 100
    assert plan(model_of([STATE, FULL]), "1MiB").capacity.tokens_that_fit is not None


def test_plan_of_a_hybrid_matches_hand_calculation() -> None:
    # a token takes 16 bytes, a state 148: blocks of 16 tokens, 256 bytes, of which a state leaves 108 unused
    holds = plan(model_of([FULL, STATE, STATE, STATE]), 256 * 30).capacity
    assert [group.kind for group in holds.groups] == ["FullAttentionSpec"] + ["MambaSpec"] * 3
    assert [group.padding_bytes for group in holds.groups] == [0, 108, 108, 108]
    assert [group.blocks_per_request for group in holds.groups] == [7, 2, 2, 2]
    assert holds.padding_bytes == 3 * 2 * 108
    assert (holds.num_blocks, holds.tokens_that_fit, holds.concurrency) == (30, (29 - 6) * 16, 29 / 13)
    none = plan(model_of([FULL, STATE, STATE, STATE]), 256 * 30, placement="none").capacity
    assert [group.blocks_per_request for group in none.groups] == [7, 1, 1, 1]


def test_plan_with_drafts_needs_recurrent_states() -> None:
    model = replace(model_of([FULL, replace(STATE, num_speculative_blocks=2)]), num_speculative_tokens=2)
    assert [group.blocks_per_request for group in plan(model, "1MiB").capacity.groups] == [7, 4]
    with pytest.raises(ConfigError, match="3 speculative tokens"):
        plan(replace(model, num_speculative_tokens=3), "1MiB")


def test_plan_of_cross_attention_holds_the_encoder_input() -> None:
    model = model_of([FULL, CROSS], max_encoder_tokens=50)
    assert [group.blocks_per_request for group in plan(model, "1MiB").capacity.groups] == [25, 13]
    shorter = plan(model, "1MiB", max_encoder_tokens=4)
    assert [group.blocks_per_request for group in shorter.capacity.groups] == [25, 1]
    with pytest.raises(ConfigError, match=r"51 exceeds the 50"):
        plan(model, "1MiB", max_encoder_tokens=51)
    with pytest.raises(ConfigError, match="must not be negative"):
        plan(model, "1MiB", max_encoder_tokens=-1)


def test_plan_of_context_parallel_rank_holds_its_share() -> None:
    model = model_of([FULL, WINDOW, STATE])
    blocks = [
        group.blocks_per_request for group in plan(model, "1MiB", max_batched_tokens=0, dcp=2, pcp=2).capacity.groups
    ]
    # blocks of 16 tokens cover 64: 100 tokens; the window of 8 and a block for where it starts; states are whole
    assert blocks == [2, 2, 2]


def test_plan_with_windows_as_full_keeps_every_token() -> None:
    model = model_of([FULL, WINDOW])
    made = plan(model, "1MiB", max_batched_tokens=0)
    assert [group.blocks_per_request for group in made.capacity.groups] == [25, 3]
    (group,) = plan(model, "1MiB", windows_as_full=True).capacity.groups
    assert (group.layers, group.blocks_per_request) == (2, 25)


@given(
    specs=st.lists(
        st.sampled_from([FULL, WINDOW, CHUNKED, CROSS, STATE, replace(FULL, num_kv_heads=3)]), min_size=1, max_size=8
    ),
    memory=st.integers(100, 10**6),
    in_flight=st.integers(0, 64),
    placement=st.sampled_from(["align", "none"]),
)
def test_plan_capacity_is_exact_for_every_spec(
    specs: list[KVCacheSpec], memory: int, in_flight: int, placement: str
) -> None:
    model = model_of(specs, max_encoder_tokens=10)
    try:
        made = plan(model, memory, placement=placement, max_batched_tokens=in_flight)
    except CapacityError as error:
        needed = int(str(error).partition("bytes: ")[0].rpartition("(")[2])
        assert memory < needed
        made = plan(model, needed, placement=placement, max_batched_tokens=in_flight)
        assert made.config.num_blocks == 1 + sum(g.blocks_per_request for g in made.capacity.groups)
        return
    holds, config = made.capacity, made.config
    assert (
        config.arena_bytes == config.num_blocks * holds.block_bytes <= memory < config.arena_bytes + holds.block_bytes
    )
    limits = made.limits

    def blocks(tokens: int) -> int:
        return sum(group.spec.max_request_blocks(replace(limits, max_model_len=tokens)) for group in config.groups)

    assert blocks(holds.longest_context) * int(holds.concurrency) <= config.num_blocks - 1
    if holds.tokens_that_fit is not None:
        assert blocks(holds.tokens_that_fit) <= config.num_blocks - 1 < blocks(holds.tokens_that_fit + 1)
