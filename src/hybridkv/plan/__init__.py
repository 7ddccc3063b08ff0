"""A model and a memory budget -> KVCacheConfig: groups, tensors, blocks, and what they hold.

Model -> grouping (types, group size) -> layout (tensors, num_blocks) -> KVCacheConfig -> capacity
                                                             Plan = model + config + limits <-> JSON
"""

from hybridkv.plan.capacity import Capacity, GroupCapacity, capacity_of
from hybridkv.plan.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.plan.document import plan_from_json, plan_to_json, read_plan
from hybridkv.plan.planner import Plan, make_plan, plan

__all__ = [
    "Capacity",
    "GroupCapacity",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheTensor",
    "Plan",
    "capacity_of",
    "make_plan",
    "plan",
    "plan_from_json",
    "plan_to_json",
    "read_plan",
]
