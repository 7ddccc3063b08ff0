"""One policy per layer type: which tokens the columns of a row hold, and which prefixes can be hit.

A policy is frozen and pure. It sees the hashes of a request and the index of its own group, never the pool or other
groups. All policies give the answers below. Token counts may be numbers, or int64 arrays with one count for each row:

    block_size       tokens of a column, over all context parallel ranks
    hits             where a hit may end: copies (inside a block, or at a state, which is then copied), downward_closed
                     (every prefix of a hit is a hit), columns, first_needed, longest, source
    publishing       which full columns get keys; None: no column does
    columns          columns of a row of so many tokens;            most_columns: the most, if all are taken in one step
    next_need        the token count at which a row needs another block, or may drop one
    droppable        leading columns that are no longer read
    is_plain         whether a row needs only new blocks at its end and a key for every decided column
    only_grows       whether a running row is always plain, apart from the columns that it drops
    plan             the missing blocks of a Demand, as a GroupPlan
    stored_columns   columns to publish once so many tokens are computed, and how many are then decided

Policies of recurrent layers also say where states lie: state_column, draft_columns, and rotates (the state of an
accepted draft changes places with column 0; else it is read in place).
"""

from hybridkv.cache.policies.attention import (
    AttentionPolicy,
    BlockHits,
    ChunkSpan,
    FullSpan,
    PublishRule,
    ReplayedHits,
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
    RowFacts,
    Search,
    keeps_tokens,
)
from hybridkv.cache.policies.state import (
    AlignedStatePolicy,
    BlocklessHits,
    EncoderPolicy,
    FixedPolicy,
    PositionHits,
    StateHits,
    UnitStateHits,
)

StatePolicy = AlignedStatePolicy | FixedPolicy
Policy = AttentionPolicy | StatePolicy | EncoderPolicy
Hits = BlockHits | TokenHits | ReplayedHits | StateHits | UnitStateHits | PositionHits | BlocklessHits

__all__ = [
    "NEVER",
    "NEW",
    "UNPUBLISHED",
    "AlignedStatePolicy",
    "AttentionPolicy",
    "BlockHits",
    "BlocklessHits",
    "ChunkSpan",
    "Demand",
    "EncoderPolicy",
    "FixedPolicy",
    "FullSpan",
    "GroupHit",
    "GroupKind",
    "GroupPlan",
    "Hits",
    "Policy",
    "PositionHits",
    "PublishRule",
    "ReplayedHits",
    "RowFacts",
    "Search",
    "Span",
    "StateHits",
    "StatePolicy",
    "TokenHits",
    "UnitStateHits",
    "WindowSpan",
    "keeps_tokens",
]
