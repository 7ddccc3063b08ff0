"""Cells of the block tables that a step writes: what its rows got, states that changed places, blocks that moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.slots.batch import BatchSlots
from hybridkv.cache.slots.relocator import Relocator
from hybridkv.step import Cells

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
        some = rows[group.rotated[rows] > 0] if group.policy.rotates else rows[:0]
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
    groups: Sequence[CacheGroup], pool: BlockPool, relocator: Relocator, cells: Cells, moved: Int64
) -> Cells:
    """``cells`` as the worker names them: ids within each group's class, after the step's moves.

    moved: blocks that moves ended in; the cells of all rows that hold one are written as well, first.
    """
    if moved.size:
        group, row, column = relocator.cells_of(moved)
        group, row = np.concatenate((group, cells.group)), np.concatenate((row, cells.row))
        column = np.concatenate((column, cells.column))
        block = np.empty(len(group), np.int32)
        for one in groups:
            mine = np.flatnonzero(group == one.number)
            block[mine] = one.rows.at(row[mine].astype(np.int64), column[mine].astype(np.int64))
        cells = Cells(group, row, column, block)
    return Cells(cells.group, cells.row, cells.column, pool.local_each(cells.group, cells.block))
