"""Turn a model and a memory budget into a KVCacheConfig: groups, tensors, blocks, and the capacity of all.

reference   Model -> grouping (types, group size) -> layout (tensors, num_blocks) -> KVCacheConfig -> capacity
natural     Model -> packing (groups, k, slab bytes) -> natural (tensors, slabs)   -> KVCacheConfig -> capacity
                                                                    Plan = model + config + limits <-> JSON
"""

from hybridkv.planner.config import (
    Capacity,
    GroupCapacity,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlabClass,
    SlabLayout,
    capacity_of,
)
from hybridkv.planner.document import plan_from_json, plan_to_json, read_plan, read_plan_from
from hybridkv.planner.plan import LayoutFacts, Plan, compare_layouts, plan, tier_plan

__all__ = [
    "Capacity",
    "GroupCapacity",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheTensor",
    "LayoutFacts",
    "Plan",
    "SlabClass",
    "SlabLayout",
    "capacity_of",
    "compare_layouts",
    "plan",
    "plan_from_json",
    "plan_to_json",
    "read_plan",
    "read_plan_from",
    "tier_plan",
]
