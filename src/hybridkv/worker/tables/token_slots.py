"""The slots of one step's tokens, on the host and on the device.

host     int64[capacity]   | slots of n tokens | -1 ... -1 |
device   int64[capacity]   the same once committed
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.worker.tables.index_arrays import Ids, as_int64, require_below
from hybridkv.worker.tables.slot_mapping import NO_SLOT, SlotLayout, SlotMapper

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class TokenSlots:
    """Slots of up to ``capacity`` tokens; what lies behind those of the last call is always -1.

    layout: how rows map tokens. num_rows: rows of the table. pin_memory: send from pinned memory, without waiting
    for the device.
    """

    def __init__(
        self, layout: SlotLayout, num_rows: int, capacity: int, *, pin_memory: bool, device: torch.device
    ) -> None:
        self.layout = layout
        self.capacity = capacity
        self.host: Int64 = np.full(capacity, NO_SLOT, np.int64)
        self.device = torch.full((capacity,), NO_SLOT, dtype=torch.int64, device=device)
        self._num_rows = num_rows
        self._pin = pin_memory
        self._mapper = SlotMapper(layout, capacity)
        self._on_host = 0
        self._on_device = 0
        # a mirror in host memory is written through numpy: 10 us a commit less than through torch
        self._mirror: Int64 | None = self.device.numpy() if self.device.device.type == "cpu" else None

    def check(self, req_indices: Ids, positions: Ids) -> tuple[Int64, Int64]:
        """Rows and positions, int64[n] each; WorkerError where a length, a row or a position does not fit. O(n)."""
        rows, at = as_int64("req_indices", req_indices), as_int64("positions", positions)
        self._check_lengths(len(rows), len(at))
        self._check_ranges(rows, at)
        return rows, at

    def compute(self, flat_table: Int32, rows: Int64, positions: Int64) -> None:
        """The host slots of checked tokens. O(n)."""
        n = len(rows)
        self._mapper(flat_table, rows, positions, self.host[:n])
        if n < self._on_host:
            self.host[n : self._on_host] = NO_SLOT
        self._on_host = n

    def commit(self, num_tokens: int) -> None:
        """Send the first ``num_tokens`` host slots. O(num_tokens)."""
        if not 0 <= num_tokens <= self.capacity:
            raise WorkerError(f"num_tokens must lie in 0 .. {self.capacity}, got {num_tokens}")
        if self._mirror is not None:
            self._mirror[:num_tokens] = self.host[:num_tokens]
            if num_tokens < self._on_device:
                self._mirror[num_tokens : self._on_device] = NO_SLOT
            self._on_device = num_tokens
            return
        # from memory of its own, which torch keeps until it is sent: the next step may write the host slots at once
        staged = torch.empty(num_tokens, dtype=torch.int64, pin_memory=self._pin)
        staged.numpy()[:] = self.host[:num_tokens]
        self.device[:num_tokens].copy_(staged, non_blocking=True)
        if num_tokens < self._on_device:
            self.device[num_tokens : self._on_device].fill_(NO_SLOT)
        self._on_device = num_tokens

    # -- checks

    def _check_lengths(self, rows: int, positions: int) -> None:
        if rows != positions:
            raise WorkerError(f"{rows} rows but {positions} positions: give one of each a token")
        if rows > self.capacity:
            raise WorkerError(f"{rows} tokens exceed the {self.capacity} slots: raise max_num_batched_tokens")

    def _check_ranges(self, rows: Int64, positions: Int64) -> None:
        require_below("rows", rows, self._num_rows)
        require_below("positions", positions, self.layout.row_tokens, f" ({self.layout.width} columns)")
