"""Arrays of row numbers, columns and token counts: read from what a caller gave, and laid out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import WorkerError

Int64 = NDArray[np.int64]
Ids = Sequence[int] | NDArray[np.integer]

_INT64: Final = np.dtype(np.int64)


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


def occurrences(rows: Int64) -> Int64:
    """How often rows[i] came before i: (3, 5, 3, 3) -> (0, 0, 1, 2). O(n log n), O(n) where no row comes twice."""
    if not len(rows) or np.bincount(rows).max() == 1:
        return np.zeros(len(rows), np.int64)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rank = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    out = np.empty(len(rows), np.int64)
    out[order] = rank
    return out


def ragged(first: Int64, counts: Int64) -> Int64:
    """first[i], first[i] + 1, ... counts[i] numbers for each i: (5, 9), (2, 1) -> (5, 6, 9). O(sum of counts)."""
    ends = np.cumsum(counts)
    total = ends.item(-1) if len(ends) else 0
    numbers: Int64 = np.arange(total) + np.repeat(first - (ends - counts), counts)
    return numbers
