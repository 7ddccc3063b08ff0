"""The device's copy of a table, and which cells it does not know yet."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_FIRST_ROOM: Final = 1024
_LONG: Final = 256
"""Cells from which on a span is copied by itself: shorter ones are told cell by cell, and copied together."""


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
        self._spans: list[tuple[int, int]] = []  # and these, long ones: first cell, cells, all of one row
        self._most_spans = 4 * len(host) + 64
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

    def mark_span(self, first: int, count: int) -> None:
        """``count`` of them from ``first`` on, all of one row. Amortised O(1), and never more than some spans a row."""
        if count < _LONG:
            self.mark(np.arange(first, first + count))
            return
        self._spans.append((first, count))
        if len(self._spans) == self._most_spans:
            self._merge()

    def _merge(self) -> None:
        """One span a row, which may have cells in its middle that were not written: they are the same on both sides."""
        first, count = np.array(self._spans, np.int64).T
        order = np.argsort(first // self._width, kind="stable")
        row = first[order] // self._width
        begins = np.flatnonzero(np.diff(row, prepend=-1))
        firsts = np.minimum.reduceat(first[order], begins)
        ends = np.maximum.reduceat((first + count)[order], begins)
        self._spans = list(zip(firsts.tolist(), (ends - firsts).tolist(), strict=True))

    def _settle(self) -> None:
        if self._single:
            self.mark(np.array(self._single, np.int64))
            self._single.clear()

    def commit(self, num_rows: int) -> int:
        """Send the marked cells of the first ``num_rows`` rows; how many. Those of later rows stay marked.

        O(marked cells).
        """
        self._settle()
        end = num_rows * self._width
        cells, spans = self._take_cells(end), self._take_spans(end)
        if self._mirror is None:
            cells = np.concatenate((cells, *(np.arange(first, first + count) for first, count in spans)))
            if len(cells):
                self.device.view(-1).index_copy_(0, self._send(cells), self._send(self._flat[cells]))
            return len(cells)
        to, source, sent = self._mirror, self._flat, len(cells)
        if sent:
            to[cells] = source[cells]
        for first, count in spans:
            end, sent = first + count, sent + count
            to[first:end] = source[first:end]
        return sent

    def _take_spans(self, end: int) -> list[tuple[int, int]]:
        """Spans marked before ``end``; others stay."""
        spans, self._spans = self._spans, []
        if spans and max(spans)[0] >= end:
            self._spans = [span for span in spans if span[0] >= end]
            spans = [span for span in spans if span[0] < end]
        return spans

    def _take_cells(self, end: int) -> Int64:
        """Those marked one by one before ``end``; others stay."""
        cells = self._dirty[: self._num_dirty]
        self._num_dirty = 0
        if len(cells) and np.maximum.reduce(cells) >= end:
            later = cells[cells >= end]
            cells = cells[cells < end]
            self._num_dirty = len(later)
            self._dirty[: len(later)] = later
        return cells

    def clear(self) -> None:
        """Zeros, as on the host; nothing is marked. O(rows * width)."""
        self.device.zero_()
        self._num_dirty = 0
        self._single.clear()
        self._spans.clear()

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
