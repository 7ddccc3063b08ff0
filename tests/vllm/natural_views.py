"""What kernels of each kind are given in the natural layout, on GPUs too: ``make test-vllm-engine`` runs it.

Views of plans of the natural layout, made by vLLM itself in every order of a page that its GPU kernels may name: shapes
and strides are those that kernels go by, and what is written through the view of one block of one layer is read through
no other, and is all that a copy of that block brings. Nothing here runs on a GPU.

python natural_views.py        prints what is wrong, then how many views were looked at; nothing wrong: exit code 0
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from hybridkv.planner import SlabLayout
from hybridkv.vllm.natural import Options, natural_plan
from hybridkv.vllm.natural_config import NaturalConfig, natural_config
from hybridkv.vllm.natural_worker import Arena, NaturalGPUWorker
from hybridkv.vllm.specs import layer_specs

SIZE, MEMORY, LENGTH = 16, 8 << 20, 512
HEADS: Mapping[str, Any] = {"block_size": SIZE, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=64)
LATENT = MLAAttentionSpec(**{**HEADS, "num_kv_heads": 1, "head_size": 576}, head_size_v=0)
STATES = MambaSpec(
    block_size=LENGTH, shapes=((3, 96), (4, 16, 32)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=1 << 14
)
MODELS: Mapping[str, Sequence[KVCacheSpec]] = {
    "full": (FULL,),
    "windows": (FULL, WINDOW),
    "latents": (LATENT,),
    "states": (STATES,),
    "hybrid": (STATES, FULL),
}


@dataclass
class Theirs:
    """Of vLLM's KVCacheConfig, what ours is made of: groups of three layers each."""

    kv_cache_groups: Sequence[Any]
    kv_cache_tensors: Sequence[Any] = field(default_factory=lambda: [SimpleNamespace(size=MEMORY)])
    num_blocks: int = 1


@dataclass(frozen=True)
class Bound:
    """views: [B, H, N, C] of every layer, as vLLM binds them. arena: over the same bytes."""

    config: NaturalConfig
    slabs: SlabLayout
    views: Mapping[str, torch.Tensor]
    arena: Arena

    def specs(self) -> Iterator[tuple[str, int, Any]]:
        """Each layer, the class of its blocks, its spec."""
        for number, group in enumerate(self.config.kv_cache_groups):
            of = self.slabs.classes.index(self.slabs.class_of(number))
            yield from ((layer, of, group.kv_cache_spec) for layer in group.layer_names)


def bound(specs: Sequence[KVCacheSpec], layout: KVCacheLayout) -> Bound:
    theirs = Theirs(
        [
            SimpleNamespace(
                layer_names=[f"layers.{3 * number + i}" for i in range(3)], kv_cache_spec=spec, is_eagle_group=False
            )
            for number, spec in enumerate(specs)
        ]
    )
    made = natural_plan(theirs, Options(SIZE), name="views", max_model_len=LENGTH, max_in_flight_tokens=LENGTH).config
    if made.slabs is None:
        raise AssertionError("a plan of the natural layout has slabs")
    config = natural_config(dict(layer_specs(theirs)), made)
    views = allocate_kv_cache(config, torch.device("cpu"), layout)
    storage = torch.empty(0, dtype=torch.uint8)
    storage.set_(next(iter(views.values())).untyped_storage())
    return Bound(config, made.slabs, views, Arena(storage, made))


def layouts() -> list[KVCacheLayout]:
    """Those that the worker for GPUs lets vLLM choose among."""
    return [one for one in KVCacheLayout if NaturalGPUWorker.packs(one)]


def shapes(made: Bound, layout: KVCacheLayout) -> Iterator[str]:
    """Keys and values, latents and states as kernels take them out of the views."""
    for layer, of, spec in made.specs():
        view, apart = made.views[layer], made.slabs.classes[of].block_bytes
        blocks = made.slabs.num_slabs * made.slabs.classes[of].blocks_per_slab
        if isinstance(spec, MambaSpec):
            kept = SimpleNamespace(get_state_shape=lambda s=spec: s.shapes, get_state_dtype=lambda s=spec: s.dtypes)
            MambaBase.bind_kv_cache(kept, view)
            for state, shape, dtype in zip(kept.kv_cache, spec.shapes, spec.dtypes, strict=True):
                inner = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
                yield from unlike(layer, state, (blocks, *shape), (apart // dtype.itemsize, *inner))
            continue
        size, heads, wide = spec.dtype.itemsize, spec.num_kv_heads, spec.head_size + spec.head_size_v
        tokens_first = layout.value.index(3) < layout.value.index(2)
        token, head = (heads * wide, wide) if tokens_first else (wide, SIZE * wide)
        keys = view.transpose(1, 2)[..., : spec.head_size]
        wanted = (blocks, SIZE, heads, spec.head_size)
        yield from unlike(layer, keys, wanted, (apart // size, token, head, 1))


def unlike(layer: str, view: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[str]:
    """Strides of axes of one element say nothing."""
    found = tuple(view.shape)
    if found != shape:
        yield f"{layer}: shape {found}, not {shape}"
        return
    given = view.stride()
    if any(n > 1 and mine != theirs for n, mine, theirs in zip(shape, given, strides, strict=True)):
        yield f"{layer}: strides {given}, not {strides}"
    if view.data_ptr() % 16:
        yield f"{layer}: begins {view.data_ptr() % 16} bytes behind a multiple of 16"


def overlaps(made: Bound) -> Iterator[str]:
    """Every block of every layer of a group is written with a number of its own; all are read back."""
    for number, group in enumerate(made.config.kv_cache_groups):
        one = made.slabs.class_of(number)
        of, blocks = made.slabs.classes.index(one), made.slabs.num_slabs * one.blocks_per_slab
        views = {layer: made.views[layer].view(torch.int32) for layer in group.layer_names}
        marks = torch.arange(blocks * len(views), dtype=torch.int32).view(len(views), blocks, 1, 1, 1)
        for view, mine in zip(views.values(), marks, strict=True):
            view.copy_(mine.expand_as(view))
        for (layer, view), mine in zip(views.items(), marks, strict=True):
            if not torch.equal(view, mine.expand_as(view)):
                yield f"{layer}: a block of it is read and written as another's"
        for source, target in pairwise((1, blocks - 1, blocks // 2)):
            before = {layer: view.clone() for layer, view in views.items()}
            made.arena.copy(np.array([(of, source, target)], np.int32))
            for layer, view in views.items():
                before[layer][target] = before[layer][source]
                if not torch.equal(view, before[layer]):
                    yield f"{layer}: a copy of block {source} is not block {target}, or changed more"


def kernels() -> Iterator[str]:
    """Which of vLLM's kernels for GPUs are given an order, and which are refused."""
    for backend, fits in ((FlashAttentionBackend, True), (TritonAttentionBackend, True), (FlexAttentionBackend, False)):
        named = get_supported_kv_cache_layouts([backend])
        if any(map(NaturalGPUWorker.packs, named)) is not fits:
            yield f"{backend.__name__} names {named}"


def main() -> int:
    wrong, looked = list(kernels()), 0
    for name, specs in MODELS.items():
        for layout in layouts():
            made = bound(specs, layout)
            wrong += [f"{name}, {layout.name}: {one}" for one in (*shapes(made, layout), *overlaps(made))]
            looked += len(made.views)
    sys.stdout.write("".join(f"{one}\n" for one in wrong) + f"{looked} views in orders {[o.name for o in layouts()]}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
