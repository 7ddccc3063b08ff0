"""One policy per layer type: what its blocks mean, answered with values.

A policy is frozen and pure. It sees the hashes of a request and the index of its own group, never the
pool or the other groups.
"""

from hybridkv.cache.policies.attention import (
    AttentionPolicy,
    BlockHits,
    ChunkSpan,
    FullSpan,
    PublishRule,
    Span,
    TokenHits,
    WindowSpan,
)
from hybridkv.cache.policies.policy import (
    NEVER,
    NEW,
    UNPUBLISHED,
    Demand,
    GroupHit,
    GroupKind,
    GroupPlan,
    Hits,
    Index,
    Policy,
    RowFacts,
    Search,
    StatePolicy,
    inner_of,
    keeps_tokens,
)
from hybridkv.cache.policies.state import (
    AlignedStatePolicy,
    AnyHits,
    EncoderPolicy,
    LabelHits,
    NoHits,
    RunningStatePolicy,
    StateHits,
)

__all__ = [
    "NEVER",
    "NEW",
    "UNPUBLISHED",
    "AlignedStatePolicy",
    "AnyHits",
    "AttentionPolicy",
    "BlockHits",
    "ChunkSpan",
    "Demand",
    "EncoderPolicy",
    "FullSpan",
    "GroupHit",
    "GroupKind",
    "GroupPlan",
    "Hits",
    "Index",
    "LabelHits",
    "NoHits",
    "Policy",
    "PublishRule",
    "RowFacts",
    "RunningStatePolicy",
    "Search",
    "Span",
    "StateHits",
    "StatePolicy",
    "TokenHits",
    "WindowSpan",
    "inner_of",
    "keeps_tokens",
]
