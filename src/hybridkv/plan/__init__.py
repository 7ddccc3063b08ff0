"""A model and a memory budget -> KVCacheConfig: groups, tensors, blocks, and what they hold.

reference   Model -> grouping (types, group size) -> layout (tensors, num_blocks) -> KVCacheConfig -> capacity
natural     Model -> packing (groups, k, slab bytes) -> natural (tensors, slabs)   -> KVCacheConfig -> capacity
                                                                    Plan = model + config + limits <-> JSON
"""

from hybridkv.plan.capacity import Capacity, GroupCapacity, capacity_of
from hybridkv.plan.comparison import LayoutFacts, compare_layouts
from hybridkv.plan.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.plan.document import plan_from_json, plan_to_json, read_plan, read_plan_from
from hybridkv.plan.planner import Plan, make_plan, plan
from hybridkv.plan.slabs import SlabClass, SlabLayout

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
    "make_plan",
    "plan",
    "plan_from_json",
    "plan_to_json",
    "read_plan",
    "read_plan_from",
]
