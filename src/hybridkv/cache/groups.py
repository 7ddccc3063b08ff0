"""One group of layers at work: its policy, its block rows, and the keys of its blocks.

The block tables of a group are one flat array with an extent for each row:

    cells   [ row 5: 8 9 . . | row 2: 3 4 6 7 | (free) . . | row 0: ... ]
                     ^ start[5], count[5] = 2, room[5] = 4

    row     [ 0 0 0 0 | 0 0 7 0 9 ]      columns; 0 is null
                      ^ base            columns base .. count-1 lie in the extent
                          ^ dropped     all columns before it are null

    a window of 5 tokens, blocks of 2 tokens, 18 tokens computed (the next token reads the 4 before it):

    tokens    [ 0 .. 13: no longer read | 14 15 | 16 17 | new ... ]
    columns     0 .. 6:  dropped            7       8       9: appended by the next step

The room of an extent is a power of two. A row that outgrows it moves to an extent of twice the size, and its old extent
waits in a free list of its size. So a request of 1k tokens takes room for 1k tokens even if another request holds 1M, a
window takes room for the window, and a step still writes all rows with one array operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.index import PrefixIndex
from hybridkv.cache.policies import (
    AttentionPolicy,
    EncoderPolicy,
    FixedPolicy,
    FullSpan,
    GroupKind,
    Policy,
    RowFacts,
    StatePolicy,
    WindowSpan,
)
from hybridkv.errors import CacheError
from hybridkv.request import Request
from hybridkv.request_rows import grown
from hybridkv.specs import RequestLimits

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE: Int32 = np.empty(0, np.int32)


class CacheGroup:
    """The state of one group.

    Args:
        number: Its position in the config.
        kind: Its spec and flags.
        policy: The rules of its layer kind.
        index: The keys of its blocks.
        hash_block_size: Tokens of a hash block.

    Attributes:
        states: Its policy if its layers are recurrent, else ``None``.
        holds_all: A request keeps all blocks that it took, and no window bounds them.
        bounded_by_length: A window, or the length of the request, bounds the blocks that it holds.
        rows: Block tables of the resident requests.
        published: int64[rows], leading columns that are published or skipped.
        state_position: int64[rows], token count of the state that the row's last step leaves.
        each_published, each_state_position: The same memory, quick to read one by one.
        pending: row -> token counts of its states that could not be published yet.
        accepted: int64[rows], column of the state of the row's last accepted draft until it is read; -1 for the usual
            column.
        rotated: int64[rows], column that changed places with column 0 since the worker last got the table; 0 for none.
        hashes_per_block: Hash blocks of a block.
    """

    def __init__(self, number: int, kind: GroupKind, policy: Policy, index: PrefixIndex, hash_block_size: int) -> None:
        self.number = number
        self.kind = kind
        self.policy = policy
        self.states = policy if isinstance(policy, StatePolicy) and kind.keeps_state else None
        self.holds_all = isinstance(policy, FixedPolicy | EncoderPolicy) or (
            isinstance(policy, AttentionPolicy) and isinstance(policy.span, FullSpan)
        )
        self.bounded_by_length = not self.holds_all and self.states is None
        self.index = index
        if kind.keeps_ring and kind.publishes:
            index.empty = kind.pools
        self.rows = BlockRows()
        self.published = np.zeros(len(self.rows.start), np.int64)
        self.state_position = np.zeros(len(self.rows.start), np.int64)
        self.accepted = np.full(len(self.rows.start), -1)
        self.rotated = np.zeros(len(self.rows.start), np.int64)
        self.pending: dict[int, tuple[int, ...]] = {}
        self.hashes_per_block = policy.block_size // hash_block_size
        self._look_anew()

    def _look_anew(self) -> None:
        """Renew the memory views after the columns became new arrays."""
        self.each_published, self.each_state_position = self.published.data, self.state_position.data

    # -- keys

    def keys(self, request: Request) -> Sequence[bytes]:
        """Return one key for each full block of a request.

        Args:
            request: The request.
        """
        hashes_per_block = self.hashes_per_block
        if hashes_per_block == 1:
            return request.hashes
        return request.hashes[hashes_per_block - 1 :: hashes_per_block] if self.kind.publishes else ()

    def lacks_first(self, request: Request) -> bool:
        """Return whether no block of this group begins as the first full block of a request does. O(1).

        Args:
            request: The request. False if it has no full block.
        """
        index, hashes, hashes_per_block = self.index, request.hashes, self.hashes_per_block
        return (
            not index.num_partial
            and len(hashes) >= hashes_per_block
            and index.get(hashes[hashes_per_block - 1]) is None
        )

    def key_run(self, request: Request, first: int, last: int) -> list[bytes]:
        """Return the keys of columns first .. last-1.

        Args:
            request: The request.
            first: First column.
            last: Column after the last one.
        """
        hashes_per_block = self.hashes_per_block
        return request.hashes[(first + 1) * hashes_per_block - 1 : last * hashes_per_block : hashes_per_block]

    def keys_at(self, request: Request, columns: Int64) -> list[bytes]:
        """Return the keys of columns: hashes of all tokens to their ends, or digests of the encoder's input.

        Args:
            request: The request.
            columns: int64[n], ascending.
        """
        if self.kind.by_digest:
            of_encoder = request.encoder_keys(self.policy.block_size)
            return [of_encoder[column] for column in columns.tolist()]
        first, last = columns.item(0), columns.item(-1) + 1
        if last - first == len(columns):
            return self.key_run(request, first, last)
        hashes_per_block, hashes = self.hashes_per_block, request.hashes
        return [hashes[(column + 1) * hashes_per_block - 1] for column in columns.tolist()]

    def encoded(self, request: Request) -> Int32:
        """Return the blocks with the encoder output of a request: all of them, or an empty array. O(blocks).

        Args:
            request: A request with an encoder input.
        """
        keys = request.encoder_keys(self.policy.block_size) if self.kind.by_digest else []
        # blocks are freed, and so evicted, last block first: if the last one is there, probably all are
        if not keys or self.index.get(keys[-1]) is None:
            return _NONE
        found = self.index.leading_run(keys)
        return found if len(found) == len(keys) else _NONE

    def knows_any(self, request: Request, missing: Sequence[int]) -> bool:
        """Return whether a position at which a search ended is known by now. O(positions) look-ups.

        Args:
            request: The request; it may have been cut since, and then lacks the key.
            missing: Token counts after which no token was known.
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
        """Return the facts of a row; empty facts for -1.

        Args:
            row: The row.
        """
        if row < 0:
            return RowFacts()
        rows = self.rows
        held, dropped = rows.each_count[row], rows.each_dropped[row]
        return RowFacts(
            held, dropped, self.each_published[row], self.each_state_position[row], self.pending.get(row, ())
        )

    def ensure_rows(self, capacity: int) -> None:
        """Make rows 0 .. capacity - 1 exist.

        Args:
            capacity: Number of rows.
        """
        self.rows.ensure_rows(capacity)
        self.published = grown(self.published, capacity)
        self.state_position = grown(self.state_position, capacity)
        self.accepted, self.rotated = grown(self.accepted, capacity, -1), grown(self.rotated, capacity)
        self._look_anew()

    def clear(self, row: int) -> None:
        """Empty a row.

        Args:
            row: The row.
        """
        self.rows.clear(row)
        self.pending.pop(row, None)
        self.published[row] = self.state_position[row] = 0
        self.forget_accepted(row)

    # -- drafts

    def accept(self, rows: Int64, columns: Int64) -> None:
        """Make the states in columns the states of rows, after drafts were accepted.

        Args:
            rows: int64[n].
            columns: int64[n].
        """
        if self.states is not None and self.states.rotates:
            self.rows.swap_first(rows, columns)
            self.rotated[rows] = columns
        else:
            self.accepted[rows] = columns

    def forget_accepted(self, rows: Int64 | int) -> None:
        """Note that a step says where the states of rows are.

        Args:
            rows: int64[n], or one row.
        """
        self.accepted[rows] = -1
        self.rotated[rows] = 0

    def unread(self, tokens: int) -> int:
        """Return the leading columns that no layer reads after ``tokens`` tokens. A row may keep more columns.

        A row that began with a hit lacks the retained columns before its window.

        Args:
            tokens: Token count.
        """
        policy = self.policy
        if isinstance(policy, AttentionPolicy) and isinstance(policy.span, WindowSpan):
            return policy.span.first_read(tokens) // policy.block_size
        return policy.droppable(tokens)

    def next_event(self, row: int, *, publishes: bool) -> int:
        """Return the token count at which a row next needs, drops or can publish a block.

        Args:
            row: The row.
            publishes: Whether publishing counts.
        """
        policy, rows = self.policy, self.rows
        soonest = policy.next_need(rows.each_count[row], rows.each_dropped[row])
        if publishes and (rule := policy.publishing) is not None:
            boundary = rule.next_tokens(self.each_published[row])
            if boundary < soonest:
                return boundary
        return soonest

    def next_events(self, rows: Int64, *, publishes: bool) -> Int64:
        """Return the next events of many rows, int64[n].

        Args:
            rows: int64[n].
            publishes: Whether publishing counts.
        """
        soonest = self.policy.next_need(self.rows.count[rows], self.rows.dropped[rows])
        if publishes and self.policy.publishing is not None:
            soonest = np.minimum(soonest, self.policy.publishing.next_tokens(self.published[rows]))
        return soonest

    def held_blocks(self) -> int:
        """Return the number of distinct blocks in its rows. O(rows and their columns)."""
        held = [self.rows.held(row) for row in np.flatnonzero(self.rows.count).tolist()]
        return len(np.unique(np.concatenate(held))) if held else 0

    # -- needs

    def peak_blocks(
        self, limits: RequestLimits, steps: int, tokens: int, encoder_tokens: int, unread_columns: int = 0
    ) -> int:
        """Return the most blocks that a request holds at once.

        Args:
            limits: Bounds of the request; not read for groups that hold all.
            steps: Steps in flight.
            tokens: Tokens of the request.
            encoder_tokens: Tokens of its encoder output.
            unread_columns: Leading columns that it no longer reads, and so does not hold.
        """
        most = self.policy.most_columns(tokens, encoder_tokens) - unread_columns
        if self.holds_all:
            return most
        bound = self.kind.spec.max_request_blocks(limits) + (steps - 1 if self.states is not None else 0)
        return min(most, bound)


