"""Steps of rows that only decode, carried out as one (docs/design/0027).

    row    [ computed | last token | tokens[0] | tokens[1] | ... | tokens[n - 1] ]
                        step 0       step 1                        known, computed by no step of these

Nobody but these rows does anything meanwhile, so steps in which none of them has an event change nothing but counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.publishing import Publisher
from hybridkv.cache.rows.residents import Residents
from hybridkv.cache.slots.checkpoints import Checkpoints
from hybridkv.cache.slots.slots import Slots
from hybridkv.cache.slots.transfers import TransferLog

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Advance(NamedTuple):
    """What an advance did. steps: those carried out; fewer than asked for where the last of them moves blocks.

    peak_usage: of the pool, the largest after any of them.
    """

    steps: int
    peak_usage: float


class Strides:
    """How far rows go on without a decision, and going there."""

    def __init__(
        self,
        pool: BlockPool,
        residents: Residents,
        *,
        slots: Slots,
        publisher: Publisher,
        transfers: TransferLog,
        checkpoints: Checkpoints,
    ) -> None:
        groups = residents.groups
        self._growing = tuple(group for group in groups if group.policy.only_grows)
        self._deciding = tuple(g for g in groups if not g.policy.only_grows and g.policy.publishing is not None)
        self._groups = groups
        self._pool = pool
        self._residents = residents
        self._rows = residents.request_rows
        self._slots = slots
        self._publisher = publisher
        self._transfers = transfers
        self._checkpoints = checkpoints

    def most_steps(self, rows: Int64, most: int) -> int:
        """See KVCacheManager.uniform_steps."""
        computed = self._rows.num_computed[rows]
        stop = np.minimum(self._publisher.next_ends(rows), self._checkpoints.next_stops(rows))
        if self._checkpoints.judges:  # what is given up depends on when
            stop = np.minimum(stop, self._residents.next_events(rows))
        for group in self._deciding:
            stop = np.minimum(stop, group.next_events(rows, publishes=self._publisher.publishes))
        steps = min(most, int((stop - computed).min()) - 1)
        while steps > 0 and not self._fits(rows, computed + steps):
            steps //= 2
        return max(steps, 0)

    def _fits(self, rows: Int64, end: Int64) -> bool:
        """Whether there are all blocks that ``rows`` need for ``end`` tokens, nothing given back."""
        needs = [0] * len(self._groups)
        for group in self._growing:
            missing = group.policy.columns(end) - group.rows.count[rows]
            needs[group.number] = int(missing[missing > 0].sum())
        return self._pool.gives(needs)

    def advance(self, rows: Int64, tokens: Int32) -> Advance:
        """See KVCacheManager.advance."""
        requests, wanted = self._rows, tokens.shape[1]
        computed = requests.num_computed[rows]
        if not (wanted and requests.append_many(rows, tokens)):
            return Advance(0, 0.0)
        if self._at_once(rows, computed, wanted):
            steps, peak = wanted, self._pool.get_usage()
        else:
            steps, peak = self._each(rows, computed, wanted)
        if steps < wanted:
            known = computed + steps + 1
            for request, count in zip(requests.owners(rows), known.tolist(), strict=True):
                request.truncate(count)
        requests.num_computed[rows] = computed + steps
        self._slots.label_rows(rows, computed + steps)
        return Advance(steps, peak)

    def _at_once(self, rows: Int64, computed: Int64, wanted: int) -> bool:
        """All events of ``wanted`` steps; False, and nothing done, where that is not the same as one by one.

        It is where rows only take blocks and publish, and the order of blocks is that of the steps. What is in use is
        most at the end then.
        """
        due = self._residents.due(rows, computed + wanted)
        if not due.size:
            return True
        rows, computed = rows[due], computed[due]
        end = computed + wanted
        missing = np.zeros((len(rows), len(self._groups)), np.int64)
        for group in self._growing:
            if (group.policy.droppable(end - 1) > group.rows.dropped[rows]).any():
                return False
            missing[:, group.number] = np.maximum(group.policy.columns(end) - group.rows.count[rows], 0)
        needs = missing.sum(axis=0).tolist()
        if not self._pool.takes_in_any_order(needs, lambda: False):
            return False
        if any(needs):
            self._take(rows, computed, missing)
        if self._publisher.publishes:
            self._publisher.publish_rows(self._rows, rows, end, computed)
        self._pool.advance_epoch()
        self._residents.refresh_many(rows)
        return True

    def _take(self, rows: Int64, computed: Int64, missing: Int64) -> None:
        """``missing`` blocks, int64[rows, groups], behind what ``rows`` have: by step, then by row, then by group."""
        group_of, place = (np.repeat(part.ravel(), missing.T.ravel()) for part in np.indices(missing.T.shape))
        column = np.empty(len(place), np.int64)
        sizes = np.array([group.policy.block_size for group in self._groups])
        ends = np.cumsum(missing.sum(axis=0))
        for group in self._growing:
            counts = missing[:, group.number]
            mine = slice(ends[group.number] - counts.sum(), ends[group.number])
            behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            column[mine] = group.rows.count[rows][place[mine]] + behind
        order = np.lexsort((group_of, place, column * sizes[group_of] - computed[place]))
        ids = np.empty(len(order), np.int32)
        ids[order] = self._transfers.new_blocks_each(group_of[order].astype(np.int32))
        for group in self._growing:
            counts = missing[:, group.number]
            mine = slice(ends[group.number] - counts.sum(), ends[group.number])
            group.rows.extend_many(rows, counts, ids[mine])

    def _each(self, rows: Int64, computed: Int64, wanted: int) -> tuple[int, float]:
        """Row after row at each of its events, steps in order; up to the first step that moves blocks."""
        pool, peak, at = self._pool, self._pool.get_usage(), -1
        while True:
            due = self._residents.next_events(rows) - computed - 1  # the step at which each is due
            at = max(int(due.min()), at + 1)
            if at >= wanted:
                return wanted, peak
            some = np.flatnonzero(due <= at)
            self._rows.num_computed[rows[some]] = computed[some] + at
            self._slots.label_rows(rows[some], computed[some] + at)
            self._slots.grow_rows(rows[some], computed[some] + at + 1)
            peak = max(peak, pool.get_usage())
            if not self._transfers.idle:
                return at + 1, peak
