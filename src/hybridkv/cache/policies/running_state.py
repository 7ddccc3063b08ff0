"""Recurrent layers whose state stays in its block: in the natural layout, and where the reference layout keeps none.

row          [ running | drafts ... ]       rewritten in place; a hit is copied into it
checkpoint   a block of nobody's row, labelled with its token count (architecture.md, decision 8)
"""

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
class RunningStatePolicy:
    """block_size: tokens between two keys of a request. blocks: the state's and one for each drafted token.

    publishes: whether checkpoints are kept at all (natural layout).
    """

    block_size: int
    blocks: int
    publishes: bool = False
    downward_closed: bool = False
    keeps_state: bool = True
    append_only: bool = False

    @property
    def copies(self) -> bool:
        """Whether a hit is copied: where there can be one."""
        return self.publishes

    def columns(self, num_tokens: T) -> T:
        """Always ``blocks``."""
        return num_tokens * 0 + self.blocks

    def hit_columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """None: what is hit is copied."""
        return 0

    def state_column(self, num_tokens: T) -> T:
        """The first one."""
        return num_tokens * 0

    def longest_hit(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """The last label at or before the end. O(blocks behind it)."""
        if not self.publishes:
            return Hit(0, NONE)
        additions = index.additions
        return Hit(index.label(search.end_tokens, search.alignment), NONE, additions=additions)

    def source(self, index: Index, num_tokens: int) -> int:
        """The checkpoint to copy."""
        return (index.labelled(num_tokens) or 0) if self.publishes else 0

    def trim(self, hit: Hit, tokens: int) -> Hit:  # noqa: ARG002 - as above
        """A state serves its own token count only: the search must be made anew."""
        return hit

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - as above
        """Never, once the row has its blocks."""
        return (held > 0) * NEVER

    def next_publish(self, settled: T) -> T:
        """Never: checkpoints are no columns."""
        return settled * 0 + NEVER

    def settled_rows(self, known_tokens: Int64) -> Int64:
        """None."""
        return known_tokens * 0

    def droppable(self, processed_tokens: T) -> T:
        """Nothing."""
        return processed_tokens * 0

    def is_plain(self, columns: Int64, published: Int64, tokens: RowTokens) -> Bool:  # noqa: ARG002 - as above
        """Always, once the row runs."""
        return np.ones(len(published), np.bool_)

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:  # noqa: ARG002 - as above
        """All blocks at once."""
        return GroupPlan(0, NONE, 0 if row.held else self.blocks, None, (), _NO_COLUMNS, row.published)

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:  # noqa: ARG002 - as above
        """Nothing."""
        return _NO_COLUMNS, row.published

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - as above
        """Always ``blocks``."""
        return self.blocks
