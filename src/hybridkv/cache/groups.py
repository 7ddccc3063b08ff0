"""One group at work: its policy, its rows, and what a request finds in its index.

The block tables of one group as the manager keeps them: one flat array, an extent a row.

    cells   [ row 5: 8 9 . . | row 2: 3 4 6 7 | (free) . . | row 0: ... ]
                     ^ start[5], count[5] = 2, room[5] = 4

    row     [ 0 0 0 0 | 0 0 7 0 9 ]      columns; 0 is null
                      ^ base            in its extent are columns base .. count-1
                          ^ dropped     all columns before are null

A row's extent is a power of two of cells; one that grows too small moves to one of twice the size, and
what it leaves waits in a free list of its size. So a request of 1k tokens takes room for 1k tokens even
where another holds 1M, a window takes room for the window, and a step still writes all rows with one
array operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.index import PrefixIndex
from hybridkv.cache.policies import (
    AttentionPolicy,
    EncoderPolicy,
    FullSpan,
    GroupKind,
    Policy,
    RowFacts,
    RunningStatePolicy,
    StatePolicy,
)
from hybridkv.errors import CacheError
from hybridkv.request import Request
from hybridkv.request_rows import grown
from hybridkv.specs import RequestLimits

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE: Int32 = np.empty(0, np.int32)


class CacheGroup:
    """What the manager keeps of one group.

    number: position in the config. kind: its spec and flags. states: its policy, for recurrent layers; else None.
    holds_all: no window bounds what a request holds. bounded_by_length: a window does, or the request's length.
    rows: block tables of the resident requests.
    each_published, each_state_position: the same as those without, quick to read singly.
    published: int64[rows], how many leading columns of a row are published or passed over. state_position:
    int64[rows], token count of the state that a row's last step leaves. pending: row -> token counts of its
    states that could not be published yet. accepted: int64[rows], the column of the state of a row's last accepted
    draft, until it is read; -1: where it always is. rotated: int64[rows], the column that changed places with column 0
    since the worker was told; 0: none. hashes_per_block: hash blocks of a block.
    """

    def __init__(self, number: int, kind: GroupKind, policy: Policy, index: PrefixIndex, hash_block_size: int) -> None:
        self.number = number
        self.kind = kind
        self.policy = policy
        self.states = policy if isinstance(policy, StatePolicy) else None
        self.holds_all = isinstance(policy, RunningStatePolicy | EncoderPolicy) or (
            isinstance(policy, AttentionPolicy) and isinstance(policy.span, FullSpan)
        )
        self.bounded_by_length = not self.holds_all and self.states is None
        self.index = index
        self.rows = BlockRows()
        self.published = np.zeros(len(self.rows.start), np.int64)
        self.state_position = np.zeros(len(self.rows.start), np.int64)
        self.accepted = np.full(len(self.rows.start), -1)
        self.rotated = np.zeros(len(self.rows.start), np.int64)
        self.pending: dict[int, tuple[int, ...]] = {}
        self.hashes_per_block = policy.block_size // hash_block_size
        self._look_anew()

    def _look_anew(self) -> None:
        """Columns are new arrays."""
        self.each_published, self.each_state_position = self.published.data, self.state_position.data

    # -- keys

    def keys(self, request: Request) -> Sequence[bytes]:
        """One key per full block of ``request`` in this group."""
        hashes_per_block = self.hashes_per_block
        if hashes_per_block == 1:
            return request.hashes
        return request.hashes[hashes_per_block - 1 :: hashes_per_block] if self.kind.publishes else ()

    def lacks_first(self, request: Request) -> bool:
        """Whether ``request`` has a full block here, and nothing is known of its first tokens. O(1)."""
        index, hashes, hashes_per_block = self.index, request.hashes, self.hashes_per_block
        return (
            not index.num_partial
            and len(hashes) >= hashes_per_block
            and index.get(hashes[hashes_per_block - 1]) is None
        )

    def key_run(self, request: Request, first: int, last: int) -> list[bytes]:
        """Keys of columns first .. last-1."""
        hashes_per_block = self.hashes_per_block
        return request.hashes[(first + 1) * hashes_per_block - 1 : last * hashes_per_block : hashes_per_block]

    def keys_at(self, request: Request, columns: Int64) -> list[bytes]:
        """Keys of ``columns``, ascending: of the tokens up to their ends, or of the encoder's input."""
        if self.kind.by_digest:
            of_encoder = request.encoder_keys(self.policy.block_size)
            return [of_encoder[column] for column in columns.tolist()]
        first, last = columns.item(0), columns.item(-1) + 1
        if last - first == len(columns):
            return self.key_run(request, first, last)
        hashes_per_block, hashes = self.hashes_per_block, request.hashes
        return [hashes[(column + 1) * hashes_per_block - 1] for column in columns.tolist()]

    def encoded(self, request: Request) -> Int32:
        """The blocks that hold the encoder's output of ``request`` under its digest: all, or none. O(blocks)."""
        keys = request.encoder_keys(self.policy.block_size) if self.kind.by_digest else []
        # freed last block first, evicted in that order: the last one is the first to be gone
        if not keys or self.index.get(keys[-1]) is None:
            return _NONE
        found = self.index.leading_run(keys)
        return found if len(found) == len(keys) else _NONE

    def knows_any(self, request: Request, missing: Sequence[int]) -> bool:
        """Whether tokens behind one of the token counts ``missing`` are indexed by now.

        Also when ``request`` was cut and has their key no longer. O(missing) look-ups.
        """
        size, hashes_per_block, hashes = self.policy.block_size, self.hashes_per_block, request.hashes
        for tokens in missing:
            column, known = divmod(tokens, size)
            if self.index.reach(request, column)[0] > known or (
                not known and (column + 1) * hashes_per_block > len(hashes)
            ):
                return True
        return False

    # -- rows

    def facts(self, row: int) -> RowFacts:
        """What ``row`` holds; nothing for -1."""
        if row < 0:
            return RowFacts()
        rows = self.rows
        held, dropped = rows.each_count[row], rows.each_dropped[row]
        return RowFacts(
            held, dropped, self.each_published[row], self.each_state_position[row], self.pending.get(row, ())
        )

    def ensure_rows(self, capacity: int) -> None:
        """Rows 0 .. capacity - 1 exist."""
        self.rows.ensure_rows(capacity)
        self.published = grown(self.published, capacity)
        self.state_position = grown(self.state_position, capacity)
        self.accepted, self.rotated = grown(self.accepted, capacity, -1), grown(self.rotated, capacity)
        self._look_anew()

    def clear(self, row: int) -> None:
        """``row`` holds nothing."""
        self.rows.clear(row)
        self.pending.pop(row, None)
        self.published[row] = self.state_position[row] = 0
        self.forget_accepted(row)

    # -- drafts

    def accept(self, rows: Int64, columns: Int64) -> None:
        """The states of ``rows`` go on from those in ``columns``."""
        if self.states is not None and self.states.rotates:
            self.rows.swap_first(rows, columns)
            self.rotated[rows] = columns
        else:
            self.accepted[rows] = columns

    def forget_accepted(self, rows: Int64 | int) -> None:
        """A step says where the states of ``rows`` are."""
        self.accepted[rows] = -1
        self.rotated[rows] = 0

    def next_event(self, row: int, *, publishes: bool) -> int:
        """The token count at which ``row`` needs, drops or can publish a block."""
        policy, rows = self.policy, self.rows
        soonest = policy.next_need(rows.each_count[row], rows.each_dropped[row])
        if publishes and (rule := policy.publishing) is not None:
            boundary = rule.next_tokens(self.each_published[row])
            if boundary < soonest:
                return boundary
        return soonest

    def next_events(self, rows: Int64, *, publishes: bool) -> Int64:
        """next_event of many rows, int64[len(rows)]."""
        soonest = self.policy.next_need(self.rows.count[rows], self.rows.dropped[rows])
        if publishes and self.policy.publishing is not None:
            soonest = np.minimum(soonest, self.policy.publishing.next_tokens(self.published[rows]))
        return soonest

    def held_blocks(self) -> int:
        """Distinct blocks in its rows. O(rows and their columns)."""
        held = [self.rows.held(row) for row in np.flatnonzero(self.rows.count).tolist()]
        return len(np.unique(np.concatenate(held))) if held else 0

    # -- needs

    def peak_blocks(self, limits: RequestLimits, steps: int, tokens: int, encoder_tokens: int) -> int:
        """Return the most blocks that a request of ``tokens`` tokens holds at once, ``steps`` in flight.

        limits: of that very request, but for groups that hold all.
        """
        most = self.policy.most_columns(tokens, encoder_tokens)
        if self.holds_all:
            return most
        bound = self.kind.spec.max_request_blocks(limits) + (steps - 1 if self.states is not None else 0)
        return min(most, bound)


