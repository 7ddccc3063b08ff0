"""How many blocks the rows of a Step hold, before it is applied."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.step import Step
from hybridkv.worker import BlockTable

Int64 = NDArray[np.int64]


def require_blocks(step: Step, table: BlockTable, group: int, tokens: Int64, what: str) -> None:
    """Raise WorkerError unless every row of ``step`` holds blocks for ``tokens``, once the Step's cells are written.

    table: of ``group``. tokens: int64[R]. what: the tokens are, for the message. O(rows + cells).
    """
    held = table.num_blocks_per_row.astype(np.int64)
    held[np.concatenate((step.finished_rows, [new.row for new in step.new_rows])).astype(np.int64)] = 0
    mine = step.cells.group == group
    np.maximum.at(held, step.cells.row[mine], step.cells.column[mine] + 1)
    short = np.flatnonzero(held[step.rows] * table.block_size < tokens)
    if len(short):
        row = step.rows[short[0]]
        raise WorkerError(
            f"Step {step.id}: row {row} needs blocks for {tokens[short[0]]} {what} in group {group}, it has "
            f"{held[row]} of {table.block_size}"
        )
