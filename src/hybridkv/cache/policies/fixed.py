"""Layers whose blocks are all taken when a row begins and stay to its end, whatever it computes.

    row     [ b0 | b1 | ... ]       no column is added or dropped; ``contents`` says how many there are

Columns have no keys of the decoder's tokens. Those of an encoder's output get theirs, of its digest, when they are
taken, and a row may begin with the blocks of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridkv.cache.policies.state import RunningStates
from hybridkv.cache.policies.values import (
    NEVER,
    NO_COLUMNS,
    NONE,
    Bool,
    Demand,
    GroupPlan,
    Hit,
    Index,
    Int32,
    Int64,
    RowFacts,
    Search,
    T,
)


class Contents(Protocol):
    """What the blocks of a row hold. columns: how many every row has for the decoder's tokens.

    by_digest: whether all blocks of a row, or none, are found under the digest of the encoder's input.
    """

    @property
    def columns(self) -> int:
        """See the class."""
        ...

    @property
    def by_digest(self) -> bool:
        """See the class."""
        ...

    def blocks(self, encoder_tokens: int, block_size: int) -> int:
        """Blocks that a row takes when it begins."""
        ...


@dataclass(frozen=True, slots=True)
class RunningState:
    """A recurrent state: in the natural layout, and where the reference layout keeps none.

        row          [ running | drafts ... ]       rewritten in place; a hit is copied into it
        checkpoint   a block of nobody's row, labelled with its token count (docs/contracts.md, 8)

    columns: the state's and one for each drafted token.
    """

    columns: int
    by_digest: bool = False

    def blocks(self, encoder_tokens: int, block_size: int) -> int:  # noqa: ARG002 - the answer of contents
        """Always as many."""
        return self.columns


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """Cross attention: keys and values of the encoder's output, written once.

    by_digest: natural layout: shared by requests of one encoder input, whatever their prompts. A prefix hit needs
    nothing of it, since the decoder's own keys carry the digest; what is missing is encoded again.
    """

    by_digest: bool = False
    columns: int = 0

    def blocks(self, encoder_tokens: int, block_size: int) -> int:
        """``ceil(encoder tokens / block_size)``."""
        return -(-encoder_tokens // block_size)


@dataclass(frozen=True, slots=True)
class Nothing:
    """Encoder-only attention: no block."""

    by_digest: bool = False
    columns: int = 0

    def blocks(self, encoder_tokens: int, block_size: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class LabelHits:
    """Checkpoints: states in blocks of nobody's row, labelled with their token counts (docs/contracts.md, 8)."""

    copies: bool = True
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None: what is hit is copied."""
        return 0

    def first_needed(self, num_tokens: int) -> int:
        """None: a state is no block of tokens."""
        return num_tokens

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """The last label at or before the end. O(blocks behind it)."""
        additions = index.additions
        return Hit(index.label(search.end_tokens, search.alignment), NONE, additions=additions)

    def source(self, index: Index, num_tokens: int) -> int:
        """The checkpoint."""
        return index.labelled(num_tokens) or 0


@dataclass(frozen=True, slots=True)
class NoHits:
    """States that are not kept, and encoder outputs that are not shared: the others' prefixes are worth nothing."""

    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None."""
        return 0

    def first_needed(self, num_tokens: int) -> int:
        """None."""
        return num_tokens

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """None."""
        return Hit(0, NONE)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class AnyHits:
    """Layers that keep nothing, or whose blocks are looked up apart: every hit of the others is agreed to."""

    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None."""
        return 0

    def first_needed(self, num_tokens: int) -> int:
        """None."""
        return num_tokens

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:  # noqa: ARG002 - as above
        """Whatever the others say."""
        return Hit(search.end_tokens, NONE)

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """block_size: tokens of a block, or between two keys of a request. contents: how many blocks."""

    block_size: int
    contents: Contents
    hits: LabelHits | NoHits | AnyHits
    states: RunningStates | None = None
    publishing: None = None
    only_grows: bool = False

    def columns(self, num_tokens: T) -> T:
        """What the decoder's tokens ask for, however many they are."""
        return num_tokens * 0 + self.contents.columns

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - the answer of a policy
        """Never, once the row has its blocks."""
        return held * 0 + NEVER

    def droppable(self, processed_tokens: T) -> T:
        """Nothing."""
        return processed_tokens * 0

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:  # noqa: ARG002 - as above
        """Always, once the row runs."""
        return published >= 0

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """All blocks at once, for a row that has none: those of ``hit``, or as many new ones."""
        if row.held:
            return GroupPlan(0, NONE, 0, None, (), NO_COLUMNS, row.published)
        if hit is not None and len(hit):
            return GroupPlan(0, hit, 0, None, (), NO_COLUMNS, len(hit))
        take = self.contents.blocks(demand.encoder, self.block_size)
        if not (self.contents.by_digest and demand.by_digest):
            return GroupPlan(0, NONE, take, None, (), NO_COLUMNS, row.published)
        return GroupPlan(0, NONE, take, None, (), np.arange(take), take)

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:  # noqa: ARG002 - as above
        """Nothing."""
        return NO_COLUMNS, row.published

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - as above
        """All blocks."""
        return self.contents.blocks(encoder_tokens, self.block_size)
