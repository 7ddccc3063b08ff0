"""Slots for all rows of a step at once.

One vector question decides who needs anything: total tokens against each row's next event. Those who do
(one in block_size for a decoding row) are served in (request, group) order, so block ids are those of one
call after the other; a property test holds the two together. Rows that need no more than to drop columns,
take blocks and publish full ones are served with array operations, as far as the order cannot be told from
that of single calls; the others one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.slots.plan import Reason
from hybridkv.cache.slots.transfers import TransferLog

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class BatchSlots(NamedTuple):
    """New cells of a batch. accepted: the leading rows that got their slots; from there on all are refused.

    owner, group, column, block: int32[cells], owner the index into the rows handed in; in the order taken.
    reason: why the first one was refused, None where none was.
    """

    accepted: int
    owner: Int32
    group: Int32
    column: Int32
    block: Int32
    reason: Reason | None = None


_NONE = np.empty(0, np.int32)


def nothing_new(accepted: int) -> BatchSlots:
    """All rows have the blocks they need."""
    return BatchSlots(accepted, _NONE, _NONE, _NONE, _NONE)


def one_by_one(accepted: int, cells: Sequence[tuple[int, int, int, Int32]]) -> BatchSlots:
    """Cells given as (owner, group, first column, blocks); null blocks are left out."""
    if not cells:
        return nothing_new(accepted)
    owners, groups, firsts, parts = zip(*cells, strict=True)
    counts = list(map(len, parts))
    starts = accumulate(counts, initial=0)
    before = [first - start for first, start in zip(firsts, starts, strict=False)]
    owner, group, column = np.array((owners, groups, before), np.int32).repeat(counts, axis=1)
    block = np.concatenate(parts)
    column += np.arange(len(block), dtype=np.int32)
    if block.all():
        return BatchSlots(accepted, owner, group, column, block)
    held = block != 0
    return BatchSlots(accepted, owner[held], group[held], column[held], block[held])


def take(groups: Sequence[CacheGroup], transfers: TransferLog, rows: Int64, missing: Int64, index: Int64) -> BatchSlots:
    """Give every row its missing blocks, which can be taken in any order. index: the rows' places in the batch."""
    total = int(missing.sum())
    if not total:
        return nothing_new(0)
    if len(groups) == 1:
        ids = transfers.new_blocks(total, 0)
        owner, column = groups[0].rows.extend_many(rows, missing[:, 0], ids)
        return BatchSlots(0, index[owner].astype(np.int32), np.zeros(total, np.int32), column.astype(np.int32), ids)
    of_group = np.repeat(np.tile(np.arange(len(groups), dtype=np.int32), len(rows)), missing.ravel())
    ids = transfers.new_blocks_each(of_group)
    of_row, of_column = np.empty(total, np.int32), np.empty(total, np.int32)
    for g, group in enumerate(groups):
        mine = (of_group == g).nonzero()[0]
        owner, column = group.rows.extend_many(rows, missing[:, g], ids[mine])
        of_row[mine], of_column[mine] = index[owner], column
    return BatchSlots(0, of_row, of_group, of_column, ids)


def concat(accepted: int, parts: Sequence[BatchSlots], reason: Reason | None = None) -> BatchSlots:
    """All cells in order."""
    parts = [part for part in parts if len(part.block)]
    if not parts:
        return nothing_new(accepted)._replace(reason=reason)
    if len(parts) == 1:
        return parts[0]._replace(accepted=accepted, reason=reason)
    owner = np.concatenate([part.owner for part in parts])
    group = np.concatenate([part.group for part in parts])
    column = np.concatenate([part.column for part in parts])
    block = np.concatenate([part.block for part in parts])
    return BatchSlots(accepted, owner, group, column, block, reason)


class Batch(NamedTuple):
    """Rows that something is due for, and what they ask for. All int64[rows].

    place: their places in the batch. The others: tokens, as in policies.values.Demand.
    """

    place: Int64
    rows: Int64
    processed: Int64
    computed: Int64
    end: Int64
    total: Int64
    known: Int64

    def part(self, first: int, last: int) -> Batch:
        """Rows first .. last-1."""
        return Batch(*(column[first:last] for column in self))


class Needs(NamedTuple):
    """What the rows of a Batch need.

    missing: int64[rows, groups], blocks. plain: bool[rows], nothing but columns to drop, blocks to take and
    full ones to publish. drop: int64[rows, groups], columns.
    """

    missing: Int64
    plain: NDArray[np.bool_]
    drop: Int64

    def part(self, first: int, last: int) -> Needs:
        """Rows first .. last-1."""
        return Needs(self.missing[first:last], self.plain[first:last], self.drop[first:last])


def needs_of(groups: Sequence[CacheGroup], batch: Batch) -> Needs:
    """Needs of all rows, whatever the rows before them do."""
    shape = (len(batch.rows), len(groups))
    missing, drop, plain = np.empty(shape, np.int64), np.empty(shape, np.int64), np.ones(shape[0], np.bool_)
    for g, group in enumerate(groups):
        rows, policy = group.rows, group.policy
        held, dropped = rows.count[batch.rows], rows.dropped[batch.rows]
        asked = batch.end if group.states is not None else batch.total
        missing[:, g] = np.maximum(policy.columns(asked) - held, 0)
        drop[:, g] = np.minimum(np.maximum(policy.droppable(batch.processed), dropped), held)
        if group.kind.publishes:
            plain &= policy.is_plain(
                missing[:, g], group.published[batch.rows], (batch.computed, batch.end, batch.known)
            )
            if group.pending:
                plain &= ~np.isin(batch.rows, list(group.pending))
        else:
            missing[:, g] = 0
    return Needs(missing, plain, drop)


def drop(groups: Sequence[CacheGroup], pool: BlockPool, batch: Batch, columns: Int64) -> bool:
    """Drop ``columns`` of each row and group, if single calls would lead to the same; whether it was done.

    They would when every block that loses its last holder goes to the back of the free order.
    """
    parts: list[tuple[CacheGroup, Int64, Int64]] = []
    owners, numbers, blocks = [], [], []
    for g, group in enumerate(groups):
        some = (columns[:, g] > group.rows.dropped[batch.rows]).nonzero()[0]
        if not some.size:
            continue
        rows, upto = batch.rows[some], columns[some, g]
        owner, ids = group.rows.columns_before(rows, upto)
        parts.append((group, rows, upto))
        owners.append(some[owner])
        numbers.append(np.full(len(ids), g))
        blocks.append(ids)
    if not parts:
        return True
    ids, owner = np.concatenate(blocks), np.concatenate(owners)
    order = np.lexsort((np.concatenate(numbers), owner))
    ids = ids[order]
    ids = ids[ids != 0]
    last = pool.last_releases(ids)
    if last is None:
        return False
    for group, rows, upto in parts:
        group.rows.drop_rows(rows, upto)
    pool.release_in_turn(ids, last)
    return True
