"""Recurrent states kept for reuse in the natural layout: where the placement stops, and where requests end.

    schedule()   every row has its slots; then, with what room is left, a block for each stop that the step passes
    forward      writes the running state there as well, labelled with its token count
    update()     a stop among accepted drafts: the state is in a column of the row, and copied by the row's next step
    release      the running state of a request that ends becomes a checkpoint as it is

A stop is a wish: it is declined where no block can be had (docs/design/0009).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.kept import KeptEnds
from hybridkv.cache.keys import WRITTEN
from hybridkv.cache.placement import Placement
from hybridkv.cache.policies import NEVER
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import WriteLog
from hybridkv.cache.transfers import TransferLog
from hybridkv.columns import grown
from hybridkv.request import Request

Int64 = NDArray[np.int64]


class Checkpoints:
    """groups: those whose states are kept for reuse; without any nothing is stored.

    kept: hears of every end that is kept, and says whether there is room for one.

    idle: nobody minds where a placement stops. stored, declined: stops so far that found a block and that did not.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        log: WriteLog,
        transfers: TransferLog,
        placement: Placement,
        kept: KeptEnds,
    ) -> None:
        self.groups = tuple(groups)
        self._pool = pool
        self._log = log
        self._transfers = transfers
        self._placement = placement
        self._next = np.full(64, NEVER)
        self._kept = kept
        self.idle = not (self.groups or kept.judges)
        self._late: dict[int, list[tuple[int, int]]] = {}
        self._ahead = set[int]()  # rows that have a stop ahead, so that steps without any cost nothing
        self.stored = self.declined = 0

    # -- rows

    def begin(self, request: Request, hit_tokens: int, computed_tokens: int) -> None:
        """``request`` has a row and goes on behind ``computed_tokens``, of which ``hit_tokens`` were hit."""
        if self.idle:
            return
        row = request.row
        if row >= len(self._next):
            self._next = grown(self._next, row + 1, NEVER)
        self._late.pop(row, None)
        self._kept.begin(request, hit_tokens)
        self.go_on(request, computed_tokens)

    def go_on(self, request: Request, computed_tokens: int) -> None:
        """``request``, which has a row, goes on behind ``computed_tokens``."""
        if not self.idle:
            self._set_next(request, computed_tokens)

    def _set_next(self, request: Request, after_tokens: int) -> None:
        stop = self._next[request.row] = self._next_stop(request, after_tokens)
        if stop == NEVER:
            self._ahead.discard(request.row)
        else:
            self._ahead.add(request.row)

    @property
    def awaits_stops(self) -> bool:
        """Whether ``store`` may find anything to keep: some row has a stop ahead, or passed one with drafts."""
        return bool(self._ahead or self._late)

    # -- stops

    def stops(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Token counts in start + 1 .. end, known ones, at which a state of ``request`` should be kept."""
        return self._stops(request, start, end) if self.groups else ()

    def _stops(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """The same, where tokens alone are kept, too."""
        if not self._keeps_for(request):
            return ()
        return tuple(stop for stop in self._placement.stops(request, start, end) if stop <= request.num_tokens)

    def _next_stop(self, request: Request, after_tokens: int) -> int:
        """The next of them, NEVER without one."""
        return self._placement.next_stop(request, after_tokens) if self._keeps_for(request) else NEVER

    def _keeps_for(self, request: Request) -> bool:
        """Whether any end of ``request`` is kept."""
        return not self.idle and request.writes_prefix_cache

    def store(self, requests: Sequence[Request | None], rows: Int64, computed: Int64, end: Int64) -> None:
        """A block for every stop in computed .. end of each row, in order. O(rows) in array operations.

        And for those that accepted drafts passed before.
        """
        due = end >= self._next[rows]
        if self._late:
            due |= np.isin(rows, list(self._late))
        for place in np.flatnonzero(due).tolist():
            request = requests[rows.item(place)]
            if request is not None:
                self._store_row(request, computed.item(place), end.item(place))

    def store_of(self, request: Request, computed: int, end: int) -> None:
        """The same of one request, which has a row."""
        if end >= self._next.item(request.row) or request.row in self._late:
            self._store_row(request, computed, end)

    def _store_row(self, request: Request, computed: int, end: int) -> None:
        for stop, column in self._late.pop(request.row, ()):
            self._store_one(request, stop, column)
        for stop in self._stops(request, computed, end):
            self._store_one(request, stop)
        self._set_next(request, end)

    def next_stops(self, rows: Int64) -> Int64:
        """The token count at which each of ``rows`` has a state to store, int64[rows]."""
        ahead: Int64 = np.full(len(rows), NEVER) if self.idle else self._next[rows]
        return ahead

    def pass_drafts(self, requests: Sequence[Request | None], rows: Int64, certain: Int64, kept: Int64) -> None:
        """Of the drafts behind ``certain[i]`` tokens the first ``kept[i]`` of ``rows[i]`` were accepted.

        States at stops among them lie in the row, each in a column of its own; the one behind them all in the first.
        """
        if self.idle:
            return
        for place in np.flatnonzero(certain + kept >= self._next[rows]).tolist():
            request, start, count = requests[rows.item(place)], certain.item(place), kept.item(place)
            if request is None:
                continue
            late = [(stop, (stop - start) % count) for stop in self._stops(request, start, start + count)]
            if late:
                self._late[request.row] = late
            self._set_next(request, start + count)

    def _store_one(self, request: Request, tokens: int, column: int | None = None) -> None:
        lacking = [group for group in self.groups if group.view(request).labelled(tokens) is None]
        if not lacking:
            if self._kept.judges:
                self._kept.keep(request, tokens, (), ended=False)
            return
        needs = [0] * len(self._pool.classes)
        for group in lacking:
            needs[group.number] = 1
        none = [0] * len(needs)
        weight = self._pool.weigh(needs, none)
        fits = weight.needed <= weight.free and not self._pool.waits(needs, none)
        if not (fits and self._kept.admits(request, tokens, needs)):
            self.declined += 1
            return
        taken = [
            self._transfers.store(
                group, request.row, tokens, self._transfers.new_blocks(1, group.number).item(0), column
            )
            for group in lacking
        ]
        for stored in taken:  # taking one may have moved those before it
            self._publish(stored.group, request, tokens, stored.block, self._log.open_step)
        self.stored += 1
        self._kept.keep(request, tokens, [stored.block for stored in taken], ended=False)

    def _publish(self, group: CacheGroup, request: Request, tokens: int, block: int, step: int) -> None:
        """``block`` is the state after ``tokens`` tokens."""
        column, inside = divmod(tokens, group.policy.block_size)
        if inside:
            parent, tail = group.view(request).tail(tokens)
            self._pool.publish_tail(group.number, block, parent, tail, step)
        else:
            self._pool.publish(group.number, (block,), (request.hashes[column - 1],), step)
        if step != WRITTEN:
            self._log.record(np.array([block], np.int32), [], step)
        if self._log.wants_ends:
            self._log.record_end(group, request, tokens, step)

    # -- ends

    def keep_end(self, request: Request, tokens: int) -> None:
        """The running state of ``request``, written, is that after ``tokens`` tokens, and its row will be freed.

        States at stops among its last accepted drafts are kept, too.
        """
        if self.idle:
            return
        self._ahead.discard(request.row)
        for stop, column in self._late.pop(request.row, ()):
            self._keep_column(request, stop, column, ended=False)
        if self._placement.ends and tokens:
            self._keep_column(request, tokens, 0, ended=True)

    def _keep_column(self, request: Request, tokens: int, column: int, *, ended: bool) -> None:
        """The state after ``tokens`` tokens, which lies in ``column``, stays where it is."""
        lacking = [group for group in self.groups if group.view(request).labelled(tokens) is None]
        blocks = [group.rows.cells.item(group.rows.origin.item(request.row) + column) for group in lacking]
        for group, block in zip(lacking, blocks, strict=True):
            self._publish(group, request, tokens, block, WRITTEN)
        if lacking or self._kept.judges:
            self._kept.keep(request, tokens, blocks, ended=ended)
