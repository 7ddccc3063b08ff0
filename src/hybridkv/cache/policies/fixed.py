"""Layers whose blocks are all taken when a row begins and stay to its end, whatever it computes.

row     [ b0 | b1 | ... ]       no column is added or dropped; ``contents`` says what the blocks hold

Columns have no keys of the decoder's tokens. Those of an encoder's output get theirs, of its digest, when they are
taken, and a row may begin with the blocks of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.policies.contents import Contents
from hybridkv.cache.policies.values import (
    NEVER,
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


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """block_size: tokens of a block, or between two keys of a request. contents: how many blocks, what can be hit."""

    block_size: int
    contents: Contents
    downward_closed: bool = False
    append_only: bool = False
    rotates: bool = True

    @property
    def publishes(self) -> bool:
        """Whether anything of it can be hit."""
        return self.contents.publishes

    @property
    def copies(self) -> bool:
        """Whether a hit is copied: where there can be one."""
        return self.contents.publishes

    @property
    def keeps_state(self) -> bool:
        """Whether blocks are states, overwritten in place."""
        return self.contents.keeps_state

    @property
    def by_digest(self) -> bool:
        """Whether all blocks of a row, or none, are found under the digest of the encoder's input."""
        return self.contents.by_digest

    def columns(self, num_tokens: T) -> T:
        """What the decoder's tokens ask for, however many they are."""
        return num_tokens * 0 + self.contents.columns

    def hit_columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """None: what is hit is copied."""
        return 0

    def state_column(self, num_tokens: T) -> T:
        """The first one."""
        return num_tokens * 0

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:  # noqa: ARG002 - as above
        """A column each."""
        return position

    def longest_hit(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """What the contents say; columns have no keys."""
        return self.contents.longest_hit(index, search)

    def source(self, index: Index, num_tokens: int) -> int:
        """The block to copy."""
        return self.contents.source(index, num_tokens)

    def trim(self, hit: Hit, tokens: int) -> Hit:  # noqa: ARG002 - as above
        """A prefix of a hit is none: the search must be made anew."""
        return hit

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - as above
        """Never, once the row has its blocks."""
        return held * 0 + NEVER

    def next_publish(self, decided: T) -> T:
        """Never."""
        return decided * 0 + NEVER

    def decided_rows(self, known_tokens: Int64) -> Int64:
        """None."""
        return known_tokens * 0

    def droppable(self, processed_tokens: T) -> T:
        """Nothing."""
        return processed_tokens * 0

    def is_plain(self, columns: Int64, published: Int64, tokens: RowTokens) -> Bool:  # noqa: ARG002 - as above
        """Always, once the row runs."""
        return np.ones(len(published), np.bool_)

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """All blocks at once, for a row that has none: those of ``hit``, or as many new ones."""
        if row.held:
            return GroupPlan(0, NONE, 0, None, (), _NO_COLUMNS, row.published)
        if hit is not None and len(hit):
            return GroupPlan(0, hit, 0, None, (), _NO_COLUMNS, len(hit))
        take = self.contents.blocks(demand.encoder, self.block_size)
        if not (self.contents.by_digest and demand.by_digest):
            return GroupPlan(0, NONE, take, None, (), _NO_COLUMNS, row.published)
        return GroupPlan(0, NONE, take, None, (), np.arange(take), take)

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:  # noqa: ARG002 - as above
        """Nothing."""
        return _NO_COLUMNS, row.published

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - as above
        """All blocks."""
        return self.contents.blocks(encoder_tokens, self.block_size)
