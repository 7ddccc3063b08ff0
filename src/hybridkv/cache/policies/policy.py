"""What every policy answers, and which one a spec has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridkv.cache.policies.attention import AttentionPolicy
from hybridkv.cache.policies.contents import EncoderOutput, Nothing, RunningState
from hybridkv.cache.policies.exact import TokenHits
from hybridkv.cache.policies.fixed import FixedPolicy
from hybridkv.cache.policies.publish_rule import PublishRule
from hybridkv.cache.policies.spans import ChunkSpan, FullSpan, Span, WindowSpan
from hybridkv.cache.policies.state import AlignedStatePolicy
from hybridkv.cache.policies.values import (
    Bool,
    Demand,
    GroupPlan,
    Hit,
    Index,
    Int32,
    Int64,
    RowFacts,
    RowTokens,
    Search,
    T,
)
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


class Policy(Protocol):
    """See hybridkv.cache.policies.attention and .state for the meaning of each answer."""

    @property
    def block_size(self) -> int:
        """Tokens of a column, over all context parallel ranks."""
        ...

    @property
    def publishes(self) -> bool:
        """Whether columns ever get keys; a group that never publishes has no say in the common alignment."""
        ...

    @property
    def copies(self) -> bool:
        """Whether a hit may end inside a block, or at a state, which is copied then."""
        ...

    @property
    def downward_closed(self) -> bool:
        """Whether a prefix of a hit is a hit."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether blocks are states, overwritten in place, instead of tokens."""
        ...

    @property
    def rotates(self) -> bool:
        """Whether an accepted state changes places with column 0; else it is read where it is."""
        ...

    @property
    def by_digest(self) -> bool:
        """Whether all blocks of a row, or none, are found under the digest of the encoder's input."""
        ...

    @property
    def append_only(self) -> bool:
        """Whether a row only ever grows, by new blocks, and every full column is published."""
        ...

    def columns(self, num_tokens: T) -> T:
        """Columns that a row of ``num_tokens`` tokens has. A number or an int64 array."""
        ...

    def hit_columns(self, num_tokens: int) -> int:
        """Columns of a hit of ``num_tokens`` tokens."""
        ...

    def longest_hit(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """The longest cached prefix; keys: one a full column."""
        ...

    def source(self, index: Index, num_tokens: int) -> int:
        """The block to copy the end of a hit of ``num_tokens`` from; 0 where nothing is copied."""
        ...

    def trim(self, hit: Hit, tokens: int) -> Hit:
        """The first ``tokens`` of a hit, where a prefix of it is one."""
        ...

    def next_need(self, held: T, dropped: T) -> T:
        """The token count at which a row needs another block, or may drop one."""
        ...

    def next_publish(self, decided: T) -> T:
        """The token count at which more than ``decided`` leading columns can be published or passed over."""
        ...

    def decided_rows(self, known_tokens: Int64) -> Int64:
        """Leading columns that many rows of ``known_tokens`` tokens can publish or pass over."""
        ...

    def state_column(self, num_tokens: T) -> T:
        """The column that holds the state after ``num_tokens`` tokens, for groups that keep one."""
        ...

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:
        """Where the state behind the ``position``-th draft goes in a step of ``drafts``, int64[n]; 0: behind none.

        certain: tokens that are no drafts. For groups that keep a state.
        """
        ...

    def droppable(self, processed_tokens: T) -> T:
        """Leading columns that are read no longer. A number or an int64 array."""
        ...

    def is_plain(self, columns: Int64, published: Int64, tokens: RowTokens) -> Bool:
        """Whether rows need no more than ``columns`` new blocks at their end and a key for every decided column."""
        ...

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """What is missing for ``demand``. hit: blocks to adopt, for a row that holds nothing."""
        ...

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:
        """Columns to publish when ``computed_tokens`` are there at last, and how many are decided then."""
        ...

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens hold at most."""
        ...


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What a group is, apart from the others: its spec, whether it drops for EAGLE, its context parallel ranks.

    checkpoints: in the natural layout, whether states are kept for reuse; None in the reference layout, where the
    spec's cache_mode says so.
    """

    spec: KVCacheSpec
    drops: bool = False
    ranks: int = 1
    checkpoints: bool | None = None

    @property
    def inner(self) -> KVCacheSpec:
        """The spec of the layers, also where their pages differ (one type: all keep the same tokens)."""
        return self.spec.layers[0][1] if isinstance(self.spec, UniformTypeKVCacheSpecs) else self.spec

    @property
    def block_size(self) -> int:
        """Tokens of a column: attention is spread over the ranks, states and encoder outputs are whole on each."""
        return self.spec.block_size * (self.ranks if self.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW} else 1)

    @property
    def keeps_state(self) -> bool:
        """Whether its blocks are states."""
        return self.spec.keeps is Keeps.STATE

    @property
    def num_drafts(self) -> int | None:
        """Of how many drafts of a row its states can be kept; None where no state is kept at all."""
        return self.inner.num_speculative_blocks if isinstance(self.inner, MambaSpec) else None

    @property
    def by_digest(self) -> bool:
        """Whether its blocks are found under the digest of the encoder's input: cross attention, natural layout."""
        return self.spec.keeps is Keeps.ENCODER and self.checkpoints is not None

    @property
    def sink_blocks(self) -> int:
        """Blocks of learned keys and values that belong to the layers, not to a request."""
        return self.spec.reserved_blocks(self.ranks)

    @property
    def publishes(self) -> bool:
        """Whether anything of it can be hit."""
        if isinstance(self.inner, MambaSpec):
            return self.inner.cache_mode == "align" if self.checkpoints is None else self.checkpoints
        return self.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}


