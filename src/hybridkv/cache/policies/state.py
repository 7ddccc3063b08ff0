"""Recurrent layers: where their states lie, and the columns of the reference layout's.

A state is overwritten in place; so sharing one is copying it.

    align    columns as in attention, of ``block_size`` tokens; all null but those that hold a state:

             [ . . . S | . D ]       S: read by the next step      D: where that step leaves its state
             [ . . . . . D x x ]     x: one block for each drafted token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridkv.cache.policies.publish_rule import PublishRule
from hybridkv.cache.policies.values import (
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


class StateColumns(Protocol):
    """Where the states of a row lie.

    rotates: an accepted one changes places with column 0; else it is read where it is.
    """

    @property
    def rotates(self) -> bool:
        """See the class."""
        ...

    def column(self, num_tokens: T) -> T:
        """The column that holds the state after ``num_tokens`` tokens. A number or an int64 array."""
        ...

    def draft_columns(self, certain: Int64, drafts: Int64, position: Int64) -> Int64:
        """Where the state behind the ``position``-th draft goes in a step of ``drafts``, int64[n]; 0: behind none.

        certain: tokens that are no drafts.
        """
        ...


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
