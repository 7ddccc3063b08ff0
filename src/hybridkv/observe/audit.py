"""Check all invariants of a cache: rebuild counts and keys from the rows and the index, and compare them.

Each private function yields one line for each violation; ``check_cache`` raises one error with the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.cache.policies import ReplayedHits
from hybridkv.cache.residents import STALLED
from hybridkv.errors import CacheError

if TYPE_CHECKING:
    from hybridkv.cache.assembly import CacheParts
    from hybridkv.cache.groups import CacheGroup
    from hybridkv.cache.pool import BlockPool
    from hybridkv.observe.block_times import BlockTimes
    from hybridkv.request import Request

_SHOWN = 8
"""Violations that the error names; one fault often breaks many invariants."""


def check_cache(parts: CacheParts) -> None:
    """Check every invariant of a cache. O(blocks + keys).

    Args:
        parts: the parts of a manager.

    Raises:
        CacheError: an invariant does not hold. The message names the first violations and counts the others.
    """
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
    """Check that rows and requests name each other, and that hashes and next events match the requests' tokens."""
    residents, hasher = parts.residents, parts.hasher
    rows = residents.request_rows
    bound = {row: request for row, request in enumerate(rows.requests) if request is not None}
    if {id(request) for request in bound.values()} != {id(request) for request in residents}:
        yield "the rows and the list of resident requests differ"
    for row, request in bound.items():
        if request.row != row:
            yield f"row {row} belongs to {request.request_id!r}, but this request has row {request.row}"
        full = 0 if hasher is None else request.num_tokens // hasher.block_size
        if len(request.hashes) < full or (len(request.hashes) > full and not request.is_lent):
            yield f"{request.request_id!r} has {len(request.hashes)} hashes for {request.num_tokens} tokens"
        now = residents.next_event(row)
        soonest = min(group.next_event(row, publishes=hasher is not None) for group in parts.groups)
        right = STALLED if row in parts.loads.of_row else min(soonest, parts.publisher.next_resume_point(row))
        if now != right:
            yield f"row {row} expects its next event at {now} tokens, not {right}"
    hits = [group.policy.hits for group in parts.groups]
    again = max((one.span.window + one.whole - 2 for one in hits if isinstance(one, ReplayedHits)), default=0)
    for group in parts.groups:
        yield from _columns(group, bound, again)


def _columns(group: CacheGroup, bound: dict[int, Request], again: int) -> Iterator[str]:
    """Check that a request's row holds the blocks of its computed tokens, and that other rows are empty.

    A row has dropped the columns before its hit, whose last tokens, at most ``again``, may be computed again.
    """
    for row in np.flatnonzero(group.rows.count).tolist():
        if row not in bound:
            yield f"row {row} of group {group.number} holds blocks but no request has it"
    for row, request in bound.items():
        held, computed = group.rows.count.item(row), request.num_computed_tokens
        if held < group.policy.columns(computed):
            yield f"row {row} has {computed} computed tokens in only {held} columns of group {group.number}"
            continue
        dropped = group.rows.dropped.item(row)
        if not group.rows.base.item(row) <= dropped <= held or group.rows.ids(row)[:dropped].any():
            yield f"row {row} of group {group.number} holds a block in a column it has dropped"
        if group.states is None and not group.rows.ids(row)[dropped:].all():
            yield f"row {row} of group {group.number} has a null column that it has not dropped"
        if group.states is None and dropped > group.unread(computed + again):
            yield f"row {row} of group {group.number} dropped {dropped} columns, some of which are still read"
        states = group.states
        if states is not None and computed and not group.rows.ids(row)[states.state_column(computed)]:
            yield f"row {row} of group {group.number} has no state after {computed} tokens"


