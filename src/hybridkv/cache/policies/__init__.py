"""One policy per layer type: what its blocks mean, answered with values.

A policy is frozen and pure. It sees the hashes of a request and the index of its own group, never the
pool, the other groups or the coordinator.
"""

from hybridkv.cache.policies.full import FullAttentionPolicy
from hybridkv.cache.policies.policy import Policy, policy_of
from hybridkv.cache.policies.values import GroupPlan, Hit, Index

__all__ = ["FullAttentionPolicy", "GroupPlan", "Hit", "Index", "Policy", "policy_of"]
