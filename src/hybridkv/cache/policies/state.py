"""Recurrent layers: where their states lie, and the columns of the reference layout's.

A state is overwritten in place; so sharing one is copying it.

    align    columns as in attention, of ``block_size`` tokens; all null but those that hold a state:

             [ . . . S | . D ]       S: read by the next step      D: where that step leaves its state
             [ . . . . . D x x ]     x: one block for each drafted token

Layers of encoders, too: like running states, all their blocks are taken when a row begins and stay to its end.
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
    """Checkpoints: states in blocks of nobody's row, labelled with their token counts (docs/contracts.md, 8)."""

    copies: bool = True
    downward_closed: bool = False

    def columns(self, num_tokens: int) -> int:  # noqa: ARG002 - the answer of hits
        """None: what is hit is copied."""
        return 0

    def first_needed(self, num_tokens: int) -> int:
        """None: a state is no block of tokens."""
        return num_tokens

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """The last label at or before the end. O(blocks behind it)."""
        additions = index.additions
        return GroupHit(index.last_state(request, search.end_tokens, search.alignment), NONE, additions=additions)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:
        """The checkpoint."""
        return index.state_at(request, num_tokens) or 0


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

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """None."""
        return GroupHit(0, NONE)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:  # noqa: ARG002 - as above
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

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """Whatever the others say."""
        return GroupHit(search.end_tokens, NONE)

    def source(self, index: PrefixIndex, request: Request, num_tokens: int) -> int:  # noqa: ARG002 - as above
        """None."""
        return 0


def _fixed(row: RowFacts, take: int) -> GroupPlan:
    """Return the plan of a row that takes ``take`` blocks when it begins, and none later."""
    return GroupPlan(0, NONE, 0 if row.held else take, None, (), NO_COLUMNS, row.published)


@dataclass(frozen=True, slots=True)
class RunningStatePolicy:
    """Recurrent layers of the natural layout, and those of the reference layout that keep no state.

        row          [ running | drafts ... ]       rewritten in place; a hit is copied into it
        checkpoint   a block outside all rows, labelled with its token count (docs/contracts.md, 8)

    block_size: tokens between two keys of a request.
    row_columns: of the state, and one for each drafted token.
    hits: where a prefix can end.
    """

    block_size: int
    row_columns: int
    hits: PositionHits | NoHits
    publishing: None = None
    only_grows: bool = False
    rotates: bool = True

    def columns(self, num_tokens: T) -> T:
        """Return the same number for any tokens."""
        return num_tokens * 0 + self.row_columns

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - the answer of a policy
        """Return NEVER: a row that runs has its blocks."""
        return held * 0 + NEVER

    def droppable(self, processed_tokens: T) -> T:
        """Return 0: no column is dropped."""
        return processed_tokens * 0

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:  # noqa: ARG002 - as above
        """Return True, once the row runs."""
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
    """Cross attention, which keeps the keys and values of the encoder's output, and encoder-only attention.

    All blocks are taken when a row begins and stay to its end, whatever it computes.

    block_size: tokens of a block.
    hits: whether the prefixes of other groups may be hit.
    keeps: whether anything is kept; encoder-only attention keeps nothing.
    by_digest: whether all blocks of a row, or none, are found under the digest of the encoder's input (natural layout).
        A prefix hit needs none of them, since the decoder's own keys carry the digest; missing ones are encoded again.
    """

    block_size: int
    hits: NoHits | AnyHits
    keeps: bool
    by_digest: bool = False
    publishing: None = None
    only_grows: bool = False

    def columns(self, num_tokens: T) -> T:
        """Return 0: the decoder's tokens need no block."""
        return num_tokens * 0

    def next_need(self, held: T, dropped: T) -> T:  # noqa: ARG002 - the answer of a policy
        """Return NEVER: a row that runs has its blocks."""
        return held * 0 + NEVER

    def droppable(self, processed_tokens: T) -> T:
        """Return 0: no column is dropped."""
        return processed_tokens * 0

    def is_plain(self, columns: T, published: T, tokens: tuple[T, T, T]) -> Bool | bool:  # noqa: ARG002 - as above
        """Return True, once the row runs."""
        return published >= 0

    def plan(self, row: RowFacts, hit: Int32 | None, demand: Demand) -> GroupPlan:
        """Take all blocks when the row begins: those of ``hit``, or as many new ones."""
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
        """Return ``ceil(encoder tokens / block_size)``, or 0 where nothing is kept."""
        return -(-encoder_tokens // self.block_size) if self.keeps else 0


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

    def longest(self, index: PrefixIndex, request: Request, keys: Sequence[bytes], search: Search) -> GroupHit:  # noqa: ARG002 - as above
        """The right-most state at or before the end. O(boundaries behind it)."""
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
    only_grows: bool = False
    rotates: bool = False

    def state_column(self, num_tokens: T) -> T:
        """Return the column of the last of ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size) - 1

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:
        """Return columns after that of the step's end, but for a state at a boundary: that is published.

        Fewer drafts than ``block_size``, so there is one boundary at most, E:

            S, E before it         [ E | certain | draft | .. ]        S: the column of the last draft
            S, which ends at E     [ .. | E | draft | certain ]        the last one's place is the first one's
        """
        size, last = self.block_size, self.state_column(certain + drafts)
        tokens = certain + position
        given_up = (position == 0) & ((certain + drafts) % size == 0)
        free = np.where(given_up, last + drafts, last + position)
        return np.where(tokens % size == 0, tokens // size - 1, free)

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
        if self.drafts or not self.publishing.keeps_every_boundary:
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
        state = self.state_column(demand.end)
        vacate = tuple(column for column in behind if column < state) if state + self.drafts >= held else ()
        append = self._append(held, state, demand if not row.held else None)
        take = 0 if append is None else int(np.count_nonzero(append == NEW)) - len(vacate)
        stored = self._stored(row, demand)
        first = max(row.published, len(reuse))
        decided = max(first, self.publishing.decided(demand.known))
        publish = self._columns(stored, max(first, drop), decided, demand.boundaries)
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
            append[self.state_column(begin.computed) - held] = NEW
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
        return (boundary,) if row.held and boundary >= row.state_position else ()

    def _columns(self, tokens: Sequence[int], first: int, decided: int, boundaries: tuple[int, ...]) -> Int64:
        """Columns first .. decided-1 that end at one of ``tokens``, as far as retention keeps them."""
        ends = [one // self.block_size for one in tokens]
        ended = [end - 1 for end in ends if first < end <= decided]
        if not ended:
            return NO_COLUMNS
        columns = np.array(ended, np.int64)
        return columns[self.publishing.mask(columns, boundaries)]

    def stored_columns(self, row: RowFacts, computed_tokens: int, boundaries: tuple[int, ...]) -> tuple[Int64, int]:
        """Columns to publish when ``computed_tokens`` are there at last, and how many are decided then."""
        decided = max(row.published, self.publishing.decided(computed_tokens))
        stored = sorted({*row.pending, *self._crossed(row, computed_tokens)})
        return self._columns(stored, row.published, decided, boundaries), decided

    def most_columns(self, num_tokens: int, encoder_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """Blocks that ``num_tokens`` tokens hold at most."""
        return self.columns(num_tokens)
