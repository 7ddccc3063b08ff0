"""Recurrent layers and encoder outputs: where states lie, and the columns of the reference layout.

A state is overwritten in place, so it is shared by copying it. In the reference layout (``align``) a row has columns of
``block_size`` tokens, all null except those that hold a state:

    step n       [ . . . S | . D ]       S: read by the next step      D: the step leaves its state here
    with drafts  [ . . . . . D x x ]     x: one block for each drafted token

In the natural layout (``FixedPolicy``) the running state has one column, and states at resume points lie in blocks
outside all rows. Rings of raw keys are kept like states. Encoder outputs are similar: all their blocks are taken when a
row begins and stay to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.index import PrefixIndex
from hybridkv.cache.policies.attention import PublishRule
from hybridkv.cache.policies.policy import (
    NEVER,
    NEW,
    NO_COLUMNS,
    NONE,
    Bool,
    Demand,
    GroupHit,
    GroupPlan,
    Int32,
    Int64,
    RowFacts,
    Search,
    T,
)
from hybridkv.request import Request


@dataclass(frozen=True, slots=True)
class PositionHits:
    """Hits of checkpoints: states and rings outside all rows, each found at its position (docs/contracts.md, 8)."""

    copies: bool = True
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """Return 0: the state of a hit is copied, so the row adopts no column."""
        return 0

    def first_needed(self, num_tokens: int) -> int:
        """Return ``num_tokens``: a state needs no block of earlier tokens."""
        return num_tokens

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """Search for the last state at or before the end. O(blocks after it)."""
        additions = index.additions
        return GroupHit(index.last_state(request, search.end_tokens, search.alignment), NONE, additions=additions)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:
        """Return the block of the checkpoint; 0 where none is needed."""
        return index.state_at(request, num_tokens) or 0


@dataclass(frozen=True, slots=True)
class BlocklessHits:
    """The answer of groups that adopt no block of a prefix: they accept every hit of the other groups, or reject all.

    Layers that keep nothing, or whose blocks are looked up separately, accept. States that are not kept, and encoder
    outputs that are not shared, reject: no prefix can be resumed.

    Attributes:
        accepts: Whether hits of the other groups are accepted.
    """

    accepts: bool
    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """Return 0."""
        return 0

    def first_needed(self, num_tokens: int) -> int:
        """Return ``num_tokens``: no earlier token is needed."""
        return num_tokens

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """Return a hit of the whole candidate, or of no tokens."""
        return GroupHit(search.end_tokens if self.accepts else 0, NONE)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """Return 0: nothing is copied."""
        return 0


def _fixed(row: RowFacts, take: int) -> GroupPlan:
    """Return the plan of a row that takes ``take`` blocks when it begins, and no more later."""
    return GroupPlan(0, NONE, 0 if row.held else take, None, (), NO_COLUMNS, row.published)


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Layers with a fixed number of blocks in a row, rewritten in place: states, and rings of raw keys.

        states       [ running | drafts ... ]     a hit is copied into the running state
        ring         [ ring ]                     a hit, and the drafts of a step, are written into it
        checkpoint   a block outside all rows, found at its position (docs/contracts.md, 8)

    These are the states of the natural layout, and those of the reference layout that are not kept. Encoder-only
    attention has no blocks.

    Attributes:
        block_size: Tokens between two keys of a request.
        row_columns: Columns of a row: the running state, and one for each drafted token.
        hits: Where hits may end.
    """

    block_size: int
    row_columns: int
    hits: PositionHits | BlocklessHits
    publishing: None = None
    only_grows: bool = False
    rotates: bool = True

    def columns(self, num_tokens: T) -> T:
        """Return the same number for any tokens."""
        return num_tokens * 0 + self.row_columns

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - the answer of a policy
        """Return NEVER: a running row has its blocks."""
        return held * 0 + NEVER

    def droppable(self, processed_tokens: T) -> T:
        """Return 0: no column is dropped."""
        return processed_tokens * 0

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:  # noqa: ARG002 - as above
        """Return whether the row runs."""
        return published >= 0

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:  # noqa: ARG002 - as above
        """Take all blocks when the row begins. A hit is copied, not adopted."""
        return _fixed(row, self.row_columns)

    def stored_columns(self, row: RowFacts, computed_tokens: int, boundaries: tuple[int, ...]) -> tuple[Int64, int]:  # noqa: ARG002 - as above
        """Return no column: checkpoints are published, not columns of rows."""
        return NO_COLUMNS, row.published

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - as above
        """Return the same number for any tokens."""
        return self.row_columns

    def state_column(self, num_tokens: T) -> T:
        """Return 0: the running state is rewritten in place."""
        return num_tokens * 0

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:  # noqa: ARG002 - as StatePolicy
        """Return a column for each draft, after that of the running state."""
        return position


