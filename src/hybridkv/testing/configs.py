"""Small KVCacheConfigs, for pages that hold one digest for each token, or one digest for each state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

from hybridkv.extra_keys import EncoderInput
from hybridkv.planner.config import ALIGNMENT_BYTES, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.planner.natural import natural_config, slab_layout
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from hybridkv.units import ceil_div, round_up

ENCODERS = (EncoderInput("audio a", 3), EncoderInput("audio b", 3), EncoderInput("audio c", 7))
"""Inputs for the encoders of small models, with 3 to 7 tokens of output."""


def attention_config(
    num_blocks: int, block_sizes: Sequence[int] = (16,), *, layers_per_group: int = 1, gap_bytes: int = 0
) -> KVCacheConfig:
    """Return a config in the reference layout with one group of full attention for each block size.

    Args:
        num_blocks: blocks of the pool, the null block included.
        block_sizes: tokens of a block, one entry for each group.
        layers_per_group: layers of each group.
        gap_bytes: unused bytes after each block of a layer.
    """
    specs = [full_spec(size) for size in block_sizes]
    return _config(num_blocks, specs, layers_per_group, gap_bytes)


def model_config(
    num_blocks: int, specs: Sequence[KVCacheSpec], *, layers_per_group: int = 1, gap_bytes: int = 0
) -> KVCacheConfig:
    """Return a config in the reference layout with one group for each spec; pages are padded to the largest.

    Args:
        num_blocks: blocks of the pool, the null block included.
        specs: the spec of each group.
        layers_per_group: layers of each group.
        gap_bytes: unused bytes after each block of a layer.
    """
    page = max(spec.content_bytes for spec in specs)
    padded = [spec if spec.content_bytes == page else replace(spec, page_size_padded=page) for spec in specs]
    return _config(num_blocks, padded, layers_per_group, gap_bytes)


def natural_model_config(
    num_slabs: int,
    specs: Sequence[KVCacheSpec],
    blocks_per_slab: Sequence[int],
    *,
    layers_per_group: int = 1,
    kernel_blocks: Sequence[int] = (),
) -> KVCacheConfig:
    """Return a config in the natural layout with one group for each spec, in slabs of the smallest possible size.

    Args:
        num_slabs: slabs of the pool, the null slab included.
        specs: the spec of each group.
        blocks_per_slab: blocks in a slab, one entry for each group.
        layers_per_group: layers of each group.
        kernel_blocks: kernel blocks in a block, one entry for each group; 1 by default.
    """
    parts = tuple(kernel_blocks) or (1,) * len(specs)
    groups = tuple(
        KVCacheGroupSpec(tuple(f"group{g}.layer{j}" for j in range(layers_per_group)), spec)
        for g, spec in enumerate(specs)
    )
    unit = math.lcm(*(k * part * ALIGNMENT_BYTES for k, part in zip(blocks_per_slab, parts, strict=True)))
    needs = [
        k * part * layers_per_group * round_up(ceil_div(spec.page_size_bytes, part), ALIGNMENT_BYTES)
        for k, part, spec in zip(blocks_per_slab, parts, specs, strict=True)
    ]
    return natural_config(groups, slab_layout(round_up(max(needs), unit), num_slabs, blocks_per_slab, parts))


def _config(num_blocks: int, specs: Sequence[KVCacheSpec], layers_per_group: int, gap_bytes: int) -> KVCacheConfig:
    """Return a config where layer j of every group shares tensor j, with strides of the largest page and the gap."""
    names = [tuple(f"group{g}.layer{j}" for j in range(layers_per_group)) for g in range(len(specs))]
    stride = max(spec.page_size_bytes for spec in specs) + gap_bytes
    tensors = tuple(
        KVCacheTensor(
            size=stride * num_blocks,
            shared_by=tuple(layers[j] for layers in names),
            offset_bytes=j * stride * num_blocks,
            block_stride_bytes=stride,
        )
        for j in range(layers_per_group)
    )
    groups = tuple(KVCacheGroupSpec(layers, spec) for layers, spec in zip(names, specs, strict=True))
    return KVCacheConfig(num_blocks, tensors, groups)


# -- specs with 8 bytes for a token (1 KV head, 1 key and 1 value of float32), or 8 bytes for a state

_HEAD: Final[dict[str, Any]] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float32"}


def full_spec(block_size: int) -> FullAttentionSpec:
    """Return a spec of full attention."""
    return FullAttentionSpec(block_size=block_size, **_HEAD)


def rate_spec(block_size: int, rate: int | Fraction) -> MLAAttentionSpec:
    """Return a spec of latents with ``rate`` tokens in a state of 8 bytes."""
    return MLAAttentionSpec(block_size=block_size, head_size=2, dtype="float32", tokens_per_state=rate)


def ring_spec(tokens: int, pools: int = 0) -> CircularBufferSpec:
    """Return a spec of a ring of ``tokens`` tokens, for groups of ``pools``; 0 for groups that nobody knows."""
    return CircularBufferSpec(
        block_size=tokens, num_kv_heads=1, head_size=2, head_size_v=0, dtype="float32", pools=pools
    )


def window_spec(block_size: int, window: int) -> SlidingWindowSpec:
    """Return a spec of attention to a token and the ``window`` - 1 tokens before it."""
    return SlidingWindowSpec(block_size=block_size, **_HEAD, sliding_window=window)


def chunk_spec(block_size: int, chunk: int) -> ChunkedLocalAttentionSpec:
    """Return a spec of attention inside chunks of ``chunk`` tokens."""
    return ChunkedLocalAttentionSpec(block_size=block_size, **_HEAD, attention_chunk_size=chunk)


def state_spec(block_size: int, drafts: int = 0, mode: str = "align") -> MambaSpec:
    """Return a spec of a recurrent state, with one more state for each of ``drafts`` draft tokens."""
    return MambaSpec(
        block_size=block_size, shapes=((2,),), dtypes=("float32",), num_speculative_blocks=drafts, cache_mode=mode
    )


def cross_spec(block_size: int) -> CrossAttentionSpec:
    """Return a spec of cross attention, which reads the output of an encoder."""
    return CrossAttentionSpec(block_size=block_size, **_HEAD)
