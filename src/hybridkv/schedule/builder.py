"""The step being scheduled: its rows, and the Step that is made of them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BatchSlots, KVCacheManager, RowSpans, SlotPlan, Transfers, cells_of, cells_of_row
from hybridkv.request import Request
from hybridkv.request_rows import RequestRows
from hybridkv.schedule.budget import StepBudget
from hybridkv.step import Cells, Csr, EncoderRead, NewRow, Step

Int64 = NDArray[np.int64]

SAMPLED_BY_WORKER: Final = -1


class StepBuilder:
    """Rows and their tokens so far. budget: tokens that no row has yet."""

    def __init__(self, cache: KVCacheManager, budget: StepBudget) -> None:
        self.budget = budget
        self._cache = cache
        self._rows: list[Int64] = []
        self._counts: list[Int64] = []
        self._draft_tokens: list[Csr | None] = []
        self._cells: list[Cells] = []
        self._admitted: list[tuple[Request, bool]] = []

    # -- rows

    def add_running(self, rows: Int64, counts: Int64, slots: BatchSlots, draft_tokens: Csr | None) -> None:
        """Rows that ran before get ``counts`` tokens, ``draft_tokens`` among them, and their new blocks."""
        self._rows.append(rows)
        self._counts.append(counts)
        self._draft_tokens.append(draft_tokens)
        if len(slots.block):
            self._cells.append(cells_of(rows, slots))
        self.budget.spend(int(counts.sum()))

    def add_admitted(self, plan: SlotPlan) -> None:
        """A row begins as ``plan``, which is carried out, says: all its blocks, the tokens behind its hit."""
        request, count = plan.request, plan.certain_tokens - plan.hit_tokens
        self._rows.append(np.array([request.row]))
        self._counts.append(np.array([count]))
        self._draft_tokens.append(None)
        self._cells += cells_of_row(request.row, self._cache.get_blocks(request.request_id).ids)
        self._admitted.append((request, plan.encodes))
        self.budget.spend_admitted(count, request.num_tokens - plan.hit_tokens)

    # -- the Step

    def spans(self) -> RowSpans:
        """What each row computes for certain and its drafts, in the order of the batch."""
        rows, counts = _joined(self._rows), _joined(self._counts)
        computed = self._cache.rows.num_computed[rows]
        if all(part is None for part in self._draft_tokens):
            return RowSpans(rows, computed, counts)
        parts = [
            Csr.empty(len(some)) if part is None else part
            for some, part in zip(self._rows, self._draft_tokens, strict=True)
        ]
        num_drafts = np.concatenate([np.diff(part.indptr) for part in parts])
        indptr = np.concatenate(([0], np.cumsum(num_drafts)))
        drafts = Csr(indptr, np.concatenate([part.values for part in parts]))
        return RowSpans(rows, computed, counts - num_drafts, drafts)

    def freeze(
        self,
        step_id: int,
        after: int,
        spans: RowSpans,
        *,
        pending: Int64,
        ended_rows: list[int],
        transfers: Transfers,
    ) -> Step:
        """The Step of ``spans``. pending: per row, tokens that steps in flight sample. transfers: the cache's."""
        cache, (rows, computed, certain, drafts) = self._cache, spans
        tokens = _gather_tokens(cache.rows, rows, computed, certain)
        moves = cache.fields.states(spans, transfers)
        return Step(
            id=step_id,
            after=after,
            rows=rows.astype(np.int32),
            num_computed=computed.astype(np.int32),
            num_scheduled=_joined(self._counts).astype(np.int32),
            samples=computed + certain == cache.rows.num_tokens[rows] + pending[rows],
            token_ids=tokens if drafts is None else _with_drafts(tokens, drafts),
            drafts=Csr.empty(len(rows)) if drafts is None else drafts,
            cells=cache.fields.cells(rows, self._cells, transfers.moved),
            finished_rows=np.array(ended_rows, np.int32),
            new_rows=tuple(_new_row(request, encodes=encodes) for request, encodes in self._admitted),
            zero=moves.zero,
            copies=moves.copies,
            state_read=moves.state_read,
            state_writes=moves.state_writes,
        )


def _joined(parts: list[Int64]) -> Int64:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _new_row(request: Request, *, encodes: bool) -> NewRow:
    read = None
    if request.encoder is not None:
        read = EncoderRead(request.encoder.digest, request.encoder.num_tokens, encodes)
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        encoder=read,
        held_ids=request.held_ids,
    )


def _with_drafts(tokens: Csr, drafts: Csr) -> Csr:
    """Each row of ``drafts`` behind the same row of ``tokens``. O(tokens) in array operations."""
    indptr = tokens.indptr + drafts.indptr
    values = np.empty(len(tokens.values) + len(drafts.values), np.int32)
    is_draft = np.zeros(len(values), np.bool_)
    counts = np.diff(drafts.indptr)
    behind = np.arange(len(drafts.values)) - np.repeat(drafts.indptr[:-1], counts)
    is_draft[np.repeat(indptr[1:] - counts, counts) + behind] = True
    values[is_draft], values[~is_draft] = drafts.values, tokens.values
    return Csr(indptr, values)


def _gather_tokens(requests: RequestRows, rows: Int64, computed: Int64, counts: Int64) -> Csr:
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
        single = (~other).nonzero()[0]
        values[indptr[single]] = requests.last_tokens(rows[single])
    for i in other.nonzero()[0].tolist():
        start, count = int(computed[i]), int(counts[i])
        if ahead[i] <= 0:
            values[indptr[i] : indptr[i + 1]] = SAMPLED_BY_WORKER
            continue
        request = requests.requests[int(rows[i])]
        if request is not None:
            values[indptr[i] : indptr[i + 1]] = request.token_ids(start, start + count)
    return Csr(indptr, values)