def alignment_of(kinds: Sequence[GroupKind], *, exact: bool = False) -> int:
    """Tokens of which every hit is a multiple: the least common multiple of the blocks that can be hit; 1 if ``exact``.

    In the natural layout states have no blocks of tokens.
    """
    if exact:
        return 1
    natural = any(kind.checkpoints is not None for kind in kinds)
    return math.lcm(*(kind.block_size for kind in kinds if kind.publishes and not (natural and kind.keeps_state)))


def policy_of(kind: GroupKind, alignment: int, retention: int | None = None) -> Policy:
    """The policy of one group. UnsupportedModelError for a kind of layer that has none.

    alignment: of all groups. retention: tokens between the windows and states kept, 0 for those of each
    request's own edges alone, None for all.
    """
    spec, size = kind.inner, kind.block_size
    match spec:
        case FullAttentionSpec():
            return AttentionPolicy(size, FullSpan(), PublishRule(size, alignment, past=int(kind.drops)), FullSpan())
        case SlidingWindowSpec():
            window, past = WindowSpan(spec.sliding_window), int(kind.drops)
            publishing = PublishRule(size, alignment, window.columns_read(size) + past, past, retention)
            return AttentionPolicy(size, window, publishing, window)
        case ChunkedLocalAttentionSpec():
            chunk = ChunkSpan(spec.attention_chunk_size)
            return AttentionPolicy(size, chunk, PublishRule(size, alignment, past=int(kind.drops)), chunk)
        case MambaSpec(cache_mode="align"):
            need = None if retention is None else 1
            return AlignedStatePolicy(
                size, spec.num_speculative_blocks, PublishRule(size, alignment, need, 0, retention)
            )
        case MambaSpec():
            return FixedPolicy(size, RunningState(1 + spec.num_speculative_blocks))
        case CrossAttentionSpec() | EncoderOnlyAttentionSpec():
            return FixedPolicy(size, EncoderOutput() if isinstance(spec, CrossAttentionSpec) else Nothing())
        case _:
            raise UnsupportedModelError(
                f"{type(spec).__name__} has no cache policy: see hybridkv.specs for those that do"
            )


def natural_policy_of(kind: GroupKind, alignment: int, hash_block: int, *, exact: bool) -> Policy:
    """The policy of one group in the natural layout; every full block is published. Errors as policy_of.

    alignment: of hits. hash_block: tokens between two keys of a request. exact: hits end at any token.
    """
    spec, size = kind.inner, kind.block_size
    span: Span
    match spec:
        case FullAttentionSpec():
            span = FullSpan()
        case SlidingWindowSpec():
            span = WindowSpan(spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            span = ChunkSpan(spec.attention_chunk_size)
        case MambaSpec():
            return FixedPolicy(hash_block, RunningState(1 + spec.num_speculative_blocks, kind.publishes))
        case CrossAttentionSpec():
            return FixedPolicy(size, EncoderOutput(kind.by_digest))
        case _:
            return policy_of(kind, alignment)
    return AttentionPolicy(size, span, PublishRule(size, size), TokenHits(span) if exact else span)


def check_retention(retention: int | None, alignment: int) -> None:
    """ConfigError for an interval that is no multiple of the common alignment."""
    if retention is not None and (retention < 0 or retention % alignment):
        raise ConfigError(
            f"retention must be None, 0 or a multiple of the common alignment of {alignment} tokens, got {retention}"
        )
