"""The end of a request's blocks: what is computed by then is published, and they are given back.

transfer complete --publish_computed--> full blocks can be hit
drafts accepted   --publish_accepted--> full blocks and published ends can be hit
ended, preempted  --keep_end----------> so can its last, unfinished one and its state (natural layout)
--free--------------> nobody's; what is published stays findable
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.ends import PublishedEnds
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.residents import Residents
from hybridkv.cache.slots.checkpoints import Checkpoints
from hybridkv.cache.slots.planner import SlotPlanner
from hybridkv.cache.slots.publisher import Publisher
from hybridkv.cache.slots.transfers import TransferLog
from hybridkv.errors import CacheError
from hybridkv.request import Request

Int64 = NDArray[np.int64]


class Releaser:
    """Publishes late and frees. planner: says who publishes what. keeps_ends: whether ends are published at all."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        residents: Residents,
        planner: SlotPlanner,
        publisher: Publisher,
        ends: PublishedEnds,
        checkpoints: Checkpoints,
        transfers: TransferLog,
        keeps_ends: bool,
    ) -> None:
        self._groups = tuple(groups)
        self._publishing = tuple(group for group in groups if group.policy.publishes)
        self._pool = pool
        self._residents = residents
        self._planner = planner
        self._publisher = publisher
        self._ends = ends
        self._checkpoints = checkpoints
        self._transfers = transfers
        self._keeps_ends = keeps_ends

    def publish_computed(self, request: Request, num_computed_tokens: int, *, written: bool = False) -> None:
        """The full blocks of the first ``num_computed_tokens`` tokens can be hit from now on.

        written: whatever step is open, the blocks are there. CacheError, and nothing published, for a request that
        holds no blocks for them.
        """
        row = self._residents.row_of(request)
        known = min(num_computed_tokens, request.num_tokens)
        if not self._planner.caching:
            return
        if any(group.policy.columns(known) > group.rows.count.item(row) for group in self._publishing):
            raise CacheError(f"{request.request_id!r} holds no blocks for {known} tokens: allocate slots first")
        edges = self._planner.edges(request)
        if edges is None:
            return
        for group in self._groups:
            columns, decided = group.policy.stored_columns(group.facts(row), known, edges)
            self._publisher.publish_row(group, request, columns, decided, written=written)
        self._pool.advance_epoch()
        self._residents.refresh(row)

    def publish_accepted(self, rows: Int64) -> None:
        """Accepted drafts of ``rows`` are computed, and written: what they fill can be hit from now on.

        Not only from the next step on, when windows may have given it back. A Python call a row that fills something.
        """
        if not self._planner.caching:
            return
        columns = self._residents.columns
        rows = rows[self._residents.due(rows, columns.num_computed[rows])]
        for request in columns.owners(rows):
            known = request.num_computed_tokens
            self.publish_computed(request, known)
            for group in self._groups:
                self._ends.publish(group, request, known)
            self._ends.advance(request, known)
            self._residents.refresh(request.row)

    def keep_end(self, request: Request) -> None:
        """``request`` ends or is preempted, and no step in flight holds it: its computed tokens can be hit to the last.

        In the natural layout; nothing in the reference layout. CacheError for a request that holds no blocks.
        """
        self._residents.row_of(request)
        if not self._keeps_ends or self._planner.edges(request) is None:
            return
        computed = request.num_computed_tokens
        known = min(computed, request.num_tokens)
        self.publish_computed(request, known, written=True)
        self._ends.publish_last(request, known)
        if computed <= request.num_tokens:
            self._checkpoints.keep_end(request, computed)
        self._pool.advance_epoch()

    def free(self, request_id: str) -> None:
        """Give back what a request holds, last block first. A request that holds nothing is a no-op."""
        resident = self._residents.get(request_id)
        if resident is None:
            return
        self._transfers.forget(resident.row)
        for group in self._groups:
            self._pool.free_blocks(group.rows.held(resident.row)[::-1])
        self._residents.release(resident)

    def free_many(self, request_ids: Sequence[str]) -> None:
        """Free each of ``request_ids``, in this order, in one go where they share no block."""
        found = dict.fromkeys(map(self._residents.get, request_ids))
        residents = [resident for resident in found if resident is not None]
        for resident in residents:
            self._transfers.forget(resident.row)
        self._pool.free_many([group.rows.held(resident.row)[::-1] for resident in residents for group in self._groups])
        for resident in residents:
            self._residents.release(resident)
