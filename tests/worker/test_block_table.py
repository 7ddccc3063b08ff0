from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import BlockTable


def table(
    rows: int = 4, width: int = 8, block_size: int = 4, tokens: int = 32, num_blocks: int | None = None
) -> BlockTable:
    return BlockTable(block_size, rows, width, tokens, num_blocks=num_blocks)


def blocks(t: BlockTable, row: int) -> list[int]:
    ids: list[int] = t.get_numpy_array()[row, : t.num_blocks_per_row[row]].tolist()
    return ids


def committed(t: BlockTable, row: int) -> list[int]:
    ids: list[int] = t.get_device_tensor()[row, : int(t.num_blocks_per_row[row])].tolist()
    return ids


def test_rows_append_add_move_swap_clear() -> None:
    t = table()
    t.append_row([7, 3], 0)
    t.append_row([5], 0)
    t.append_row([], 0)
    assert blocks(t, 0) == [7, 3, 5]
    t.add_row([9], 0)
    assert blocks(t, 0) == [9]
    t.append_row([1, 2], 1)
    t.swap_row(0, 1)
    assert (blocks(t, 0), blocks(t, 1)) == ([1, 2], [9])
    t.move_row(0, 3)
    assert (blocks(t, 0), blocks(t, 3)) == ([], [1, 2])
    t.move_row(3, 3)
    assert blocks(t, 3) == [1, 2]
    t.commit_block_table(4)
    t.clear()
    assert t.num_blocks_per_row.tolist() == [0] * 4
    assert not t.get_numpy_array().any()
    assert not t.get_device_tensor().any()


def test_batched_append_is_that_of_single_calls_also_for_repeated_rows() -> None:
    one, many = table(), table()
    rows, ids = [2, 0, 2, 2, 1], [5, 6, 7, 8, 9]
    for row, block in zip(rows, ids, strict=True):
        one.append_row([block], row)
    many.append_rows(rows, ids)
    many.append_rows([], [])
    assert [blocks(one, r) for r in range(4)] == [blocks(many, r) for r in range(4)] == [[6], [9], [5, 7, 8], []]


def test_write_cells_takes_them_in_order() -> None:
    t = table()
    t.write_cells([1, 1, 1], [0, 2, 0], [4, 5, 6])
    assert t.num_blocks_per_row[1] == 3
    assert t.get_numpy_array()[1, [0, 2]].tolist() == [6, 5]
    t.write_cells([1], [0], [8])
    assert t.num_blocks_per_row[1] == 3


def test_commit_sends_the_changed_cells_and_nothing_else() -> None:
    t = table(rows=64, width=128)
    for row in range(64):
        t.append_row(range(1, 101), row)
    assert t.commit_block_table(64) == 6400
    assert t.commit_block_table(64) == 0
    t.get_device_tensor().fill_(-7)  # shows which cells a commit writes
    t.append_rows([3, 60, 9], [201, 202, 203])
    assert t.commit_block_table(64) == 3
    sent = t.get_device_tensor() != -7
    assert sent.nonzero().tolist() == [[3, 100], [9, 100], [60, 100]]
    assert t.get_device_tensor()[[3, 9, 60], 100].tolist() == [201, 203, 202]


def test_commit_of_the_first_rows_leaves_later_ones_for_later() -> None:
    t = table()
    t.append_rows([0, 3], [5, 6])
    assert t.commit_block_table(2) == 1
    assert t.get_device_tensor()[:, 0].tolist() == [5, 0, 0, 0]
    assert t.commit_block_table(4) == 1
    assert t.get_device_tensor()[:, 0].tolist() == [5, 0, 0, 6]
    assert t.get_device_tensor(2).shape == (2, 8)


def test_row_operations_reach_the_device_as_well() -> None:
    t = table()
    t.add_row([1, 2, 3], 0)
    t.add_row([4], 1)
    t.commit_block_table(4)
    t.swap_row(0, 1)
    assert t.commit_block_table(4) == 4
    assert (committed(t, 0), committed(t, 1)) == ([4], [1, 2, 3])
    t.move_row(1, 2)
    assert t.commit_block_table(4) == 3
    assert committed(t, 2) == [1, 2, 3]


def test_slots_of_the_contract() -> None:
    t = table()
    t.add_row([7, 3], 0)
    t.add_row([5], 1)
    t.compute_slot_mapping([0, 0, 0, 0, 1, 1], [2, 3, 4, 5, 0, 1])
    t.commit_slot_mapping(8)
    assert t.slot_mapping.dtype == torch.int64
    assert t.slot_mapping[:8].tolist() == [30, 31, 12, 13, 20, 21, -1, -1]
    t.compute_slot_mapping([1], [1])
    t.commit_slot_mapping(8)
    assert t.slot_mapping_np.tolist() == [21] + [-1] * 31
    assert t.slot_mapping[:8].tolist() == [21] + [-1] * 7


