"""Columns: arrays with one entry a row, which get longer as rows are added."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)


def grown(column: NDArray[T], rows: int, empty: int = 0) -> NDArray[T]:
    """``column``, [capacity, ...], with at least ``rows`` rows, the new ones ``empty``.

    Itself where it is long enough, else a copy of at least twice the length: O(1) a row in the long run.
    """
    missing = rows - len(column)
    if missing <= 0:
        return column
    more = np.full((max(missing, len(column)), *column.shape[1:]), empty, column.dtype)
    return np.concatenate((column, more))
