"""The tokens of a step, gathered from the running rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BatchSlots
from hybridkv.request_rows import RequestRows
from hybridkv.step import Cells, Csr

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

SAMPLED_BY_WORKER = -1


def share_budget(wanted: Int64, budget: int) -> Int64:
    """What each row gets of ``budget`` tokens, first come first served, int64[rows]."""
    ends = np.cumsum(wanted)
    if not ends.size or ends[-1] <= budget:
        return wanted
    shares: Int64 = np.clip(budget - (ends - wanted), 0, wanted)
    return shares


def gather_tokens(requests: RequestRows, rows: Int64, computed: Int64, counts: Int64) -> Csr:
    """Tokens computed[i] .. computed[i] + counts[i] - 1 of each row; -1 for one that is not known yet.

    A decoding row costs a share of a few array operations, any other one a Python call.
    """
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    ahead = requests.num_tokens[rows] - computed
    if indptr[-1] == len(rows):
        values = requests.last_tokens(rows)
        other = ahead != 1
        if not other.any():
            return Csr(indptr, values)
    else:
        values = np.empty(int(indptr[-1]), np.int32)
        other = (counts != 1) | (ahead != 1)
        single = np.flatnonzero(~other)
        values[indptr[single]] = requests.last_tokens(rows[single])
    for i in np.flatnonzero(other).tolist():
        start, count = int(computed[i]), int(counts[i])
        if ahead[i] <= 0:
            values[indptr[i] : indptr[i + 1]] = SAMPLED_BY_WORKER
            continue
        request = requests.requests[int(rows[i])]
        if request is not None:
            values[indptr[i] : indptr[i + 1]] = request.token_ids(start, start + count)
    return Csr(indptr, values)


def cells_of(rows: Int64, slots: BatchSlots) -> Cells:
    """The cells of a batch's new blocks."""
    return Cells(slots.group, rows[slots.owner].astype(np.int32), slots.column, slots.block)


def cells_of_row(row: int, ids: tuple[Int32, ...]) -> list[Cells]:
    """The cells of a new row: all its blocks, group by group, null columns left out."""
    parts = []
    for group, blocks in enumerate(ids):
        columns = np.flatnonzero(blocks).astype(np.int32)
        same = np.full((2, len(columns)), [[group], [row]], np.int32)
        parts.append(Cells(same[0], same[1], columns, blocks[columns]))
    return parts


def join_cells(parts: list[Cells]) -> Cells:
    """All cells in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Cells.empty()
    return Cells(
        np.concatenate([part.group for part in parts]),
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.column for part in parts]),
        np.concatenate([part.block for part in parts]),
    )
