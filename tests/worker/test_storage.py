"""Views of real plans: every layer of every known model in its own bytes, in both layouts and both orders."""

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from hybridkv.errors import CapacityError, ConfigError, UnsupportedModelError
from hybridkv.models import Layer, Model, known_models, read_model
from hybridkv.planner import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, plan
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import (
    AttentionSpec,
    CircularBufferSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from hybridkv.testing.configs import natural_model_config
from hybridkv.worker import PagedStorage, PageOrder, PagePart, parts_of

pytestmark = pytest.mark.filterwarnings("ignore::hybridkv.errors.AssumptionWarning")  # of some models

KINDS = (
    "deepseek-v3",
    "gemma-3-27b",
    "gpt-oss-120b",
    "jamba-1.5-mini",
    "lfm2-1.2b",
    "llama-4-scout",
    "whisper-large-v3",
)
"""One of every kind of layer, with small pages; the others are for thorough runs."""
OF_EACH_TYPE = {
    str(model.config["model_type"]): model.name for model in reversed(known_models()) if model.name not in KINDS
}
MODELS = [*KINDS, *(pytest.param(name, marks=pytest.mark.thorough) for name in OF_EACH_TYPE.values())]

UNSPLIT = "deepseek-v4"
"""128 tokens share a state there, and a page of its windows holds 64: no smaller kernel block holds whole states."""
SPLIT_MODELS = [name for name in MODELS if name != UNSPLIT and getattr(name, "values", None) != (UNSPLIT,)]


@cache
def small_plan(name: str, layout: str, kernel_block_size: int | None) -> KVCacheConfig:
    """Of half again the memory that one request of 32 tokens needs, two tensor parallel ranks."""
    model = read_model(name, tp=2)
    encoder = 32 if model.max_encoder_tokens else None

    def planned(memory: int) -> KVCacheConfig:
        return plan(
            model,
            memory,
            max_model_len=32,
            layout=layout,
            max_encoder_tokens=encoder,
            kernel_block_size=kernel_block_size,
        ).config

    with pytest.raises(CapacityError) as found:
        planned(1)
    needed = re.search(r"needs [^(]*\((\d+) bytes", str(found.value))
    assert needed is not None
    return planned(int(needed[1]) * 3 // 2)


def live_blocks(config: KVCacheConfig) -> Iterator[tuple[int, int]]:
    """(group, block id), dealt so that neighbours belong to different groups wherever they may."""
    groups = range(len(config.groups))
    if config.slabs is None:
        yield from zip(cycle(groups), range(1, min(config.num_blocks, 2 * len(groups) + 2)), strict=False)
        return
    classes = config.slabs.classes
    turns = [cycle(one.groups) for one in classes]
    for slab in range(1, min(config.num_blocks, 2 * len(groups) + 2)):
        one = classes[slab % len(classes)]
        for j in range(min(one.blocks_per_slab, 2 * len(one.groups))):
            yield next(turns[slab % len(classes)]), slab * one.blocks_per_slab + j


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("name", MODELS)
def test_storage_live_blocks_share_no_byte(name: str, layout: str, order: PageOrder) -> None:
    check_live_blocks(small_plan(name, layout, None), order)


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("name", SPLIT_MODELS)
def test_storage_live_kernel_blocks_share_no_byte(name: str, order: PageOrder) -> None:
    check_live_blocks(small_plan(name, "natural", 8), order)


def test_storage_has_no_kernel_block_smaller_than_a_state() -> None:
    with pytest.raises(ConfigError, match="not a multiple of tokens_per_state 128"):
        small_plan(UNSPLIT, "natural", 8)


def check_live_blocks(config: KVCacheConfig, order: PageOrder) -> None:
    """Bytes that two live blocks share are written once, and owned twice."""
    storage = PagedStorage(config, order=order)
    pieces = config.slabs.kernel_blocks if config.slabs else (1,) * len(config.groups)
    owned = 0
    for group, block in live_blocks(config):
        for layer, spec in zip(config.groups[group].layer_names, config.groups[group].layer_specs, strict=True):
            n = pieces[group]
            for view in storage.views[layer]:
                view[block * n : (block + 1) * n].view(torch.uint8).fill_(1)
            owned += spec.content_bytes
    assert int(torch.count_nonzero(storage.arena)) == owned > 0


@pytest.mark.parametrize("name", SPLIT_MODELS)
def test_storage_kernel_blocks_keep_one_stride(name: str) -> None:
    config = small_plan(name, "natural", 8)
    assert config.slabs is not None
    tensors = {layer: tensor for tensor in config.tensors for layer in tensor.shared_by}
    for order in PageOrder:
        storage = PagedStorage(config, order=order)
        for number, group in enumerate(config.groups):
            state = group.spec.keeps is Keeps.STATE
            pieces = 1 if state else group.spec.block_size // 8
            for layer in group.layer_names:
                start = tensors[layer].offset_bytes
                for view in storage.views[layer]:
                    size = view.element_size()
                    assert view.stride(0) * size * pieces == tensors[layer].block_stride_bytes
                    assert view.stride(0) * size % 256 == 0
                    assert view.shape[0] == config.blocks_of(number) * pieces
                    assert view.storage_offset() * size == start
                    start += view[0].numel() * size
                    assert state or 8 in (view.shape[1], view.shape[2] if view.dim() == 4 else 0)


def test_storage_in_heads_first_order_has_heads_first() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, head_size_v=6, dtype="float32")
    page = spec.page_size_bytes
    config = KVCacheConfig(3, (KVCacheTensor(3 * page, ("a",), 0, page),), (KVCacheGroupSpec(("a",), spec),))
    storage = PagedStorage(config, order=PageOrder.HND)
    keys, values = storage.views["a"]
    assert (keys.shape, values.shape) == ((3, 2, 4, 8), (3, 2, 4, 6))
    keys[1] = torch.arange(64.0).reshape(2, 4, 8)  # head 0: tokens 0 .. 3, then head 1
    values[1] = torch.arange(64.0, 112).reshape(2, 4, 6)
    assert storage.arena[page : 2 * page].view(torch.float32).tolist() == list(range(112))
    tokens_first = PagedStorage(config, order=PageOrder.NHD).views["a"]
    assert [view.shape for view in tokens_first] == [(3, 4, 2, 8), (3, 4, 2, 6)]


def test_storage_over_given_memory_shares_its_bytes() -> None:
    config = one_layer(FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32"))
    first = PagedStorage(config)
    second = PagedStorage(config, first.parts, order=first.order, arena=first.arena)
    second.views["a"][0][1] = 3
    assert first.views["a"][0].sum() == 3 * 4 * 2 * 8
    with pytest.raises(ConfigError, match=r"an arena is torch.uint8 of \(\d+,\): give uint8"):
        PagedStorage(config, arena=first.arena[1:])


def one_layer(spec: KVCacheSpec) -> KVCacheConfig:
    page = spec.page_size_bytes
    return KVCacheConfig(3, (KVCacheTensor(3 * page, ("a",), 0, page),), (KVCacheGroupSpec(("a",), spec),))


def test_storage_states_have_one_view_per_tensor() -> None:
    spec = MambaSpec(block_size=16, shapes=((3, 4), (5,)), dtypes=("bfloat16", "float32"), page_size_padded=64)
    convolution, temporal = PagedStorage(one_layer(spec), order=PageOrder.HND).views["a"]
    assert (convolution.shape, convolution.dtype) == ((3, 3, 4), torch.bfloat16)
    assert (temporal.shape, temporal.dtype, temporal.stride()) == ((3, 5), torch.float32, (16, 1))


def test_storage_parts_of_every_spec_match() -> None:
    full = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="fp8")
    assert parts_of(full) == (PagePart((2, 8), torch.float8_e4m3fn),) * 2
    for spec in (
        MLAAttentionSpec(block_size=4, head_size=24, dtype="bfloat16"),
        SlidingWindowMLASpec(block_size=4, head_size=24, dtype="bfloat16", sliding_window=8),
    ):
        assert parts_of(spec) == (PagePart((24,), torch.bfloat16),)
        assert PagedStorage(one_layer(spec), order=PageOrder.HND).views["a"][0].shape == (3, 4, 24)
    assert len(parts_of(EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float16"))) == 2
    with pytest.raises(ConfigError, match="UniformTypeKVCacheSpecs does not define"):
        parts_of(UniformTypeKVCacheSpecs(block_size=4, layers=(("a", full),)))


def test_storage_with_unknown_order_is_rejected() -> None:
    spec = MLAAttentionSpec(block_size=4, head_size=2, dtype="float32")
    with pytest.raises(ConfigError, match="'DHN'"):
        PagedStorage(one_layer(spec), {"a": parts_of(spec)}, order="DHN")  # type: ignore[arg-type]  # the point


# -- two layers of one plan

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, head_size_v=6, dtype="float32")
PARTS = (PagePart((2, 8), torch.float32), PagePart((2, 6), torch.float32))
PAGE = 4 * 2 * 14 * 4


def two_layers(stride: int = PAGE, first: int = 0) -> KVCacheConfig:
    tensors = tuple(
        KVCacheTensor(5 * stride, (name,), first + 5 * stride * i, stride) for i, name in enumerate(("a", "b"))
    )
    return KVCacheConfig(5, tensors, (KVCacheGroupSpec(("a", "b"), SPEC),))


@pytest.mark.parametrize(("stride", "first"), [(PAGE, 0), (PAGE + 64, 0), (3 * PAGE, 128)])
def test_storage_layers_are_strided_views_of_one_arena(stride: int, first: int) -> None:
    storage = PagedStorage(two_layers(stride, first), {"a": PARTS, "b": PARTS})
    assert storage.arena.shape == (first + 10 * stride,)
    number = 0.0
    for name in ("a", "b"):
        keys, values = storage.views[name]
        assert (keys.shape, values.shape) == ((5, 4, 2, 8), (5, 4, 2, 6))
        assert keys.untyped_storage().data_ptr() == storage.arena.untyped_storage().data_ptr()
        for view in (keys, values):
            for block in range(5):
                number += 1
                view[block] = number
    # every byte of every page was written once, at offset + block * stride
    number = 0.0
    for layer in range(2):
        for part, (skip, size) in enumerate(((0, 4 * 2 * 8 * 4), (4 * 2 * 8 * 4, 4 * 2 * 6 * 4))):
            for block in range(5):
                number += 1
                start = first + layer * 5 * stride + block * stride + skip
                held = storage.arena[start : start + size].view(torch.float32)
                assert (held == number).all(), (layer, part, block)


def test_storage_layers_of_different_groups_share_a_tensor() -> None:
    tensor = KVCacheTensor(5 * PAGE, ("a", "b"), 0, PAGE)
    groups = (KVCacheGroupSpec(("a",), SPEC), KVCacheGroupSpec(("b",), SPEC))
    storage = PagedStorage(KVCacheConfig(5, (tensor,), groups), {"a": PARTS, "b": PARTS})
    storage.views["a"][0][3] = 7
    assert (storage.views["b"][0][3] == 7).all()


def test_storage_plan_that_does_not_fit_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'b' has no page parts"):
        PagedStorage(two_layers(), {"a": PARTS})
    half = tuple(PagePart(part.shape, torch.float16) for part in PARTS)
    with pytest.raises(ConfigError, match=f"gives a page {PAGE} bytes, the model keeps {PAGE // 2}"):
        PagedStorage(two_layers(), {"a": PARTS, "b": half})
    with pytest.raises(ConfigError, match="multiples of the 4 bytes"):
        PagedStorage(two_layers(PAGE + 2), {"a": PARTS, "b": PARTS})
    cut = replace(two_layers(), tensors=two_layers().tensors[:1])
    with pytest.raises(ConfigError, match="'b' has no tensor"):
        PagedStorage(cut, {"a": PARTS, "b": PARTS})
    huge = KVCacheConfig(1, (KVCacheTensor(1 << 60, ("a", "b"), 0, PAGE),), two_layers().groups)
    with pytest.raises(ConfigError, match="cannot allocate"):
        PagedStorage(huge, {"a": PARTS, "b": PARTS})


def test_storage_without_parts_follows_the_specs() -> None:
    explicit, by_spec = PagedStorage(two_layers(), {"a": PARTS, "b": PARTS}), PagedStorage(two_layers())
    for name in ("a", "b"):
        for one, other in zip(explicit.views[name], by_spec.views[name], strict=True):
            assert (one.shape, one.stride(), one.storage_offset()) == (
                other.shape,
                other.stride(),
                other.storage_offset(),
            )
            assert one.dtype == other.dtype


# -- compressed caches

BYTES: dict[str, Any] = {"block_size": 16, "head_size": 8, "dtype": "uint8"}
COMPRESSED: dict[str, tuple[AttentionSpec, tuple[tuple[int, ...], ...]]] = {
    "four tokens a state": (MLAAttentionSpec(**BYTES, tokens_per_state=4, alignment=24), ((4, 8),)),
    "two states a token": (
        MLAAttentionSpec(**BYTES | {"dtype": "bfloat16"}, tokens_per_state=Fraction(1, 2)),
        ((32, 8),),
    ),
    "indexer": (MLAAttentionSpec(**BYTES, cache_role=SparseCacheRole.INDEXER), ((16, 8),)),
    "packed": (MLAAttentionSpec(**BYTES, tokens_per_state=8, state_content_bytes=13, alignment=32), ((2, 13),)),
    "packed window": (SlidingWindowMLASpec(**BYTES, sliding_window=9, state_content_bytes=13), ((16, 13),)),
    "packed heads": (
        FullAttentionSpec(**BYTES, num_kv_heads=4, num_head_slots=2, state_content_bytes=20),
        ((16, 2, 20),),
    ),
    "head slots": (
        FullAttentionSpec(**BYTES, num_kv_heads=1, head_size_v=6, num_head_slots=3),
        ((16, 3, 8), (16, 3, 6)),
    ),
    "compressed heads": (FullAttentionSpec(**BYTES, num_kv_heads=2, tokens_per_state=4), ((4, 2, 8), (4, 2, 8))),
    "ring": (CircularBufferSpec(**BYTES | {"dtype": "float16"}, num_kv_heads=1, head_size_v=0), ((16, 1, 8),)),
    "ring with values": (CircularBufferSpec(**BYTES, num_kv_heads=1), ((16, 1, 8), (16, 1, 8))),
}
"""Specs, and the shapes of a block in each of their views, worked out by hand."""


@pytest.mark.parametrize("name", COMPRESSED)
def test_storage_of_compressed_cache_has_rows_for_its_states(name: str) -> None:
    spec, shapes = COMPRESSED[name]
    views = PagedStorage(one_layer(spec)).views["a"]
    assert [view.shape[1:] for view in views] == [torch.Size(shape) for shape in shapes]
    assert sum(view[0].numel() * view.element_size() for view in views) == spec.content_bytes
    assert {view.stride(0) * view.element_size() for view in views} == {spec.page_size_bytes}
    assert (views[0].dtype == torch.uint8) == (spec.dtype == "uint8")


def test_storage_splits_compressed_pages_into_kernel_blocks() -> None:
    specs = [replace(COMPRESSED["packed"][0], alignment=None), COMPRESSED["four tokens a state"][0]]
    storage = PagedStorage(natural_model_config(4, specs, [2, 1], kernel_blocks=[2, 4]))
    assert storage.views["group0.layer0"][0].shape == (4 * 2 * 2, 1, 13)
    assert storage.views["group1.layer0"][0].shape == (4 * 4, 1, 8)


OF_2026: dict[str, dict[str, AttentionSpec]] = {
    "several rates, a window and a ring": {
        "c4": replace(COMPRESSED["four tokens a state"][0], state_content_bytes=13),
        "c8": COMPRESSED["packed"][0],
        "indexer": MLAAttentionSpec(**BYTES, tokens_per_state=4, cache_role=SparseCacheRole.INDEXER),
        "window": COMPRESSED["packed window"][0],
        "state": SlidingWindowMLASpec(**BYTES | {"block_size": 8, "dtype": "float32"}, sliding_window=8),
        "ring": COMPRESSED["ring"][0],
    },
    "tokens and indexers": {
        "latent": MLAAttentionSpec(**BYTES | {"dtype": "bfloat16"}),
        "indexer": COMPRESSED["indexer"][0],
    },
}


def compressed_plan(name: str, layout: str, kernel: int | None) -> KVCacheConfig:
    """Two layers of each kind, and memory for about four requests."""
    layers = [Layer(f"{i}.{key}", spec, i) for i in range(2) for key, spec in OF_2026[name].items()]
    model = Model(name, name, tuple(layers), 64, 10, "bfloat16", 1, 1, 16)
    return plan(model, 64 << 10, max_model_len=64, layout=layout, kernel_block_size=kernel).config


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize(("layout", "kernel"), [("reference", None), ("natural", None), ("natural", 8)])
@pytest.mark.parametrize("name", OF_2026)
def test_storage_live_compressed_blocks_share_no_byte(
    name: str, layout: str, kernel: int | None, order: PageOrder
) -> None:
    config = compressed_plan(name, layout, kernel)
    assert (config.packed_block_bytes is not None) == (layout == "reference" and len(OF_2026[name]) > 2)
    check_live_blocks(config, order)


def test_storage_of_an_unknown_feature_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.worker.pages._SUPPORTED", frozenset())
    with pytest.raises(UnsupportedModelError, match=r"the worker's paged storage does not support .*tokens_per_state"):
        PagedStorage(one_layer(COMPRESSED["four tokens a state"][0]))
