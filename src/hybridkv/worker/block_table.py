"""The block tables of one group: which block holds which tokens of which row, on the host and on the device.

    host    int32[rows, width]   what append, add, move and swap write
    dirty   flat indices of the host cells written since they were last committed
    device  int32[rows, width]   what kernels read: a commit sends the dirty cells, nothing else

Cells behind a row's ``num_blocks_per_row`` mean nothing and may hold any old id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker.slot_mapping import SlotMapper

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Ids = Sequence[int] | NDArray[np.integer]

_NO_SLOT: Final = -1


class BlockTable:
    """Block ids of up to ``max_num_reqs`` rows and the slots of up to ``max_num_batched_tokens`` tokens.

    block_size: tokens of a block. max_num_blocks_per_req: columns. pin_memory: keep the host arrays in
    pinned memory (for a GPU). device: where the mirror lives. num_blocks: ids must lie below it, None
    for no bound. Every check comes before the first write: a call that raises changed nothing.
    Raises ConfigError for sizes that cannot work, WorkerError for rows, ids and positions out of range.
    """

    def __init__(  # noqa: PLR0917  # the positions are those of vLLM's tables, whose users know them
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool = False,
        device: torch.device | str = "cpu",
        *,
        num_blocks: int | None = None,
    ) -> None:
        sizes = {
            "block_size": block_size,
            "max_num_reqs": max_num_reqs,
            "max_num_blocks_per_req": max_num_blocks_per_req,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.max_num_blocks_per_req = max_num_blocks_per_req
        self.max_num_batched_tokens = max_num_batched_tokens
        self.device = torch.device(device)
        self.id_limit = (1 << 31) if num_blocks is None else num_blocks
        shape = (max_num_reqs, max_num_blocks_per_req)
        self._cpu = torch.zeros(shape, dtype=torch.int32, pin_memory=pin_memory)
        self._host: Int32 = self._cpu.numpy()
        self._flat: Int32 = self._host.reshape(-1)
        self._device = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.num_blocks_per_row: Int32 = np.zeros(max_num_reqs, np.int32)
        self._dirty: Int64 = np.empty(1024, np.int64)
        self._num_dirty = 0
        self._mapper = SlotMapper(block_size, max_num_blocks_per_req, max_num_batched_tokens)
        self._slots_cpu = torch.full((max_num_batched_tokens,), _NO_SLOT, dtype=torch.int64, pin_memory=pin_memory)
        self._slots: Int64 = self._slots_cpu.numpy()
        self._num_slots = 0
        self._slots_device = torch.full((max_num_batched_tokens,), _NO_SLOT, dtype=torch.int64, device=self.device)
        # a mirror in host memory is written through numpy: 10 us a commit less than through torch
        self._mirror = self._device.numpy().reshape(-1) if self.device.type == "cpu" else None
        self._slots_mirror = self._slots_device.numpy() if self.device.type == "cpu" else None

    # -- rows

    def append_row(self, block_ids: Ids, row_idx: int) -> None:
        """``block_ids`` behind the blocks of one row; nothing for an empty list. O(ids)."""
        ids = self.check_row(block_ids, row_idx, replacing=False)
        self._put(ids, row_idx, self.num_blocks_per_row.item(row_idx))

    def add_row(self, block_ids: Ids, row_idx: int) -> None:
        """``block_ids`` in place of the blocks of one row. O(ids)."""
        ids = self.check_row(block_ids, row_idx, replacing=True)
        self.num_blocks_per_row[row_idx] = 0
        self._put(ids, row_idx, 0)

    def append_rows(self, rows: Ids, block_ids: Ids) -> None:
        """``block_ids[i]`` behind the blocks of row ``rows[i]``, in order; a row may come several times. O(ids)."""
        at, columns, ids = self.check_append_rows(rows, block_ids)
        if len(ids):
            self._write(at, columns, ids)
            self.num_blocks_per_row[at] = columns + 1  # of a repeated row the last, and largest, stays

    def write_cells(self, rows: Ids, columns: Ids, block_ids: Ids) -> None:
        """Cell (rows[i], columns[i]) becomes block_ids[i], in order; a row grows to its last column. O(cells)."""
        at, ids = self._checked_rows(rows), self._checked_ids(block_ids)
        to = np.asarray(columns, np.int64)
        if not len(at) == len(to) == len(ids):
            raise WorkerError(f"{len(at)} rows, {len(to)} columns and {len(ids)} block ids: give one of each a cell")
        if len(ids):
            self._check_columns(to)
            self._write(at, to, ids)
            np.maximum.at(self.num_blocks_per_row, at, (to + 1).astype(np.int32))

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

    def clear_rows(self, rows: Ids) -> None:
        """Rows without blocks. O(rows)."""
        self.num_blocks_per_row[self._checked_rows(rows)] = 0

    def clear(self) -> None:
        """No row has blocks; host and device tables hold zeros."""
        self._host.fill(0)
        self._device.zero_()
        self.num_blocks_per_row.fill(0)
        self._num_dirty = 0

    # -- slots

    def compute_slot_mapping(self, req_indices: Ids, positions: Ids) -> None:
        """The slot of every token, on the host: one row and one position per token.

        req_indices, positions: int[n], positions counted from the start of the request. What lies behind
        the n slots is -1. Raises WorkerError for rows and positions out of range. O(n).
        """
        rows, at = np.asarray(req_indices, np.int64), np.asarray(positions, np.int64)
        n = len(rows)
        if n != len(at):
            raise WorkerError(f"{n} rows but {len(at)} positions: give one of each a token")
        if n > self.max_num_batched_tokens:
            raise WorkerError(f"{n} tokens exceed max_num_batched_tokens {self.max_num_batched_tokens}")
        if n:
            if rows.min() < 0 or rows.max() >= self.max_num_reqs:
                raise WorkerError(f"rows must lie in 0 .. {self.max_num_reqs - 1}, got {rows.min()} .. {rows.max()}")
            last = self.max_num_blocks_per_req * self.block_size - 1
            if at.min() < 0 or at.max() > last:
                raise WorkerError(f"positions must lie in 0 .. {last}, got {at.min()} .. {at.max()}")
            self._mapper(self._flat, rows, at, self._slots[:n])
        self._slots[n : self._num_slots] = _NO_SLOT
        self._num_slots = n

    # -- host to device

    def commit_block_table(self, num_reqs: int) -> int:
        """Send the cells of the first ``num_reqs`` rows that changed since they were last sent; how many.

        Changed cells of later rows wait for a commit that covers them. O(changed cells).
        """
        if not 0 <= num_reqs <= self.max_num_reqs:
            raise WorkerError(f"num_reqs must lie in 0 .. {self.max_num_reqs}, got {num_reqs}")
        cells = self._dirty[: self._num_dirty]
        if not len(cells):
            return 0
        end = num_reqs * self.max_num_blocks_per_req
        if cells.max() >= end:
            later = cells[cells >= end]
            cells = cells[cells < end]
            self._dirty[: len(later)] = later
            self._num_dirty = len(later)
        else:
            self._num_dirty = 0
        if self._mirror is not None:
            self._mirror[cells] = self._flat[cells]
        else:
            values = torch.from_numpy(self._flat[cells]).to(self.device)
            self._device.view(-1).index_copy_(0, torch.from_numpy(cells.copy()).to(self.device), values)
        return len(cells)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Send the first ``num_tokens`` slots. O(num_tokens)."""
        if not 0 <= num_tokens <= self.max_num_batched_tokens:
            raise WorkerError(f"num_tokens must lie in 0 .. {self.max_num_batched_tokens}, got {num_tokens}")
        if self._slots_mirror is not None:
            self._slots_mirror[:num_tokens] = self._slots[:num_tokens]
        else:
            self._slots_device[:num_tokens].copy_(self._slots_cpu[:num_tokens], non_blocking=True)

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """The committed table, int32[num_reqs or all rows, width], a view."""
        return self._device if num_reqs is None else self._device[:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """The host table, int32[rows, width], a view."""
        return self._cpu

    def get_numpy_array(self) -> Int32:
        """The host table, int32[rows, width], a view. Write through the calls above, never here."""
        return self._host

    @property
    def slot_mapping(self) -> torch.Tensor:
        """The committed slots, int64[max_num_batched_tokens] on the device, a view."""
        return self._slots_device

    @property
    def slot_mapping_np(self) -> Int64:
        """The computed slots, int64[max_num_batched_tokens] on the host, a view."""
        return self._slots

    # -- checks, apart from the writes so that several groups can be checked before one is written

    def check_row(self, block_ids: Ids, row: int, *, replacing: bool) -> Int32:
        """The ids of an ``add_row`` (replacing) or ``append_row``; WorkerError when it could not be done."""
        self._checked_row(row)
        ids = self._checked_ids(block_ids)
        blocks = len(ids) if replacing else self.num_blocks_per_row.item(row) + len(ids)
        if blocks > self.max_num_blocks_per_req:
            raise WorkerError(
                f"row {row} would hold {blocks} blocks, more than its {self.max_num_blocks_per_req} columns"
            )
        return ids

    def check_append_rows(self, rows: Ids, block_ids: Ids) -> tuple[Int64, Int64, Int32]:
        """Rows, columns and ids of an ``append_rows``; WorkerError when it could not be done."""
        at, ids = self._checked_rows(rows), self._checked_ids(block_ids)
        if len(at) != len(ids):
            raise WorkerError(f"{len(at)} rows but {len(ids)} block ids: append_rows takes one id for each row")
        columns = self.num_blocks_per_row[at].astype(np.int64)
        if len(ids):
            if np.bincount(at).max() > 1:
                columns += _occurrence(at)
            self._check_columns(columns)
        return at, columns, ids

    def _check_columns(self, columns: Int64) -> None:
        if columns.min() < 0 or columns.max() >= self.max_num_blocks_per_req:
            raise WorkerError(
                f"columns must lie in 0 .. {self.max_num_blocks_per_req - 1} (max_num_blocks_per_req), "
                f"got {columns.min()} .. {columns.max()}"
            )

    # -- parts

    def _put(self, ids: Int32, row: int, start: int) -> None:
        """``ids`` into cells start .. of one row, which then ends behind them."""
        if not len(ids):
            return
        end = start + len(ids)
        self._host[row, start:end] = ids
        self.num_blocks_per_row[row] = end
        self._mark_row(row, start, end)

    def _write(self, rows: Int64, columns: Int64, ids: Int32) -> None:
        cells = rows * self.max_num_blocks_per_req + columns
        self._flat[cells] = ids
        self._mark(cells)

    def _mark_row(self, row: int, start: int, end: int) -> None:
        first = row * self.max_num_blocks_per_req + start
        self._mark(np.arange(first, first + end - start))

    def _mark(self, cells: Int64) -> None:
        self._reserve(self._num_dirty + len(cells))
        end = self._num_dirty + len(cells)
        self._dirty[self._num_dirty : end] = cells
        self._num_dirty = end

    def _reserve(self, size: int) -> None:
        """Room for ``size`` dirty cells; a list that outgrows the table is first reduced to its distinct cells."""
        if size <= len(self._dirty):
            return
        if size > 2 * self._flat.size:
            distinct = np.unique(self._dirty[: self._num_dirty])
            size += len(distinct) - self._num_dirty
            self._num_dirty = len(distinct)
            self._dirty[: len(distinct)] = distinct
        grown = np.empty(max(size, 2 * len(self._dirty)), np.int64)
        grown[: self._num_dirty] = self._dirty[: self._num_dirty]
        self._dirty = grown

    def _checked_row(self, row: int) -> int:
        if not 0 <= row < self.max_num_reqs:
            raise WorkerError(f"row {row} does not exist: rows are 0 .. {self.max_num_reqs - 1}")
        return row

    def _checked_rows(self, rows: Ids) -> Int64:
        at = np.asarray(rows, np.int64)
        if at.size and (at.min() < 0 or at.max() >= self.max_num_reqs):
            raise WorkerError(f"rows must lie in 0 .. {self.max_num_reqs - 1}, got {at.min()} .. {at.max()}")
        return at

    def _checked_ids(self, block_ids: Ids) -> Int32:
        ids = np.asarray(block_ids, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.id_limit):
            raise WorkerError(f"block ids must lie in 0 .. {self.id_limit - 1}, got {ids.min()} .. {ids.max()}")
        return ids.astype(np.int32)


def _occurrence(rows: Int64) -> Int64:
    """How often rows[i] came before i: (3, 5, 3, 3) -> (0, 0, 1, 2). O(n log n)."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rank = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    out = np.empty(len(rows), np.int64)
    out[order] = rank
    return out
