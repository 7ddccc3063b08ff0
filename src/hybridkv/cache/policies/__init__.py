"""One policy per layer type: what its blocks mean, answered with values.

A policy is frozen and pure. It sees the hashes of a request and the index of its own group, never the
pool, the other groups or the coordinator.
"""

from hybridkv.cache.policies.attention import AttentionPolicy
from hybridkv.cache.policies.contents import EncoderOutput, Nothing, RunningState
from hybridkv.cache.policies.exact import TokenHits
from hybridkv.cache.policies.fixed import FixedPolicy
from hybridkv.cache.policies.policy import (
    GroupKind,
    Policy,
    alignment_of,
    check_retention,
    natural_policy_of,
    policy_of,
)
from hybridkv.cache.policies.publish_rule import PublishRule
from hybridkv.cache.policies.spans import ChunkSpan, FullSpan, WindowSpan
from hybridkv.cache.policies.state import AlignedStatePolicy
from hybridkv.cache.policies.values import (
    NEVER,
    NEW,
    UNPUBLISHED,
    Demand,
    GroupPlan,
    Hit,
    Index,
    RowFacts,
    RowTokens,
    Search,
)

__all__ = [
    "NEVER",
    "NEW",
    "UNPUBLISHED",
    "AlignedStatePolicy",
    "AttentionPolicy",
    "ChunkSpan",
    "Demand",
    "EncoderOutput",
    "FixedPolicy",
    "FullSpan",
    "GroupKind",
    "GroupPlan",
    "Hit",
    "Index",
    "Nothing",
    "Policy",
    "PublishRule",
    "RowFacts",
    "RowTokens",
    "RunningState",
    "Search",
    "TokenHits",
    "WindowSpan",
    "alignment_of",
    "check_retention",
    "natural_policy_of",
    "policy_of",
]
