"""Which row ends up with the blocks of which, when many rows are moved, swapped or copied one after the other.

    moved([0, 1], [1, 2])   row 0 to row 1, then row 1 to row 2     row 2 has the blocks of row 0; 0 and 1 have none

Playing the calls on row numbers first lets the caller copy every row's blocks once, all rows together.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WorkerError

Int64 = NDArray[np.int64]
Taken = tuple[Int64, Int64]
"""Rows whose blocks change, and for each the row whose blocks it gets: NO_ROW for none."""

NO_ROW: Final = -1


def moved(sources: Int64, targets: Int64) -> Taken:
    """Row sources[i] to row targets[i], which leaves sources[i] empty; a row moved to itself stays. O(n)."""
    held: dict[int, int] = {}
    for source, target in _pairs(sources, targets):
        if source != target:
            held[target] = held.get(source, source)
            held[source] = NO_ROW
    return _taken(held)


def swapped(sources: Int64, targets: Int64) -> Taken:
    """Rows sources[i] and targets[i] exchanged. O(n)."""
    held: dict[int, int] = {}
    for source, target in _pairs(sources, targets):
        held[source], held[target] = held.get(target, target), held.get(source, source)
    return _taken(held)


def copied(sources: Int64, targets: Int64) -> Taken:
    """Row sources[i] copied to row targets[i]. O(n)."""
    held: dict[int, int] = {}
    for source, target in _pairs(sources, targets):
        held[target] = held.get(source, source)
    return _taken(held)


def _pairs(sources: Int64, targets: Int64) -> list[tuple[int, int]]:
    if len(sources) != len(targets):
        raise WorkerError(f"{len(sources)} source rows but {len(targets)} target rows: give one of each")
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


def _taken(held: dict[int, int]) -> Taken:
    pairs = np.asarray([(row, of) for row, of in held.items() if row != of], np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
