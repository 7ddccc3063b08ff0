"""Recurrent layers: where their states lie, and the columns of the reference layout's.

A state is overwritten in place; so sharing one is copying it.

    align    columns as in attention, of ``block_size`` tokens; all null but those that hold a state:

             [ . . . S | . D ]       S: read by the next step      D: where that step leaves its state
             [ . . . . . D x x ]     x: one block for each drafted token

Layers whose blocks are all taken when a row begins and stay to its end, whatever it computes.

    row     [ b0 | b1 | ... ]       no column is added or dropped; ``contents`` says how many there are

Columns have no keys of the decoder's tokens. Those of an encoder's output get theirs, of its digest, when they are
taken, and a row may begin with the blocks of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridkv.cache.policies.attention import PublishRule
from hybridkv.cache.policies.policy import (
    NEVER,
    NEW,
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


@dataclass(frozen=True, slots=True)
class RunningStates:
    """Natural layout, and states that are not kept: one in column 0, rewritten in place, and one a draft behind it."""

    rotates: bool = True

    def column(self, num_tokens: T) -> T:
        """The first one."""
        return num_tokens * 0

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:  # noqa: ARG002 - as StateColumns
        """A column each."""
        return position


@dataclass(frozen=True, slots=True)
class AlignedStates:
    """Reference layout: a state lies in the column of its last token. block_size: tokens of a column."""

    block_size: int
    rotates: bool = False

    def column(self, num_tokens: T) -> T:
        """That of the last token."""
        return -(-num_tokens // self.block_size) - 1

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:
        """Behind the column of the step's end, but for a state at an edge: that goes where it can be published.

        Fewer drafts than ``block_size``, so there is one edge at most, E:

            S, E before it         [ E | certain | draft | .. ]        S: the column of the last draft
            S, which ends at E     [ .. | E | draft | certain ]        the last one's place is the first one's
        """
        size, last = self.block_size, self.column(certain + drafts)
        tokens = certain + position
        given_up = (position == 0) & ((certain + drafts) % size == 0)
        free = np.where(given_up, last + drafts, last + position)
        return np.where(tokens % size == 0, tokens // size - 1, free)


@dataclass(frozen=True, slots=True)
class StateHits:
    """The states of the reference layout, each in the column that it ends."""

    block_size: int
    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:
        """All null but the last."""
        return num_tokens // self.block_size

    def first_needed(self, num_tokens: int) -> int:
        """None: a state is no block of tokens."""
        return num_tokens

    def longest(self, index: Index, keys: Sequence[bytes], search: Search) -> Hit:
        """The right-most state at or before the end. O(boundaries behind it)."""
        size, step = self.block_size, search.alignment // self.block_size
        edge = min(search.end_tokens // size, len(keys)) // step * step
        missing: list[int] = []
        while edge > 0:
            block = index.get(keys[edge - 1])
            if block is not None:
                blocks = np.zeros(edge, np.int32)
                blocks[-1] = block
                return Hit(edge * size, blocks, tuple(missing), blocks[-1:])
            missing.append((edge - 1) * size)
            edge -= step
        return Hit(0, NONE, tuple(missing))

    def source(self, index: Index, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None: what is hit is held by the row itself."""
        return 0


