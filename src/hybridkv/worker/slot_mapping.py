"""Where a token's keys and values lie: the slot of every token, in numpy, the reference for all other forms.

    table row   [ 7 | 3 ]        block_size 4, position 5: column 1, offset 1
    slots       28 29 30 31 | 12 13 14 15                   -> 3 * 4 + 1 = 13

On one of several context parallel ranks a token that lies elsewhere has slot -1, and a token that lies here has the
slot of its local index (context_parallel_rank.py): with two ranks, interleave 1, token 5 is the third on rank 1.

    position      0  1  2  3  4  5  6  7
    rank 1        -1 28 -1 29 -1 30 -1 31

The contract states the same with v = block_size * world_size, o = p % v: column p // v, offset
o // (world_size * interleave) * interleave + o % interleave. Since interleave divides block_size, both agree.
Blocks that a window has left behind are null in the table; a position in them has a slot of the null block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.worker.context_parallel_rank import ContextParallelRank

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NO_SLOT: Final = -1


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How the rows of a table map tokens to slots.

    block_size: tokens of a block as the table names it (kernel blocks where blocks are split). width: columns.
    rank: which tokens lie here. Raises ConfigError where the interleave does not divide block_size.
    """

    block_size: int
    width: int
    rank: ContextParallelRank

    def __post_init__(self) -> None:
        self.rank.check_block_size(self.block_size)

    @property
    def row_tokens(self) -> int:
        """Tokens of a request that a row has room for: positions lie below."""
        return self.width * self.block_size * self.rank.world_size


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
        self._share = _Share(layout.rank, max_tokens) if layout.rank.world_size > 1 else None

    def __call__(self, flat_table: Int32, rows: Int64, positions: Int64, out: Int64) -> None:
        """Write the slot of every (rows[i], positions[i]) into ``out[i]``. O(tokens).

        flat_table: int32[rows * width], the table row after row. rows, positions: int64[n], in range.
        """
        n = len(rows)
        cell, offset, block = self._cell[:n], self._offset[:n], self._block[:n]
        if self._share is not None:
            positions, elsewhere = self._share(positions)
        self._divide(positions, cell, offset)
        np.multiply(rows, self._layout.width, out=out)
        np.add(cell, out, out=cell)
        # the caller has checked the range: "clip" only spares numpy a buffered copy
        flat_table.take(cell, out=block, mode="clip")
        np.multiply(block, self._layout.block_size, out=out, dtype=np.int64)
        np.add(out, offset, out=out)
        if self._share is not None:
            np.copyto(out, NO_SLOT, where=elsewhere)


class _Share:
    """The local indices of a rank's tokens; of other ranks' tokens some index below, and where those are."""

    def __init__(self, rank: ContextParallelRank, max_tokens: int) -> None:
        self._rank = rank
        self._by_turn, self._by_round = _Divisor(rank.interleave), _Divisor(rank.world_size)
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
        np.multiply(rounds, self._rank.interleave, out=rounds)
        np.add(rounds, within, out=rounds)
        return rounds, np.not_equal(owner, self._rank.rank, out=self._elsewhere[:n])


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
