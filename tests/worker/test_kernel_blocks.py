from collections.abc import Callable

import numpy as np
import pytest

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker import BlockTable
from hybridkv.worker.block_table import KernelSize, choose_kernel_block_size


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
def test_the_first_positive_size_that_divides(block_size: int, kernel: KernelSize, chosen: int) -> None:
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
def test_sizes_that_do_not_divide(kernel: KernelSize, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockTable(32, 1, 3, 8, kernel_block_size=kernel)


def test_ids_of_kernel_blocks() -> None:
    ids = np.asarray([0, 3, 1], np.int32)
    for arange in (np.arange(2), np.arange(2).reshape(1, -1)):
        assert BlockTable.map_to_kernel_blocks(ids, 2, arange).tolist() == [0, 1, 6, 7, 2, 3]
    assert BlockTable.map_to_kernel_blocks(ids, 1, np.arange(1)) is ids
    big = np.asarray([1 << 30], np.int32)
    assert BlockTable.map_to_kernel_blocks(big, 4, np.arange(4))[-1] == (1 << 32) + 3
    with pytest.raises(WorkerError, match="2 numbers for 4 kernel blocks"):
        BlockTable.map_to_kernel_blocks(ids, 4, np.arange(2))


def test_ids_whose_kernel_blocks_would_not_fit_int32() -> None:
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


def test_every_call_takes_memory_blocks_and_writes_kernel_blocks() -> None:
    t = BlockTable(32, 3, 3, 8, kernel_block_size=16, num_blocks=9)
    t.add_row([3, 1], 0)
    t.append_row([4], 0)
    assert (t.get_numpy_array()[0].tolist(), t.num_blocks_per_row[0]) == ([6, 7, 2, 3, 8, 9], 6)
    t.append_row([5, 7], 1)
    t.write_cells([2, 2], [0, 2], [8, 5])
    assert (t.get_numpy_array()[2].tolist(), t.num_blocks_per_row[2]) == ([16, 17, 0, 1, 10, 11], 6)
    t.swap_row(0, 1)
    t.move_row(2, 0)
    assert (t.get_numpy_array()[0].tolist(), t.num_blocks_per_row.tolist()) == ([16, 17, 0, 1, 10, 11], [6, 6, 0])
    t.commit_block_table(3)
    assert t.get_device_tensor(2).tolist() == t.get_numpy_array()[:2].tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.append_row([1, 1], 0), "row 0 would hold 4 blocks, more than its 3 columns"),
        (lambda t: t.write_cells([0], [3], [1]), r"columns must lie in 0 \.\. 2"),
        (lambda t: t.append_row([9], 0), r"block ids must lie in 0 \.\. 8"),
    ],
)
def test_widths_and_ids_are_those_of_memory_blocks(call: Callable[[BlockTable], None], message: str) -> None:
    t = BlockTable(32, 3, 3, 8, kernel_block_size=16, num_blocks=9)
    t.append_row([3, 1], 0)
    before = t.get_numpy_array().copy()
    with pytest.raises(WorkerError, match=message):
        call(t)
    assert (t.get_numpy_array() == before).all()
    assert t.num_blocks_per_row.tolist() == [4, 0, 0]
