"""Layers that keep nothing of the decoder's tokens: cross attention and encoder-only attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
class EncoderPolicy:
    """Blocks for the encoder's output, written once; ``keeps`` says whether there are any.

    With cross attention (``keeps``) the decoder's own prefix is worth nothing without the encoder's output,
    which is not shared: no hit. Encoder-only layers keep nothing and agree to every hit.
    """

    block_size: int
    keeps: bool
    publishes: bool = False
    copies: bool = False
    downward_closed: bool = False
    keeps_state: bool = False
    append_only: bool = False

    def columns(self, num_tokens: T) -> T:
        """None that the decoder's tokens ask for."""
        return num_tokens * 0

    def hit_columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """None."""
        return 0

    def longest_hit(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """Nothing, or whatever the others say."""
        return Hit(0 if self.keeps else search.end_tokens, NONE)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """None: what is hit is held by the row itself."""
        return 0

    def trim(self, hit: Hit, tokens: int) -> Hit:  # noqa: ARG002 - as above
        """Nothing to trim."""
        return Hit(tokens, NONE)

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - as above
        """Never."""
        return held * 0 + NEVER

    def next_publish(self, settled: T) -> T:
        """Never."""
        return settled * 0 + NEVER

    def settled_rows(self, known_tokens: Int64) -> Int64:
        """None."""
        return known_tokens * 0

    def state_column(self, num_tokens: T) -> T:
        """There is no state; the column of the last token stands for it."""
        return self.columns(num_tokens) - 1

    def droppable(self, processed_tokens: T) -> T:
        """Nothing."""
        return processed_tokens * 0

    def is_plain(self, columns: Int64, published: Int64, tokens: RowTokens) -> Bool:  # noqa: ARG002 - as above
        """Always, once the row runs."""
        return np.ones(len(published), np.bool_)

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:  # noqa: ARG002 - as above
        """``ceil(encoder tokens / block_size)`` blocks for a row that has none."""
        take = 0 if row.held else self.most_columns(0, demand.encoder)
        return GroupPlan(0, NONE, take, None, (), _NO_COLUMNS, row.published)

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:  # noqa: ARG002 - as above
        """Nothing."""
        return _NO_COLUMNS, row.published

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - as above
        """The encoder's."""
        return -(-encoder_tokens // self.block_size) if self.keeps else 0
