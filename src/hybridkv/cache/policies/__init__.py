"""One policy per layer type: what its blocks mean, answered with values.

A policy is frozen and pure. It sees the hashes of a request and the index of its own group, never the
pool or the other groups.
"""

from hybridkv.cache.policies.attention import AttentionPolicy
from hybridkv.cache.policies.fixed import (
    AnyHits,
    EncoderOutput,
    FixedPolicy,
    LabelHits,
    NoHits,
    Nothing,
    RunningState,
)
from hybridkv.cache.policies.policy import GroupKind, Hits, Policy, inner_of, keeps_tokens
from hybridkv.cache.policies.publish_rule import PublishRule
from hybridkv.cache.policies.spans import BlockHits, ChunkSpan, FullSpan, Span, TokenHits, WindowSpan
from hybridkv.cache.policies.state import AlignedStatePolicy, AlignedStates, RunningStates, StateColumns, StateHits
from hybridkv.cache.policies.values import (
    NEVER,
    NEW,
    UNPUBLISHED,
    Demand,
    GroupPlan,
    Hit,
    Index,
    RowFacts,
    Search,
)

__all__ = [
    "NEVER",
    "NEW",
    "UNPUBLISHED",
    "AlignedStatePolicy",
    "AlignedStates",
    "AnyHits",
    "AttentionPolicy",
    "BlockHits",
    "ChunkSpan",
    "Demand",
    "EncoderOutput",
    "FixedPolicy",
    "FullSpan",
    "GroupKind",
    "GroupPlan",
    "Hit",
    "Hits",
    "Index",
    "LabelHits",
    "NoHits",
    "Nothing",
    "Policy",
    "PublishRule",
    "RowFacts",
    "RunningState",
    "RunningStates",
    "Search",
    "Span",
    "StateColumns",
    "StateHits",
    "TokenHits",
    "WindowSpan",
    "inner_of",
    "keeps_tokens",
]
