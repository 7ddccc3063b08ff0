"""Rates, roles and rings: errors of specs, documents of plans, and parts that reject them (docs/design/0035)."""

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError, SchemaError, UnsupportedModelError
from hybridkv.models import Layer, Model
from hybridkv.planner import plan, plan_from_json, plan_to_json
from hybridkv.planner.natural import natural_choices
from hybridkv.spec_fields import Feature, KernelBlocks, SparseCacheRole, require_supported
from hybridkv.specs import (
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RequestLimits,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

LATENT = MLAAttentionSpec(block_size=256, head_size=512, dtype="bfloat16")
FOUR = replace(LATENT, tokens_per_state=4, alignment=576, state_content_bytes=584, dtype="uint8")
MANY = replace(FOUR, tokens_per_state=128, max_tp_shards=1)
INDEX = MLAAttentionSpec(
    block_size=256,
    head_size=128,
    dtype="uint8",
    tokens_per_state=4,
    cache_role=SparseCacheRole.INDEXER,
    is_index_group_leader=True,
)
RING = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=128, head_size_v=0, dtype="bfloat16")
WINDOW = SlidingWindowMLASpec(
    block_size=64, head_size=512, dtype="bfloat16", sliding_window=128, block_stride_alignment=KernelBlocks(16)
)
HALVES = CrossAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", tokens_per_state=Fraction(1, 2)
)
PLAIN = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16", sliding_window=64)


def model_of(*specs: KVCacheSpec, **given: int) -> Model:
    layers = tuple(Layer(f"layer.{at}", spec, at) for at, spec in enumerate(specs))
    facts: dict[str, Any] = {"max_model_len": 4096, "vocab_size": 100, "parameters": 1, "active_parameters": 1}
    facts |= {"name": "m", "model_type": "m", "dtype": "bfloat16", "block_size": 256}
    return Model(layers=layers, **(facts | given))


COMPRESSED = model_of(FOUR, MANY, INDEX, RING, WINDOW, LATENT, FOUR, MANY, INDEX, RING, WINDOW, LATENT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(LATENT, tokens_per_state=0), "tokens_per_state must be at least 1, got 0"),
        (lambda: replace(LATENT, tokens_per_state=Fraction(-1, 2)), "or a positive Fraction, got Fraction"),
        (lambda: replace(LATENT, tokens_per_state=0.5), "tokens_per_state must be an integer, got 0.5"),  # type: ignore[arg-type]
        (lambda: replace(LATENT, tokens_per_state=3), "block_size 256 is not a multiple of tokens_per_state 3"),
        (lambda: replace(LATENT, tokens_per_state=512), "is not a multiple of tokens_per_state 512"),
        (lambda: replace(LATENT, tokens_per_state=Fraction(3, 2)), "is not a multiple of tokens_per_state 3/2"),
        (lambda: replace(LATENT, alignment=0), "alignment must be at least 1"),
        (
            lambda: replace(FOUR, page_size_padded=65_535),
            "not a multiple of the alignment of 576 bytes: raise it to 65664",
        ),
        (lambda: replace(FOUR, page_size_padded=576), "page_size_padded 576 is smaller than the 37440 bytes"),
        (lambda: replace(LATENT, cache_role="leader"), "cache_role must be a SparseCacheRole"),  # type: ignore[arg-type]
        (lambda: replace(LATENT, block_stride_alignment=0), "block_stride_alignment must be at least 1"),
        (lambda: replace(LATENT, max_tp_shards=0), "max_tp_shards must be at least 1"),
        (lambda: replace(SLIDING, extra_retained_tokens=-1), "extra_retained_tokens must not be negative"),
        (lambda: replace(RING, dcp_sharded=True), "a ring is whole on each context parallel rank"),
        (lambda: KernelBlocks(0), "tokens must be at least 1"),
        (
            lambda: UniformTypeKVCacheSpecs(block_size=256, layers=(("a", FOUR),), block_stride_alignment=2),
            "aligned layer by layer",
        ),
        (lambda: Layer("a", PLAIN, 0, read_by=("",)), "read_by must be text, and not empty"),
    ],
)
def test_wrong_field_is_rejected_with_its_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_states_and_pages_by_hand() -> None:
    # 256 tokens / 4 = 64 states of 584 bytes = 37376, up to a multiple of 576: 65 * 576
    assert (FOUR.num_states, FOUR.content_bytes, FOUR.page_size_bytes) == (64, 37_376, 37_440)
    # 256 / 128 = 2 states of 584 bytes = 1168, up to 3 * 576
    assert (MANY.num_states, MANY.page_size_bytes) == (2, 1728)
    # two states for each of 16 tokens, 2 heads of 64 + 64 elements of 2 bytes
    assert (HALVES.num_states, HALVES.page_size_bytes) == (32, 32 * 2 * 128 * 2)
    assert replace(HALVES, tokens_per_state=Fraction(4, 2)).tokens_per_state == 2
    # a ring of 8 keys of 128 elements: one block, whatever the request
    assert RING.max_memory_usage_bytes(RequestLimits(1 << 20, max_in_flight_tokens=8192, dcp=4)) == 8 * 128 * 2
    # kernel blocks of 16 of 64 tokens: 16 * 512 * 2 bytes
    assert WINDOW.stride_multiple == 16 * 512 * 2
    # 63 tokens before the one that runs and 17 more fill 5 blocks of 16, and a window may start inside one
    assert replace(SLIDING, extra_retained_tokens=17).max_request_blocks(RequestLimits(4096)) == 6
    plain: Any = "indexer"
    assert replace(INDEX, cache_role=plain).cache_role is SparseCacheRole.INDEXER


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_plan_of_compressed_caches_round_trips(layout: str) -> None:
    draft, reader = replace(COMPRESSED.layers[-1], is_draft=True), replace(COMPRESSED.layers[0], read_by=("x", "y"))
    reader = replace(reader, top_states=512, index_heads=64)
    model = replace(COMPRESSED, layers=(reader, *COMPRESSED.layers[1:-1], draft))
    made = plan(model, "1GiB", layout=layout)
    again = plan_from_json(plan_to_json(made))
    assert again == made
    assert [layer.is_draft for layer in again.model.layers] == [False] * 11 + [True]
    assert again.model.layers[0].read_by == ("x", "y")
    assert again.model.layers[0].spec.features == FOUR.features
    halves = plan(model_of(PLAIN, HALVES, max_encoder_tokens=100), "1GiB", layout=layout)
    assert plan_from_json(plan_to_json(halves)) == halves


