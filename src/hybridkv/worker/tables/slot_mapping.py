"""Where a token's keys and values lie: the slots of a step's tokens, on the host and on the device.

    table row   [ 7 | 3 ]        block_size 4, position 5: column 1, offset 1
    slots       28 29 30 31 | 12 13 14 15                   -> 3 * 4 + 1 = 13

On one of several context parallel ranks a token that lies elsewhere has slot -1. A token that lies here has the slot of
its local index: a rank's tokens fill its blocks one behind the other. With two ranks, interleave 2:

    position      0  1  2  3  4  5  6  7  8  9
    rank          0  0  1  1  0  0  1  1  0  0
    local index   0  1  0  1  2  3  2  3  4  5
    slot, rank 0  28 29 -1 -1 30 31 -1 -1 12 13

The contract states the same with v = block_size * ranks, o = p % v: column p // v, offset
o // (ranks * interleave) * interleave + o % interleave. Since interleave divides block_size, both agree.
Blocks that a window no longer reads are null in the table; a position in them has a slot of the null block.

    host     int64[capacity]   | slots of n tokens | -1 ... -1 |
    device   int64[capacity]   the same once committed
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker.attention.context_parallel import ContextShare

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Ids = Sequence[int] | NDArray[np.integer]

NO_SLOT: Final = -1
_INT64: Final = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How the rows of a table map tokens to slots.

    block_size: tokens of a block as the table names it (kernel blocks where blocks are split). width: columns.
    share: which tokens lie here. Raises ConfigError where its interleave does not divide block_size; a single rank
    has no use for one.
    """

    block_size: int
    width: int
    share: ContextShare

    def __post_init__(self) -> None:
        if self.share.size > 1 and self.block_size % self.share.interleave:
            raise ConfigError(
                f"cp_kv_cache_interleave_size {self.share.interleave} does not divide the block size {self.block_size} "
                "of the kernel: slots of different tokens would collide; choose a divisor"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens of a request that a row has room for: positions lie below."""
        return self.width * self.block_size * self.share.size


class SlotMapper:
    """Computes slots of one layout for up to ``max_tokens`` tokens; one rank's calls reuse its scratch arrays."""

    def __init__(self, layout: SlotLayout, max_tokens: int) -> None:
        self._layout = layout
        size = layout.block_size
        self._shift = size.bit_length() - 1 if size & (size - 1) == 0 else None
        self._cell = np.empty(max_tokens, np.int64)
        self._offset = np.empty(max_tokens, np.int64)
        self._block = np.empty(max_tokens, np.int32)

    def __call__(self, flat_table: Int32, rows: Int64, positions: Int64, out: Int64) -> None:
        """Write the slot of every (rows[i], positions[i]) into ``out[i]``. O(tokens).

        flat_table: int32[rows * width], the table row after row. rows, positions: int64[n], in range.
        """
        n, size, share = len(rows), self._layout.block_size, self._layout.share
        cell, offset, block = self._cell[:n], self._offset[:n], self._block[:n]
        if share.size > 1:
            turn, within = np.divmod(positions, share.interleave)
            rounds, owner = np.divmod(turn, share.size)
            positions = rounds * share.interleave + within  # the local index
        if self._shift is None:
            np.floor_divide(positions, size, out=cell)
            np.multiply(cell, size, out=offset)
            np.subtract(positions, offset, out=offset)
        else:  # 5 times faster than by int64 division
            np.right_shift(positions, self._shift, out=cell)
            np.bitwise_and(positions, size - 1, out=offset)
        np.multiply(rows, self._layout.width, out=out)
        np.add(cell, out, out=cell)
        # the caller has checked the range: "clip" only spares numpy a buffered copy
        flat_table.take(cell, out=block, mode="clip")
        np.multiply(block, size, out=out, dtype=np.int64)
        np.add(out, offset, out=out)
        if share.size > 1:
            np.copyto(out, NO_SLOT, where=owner != share.rank)


class TokenSlots:
    """Slots of up to ``capacity`` tokens; those after the tokens of the last call are always -1.

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
        if len(rows) != len(at):
            raise WorkerError(f"{len(rows)} rows but {len(at)} positions: give one of each a token")
        if len(rows) > self.capacity:
            raise WorkerError(f"{len(rows)} tokens exceed the {self.capacity} slots: raise max_num_batched_tokens")
        require_below("rows", rows, self._num_rows)
        require_below("positions", at, self.layout.row_tokens, f" ({self.layout.width} columns)")
        return rows, at

    def compute(self, flat_table: Int32, rows: Int64, positions: Int64) -> None:
        """The host slots of checked tokens. O(n)."""
        n = len(rows)
        self._mapper(flat_table, rows, positions, self.host[:n])
        self.host[n : self._on_host] = NO_SLOT
        self._on_host = n

    def commit(self, num_tokens: int) -> None:
        """Send the first ``num_tokens`` host slots. O(num_tokens)."""
        if not 0 <= num_tokens <= self.capacity:
            raise WorkerError(f"num_tokens must lie in 0 .. {self.capacity}, got {num_tokens}")
        if self._mirror is not None:
            self._mirror[:num_tokens] = self.host[:num_tokens]
            self._mirror[num_tokens : self._on_device] = NO_SLOT
        else:
            # from memory of its own, which torch keeps until it is sent: the next step may write the host slots at once
            staged = torch.empty(num_tokens, dtype=torch.int64, pin_memory=self._pin)
            staged.numpy()[:] = self.host[:num_tokens]
            self.device[:num_tokens].copy_(staged, non_blocking=True)
            self.device[num_tokens : self._on_device].fill_(NO_SLOT)
        self._on_device = num_tokens


def check_least(least: int, **sizes: int) -> None:
    """Raise ConfigError for the first of ``sizes`` below ``least``."""
    for name, value in sizes.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def as_int64(name: str, values: Ids) -> Int64:
    """``values`` as int64[n], the array itself where it is one. WorkerError unless they are integers in one row."""
    if type(values) is list and values and type(values[0]) is int:
        with suppress(TypeError, OverflowError):  # what does not fit is looked at below
            return np.frombuffer(array("I", values), np.uint32).astype(_INT64)  # in a third of the time
    given = np.asarray(values)
    if given.ndim != 1 or (given.dtype != _INT64 and given.dtype.kind not in "iu" and given.size):
        raise WorkerError(f"{name} must be integers in one dimension, got {given.dtype} of shape {given.shape}")
    return given.astype(_INT64, copy=False)


def require_below(name: str, values: Int64, end: int, why: str = "") -> None:
    """Raise WorkerError unless all ``values`` lie in 0 .. end - 1; ``why`` says where the bound comes from. O(n)."""
    # as unsigned numbers negative ones are the largest: one pass instead of two
    if values.size and np.maximum.reduce(values.view(np.uint64)) >= end:
        raise WorkerError(f"{name} must lie in 0 .. {end - 1}{why}, got {values.min()} .. {values.max()}")
