"""Small KVCacheConfigs: pages just large enough for one digest a token."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.plan.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.specs import FullAttentionSpec

BYTES_PER_TOKEN = 8
"""Of one layer: 1 KV head x (1 key + 1 value element) x 4 bytes."""


def attention_config(
    num_blocks: int, block_sizes: Sequence[int] = (16,), *, layers_per_group: int = 1, gap_bytes: int = 0
) -> KVCacheConfig:
    """Full attention in one group a block size, the null block included in ``num_blocks``.

    Layer j of every group shares tensor j, whose stride is the largest page of any group plus ``gap_bytes``.
    """
    specs = [FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32") for size in block_sizes]
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
