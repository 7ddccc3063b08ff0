"""The step being scheduled, and the Step that is made of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BatchSlots, KVCacheBlocks, KVCacheManager, RowSpans, Transfers, cells_of, cells_of_row
from hybridkv.request import Request
from hybridkv.request_rows import RequestRows
from hybridkv.schedule.tokens import gather_tokens, with_drafts
from hybridkv.step import Cells, Csr, EncoderRead, NewRow, Step

Int64 = NDArray[np.int64]


class StepBuilder:
    """Rows and their shares so far. budget: tokens left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._rows: list[Int64] = []
        self._counts: list[Int64] = []
        self._drafts: list[Csr | None] = []
        self._cells: list[Cells] = []
        self._admitted: list[tuple[Request, bool]] = []

    def add_running(self, rows: Int64, counts: Int64, slots: BatchSlots, drafts: Csr | None) -> None:
        """Rows that ran before get ``counts`` tokens, ``drafts`` among them, and their new blocks."""
        self._rows.append(rows)
        self._counts.append(counts)
        self._drafts.append(drafts)
        if len(slots.block):
            self._cells.append(cells_of(rows, slots))
        self.budget -= int(counts.sum())

    def add_admitted(self, request: Request, count: int, blocks: KVCacheBlocks, *, encodes: bool) -> None:
        """A row begins: all its blocks, ``count`` tokens. encodes: its encoder must run."""
        self._rows.append(np.array([request.row]))
        self._counts.append(np.array([count]))
        self._drafts.append(None)
        self._cells += cells_of_row(request.row, blocks.ids)
        self._admitted.append((request, encodes))
        self.budget -= count

    @property
    def rows(self) -> Int64:
        """int64[R], in the order of the batch."""
        return _joined(self._rows)

    @property
    def counts(self) -> Int64:
        """int64[R], tokens of each row, drafts included."""
        return _joined(self._counts)

    @property
    def drafts(self) -> Csr | None:
        """Those of each row; None when nobody has any."""
        if all(part is None for part in self._drafts):
            return None
        parts = [
            Csr.empty(len(rows)) if part is None else part for rows, part in zip(self._rows, self._drafts, strict=True)
        ]
        counts = np.concatenate([np.diff(part.indptr) for part in parts])
        indptr = np.concatenate(([0], np.cumsum(counts)))
        return Csr(indptr, np.concatenate([part.values for part in parts]))

    def freeze(
        self,
        step_id: int,
        after: int,
        *,
        columns: RequestRows,
        pending: Int64,
        ended_rows: list[int],
        cache: KVCacheManager,
        transfers: Transfers,
    ) -> Step:
        """The Step. pending: per row, tokens that steps in flight sample. transfers: the cache's moves and copies."""
        rows, counts, drafts = self.rows, self.counts, self.drafts
        computed = columns.num_computed[rows]
        certain = counts if drafts is None else counts - np.diff(drafts.indptr)
        tokens = gather_tokens(columns, rows, computed, certain)
        moves = cache.step_states(RowSpans(rows, computed, certain, drafts), transfers)
        return Step(
            id=step_id,
            after=after,
            rows=rows.astype(np.int32),
            num_computed=computed.astype(np.int32),
            num_scheduled=counts.astype(np.int32),
            samples=computed + certain == columns.num_tokens[rows] + pending[rows],
            token_ids=tokens if drafts is None else with_drafts(tokens, drafts),
            drafts=Csr.empty(len(rows)) if drafts is None else drafts,
            cells=cache.step_cells(rows, self._cells, transfers.moved),
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
    )
