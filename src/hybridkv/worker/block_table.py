"""The block tables of one group: which block holds which tokens of each row, and the slots of a step's tokens.

    host    int32[rows, width]   written by append, add, move, swap and write_cells
    device  int32[rows, width]   read by kernels; a commit sends the cells that changed

The cache manager counts in memory blocks. An attention kernel reads kernel blocks, which may be smaller. A memory
block b of n * k tokens consists of n kernel blocks of k tokens, with ids b * n .. b * n + n - 1:

    memory block 3 of 32 tokens   [           3           ]
    kernel blocks of 8 tokens     [ 12  |  13  | 14  | 15 ]

Callers pass ids and columns of memory blocks. Table cells, the table's width and ``num_blocks_per_row`` count kernel
blocks:

    add_row([3, 1], 0), 2 kernel blocks in a block   ->   row 0   [ 6 | 7 | 2 | 3 | ...

If ``write_cells`` skips columns of a row, they hold the null block. Cells at or after ``num_blocks_per_row`` are stale:
they may hold any old id.

A slot is the place of a token's keys and values:

    table row   [ 7 | 3 ]        block_size 4, position 5: column 1, offset 1
    slots       28 29 30 31 | 12 13 14 15                   -> 3 * 4 + 1 = 13

With context parallelism, each rank holds a share of the tokens. A token of another rank has slot -1. A token of this
rank gets the slot of its local index, which counts the rank's own tokens. With two ranks and interleave 2:

    position      0  1  2  3  4  5  6  7  8  9
    rank          0  0  1  1  0  0  1  1  0  0
    local index   0  1  0  1  2  3  2  3  4  5
    slot, rank 0  28 29 -1 -1 30 31 -1 -1 12 13

docs/contracts.md states the same with v = block_size * ranks and o = p % v: column p // v, offset
o // (ranks * interleave) * interleave + o % interleave. Both agree because interleave divides block_size.
A position in a block that its window no longer reads gets a slot of the null block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.step import ranges
from hybridkv.worker.attention import ContextShare
from hybridkv.worker.slots import SlotBuffer, SlotMapper

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Ids = Sequence[int] | NDArray[np.integer]

_INT64: Final = np.dtype(np.int64)
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def check_least(least: int, **sizes: int) -> None:
    """Raise ConfigError for the first of ``sizes`` below ``least``."""
    for name, value in sizes.items():
        integer(name, value, least)


def as_int64(name: str, values: Ids) -> Int64:
    """Return ``values`` as int64[n], without a copy if they are. WorkerError unless they are int[n]."""
    if type(values) is list and values and type(values[0]) is int:
        with suppress(TypeError, OverflowError):  # values that do not fit are checked below
            return np.frombuffer(array("I", values), np.uint32).astype(_INT64)  # a third of np.asarray's time
    given = np.asarray(values)
    if given.ndim != 1 or (given.dtype != _INT64 and given.dtype.kind not in "iu" and given.size):
        raise WorkerError(f"{name} must be integers in one dimension, got {given.dtype} of shape {given.shape}")
    return given.astype(_INT64, copy=False)


def require_below(name: str, values: NDArray[np.integer], end: int, why: str = "") -> None:
    """Raise WorkerError unless all ``values`` lie in 0 .. end - 1. ``why`` names the source of the bound. O(n)."""
    # as unsigned numbers, negative numbers are the largest: one pass instead of two
    if values.size and np.maximum.reduce(values.view(_UNSIGNED[values.itemsize])) >= end:
        raise WorkerError(f"{name} must lie in 0 .. {end - 1}{why}, got {values.min()} .. {values.max()}")


_MOST_SINGLE: Final = 1024
"""Cells marked one by one before they become an array; chosen by hand."""


class TableMirror:
    """A copy of an int32[rows, width] host table on ``device``. A commit sends the marked cells alone.

    Args:
        host: int32[rows, width], the table to follow.
        pin_memory: send from pinned memory, without waiting for the device.
        device: device of the copy.
    """

    def __init__(self, host: Int32, pin_memory: bool, device: torch.device) -> None:
        self._flat: Int32 = host.reshape(-1)
        self._width = host.shape[1]
        self._pin = pin_memory
        self.device = torch.zeros(host.shape, dtype=torch.int32, device=device)
        self._marked = list[Int64]()
        self._num_marked = 0
        self._single = list[int]()  # cells marked one by one
        # a mirror in host memory is written through numpy: 10 us less for each commit than through torch
        self._mirror: Int32 | None = self.device.numpy().reshape(-1) if self.device.device.type == "cpu" else None

    def mark(self, cells: Int64) -> None:
        """Mark the host cells with these flat indices as changed. Amortised O(cells)."""
        self._marked.append(cells)
        self._num_marked += len(cells)
        if self._num_marked > 2 * self._flat.size:  # drop duplicates, so that marks never outgrow the table
            self._marked = [np.unique(np.concatenate(self._marked))]
            self._num_marked = len(self._marked[0])

    def mark_one(self, cell: int) -> None:
        """Mark one cell, without making an array. Amortised O(1)."""
        self._single.append(cell)
        if len(self._single) == _MOST_SINGLE:
            self.mark(np.array(self._single, np.int64))
            self._single.clear()

    def commit(self, num_rows: int) -> int:
        """Send the marked cells of the first ``num_rows`` rows and return their number. O(marked cells).

        Marked cells of later rows stay marked.
        """
        cells = np.concatenate((*self._marked, np.array(self._single, np.int64)))
        self._forget()
        if not len(cells):
            return 0
        end = num_rows * self._width
        if np.maximum.reduce(cells) >= end:
            self.mark(cells[cells >= end])
            cells = cells[cells < end]
        if self._mirror is not None:
            self._mirror[cells] = self._flat[cells]
        else:
            self.device.view(-1).index_copy_(0, self._send(cells), self._send(self._flat[cells]))
        return len(cells)

    def clear(self) -> None:
        """Set the device table to zeros, like the host table, and drop all marks. O(rows * width)."""
        self.device.zero_()
        self._forget()

    def _forget(self) -> None:
        self._marked, self._num_marked = [], 0
        self._single.clear()

    def _send(self, values: NDArray[np.integer]) -> torch.Tensor:
        """Return ``values`` on the device. They are staged in memory that torch keeps until the copy is done."""
        source = torch.from_numpy(values)
        staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pin)
        return staged.copy_(source).to(self.device.device, non_blocking=True)


KernelSize = int | Sequence[int] | None
"""Tokens of a kernel block, or the sizes that a kernel supports, best first; None, 0 or [0] keeps blocks whole."""


def choose_kernel_block_size(block_size: int, kernel_block_size: KernelSize) -> int:
    """Return the tokens of a kernel block if a memory block has ``block_size``.

    A single size must divide ``block_size``. From a list, the first positive divisor is taken. Raises ConfigError if no
    size divides it, or if the list is empty.
    """
    sizes = kernel_block_size if isinstance(kernel_block_size, Sequence) else [kernel_block_size or 0]
    if not sizes:
        raise ConfigError("the list of supported kernel block sizes is empty: give None to keep blocks whole")
    if not any(sizes):
        return block_size
    for size in sizes:
        if size > 0 and block_size % size == 0:
            return size
    raise ConfigError(
        f"none of the kernel block sizes {list(sizes)} divides blocks of {block_size} tokens: give a divisor, or "
        "change block_size"
    )


def map_to_kernel_blocks(
    kv_manager_block_ids: NDArray[np.integer], blocks_per_kv_block: int, kernel_block_arange: NDArray[np.integer]
) -> NDArray[np.integer]:
    """Return the kernel blocks of memory blocks, in order. O(result).

    Args:
        kv_manager_block_ids: int[m], ids of memory blocks.
        blocks_per_kv_block: kernel blocks in a memory block.
        kernel_block_arange: the integers 0 .. blocks_per_kv_block - 1, in any shape.

    Returns:
        int64[m * blocks_per_kv_block], so that no id overflows; the input itself if blocks_per_kv_block is 1.

    Raises:
        WorkerError: the arange has another length.
    """
    if blocks_per_kv_block == 1:
        return kv_manager_block_ids
    if kernel_block_arange.size != blocks_per_kv_block:
        raise WorkerError(
            f"kernel_block_arange has {kernel_block_arange.size} numbers for {blocks_per_kv_block} kernel blocks "
            f"in a memory block: give np.arange({blocks_per_kv_block})"
        )
    first = kv_manager_block_ids.astype(np.int64)[:, None] * blocks_per_kv_block
    ids: NDArray[np.int64] = (first + kernel_block_arange.reshape(1, -1)).reshape(-1)
    return ids


class BlockTable:
    """The block ids of one group's rows, and the slots of a step's tokens.

    Every check comes before the first write: a call that raises has changed nothing. The methods raise WorkerError for
    rows, ids, columns and positions out of range.

    Args:
        block_size: tokens of a memory block on this rank.
        max_num_reqs: rows of requests.
        max_num_blocks_per_req: columns of a row, in memory blocks.
        max_num_batched_tokens: tokens of the largest step.
        pin_memory: keep the host table in pinned memory, and send from pinned memory (for a GPU).
        device: device of the committed table and slots.
        kernel_block_size: tokens of a kernel block, or the sizes that the kernel supports; None keeps blocks whole.
        cp_kv_cache_interleave_size: neighbouring tokens that one rank holds.
        num_speculative_tokens: most drafts of a request in a step. With several ranks the table has ``max_num_reqs * (1
            + num_speculative_tokens)`` rows, one for every token of a request that verifies drafts.
        num_blocks: ids of memory blocks must be below it; by default, only int32 limits them.
        dcp_world_size: ranks of decode context parallelism.
        dcp_rank: this rank among them.
        pcp_world_size: ranks of prefill context parallelism.
        pcp_rank: this rank among them.

    Attributes:
        num_blocks_per_row: int32[rows], kernel blocks that each row holds.
        slot_mapping_np: int64[capacity], the computed slots on the host. The capacity is max_num_batched_tokens, and
            with several prefill ranks 2 * pcp_world_size * max_num_reqs more.
        slot_mapping: int64[capacity], the committed slots on the device.
        share: the tokens that this rank holds.
        row_tokens: tokens of a request that a row has room for; positions are below it.
        id_limit: ids of memory blocks are below it.

    Raises:
        ConfigError: a size is below 1, a kernel size or interleave does not divide, or pinned memory has no GPU.
    """

    def __init__(  # noqa: PLR0917  # the same positions as in vLLM's tables, which users know
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool = False,
        device: torch.device | str = "cpu",
        kernel_block_size: KernelSize = None,
        cp_kv_cache_interleave_size: int = 1,
        num_speculative_tokens: int = 0,
        *,
        num_blocks: int | None = None,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        pcp_world_size: int = 1,
        pcp_rank: int = 0,
    ) -> None:
        check_least(
            1,
            block_size=block_size,
            max_num_reqs=max_num_reqs,
            max_num_blocks_per_req=max_num_blocks_per_req,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        check_least(0, num_speculative_tokens=num_speculative_tokens)
        self.share = share = ContextShare.of_ranks(
            dcp_size=dcp_world_size,
            dcp_rank=dcp_rank,
            pcp_size=pcp_world_size,
            pcp_rank=pcp_rank,
            interleave=cp_kv_cache_interleave_size,
        )
        self.block_size = choose_kernel_block_size(block_size, kernel_block_size)
        self.blocks_per_kv_block = block_size // self.block_size
        self.max_num_reqs = max_num_reqs
        self.num_rows = max_num_reqs * (1 + num_speculative_tokens if share.size > 1 else 1)
        self.max_num_kv_blocks_per_req = max_num_blocks_per_req
        self.max_num_blocks_per_req = max_num_blocks_per_req * self.blocks_per_kv_block
        self.max_num_batched_tokens = max_num_batched_tokens
        self.device = torch.device(device)
        most = (1 << 31) // self.blocks_per_kv_block  # ids of kernel blocks are int32
        self.id_limit = most if num_blocks is None else num_blocks
        if not 1 <= self.id_limit <= most:  # an id above would wrap around in the int32 table
            raise ConfigError(
                f"num_blocks must lie in 1 .. {most}, got {num_blocks}: each block is {self.blocks_per_kv_block} "
                "kernel blocks, and their ids are int32"
            )
        if share.size > 1 and self.block_size % share.interleave:
            raise ConfigError(
                f"cp_kv_cache_interleave_size {share.interleave} does not divide the block size {self.block_size} "
                "of the kernel: slots of different tokens would collide; choose a divisor"
            )
        self.row_tokens = self.max_num_blocks_per_req * self.block_size * share.size
        self._parts: Int64 = np.arange(self.blocks_per_kv_block)
        shape = (self.num_rows, self.max_num_blocks_per_req)
        if pin_memory and not torch.accelerator.is_available():
            raise ConfigError("pin_memory needs a GPU, and this machine has none: give False")
        self._cpu = torch.zeros(shape, dtype=torch.int32, pin_memory=pin_memory)
        self._host: Int32 = self._cpu.numpy()
        self._flat: Int32 = self._host.reshape(-1)
        self._mirror = TableMirror(self._host, pin_memory, self.device)
        self.num_blocks_per_row: Int32 = np.zeros(self.num_rows, np.int32)
        # memoryviews read and write a single cell twice as fast as numpy does
        self._cell_view, self._held_view = self._flat.data, self.num_blocks_per_row.data
        # a prefill context parallel batch is padded by up to 2 tokens a request and rank
        padding = 2 * pcp_world_size * max_num_reqs if pcp_world_size > 1 else 0
        self._capacity = max_num_batched_tokens + padding
        self._mapper = SlotMapper(self.block_size, self.max_num_blocks_per_req, share, self._capacity)
        self._slots = SlotBuffer(self._capacity, pin_memory, self.device)
        self.slot_mapping_np, self.slot_mapping = self._slots.host, self._slots.device

    # -- rows, one at a time

    def append_row(self, block_ids: Ids, row_idx: int) -> None:
        """Append blocks to one row. O(ids).

        Args:
            block_ids: int[n], ids of memory blocks; an empty list changes nothing.
            row_idx: the row.
        """
        # fast path: one whole block for one row, which nearly every decode step appends
        if type(block_ids) is list and len(block_ids) == 1 and type(row_idx) is int and 0 <= row_idx < self.num_rows:
            block, column = block_ids[0], self._held_view[row_idx]
            fits = column < self.max_num_blocks_per_req and self.blocks_per_kv_block == 1
            if fits and type(block) is int and 0 <= block < self.id_limit:
                cell = row_idx * self.max_num_blocks_per_req + column
                self._cell_view[cell] = block
                self._held_view[row_idx] = column + 1
                self._mirror.mark_one(cell)
                return
        ids = self.check_row(block_ids, row_idx, replacing=False)
        self._put(ids, row_idx, self.num_blocks_per_row.item(row_idx))

    def add_row(self, block_ids: Ids, row_idx: int) -> None:
        """Replace the blocks of one row. O(ids).

        Args:
            block_ids: int[n], ids of memory blocks.
            row_idx: the row.
        """
        ids = self.check_row(block_ids, row_idx, replacing=True)
        self.num_blocks_per_row[row_idx] = 0
        self._put(ids, row_idx, 0)

    def move_row(self, src: int, tgt: int) -> None:
        """Move the blocks of row ``src`` to row ``tgt``, which drops its own; ``src`` becomes empty. O(blocks).

        Args:
            src: a row.
            tgt: another row; the same row changes nothing.
        """
        source, target = self._checked_row(src), self._checked_row(tgt)
        if source == target:
            return
        n = self.num_blocks_per_row.item(source)
        self._host[target, :n] = self._host[source, :n]
        self.num_blocks_per_row[target] = n
        self.num_blocks_per_row[source] = 0
        self._mark_row(target, 0, n)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange the blocks of two rows. O(blocks).

        Args:
            src: a row.
            tgt: the other row.
        """
        source, target = self._checked_row(src), self._checked_row(tgt)
        n, m = self.num_blocks_per_row.item(source), self.num_blocks_per_row.item(target)
        kept = self._host[source, :n].copy()
        self._host[source, :m] = self._host[target, :m]
        self._host[target, :n] = kept
        self.num_blocks_per_row[source], self.num_blocks_per_row[target] = m, n
        self._mark_row(source, 0, m)
        self._mark_row(target, 0, n)

    # -- many rows

    def write_cells(self, rows: Ids, columns: Ids, block_ids: Ids) -> None:
        """Set column ``columns[i]`` of row ``rows[i]`` to ``block_ids[i]``, in order. O(cells + columns grown).

        A row grows to its last written column. Columns that were skipped hold the null block.

        Args:
            rows: int[n].
            columns: int[n], counted in memory blocks.
            block_ids: int[n], ids of memory blocks.
        """
        at, ids, to = self._checked_rows(rows), self._checked_ids(block_ids), as_int64("columns", columns)
        if not len(at) == len(to) == len(ids):
            raise WorkerError(
                f"{len(at)} rows, {len(to)} columns and {len(ids)} block ids: give one of each for every cell"
            )
        if len(ids):
            require_below("columns", to, self.max_num_kv_blocks_per_req, " (max_num_blocks_per_req)")
            written = to * self.blocks_per_kv_block < self.num_blocks_per_row[at]
            grown = self._grow(at, to)
            self._flat[self._cells(at, to)] = map_to_kernel_blocks(ids, self.blocks_per_kv_block, self._parts)
            self._mirror.mark(grown)
            self._mirror.mark(self._cells(at[written], to[written]))

    def clear_rows(self, rows: Ids) -> None:
        """Remove all blocks of some rows. O(rows).

        Args:
            rows: int[n].
        """
        self.num_blocks_per_row[self._checked_rows(rows)] = 0

    def clear(self) -> None:
        """Remove the blocks of every row, and set host and device tables to zeros. O(rows * width)."""
        self._host.fill(0)
        self._mirror.clear()
        self.num_blocks_per_row.fill(0)

    map_to_kernel_blocks = staticmethod(map_to_kernel_blocks)  # vLLM's tables have it as a method

    # -- slots

    def compute_slot_mapping(self, req_indices: Ids, positions: Ids) -> None:
        """Compute the slot of every token on the host; -1 for a token of another rank. O(n).

        Slots after the first n are -1.

        Args:
            req_indices: int[n], the row of each token.
            positions: int[n], the position of each token in its request.
        """
        self.map_tokens(*self.check_tokens(req_indices, positions))

    def check_tokens(self, req_indices: Ids, positions: Ids) -> tuple[Int64, Int64]:
        """Check the tokens of a ``compute_slot_mapping`` before any table is written. O(n).

        Args:
            req_indices: int[n], the row of each token.
            positions: int[n], the position of each token in its request.

        Returns:
            Rows and positions, int64[n] each.

        Raises:
            WorkerError: the lengths differ, exceed the capacity, or a row or position is out of range.
        """
        rows, at = as_int64("req_indices", req_indices), as_int64("positions", positions)
        if len(rows) != len(at):
            raise WorkerError(f"{len(rows)} rows but {len(at)} positions: give one of each for every token")
        if len(rows) > self._capacity:
            raise WorkerError(f"{len(rows)} tokens exceed the {self._capacity} slots: raise max_num_batched_tokens")
        require_below("rows", rows, self.num_rows)
        require_below("positions", at, self.row_tokens, f" ({self.max_num_blocks_per_req} columns)")
        return rows, at

    def map_tokens(self, rows: Int64, positions: Int64) -> None:
        """Compute the slots of tokens that ``check_tokens`` returned. O(n).

        Args:
            rows: int64[n].
            positions: int64[n].
        """
        self._mapper(self._flat, rows, positions, self._slots.first(len(rows)))

    # -- host to device

    def commit_block_table(self, num_reqs: int) -> int:
        """Send the changed cells of the first rows to the device. O(changed cells).

        Changed cells of later rows wait for a commit that covers them.

        Args:
            num_reqs: how many rows, from row 0.

        Returns:
            The number of cells sent.
        """
        if not 0 <= num_reqs <= self.num_rows:
            raise WorkerError(f"num_reqs must lie in 0 .. {self.num_rows}, got {num_reqs}")
        return self._mirror.commit(num_reqs)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Send the first slots to the device; device slots after them become -1. O(num_tokens).

        Args:
            num_tokens: how many slots.
        """
        self._slots.commit(num_tokens)

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """Return the committed table, int32[rows, width], as a view.

        Args:
            num_reqs: rows of the view, from row 0; None for all.
        """
        return self._mirror.device if num_reqs is None else self._mirror.device[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """Return the host table, int32[rows, width], as a view."""
        return self._cpu

    def get_numpy_array(self) -> Int32:
        """Return the host table, int32[rows, width], as a view. Never write through it: marks would be missed."""
        return self._host

    # -- checks

    def check_row(self, block_ids: Ids, row: int, *, replacing: bool) -> Int32:
        """Check an ``add_row`` or ``append_row`` before any table is written.

        Args:
            block_ids: int[n], ids of memory blocks.
            row: the row.
            replacing: whether the ids replace the row's blocks (``add_row``).

        Returns:
            int32[n], the ids.

        Raises:
            WorkerError: the row or an id is out of range, or the row has too few columns.
        """
        self._checked_row(row)
        ids = self._checked_ids(block_ids)
        blocks = len(ids)
        if not replacing:
            blocks += self.num_blocks_per_row.item(row) // self.blocks_per_kv_block
        if blocks > self.max_num_kv_blocks_per_req:
            raise WorkerError(
                f"row {row} would hold {blocks} blocks, more than its {self.max_num_kv_blocks_per_req} columns: "
                "raise max_num_blocks_per_req, or send fewer blocks"
            )
        return ids

    def _checked_row(self, row: int) -> int:
        if not 0 <= row < self.num_rows:
            raise WorkerError(f"row {row} does not exist: rows are 0 .. {self.num_rows - 1}")
        return row

    def _checked_rows(self, rows: Ids) -> Int64:
        at = as_int64("rows", rows)
        require_below("rows", at, self.num_rows)
        return at

    def _checked_ids(self, block_ids: Ids) -> Int32:
        ids = as_int64("block ids", block_ids)
        require_below("block ids", ids, self.id_limit)
        return ids.astype(np.int32)

    # -- parts

    def _put(self, ids: Int32, row: int, start: int) -> None:
        """Write ``ids`` into the cells of one row from cell ``start`` on; the row ends after them."""
        if not len(ids):
            return
        cells = map_to_kernel_blocks(ids, self.blocks_per_kv_block, self._parts)
        end = start + len(cells)
        self._host[row, start:end] = cells
        self.num_blocks_per_row[row] = end
        self._mark_row(row, start, end)

    def _cells(self, rows: Int64, columns: Int64) -> Int64:
        """Return the flat indices of the kernel blocks of the memory blocks in ``columns`` of ``rows``, in order."""
        cells = rows * self.max_num_blocks_per_req + columns * self.blocks_per_kv_block
        return cells if self.blocks_per_kv_block == 1 else (cells[:, None] + self._parts).reshape(-1)

    def _grow(self, rows: Int64, columns: Int64) -> Int64:
        """Lengthen rows by null blocks until they have ``columns``. Return the cells that were added."""
        before = self.num_blocks_per_row.copy()
        np.maximum.at(self.num_blocks_per_row, rows, ((columns + 1) * self.blocks_per_kv_block).astype(np.int32))
        more = np.flatnonzero(self.num_blocks_per_row > before)
        held = before[more].astype(np.int64)
        cells = ranges(more * self.max_num_blocks_per_req + held, self.num_blocks_per_row[more] - held)
        self._flat[cells] = cells % self.blocks_per_kv_block  # the null block's kernel blocks, id 0 where it is whole
        return cells

    def _mark_row(self, row: int, start: int, end: int) -> None:
        first = row * self.max_num_blocks_per_req
        self._mirror.mark(np.arange(first + start, first + end))