def _ownership(parts: CacheParts) -> Iterator[str]:
    """Check that a block's reference count is the number of its holders, and that all holders are in one group."""
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
        yield f"block {block} has reference count {pool.ref_count(block)}, but {total[block]} holders"
    for block in np.flatnonzero(owners > 1).tolist():
        yield f"block {block} is held in {owners[block]} groups"


def _free_order(pool: BlockPool) -> Iterator[str]:
    """Check that the free order has only unheld blocks, each once, and that the count of free blocks is its length."""
    order = np.asarray(pool.free_order(), np.int64)
    unheld = np.flatnonzero(pool.ref_counts(np.arange(1, pool.num_blocks, dtype=np.int32)) == 0) + 1
    if len(np.unique(order)) != len(order):
        yield "a block is in the free order twice"
    for block in np.setdiff1d(order, unheld).tolist():
        yield f"block {block} is held or null but is in the free order"
    if len(order) != pool.get_num_free_blocks():
        yield f"{pool.get_num_free_blocks()} blocks are counted as free, but {len(order)} are in the free order"


def _index(pool: BlockPool, times: BlockTimes | None) -> Iterator[str]:
    """Check that the index has each block with a key exactly once, under its own key and group."""
    seen: set[int] = set()
    for group, index in enumerate(pool.indexes):
        for key, block in index.entries():
            if block in seen:
                yield f"block {block} is indexed twice"
            seen.add(block)
            if not 0 < block < pool.num_blocks or pool.keys.key_of(block) != key:
                yield f"block {block} is indexed under a key in group {group} that it does not have"
            elif pool.keys.group_of(block) != group:
                yield f"block {block} is indexed in group {group}, but its key is of group {pool.keys.group_of(block)}"
    yield from _partial_entries(pool)
    for block in sorted({*pool.keys.keyed(), *(block for index in pool.indexes for block in index.partial_blocks())}):
        partial = any(index.is_partial(block) for index in pool.indexes)
        if (pool.keys.key_of(block) is None and not partial) != (pool.keys.group_of(block) < 0):
            yield f"block {block} has a key without a group, or a group without a key"
        if pool.keys.key_of(block) is not None and block not in seen:
            yield f"block {block} has a key that is not in the index"
    if times is not None and times.kept().tolist() != pool.keys.keyed():
        yield "the blocks with recorded times are not the blocks with a key"


def _partial_entries(pool: BlockPool) -> Iterator[str]:
    """Check that a block with partial keys belongs to the group that has them, and that their count is right."""
    for group, index in enumerate(pool.indexes):
        entries = list(index.partial_entries())
        if index.num_partial != len(entries):
            yield f"group {group} counts {index.num_partial} partial keys, but has {len(entries)}"
        for _, entry in entries:
            owner = pool.keys.group_of(entry.block)
            if owner != group:
                yield f"block {entry.block} has a partial key in group {group}, but its keys are of group {owner}"


def _unwritten(parts: CacheParts) -> Iterator[str]:
    """Check that a block that waits to be written has a key, and that its step's log names it."""
    pool, log = parts.pool, parts.publisher
    for block in pool.keys.every_unwritten():
        if pool.keys.group_of(block) < 0:
            yield f"block {block} waits to be written but has no key"
        if block not in log.published_by(pool.keys.step_of(block)):
            yield f"block {block} waits for step {pool.keys.step_of(block)}, which does not write it"


def _extents(group: CacheGroup) -> Iterator[str]:
    """Check that the extents of rows do not overlap, and that each row fits into its extent."""
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
    """Check that published columns have the request's own keys, and that other columns have no key."""
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
            yield f"row {row} of group {group.number} has {published} published columns, more than it has full blocks"
            continue
        for column, block in enumerate(group.rows.ids(row).tolist()):
            if not 0 < block < pool.num_blocks:
                continue  # the null block, or an id that _ownership reports
            key = pool.keys.key_of(block)
            if key is not None and (column >= published or key != keys[column]):
                yield f"block {block}, column {column} of {request.request_id!r}, has another key than its {source}"
