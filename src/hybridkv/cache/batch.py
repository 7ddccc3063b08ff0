"""Slots for all rows of a step at once.

One vector question decides who needs anything: total tokens against each row's next event. Those who do
(one in block_size for a decoding row) are served in (request, group) order, so block ids are those of one
call after the other; a property test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.group import CacheGroup
from hybridkv.cache.pool import BlockPool

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class BatchSlots(NamedTuple):
    """New blocks of a batch. accepted: the leading rows that got their slots; from there on all are refused.

    owner, group, column, block: int32[new blocks], owner the index into the rows handed in; in the order taken.
    """

    accepted: int
    owner: Int32
    group: Int32
    column: Int32
    block: Int32


_NONE = np.empty(0, np.int32)


def nothing_new(accepted: int) -> BatchSlots:
    """All rows have the blocks they need."""
    return BatchSlots(accepted, _NONE, _NONE, _NONE, _NONE)


def missing_columns(groups: Sequence[CacheGroup], rows: Int64, total: Int64) -> Int64:
    """int64[rows, groups]: blocks that each row lacks for ``total`` tokens."""
    missing = np.empty((len(rows), len(groups)), np.int64)
    for g, group in enumerate(groups):
        missing[:, g] = group.policy.columns(total) - group.rows.count[rows]
    return np.maximum(missing, 0, out=missing)


def rows_that_fit(missing: Int64, free: int) -> int:
    """How many leading rows fit into ``free`` blocks together."""
    return int(np.searchsorted(np.cumsum(missing.sum(axis=1)), free, side="right"))


def take(groups: Sequence[CacheGroup], pool: BlockPool, rows: Int64, missing: Int64, index: Int64) -> BatchSlots:
    """Give every row its missing blocks. index: the rows' places in the batch."""
    total = int(missing.sum())
    if not total:
        return nothing_new(0)
    ids = pool.get_new_blocks(total)
    if len(groups) == 1:
        owner, column = groups[0].rows.extend_many(rows, missing[:, 0], ids)
        return BatchSlots(0, index[owner].astype(np.int32), np.zeros(total, np.int32), column.astype(np.int32), ids)
    of_group = np.repeat(np.tile(np.arange(len(groups), dtype=np.int32), len(rows)), missing.ravel())
    of_row, of_column = np.empty(total, np.int32), np.empty(total, np.int32)
    for g, group in enumerate(groups):
        mine = np.flatnonzero(of_group == g)
        owner, column = group.rows.extend_many(rows, missing[:, g], ids[mine])
        of_row[mine], of_column[mine] = index[owner], column
    return BatchSlots(0, of_row, of_group, of_column, ids)


def publishable(group: CacheGroup, rows: Int64, known: Int64) -> tuple[Int64, Int64]:
    """First unpublished column of each row and how many can be published at ``known`` tokens; int64[rows] each."""
    first = group.published[rows]
    return first, np.maximum(known // group.policy.block_size - first, 0)
