"""Where pages lie: the reference layout, one tensor for each layer position.

    tensor j   [ block 0 | block 1 | ... | block N-1 ]     shared by layer j of every group

A block belongs to one group at a time, so layers of different groups never meet in a tensor. Pages are equal
but for a group of a uniform type, which is alone: its tensors have the page of their layer.
"""

from __future__ import annotations

from hybridkv.planner.config import KVCacheConfig, KVCacheTensor
from hybridkv.planner.grouping import Grouping


def reference_layout(grouping: Grouping, num_blocks: int) -> KVCacheConfig:
    """``num_blocks`` blocks, the null block included, in tensors that follow each other in the arena."""
    tensors = []
    offset_bytes = 0
    for j, page in enumerate(grouping.page_bytes):
        shared_by = tuple(group.layer_names[j] for group in grouping.groups if j < len(group.layer_names))
        tensors.append(KVCacheTensor(page * num_blocks, shared_by, offset_bytes, page))
        offset_bytes += page * num_blocks
    return KVCacheConfig(num_blocks, tuple(tensors), grouping.groups)
