from dataclasses import replace

import pytest
import torch

from hybridkv.errors import ConfigError
from hybridkv.planner import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.specs import FullAttentionSpec, MLAAttentionSpec
from hybridkv.worker import PagedStorage, PagePart

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, head_size_v=6, dtype="float32")
PARTS = (PagePart((2, 8), torch.float32), PagePart((2, 6), torch.float32))
PAGE = 4 * 2 * 14 * 4


def config(stride: int = PAGE, first: int = 0) -> KVCacheConfig:
    tensors = tuple(
        KVCacheTensor(5 * stride, (name,), first + 5 * stride * i, stride) for i, name in enumerate(("a", "b"))
    )
    return KVCacheConfig(5, tensors, (KVCacheGroupSpec(("a", "b"), SPEC),))


@pytest.mark.parametrize(("stride", "first"), [(PAGE, 0), (PAGE + 64, 0), (3 * PAGE, 128)])
def test_every_layer_gets_its_strided_views_of_one_arena(stride: int, first: int) -> None:
    storage = PagedStorage(config(stride, first), {"a": PARTS, "b": PARTS})
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


def test_layers_of_different_groups_share_a_tensor() -> None:
    tensor = KVCacheTensor(5 * PAGE, ("a", "b"), 0, PAGE)
    groups = (KVCacheGroupSpec(("a",), SPEC), KVCacheGroupSpec(("b",), SPEC))
    storage = PagedStorage(KVCacheConfig(5, (tensor,), groups), {"a": PARTS, "b": PARTS})
    storage.views["a"][0][3] = 7
    assert (storage.views["b"][0][3] == 7).all()


def test_mla_pages_in_half_precision() -> None:
    spec = MLAAttentionSpec(block_size=4, head_size=24, dtype="bfloat16")
    tensor = KVCacheTensor(3 * spec.page_size_bytes, ("a",), 0, spec.page_size_bytes)
    parts = (PagePart((1, 16), torch.bfloat16), PagePart((1, 8), torch.bfloat16))
    storage = PagedStorage(KVCacheConfig(3, (tensor,), (KVCacheGroupSpec(("a",), spec),)), {"a": parts})
    latent, rotary = storage.views["a"]
    rotary[2] = 1
    assert (latent.shape, rotary.shape, float(latent.abs().sum())) == ((3, 4, 1, 16), (3, 4, 1, 8), 0.0)


def test_plans_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="'b' has no page parts"):
        PagedStorage(config(), {"a": PARTS})
    half = tuple(PagePart(part.shape, torch.float16) for part in PARTS)
    with pytest.raises(ConfigError, match=f"gives a page {PAGE} bytes, the model keeps {PAGE // 2}"):
        PagedStorage(config(), {"a": PARTS, "b": half})
    with pytest.raises(ConfigError, match="multiples of the 4 bytes"):
        PagedStorage(config(PAGE + 2), {"a": PARTS, "b": PARTS})
    cut = replace(config(), tensors=config().tensors[:1])
    with pytest.raises(ConfigError, match="'b' has no tensor"):
        PagedStorage(cut, {"a": PARTS, "b": PARTS})
    huge = KVCacheConfig(1, (KVCacheTensor(1 << 60, ("a", "b"), 0, PAGE),), config().groups)
    with pytest.raises(ConfigError, match="cannot allocate"):
        PagedStorage(huge, {"a": PARTS, "b": PARTS})


def test_without_a_layout_the_specs_say_what_pages_hold() -> None:
    explicit, by_spec = PagedStorage(config(), {"a": PARTS, "b": PARTS}), PagedStorage(config())
    for name in ("a", "b"):
        for one, other in zip(explicit.views[name], by_spec.views[name], strict=True):
            assert (one.shape, one.stride(), one.storage_offset()) == (
                other.shape,
                other.stride(),
                other.storage_offset(),
            )
            assert one.dtype == other.dtype
