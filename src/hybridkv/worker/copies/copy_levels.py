"""Copies in order, as few batches: which of them may run at the same time. Pure Python and numpy.

A -> B    level 0
C -> D    level 0
B -> C    level 1: reads what the first wrote, and writes what the second reads
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


def copy_levels(places: Int64) -> Int64:
    """A level for each copy, int64[n]: levels one after the other do what the copies do in their order.

    places: int64[2, n], what each copy reads, and what it writes. Within a level no copy writes what another
    reads or writes; levels are as low as that allows. O(n log n) where one level does, else O(n) in Python.
    """
    source, destination = places
    written = np.unique(destination)
    if len(written) == len(destination) and not np.isin(source, written).any():
        return np.zeros(len(source), np.int64)
    levels = np.empty(len(source), np.int64)
    free_to_read: dict[int, int] = {}
    free_to_write: dict[int, int] = {}
    for i, (read, write) in enumerate(zip(source.tolist(), destination.tolist(), strict=True)):
        level = max(free_to_read.get(read, 0), free_to_write.get(write, 0))
        levels[i] = level
        free_to_write[read] = max(free_to_write.get(read, 0), level + 1)
        free_to_write[write] = free_to_read[write] = level + 1
    return levels
