"""Plans carried out: columns dropped, hits touched, blocks taken and moved, full ones published."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.policies import NEW, UNPUBLISHED, GroupPlan
from hybridkv.cache.rows.ends import PublishedEnds
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.residents import Residents
from hybridkv.cache.slots.checkpoints import Checkpoints
from hybridkv.cache.slots.plan import SlotPlan
from hybridkv.cache.slots.publisher import Publisher
from hybridkv.cache.slots.transfers import TransferLog
from hybridkv.errors import StalePlanError
from hybridkv.request import Request

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NONE = np.empty(0, np.int32)


class Committer:
    """The one that changes rows and holds of running requests.

    The last one told of a row is ``residents``, which then finds its next event.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        publisher: Publisher,
        residents: Residents,
        transfers: TransferLog,
        ends: PublishedEnds,
        checkpoints: Checkpoints,
    ) -> None:
        self._groups = tuple(groups)
        self._states = tuple(group for group in groups if group.policy.keeps_state)
        self._pool = pool
        self._publisher = publisher
        self._residents = residents
        self._requests = residents.columns
        self._transfers = transfers
        self._ends = ends
        self._checkpoints = checkpoints

    def commit(self, plan: SlotPlan) -> tuple[Int32, ...]:
        """Carry out ``plan``; the new columns of each group, null and moved ones included.

        StalePlanError, and nothing changed, if anything changed since it was made.
        """
        request = plan.request
        if plan.epoch != self._pool.epoch:
            raise StalePlanError(f"the pool changed since slots for {request.request_id!r} were planned: plan again")
        row = request.row if request.row >= 0 else self._residents.bind(request)
        new = self._carry_out(plan, row)
        if plan.begins:
            self._checkpoints.begin(request, plan.hit_tokens, plan.computed_tokens)
        self._pool.advance_epoch()
        self._residents.refresh(row)
        return new

    def _carry_out(self, plan: SlotPlan, row: int) -> tuple[Int32, ...]:
        """All groups drop before any touches, and touch before any takes.

        So what one frees the others may take, and what one hits nobody evicts.
        """
        work = tuple(zip(self._groups, plan.groups, strict=True))
        for group, part in work:
            self._drop(group, row, part.drop)
        for place, (group, part) in enumerate(work):
            if part.reuse.size:
                self._pool.touch(part.reuse[part.reuse != 0])
                group.rows.extend(row, part.reuse)
            if plan.sources and plan.sources[place]:
                self._pool.touch(np.array([plan.sources[place]], np.int32))
                self._transfers.owe_copy(group, plan.sources[place], row, group.policy.hit_columns(plan.hit_tokens))
        if plan.begins:
            self._ends.begin(plan.request, plan.computed_tokens)
        new = tuple(self._append(group, row, part) for group, part in work)
        for group, part in work:
            self._publisher.publish_row(group, plan.request, part.publish, part.decided)
            self._ends.publish(group, plan.request, plan.known_tokens)
            if part.pending:
                group.pending[row] = part.pending
            else:
                group.pending.pop(row, None)
            if not plan.request.writes_prefix_cache:
                group.published[row] = UNPUBLISHED
        self._ends.advance(plan.request, plan.known_tokens)
        self.label(row, plan.certain_tokens)
        return new

    def _append(self, group: CacheGroup, row: int, part: GroupPlan) -> Int32:
        """New columns of ``row``: taken, moved from other columns, or null."""
        if part.append is None and not part.take:
            return _NONE
        ids = self._pool.get_new_blocks(part.take, group.number) if part.take else _NONE
        if part.append is not None:
            if part.vacate:
                ids = np.concatenate((group.rows.vacate(row, part.vacate), ids))
            columns = part.append.copy()
            columns[columns == NEW] = ids
            ids = columns
        group.rows.extend(row, ids)
        return ids

    def _drop(self, group: CacheGroup, row: int, columns: int) -> None:
        """Columns before ``columns`` are given back, the last one first."""
        if columns > group.rows.dropped.item(row):
            self._pool.free_blocks(group.rows.drop(row, columns))

    def accept_drafts(self, rows: Int64, drafted: Int64, kept: Int64) -> None:
        """Of the last ``drafted[i]`` tokens that ``rows[i]`` computed only the first ``kept[i]`` are its own.

        The state of the last one kept goes on. Rows distinct, their tokens known, no step of theirs in flight.
        """
        certain = self._requests.num_computed[rows] - drafted
        self._requests.num_computed[rows] = certain + kept
        for group in self._states:
            group.accept(rows, group.policy.draft_columns(certain, drafted, kept))
        self._checkpoints.pass_drafts(self._requests.requests, rows, certain, kept)

    def drop_skipped(self, request: Request) -> None:
        """Give back what ``request`` reads no longer: windows and states before its processed tokens."""
        if request.row < 0:
            return
        row = self._residents.row_of(request)
        processed = self._requests.num_computed.item(row) - self._requests.in_flight.item(row)
        for group in self._groups:
            self._drop(group, row, min(group.policy.droppable(processed), group.rows.count.item(row)))
        self._residents.refresh(row)

    def label(self, row: int, end_tokens: int) -> None:
        """The states of ``row`` are those after ``end_tokens`` tokens, drafts left out, once its step has run."""
        for group in self._states:
            group.label[row] = min(end_tokens, self._requests.num_tokens.item(row))

    def label_rows(self, rows: Int64, end_tokens: Int64) -> None:
        """label() of many rows."""
        for group in self._states:
            group.label[rows] = np.minimum(end_tokens, self._requests.num_tokens[rows])