@dataclass(frozen=True, slots=True)
class AlignedStatePolicy:
    """States are kept where chunks end, and can be hit where that is a multiple of ``block_size``.

    drafts: blocks for drafted tokens. publishing: which boundaries are published.
    """

    block_size: int
    drafts: int
    publishing: PublishRule
    hits: StateHits
    states: AlignedStates
    only_grows: bool = False

    def columns(self, num_tokens: T) -> T:
        """Columns that a row of ``num_tokens`` tokens has, null ones and drafts' included."""
        return -(-num_tokens // self.block_size) + self.drafts

    def next_need(self, held: T, dropped: T) -> T:
        """The token count at which a row needs another block, or may drop one."""
        need, drop = (held - self.drafts) * self.block_size + 1, (dropped + 1) * self.block_size + 2
        return need + (drop - need) * (drop < need)

    def droppable(self, processed_tokens: T) -> T:
        """Leading columns that are read no longer: those before the state of ``processed_tokens``."""
        return (processed_tokens - 1) * (processed_tokens > 0) // self.block_size

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:
        """Whether a row needs at most one block, and a key for no column but the one that ``known`` ends."""
        if self.drafts or not self.publishing.keeps_every_edge:
            return published < 0
        computed, end, known = tokens
        decided, size = self.publishing.decided(known), self.block_size
        ends_here = (decided == published + 1) & (known % size == 0) & (end - known < size)
        goes_on = (computed % size > 0) | (computed <= known)  # else a state of tokens that are not known yet
        plain: Bool | bool = (columns <= 1) & ((decided <= published) | ends_here) & goes_on
        return plain

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """What is missing for ``demand.end`` tokens; look-ahead is ignored, the drafts' blocks are there."""
        if row.held:
            drop = min(max(row.dropped, self.droppable(demand.processed)), row.held)
            reuse, held = NONE, row.held
            behind = range(held - self.drafts, held)  # the columns of the drafts so far
        else:
            drop, reuse = 0, NONE if hit is None else hit
            if demand.computed > demand.hit and len(reuse):
                reuse = reuse.copy()
                reuse[: self.droppable(demand.computed)] = 0
            held, behind = len(reuse), range(0)
        state = self.states.column(demand.end)
        vacate = tuple(column for column in behind if column < state) if state + self.drafts >= held else ()
        append = self._append(held, state, demand if not row.held else None)
        take = 0 if append is None else int(np.count_nonzero(append == NEW)) - len(vacate)
        stored = self._stored(row, demand)
        first = max(row.published, len(reuse))
        decided = max(first, self.publishing.decided(demand.known))
        publish = self._columns(stored, max(first, drop), decided, demand.edges)
        pending = tuple(tokens for tokens in stored if tokens > decided * self.block_size)
        return GroupPlan(drop, reuse, take, append, vacate, publish, decided, pending)

    def _append(self, held: int, state: int, begin: Demand | None) -> Int32 | None:
        """Columns held .. state + drafts: null but for the states, the drafts' and that of an external load."""
        count = state + self.drafts + 1 - held
        if count <= 0:
            return None
        append = np.full(count, NEW, np.int32)
        append[: max(state - held, 0)] = 0
        if begin is not None and begin.computed > begin.hit:
            append[self.states.column(begin.computed) - held] = NEW
        return append

    def _stored(self, row: RowFacts, demand: Demand) -> list[int]:
        """Multiples of the block whose states are or will be stored in their own columns, ascending.

        The label decides, never the position: where a chunk ended, what accepted drafts crossed, what an
        external load brought. A boundary inside a chunk is none of them.
        """
        tokens = {*row.pending, *self._crossed(row, demand.computed)}
        if not row.held and demand.computed > demand.hit:
            tokens.add(demand.computed)
        if demand.end - demand.certain < self.block_size:
            tokens.add(demand.certain)
        return sorted(one for one in tokens if one and one % self.block_size == 0)

    def _crossed(self, row: RowFacts, computed_tokens: int) -> tuple[int, ...]:
        """The boundary where the last chunk ended, or that its accepted drafts crossed (docs/contracts.md, 8)."""
        boundary = computed_tokens // self.block_size * self.block_size
        return (boundary,) if row.held and boundary >= row.label else ()

    def _columns(self, tokens: Sequence[int], first: int, decided: int, edges: tuple[int, ...]) -> Int64:
        """Columns first .. decided-1 that end at one of ``tokens``, as far as retention keeps them."""
        ends = [one // self.block_size for one in tokens]
        columns = np.array([end - 1 for end in ends if first < end <= decided], np.int64)
        return columns[self.publishing.mask(columns, edges)] if len(columns) else NO_COLUMNS

    def stored_columns(self, row: RowFacts, computed_tokens: int, edges: tuple[int, ...]) -> tuple[Int64, int]:
        """Columns to publish when ``computed_tokens`` are there at last, and how many are decided then."""
        decided = max(row.published, self.publishing.decided(computed_tokens))
        stored = sorted({*row.pending, *self._crossed(row, computed_tokens)})
        return self._columns(stored, row.published, decided, edges), decided

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """Blocks that ``num_tokens`` tokens hold at most."""
        return self.columns(num_tokens)
