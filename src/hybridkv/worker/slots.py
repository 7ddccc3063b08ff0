"""Slots of tokens, of compressed states, and of rings: computed on the host, sent to the device.

A slot is the place of a token's keys and values, or of a compressed state: ``block * rows of a block + row``. -1 stands
for a token that writes nothing.

    tokens_per_state 4, blocks of 8 tokens, which are 2 states; table row [ 7 | 3 ]
    position      0  1  2  3  4  5  6  7  8  9 10 11
    slot         -1 -1 -1 14 -1 -1 -1 15 -1 -1 -1  6      a state is written with its last token
    tokens_per_state 1/2, blocks of 2 tokens, which are 4 states; table row [ 7 ]
    position         0     1
    slots         28 29 30 31                             a token writes its states, in order
    a ring of 4 tokens in block 7, positions 2 .. 7 in one step
    position      2  3  4  5  6  7
    slot         -1 -1 28 29 30 31                        position % 4; a token that the step itself overwrites has none

With ``t`` tokens a state, the first ``n`` tokens end ``n // t`` states. So token p ends the states ``p // t`` ..
``(p + 1) // t - 1``: ``ceil(1 / t)`` of them at most, which are its slots; -1 for each that it does not end. vLLM 0.33
has the same slots for integers (``get_compressed_slot_mapping``), for 1/n (``block_pool_size`` of Whisper) and for
rings (``compute_kpool_tail_slot_mapping``).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.worker.attention import ContextShare

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NO_SLOT: Final = -1


class SlotBuffer:
    """Slots on the host, and their copy on a device. Slots after the last ones given are -1.

    Args:
        capacity: most slots.
        pin_memory: send from pinned memory, without waiting for the device.
        device: device of the copy.

    Attributes:
        host: int64[capacity].
        device: int64[capacity].
    """

    def __init__(self, capacity: int, pin_memory: bool, device: torch.device) -> None:
        self._pin = pin_memory
        self._on_host = self._on_device = 0
        self.host: Int64 = np.full(capacity, NO_SLOT, np.int64)
        self.device = torch.full((capacity,), NO_SLOT, dtype=torch.int64, device=device)
        # host memory is written through numpy: 10 us less for each commit than through torch
        self._mirror: Int64 | None = self.device.numpy() if device.type == "cpu" else None

    def first(self, count: int) -> Int64:
        """Return the first host slots to be written, int64[count]; slots after them become -1. Amortised O(1)."""
        self.host[count : self._on_host] = NO_SLOT
        self._on_host = count
        return self.host[:count]

    def commit(self, count: int) -> None:
        """Send the first ``count`` slots to the device; device slots after them become -1. O(count).

        Raises WorkerError if there are not so many.
        """
        if not 0 <= count <= len(self.host):
            raise WorkerError(f"num_tokens must lie in 0 .. {len(self.host)} slots, got {count}")
        slots = self.host[:count]
        if self._mirror is not None:
            self._mirror[:count] = slots
            self._mirror[count : self._on_device] = NO_SLOT
        else:
            # staged in memory that torch keeps until it is sent: the next step may overwrite the host slots at once
            staged = torch.empty(count, dtype=torch.int64, pin_memory=self._pin)
            staged.numpy()[:] = slots
            self.device[:count].copy_(staged, non_blocking=True)
            self.device[count : self._on_device].fill_(NO_SLOT)
        self._on_device = count


class SlotMapper:
    """Computes slots, for at most ``max_tokens`` tokens a call. Calls share scratch arrays.

    ``block_size`` and ``width`` are measured in kernel blocks, like the table's cells.
    """

    def __init__(self, block_size: int, width: int, share: ContextShare, max_tokens: int) -> None:
        self._block_size, self._width, self._share = block_size, width, share
        self._shift = block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else None
        self._cell = np.empty(max_tokens, np.int64)
        self._offset = np.empty(max_tokens, np.int64)
        self._block = np.empty(max_tokens, np.int32)

    def __call__(self, flat_table: Int32, rows: Int64, positions: Int64, out: Int64) -> None:
        """Write the slot of every (rows[i], positions[i]) into ``out[i]``. O(tokens).

        Args:
            flat_table: int32[rows * width], the table row after row.
            rows: int64[n], in range; the caller checks it.
            positions: int64[n], in range.
            out: int64[n].
        """
        n, size, share = len(rows), self._block_size, self._share
        cell, offset, block = self._cell[:n], self._offset[:n], self._block[:n]
        if share.size > 1:
            turn, within = np.divmod(positions, share.interleave)
            rounds, owner = np.divmod(turn, share.size)
            positions = rounds * share.interleave + within  # the local index
        if self._shift is None:
            np.floor_divide(positions, size, out=cell)
            np.multiply(cell, size, out=offset)
            np.subtract(positions, offset, out=offset)
        else:  # shifts are 5 times faster than int64 division
            np.right_shift(positions, self._shift, out=cell)
            np.bitwise_and(positions, size - 1, out=offset)
        np.multiply(rows, self._width, out=out)
        np.add(cell, out, out=cell)
        # the caller has checked the range: "clip" only avoids a buffered copy in numpy
        flat_table.take(cell, out=block, mode="clip")
        np.multiply(block, size, out=out, dtype=np.int64)
        np.add(out, offset, out=out)
        if share.size > 1:
            np.copyto(out, NO_SLOT, where=owner != share.rank)


class StateSlots:
    """The slots of the compressed states that a step's tokens end, in a group with several tokens a state, or less.

    Args:
        rate: tokens of a state.
        block_size: tokens of a kernel block.
        width: columns of a row, in kernel blocks.
        max_tokens: tokens of the largest step.
        pin_memory: as in SlotBuffer.
        device: as in SlotBuffer.

    Attributes:
        block_states: states of a kernel block.
        most: slots of a token.
        slots: the slots, ``most`` of each token in order.

    Raises:
        ConfigError: a kernel block does not hold whole states.
    """

    def __init__(
        self,
        rate: int | Fraction,
        block_size: int,
        width: int,
        max_tokens: int,
        *,
        pin_memory: bool,
        device: torch.device,
    ) -> None:
        if Fraction(block_size) % rate:
            raise ConfigError(
                f"blocks of {block_size} tokens do not hold whole states of {rate} tokens: give a kernel block size "
                "that is a multiple of tokens_per_state"
            )
        self._up, self._down = rate.denominator, rate.numerator
        self.block_states = int(block_size / Fraction(rate))
        self.most = -(-self._up // self._down)
        self._map = SlotMapper(self.block_states, width, ContextShare(), max_tokens * self.most)
        self.slots = SlotBuffer(max_tokens * self.most, pin_memory, device)

    def ended(self, tokens: Int64) -> Int64:
        """Return the states that the first ``tokens`` tokens of a request end, int64[n].

        Args:
            tokens: int64[n].
        """
        ended: Int64 = tokens * self._up // self._down
        return ended

    def compute(self, flat_table: Int32, rows: Int64, positions: Int64) -> None:
        """Compute the slots of tokens on the host. O(slots).

        Args:
            flat_table: int32[rows * width], the table row after row.
            rows: int64[n], in range.
            positions: int64[n], in range.
        """
        first, end = self.ended(positions), self.ended(positions + 1)
        out = self.slots.first(len(rows) * self.most)
        if self.most == 1:
            self._map(flat_table, rows, first, out)
            np.copyto(out, NO_SLOT, where=first == end)
            return
        state = first[:, None] + np.arange(self.most)
        self._map(flat_table, np.repeat(rows, self.most), state.reshape(-1), out)
        np.copyto(out.reshape(state.shape), NO_SLOT, where=state >= end[:, None])


class RingSlots:
    """The slots of a step's tokens in the ring of their request.

    Args:
        capacity: tokens of a ring.
        pools: tokens at whose multiples the ring is empty; 0 where that is unknown.
        rows: rows of the table.
        max_tokens: tokens of the largest step.
        pin_memory: as in SlotBuffer.
        device: as in SlotBuffer.

    Attributes:
        capacity: tokens of a ring.
        pools: tokens at whose multiples the ring is empty.
        slots: the slots, one of each token.
    """

    def __init__(
        self, capacity: int, pools: int, rows: int, max_tokens: int, *, pin_memory: bool, device: torch.device
    ) -> None:
        self.capacity, self.pools = capacity, pools
        self._last = np.empty(rows, np.int64)
        self.slots = SlotBuffer(max_tokens, pin_memory, device)

    def compute(self, flat_table: Int32, rows: Int64, positions: Int64) -> None:
        """Compute the slots of tokens on the host. O(rows + tokens).

        Args:
            flat_table: int32[rows], the one block of each row.
            rows: int64[n], in range.
            positions: int64[n], not negative.
        """
        self._last.fill(-1)
        np.maximum.at(self._last, rows, positions)
        out = self.slots.first(len(rows))
        np.multiply(flat_table[rows], self.capacity, out=out, dtype=np.int64)
        np.add(out, positions % self.capacity, out=out)
        np.copyto(out, NO_SLOT, where=positions <= self._last[rows] - self.capacity)
