"""A model and a memory budget -> KVCacheConfig: groups, tensors, blocks, and what they hold.

reference   Model -> grouping (types, group size) -> layout (tensors, num_blocks) -> KVCacheConfig -> capacity
natural     Model -> packing (groups, k, slab bytes) -> natural (tensors, slabs)   -> KVCacheConfig -> capacity
                                                                    Plan = model + config + limits <-> JSON
"""

from hybridkv.planner.capacity import Capacity, GroupCapacity, capacity_of
from hybridkv.planner.comparison import LayoutFacts, compare_layouts
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, SlabClass, SlabLayout
from hybridkv.planner.document import plan_from_json, plan_to_json, read_plan, read_plan_from
from hybridkv.planner.plan import Plan, plan

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
]
