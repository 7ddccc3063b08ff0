"""Where a token's row lies: ``slot(p) = table[row, p // block_size] * block_size + p % block_size``.

table row   [ 7 | 3 ]        block_size 4, position 5: column 1, offset 1
slots       28 29 30 31 | 12 13 14 15                   -> 3 * 4 + 1 = 13
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class SlotMapper:
    """Computes slots of one block size; keeps its scratch arrays, so that a call allocates nothing.

    block_size: tokens. width: columns of the table. max_tokens: most tokens of a call.
    """

    def __init__(self, block_size: int, width: int, max_tokens: int) -> None:
        self._block_size = block_size
        self._width = width
        # a power of two divides by shifting, 5 times faster than by int64 division
        self._shift = block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else None
        self._cell = np.empty(max_tokens, np.int64)
        self._offset = np.empty(max_tokens, np.int64)
        self._block = np.empty(max_tokens, np.int32)

    def __call__(self, flat_table: Int32, rows: Int64, positions: Int64, out: Int64) -> None:
        """Write the slot of every (rows[i], positions[i]) into ``out[i]``. O(tokens).

        flat_table: int32[rows * width], the table row after row. rows, positions: int64[n], in range.
        """
        n = len(rows)
        cell, offset, block = self._cell[:n], self._offset[:n], self._block[:n]
        if self._shift is None:
            np.floor_divide(positions, self._block_size, out=cell)
            np.multiply(cell, self._block_size, out=offset)
            np.subtract(positions, offset, out=offset)
        else:
            np.right_shift(positions, self._shift, out=cell)
            np.bitwise_and(positions, self._block_size - 1, out=offset)
        np.multiply(rows, self._width, out=out)
        np.add(cell, out, out=cell)
        # the caller has checked the range: "clip" only spares numpy a buffered copy
        flat_table.take(cell, out=block, mode="clip")
        np.multiply(block, self._block_size, out=out, dtype=np.int64)
        np.add(out, offset, out=out)
