"""Small KVCacheConfigs: pages just large enough for one digest a token, or one digest a state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridkv.extra_keys import EncoderInput
from hybridkv.planner.config import ALIGNMENT_BYTES, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.planner.natural import natural_config, slab_layout
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from hybridkv.units import ceil_div, round_up

ENCODERS = (EncoderInput("audio a", 3), EncoderInput("audio b", 3), EncoderInput("audio c", 7))
"""What the encoders of small models are given."""

BYTES_PER_TOKEN = 8
"""Of one layer: 1 KV head x (1 key + 1 value element) x 4 bytes."""


def attention_config(
    num_blocks: int, block_sizes: Sequence[int] = (16,), *, layers_per_group: int = 1, gap_bytes: int = 0
) -> KVCacheConfig:
    """Full attention in one group a block size, the null block included in ``num_blocks``."""
    specs = [full_spec(size) for size in block_sizes]
    return _config(num_blocks, specs, layers_per_group, gap_bytes)


def model_config(
    num_blocks: int, specs: Sequence[KVCacheSpec], *, layers_per_group: int = 1, gap_bytes: int = 0
) -> KVCacheConfig:
    """One group a spec, all pages padded to the largest, the null block included in ``num_blocks``."""
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
    """One group a spec, in ``num_slabs`` slabs, the null slab included; each of the smallest size that holds them.

    kernel_blocks: parts of a block of every group, by default one.
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
    """Layer j of every group shares tensor j, whose stride is the largest page plus ``gap_bytes``."""
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


# -- specs whose page holds BYTES_PER_TOKEN a token, or a state of as many


def full_spec(block_size: int) -> FullAttentionSpec:
    """Full attention."""
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32")


def sink_spec(block_size: int, sink_tokens: int) -> SinkFullAttentionSpec:
    """Full attention behind a sink."""
    return SinkFullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32", sink_len=sink_tokens
    )


def window_spec(block_size: int, window: int) -> SlidingWindowSpec:
    """A token and the ``window`` - 1 before it."""
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window)


def chunk_spec(block_size: int, chunk: int) -> ChunkedLocalAttentionSpec:
    """The tokens of a chunk."""
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32", attention_chunk_size=chunk
    )


def state_spec(block_size: int, drafts: int = 0, mode: str = "align") -> MambaSpec:
    """A recurrent state, and one for each draft."""
    return MambaSpec(
        block_size=block_size, shapes=((2,),), dtypes=("float32",), num_speculative_blocks=drafts, cache_mode=mode
    )


def cross_spec(block_size: int) -> CrossAttentionSpec:
    """The encoder's output."""
    return CrossAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32")


def encoder_only_spec(block_size: int) -> EncoderOnlyAttentionSpec:
    """A layer that keeps nothing."""
    return EncoderOnlyAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32")


def small_spec(kind: str, block_size: int, number: int = 0) -> KVCacheSpec:
    """A group by the name of its kind. number: tokens of the window, chunk or sink, or drafts of a state."""
    makers: dict[str, Callable[[], KVCacheSpec]] = {
        "full": lambda: full_spec(block_size),
        "sink": lambda: sink_spec(block_size, number),
        "window": lambda: window_spec(block_size, number),
        "chunk": lambda: chunk_spec(block_size, number),
        "state": lambda: state_spec(block_size, number),
        "scratch": lambda: state_spec(block_size, number, "none"),
        "cross": lambda: cross_spec(block_size),
        "encoder_only": lambda: encoder_only_spec(block_size),
    }
    return makers[kind]()


def small_numbers(kind: str, block_size: int) -> tuple[int, ...]:
    """Numbers that are worth trying with ``kind``."""
    return {
        "window": (2, 3, 4, 5, 8, 9, 13, 20),
        "chunk": (1, 2, 3, 8, block_size, 2 * block_size, 3 * block_size, 4 * block_size),
        "state": (0, 0, 0, 1, 2),
        "scratch": (0, 1, 2),
        "sink": (1, block_size, 2 * block_size),
    }.get(kind, (0,))
