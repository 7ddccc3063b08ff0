"""Rows of block ids in one flat array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache.rows.block_rows import BlockRows


def ids(*blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(blocks, np.int32)


def rows64(*rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(rows, np.int64)


def test_a_row_grows_and_moves() -> None:
    table = BlockRows()
    table.extend(3, np.arange(1, 17, dtype=np.int32))
    before = table.start.item(3)
    table.extend(3, ids(17))
    assert table.ids(3).tolist() == list(range(1, 18))
    assert table.room.item(3) == 32
    assert table.start.item(3) != before
    table.extend(0, ids(7))
    assert table.start.item(0) == before  # what the row left is used again


def test_ids_are_a_copy() -> None:
    table = BlockRows()
    table.extend(0, ids(1, 2))
    table.ids(0)[0] = 99
    assert table.ids(0).tolist() == [1, 2]


def test_extend_many_names_owner_and_column() -> None:
    table = BlockRows()
    table.extend(1, ids(9))
    owner, column = table.extend_many(rows64(4, 1, 2), rows64(2, 1, 0), ids(5, 6, 7))
    assert owner.tolist() == [0, 0, 1]
    assert column.tolist() == [0, 1, 1]
    assert table.ids(4).tolist() == [5, 6]
    assert table.ids(1).tolist() == [9, 7]
    assert table.ids(2).tolist() == []
    assert table.at(rows64(1, 4), rows64(1, 0)).tolist() == [7, 5]


def test_a_short_row_takes_little_room_beside_a_long_one() -> None:
    table = BlockRows()
    table.extend(0, np.arange(100_000, dtype=np.int32))
    table.extend(1, ids(1, 2))
    assert table.room.item(1) == 16
    assert table.room.item(0) == 1 << 17


def test_clearing_a_row_that_never_was() -> None:
    table = BlockRows(2)
    table.clear(5)
    table.clear(1)
    assert table.extents() == []


@pytest.mark.parametrize("capacity", [2, 64])
def test_rows_are_added(capacity: int) -> None:
    table = BlockRows(capacity)
    table.extend(1, ids(4))
    table.ensure_rows(100)
    table.extend(99, ids(5))
    assert (table.ids(1).tolist(), table.ids(99).tolist()) == ([4], [5])
    rows = len(table.start)
    assert rows >= 100
    table.ensure_rows(10)
    assert len(table.start) == rows


@given(st.data())
def test_is_a_list_of_lists(data: st.DataObject) -> None:
    table = BlockRows(4)
    naive: list[list[int]] = [[] for _ in range(4)]
    fresh = 1
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["one", "many", "clear"]))
        if action == "clear":
            row = data.draw(st.integers(0, 3))
            table.clear(row)
            naive[row] = []
        elif action == "one":
            row, n = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 40))
            table.extend(row, np.arange(fresh, fresh + n, dtype=np.int32))
            naive[row] += range(fresh, fresh + n)
            fresh += n
        else:
            rows = data.draw(st.lists(st.integers(0, 3), unique=True))
            counts = [data.draw(st.integers(0, 40)) for _ in rows]
            total = sum(counts)
            table.extend_many(rows64(*rows), rows64(*counts), np.arange(fresh, fresh + total, dtype=np.int32))
            for row, n in zip(rows, counts, strict=True):
                naive[row] += range(fresh, fresh + n)
                fresh += n
        assert [table.ids(row).tolist() for row in range(4)] == naive
        end = 0
        for start, room in sorted(table.extents()):
            assert start >= end
            end = start + room
        assert end <= len(table.cells)
