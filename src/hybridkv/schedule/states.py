"""What a step does to recurrent states: where each row's is read, copied to, written, and which begin at zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import CacheGroup
from hybridkv.step import Copy

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class StateMoves(NamedTuple):
    """Fields of a Step; see there."""

    zero: Int32
    copies: tuple[Copy, ...]
    state_read: Int32
    state_writes: Int32


def state_moves(groups: Sequence[CacheGroup], rows: Int64, computed: Int64, counts: Int64) -> StateMoves:
    """The moves of ``rows`` that run ``counts`` tokens behind ``computed`` ones; row order, then group order.

    A state is copied when it leaves its column, so that what was published is never written again.
    """
    keeping = [group for group in groups if group.policy.keeps_state]
    if not keeping or not len(rows):
        return StateMoves(np.empty((0, 2), np.int32), (), np.empty((0, len(groups)), np.int32), _NO_WRITES)
    read = np.full((len(rows), len(groups)), -1, np.int32)
    before = np.full_like(read, -1)
    end = computed + counts
    for group in keeping:
        policy, number = group.policy, group.number
        column = policy.state_column(end)
        read[:, number] = group.rows.at(rows, column)
        left = np.flatnonzero((computed > 0) & (policy.state_column(computed) != column))
        before[left, number] = group.rows.at(rows[left], policy.state_column(computed[left]))
    where, group_of = np.nonzero(before >= 0)
    copies = tuple(
        Copy("before", g, int(before[i, g]), int(read[i, g]), "state")
        for i, g in zip(where.tolist(), group_of.tolist(), strict=True)
    )
    numbers = np.array([group.number for group in keeping])
    new = np.flatnonzero(computed == 0)
    zero = np.stack((np.tile(numbers, len(new)), read[np.ix_(new, numbers)].ravel()), axis=1)
    writes = np.stack(
        (
            np.repeat(np.arange(len(rows)), len(numbers)),
            np.tile(numbers, len(rows)),
            np.repeat(end, len(numbers)),
            read[:, numbers].ravel(),
        ),
        axis=1,
    )
    return StateMoves(zero.astype(np.int32), copies, read, writes.astype(np.int32))


_NO_WRITES = np.empty((0, 4), np.int32)
