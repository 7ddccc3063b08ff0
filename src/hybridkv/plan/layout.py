"""Where pages lie: the reference layout, one tensor for each layer position.

    tensor j   [ block 0 | block 1 | ... | block N-1 ]     shared by layer j of every group

A block belongs to one group at a time, so layers of different groups never meet in a tensor.
"""

from __future__ import annotations

from hybridkv.plan.config import KVCacheConfig, KVCacheTensor
from hybridkv.plan.grouping import Grouping


def block_bytes(grouping: Grouping) -> int:
    """Bytes that one more block takes: a page in every tensor."""
    return grouping.group_size * grouping.page_size_bytes


def reference_layout(grouping: Grouping, num_blocks: int) -> KVCacheConfig:
    """``num_blocks`` blocks, the null block included, in tensors that follow each other in the arena."""
    page = grouping.page_size_bytes
    size = page * num_blocks
    tensors = tuple(
        KVCacheTensor(
            size=size,
            shared_by=tuple(group.layer_names[j] for group in grouping.groups if j < len(group.layer_names)),
            offset_bytes=j * size,
            block_stride_bytes=page,
        )
        for j in range(grouping.group_size)
    )
    return KVCacheConfig(num_blocks, tensors, grouping.groups)
