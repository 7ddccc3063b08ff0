"""The fields of a Step that are the cache's: cells of block tables, and what is done to states.

cells    what its rows got, states that changed places, blocks that moved
states   where each row's is read, copied to, written, and which begin at zero; in the natural layout a row's state
         stays in its block: what it begins with, and checkpoints, come from the cache
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.policies import StateColumns
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.slots.batch import BatchSlots
from hybridkv.cache.slots.transfers import TransferLog, Transfers
from hybridkv.step import Cells, Copy, Csr

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


def cells_of(rows: Int64, slots: BatchSlots) -> Cells:
    """The cells of a batch's new blocks."""
    return Cells(slots.group, rows[slots.owner].astype(np.int32), slots.column, slots.block)


def cells_of_row(row: int, ids: tuple[Int32, ...]) -> list[Cells]:
    """The cells of a new row: all its blocks, group by group, null columns left out."""
    parts = []
    for group, blocks in enumerate(ids):
        columns = np.flatnonzero(blocks).astype(np.int32)
        same = np.full((2, len(columns)), [[group], [row]], np.int32)
        parts.append(Cells(same[0], same[1], columns, blocks[columns]))
    return parts


def rotated_cells(groups: Sequence[CacheGroup], rows: Int64) -> list[Cells]:
    """The cells of states that changed places since the worker was told, of those ``rows``."""
    parts = []
    for group in groups:
        states = group.states
        some = rows[group.rotated[rows] > 0] if states is not None and states.rotates else rows[:0]
        if some.size:
            pairs = np.stack((np.zeros_like(some), group.rotated[some]), axis=1).ravel()
            row = np.repeat(some, 2)
            number = np.full(len(row), group.number, np.int32)
            parts.append(Cells(number, row.astype(np.int32), pairs.astype(np.int32), group.rows.at(row, pairs)))
    return parts


