"""What must always hold, rebuilt from the rows and the index alone and compared with the counters.

Each function yields one line a violation; check_cache raises with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.residents import STALLED
from hybridkv.errors import CacheError

if TYPE_CHECKING:
    from hybridkv.cache.assembly import CacheParts
    from hybridkv.cache.groups import CacheGroup
    from hybridkv.cache.pool import BlockPool
    from hybridkv.observe.block_times import BlockTimes
    from hybridkv.request import Request

_SHOWN = 8


def check_cache(parts: CacheParts) -> None:
    """Raise CacheError naming every invariant that does not hold. O(blocks + keys)."""
    pool = parts.pool
    pool.journal.settle()
    every = np.arange(pool.num_blocks, dtype=np.int32)
    found = [
        *_residents(parts),
        *_ownership(parts),
        *pool.space.check(pool.ref_counts(every), pool.keys.are_on(every)),
        *_free_order(pool),
        *_index(pool, parts.times),
        *_unwritten(parts),
        *parts.eviction_policy.check(),
        *(line for group in parts.groups for line in (*_extents(group), *_row_keys(parts, group))),
    ]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CacheError("the cache is inconsistent: " + "; ".join(found[:_SHOWN]) + more)


def _residents(parts: CacheParts) -> Iterator[str]:
    """Rows and requests name each other; counts agree with what the rows hold."""
    residents, hasher = parts.residents, parts.hasher
    rows = residents.request_rows
    bound = {row: request for row, request in enumerate(rows.requests) if request is not None}
    if {id(request) for request in bound.values()} != {id(request) for request in residents}:
        yield "the rows and the list of resident requests differ"
    for row, request in bound.items():
        if request.row != row:
            yield f"row {row} belongs to {request.request_id!r}, which says row {request.row}"
        full = 0 if hasher is None else request.num_tokens // hasher.block_size
        if len(request.hashes) < full or (len(request.hashes) > full and not request.is_lent):
            yield f"{request.request_id!r} has {len(request.hashes)} hashes for {request.num_tokens} tokens"
        now = residents.next_event(row)
        soonest = min(group.next_event(row, publishes=hasher is not None) for group in parts.groups)
        right = STALLED if row in parts.loads.of_row else min(soonest, parts.publisher.next_resume_point(row))
        if now != right:
            yield f"row {row} expects its next event at {now} tokens, not {right}"
    for group in parts.groups:
        yield from _columns(group, bound)


def _columns(group: CacheGroup, bound: dict[int, Request]) -> Iterator[str]:
    """Rows that belong to somebody hold enough for what is computed, the others nothing."""
    for row in np.flatnonzero(group.rows.count).tolist():
        if row not in bound:
            yield f"row {row} of group {group.number} holds blocks but belongs to nobody"
    for row, request in bound.items():
        held, computed = group.rows.count.item(row), request.num_computed_tokens
        if held < group.policy.columns(computed):
            yield f"row {row} has {computed} computed tokens in {held} columns of group {group.number}"
            continue
        dropped = group.rows.dropped.item(row)
        if not group.rows.base.item(row) <= dropped <= held or group.rows.ids(row)[:dropped].any():
            yield f"row {row} of group {group.number} holds a block in a column it has dropped"
        if group.states is None and not group.rows.ids(row)[dropped:].all():
            yield f"row {row} of group {group.number} has a null column that it has not dropped"
        if group.states is None and dropped > group.policy.droppable(computed):
            yield f"row {row} of group {group.number} dropped {dropped} columns, some of which are still read"
        states = group.states
        if states is not None and computed and not group.rows.ids(row)[states.state_column(computed)]:
            yield f"row {row} of group {group.number} has no state after {computed} tokens"


def _ownership(parts: CacheParts) -> Iterator[str]:
    """Reference counts are the number of rows that hold a block, all in one group, never the null block."""
    pool = parts.pool
    total = np.zeros(pool.num_blocks, np.int64)
    owners = np.zeros(pool.num_blocks, np.int64)
    for group in parts.groups:
        counted = np.zeros(pool.num_blocks, np.int64)
        for row in np.flatnonzero(group.rows.count).tolist():
            ids = group.rows.held(row)
            if not ids.size:
                continue
            if len(np.unique(ids)) != len(ids):
                yield f"row {row} of group {group.number} holds a block twice"
            if ids.min() < 0 or ids.max() >= pool.num_blocks:
                yield f"row {row} of group {group.number} holds an id outside the pool"
                continue
            np.add.at(counted, ids, 1)
        counted[parts.sink_blocks[group.number]] += 1
        for hold in (*parts.pins, *parts.locks):
            counted[hold.blocks[group.number]] += 1
        total += counted
        owners += counted > 0
    for block in np.flatnonzero(total != pool.ref_counts(np.arange(pool.num_blocks, dtype=np.int32))).tolist():
        yield f"block {block} has ref count {pool.ref_count(block)}, {total[block]} rows hold it"
    for block in np.flatnonzero(owners > 1).tolist():
        yield f"block {block} is held in {owners[block]} groups"


def _free_order(pool: BlockPool) -> Iterator[str]:
    """Nobody holds what is free, each block is free once, and as many are counted."""
    order = np.asarray(pool.free_order(), np.int64)
    unheld = np.flatnonzero(pool.ref_counts(np.arange(1, pool.num_blocks, dtype=np.int32)) == 0) + 1
    if len(np.unique(order)) != len(order):
        yield "a block stands twice in the free order"
    for block in np.setdiff1d(order, unheld).tolist():
        yield f"block {block} is held or null but stands in the free order"
    if len(order) != pool.get_num_free_blocks():
        yield f"{pool.get_num_free_blocks()} blocks are counted as free, {len(order)} stand in the free order"


def _index(pool: BlockPool, times: BlockTimes | None) -> Iterator[str]:
    """Every indexed block carries that key in that group, every block with a key is indexed once."""
    seen: set[int] = set()
    for group, index in enumerate(pool.indexes):
        for key, block in index.entries():
            if block in seen:
                yield f"block {block} is indexed twice"
            seen.add(block)
            if not 0 < block < pool.num_blocks or pool.keys.key_of(block) != key:
                yield f"block {block} is indexed under a key in group {group} that it does not carry"
            elif pool.keys.group_of(block) != group:
                yield f"block {block} is indexed in group {group}, its key is of group {pool.keys.group_of(block)}"
    yield from _partial_entries(pool)
    for block in sorted({*pool.keys.keyed(), *(block for index in pool.indexes for block in index.partial_blocks())}):
        partial = any(index.is_partial(block) for index in pool.indexes)
        if (pool.keys.key_of(block) is None and not partial) != (pool.keys.group_of(block) < 0):
            yield f"block {block} has a key without group, or a group without key"
        if pool.keys.key_of(block) is not None and block not in seen:
            yield f"block {block} carries a key that the index does not know"
    if times is not None and times.kept().tolist() != pool.keys.keyed():
        yield "blocks whose times are kept are not those with a key"


def _partial_entries(pool: BlockPool) -> Iterator[str]:
    """A block with partial keys is in the group that has them, and as many are counted as there are."""
    for group, index in enumerate(pool.indexes):
        entries = list(index.partial_entries())
        if index.num_partial != len(entries):
            yield f"group {group} counts {index.num_partial} partial keys, it has {len(entries)}"
        for _, entry in entries:
            of = pool.keys.group_of(entry.block)
            if of != group:
                yield f"block {entry.block} has a partial key in group {group}, its keys are of group {of}"


def _unwritten(parts: CacheParts) -> Iterator[str]:
    """A block that waits to be written has a key, and its step has it in the log."""
    pool, log = parts.pool, parts.publisher
    for block in pool.keys.every_unwritten():
        if pool.keys.group_of(block) < 0:
            yield f"block {block} waits to be written but has no key"
        if block not in log.published_by(pool.keys.step_of(block)):
            yield f"block {block} waits for step {pool.keys.step_of(block)}, which does not write it"


def _extents(group: CacheGroup) -> Iterator[str]:
    """The extents of the rows lie side by side."""
    end = 0
    for start, room in sorted(group.rows.extents()):
        if start < end:
            yield f"two rows of group {group.number} overlap at cell {start}"
        end = start + room
    if end > len(group.rows.cells):
        yield f"a row of group {group.number} ends at {end}, outside its {len(group.rows.cells)} cells"
    if (group.rows.count - group.rows.base > group.rows.room).any():
        yield f"a row of group {group.number} holds more than it has room for"


def _row_keys(parts: CacheParts, group: CacheGroup) -> Iterator[str]:
    """Published columns carry the request's own keys, the others none."""
    for request in parts.residents:
        row, pool = request.row, parts.pool
        if not group.kind.by_digest and not group.kind.publishes:
            if any(pool.keys.key_of(block) is not None for block in group.rows.held(row).tolist()):
                yield f"row {row} of group {group.number}, which publishes nothing, holds a block with a key"
            continue
        if group.kind.by_digest:
            keys: Sequence[bytes] = request.encoder_keys(group.policy.block_size)
            published, source = len(keys), "encoder input"
        else:
            keys, published, source = group.keys(request), group.published.item(row), "tokens"
        if (
            parts.hasher is not None
            and not group.kind.by_digest
            and request.writes_prefix_cache
            and published > min(len(keys), group.rows.count.item(row))
        ):
            yield f"row {row} of group {group.number} has {published} published columns, more than full ones"
            continue
        for column, block in enumerate(group.rows.ids(row).tolist()):
            if not 0 < block < pool.num_blocks:
                continue  # null, or told by _ownership
            key = pool.keys.key_of(block)
            if key is not None and (column >= published or key != keys[column]):
                yield f"block {block}, column {column} of {request.request_id!r}, carries another key than its {source}"