@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 2, 3, 4, 6, 16, 48]))
def test_slots_are_those_of_a_loop(data: st.DataObject, block_size: int) -> None:
    t = table(rows=3, width=5, block_size=block_size, tokens=40)
    ids = data.draw(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=5, max_size=5), min_size=3, max_size=3))
    for row, one in enumerate(ids):
        t.add_row(one, row)
    tokens = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5 * block_size - 1)), max_size=40))
    t.compute_slot_mapping([row for row, _ in tokens], [position for _, position in tokens])
    expected = [ids[row][position // block_size] * block_size + position % block_size for row, position in tokens]
    assert t.slot_mapping_np.tolist() == expected + [-1] * (40 - len(tokens))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_device_follows_host_through_any_calls(data: st.DataObject) -> None:
    t = table(rows=4, width=6)
    rows: list[list[int]] = [[] for _ in range(4)]
    row, ids = st.integers(0, 3), st.lists(st.integers(1, 99), max_size=3)
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["append", "add", "move", "swap", "many", "clear_rows", "commit"]))
        a, b, new = data.draw(row), data.draw(row), data.draw(ids)
        if action == "append" and len(rows[a]) + len(new) <= 6:
            t.append_row(new, a)
            rows[a] += new
        elif action == "add":
            t.add_row(new, a)
            rows[a] = new
        elif action == "move" and a != b:
            t.move_row(a, b)
            rows[b], rows[a] = rows[a], []
        elif action == "swap":
            t.swap_row(a, b)
            rows[a], rows[b] = rows[b], rows[a]
        elif action == "many" and len(rows[a]) < 6:
            t.append_rows([a], [50])
            rows[a] = [*rows[a], 50]
        elif action == "clear_rows":
            t.clear_rows([a])
            rows[a] = []
        elif action == "commit":
            t.commit_block_table(data.draw(st.integers(0, 4)))
    t.commit_block_table(4)
    assert [blocks(t, r) for r in range(4)] == rows
    assert [committed(t, r) for r in range(4)] == rows


def test_uncommitted_changes_stay_bounded() -> None:
    t = table(rows=4, width=8)
    for i in range(2000):
        t.add_row([i % 90] * 8, i % 4)
    assert t.commit_block_table(4) <= 2048
    assert [committed(t, r) for r in range(4)] == [[(1996 + r) % 90] * 8 for r in range(4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.append_row([1], 4), "row 4"),
        (lambda t: t.append_row([1], -1), "row -1"),
        (lambda t: t.append_row([1] * 7, 0), "9 blocks"),
        (lambda t: t.add_row([1] * 9, 0), "9 blocks"),
        (lambda t: t.append_row([-1], 0), "block ids"),
        (lambda t: t.append_row([100], 0), "0 .. 99"),
        (lambda t: t.append_rows([0, 9], [1, 1]), "rows"),
        (lambda t: t.append_rows([0], [1, 2]), "1 rows but 2"),
        (lambda t: t.append_rows([0] * 7, [1] * 7), "columns"),
        (lambda t: t.write_cells([0, 0], [3, 8], [1, 1]), "columns"),
        (lambda t: t.write_cells([0], [3, 4], [1]), "1 rows, 2 columns"),
        (lambda t: t.move_row(0, 4), "row 4"),
        (lambda t: t.swap_row(-1, 0), "row -1"),
        (lambda t: t.compute_slot_mapping([0, 4], [0, 0]), "rows"),
        (lambda t: t.compute_slot_mapping([0, 0], [0, 32]), "positions"),
        (lambda t: t.compute_slot_mapping([0], [-1]), "positions"),
        (lambda t: t.compute_slot_mapping([0], [0, 1]), "1 rows but 2"),
        (lambda t: t.compute_slot_mapping([0] * 33, [0] * 33), "33 tokens"),
        (lambda t: t.commit_block_table(5), "num_reqs"),
        (lambda t: t.commit_slot_mapping(33), "num_tokens"),
    ],
)
def test_out_of_range_raises_before_anything_is_written(call: Callable[[BlockTable], None], message: str) -> None:
    t = table(num_blocks=100)
    t.append_row([7, 3], 0)
    t.compute_slot_mapping([0], [0])

    def content() -> list[object]:
        return [t.get_numpy_array().tolist(), t.num_blocks_per_row.tolist(), t.slot_mapping_np.tolist()]

    before = content()
    with pytest.raises(WorkerError, match=message):
        call(t)
    assert content() == before
    assert t.commit_block_table(4) == 2


@pytest.mark.parametrize("sizes", [(0, 4, 8, 32), (4, 0, 8, 32), (4, 4, -1, 32), (4, 4, 8, 0)])
def test_sizes_that_cannot_work(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        BlockTable(*sizes)
