"""The block tables of one group as the manager keeps them: one flat array, an extent a row.

    cells   [ row 5: 8 9 . . | row 2: 3 4 6 7 | (free) . . | row 0: ... ]
                     ^ start[5], count[5] = 2, room[5] = 4

A row's extent is a power of two of cells; one that grows too small moves to one of twice the size, and
what it leaves waits in a free list of its size. So a request of 1k tokens takes room for 1k tokens even
where another holds 1M, and a step still writes all rows with one array operation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import CacheError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_SMALLEST = 16


class BlockRows:
    """Rows of block ids. start, room, count: int64[capacity]; count is what a row holds."""

    def __init__(self, capacity: int = 64) -> None:
        self.cells = np.zeros(capacity * _SMALLEST, np.int32)
        self.start = np.zeros(capacity, np.int64)
        self.room = np.zeros(capacity, np.int64)
        self.count = np.zeros(capacity, np.int64)
        self._used = 0
        self._spare: dict[int, list[int]] = {}

    def ids(self, row: int) -> Int32:
        """What ``row`` holds, a new int32 array."""
        start = self.start.item(row)
        return self.cells[start : start + self.count.item(row)].copy()

    def at(self, rows: Int64, columns: Int64) -> Int32:
        """The ids in ``columns`` of ``rows``, element by element."""
        found: Int32 = self.cells[self.start[rows] + columns]
        return found

    def extend(self, row: int, ids: Int32) -> None:
        """``ids`` behind what ``row`` holds."""
        self._ensure(row, self.count.item(row) + len(ids))
        end = self.start.item(row) + self.count.item(row)
        self.cells[end : end + len(ids)] = ids
        self.count[row] += len(ids)

    def extend_many(self, rows: Int64, counts: Int64, ids: Int32) -> tuple[Int64, Int64]:
        """``counts[i]`` of ``ids``, in order, behind what ``rows[i]`` holds; rows distinct.

        Returns for every id the index into ``rows`` and the column, int64[len(ids)] each.
        """
        held = self.count[rows]
        after = held + counts
        small = np.flatnonzero(after > self.room[rows])
        for i in small.tolist():
            self._ensure(int(rows[i]), int(after[i]))
        if counts.max(initial=0) <= 1:  # decoding rows
            owner = np.flatnonzero(counts)
            column = held[owner]
        else:
            owner = np.repeat(np.arange(len(rows)), counts)
            column = held[owner] + np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.cells[self.start[rows[owner]] + column] = ids
        self.count[rows] = after
        return owner, column

    def clear(self, row: int) -> None:
        """``row`` holds nothing and gives its extent back."""
        if row >= len(self.start):
            return
        room = self.room.item(row)
        if room:
            self._spare.setdefault(room, []).append(self.start.item(row))
        self.start[row] = self.room[row] = self.count[row] = 0

    def ensure_rows(self, capacity: int) -> None:
        """Rows 0 .. capacity - 1 exist."""
        missing = capacity - len(self.start)
        if missing > 0:
            none = np.zeros(missing, np.int64)
            self.start = np.concatenate((self.start, none))
            self.room = np.concatenate((self.room, none))
            self.count = np.concatenate((self.count, none))

    def extents(self) -> list[tuple[int, int]]:
        """(start, room) of every extent, given to a row or spare; for checks."""
        given = [(s, r) for s, r in zip(self.start.tolist(), self.room.tolist(), strict=True) if r]
        return given + [(start, room) for room, starts in self._spare.items() for start in starts]

    def _ensure(self, row: int, length: int) -> None:
        old_start, old_room, count = self.start.item(row), self.room.item(row), self.count.item(row)
        if length <= old_room:
            return
        if length < count:
            raise CacheError(f"row {row} cannot shrink from {count} to {length} blocks")
        room = max(_SMALLEST, 1 << (length - 1).bit_length())
        start = self._extent(room)
        self.cells[start : start + count] = self.cells[old_start : old_start + count]
        if old_room:
            self._spare.setdefault(old_room, []).append(old_start)
        self.start[row], self.room[row] = start, room

    def _extent(self, room: int) -> int:
        spare = self._spare.get(room)
        if spare:
            return spare.pop()
        start = self._used
        if start + room > len(self.cells):
            grown = np.zeros(max(2 * len(self.cells), start + room), np.int32)
            grown[:start] = self.cells[:start]
            self.cells = grown
        self._used = start + room
        return start
