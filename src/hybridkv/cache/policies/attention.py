"""Attention layers: a column holds the keys and values of its tokens, written once and shared freely."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridkv.cache.policies.publish_rule import PublishRule
from hybridkv.cache.policies.spans import BlockHits, Span, TokenHits
from hybridkv.cache.policies.values import (
    NEW,
    NO_COLUMNS,
    NONE,
    Bool,
    Demand,
    GroupPlan,
    Int32,
    Int64,
    RowFacts,
    T,
)


@dataclass(frozen=True, slots=True)
class AttentionPolicy:
    """Column i holds tokens i * block_size .. (i + 1) * block_size - 1; columns before the span are null.

    span: what is read. publishing: what is published. hits: where they may end.
    """

    block_size: int
    span: Span
    publishing: PublishRule
    hits: BlockHits | TokenHits
    states: None = None

    def columns(self, num_tokens: T) -> T:
        """Columns that a row of ``num_tokens`` tokens has, null ones included. A number or an int64 array."""
        return -(-num_tokens // self.block_size)

    def next_need(self, held: T, dropped: T) -> T:
        """The token count at which a row needs another block, or may drop one. Numbers or int64 arrays."""
        need = held * self.block_size + 1
        if self.span.downward_closed:  # all is read
            return need
        drop = self.span.drop_tokens(dropped + 1, self.block_size) + 1
        return need + (drop - need) * (drop < need)

    def droppable(self, processed_tokens: T) -> T:
        """Leading columns that are read no longer. A number or an int64 array."""
        if self.span.downward_closed:
            return processed_tokens * 0
        return self.span.first_live_token(processed_tokens) // self.block_size

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:  # noqa: ARG002 - same
        """Whether a row needs no more than ``columns`` new blocks at its end and a key for every decided column."""
        return published >= 0 if self.publishing.keeps_all else self.publishing.decided(tokens[2]) <= published

    @property
    def only_grows(self) -> bool:
        """Unless some full columns are passed over."""
        return self.publishing.keeps_all

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
        publish = self.publishing.columns(max(first, drop), decided, demand.edges) if decided > first else NO_COLUMNS
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
