"""What a step does to recurrent states: where each row's is read, copied to, written, and which begin at zero.

In the natural layout a row's state stays in its block: what it begins with, and checkpoints, come from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BlockPool, CacheGroup, Transfers
from hybridkv.step import Copy

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class StateMoves(NamedTuple):
    """Fields of a Step; see there."""

    zero: Int32
    copies: tuple[Copy, ...]
    state_read: Int32
    state_writes: Int32


def state_moves(
    groups: Sequence[CacheGroup], pool: BlockPool, rows: Int64, computed: Int64, counts: Int64
) -> StateMoves:
    """The moves of ``rows`` that run ``counts`` tokens behind ``computed`` ones; row order, then group order.

    A state is copied when it leaves its column, so that what was published is never written again.
    """
    keeping = [group for group in groups if group.policy.keeps_state]
    if not keeping or not len(rows):
        return StateMoves(_NO_ZERO, (), np.empty((0, len(groups)), np.int32), _NO_WRITES)
    numbers = np.array([group.number for group in keeping])
    blocks, copies = np.empty((len(rows), len(keeping)), np.int32), list[tuple[int, int, int]]()
    end, running = computed + counts, computed > 0
    columns: dict[object, tuple[Int64, Int64]] = {}
    for place, group in enumerate(keeping):
        if group.policy not in columns:  # groups of one kind are alike
            column = group.policy.state_column(end)
            columns[group.policy] = column, np.flatnonzero(running & (group.policy.state_column(computed) != column))
        column, left = columns[group.policy]
        blocks[:, place] = pool.local(group.number, group.rows.at(rows, column))
        if left.size:
            source = pool.local(group.number, group.rows.at(rows[left], group.policy.state_column(computed[left])))
            copies += zip(left.tolist(), [place] * len(left), source.tolist(), strict=True)
    read = np.full((len(rows), len(groups)), -1, np.int32)
    read[:, numbers] = blocks
    new = np.flatnonzero(~running)
    zero = np.empty((len(new), len(keeping), 2), np.int32)
    zero[:, :, 0], zero[:, :, 1] = numbers, blocks[new]
    writes = np.empty((len(rows), len(keeping), 4), np.int32)
    writes[:, :, 0] = np.arange(len(rows))[:, None]
    writes[:, :, 1], writes[:, :, 2], writes[:, :, 3] = numbers, end[:, None], blocks
    moved = tuple(
        Copy("before", keeping[place].number, source, int(blocks[i, place]), "state")
        for i, place, source in sorted(copies)
    )
    return StateMoves(zero.reshape(-1, 2), moved, read, writes.reshape(-1, 4))


_NO_ZERO = np.empty((0, 2), np.int32)
_NO_WRITES = np.empty((0, 4), np.int32)


def with_transfers(moves: StateMoves, transfers: Transfers, rows: Int64) -> StateMoves:
    """``moves`` and what the cache asks for: its moves and copies first, its checkpoints behind all other writes."""
    if not (transfers.copies or transfers.checkpoints):
        return moves
    asked = tuple(Copy("before", group, source, target, kind) for group, source, target, kind in transfers.copies)
    place = {row: i for i, row in enumerate(rows.tolist())}
    stored = [(place[one.row], one.group, one.tokens, one.block) for one in transfers.checkpoints]
    writes = np.concatenate((moves.state_writes, np.array(stored, np.int32).reshape(-1, 4)))
    return moves._replace(copies=asked + moves.copies, state_writes=writes.astype(np.int32))
