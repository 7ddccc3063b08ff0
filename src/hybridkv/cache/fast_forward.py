"""Fast-forward: many steps of rows that only decode, carried out as one (docs/design/0027).

    row    [ computed | last token | tokens[0] | tokens[1] | ... | tokens[n - 1] ]
                        step 0       step 1                        known, not computed by these steps

Only these rows change the cache meanwhile. So steps in which no row has an event change only counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.allocator import Slots
from hybridkv.cache.lookup import Hit
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import Publisher
from hybridkv.cache.residents import Residents
from hybridkv.cache.transfers import Checkpoints, TransferLog

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


_ENOUGH: Final = 1 << 32
"""More columns than any row has."""


class _Columns(NamedTuple):
    """Columns to which something happens. int64[n] each.

    Attributes:
        place: Index of the row.
        group: The group.
        column: The column.
        at: The step at which it happens.
    """

    place: Int64
    group: Int64
    column: Int64
    at: Int64

    def before(self, steps: int) -> _Columns:
        """Return those of the first ``steps`` steps; columns are in order of steps."""
        count = int(np.searchsorted(self.at, steps))
        return self if count == len(self.at) else _Columns(*(column[:count] for column in self))


def _between(first: Int64, last: Int64) -> tuple[Int64, Int64]:
    """Return the columns first[i] .. last[i] - 1 of each row: the index of the row, and the column."""
    counts = last - first
    place = np.repeat(np.arange(len(counts)), counts)
    return place, np.arange(len(place)) + np.repeat(first - (np.cumsum(counts) - counts), counts)


class FastForward:
    """Says how many steps rows take without a decision, and takes them."""

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
        """Return in how many steps, at most ``most``, ``rows`` compute one token each and need only blocks.

        Rows are distinct and resident, each with its last token to compute and no step in flight. O(rows) in array
        operations.
        """
        computed = self._rows.num_computed[rows]
        stop = np.minimum(self._publisher.next_resume_points(rows), self._checkpoints.next_positions(rows))
        for group in self._deciding:
            stop = np.minimum(stop, group.next_events(rows, publishes=self._publisher.publishes))
        steps = min(most, int((stop - computed).min()) - 1)
        while steps > 0 and not self._pool.gives(self._growth(rows, computed + steps)):  # nothing given back
            steps //= 2
        return max(steps, 0)

    def _growth(self, rows: Int64, end: Int64) -> list[int]:
        """Return the blocks, by group, that ``rows`` take up to ``end`` tokens."""
        growth = [0] * len(self._groups)
        for group in self._growing:
            missing = group.policy.columns(end) - group.rows.count[rows]
            growth[group.number] = int(missing[missing > 0].sum())
        return growth

    def refuses(self, rows: Int64, steps: int, takes: Sequence[Sequence[int]], hits: Sequence[Hit]) -> bool:
        """Return whether refused requests stay refused for the same reasons in ``steps`` uniform steps of ``rows``.

        The rows must give no block back. There must be room all the time for each of ``takes``, blocks by group of
        requests that are refused because of later needs. Each of ``hits`` must stay the longest. Returns False if this
        is not certain.
        """
        end = self._rows.num_computed[rows] + steps
        for group in self._growing:
            if (group.policy.droppable(end - 1) > group.rows.dropped[rows]).any():
                return False
        growth = self._growth(rows, end)
        none = [0] * len(self._pool.bases)
        for one in takes:
            in_all = self._pool.by_class([a + b for a, b in zip(growth, one, strict=True)])
            needed, free = self._pool.space.weigh(in_all, none)
            if needed > free:
                return False
        return all(self._keeps(hit, rows, end) for hit in hits) and not self._evicts(hits, sum(growth))

    def _keeps(self, hit: Hit, rows: Int64, end: Int64) -> bool:
        """Return whether ``rows`` publish no block up to ``end`` tokens that makes ``hit`` longer."""
        for group, missing, additions in zip(self._groups, hit.missing, hit.additions, strict=True):
            rule = group.policy.publishing
            if rule is None:
                continue
            columns = np.array(missing, np.int64)[:, None] // group.policy.block_size
            first, last = group.published[rows], rule.decided(end)
            if additions >= 0 or ((first <= columns) & (columns < last)).any():
                return False
        return True

    def _evicts(self, hits: Sequence[Hit], n: int) -> bool:
        """Return whether taking ``n`` blocks may evict a block of one of ``hits``."""
        seen = np.concatenate([ids for hit in hits for ids in hit.seen] or [np.empty(0, np.int32)])
        seen = seen[self._pool.ref_counts(seen) == 0]
        seen = seen[seen != 0]
        if not (n and seen.size):
            return False
        gone = self._pool.space.next_evicted(n)
        return gone is None or bool(np.isin(seen, gone).any())

    def advance(self, rows: Int64, tokens: Int32, begin: Callable[[int], None] | None = None) -> tuple[int, float]:
        """Take steps of ``rows`` in each of which they compute their last token, and ``tokens[:, k]`` follows it.

        Slots are allocated, blocks written and computed tokens advanced as if step by step, outside any open step.

        Args:
            rows: int64[R], rows of requests.
            tokens: int32[R, steps], at most as many steps as ``most_steps`` allowed.
            begin: Called with k before step k is carried out, if the result depends on the time: an eviction that ranks
                resume points reads the manager's clock.

        Returns:
            How many steps were taken (fewer if the last of them moves blocks), and the peak usage of the pool after any
                of them.
        """
        requests, wanted = self._rows, tokens.shape[1]
        computed = requests.num_computed[rows]
        if not (wanted and requests.append_many(rows, tokens)):
            return 0, 0.0
        steps, peak, singly = 0, 0.0, 1
        while steps < wanted and self._transfers.idle:
            taken, usage = self._at_once(rows, computed + steps, wanted - steps)
            steps, peak = steps + taken, max(peak, usage)
            singly = 1 if taken else 2 * singly
            for _ in range(singly if steps < wanted else 0):
                steps, usage = self._next(rows, computed, steps, wanted, begin)
                peak = max(peak, usage)
                if steps == wanted or not self._transfers.idle:
                    break
        if steps < wanted:
            for request, known in zip(requests.owners(rows), (computed + steps + 1).tolist(), strict=True):
                request.truncate(known)
        requests.num_computed[rows] = computed + steps
        self._slots.set_state_positions(rows, computed + steps)
        return steps, peak

    def _at_once(self, rows: Int64, computed: Int64, most: int) -> tuple[int, float]:
        """Carry out as many of ``most`` steps as possible as one.

        Returns their number, and the peak usage after any of them.

        All blocks are taken first, then all are given back, each in order of steps, rows and groups. This equals going
        step by step, because released blocks are queued after all that are taken. The result does not depend on the
        time: an eviction that compares resume points evicts none for blocks that can be taken in any order.
        """
        due = self._residents.due(rows, computed + most)
        if not due.size:
            return most, self._pool.get_usage()
        some, begun = rows[due], computed[due]
        all_dropped, all_taken = self._dropped(some, begun, most), self._taken(some, begun, most)
        if all_dropped is None:
            return 0, 0.0
        steps = self._order_free(all_taken, all_dropped, most)
        taken, dropped = all_taken.before(steps), all_dropped.before(steps)
        if not steps:
            return 0, 0.0
        if not len(dropped.at):
            self._take(some, taken)
            usage = self._pool.get_usage()
        else:
            ids = self._blocks(some, dropped)
            last = self._pool.last_releases(ids[ids != 0])
            if last is None or not self._transfers.keeps_all(ids[ids != 0][last]):
                return 0, 0.0
            freed = np.flatnonzero(ids)[last]
            usage = self._peak(taken, _Columns(*(column[freed] for column in dropped)), steps)
            self._take(some, taken)
            self._drop(some, dropped)
            self._pool.release_in_turn(ids[ids != 0], last)
        if self._publisher.publishes:
            self._publisher.publish_rows(self._rows, some, begun + steps, begun)
        self._pool.advance_epoch()
        self._residents.refresh_many(some)
        return steps, usage

    def _order_free(self, taken: _Columns, dropped: _Columns, most: int) -> int:
        """Return how many of ``most`` steps take blocks whose order is irrelevant; halves ``most`` until it is."""
        steps = most
        while steps:
            needs = np.bincount(taken.before(steps).group, minlength=len(self._groups)).tolist()
            drops = len(dropped.before(steps).at)
            if self._pool.space.takes_in_any_order(self._pool.by_class(needs), partial(bool, drops)):
                break
            steps //= 2
        return steps

    def _peak(self, taken: _Columns, freed: _Columns, steps: int) -> float:
        """Return the peak usage after any of ``steps`` that take and free these blocks."""
        groups = len(self._groups)
        more = np.bincount(taken.at * groups + taken.group, minlength=steps * groups)
        more -= np.bincount(freed.at * groups + freed.group, minlength=steps * groups)
        return float(self._pool.get_usages(more.reshape(steps, groups).cumsum(axis=0)).max())

    def _taken(self, rows: Int64, computed: Int64, steps: int) -> _Columns:
        """Return the columns for which ``rows`` need blocks in so many steps."""
        parts = []
        for group in self._growing:
            held = group.rows.count[rows]
            place, column = _between(held, np.maximum(group.policy.columns(computed + steps), held))
            parts.append((place, column, column * group.policy.block_size - computed[place]))
        return self._in_order(parts)

    def _dropped(self, rows: Int64, computed: Int64, steps: int) -> _Columns | None:
        """Return the columns that are dropped in so many steps; ``None`` if one of them does not exist yet."""
        parts = []
        for group in self._growing:
            first = np.maximum(group.rows.dropped[rows], group.rows.base[rows])
            last = np.maximum(group.policy.droppable(computed + steps - 1), first)
            if (last > group.rows.count[rows]).any():
                return None
            place, column = _between(first, last)
            seen_at = group.policy.next_need(np.full(len(column), _ENOUGH), column) - 1 - computed[place]
            parts.append((place, column, np.maximum(seen_at, 0)))
        return self._in_order(parts, falling=True)

    def _in_order(self, parts: Sequence[tuple[Int64, Int64, Int64]], *, falling: bool = False) -> _Columns:
        """Return columns of each growing group, (place, column, at), by step, row and group.

        ``falling``: last column first.
        """
        numbers = np.array([group.number for group in self._growing], np.int64)
        group_of = np.repeat(numbers, [len(place) for place, *_ in parts])
        place, column, at = (np.concatenate([part[i] for part in parts]) for i in range(3))
        order = np.lexsort((-column if falling else column, group_of, place, at))
        return _Columns(place[order], group_of[order], column[order], at[order])

    def _blocks(self, rows: Int64, columns: _Columns) -> Int32:
        """Return the blocks in ``columns`` of ``rows``, 0 for null ones."""
        ids = np.empty(len(columns.at), np.int32)
        for group in self._growing:
            mine = np.flatnonzero(columns.group == group.number)
            ids[mine] = group.rows.at(rows[columns.place[mine]], columns.column[mine])
        return ids

    def _take(self, rows: Int64, columns: _Columns) -> None:
        """Take a block for each of ``columns``, in this order."""
        if not len(columns.at):
            return
        ids = self._transfers.new_blocks_each(columns.group.astype(np.int32))
        for group in self._growing:
            mine = np.flatnonzero(columns.group == group.number)
            of = columns.place[mine]
            counts = np.bincount(of, minlength=len(rows))
            group.rows.extend_many(rows, counts, ids[mine][np.argsort(of, kind="stable")])

    def _drop(self, rows: Int64, columns: _Columns) -> None:
        """Make ``columns``, the first of each row, null."""
        for group in self._growing:
            gone = np.bincount(columns.place[columns.group == group.number], minlength=len(rows))
            group.rows.drop_rows(rows, np.maximum(group.rows.dropped[rows], group.rows.base[rows]) + gone)

    def _next(
        self, rows: Int64, computed: Int64, done: int, wanted: int, begin: Callable[[int], None] | None
    ) -> tuple[int, float]:
        """Carry out the next step with events after ``done`` steps, row after row.

        Returns the steps then done, and the usage.

        ``begin`` is called before it. Returns ``wanted`` if no step before has events.
        """
        due = self._residents.next_events(rows) - computed - 1  # the step at which each is due
        at = max(int(due.min()), done)
        if at >= wanted:
            return wanted, self._pool.get_usage()
        if begin is not None:
            begin(at)
        some = np.flatnonzero(due <= at)
        self._rows.num_computed[rows[some]] = computed[some] + at
        self._slots.set_state_positions(rows[some], computed[some] + at)
        self._slots.grow_rows(rows[some])
        return at + 1, self._pool.get_usage()
