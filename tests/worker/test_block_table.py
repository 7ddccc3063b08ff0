"""Rows of one group: every call on host and device, kernel blocks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import BlockTable
from hybridkv.worker.block_table import KernelSize, choose_kernel_block_size


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


def test_block_table_with_speculation_on_ranks_has_a_row_per_token() -> None:
    assert BlockTable(4, 3, 2, 8, num_speculative_tokens=2).num_rows == 3
    t = BlockTable(4, 3, 2, 8, num_speculative_tokens=2, pcp_world_size=2)
    assert (t.max_num_reqs, t.num_rows, t.get_device_tensor().shape) == (3, 9, (9, 2))
    for row in (1, 3, 8):
        t.add_row([7, 3], row)
    assert t.commit_block_table(9) == 6
    assert t.get_device_tensor()[[1, 3, 8]].tolist() == [[7, 3]] * 3
    t.compute_slot_mapping([8], [2])
    assert t.slot_mapping_np[0] == 29
    with pytest.raises(WorkerError, match="row 9"):
        t.add_row([1], 9)


def test_block_table_commit_sends_changed_cells_only() -> None:
    t = table(rows=64, width=128)
    for row in range(64):
        t.append_row(range(1, 101), row)
    assert t.commit_block_table(64) == 6400
    assert t.commit_block_table(64) == 0
    t.get_device_tensor().fill_(-7)  # shows which cells a commit writes
    for row, block in ((3, 201), (60, 202), (9, 203)):
        t.append_row([block], row)
    assert t.commit_block_table(64) == 3
    sent = t.get_device_tensor() != -7
    assert sent.nonzero().tolist() == [[3, 100], [9, 100], [60, 100]]
    assert t.get_device_tensor()[[3, 9, 60], 100].tolist() == [201, 203, 202]


def test_block_table_commit_of_first_rows_leaves_later_rows() -> None:
    t = table()
    t.append_row([5], 0)
    t.append_row([6], 3)
    assert t.commit_block_table(2) == 1
    assert t.get_device_tensor()[:, 0].tolist() == [5, 0, 0, 0]
    assert t.commit_block_table(4) == 1
    assert t.get_device_tensor()[:, 0].tolist() == [5, 0, 0, 6]
    assert t.get_device_tensor(2).shape == (2, 8)


class Follower:
    """A table and the lists that its rows must hold; every call goes to both."""

    def __init__(self, kernel: int) -> None:
        self.table = BlockTable(4, 4, 6, 32, kernel_block_size=kernel)
        self.rows: list[list[int]] = [[] for _ in range(4)]

    def append(self, a: int, _: int, new: list[int]) -> None:
        if len(self.rows[a]) + len(new) <= 6:
            self.table.append_row(new, a)
            self.rows[a] = [*self.rows[a], *new]

    def add(self, a: int, _: int, new: list[int]) -> None:
        self.table.add_row(new, a)
        self.rows[a] = new

    def move(self, a: int, b: int, _: list[int]) -> None:
        self.table.move_row(a, b)
        if a != b:
            self.rows[b], self.rows[a] = self.rows[a], []

    def swap(self, a: int, b: int, _: list[int]) -> None:
        self.table.swap_row(a, b)
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]

    def cells(self, a: int, b: int, new: list[int]) -> None:
        columns = [(b + 2 * i) % 6 for i in range(len(new))]
        self.table.write_cells([a] * len(new), columns, new)
        for column, block in zip(columns, new, strict=True):
            held = self.rows[a]
            self.rows[a] = [*held[:column], *[0] * (column - len(held)), block, *held[column + 1 :]]

    def clear(self, a: int, b: int, _: list[int]) -> None:
        self.table.clear_rows([a, b])
        self.rows[a] = self.rows[b] = []

    def commit(self, a: int, _: int, __: list[int]) -> None:
        self.table.commit_block_table(a + 1)

    def check(self) -> None:
        n = self.table.blocks_per_kv_block
        wanted = [[block * n + part for block in one for part in range(n)] for one in self.rows]
        assert [blocks(self.table, r) for r in range(4)] == wanted
        self.table.commit_block_table(4)
        assert [committed(self.table, r) for r in range(4)] == wanted


CALLS = ["append", "add", "move", "swap", "cells", "clear", "commit"]
CALL = st.tuples(st.sampled_from(CALLS), st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(1, 99), max_size=3))


@settings(max_examples=3 * settings().max_examples)
@given(calls=st.lists(CALL, min_size=5, max_size=30), through_torch=st.booleans(), kernel=st.sampled_from([4, 2]))
def test_block_table_device_follows_host(
    calls: list[tuple[str, int, int, list[int]]], through_torch: bool, kernel: int
) -> None:
    follower = Follower(kernel)
    if through_torch:
        follower.table._mirror._mirror = None  # as on a device whose memory numpy cannot write
    for name, a, b, new in calls:
        getattr(follower, name)(a, b, new)
    follower.check()


def test_block_table_uncommitted_changes_are_bounded() -> None:
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
        (lambda t: t.write_cells([0, 0], [3, 8], [1, 1]), "columns"),
        (lambda t: t.write_cells([0], [3, 4], [1]), "1 rows, 2 columns"),
        (lambda t: t.write_cells([0, 0], [0, -1], [1, 1]), "columns"),
        (lambda t: t.write_cells([0, -1], [0, 0], [1, 1]), "rows"),
        (lambda t: t.write_cells([0, 1], [0, 0], [1, 100]), "block ids"),
        (lambda t: t.clear_rows([0, 4]), "rows"),
        (lambda t: t.move_row(0, 4), "row 4"),
        (lambda t: t.swap_row(-1, 0), "row -1"),
        (lambda t: t.compute_slot_mapping([0, 4], [0, 0]), "rows"),
        (lambda t: t.compute_slot_mapping([0, 0], [0, 32]), "positions"),
        (lambda t: t.compute_slot_mapping([0], [-1]), "positions"),
        (lambda t: t.compute_slot_mapping([0], [0, 1]), "1 rows but 2"),
        (lambda t: t.compute_slot_mapping([0] * 33, [0] * 33), "33 tokens"),
        (lambda t: t.compute_slot_mapping([0.5], [0]), "integers in one dimension"),
        (lambda t: t.compute_slot_mapping([0], np.array([1.5])), "integers in one dimension"),
        (lambda t: t.compute_slot_mapping([[0]], [[0]]), "integers in one dimension"),
        (lambda t: t.append_row([1.5], 0), "integers in one dimension"),
        (lambda t: t.write_cells([True], [0], [1]), "integers in one dimension"),
        (lambda t: t.commit_block_table(5), "num_reqs"),
        (lambda t: t.commit_slot_mapping(33), "num_tokens"),
    ],
)
def test_block_table_index_out_of_range_writes_nothing(call: Callable[[BlockTable], None], message: str) -> None:
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


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU to pin memory for")
def test_block_table_pin_memory_without_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="pin_memory"):
        BlockTable(4, 4, 8, 32, pin_memory=True)


@pytest.mark.parametrize("sizes", [(0, 4, 8, 32), (4, 0, 8, 32), (4, 4, -1, 32), (4, 4, 8, 0)])
def test_block_table_size_below_one_is_rejected(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        BlockTable(*sizes)


def test_block_table_single_appends_are_committed() -> None:
    """More than are kept apart, between lists and swaps; rows behind the commit wait, a cleared table forgets them."""
    rng = np.random.default_rng(5)
    one, other = BlockTable(16, 4, 2000, 64), BlockTable(16, 4, 2000, 64)
    for turn in range(3000):
        row, block = rng.integers(0, 4, 2).tolist()
        one.append_row([block], row)
        other.append_row(np.array([block]), row)
        if turn % 700 == 699:
            for table in (one, other):
                table.append_row([7, 8], 1)
                table.swap_row(0, 2)
                assert table.commit_block_table(3) > 0
        if turn == 2000:
            for table in (one, other):
                table.clear()
                assert table.commit_block_table(4) == 0
    assert one.commit_block_table(4) == other.commit_block_table(4)
    assert (one.get_numpy_array() == other.get_numpy_array()).all()
    assert (one.get_device_tensor().numpy() == other.get_device_tensor().numpy()).all()
    assert (one.num_blocks_per_row == other.num_blocks_per_row).all()


@pytest.mark.parametrize("block", [-1, 1 << 31, 1 << 70, 1.0, "a", None, True])
def test_block_table_append_of_invalid_block_is_rejected(block: object) -> None:
    table = BlockTable(16, 2, 4, 8)
    with pytest.raises(WorkerError):
        table.append_row([block], 0)  # type: ignore[list-item]
    assert not table.num_blocks_per_row.any()
    assert table.commit_block_table(2) == 0


def test_block_table_append_to_full_or_missing_row_is_rejected() -> None:
    table = BlockTable(16, 2, 4, 8)
    for block in range(4):
        table.append_row([block], 1)
    with pytest.raises(WorkerError, match="row 1 would hold 5 blocks"):
        table.append_row([9], 1)
    for row in (-1, 2):
        with pytest.raises(WorkerError, match=f"row {row} does not exist"):
            table.append_row([9], row)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", [-1, 1 << 31, 1 << 32, 1 << 70, 1.0, "a", None])
def test_block_table_list_with_invalid_id_is_rejected(wrong: object, place: int) -> None:
    """Ids, rows and columns. A list of booleans alone is none of numbers."""
    ids: Any = [1, 2, 3]
    ids[place] = wrong
    t, fine = table(), [0, 1, 2]
    for call, arguments in (
        (t.add_row, (ids, 0)),
        (t.append_row, (ids, 0)),
        (t.write_cells, (ids, fine, fine)),
        (t.write_cells, (fine, ids, fine)),
        (t.write_cells, (fine, fine, ids)),
        (t.add_row, ([True, True], 0)),
    ):
        with pytest.raises(WorkerError):
            call(*arguments)
    assert not t.num_blocks_per_row.any()
    assert t.commit_block_table(4) == 0


@pytest.mark.parametrize(
    ("block_size", "kernel", "chosen"),
    [
        (32, None, 32),
        (32, 0, 32),
        (32, [0], 32),
        (32, 16, 16),
        (32, 32, 32),
        (32, [16, 32], 16),
        (32, [64, 32, 16], 32),
        (48, [64, 32, 16], 16),
        (48, [0, -8, 24], 24),
        (1056, [64, 32], 32),
    ],
)
def test_kernel_block_size_is_the_first_that_divides(block_size: int, kernel: KernelSize, chosen: int) -> None:
    assert choose_kernel_block_size(block_size, kernel) == chosen
    table = BlockTable(block_size, 1, 3, 8, kernel_block_size=kernel)
    parts = block_size // chosen
    assert (table.block_size, table.blocks_per_kv_block, table.max_num_blocks_per_req) == (chosen, parts, 3 * parts)
    assert table.get_numpy_array().shape == (1, 3 * parts)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (24, r"none of the kernel block sizes \[24\] divides blocks of 32 tokens"),
        (64, r"none of the kernel block sizes \[64\]"),
        (-16, r"none of the kernel block sizes \[-16\]"),
        ([64, 24], r"none of the kernel block sizes \[64, 24\] divides blocks of 32 tokens"),
        ([0, 24], r"none of the kernel block sizes \[0, 24\]"),
        ([], "list of supported kernel block sizes is empty"),
    ],
)
def test_kernel_block_size_that_does_not_divide_is_rejected(kernel: KernelSize, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockTable(32, 1, 3, 8, kernel_block_size=kernel)


def test_kernel_block_ids_match_the_contract() -> None:
    ids = np.asarray([0, 3, 1], np.int32)
    for arange in (np.arange(2), np.arange(2).reshape(1, -1)):
        assert BlockTable.map_to_kernel_blocks(ids, 2, arange).tolist() == [0, 1, 6, 7, 2, 3]
    assert BlockTable.map_to_kernel_blocks(ids, 1, np.arange(1)) is ids
    big = np.asarray([1 << 30], np.int32)
    assert BlockTable.map_to_kernel_blocks(big, 4, np.arange(4))[-1] == (1 << 32) + 3
    with pytest.raises(WorkerError, match="2 numbers for 4 kernel blocks"):
        BlockTable.map_to_kernel_blocks(ids, 4, np.arange(2))


def test_kernel_block_ids_beyond_int32_are_rejected() -> None:
    table = BlockTable(64, 1, 2, 8, kernel_block_size=16)
    last = (1 << 29) - 1
    table.append_row([last], 0)
    assert table.get_numpy_array()[0, 3] == (1 << 31) - 1
    with pytest.raises(WorkerError, match="block ids must lie"):
        table.append_row([last + 1], 0)
    with pytest.raises(ConfigError, match="num_blocks must lie in 1"):
        BlockTable(64, 1, 2, 8, kernel_block_size=16, num_blocks=(1 << 29) + 1)
    with pytest.raises(ConfigError, match="num_blocks must lie in 1"):
        BlockTable(64, 1, 2, 8, num_blocks=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.append_row([1, 1], 0), "row 0 would hold 4 blocks, more than its 3 columns"),
        (lambda t: t.write_cells([0], [3], [1]), r"columns must lie in 0 \.\. 2"),
        (lambda t: t.append_row([9], 0), r"block ids must lie in 0 \.\. 8"),
    ],
)
def test_block_table_widths_and_ids_count_memory_blocks(call: Callable[[BlockTable], None], message: str) -> None:
    t = BlockTable(32, 3, 3, 8, kernel_block_size=16, num_blocks=9)
    t.append_row([3, 1], 0)
    before = t.get_numpy_array().copy()
    with pytest.raises(WorkerError, match=message):
        call(t)
    assert (t.get_numpy_array() == before).all()
    assert t.num_blocks_per_row.tolist() == [4, 0, 0]