@dataclass(frozen=True, slots=True)
class EncoderPolicy:
    """Cross attention, which keeps keys and values of the encoder's output.

    All blocks are taken when a row begins and stay to its end, whatever it computes.

    Attributes:
        block_size: Tokens of a block.
        hits: Whether the prefixes of other groups may be hit.
        by_digest: Natural layout: all blocks of a row, or no block, are found under the digest of the encoder's input.
            A prefix hit does not need them, because the decoder's own keys contain the digest; missing ones are encoded
            again.
    """

    block_size: int
    hits: BlocklessHits
    by_digest: bool = False
    publishing: None = None
    only_grows: bool = False

    def columns(self, num_tokens: T) -> T:
        """Return 0: the decoder's tokens need no block."""
        return num_tokens * 0

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - the answer of a policy
        """Return NEVER: a running row has its blocks."""
        return held * 0 + NEVER

    def droppable(self, processed_tokens: T) -> T:
        """Return 0: no column is dropped."""
        return processed_tokens * 0

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:  # noqa: ARG002 - as above
        """Return whether the row runs."""
        return published >= 0

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """Take all blocks when the row begins: those of ``hit``, or new ones."""
        take = self.most_columns(demand.end, demand.encoder)
        if row.held:
            return _fixed(row, 0)
        if hit is not None and len(hit):
            return GroupPlan(0, hit, 0, None, (), NO_COLUMNS, len(hit))
        if self.by_digest and demand.by_digest:
            return GroupPlan(0, NONE, take, None, (), np.arange(take), take)
        return _fixed(row, take)

    def stored_columns(self, row: RowFacts, computed_tokens: int, boundaries: tuple[int, ...]) -> tuple[Int64, int]:  # noqa: ARG002 - as above
        """Return no column: the blocks got their keys when they were taken."""
        return NO_COLUMNS, row.published

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - as above
        """Return ``ceil(encoder tokens / block_size)``."""
        return -(-encoder_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class StateHits:
    """The states of the reference layout, each in the column that it ends."""

    block_size: int
    copies: bool = False
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:
        """Return the columns of a hit, all null except the last."""
        return num_tokens // self.block_size

    def first_needed(self, num_tokens: int) -> int:
        """Return ``num_tokens``: a state needs no block of earlier tokens."""
        return num_tokens

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """Search for the last state at or before the end. O(boundaries after it)."""
        size, step = self.block_size, search.alignment // self.block_size
        boundary = min(search.end_tokens // size, len(keys)) // step * step
        missing: list[int] = []
        while boundary > 0:
            block = index.get(keys[boundary - 1])
            if block is not None:
                blocks = np.zeros(boundary, np.int32)
                blocks[-1] = block
                return GroupHit(boundary * size, blocks, tuple(missing), blocks[-1:])
            missing.append((boundary - 1) * size)
            boundary -= step
        return GroupHit(0, NONE, tuple(missing))

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """Return 0: the row itself holds the state."""
        return 0


@dataclass(frozen=True, slots=True)
class UnitStateHits:
    """The states of the reference layout, where hits may end inside a column.

        hit at a boundary      [ . . . S ]       S: adopted with its column
        hit inside a column    [ . . . D ]       D: a new block; the state is copied into it before the forward

    A state inside a column lies in a block outside all rows (``Checkpoints``), found by the tokens in the column.
    """

    block_size: int
    copies: bool = True
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:
        """Return the full columns of a hit, all null except the last if the hit ends there."""
        return num_tokens // self.block_size

    def first_needed(self, num_tokens: int) -> int:
        """Return ``num_tokens``: a state needs no block of earlier tokens."""
        return num_tokens

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """Search for the last state at or before the end. O(blocks after it)."""
        additions = index.additions
        tokens = index.last_state(request, search.end_tokens, search.alignment)
        column, rest = divmod(tokens, self.block_size)
        blocks = np.zeros(column, np.int32)
        if column and not rest:
            blocks[-1] = index.state_at(request, tokens) or 0
        return GroupHit(tokens, blocks, seen=blocks[blocks != 0], additions=additions)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:
        """Return the block of a state inside a column; 0 for a state at a boundary, which the row itself holds."""
        return (index.state_at(request, num_tokens) or 0) if num_tokens % self.block_size else 0


@dataclass(frozen=True, slots=True)
class AlignedStatePolicy:
    """States are kept where chunks end, and can be hit where that is a multiple of ``block_size``.

    Attributes:
        block_size: Tokens of a column.
        drafts: Blocks for drafted tokens.
        publishing: Which boundaries are published.
        hits: Where hits may end.
    """

    block_size: int
    drafts: int
    publishing: PublishRule
    hits: StateHits | UnitStateHits
    only_grows: bool = False
    rotates: bool = False

    def state_column(self, num_tokens: T) -> T:
        """Return the column of the last of ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size) - 1

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:
        """Return the columns of the states of drafts: after that of the step's end, except for a state at a boundary.

        The state at a boundary goes to the column that can be published. There are fewer drafts than ``block_size``, so
        there is at most one boundary, E:

            S, E before it         [ E | certain | draft | .. ]        S: the column of the last draft
            S, which ends at E     [ .. | E | draft | certain ]        the last one takes the place of the first one
        """
        size, last = self.block_size, self.state_column(certain + drafts)
        tokens = certain + position
        unneeded = (position == 0) & ((certain + drafts) % size == 0)
        free = np.where(unneeded, last + drafts, last + position)
        return np.where(tokens % size == 0, tokens // size - 1, free)

    def columns(self, num_tokens: T) -> T:
        """Return the columns of a row of ``num_tokens`` tokens, null ones and those of drafts included."""
        return -(-num_tokens // self.block_size) + self.drafts

    def next_need(self, held: T, dropped: T) -> T:
        """Return the token count at which a row needs another block, or may drop one."""
        need, drop = (held - self.drafts) * self.block_size + 1, (dropped + 1) * self.block_size + 2
        return need + (drop - need) * (drop < need)

    def droppable(self, processed_tokens: T) -> T:
        """Return how many leading columns are no longer read: those before the state of ``processed_tokens``."""
        return (processed_tokens - 1) * (processed_tokens > 0) // self.block_size

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:
        """Return whether a row needs at most one block, and a key for no column except the one that ``known`` ends."""
        if self.drafts or not self.publishing.keeps_every_boundary:
            return published < 0
        computed, end, known = tokens
        decided, size = self.publishing.decided(known), self.block_size
        ends_here = (decided == published + 1) & (known % size == 0) & (end - known < size)
        goes_on = (computed % size > 0) | (computed <= known)  # else its state follows unknown tokens
        plain: Bool | bool = (columns <= 1) & ((decided <= published) | ends_here) & goes_on
        return plain

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """Plan the blocks for ``demand.end`` tokens. Look-ahead is ignored, because the drafts have their blocks."""
        if row.held:
            drop = min(max(row.dropped, self.droppable(demand.processed)), row.held)
            reuse, held = NONE, row.held
            draft_columns = range(held - self.drafts, held)
        else:
            drop, reuse = 0, NONE if hit is None else hit
            if demand.computed > demand.hit and len(reuse):
                reuse = reuse.copy()
                reuse[: self.droppable(demand.computed)] = 0
            held, draft_columns = len(reuse), range(0)
        state = self.state_column(demand.end)
        vacate = tuple(column for column in draft_columns if column < state) if state + self.drafts >= held else ()
        append = self._append(held, state, demand if not row.held else None)
        take = 0 if append is None else int(np.count_nonzero(append == NEW)) - len(vacate)
        stored = self._stored(row, demand)
        first = max(row.published, len(reuse))
        decided = max(first, self.publishing.decided(demand.known))
        publish = self._columns(stored, max(first, drop), decided, demand.boundaries)
        pending = tuple(tokens for tokens in stored if tokens > decided * self.block_size)
        return GroupPlan(drop, reuse, take, append, vacate, publish, decided, pending)

    def _append(self, held: int, state: int, begin: Demand | None) -> Int32 | None:
        """Return columns held .. state + drafts: null except for the states, the drafts and the state to begin with."""
        count = state + self.drafts + 1 - held
        if count <= 0:
            return None
        append = np.full(count, NEW, np.int32)
        append[: max(state - held, 0)] = 0
        if begin is not None and (begin.computed > begin.hit or (self.hits.copies and begin.hit % self.block_size)):
            # the state that a load brings, or that is copied from the end of a hit inside a column
            append[self.state_column(begin.computed) - held] = NEW
        return append

    def _stored(self, row: RowFacts, demand: Demand) -> list[int]:
        """Return the multiples of the block whose states are or will be stored in their own columns, ascending.

        Stored are the end of a chunk, the boundary that accepted drafts crossed, and the end of an external load. A
        boundary inside a chunk is not stored, although the chunk passes it.
        """
        tokens = {*row.pending, *self._crossed(row, demand.computed)}
        if not row.held and demand.computed > demand.hit:
            tokens.add(demand.computed)
        if demand.end - demand.certain < self.block_size:
            tokens.add(demand.certain)
        return sorted(one for one in tokens if one and one % self.block_size == 0)

    def _crossed(self, row: RowFacts, computed_tokens: int) -> tuple[int, ...]:
        """Return the boundary where the last chunk ended, or that accepted drafts crossed (docs/contracts.md, 8)."""
        boundary = computed_tokens // self.block_size * self.block_size
        return (boundary,) if row.held and boundary >= row.state_position else ()

    def _columns(self, tokens: Sequence[int], first: int, decided: int, boundaries: tuple[int, ...]) -> Int64:
        """Return the columns first .. decided-1 that end at one of ``tokens`` and that retention keeps."""
        ends = [one // self.block_size for one in tokens]
        ended = [end - 1 for end in ends if first < end <= decided]
        if not ended:
            return NO_COLUMNS
        columns = np.array(ended, np.int64)
        return columns[self.publishing.mask(columns, boundaries)]

    def stored_columns(self, row: RowFacts, computed_tokens: int, boundaries: tuple[int, ...]) -> tuple[Int64, int]:
        """Return the columns to publish once ``computed_tokens`` are computed, and how many are then decided."""
        decided = max(row.published, self.publishing.decided(computed_tokens))
        stored = sorted({*row.pending, *self._crossed(row, computed_tokens)})
        return self._columns(stored, row.published, decided, boundaries), decided

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """Return the blocks of ``num_tokens`` tokens."""
        return self.columns(num_tokens)
