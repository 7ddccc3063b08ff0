"""The block tables of one group: which block holds which tokens of which row, on the host and on the device.

    host    int32[rows, width]   what append, add, move and swap write
    device  int32[rows, width]   what kernels read: a commit sends the cells that changed, nothing else

A block of ``kv_block_size`` tokens, as the cache manager names it, is ``blocks_per_kv_block`` kernel blocks of
``block_size`` tokens (kernel_blocks.py). Callers hand in ids and columns of memory blocks; the cells, their columns and
``num_blocks_per_row`` are those of kernel blocks.

    add_row([3, 1], 0), 2 kernel blocks in a block   ->   row 0   [ 6 | 7 | 2 | 3 | ...

A column that was passed over since its row began holds the null block. Cells behind a row's ``num_blocks_per_row`` mean
nothing and may hold any old id.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker.attention.context_parallel import ContextShare
from hybridkv.worker.tables.index_arrays import Ids, as_int64, occurrences, ragged, require_below
from hybridkv.worker.tables.kernel_blocks import KernelSize, choose_kernel_block_size, id_limit, map_to_kernel_blocks
from hybridkv.worker.tables.row_moves import NO_ROW, copied, moved, swapped
from hybridkv.worker.tables.slot_mapping import SlotLayout
from hybridkv.worker.tables.table_mirror import TableMirror, zeros_on_host
from hybridkv.worker.tables.token_slots import TokenSlots

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_COLUMNS_WHY: Final = " (max_num_blocks_per_req)"


class BlockTable:
    """Block ids of the rows of one group, and the slots of a step's tokens.

    block_size: tokens of a memory block on this rank. max_num_reqs: rows that requests have.
    max_num_blocks_per_req: columns, in memory blocks. max_num_batched_tokens: tokens of the largest step.
    pin_memory: keep the host table in pinned memory and send from such (for a GPU). device: where the mirror lives.
    kernel_block_size: tokens of a kernel block, the sizes that a kernel supports, or None (kernel_blocks.py).
    cp_kv_cache_interleave_size, dcp_*, pcp_*: which tokens lie here (ContextShare).
    num_speculative_tokens: with several ranks there are ``max_num_reqs * (1 + num_speculative_tokens)`` rows, so that
    every token of a request that verifies drafts can have a row of its own (``copy_rows``).
    num_blocks: ids of memory blocks must lie below it, None for no bound but int32.

    Every check comes before the first write: a call that raises changed nothing. Raises ConfigError for sizes that
    cannot work, WorkerError for rows, ids, columns and positions out of range.
    """

    def __init__(  # noqa: PLR0917  # the positions are those of vLLM's tables, whose users know them
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
        _check_least(
            1,
            block_size=block_size,
            max_num_reqs=max_num_reqs,
            max_num_blocks_per_req=max_num_blocks_per_req,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        _check_least(0, num_speculative_tokens=num_speculative_tokens)
        share = ContextShare.of_ranks(
            dcp_size=dcp_world_size,
            dcp_rank=dcp_rank,
            pcp_size=pcp_world_size,
            pcp_rank=pcp_rank,
            interleave=cp_kv_cache_interleave_size,
        )
        self.kv_block_size = block_size
        self.block_size = choose_kernel_block_size(block_size, kernel_block_size)
        self.blocks_per_kv_block = block_size // self.block_size
        self.max_num_reqs = max_num_reqs
        self.num_rows = max_num_reqs * (1 + num_speculative_tokens if share.size > 1 else 1)
        self.max_num_kv_blocks_per_req = max_num_blocks_per_req
        self.max_num_blocks_per_req = max_num_blocks_per_req * self.blocks_per_kv_block
        self.max_num_batched_tokens = max_num_batched_tokens
        self.device = torch.device(device)
        self.id_limit = id_limit(num_blocks, self.blocks_per_kv_block)
        self.layout = SlotLayout(self.block_size, self.max_num_blocks_per_req, share)
        self._parts: Int64 = np.arange(self.blocks_per_kv_block)
        shape = (self.num_rows, self.max_num_blocks_per_req)
        self._cpu = zeros_on_host(shape, pin_memory)
        self._host: Int32 = self._cpu.numpy()
        self._flat: Int32 = self._host.reshape(-1)
        self._mirror = TableMirror(self._host, pin_memory, self.device)
        self.num_blocks_per_row: Int32 = np.zeros(self.num_rows, np.int32)
        # single cells are read and written twice as fast so
        self._cell_view, self._held_view = self._flat.data, self.num_blocks_per_row.data
        # a prefill context parallel batch is padded by up to 2 tokens a request and rank
        padding = 2 * pcp_world_size * max_num_reqs if pcp_world_size > 1 else 0
        self.slots = TokenSlots(
            self.layout, self.num_rows, max_num_batched_tokens + padding, pin_memory=pin_memory, device=self.device
        )

    # -- rows, one at a time

    def append_row(self, block_ids: Ids, row_idx: int) -> None:
        """``block_ids`` behind the blocks of one row; nothing for an empty list. O(ids)."""
        # one block behind those of one row, as nearly always
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
        """``block_ids`` in place of the blocks of one row. O(ids)."""
        ids = self.check_row(block_ids, row_idx, replacing=True)
        self.num_blocks_per_row[row_idx] = 0
        self._put(ids, row_idx, 0)

    def move_row(self, src: int, tgt: int) -> None:
        """The blocks of row ``src`` to row ``tgt``, whose own are forgotten; ``src`` becomes empty. O(blocks)."""
        source, target = self._checked_row(src), self._checked_row(tgt)
        if source == target:
            return
        n = self.num_blocks_per_row.item(source)
        self._host[target, :n] = self._host[source, :n]
        self.num_blocks_per_row[target] = n
        self.num_blocks_per_row[source] = 0
        self._mark_row(target, 0, n)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange the blocks of two rows. O(blocks)."""
        source, target = self._checked_row(src), self._checked_row(tgt)
        n, m = self.num_blocks_per_row.item(source), self.num_blocks_per_row.item(target)
        kept = self._host[source, :n].copy()
        self._host[source, :m] = self._host[target, :m]
        self._host[target, :n] = kept
        self.num_blocks_per_row[source], self.num_blocks_per_row[target] = m, n
        self._mark_row(source, 0, m)
        self._mark_row(target, 0, n)

    # -- many rows: what the calls above do, in order

    def append_rows(self, rows: Ids, block_ids: Ids) -> None:
        """``block_ids[i]`` behind the blocks of row ``rows[i]``, in order; a row may come several times. O(ids)."""
        self._put_pairs(*self.check_append_rows(rows, block_ids))

    def add_rows(self, rows: Ids, block_ids: Ids) -> None:
        """The rows named, emptied; then ``block_ids[i]`` behind row ``rows[i]`` as in append_rows. O(ids)."""
        at, columns, ids = self.check_add_rows(rows, block_ids)
        self.num_blocks_per_row[at] = 0
        self._put_pairs(at, columns, ids)

    def write_cells(self, rows: Ids, columns: Ids, block_ids: Ids) -> None:
        """Column ``columns[i]`` of row ``rows[i]`` becomes ``block_ids[i]``, in order.

        A row grows to its last column; columns that it passed over hold the null block. O(cells + columns grown).
        """
        at, ids, to = self._checked_rows(rows), self._checked_ids(block_ids), as_int64("columns", columns)
        if not len(at) == len(to) == len(ids):
            raise WorkerError(f"{len(at)} rows, {len(to)} columns and {len(ids)} block ids: give one of each a cell")
        if len(ids):
            require_below("columns", to, self.max_num_kv_blocks_per_req, _COLUMNS_WHY)
            written = to * self.blocks_per_kv_block < self.num_blocks_per_row[at]
            grown = self._grow(at, to)
            self._flat[self._cells(at, to)] = map_to_kernel_blocks(ids, self.blocks_per_kv_block, self._parts)
            self._mirror.mark(grown)
            self._mirror.mark(self._cells(at[written], to[written]))

    def move_rows(self, src: Ids, tgt: Ids) -> None:
        """``move_row(src[i], tgt[i])`` for each i in order, every row copied once. O(rows + blocks)."""
        self._take_over(*moved(self._checked_rows(src), self._checked_rows(tgt)))

    def swap_rows(self, src: Ids, tgt: Ids) -> None:
        """``swap_row(src[i], tgt[i])`` for each i in order, every row copied once. O(rows + blocks)."""
        self._take_over(*swapped(self._checked_rows(src), self._checked_rows(tgt)))

    def copy_rows(self, src: Ids, tgt: Ids) -> None:
        """Row ``tgt[i]`` gets the blocks of row ``src[i]``, which keeps them, for each i in order. O(rows + blocks)."""
        self._take_over(*copied(self._checked_rows(src), self._checked_rows(tgt)))

    def clear_rows(self, rows: Ids) -> None:
        """Rows without blocks. O(rows)."""
        self.num_blocks_per_row[self._checked_rows(rows)] = 0

    def clear(self) -> None:
        """No row has blocks; host and device tables hold zeros. O(rows * width)."""
        self._host.fill(0)
        self._mirror.clear()
        self.num_blocks_per_row.fill(0)

    map_to_kernel_blocks = staticmethod(map_to_kernel_blocks)
    """kernel_blocks.map_to_kernel_blocks."""

    # -- slots

    def compute_slot_mapping(self, req_indices: Ids, positions: Ids) -> None:
        """The slot of every token, on the host: one row and one position per token; -1 where it lies on another rank.

        req_indices, positions: int[n], positions counted from the start of the request. What lies behind
        the n slots is -1. Raises WorkerError for rows and positions out of range. O(n).
        """
        self.map_tokens(*self.slots.check(req_indices, positions))

    def map_tokens(self, rows: Int64, positions: Int64) -> None:
        """``compute_slot_mapping`` of tokens that ``slots.check`` has passed. O(n)."""
        self.slots.compute(self._flat, rows, positions)

    # -- host to device

    def commit_block_table(self, num_reqs: int) -> int:
        """Send the cells of the first ``num_reqs`` rows that changed since they were last sent; how many.

        Changed cells of later rows wait for a commit that covers them. O(changed cells).
        """
        if not 0 <= num_reqs <= self.num_rows:
            raise WorkerError(f"num_reqs must lie in 0 .. {self.num_rows}, got {num_reqs}")
        return self._mirror.commit(num_reqs)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Send the first ``num_tokens`` slots; device slots behind them are -1. O(num_tokens)."""
        self.slots.commit(num_tokens)

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """The committed table, int32[num_reqs or all rows, width], a view."""
        return self._mirror.device if num_reqs is None else self._mirror.device[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """The host table, int32[rows, width], a view."""
        return self._cpu

    def get_numpy_array(self) -> Int32:
        """The host table, int32[rows, width], a view. Write through the calls above, never here."""
        return self._host

    @property
    def slot_mapping(self) -> torch.Tensor:
        """The committed slots, int64[capacity] on the device, a view.

        capacity: max_num_batched_tokens, and with several prefill ranks 2 * pcp_world_size * max_num_reqs more.
        """
        return self.slots.device

    @property
    def slot_mapping_np(self) -> Int64:
        """The computed slots, int64[capacity] on the host, a view."""
        return self.slots.host

    # -- checks, apart from the writes so that several groups can be checked before one is written

    def check_row(self, block_ids: Ids, row: int, *, replacing: bool) -> Int32:
        """The ids of an ``add_row`` (replacing) or ``append_row``; WorkerError when it could not be done."""
        self._checked_row(row)
        ids = self._checked_ids(block_ids)
        blocks = len(ids)
        if not replacing:
            blocks += self.num_blocks_per_row.item(row) // self.blocks_per_kv_block
        if blocks > self.max_num_kv_blocks_per_req:
            raise WorkerError(
                f"row {row} would hold {blocks} blocks, more than its {self.max_num_kv_blocks_per_req} columns"
            )
        return ids

    def check_append_rows(self, rows: Ids, block_ids: Ids) -> tuple[Int64, Int64, Int32]:
        """Rows, columns and ids of an ``append_rows``; WorkerError when it could not be done."""
        at = self._checked_rows(rows)
        held = self.num_blocks_per_row[at].astype(np.int64) // self.blocks_per_kv_block
        return self._checked_pairs(at, held, block_ids)

    def check_add_rows(self, rows: Ids, block_ids: Ids) -> tuple[Int64, Int64, Int32]:
        """Rows, columns and ids of an ``add_rows``; WorkerError when it could not be done."""
        at = self._checked_rows(rows)
        return self._checked_pairs(at, np.zeros(len(at), np.int64), block_ids)

    def _checked_pairs(self, at: Int64, held: Int64, block_ids: Ids) -> tuple[Int64, Int64, Int32]:
        ids = self._checked_ids(block_ids)
        if len(at) != len(ids):
            raise WorkerError(f"{len(at)} rows but {len(ids)} block ids: give one id for each row")
        columns = held + occurrences(at)
        require_below("columns", columns, self.max_num_kv_blocks_per_req, _COLUMNS_WHY)
        return at, columns, ids

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
        """``ids`` into cells start .. of one row, which then ends behind them."""
        if not len(ids):
            return
        cells = map_to_kernel_blocks(ids, self.blocks_per_kv_block, self._parts)
        end = start + len(cells)
        self._host[row, start:end] = cells
        self.num_blocks_per_row[row] = end
        self._mark_row(row, start, end)

    def _put_pairs(self, rows: Int64, columns: Int64, ids: Int32) -> None:
        if len(ids):
            cells = self._cells(rows, columns)
            self._flat[cells] = map_to_kernel_blocks(ids, self.blocks_per_kv_block, self._parts)
            # of a repeated row the last, and largest, stays
            self.num_blocks_per_row[rows] = (columns + 1) * self.blocks_per_kv_block
            self._mirror.mark(cells)

    def _cells(self, rows: Int64, columns: Int64) -> Int64:
        """The cells of the kernel blocks that memory blocks in ``columns`` of ``rows`` are made of, in order."""
        cells = rows * self.max_num_blocks_per_req + columns * self.blocks_per_kv_block
        return cells if self.blocks_per_kv_block == 1 else (cells[:, None] + self._parts).reshape(-1)

    def _grow(self, rows: Int64, columns: Int64) -> Int64:
        """Lengthen rows so that they have ``columns``, by null blocks; the cells they grew by."""
        before = self.num_blocks_per_row.copy()
        np.maximum.at(self.num_blocks_per_row, rows, ((columns + 1) * self.blocks_per_kv_block).astype(np.int32))
        more = np.flatnonzero(self.num_blocks_per_row > before)
        held = before[more].astype(np.int64)
        cells = ragged(more * self.max_num_blocks_per_req + held, self.num_blocks_per_row[more] - held)
        self._flat[cells] = cells % self.blocks_per_kv_block  # the null block's kernel blocks, id 0 where it is whole
        return cells

    def _take_over(self, rows: Int64, of: Int64) -> None:
        """The blocks that row ``of[i]`` has now to row ``rows[i]``; none where ``of[i]`` is NO_ROW."""
        counts = np.where(of == NO_ROW, 0, self.num_blocks_per_row[of]).astype(np.int64)
        cells = ragged(rows * self.max_num_blocks_per_req, counts)
        self._flat[cells] = self._flat[ragged(of * self.max_num_blocks_per_req, counts)]
        self.num_blocks_per_row[rows] = counts
        self._mirror.mark(cells)

    def _mark_row(self, row: int, start: int, end: int) -> None:
        self._mirror.mark_span(row * self.max_num_blocks_per_req + start, end - start)


def _check_least(least: int, **sizes: int) -> None:
    for name, value in sizes.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