def test_document_of_plain_caches_has_none_of_the_new_fields() -> None:
    text = plan_to_json(plan(model_of(PLAIN, SLIDING), "1GiB", layout="reference"))
    later = ("is_draft", "read_by", "top_states", "index_heads", "pools")
    for name in ("tokens_per_state", "dcp_sharded", "cache_role", "packed_block_bytes", *later):
        assert name not in text


@pytest.mark.parametrize("wrong", [{"packed_block_bytes": 1 << 20}, {"tensors": []}, {"packed_block_bytes": 64}])
def test_document_with_wrong_packed_blocks_is_rejected(wrong: dict[str, Any]) -> None:
    document = json.loads(plan_to_json(plan(COMPRESSED, "1GiB", layout="reference")))
    document["config"] |= wrong
    with pytest.raises(SchemaError, match=r"contradicts itself|impossible values"):
        plan_from_json(json.dumps(document))


def test_packed_pages_of_a_group_lie_side_by_side_and_inside_the_block() -> None:
    config = plan(COMPRESSED, "1GiB", layout="reference").config
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    widest = 0
    for group in config.groups:
        start = 0
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            assert (tensors[name].offset_bytes, tensors[name].block_stride_bytes) == (start, config.unit_bytes)
            start += spec.page_size_bytes
        widest = max(widest, start)
    assert widest <= config.unit_bytes
    assert config.unit_bytes % WINDOW.stride_multiple == 0
    assert config.arena_bytes == config.num_blocks * config.unit_bytes <= 1 << 30


def test_natural_layout_pads_compressed_caches_less_than_the_reference() -> None:
    lost = {
        layout: plan(COMPRESSED, "1GiB", layout=layout).capacity.padding_bytes for layout in ("reference", "natural")
    }
    assert lost["natural"] * 4 < lost["reference"]


def test_readers_of_an_entry_have_one_owner_and_no_entry() -> None:
    first, second = COMPRESSED.layers[:2]
    with pytest.raises(ConfigError, match=r"layer 'layer.1' keeps its own entry"):
        replace(COMPRESSED, layers=(replace(first, read_by=("layer.1",)), second))
    with pytest.raises(ConfigError, match="layer 'x' reads 2 entries"):
        replace(COMPRESSED, layers=(replace(first, read_by=("x",)), replace(second, read_by=("x",))))


def test_kernel_blocks_hold_whole_states() -> None:
    limits = RequestLimits(4096)
    with pytest.raises(ConfigError, match="kernel_block_size 64 is not a multiple of tokens_per_state 128"):
        next(natural_choices([("a", FOUR), ("b", MANY)], 1 << 30, limits, 64))
    assert next(natural_choices([("a", FOUR), ("b", RING)], 1 << 30, limits, 64)).unit_bytes > 0


UNSUPPORTED = [(HALVES, "tokens_per_state")]


@pytest.mark.parametrize(("spec", "field"), UNSUPPORTED)
@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_cache_manager_rejects_compressed_caches_with_the_field(layout: str, spec: KVCacheSpec, field: str) -> None:
    made = plan(model_of(PLAIN, spec, max_encoder_tokens=100), "1GiB", layout=layout)
    with pytest.raises(UnsupportedModelError, match=rf"the cache manager does not support .*{field}.*only plan"):
        KVCacheManager(made)


def test_attention_that_is_whole_on_each_of_several_ranks_has_columns_of_one_block() -> None:
    whole = plan(model_of(replace(PLAIN, dcp_sharded=False)), "1GiB", dcp=2, layout="reference")
    assert whole.capacity.groups[0].blocks_per_request == 256
    (group,) = KVCacheManager(whole).groups
    assert group.policy.block_size == PLAIN.block_size


def test_cache_manager_takes_indexers_and_packed_states() -> None:
    KVCacheManager(plan(model_of(LATENT, replace(INDEX, tokens_per_state=1)), "1GiB"))
    KVCacheManager(plan(model_of(replace(LATENT, state_content_bytes=656)), "1GiB"))


def test_cache_manager_takes_rates_rings_and_retained_tokens() -> None:
    KVCacheManager(plan(model_of(LATENT, FOUR, MANY, INDEX, RING), "1GiB"))
    KVCacheManager(plan(model_of(LATENT, replace(SLIDING, extra_retained_tokens=1)), "1GiB"))


def test_require_supported_names_spec_feature_and_place() -> None:
    assert FOUR.features == {Feature.RATE, Feature.PACKED}
    assert not PLAIN.features | SLIDING.features | replace(LATENT, alignment=512).features
    require_supported([FOUR, PLAIN], "here", {Feature.RATE, Feature.PACKED})
    with pytest.raises(UnsupportedModelError, match="MLAAttentionSpec: here does not support packed states"):
        require_supported([PLAIN, FOUR], "here", {Feature.RATE})
