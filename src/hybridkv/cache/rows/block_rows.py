"""The block tables of one group as the manager keeps them: one flat array, an extent a row.

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

import numpy as np
from numpy.typing import NDArray

from hybridkv.columns import grown
from hybridkv.errors import CacheError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

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
        self._each_cell = self.cells.data

    def ids(self, row: int) -> Int32:
        """What the columns of ``row`` hold, null ones too; a new int32 array."""
        base = self.base.item(row)
        if not base:
            return self.stored(row).copy()
        return np.concatenate((np.zeros(base, np.int32), self.stored(row)))

    def stored(self, row: int) -> Int32:
        """Columns base .. count-1 of ``row``, a view."""
        start = self.start.item(row)
        view: Int32 = self.cells[start : start + self.count.item(row) - self.base.item(row)]
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
        origin = self.origin.item(row)
        copy: Int32 = self.cells[origin + first : origin + last].copy()
        return copy

    def at(self, rows: Int64, columns: Int64) -> Int32:
        """The ids in ``columns`` of ``rows``, element by element; 0 before a row's base."""
        before = columns < self.base[rows]
        if before.any():
            found = np.where(before, 0, self.cells[np.where(before, 0, self.origin[rows] + columns)])
            return found.astype(np.int32)
        ids: Int32 = self.cells[self.origin[rows] + columns]
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
        count = self.count.item(row)
        if count == self.base.item(row) and len(ids) and not ids[0]:
            nulls = int((ids != 0).argmax()) if ids.any() else len(ids)
            count += nulls
            self.base[row] = self.dropped[row] = self.count[row] = count
            self.origin[row] = self.start[row] - count
            ids = ids[nulls:]
        self._ensure(row, count + len(ids))
        end = self.origin.item(row) + count
        self.cells[end : end + len(ids)] = ids
        self.count[row] = count + len(ids)

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
            owner = np.repeat(np.arange(len(rows)), counts)
            column = held[owner] + np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        of = rows[owner]
        self.cells[self.origin[of] + column] = ids
        self.count[rows] = after
        return owner, column

    def drop(self, row: int, columns: int) -> Int32:
        """Columns before ``columns`` are null from now on; the blocks they held, highest column first."""
        first = max(self.dropped.item(row), self.base.item(row))
        origin = self.origin.item(row)
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
        owner = np.repeat(np.arange(len(rows)), counts)
        behind = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
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
        order = np.argsort(sources)
        self.cells[where] = targets[order][np.searchsorted(sources[order], self.cells[where])]

    def find(self, ids: Int64) -> tuple[Int64, Int64]:
        """Rows and columns that hold one of ``ids``, in row order; int64 each. O(cells)."""
        where = self._where(ids)
        rows = np.flatnonzero(self.count) if where.size else where
        if not rows.size:
            return rows, rows
        rows = rows[np.argsort(self.start[rows])]
        owner = rows[np.searchsorted(self.start[rows], where, "right") - 1]
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
            return np.flatnonzero(np.isin(cells, ids))
        return np.flatnonzero(np.logical_or.reduce([cells == one for one in ids.tolist()]))

    def clear(self, row: int) -> None:
        """``row`` holds nothing and gives its extent back."""
        if row >= len(self.start):
            return
        room = self.room.item(row)
        if room:
            self._spare.setdefault(room, []).append(self.start.item(row))
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
        old_start, old_room = self.start.item(row), self.room.item(row)
        base, held = self.base.item(row), self.count.item(row)
        if count - base <= old_room:
            return
        if count < held:
            raise CacheError(f"row {row} cannot shrink from {held} to {count} columns")
        first = max(self.dropped.item(row), base)
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
