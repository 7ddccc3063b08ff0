"""The pages that a step reads as one list, the form in which FlashInfer's kernels take them.

    request a   tokens 0 .. 8, 4 a page; its queries are 7 and 8      table [ 7 | 3 | 5 | . ]
    request b   tokens 0 .. 3, its query is 3                         table [ 8 | . | . | . ]

    query_indptr   0 2 3        indptr   0 3 4        indices   7 3 5 8        last_page_len   1 4

What each *piece* reads are the tokens of pages indices[indptr[i]:indptr[i + 1]], all full but the last, of which the
first last_page_len[i] count; its queries are the last of these tokens. A request with queries is one piece, and under
a mask of chunks one for every chunk that they lie in, which begins where the chunk does. Pages that a window left
behind are in no list: they may be another request's by now, or hold what is no number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.worker.attention.attention_mask import CAUSAL, AttentionMask
from hybridkv.worker.attention.paged_attention import PagedBatch, check_batch
from hybridkv.worker.tables.index_arrays import ragged

Int64 = NDArray[np.int64]

_MOST_PAGES: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PagedIndex:
    """Pages in compressed rows. indices: int32[indptr[n]], on the device of the table; all else on the host.

    query_indptr, indptr: int32[n + 1]. last_page_len: int32[n]. Every piece has a query and reads a token.
    """

    query_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @property
    def one_query_each(self) -> bool:
        """Whether every piece is one query: a step that only decodes."""
        return bool((self.query_indptr.diff() == 1).all())


def paged_index(batch: PagedBatch, mask: AttentionMask = CAUSAL) -> PagedIndex:
    """What ``batch`` reads under ``mask``, of which the pages show all but a window's own beginning.

    Raises WorkerError where they cannot: for chunks that begin inside a page, tokens at the beginning that are seen
    besides, one rank of several, and queries that see no token. O(requests + pages); never waits for the device.
    """
    size = batch.block_size
    if mask.first_tokens or batch.share.size > 1 or (mask.chunk is not None and mask.chunk % size):
        raise WorkerError(
            f"pages of {size} tokens in a list cannot say what {mask} sees on one of {batch.share.size} ranks: use "
            "paged_attention"
        )
    check_batch(batch, mask)
    starts, lengths = np.array(batch.query_start_loc, np.int64), np.array(batch.seq_lens, np.int64)
    counts = starts[1:] - starts[:-1]
    if ((counts > 0) & (lengths == 0)).any():
        raise WorkerError("a request has queries and no token to read: leave it out")
    owner, begin, end = _pieces(lengths - counts, lengths, mask.chunk)
    skipped = _first_seen(begin, mask) // size
    pages = -(-end // size) - skipped
    indptr, queries = (np.concatenate(([0], np.cumsum(one))) for one in (pages, end - begin))
    if indptr[-1] > _MOST_PAGES:
        raise WorkerError(f"{indptr[-1]} pages do not fit the int32 of indptr: ask for fewer rows at once")
    table = batch.block_table
    cells = torch.from_numpy(ragged(owner * table.shape[1] + skipped, pages))
    return PagedIndex(
        torch.from_numpy(queries.astype(np.int32)),
        torch.from_numpy(indptr.astype(np.int32)),
        table.reshape(-1)[cells.to(table.device, non_blocking=True)].to(torch.int32),
        torch.from_numpy(((end - 1) % size + 1).astype(np.int32)),
    )


def _pieces(first: Int64, lengths: Int64, chunk: int | None) -> tuple[Int64, Int64, Int64]:
    """int64[pieces] each: whose it is, the position of its first query, and that behind its last one.

    first: of each request's queries, int64[requests].
    """
    if chunk is None:
        owner = np.flatnonzero(lengths > first)
        return owner, first[owner], lengths[owner]
    count = np.where(lengths > first, (lengths - 1) // chunk - first // chunk + 1, 0)
    owner = np.repeat(np.arange(len(first)), count)
    number = ragged(first // chunk, count)
    return owner, np.maximum(first[owner], number * chunk), np.minimum(lengths[owner], (number + 1) * chunk)


def _first_seen(begin: Int64, mask: AttentionMask) -> Int64:
    """The first token that each piece sees, int64[pieces]: as AttentionMask.first_seen of its first query."""
    if not mask.causal:
        return np.zeros_like(begin)
    window = 0 if mask.window is None else begin - mask.window + 1
    chunk = 0 if mask.chunk is None else begin // mask.chunk * mask.chunk
    return np.maximum(0, np.maximum(window, chunk))
