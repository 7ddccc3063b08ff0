"""One policy per layer type: what the columns of a row mean, answered with values.

A policy is frozen and pure. It sees the hashes of a request and the index of its own group, never the pool or the other
groups. Every policy has these answers; numbers of tokens may be int64 arrays, one for each row:

    block_size       tokens of a column, over all context parallel ranks
    hits             where a hit may end: copies (inside a block, or at a state, which is then copied), downward_closed
                     (a prefix of a hit is a hit), columns, first_needed, longest, source
    publishing       which full columns get keys; None: none
    columns          that a row of so many tokens has;              most_columns: at most, all in one step
    next_need        the token count at which a row needs another block, or may drop one
    droppable        leading columns that are read no longer
    is_plain         whether a row needs no more than new blocks at its end and a key for every decided column
    only_grows       whether a running row is always plain, but for the columns that it drops
    plan             what is missing for a Demand, as a GroupPlan
    stored_columns   columns to publish when so many tokens are there at last, and how many are decided then

Policies of recurrent layers also answer where states lie: state_column, draft_columns, and rotates (an accepted state
changes places with column 0; else it is read in place).
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
    RowFacts,
    Search,
    inner_of,
    keeps_tokens,
)
from hybridkv.cache.policies.state import (
    AlignedStatePolicy,
    AnyHits,
    EncoderPolicy,
    NoHits,
    PositionHits,
    RunningStatePolicy,
    StateHits,
)

StatePolicy = AlignedStatePolicy | RunningStatePolicy
Policy = AttentionPolicy | AlignedStatePolicy | RunningStatePolicy | EncoderPolicy
Hits = BlockHits | TokenHits | StateHits | PositionHits | NoHits | AnyHits

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
    "NoHits",
    "Policy",
    "PositionHits",
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
