"""Rows of block ids in one flat array."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache.groups import BlockRows


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


def test_a_short_row_takes_little_room_beside_a_long_one() -> None:
    table = BlockRows()
    table.extend(0, np.arange(100_000, dtype=np.int32))
    table.extend(1, ids(1, 2))
    assert table.room.item(1) == 16
    assert table.room.item(0) == 1 << 17


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


NOBODYS = 1_000_000


@pytest.mark.parametrize("few", [1, 40])
def test_blocks_are_found_and_renamed_in_all_rows_and_nowhere_else(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once or one by one; cells of rows that are gone do not count."""
    monkeypatch.setattr("hybridkv.cache.groups._FEW", few)
    rows, plain, random, unused = BlockRows(), dict[int, list[int]](), Random(3), iter(range(1, 9000))
    for turn in range(400):
        row = random.randrange(30)
        if row in plain and random.random() < 0.2:
            rows.clear(row)
            del plain[row]
        elif row in plain and random.random() < 0.3:
            columns = random.randrange(len(plain[row]) + 1)
            rows.drop(row, max(columns, rows.dropped.item(row)))
            plain[row][:columns] = [0] * columns
        else:
            new = [next(unused) for _ in range(random.randrange(1, 9))]
            rows.extend(row, np.array(new, np.int32))
            plain.setdefault(row, []).extend(new)
        held = [(block, of, at) for of, cells in sorted(plain.items()) for at, block in enumerate(cells) if block]
        asked = random.sample([*held, (NOBODYS, 0, 0)], min(len(held), random.randrange(1, 25)))
        where = rows.find(rows64(*(block for block, *_ in asked)))
        found = np.stack(where, axis=1).tolist()
        assert found == sorted([of, at] for block, of, at in asked if block != NOBODYS)
        if turn % 3 == 0 and held:
            sources = np.array([block for block, *_ in random.sample(held, min(len(held), 20))], np.int64)
            targets = np.arange(10_000 + 20 * turn, 10_000 + 20 * turn + len(sources))
            rows.rewrite(sources, targets)
            new_names = dict(zip(sources.tolist(), targets.tolist(), strict=True))
            plain = {row: [new_names.get(block, block) for block in cells] for row, cells in plain.items()}
            assert {row: rows.ids(row).tolist() for row in plain} == plain
