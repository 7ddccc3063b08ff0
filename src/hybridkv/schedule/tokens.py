"""The tokens of a step, gathered from the running rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.request_rows import RequestRows
from hybridkv.step import Csr

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


def with_drafts(tokens: Csr, drafts: Csr) -> Csr:
    """Each row of ``drafts`` behind the same row of ``tokens``. O(tokens) in array operations."""
    indptr = tokens.indptr + drafts.indptr
    values = np.empty(len(tokens.values) + len(drafts.values), np.int32)
    is_draft = np.zeros(len(values), np.bool_)
    counts = np.diff(drafts.indptr)
    behind = np.arange(len(drafts.values)) - np.repeat(drafts.indptr[:-1], counts)
    is_draft[np.repeat(indptr[1:] - counts, counts) + behind] = True
    values[is_draft], values[~is_draft] = drafts.values, tokens.values
    return Csr(indptr, values)


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
