"""The device's copy of a table, and which cells it does not know yet."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_FIRST_ROOM: Final = 1024


class TableMirror:
    """int32[rows, width] on ``device``; a commit sends the cells marked since they were last sent, nothing else.

    host: int32[rows, width] that it follows. pin_memory: send from pinned memory, without waiting for the device.
    """

    def __init__(self, host: Int32, pin_memory: bool, device: torch.device) -> None:
        self._flat: Int32 = host.reshape(-1)
        self._width = host.shape[1]
        self._pin = pin_memory
        self.device = torch.zeros(host.shape, dtype=torch.int32, device=device)
        self._dirty: Int64 = np.empty(_FIRST_ROOM, np.int64)
        self._num_dirty = 0
        self._single: list[int] = []  # marked, too
        # a mirror in host memory is written through numpy: 10 us a commit less than through torch
        self._mirror: Int32 | None = self.device.numpy().reshape(-1) if self.device.device.type == "cpu" else None

    def mark(self, cells: Int64) -> None:
        """Flat indices of host cells that were written. Amortised O(cells)."""
        end = self._num_dirty + len(cells)
        if end > len(self._dirty):
            self._reserve(end)
            end = self._num_dirty + len(cells)
        self._dirty[self._num_dirty : end] = cells
        self._num_dirty = end

    def mark_one(self, cell: int) -> None:
        """One of them, without an array. Amortised O(1)."""
        self._single.append(cell)
        if len(self._single) == _FIRST_ROOM:
            self._settle()

    def _settle(self) -> None:
        if self._single:
            self.mark(np.array(self._single, np.int64))
            self._single.clear()

    def commit(self, num_rows: int) -> int:
        """Send the marked cells of the first ``num_rows`` rows; how many. Those of later rows stay marked.

        O(marked cells).
        """
        self._settle()
        cells = self._dirty[: self._num_dirty]
        if not len(cells):
            return 0
        end = num_rows * self._width
        self._num_dirty = 0
        if np.maximum.reduce(cells) >= end:
            later = cells[cells >= end]
            cells = cells[cells < end]
            self._num_dirty = len(later)
            self._dirty[: len(later)] = later
        if self._mirror is not None:
            self._mirror[cells] = self._flat[cells]
        elif len(cells):
            self.device.view(-1).index_copy_(0, self._send(cells), self._send(self._flat[cells]))
        return len(cells)

    def clear(self) -> None:
        """Zeros, as on the host; nothing is marked. O(rows * width)."""
        self.device.zero_()
        self._num_dirty = 0
        self._single.clear()

    def _send(self, values: NDArray[np.integer]) -> torch.Tensor:
        """``values`` on the device, from memory of its own, which torch keeps until it is sent."""
        source = torch.from_numpy(values)
        staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pin)
        return staged.copy_(source).to(self.device.device, non_blocking=True)

    def _reserve(self, size: int) -> None:
        """Room for ``size`` marks; a list that outgrows the table is first reduced to its distinct cells."""
        if size > 2 * self._flat.size:
            distinct = np.unique(self._dirty[: self._num_dirty])
            size += len(distinct) - self._num_dirty
            self._num_dirty = len(distinct)
            self._dirty[: len(distinct)] = distinct
        if size > len(self._dirty):
            grown = np.empty(max(size, 2 * len(self._dirty)), np.int64)
            grown[: self._num_dirty] = self._dirty[: self._num_dirty]
            self._dirty = grown


def zeros_on_host(shape: tuple[int, int], pin_memory: bool) -> torch.Tensor:
    """int32 zeros, in pinned memory if asked. Raises ConfigError where there is no GPU to pin it for."""
    if pin_memory and not torch.accelerator.is_available():
        raise ConfigError("pin_memory is for tables on a GPU, and there is none here: give False")
    return torch.zeros(shape, dtype=torch.int32, pin_memory=pin_memory)
