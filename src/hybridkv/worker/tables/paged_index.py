"""The pages of a batch's rows as one list, the form that FlashInfer-like kernels read instead of a dense table.

    table row 0  [ 7 | 3 | 5 | . ]   context 9 of 4 tokens a block     indptr         0     3  4
    table row 1  [ 8 | . | . | . ]   context 4                         indices        7 3 5  8
                                                                       last_page_len  1      4

The tokens of row i are those of pages indices[indptr[i]:indptr[i + 1]], all full but the last, of which the first
last_page_len[i] count. On a context parallel rank they are the tokens that lie there, in order, which may be none:
then a row has no page and last_page_len is 0. With a first live token the blocks before it are left out; the block
that holds it is there as a whole, so a kernel still hides its own window's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.worker.attention.context_parallel import ContextShare
from hybridkv.worker.tables.index_arrays import ragged, require_below
from hybridkv.worker.tables.slot_mapping import SlotLayout
from hybridkv.worker.tables.token_slots import check_integers

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

A = TypeVar("A")

_MOST_PAGES: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class PagedIndex(Generic[A]):
    """Pages in compressed rows, as numpy arrays or as tensors.

    indptr: int32[n + 1]. indices: int32[indptr[n]], ids of (kernel) blocks. last_page_len: int32[n], tokens of the
    last page, 0 for a row without pages.
    """

    indptr: A
    indices: A
    last_page_len: A


def local_tokens(context_lens: Int64, share: ContextShare) -> Int64:
    """How many of the first ``context_lens[i]`` tokens of a request lie on the rank of ``share``, int64[n].

    Of every full cycle of all ranks ``interleave``; of the rest what is left behind the ranks before this one, at
    most ``interleave``. O(n).
    """
    cycles, rest = np.divmod(context_lens, share.size * share.interleave)
    local: Int64 = cycles * share.interleave + np.clip(rest - share.rank * share.interleave, 0, share.interleave)
    return local


def numpy_paged_index(
    table: Int32, rows: Int64, context_lens: Int64, first_live: Int64 | None, layout: SlotLayout
) -> PagedIndex[Int32]:
    """The pages of the first ``context_lens[i]`` tokens of row ``rows[i]``, from token ``first_live[i]`` on.

    table: int32[rows, layout.width]. rows, context_lens, first_live: int64[n], in range. O(n + pages).
    """
    local = local_tokens(context_lens, layout.share)
    before = np.zeros_like(local) if first_live is None else local_tokens(first_live, layout.share)
    skipped = before // layout.block_size
    pages = np.where(local > before, -(-local // layout.block_size) - skipped, 0)
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(pages, out=indptr[1:])
    _check_pages(int(indptr[-1]))
    cell = ragged(rows * layout.width + skipped, pages)
    last = np.where(pages > 0, (local - 1) % layout.block_size + 1, 0)
    return PagedIndex(indptr.astype(np.int32), table.reshape(-1)[cell], last.astype(np.int32))


def torch_paged_index(
    table: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    first_live: torch.Tensor | None,
    layout: SlotLayout,
) -> PagedIndex[torch.Tensor]:
    """``numpy_paged_index`` on the device of its tensors. O(n + pages).

    Raises WorkerError for tensors of another kind or place, rows out of range and contexts wider than the table.
    Waits for the device twice: for that, and for the number of pages.
    """
    _check_device_contexts(table, rows, context_lens, first_live, layout)
    local = _local_tokens(context_lens.long(), layout.share)
    before = torch.zeros_like(local) if first_live is None else _local_tokens(first_live.long(), layout.share)
    skipped = before // layout.block_size
    pages = torch.where(local > before, -(-local // layout.block_size) - skipped, 0)
    indptr = torch.zeros(len(rows) + 1, dtype=torch.int64, device=table.device)
    torch.cumsum(pages, 0, out=indptr[1:])
    total = int(indptr[-1])
    _check_pages(total)
    first = rows.long() * layout.width + skipped - indptr[:-1]
    cell = torch.arange(total, device=table.device) + torch.repeat_interleave(first, pages, output_size=total)
    last = torch.where(pages > 0, (local - 1) % layout.block_size + 1, 0)
    return PagedIndex(indptr.int(), table.reshape(-1)[cell], last.int())


def check_contexts(rows: Int64, context_lens: Int64, first_live: Int64 | None, room_tokens: Int64) -> None:
    """Raise WorkerError unless 0 <= first_live[i] <= context_lens[i] <= room_tokens[i], what row i has blocks for."""
    first = np.zeros_like(context_lens) if first_live is None else first_live
    if not len(rows) == len(context_lens) == len(first):
        raise WorkerError(
            f"{len(rows)} rows, {len(context_lens)} context lengths and {len(first)} first live tokens: "
            "give one of each a row"
        )
    wrong = np.flatnonzero((first < 0) | (first > context_lens) | (context_lens > room_tokens))
    if len(wrong):
        i = wrong[0]
        raise WorkerError(
            f"row {rows[i]}: a context of {context_lens[i]} tokens from token {first[i]} on must begin at 0 or later "
            f"and end by {room_tokens[i]}, the tokens that the row has blocks for"
        )


def _check_device_contexts(
    table: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    first_live: torch.Tensor | None,
    layout: SlotLayout,
) -> None:
    """Raise WorkerError where kind, place, length or a value does not fit the table; waits for it."""
    given = {"rows": rows, "context_lens": context_lens}
    if first_live is not None:
        given["first_live"] = first_live
    for name, values in given.items():
        check_integers(name, values, table.device)
    lengths = {len(values) for values in given.values()}
    if len(lengths) == 1:
        first = torch.zeros_like(rows) if first_live is None else first_live
        wrong = (rows < 0) | (rows >= len(table)) | (first < 0) | (first > context_lens)
        if not bool((wrong | (context_lens > layout.row_tokens)).any()):
            return
    host = [values.cpu().numpy().astype(np.int64) for values in given.values()]
    require_below("rows", host[0], len(table))
    check_contexts(host[0], host[1], None if first_live is None else host[2], np.full(len(rows), layout.row_tokens))


def _local_tokens(context_lens: torch.Tensor, share: ContextShare) -> torch.Tensor:
    """``local_tokens`` of a tensor, int64[n]."""
    cycle = share.size * share.interleave
    rest = context_lens % cycle - share.rank * share.interleave
    return context_lens // cycle * share.interleave + rest.clamp(0, share.interleave)


def _check_pages(total: int) -> None:
    if total > _MOST_PAGES:
        raise WorkerError(f"{total} pages do not fit the int32 of indptr: ask for fewer rows at once")