_SMALLEST = 16
_FEW = 16
"""So many blocks are sooner looked for one by one."""


class BlockRows:
    """Rows of block ids. start, room, base, dropped, count: int64[capacity]; count is the columns of a row.

    origin: start - base, so that column c of a row is cells[origin + c]. each_count, each_dropped: the same as those
    without, quick to read singly.
    """

    def __init__(self, capacity: int = 64) -> None:
        self.cells = np.zeros(capacity * _SMALLEST, np.int32)
        self.start = np.zeros(capacity, np.int64)
        self.room = np.zeros(capacity, np.int64)
        self.base = np.zeros(capacity, np.int64)
        self.origin = np.zeros(capacity, np.int64)
        self.dropped = np.zeros(capacity, np.int64)
        self.count = np.zeros(capacity, np.int64)
        self._used = 0
        self._spare: dict[int, list[int]] = {}
        self._look_anew()

    def _look_anew(self) -> None:
        """Columns are new arrays: single cells of them are read and written in half of the time that numpy takes."""
        self.each_count, self.each_dropped = self.count.data, self.dropped.data
        self._each_base, self._each_room, self._each_origin = self.base.data, self.room.data, self.origin.data
        self._each_cell, self._each_start = self.cells.data, self.start.data

    def ids(self, row: int) -> Int32:
        """What the columns of ``row`` hold, null ones too; a new int32 array."""
        base = self._each_base[row]
        if not base:
            return self.stored(row).copy()
        return np.concatenate((np.zeros(base, np.int32), self.stored(row)))

    def stored(self, row: int) -> Int32:
        """Columns base .. count-1 of ``row``, a view."""
        start = self._each_start[row]
        view: Int32 = self.cells[start : start + self.each_count[row] - self._each_base[row]]
        return view

    def held(self, row: int) -> Int32:
        """The blocks of ``row`` in column order, null columns left out; a new int32 array."""
        stored = self.stored(row)
        if np.count_nonzero(stored) == len(stored):  # as nearly always
            return stored.copy()
        blocks: Int32 = stored[stored != 0]
        return blocks

    def span(self, row: int, first: int, last: int) -> Int32:
        """Columns first .. last-1 of ``row``, a copy; all of them at or behind its base."""
        origin = self._each_origin[row]
        copy: Int32 = self.cells[origin + first : origin + last].copy()
        return copy

    def at(self, rows: Int64, columns: Int64) -> Int32:
        """The ids in ``columns`` of ``rows``, element by element; 0 before a row's base."""
        before = columns < self.base[rows]
        if np.count_nonzero(before):
            found = np.where(before, 0, self.cells[np.where(before, 0, self.origin[rows] + columns)])
            return found.astype(np.int32)
        ids: Int32 = self.cells[self.origin[rows] + columns]
        return ids

    def row_at(self, row: int, columns: Int64) -> Int32:
        """Return the ids in ``columns``, ascending, of ``row``; 0 before its base."""
        if columns.item(0) < self._each_base[row]:
            return self.at(np.full(len(columns), row), columns)
        ids: Int32 = self.cells[columns + self._each_origin[row]]
        return ids

    def cell(self, row: int, column: int) -> int:
        """The block in ``column`` of ``row``, which has it; 0 for a null one."""
        return self._each_cell[self._each_origin[row] + column] if column >= self._each_base[row] else 0

    def push(self, row: int, block: int) -> None:
        """``block``, not the null one, behind what ``row`` has."""
        count: int = self.each_count[row]
        if count - self._each_base[row] >= self._each_room[row]:
            self._ensure(row, count + 1)
        self._each_cell[self._each_origin[row] + count] = block
        self.each_count[row] = count + 1

    def extend(self, row: int, ids: Int32) -> None:
        """``ids`` behind what ``row`` has. Null columns at the beginning of a row take no room."""
        count = self.each_count[row]
        if count == self._each_base[row] and len(ids) and not ids[0]:
            nulls = int((ids != 0).argmax()) if np.count_nonzero(ids) else len(ids)
            count += nulls
            self.base[row] = self.dropped[row] = self.count[row] = count
            self.origin[row] = self.start[row] - count
            ids = ids[nulls:]
        self._ensure(row, count + len(ids))
        end = self._each_origin[row] + count
        self.cells[end : end + len(ids)] = ids
        self.each_count[row] = count + len(ids)

    def extend_many(self, rows: Int64, counts: Int64, ids: Int32) -> tuple[Int64, Int64]:
        """``counts[i]`` of ``ids``, in order, behind what ``rows[i]`` has; rows distinct.

        Returns for every id the index into ``rows`` and the column, int64[len(ids)] each.
        """
        held = self.count[rows]
        after = held + counts
        small = (after - self.base[rows] > self.room[rows]).nonzero()[0]
        for i in small.tolist():
            self._ensure(int(rows[i]), int(after[i]))
        if counts.max(initial=0) <= 1:  # decoding rows
            owner = counts.nonzero()[0]
            column = held[owner]
        else:
            owner = np.arange(len(rows)).repeat(counts)
            column = held[owner] + np.arange(len(ids)) - (counts.cumsum() - counts).repeat(counts)
        of = rows[owner]
        self.cells[self.origin[of] + column] = ids
        self.count[rows] = after
        return owner, column

    def drop(self, row: int, columns: int) -> Int32:
        """Columns before ``columns`` are null from now on; the blocks they held, highest column first."""
        first = max(self.each_dropped[row], self._each_base[row])
        origin = self._each_origin[row]
        gone = self.cells[origin + first : origin + columns]
        ids: Int32 = gone[gone != 0][::-1].copy()
        gone[:] = 0
        self.dropped[row] = columns
        return ids

    def drop_one(self, row: int) -> int:
        """``drop`` of the first column that is not dropped: the block that it held, 0 for a null one."""
        column: int = self.each_dropped[row]
        self.each_dropped[row] = column + 1
        if column < self._each_base[row]:
            return 0
        place: int = self._each_origin[row] + column
        block: int = self._each_cell[place]
        self._each_cell[place] = 0
        return block

    def columns_before(self, rows: Int64, columns: Int64) -> tuple[Int64, Int32]:
        """Columns dropped .. columns[i]-1 of ``rows[i]``, row after row, each highest column first.

        Returns for each the index into ``rows``, int64, and its block, int32, 0 for a null column.
        """
        where, owner = self._before(rows, columns)
        ids: Int32 = self.cells[where]
        return owner, ids

    def drop_rows(self, rows: Int64, columns: Int64) -> None:
        """Columns before ``columns[i]`` of ``rows[i]`` are null from now on; rows distinct."""
        where, _ = self._before(rows, columns)
        self.cells[where] = 0
        self.dropped[rows] = columns

    def _before(self, rows: Int64, columns: Int64) -> tuple[Int64, Int64]:
        counts = columns - np.maximum(self.dropped[rows], self.base[rows])
        owner = np.arange(len(rows)).repeat(counts)
        behind = np.arange(len(owner)) - (counts.cumsum() - counts).repeat(counts)
        of = rows[owner]
        return self.origin[of] + columns[owner] - 1 - behind, owner

    def vacate(self, row: int, columns: tuple[int, ...]) -> Int32:
        """The blocks of ``columns``, which are null from now on, in this order."""
        where = np.array(columns, np.int64) + self.origin.item(row)
        ids: Int32 = self.cells[where]
        self.cells[where] = 0
        return ids

    def swap_first(self, rows: Int64, columns: Int64) -> None:
        """Column 0 and ``columns[i]`` of ``rows[i]``, which have all their columns, change places; rows distinct."""
        first, other = self.start[rows], self.start[rows] + columns
        self.cells[first], self.cells[other] = self.cells[other], self.cells[first]

    def rewrite(self, sources: Int64, targets: Int64) -> None:
        """Wherever a row has ``sources[i]`` it has ``targets[i]`` from now on. O(cells)."""
        where = self._where(sources)
        order = sources.argsort()
        self.cells[where] = targets[order][sources[order].searchsorted(self.cells[where])]

    def find(self, ids: Int64) -> tuple[Int64, Int64]:
        """Rows and columns that hold one of ``ids``, in row order; int64 each. O(cells)."""
        where = self._where(ids)
        rows = self.count.nonzero()[0] if where.size else where
        if not rows.size:
            return rows, rows
        rows = rows[self.start[rows].argsort()]
        owner = rows[self.start[rows].searchsorted(where, "right") - 1]
        within = where - self.start[owner]
        held = (within >= 0) & (within < (self.count - self.base)[owner])  # others are left over from rows before
        owner, within = owner[held], within[held]
        order = np.lexsort((within, owner))
        columns: Int64 = (self.base[owner] + within)[order]
        return owner[order], columns

    def _where(self, ids: Int64) -> Int64:
        """Cells that hold one of ``ids``, or did when they were a row's. O(cells), few times over."""
        cells = self.cells[: self._used]
        if len(ids) > _FEW:
            return np.isin(cells, ids).nonzero()[0]
        found = np.zeros(len(cells), np.bool_)
        for one in ids.tolist():
            found |= cells == one
        return found.nonzero()[0]

    def clear(self, row: int) -> None:
        """``row`` holds nothing and gives its extent back."""
        if row >= len(self.start):
            return
        room = self._each_room[row]
        if room:
            self._spare.setdefault(room, []).append(self._each_start[row])
        self.start[row] = self.room[row] = self.base[row] = self.origin[row] = self.dropped[row] = self.count[row] = 0

    def ensure_rows(self, capacity: int) -> None:
        """Rows 0 .. capacity - 1 exist."""
        if capacity > len(self.start):
            self.start, self.room = grown(self.start, capacity), grown(self.room, capacity)
            self.base, self.origin = grown(self.base, capacity), grown(self.origin, capacity)
            self.dropped, self.count = grown(self.dropped, capacity), grown(self.count, capacity)
            self._look_anew()

    def extents(self) -> list[tuple[int, int]]:
        """(start, room) of every extent, given to a row or spare; for checks."""
        given = [(s, r) for s, r in zip(self.start.tolist(), self.room.tolist(), strict=True) if r]
        return given + [(start, room) for room, starts in self._spare.items() for start in starts]

    def _ensure(self, row: int, count: int) -> None:
        """Room for ``count`` columns. What was dropped makes room first, where half of the extent becomes free."""
        old_start, old_room = self._each_start[row], self._each_room[row]
        base, held = self._each_base[row], self.each_count[row]
        if count - base <= old_room:
            return
        if count < held:
            raise CacheError(f"row {row} cannot shrink from {held} to {count} columns")
        first = max(self.each_dropped[row], base)
        kept = self.cells[old_start + first - base : old_start + held - base].copy()
        start, room = old_start, old_room
        if 2 * (count - first) > old_room:
            room = max(_SMALLEST, 1 << (count - first - 1).bit_length())
            start = self._extent(room)
            if old_room:
                self._spare.setdefault(old_room, []).append(old_start)
        self.cells[start : start + len(kept)] = kept
        self.start[row], self.room[row], self.base[row], self.origin[row] = start, room, first, start - first

    def _extent(self, room: int) -> int:
        spare = self._spare.get(room)
        if spare:
            return spare.pop()
        start = self._used
        if start + room > len(self.cells):
            self.cells = grown(self.cells, start + room)
            self._look_anew()
        self._used = start + room
        return start