def join_cells(parts: list[Cells]) -> Cells:
    """All cells in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Cells.empty()
    return Cells(
        np.concatenate([part.group for part in parts]),
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.column for part in parts]),
        np.concatenate([part.block for part in parts]),
    )


def named_cells(
    groups: Sequence[CacheGroup], pool: BlockPool, transfers: TransferLog, cells: Cells, moved: Int64
) -> Cells:
    """``cells`` as the worker names them: ids within each group's class, after the step's moves.

    moved: blocks that moves ended in; the cells of all rows that hold one are written as well, first.
    """
    if moved.size:
        group, row, column = transfers.cells_of(moved)
        group, row = np.concatenate((group, cells.group)), np.concatenate((row, cells.row))
        column = np.concatenate((column, cells.column))
        block = np.empty(len(group), np.int32)
        for one in groups:
            mine = np.flatnonzero(group == one.number)
            block[mine] = one.rows.at(row[mine].astype(np.int64), column[mine].astype(np.int64))
        cells = Cells(group, row, column, block)
    return Cells(cells.group, cells.row, cells.column, pool.local_each(cells.group, cells.block))


class StateMoves(NamedTuple):
    """Fields of a Step; see there."""

    zero: Int32
    copies: tuple[Copy, ...]
    state_read: Int32
    state_writes: Int32


class RowSpans(NamedTuple):
    """Rows of a step: tokens computed before, certain ones that it runs, drafts behind them (None: no row has any).

    int64[R] each.
    """

    rows: Int64
    computed: Int64
    certain: Int64
    drafts: Csr | None = None

    @property
    def drafted(self) -> Int64:
        """Drafts of each row, int64[R]."""
        return np.zeros_like(self.rows) if self.drafts is None else np.diff(self.drafts.indptr)

    def written(self) -> tuple[Int64, Int64]:
        """For each state that is written, the index into rows, and the drafts before it: 0 .. drafts of the row."""
        if self.drafts is None:
            return np.arange(len(self.rows)), np.zeros_like(self.rows)
        counts = self.drafted + 1
        owner = np.repeat(np.arange(len(counts)), counts)
        return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


class _Columns(NamedTuple):
    """Of the rows in groups of one kind: where a state is read, left (indices and columns), and written."""

    read: Int64
    left: Int64
    source: Int64
    written: Int64


def state_moves(groups: Sequence[CacheGroup], pool: BlockPool, spans: RowSpans) -> StateMoves:
    """The moves of the rows of a step; row order, then group order, then tokens.

    A state is copied when it leaves its column, so that what was published is never written again. A row with drafts,
    or behind accepted ones, reads its state where it is, and writes to other columns.
    """
    keeping = [(group, group.states) for group in groups if group.states is not None]
    rows = spans.rows
    if not keeping or not len(rows):
        return StateMoves(_NO_ZERO, (), np.empty((0, len(groups)), np.int32), _NO_WRITES)
    numbers = np.array([group.number for group, _ in keeping])
    owner, behind = spans.written()
    reads, writes, copies = list[Int32](), list[Int32](), list[tuple[int, int, int]]()
    columns: dict[object, _Columns] = {}
    for place, (group, states) in enumerate(keeping):
        of = columns.get(group.policy)  # groups of one kind are alike
        if of is None:
            of = columns[group.policy] = _columns_of(group, states, spans, owner, behind)
        reads.append(group.rows.at(rows, of.read))
        writes.append(reads[-1] if of.written is of.read else group.rows.at(rows[owner], of.written))
        if of.left.size:
            source = pool.local(group.number, group.rows.at(rows[of.left], of.source))
            copies += zip(of.left.tolist(), [place] * len(of.left), source.tolist(), strict=True)
    read_blocks, written_blocks = (pool.local_each(numbers, np.stack(found, axis=1)) for found in (reads, writes))
    read = np.full((len(rows), len(groups)), -1, np.int32)
    read[:, numbers] = read_blocks
    moved = tuple(
        Copy("before", int(numbers[place]), source, int(read_blocks[i, place]), "state")
        for i, place, source in sorted(copies)
    )
    tokens = (spans.computed + spans.certain)[owner] + behind
    zero = _zeroed(spans.computed, numbers, read_blocks)
    return StateMoves(zero, moved, read, _writes(owner, numbers, tokens, written_blocks))


def _zeroed(computed: Int64, numbers: Int64, read_blocks: Int32) -> Int32:
    """Step.zero: the states of rows that have computed nothing. read_blocks: int32[rows, groups]."""
    new = (computed == 0).nonzero()[0]
    if not new.size:
        return _NO_ZERO
    zero = np.empty((len(new), len(numbers), 2), np.int32)
    zero[:, :, 0], zero[:, :, 1] = numbers, read_blocks[new]
    return zero.reshape(-1, 2)


def _columns_of(group: CacheGroup, states: StateColumns, spans: RowSpans, owner: Int64, behind: Int64) -> _Columns:
    """Where the states of ``group`` are; ``owner``, ``behind``: see RowSpans.written."""
    computed, drafted = spans.computed, spans.drafted
    certain = computed + spans.certain
    before, after = states.column(computed), states.column(certain)
    accepted = group.accepted[spans.rows]
    stays = (accepted >= 0) | (drafted > 0)
    moves = ((computed > 0) & ~stays & (before != after)).nonzero()[0]
    if not stays.any():
        return _Columns(after, moves, before[moves], after)
    read = np.where(stays, np.where(accepted >= 0, accepted, before), after)
    return _Columns(read, moves, before[moves], states.draft_columns(certain[owner], drafted[owner], behind))


def _writes(owner: Int64, numbers: Int64, tokens: Int64, blocks: Int32) -> Int32:
    """Step.state_writes. owner, tokens: int64[n]. numbers: int64[groups]. blocks: int32[n, groups]."""
    writes = np.empty((*blocks.shape, 4), np.int32)
    writes[:, :, 0], writes[:, :, 1], writes[:, :, 2], writes[:, :, 3] = (
        owner[:, None],
        numbers,
        tokens[:, None],
        blocks,
    )
    flat = writes.reshape(-1, 4)
    if len(numbers) > 1 and len(owner) > owner[-1] + 1:  # several states of a row: group after group
        flat = flat[np.lexsort((flat[:, 2], flat[:, 1], flat[:, 0]))]
    return flat


_NO_ZERO = np.empty((0, 2), np.int32)
_NO_WRITES = np.empty((0, 4), np.int32)


def with_transfers(moves: StateMoves, transfers: Transfers, rows: Int64) -> StateMoves:
    """``moves`` and what the cache asks for: its moves and copies first, its checkpoints behind all other writes."""
    if not (transfers.copies or transfers.checkpoints):
        return moves
    asked = tuple(
        Copy("before", group, source, destination, kind) for group, source, destination, kind in transfers.copies
    )
    place = {row: i for i, row in enumerate(rows.tolist())}
    stored = [(place[one.row], one.group, one.tokens, one.block) for one in transfers.checkpoints]
    writes = np.concatenate((moves.state_writes, np.array(stored, np.int32).reshape(-1, 4)))
    return moves._replace(copies=asked + moves.copies, state_writes=writes.astype(np.int32))
