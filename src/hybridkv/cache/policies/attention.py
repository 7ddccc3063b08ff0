"""Attention layers: a column holds the keys and values of its tokens, written once and shared freely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridkv.cache.policies.publish_rule import PublishRule
from hybridkv.cache.policies.spans import Span
from hybridkv.cache.policies.values import (
    NEW,
    NONE,
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

_NO_COLUMNS: Int64 = np.empty(0, np.int64)


class Finder(Protocol):
    """Where hits may end: a span finds them at the edges of blocks, TokenHits at any token (``ends_inside``)."""

    @property
    def ends_inside(self) -> bool:
        """Whether a hit may end inside a block."""
        ...

    def longest_hit(self, index: Index, keys: Sequence[bytes], search: Search, block_size: int) -> Hit:
        """The longest cached prefix; keys: one a full column."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPolicy:
    """Column i holds tokens i * block_size .. (i + 1) * block_size - 1; columns before the span are null.

    span: what is read. publishing: what is published. finder: where hits may end.
    """

    block_size: int
    span: Span
    publishing: PublishRule
    finder: Finder
    publishes: bool = True
    keeps_state: bool = False
    rotates: bool = False
    by_digest: bool = False

    @property
    def copies(self) -> bool:
        """Whether a hit may end inside a block, which is copied then."""
        return self.finder.ends_inside

    @property
    def downward_closed(self) -> bool:
        """Whether a prefix of a hit is a hit."""
        return self.span.downward_closed

    @property
    def append_only(self) -> bool:
        """Whether a row only ever grows, by new blocks, and every full column is published."""
        return self.span.downward_closed and self.publishing.keeps_all

    def columns(self, num_tokens: T) -> T:
        """Columns that a row of ``num_tokens`` tokens has, null ones included. A number or an int64 array."""
        return -(-num_tokens // self.block_size)

    def hit_columns(self, num_tokens: int) -> int:
        """Columns of a hit of ``num_tokens`` tokens, null ones included."""
        return num_tokens // self.block_size

    def longest_hit(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """The longest cached prefix; keys: one a full column."""
        return self.finder.longest_hit(index, keys, search, self.block_size)

    def source(self, index: Index, num_tokens: int) -> int:
        """The block to copy the last column of a hit from, where it is used in part and read; else 0."""
        column, rest = divmod(num_tokens, self.block_size)
        return (
            index.source(column, rest)
            if rest and self.span.first_needed(num_tokens, self.block_size) < num_tokens
            else 0
        )

    def trim(self, hit: Hit, tokens: int) -> Hit:
        """The first ``tokens`` of a hit, where that is a hit too (downward closed)."""
        return hit._replace(tokens=tokens, blocks=hit.blocks[: tokens // self.block_size])

    def next_need(self, held: T, dropped: T) -> T:
        """The token count at which a row needs another block, or may drop one. Numbers or int64 arrays."""
        need, drop = held * self.block_size + 1, self.span.drop_tokens(dropped + 1, self.block_size) + 1
        return need + (drop - need) * (drop < need)

    def next_publish(self, decided: T) -> T:
        """The token count at which more than ``decided`` leading columns can be published or passed over."""
        return self.publishing.next_tokens(decided)

    def decided_rows(self, known_tokens: Int64) -> Int64:
        """Leading columns that many rows of ``known_tokens`` tokens can publish or pass over."""
        return self.publishing.decided_rows(known_tokens)

    def state_column(self, num_tokens: T) -> T:
        """There is no state; the column of the last token stands for it."""
        return self.columns(num_tokens) - 1

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:  # noqa: ARG002 - there is no state
        """The column of the token."""
        return self.state_column(certain + position)

    def droppable(self, processed_tokens: T) -> T:
        """Leading columns that are read no longer. A number or an int64 array."""
        return self.span.first_live_token(processed_tokens) // self.block_size

    def is_plain(self, columns: Int64, published: Int64, tokens: RowTokens) -> Bool:  # noqa: ARG002 - same
        """Whether rows need no more than ``columns`` new blocks at their end and a key for every decided column."""
        if self.publishing.keeps_all:
            return np.ones(len(published), np.bool_)
        return self.publishing.decided_rows(tokens.known) <= published

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """What is missing for ``demand``; see GroupPlan."""
        columns = self.columns(demand.total)
        if row.held:
            drop = min(max(row.dropped, self.droppable(demand.processed)), row.held)
            reuse, append, take = NONE, None, max(columns - row.held, 0)
        else:
            drop = 0
            reuse, append, take = self._begin(NONE if hit is None else hit, columns, demand)
        first = max(row.published, len(reuse))
        decided = max(first, self.publishing.decided(demand.known))
        publish = self.publishing.columns(max(first, drop), decided, demand.edges) if decided > first else _NO_COLUMNS
        return GroupPlan(drop, reuse, take, append, (), publish, decided)

    def _begin(self, hit: Int32, columns: int, demand: Demand) -> tuple[Int32, Int32 | None, int]:
        """Columns of a new row: hits, null ones that nobody reads (of an external load), new ones."""
        live, take = self.droppable(demand.computed), max(columns - len(hit), 0)
        if live and hit[:live].any():
            hit = hit.copy()
            hit[:live] = 0
        skip = min(live - len(hit), take)
        if skip <= 0:
            return hit, None, take
        append = np.full(take, NEW, np.int32)
        append[:skip] = 0
        return hit, append, take - skip

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:
        """Columns to publish when ``computed_tokens`` are there at last, and how many are decided then."""
        decided = max(row.published, self.publishing.decided(computed_tokens))
        return self.publishing.columns(row.published, decided, edges), decided

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """Blocks that ``num_tokens`` tokens hold at most, all in one step."""
        return self.columns(num_tokens)