_SMALLEST = 16
_FEW = 16
"""Up to this many blocks are searched one by one. Chosen by hand."""


class BlockRows:
    """Rows of block ids.

    Attributes:
        start, room, base, dropped, count: int64[capacity]; see the module. ``count`` is the number of columns.
        origin: start - base, so that column c of a row is cells[origin + c].
        each_count, each_dropped: The same memory, quick to read one by one.
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
        """Renew the memory views after columns became new arrays: numpy takes twice as long to read one cell."""
        self.each_count, self.each_dropped = self.count.data, self.dropped.data
        self._each_base, self._each_room, self._each_origin = self.base.data, self.room.data, self.origin.data
        self._each_cell, self._each_start = self.cells.data, self.start.data

    def ids(self, row: int) -> Int32:
        """Return all columns of ``row``, null ones included; a new int32 array."""
        base = self._each_base[row]
        if not base:
            return self.stored(row).copy()
        return np.concatenate((np.zeros(base, np.int32), self.stored(row)))

    def stored(self, row: int) -> Int32:
        """Return columns base .. count-1 of ``row``, a view."""
        start = self._each_start[row]
        view: Int32 = self.cells[start : start + self.each_count[row] - self._each_base[row]]
        return view

    def held(self, row: int) -> Int32:
        """Return the blocks of ``row`` in column order without null columns; a new int32 array."""
        stored = self.stored(row)
        if np.count_nonzero(stored) == len(stored):  # the usual case
            return stored.copy()
        blocks: Int32 = stored[stored != 0]
        return blocks

    def span(self, row: int, first: int, last: int) -> Int32:
        """Return columns first .. last-1 of ``row``, none before its base; a copy."""
        origin = self._each_origin[row]
        copy: Int32 = self.cells[origin + first : origin + last].copy()
        return copy

    def at(self, rows: Int64, columns: Int64) -> Int32:
        """Return the ids in ``columns`` of ``rows``, element by element; 0 before a row's base."""
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
        """Return the block in ``column`` of ``row``; 0 for a null one."""
        return self._each_cell[self._each_origin[row] + column] if column >= self._each_base[row] else 0

    def push(self, row: int, block: int) -> None:
        """Append ``block``, not the null one, to ``row``."""
        count: int = self.each_count[row]
        if count - self._each_base[row] >= self._each_room[row]:
            self._ensure(row, count + 1)
        self._each_cell[self._each_origin[row] + count] = block
        self.each_count[row] = count + 1

    def extend(self, row: int, ids: Int32) -> None:
        """Append ``ids`` to ``row``. Null columns at the beginning of a row take no room."""
        count = self.each_count[row]
        if count == self._each_base[row] and len(ids) and not ids.item(0):
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
        """Append ``counts[i]`` of ``ids``, in order, to ``rows[i]``. Rows are distinct.

        Returns:
            For each id the index into ``rows`` and the column, int64[len(ids)] each.
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
        """Make the columns before ``columns`` null, and return their blocks, highest column first."""
        first = max(self.each_dropped[row], self._each_base[row])
        origin = self._each_origin[row]
        gone = self.cells[origin + first : origin + columns]
        ids: Int32 = gone[gone != 0][::-1].copy()
        gone[:] = 0
        self.dropped[row] = columns
        return ids

    def drop_one(self, row: int) -> int:
        """Drop the next column of ``row``, and return its block; 0 for a null one."""
        column: int = self.each_dropped[row]
        self.each_dropped[row] = column + 1
        if column < self._each_base[row]:
            return 0
        place: int = self._each_origin[row] + column
        block: int = self._each_cell[place]
        self._each_cell[place] = 0
        return block

    def columns_before(self, rows: Int64, columns: Int64) -> tuple[Int64, Int32]:
        """Return the columns dropped .. columns[i]-1 of ``rows[i]``, row after row, highest column first.

        Returns:
            For each column the index into ``rows``, int64, and the block, int32; 0 for a null one.
        """
        where, owner = self._before(rows, columns)
        ids: Int32 = self.cells[where]
        return owner, ids

    def drop_rows(self, rows: Int64, columns: Int64) -> None:
        """Make the columns before ``columns[i]`` of ``rows[i]`` null. Rows are distinct."""
        where, _ = self._before(rows, columns)
        self.cells[where] = 0
        self.dropped[rows] = columns

    def _before(self, rows: Int64, columns: Int64) -> tuple[Int64, Int64]:
        """Return the cells of columns dropped .. columns[i]-1, highest first, and the index of the row of each."""
        counts = columns - np.maximum(self.dropped[rows], self.base[rows])
        owner = np.arange(len(rows)).repeat(counts)
        nth = np.arange(len(owner)) - (counts.cumsum() - counts).repeat(counts)
        of = rows[owner]
        return self.origin[of] + columns[owner] - 1 - nth, owner

    def vacate(self, row: int, columns: tuple[int, ...]) -> Int32:
        """Make ``columns`` null, and return their blocks in this order."""
        where = np.array(columns, np.int64) + self.origin.item(row)
        ids: Int32 = self.cells[where]
        self.cells[where] = 0
        return ids

    def swap_first(self, rows: Int64, columns: Int64) -> None:
        """Swap column 0 and ``columns[i]`` of ``rows[i]``, whose extents hold all columns. Rows are distinct."""
        first, other = self.start[rows], self.start[rows] + columns
        self.cells[first], self.cells[other] = self.cells[other], self.cells[first]

    def rewrite(self, sources: Int64, targets: Int64) -> None:
        """Replace ``sources[i]`` with ``targets[i]`` in all rows. O(cells)."""
        where = self._where(sources)
        order = sources.argsort()
        self.cells[where] = targets[order][sources[order].searchsorted(self.cells[where])]

    def find(self, ids: Int64) -> tuple[Int64, Int64]:
        """Return the rows and columns that hold one of ``ids``, in row order; int64 each. O(cells)."""
        where = self._where(ids)
        rows = (self.count > self.base).nonzero()[0] if where.size else where  # a row of null columns has no cells
        if not rows.size:
            return rows, rows
        rows = rows[self.start[rows].argsort()]
        owner = rows[self.start[rows].searchsorted(where, "right") - 1]
        within = where - self.start[owner]
        held = (within >= 0) & (within < (self.count - self.base)[owner])  # other cells are stale
        owner, within = owner[held], within[held]
        order = np.lexsort((within, owner))
        columns: Int64 = (self.base[owner] + within)[order]
        return owner[order], columns

    def _where(self, ids: Int64) -> Int64:
        """Return the cells that hold one of ``ids``, stale cells of earlier rows included. O(cells)."""
        cells = self.cells[: self._used]
        if len(ids) > _FEW:
            return np.isin(cells, ids).nonzero()[0]
        found = np.zeros(len(cells), np.bool_)
        for one in ids.tolist():
            found |= cells == one
        return found.nonzero()[0]

    def clear(self, row: int) -> None:
        """Empty ``row``, and give its extent back."""
        if row >= len(self.start):
            return
        room = self._each_room[row]
        if room:
            self._spare.setdefault(room, []).append(self._each_start[row])
        self._each_start[row] = self._each_room[row] = self._each_base[row] = self._each_origin[row] = 0
        self.each_dropped[row] = self.each_count[row] = 0

    def ensure_rows(self, capacity: int) -> None:
        """Make rows 0 .. capacity - 1 exist."""
        if capacity > len(self.start):
            self.start, self.room = grown(self.start, capacity), grown(self.room, capacity)
            self.base, self.origin = grown(self.base, capacity), grown(self.origin, capacity)
            self.dropped, self.count = grown(self.dropped, capacity), grown(self.count, capacity)
            self._look_anew()

    def extents(self) -> list[tuple[int, int]]:
        """Return (start, room) of every extent, used or spare; for checks."""
        given = [(s, r) for s, r in zip(self.start.tolist(), self.room.tolist(), strict=True) if r]
        return given + [(start, room) for room, starts in self._spare.items() for start in starts]

    def _ensure(self, row: int, count: int) -> None:
        """Make room for ``count`` columns. Reuses the room of dropped columns if that frees half of the extent."""
        old_start, old_room = self._each_start[row], self._each_room[row]
        base, held = self._each_base[row], self.each_count[row]
        if count - base <= old_room:
            return
        if count < held:
            raise CacheError(f"row {row} cannot shrink from {held} to {count} columns")
        first = max(self.each_dropped[row], base)
        kept = self.cells[old_start + first - base : old_start + held - base].copy() if held > first else None
        start, room = old_start, old_room
        if 2 * (count - first) > old_room:
            room = max(_SMALLEST, 1 << (count - first - 1).bit_length())
            start = self._extent(room)
            if old_room:
                self._spare.setdefault(old_room, []).append(old_start)
        if kept is not None:
            self.cells[start : start + len(kept)] = kept
        self._each_start[row], self._each_room[row] = start, room
        self._each_base[row], self._each_origin[row] = first, start - first

    def _extent(self, room: int) -> int:
        """Return the start of an unused extent of ``room`` cells."""
        spare = self._spare.get(room)
        if spare:
            return spare.pop()
        start = self._used
        if start + room > len(self.cells):
            self.cells = grown(self.cells, start + room)
            self._look_anew()
        self._used = start + room
        return start
