"""Where a token's keys and values lie: the slot of every token, in numpy, the reference for all other forms.

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
Blocks that a window has left behind are null in the table; a position in them has a slot of the null block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.worker.attention.context_parallel import ContextShare

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NO_SLOT: Final = -1


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
    """Computes slots of one layout; keeps its scratch arrays, so that a call allocates nothing.

    max_tokens: most tokens of a call.
    """

    def __init__(self, layout: SlotLayout, max_tokens: int) -> None:
        self._layout = layout
        self._divide = _Divisor(layout.block_size)
        self._cell = np.empty(max_tokens, np.int64)
        self._offset = np.empty(max_tokens, np.int64)
        self._block = np.empty(max_tokens, np.int32)
        self._locals = _Locals(layout.share, max_tokens) if layout.share.size > 1 else None

    def __call__(self, flat_table: Int32, rows: Int64, positions: Int64, out: Int64) -> None:
        """Write the slot of every (rows[i], positions[i]) into ``out[i]``. O(tokens).

        flat_table: int32[rows * width], the table row after row. rows, positions: int64[n], in range.
        """
        n = len(rows)
        cell, offset, block = self._cell[:n], self._offset[:n], self._block[:n]
        if self._locals is not None:
            positions, elsewhere = self._locals(positions)
        self._divide(positions, cell, offset)
        np.multiply(rows, self._layout.width, out=out)
        np.add(cell, out, out=cell)
        # the caller has checked the range: "clip" only spares numpy a buffered copy
        flat_table.take(cell, out=block, mode="clip")
        np.multiply(block, self._layout.block_size, out=out, dtype=np.int64)
        np.add(out, offset, out=out)
        if self._locals is not None:
            np.copyto(out, NO_SLOT, where=elsewhere)


class _Locals:
    """The local indices of a rank's tokens; of other ranks' tokens some index below, and where those are."""

    def __init__(self, share: ContextShare, max_tokens: int) -> None:
        self._share = share
        self._by_turn, self._by_round = _Divisor(share.interleave), _Divisor(share.size)
        self._turn = np.empty(max_tokens, np.int64)
        self._within = np.empty(max_tokens, np.int64)
        self._round = np.empty(max_tokens, np.int64)
        self._owner = np.empty(max_tokens, np.int64)
        self._elsewhere = np.empty(max_tokens, np.bool_)

    def __call__(self, positions: Int64) -> tuple[Int64, Bool]:
        """Local indices int64[n], and bool[n], True for tokens that lie elsewhere; valid until the next call."""
        n = len(positions)
        turn, within, rounds, owner = self._turn[:n], self._within[:n], self._round[:n], self._owner[:n]
        self._by_turn(positions, turn, within)
        self._by_round(turn, rounds, owner)
        np.multiply(rounds, self._share.interleave, out=rounds)
        np.add(rounds, within, out=rounds)
        return rounds, np.not_equal(owner, self._share.rank, out=self._elsewhere[:n])


class _Divisor:
    """Divides by one number; a power of two by shifting, 5 times faster than by int64 division."""

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor
        self._shift = divisor.bit_length() - 1 if divisor & (divisor - 1) == 0 else None

    def __call__(self, values: Int64, quotient: Int64, remainder: Int64) -> None:
        """Write ``values // divisor`` and ``values % divisor``; values >= 0, none of the arrays overlap."""
        if self._shift is None:
            np.floor_divide(values, self._divisor, out=quotient)
            np.multiply(quotient, self._divisor, out=remainder)
            np.subtract(values, remainder, out=remainder)
        else:
            np.right_shift(values, self._shift, out=quotient)
            np.bitwise_and(values, self._divisor - 1, out=remainder)
