"""The step being scheduled, and the Step that is made of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BatchSlots, KVCacheBlocks, KVCacheManager, Transfers
from hybridkv.request import Request
from hybridkv.request_rows import RequestRows
from hybridkv.schedule.cells import cells_of, cells_of_row, join_cells, named_cells
from hybridkv.schedule.states import state_moves, with_transfers
from hybridkv.schedule.tokens import gather_tokens
from hybridkv.step import Cells, Csr, NewRow, Step

Int64 = NDArray[np.int64]


class Draft:
    """Rows and their shares so far. budget: tokens left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._rows: list[Int64] = []
        self._counts: list[Int64] = []
        self._cells: list[Cells] = []
        self._admitted: list[Request] = []

    def add_running(self, rows: Int64, counts: Int64, slots: BatchSlots) -> None:
        """Rows that ran before get ``counts`` tokens and their new blocks."""
        self._rows.append(rows)
        self._counts.append(counts)
        if len(slots.block):
            self._cells.append(cells_of(rows, slots))
        self.budget -= int(counts.sum())

    def add_admitted(self, request: Request, count: int, blocks: KVCacheBlocks) -> None:
        """A row begins: all its blocks, ``count`` tokens."""
        self._rows.append(np.array([request.row]))
        self._counts.append(np.array([count]))
        self._cells += cells_of_row(request.row, blocks.ids)
        self._admitted.append(request)
        self.budget -= count

    @property
    def rows(self) -> Int64:
        """int64[R], in the order of the batch."""
        return _joined(self._rows)

    @property
    def counts(self) -> Int64:
        """int64[R], tokens of each row."""
        return _joined(self._counts)

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
        rows, counts = self.rows, self.counts
        computed = columns.num_computed[rows]
        moves = state_moves(cache.groups, cache.block_pool, rows, computed, counts)
        moves = with_transfers(moves, transfers, rows)
        return Step(
            id=step_id,
            after=after,
            rows=rows.astype(np.int32),
            num_computed=computed.astype(np.int32),
            num_scheduled=counts.astype(np.int32),
            samples=computed + counts == columns.num_tokens[rows] + pending[rows],
            token_ids=gather_tokens(columns, rows, computed, counts),
            drafts=Csr.empty(len(rows)),
            cells=named_cells(cache, join_cells(self._cells), transfers.moved),
            finished_rows=np.array(ended_rows, np.int32),
            new_rows=tuple(_new_row(request) for request in self._admitted),
            zero=moves.zero,
            copies=moves.copies,
            state_read=moves.state_read,
            state_writes=moves.state_writes,
        )


def _joined(parts: list[Int64]) -> Int64:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _new_row(request: Request) -> NewRow:
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
    )
