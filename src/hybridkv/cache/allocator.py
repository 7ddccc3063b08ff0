"""Slots of requests: carries out plans, allocates for whole steps at once, and gives blocks back.

    plan_slots -> SlotPlan --commit--> the row holds blocks --free--> the blocks are free; published ones stay findable
    allocate      slots for all rows of a step: array operations where possible, else plan and commit row by row

``allocate`` asks one vector question: which rows reach their next event with this step? About one in ``block_size`` of
the decoding rows does. These rows are served in (request, group) order, so block ids equal those of one call after
another; a property test compares the two. Rows that only drop columns, take blocks and publish full blocks are served
with array operations, as long as the result is the same as that of single calls. All other rows are served one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.lookup import no_hit
from hybridkv.cache.plan import BatchSlots, Reason, Refusal, SlotDemand, SlotPlan, SlotPlanner
from hybridkv.cache.policies import NEW, GroupPlan
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import Publisher
from hybridkv.cache.residents import Residents
from hybridkv.cache.transfers import Checkpoints, TransferLog
from hybridkv.errors import CacheError, StalePlanError
from hybridkv.request import Request

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

FEW = 6
"""Up to this many due rows that only grow are served one by one, because arrays would cost more.

Counted in bytecodes and C calls by benchmarks/guard.py.
"""

_NONE = np.empty(0, np.int32)


class Slots:
    """Changes the rows of resident requests and the blocks that they hold.

    ``planner`` decides each change and knows which rows are being loaded. After every change ``residents`` computes the
    next event of the row, so it is called last.
    """

    def __init__(
        self,
        pool: BlockPool,
        residents: Residents,
        *,
        planner: SlotPlanner,
        publisher: Publisher,
        transfers: TransferLog,
        checkpoints: Checkpoints,
    ) -> None:
        self._groups = residents.groups
        self._states = tuple(group for group in residents.groups if group.states is not None)
        self._publishing = tuple(group for group in residents.groups if group.kind.publishes)
        self._pool = pool
        self._residents = residents
        self._request_rows = residents.request_rows
        self._planner = planner
        self._publisher = publisher
        self._transfers = transfers
        self._checkpoints = checkpoints
        self._loads = planner.loads
        self._loading = self._loads.of_row
        self._no_hit = no_hit(len(residents.groups))
        self._only_grow = all(one.policy.is_plain(0, 0, (0, 0, 0)) for one in residents.groups)

    # -- one request

    def allocate_one(self, request: Request, wanted: SlotDemand) -> tuple[Int32, ...] | Refusal:
        """Plan and commit.

        If the blocks do not fit, columns that the request no longer reads are given back all the same.

        Returns:
            The new columns of each group, or the reason for which they are refused.
        """
        plan = self._planner.plan(request, wanted)
        if isinstance(plan, Refusal):
            self.drop_skipped(request)
            return plan
        return self.commit(plan)

    def grow(self, request: Request, end_tokens: int, total_tokens: int) -> tuple[Int32, ...] | None:
        """Allocate for a running request that needs only new blocks at the end of its rows.

        Args:
            request: A resident request.
            end_tokens: Its tokens after the step.
            total_tokens: ``end_tokens`` with room for drafts.

        Returns:
            The new columns of each group, () if there are no new ones. ``None`` if the request needs a plan or must be
                refused; then at most columns that it no longer reads were dropped.
        """
        row, requests = request.row, self._request_rows
        if (
            not self._only_grow
            or total_tokens > self._planner.max_model_len
            or end_tokens >= self._publisher.next_resume_point(row)
            or row in self._loading
        ):
            return None
        known: int = min(end_tokens, requests.each_num_tokens[row])
        missing = self._missing(row, (requests.each_num_computed[row], end_tokens, known), total_tokens)
        if missing is None:
            return None
        new: tuple[Int32, ...] = ()
        if any(missing):
            if not self._pool.gives(missing):
                return None
            new = self._extend(row, missing)
        self._publisher.publish_grown(request, known)
        for group in self._states:
            group.each_state_position[row] = known
        self._pool.advance_epoch()
        self._residents.refresh(row)
        return new

    def _missing(self, row: int, tokens: tuple[int, int, int], total_tokens: int) -> list[int] | None:
        """Drop the columns that ``row`` no longer reads, and return the blocks that it needs at its end, by group.

        Returns ``None`` if a state has a pending column or needs more than new blocks; groups before it have dropped
        their columns then. ``tokens`` is (computed, end, known).
        """
        computed, end_tokens, _ = tokens
        processed = computed - self._request_rows.each_in_flight[row]
        missing = []
        for group in self._groups:
            policy, rows = group.policy, group.rows
            held = rows.each_count[row]
            if group.states is None:
                more = policy.columns(total_tokens) - held
            else:
                more = policy.columns(end_tokens) - held
                if row in group.pending or not policy.is_plain(more, group.each_published[row], tokens):
                    return None
            drop = policy.droppable(processed)
            if drop > rows.each_dropped[row]:
                self._drop(group, row, min(drop, held))
            missing.append(more if more > 0 else 0)  # noqa: FURB136 - a call of max takes longer
        return missing

    def _extend(self, row: int, missing: Sequence[int]) -> tuple[Int32, ...]:
        """Take ``missing`` blocks, by group, and append them to ``row``."""
        new = []
        for group, n in zip(self._groups, missing, strict=True):
            if n == 1:
                block = self._transfers.new_block(group.number)
                group.rows.push(row, block)
                ids = np.array([block], np.int32)
            elif n:
                ids = self._transfers.new_blocks(n, group.number)
                group.rows.extend(row, ids)
            else:
                ids = _NONE
            new.append(ids)
        return tuple(new)

    def commit(self, plan: SlotPlan) -> tuple[Int32, ...]:
        """Carry out ``plan``.

        Returns:
            The new columns of each group, null and moved ones included.

        Raises:
            StalePlanError: The pool changed since the plan was made. Nothing was done.
        """
        request = plan.request
        if plan.epoch != self._pool.epoch:
            raise StalePlanError(f"the pool changed since slots for {request.request_id!r} were planned: plan again")
        row = request.row if request.row >= 0 else self._residents.bind(request)
        new = self._carry_out(plan, row)
        if plan.begins:
            self._checkpoints.begin(request, plan.hit_tokens, plan.computed_tokens)
        self._pool.advance_epoch()
        if plan.loads:
            request.num_computed_tokens = plan.computed_tokens
            self._loads.begin(row, plan.computed_tokens, plan.hit_tokens)
            self._residents.stall(row)
        else:
            self._residents.refresh(row)
        return new

    def finish_load(self, request: Request, tokens: int | None) -> int:
        """Note that the first ``tokens`` tokens were loaded for ``request``; see KVCacheManager.finish_load."""
        row, arrived = self._residents.row_of(request), self._loads.arrived(request, tokens)
        self._loads.end(row)
        request.num_computed_tokens = arrived
        if not arrived:
            self.free(request.request_id)
            return 0
        self._publisher.begin(request, arrived)
        self._publisher.publish_encoded(request)
        self._checkpoints.go_on(request, arrived)
        self._publisher.publish_computed(request, arrived, written=True)
        self._pool.advance_epoch()
        self._residents.refresh(row)
        return arrived

    def _carry_out(self, plan: SlotPlan, row: int) -> tuple[Int32, ...]:
        """Drop, touch, then take blocks: each stage for all groups.

        Thus one group can take the blocks that another one drops, and no group evicts the hit of another.
        """
        work = tuple(zip(self._groups, plan.groups, strict=True))
        for group, part in () if plan.begins else work:
            self._drop(group, row, part.drop)
        for place, (group, part) in enumerate(work):
            if part.reuse.size:
                self._pool.hold(part.reuse[part.reuse != 0])
                group.rows.extend(row, part.reuse)
            if plan.sources and plan.sources[place]:
                self._pool.hold(np.array([plan.sources[place]], np.int32))
                self._transfers.owe_copy(group, plan.sources[place], row, group.policy.hits.columns(plan.hit_tokens))
        if plan.begins:
            self._publisher.begin(plan.request, plan.computed_tokens)
        new = tuple([self._append(group, row, part) for group, part in work])
        self._publisher.publish_plans(plan.request, plan.groups, plan.known_tokens)
        for group, part in work:
            if part.pending:
                group.pending[row] = part.pending
            else:
                group.pending.pop(row, None)
        self.set_state_position(row, plan.certain_tokens)
        return new

    def _append(self, group: CacheGroup, row: int, part: GroupPlan) -> Int32:
        """Append the new columns of ``row``: taken blocks, blocks moved from other columns, and null columns."""
        if part.append is None and not part.take:
            return _NONE
        ids = self._transfers.new_blocks(part.take, group.number) if part.take else _NONE
        if part.append is not None:
            if part.vacate:
                ids = np.concatenate((group.rows.vacate(row, part.vacate), ids))
            columns = part.append.copy()
            columns[columns == NEW] = ids
            ids = columns
        group.rows.extend(row, ids)
        return ids

    def _drop(self, group: CacheGroup, row: int, columns: int) -> None:
        """Give back the columns before ``columns``, the last one first."""
        dropped = group.rows.each_dropped[row]
        if columns == dropped + 1:
            block = group.rows.drop_one(row)
            if block:
                self._pool.release_one(block)
        elif columns > dropped:
            self._pool.release(group.rows.drop(row, columns))

    def accept_drafts(self, rows: Int64, drafted: Int64, kept: Int64) -> None:
        """Keep the first ``kept[i]`` of the last ``drafted[i]`` tokens that ``rows[i]`` computed.

        The state of the last accepted token becomes the state of the row. Rows are distinct, their tokens are known,
        and no step of theirs is in flight.
        """
        certain = self._request_rows.num_computed[rows] - drafted
        self._request_rows.num_computed[rows] = certain + kept
        for group in self._groups:
            if group.states is not None:
                group.accept(rows, group.states.draft_columns(certain, drafted, kept))
        self._checkpoints.pass_drafts(self._request_rows.requests, rows, certain, kept)
        self._publish_accepted(rows[kept > 0])

    def _publish_accepted(self, rows: Int64) -> None:
        """Publish for each row that filled something: one Python call a row."""
        if not self._publisher.publishes:
            return
        rows = rows[self._residents.due(rows, self._request_rows.num_computed[rows])]
        for request in self._request_rows.owners(rows):
            self._refuse_short(request, request.num_computed_tokens)
            self._publisher.publish_accepted(request)
            self._residents.refresh(request.row)

    def drop_skipped(self, request: Request) -> None:
        """Give back the windows and states that ``request`` no longer reads: those before its processed tokens."""
        if request.row < 0 or request.row in self._loading:
            return
        row = self._residents.row_of(request)
        processed = self._request_rows.num_computed.item(row) - self._request_rows.in_flight.item(row)
        for group in self._groups:
            self._drop(group, row, min(group.policy.droppable(processed), group.rows.count.item(row)))
        self._residents.refresh(row)

    def set_state_position(self, row: int, end_tokens: int) -> None:
        """Note that the states of ``row`` follow ``end_tokens`` tokens, without drafts, after its step."""
        for group in self._states:
            group.state_position[row] = min(end_tokens, self._request_rows.num_tokens.item(row))

    def set_state_positions(self, rows: Int64, end_tokens: Int64) -> None:
        """Note the state positions of many rows. O(rows) for each group that keeps states."""
        for group in self._states:
            group.state_position[rows] = np.minimum(end_tokens, self._request_rows.num_tokens[rows])

    # -- all rows of a step

    def allocate(self, rows: Int64, num_new_tokens: Int64 | int, num_lookahead_tokens: int) -> BatchSlots:
        """Allocate slots for distinct ``rows``; see KVCacheManager.allocate_batch."""
        requests, most = self._request_rows, self._planner.max_model_len
        for row in self._loading:
            if (rows == row).any():
                self._loads.refuse(requests.owner(row))
        end = np.minimum(requests.num_computed[rows] + num_new_tokens, most)
        total = np.minimum(end + num_lookahead_tokens, most)
        due = self._residents.due(rows, total)
        slots = nothing_new(len(rows))
        if due.size and due.size <= FEW and self._only_grow:
            slots = self._allocate_few(due, rows[due], end[due], lookahead=num_lookahead_tokens, accepted=len(rows))
            self._pool.advance_epoch()
        elif due.size:
            some = rows[due]
            computed = requests.num_computed[some]
            processed = computed - requests.in_flight[some]
            known = np.minimum(end[due], requests.num_tokens[some])
            asked = Batch(due, some, processed, computed, end[due], total[due], known)
            slots = self._allocate_due(asked, len(rows), num_lookahead_tokens)
            self._pool.advance_epoch()
        self.set_state_positions(rows[: slots.accepted], end[: slots.accepted])
        return slots

    def _allocate_few(self, place: Int64, rows: Int64, end: Int64, *, lookahead: int, accepted: int) -> BatchSlots:
        """Allocate for a few due rows one by one, which is faster than asking for the needs of all."""
        refusal, cells = self._each(place, rows, end, lookahead)
        return cells._replace(accepted=accepted) if refusal is None else cells._replace(reason=refusal.reason)

    def _allocate_due(self, due: Batch, accepted: int, lookahead: int) -> BatchSlots:
        """Allocate slots for the rows of ``due``.

        Runs of plain rows are served together. Other rows, and runs that do not fit or whose result would depend on the
        order, are served one by one. ``accepted`` is the number of rows in the whole batch.
        """
        needs = needs_of(self._groups, due)
        needs = needs._replace(plain=needs.plain & ~self._residents.resume_points_due(due.rows, due.end))
        parts: list[BatchSlots] = []
        for first, last in _runs(needs.plain):
            together = needs.plain[first] and (last - first > FEW or not self._only_grow or self._transfers.ranks)
            served = self._serve(due.part(first, last), needs.part(first, last)) if together else None
            if served is None:
                part = due.part(first, last)
                refusal, cells = self._each(part.place, part.rows, part.end, lookahead)
                parts.append(cells)
                if refusal is not None:
                    return concat(cells.accepted, parts, refusal.reason)
            else:
                parts.append(served)
        return concat(accepted, parts)

    def _serve(self, due: Batch, needs: Needs) -> BatchSlots | None:
        """Serve all rows at once.

        Returns ``None`` if serving them one by one might give another result. No row has changed then, but resume
        points may have been evicted to make room.
        """
        missing = needs.missing.sum(axis=0).tolist()
        self._transfers.make_way(missing)
        if not self._pool.space.takes_alike(self._pool.by_class(missing), lambda: self._drops(due.rows, needs)):
            return None
        if not drop(self._groups, self._transfers, due, needs.drop):
            return None
        slots = take(self._groups, self._transfers, due.rows, needs.missing, due.place)
        self._publisher.publish_rows(self._request_rows, due.rows, due.known)
        self._residents.refresh_many(due.rows)
        return slots

    def _drops(self, rows: Int64, needs: Needs) -> bool:
        """Return whether any row gives a column back."""
        return any(
            bool((needs.drop[:, place] > group.rows.dropped[rows]).any()) for place, group in enumerate(self._groups)
        )

    def _each(self, places: Int64, rows: Int64, end_tokens: Int64, lookahead: int) -> tuple[Refusal | None, BatchSlots]:
        """Serve row after row: the refusal that ended it, or ``None``, and the new cells of the rows before."""
        cells: list[tuple[int, int, int, Int32]] = []
        for place, row, end in zip(places.tolist(), rows.tolist(), end_tokens.tolist(), strict=True):
            held = [group.rows.count.item(row) for group in self._groups]
            blocks = self._allocate_one(row, end, lookahead)
            if isinstance(blocks, Refusal):
                return blocks, one_by_one(place, cells)
            cells += [(place, g, held[g], ids) for g, ids in enumerate(blocks) if len(ids)]
        return None, one_by_one(0, cells)

    def _allocate_one(self, row: int, end_tokens: int, lookahead: int) -> tuple[Int32, ...] | Refusal:
        """Allocate for the request in ``row``."""
        request = self._request_rows.owner(row)
        grown = self.grow(request, end_tokens, end_tokens + lookahead)
        if grown is not None:
            return grown
        new = max(end_tokens - self._request_rows.num_computed.item(row), 1)  # 0 at max_model_len
        return self.allocate_one(request, SlotDemand(new, self._no_hit, lookahead_tokens=lookahead))

    def grow_rows(self, rows: Int64) -> None:
        """Allocate one more token for ``rows``, whose blocks are known to fit. Raises CacheError if they do not."""
        if self._transfers.ranks:  # eviction by value chooses for all rows at once; row by row it would differ
            if (served := self.allocate(rows, 1, 0)).accepted < len(rows):
                raise CacheError(f"the blocks of one more token do not fit for rows {rows}: {served.reason}")
            return
        for row, end in zip(rows.tolist(), (self._request_rows.num_computed[rows] + 1).tolist(), strict=True):
            refusal = self._allocate_one(row, end, 0)
            if isinstance(refusal, Refusal):
                raise CacheError(f"the blocks of {end} tokens do not fit for row {row}: {refusal}")

    # -- published late, and given back

    def publish_computed(self, request: Request, num_computed_tokens: int, *, written: bool = False) -> None:
        """Publish the full blocks of the first ``num_computed_tokens`` tokens.

        Args:
            request: A resident request.
            num_computed_tokens: Tokens whose KV is computed.
            written: The blocks are written, whichever step is open.

        Raises:
            CacheError: The request holds no blocks for them. Nothing was published.
        """
        row = self._residents.row_of(request)
        self._loads.refuse(request)
        if self._publisher.publishes and num_computed_tokens >= self._residents.next_event(row):
            self._refuse_short(request, num_computed_tokens)
            self._publisher.publish_computed(request, num_computed_tokens, written=written)
            self._residents.refresh(row)

    def _refuse_short(self, request: Request, num_computed_tokens: int) -> None:
        """Raise CacheError if ``request`` holds no blocks for so many tokens."""
        known = min(num_computed_tokens, request.num_tokens)
        if any(group.policy.columns(known) > group.rows.count.item(request.row) for group in self._publishing):
            raise CacheError(f"{request.request_id!r} holds no blocks for {known} tokens: allocate slots first")

    def keep_resume_point(self, request: Request, *, ended: bool = True) -> None:
        """Publish everything that ``request`` computed, to its last token; see KVCacheManager.keep_resume_point.

        Does nothing for a request that is being loaded.

        Raises:
            CacheError: The request holds no blocks.
        """
        row = self._residents.row_of(request)
        if not (self._publisher.publishes and request.writes_prefix_cache) or row in self._loading:
            return
        computed = request.num_computed_tokens
        self.publish_computed(request, computed, written=True)
        self._publisher.publish_last(request, min(computed, request.num_tokens))
        if computed <= request.num_tokens:
            self._checkpoints.keep_resume_point(request, computed, ended=ended)
        self._pool.advance_epoch()

    def keep_boundary(self, request: Request) -> None:
        """Value the last boundary that ``request`` computed as a resume point, published or not. Reference layout.

        Raises:
            CacheError: The request holds no blocks.
        """
        row = self._residents.row_of(request)
        if not self._checkpoints.idle and request.writes_prefix_cache and row not in self._loading:
            self._checkpoints.keep_resume_point(request, min(request.num_computed_tokens, request.num_tokens))

    def withdraw(self, request: Request) -> None:
        """Unpublish what the open step would have written of ``request``; see EngineSide.withdraw."""
        self._publisher.withdraw(self._residents.row_of(request))
        self._pool.advance_epoch()

    def free(self, request_id: str) -> None:
        """Give back the blocks of a request, group after group, the last block first. Ignores unknown ids.

        Calling free_many instead costs 8% more counted work (`free.per_call` of benchmarks/guard.py).
        """
        resident = self._residents.get(request_id)
        if resident is None:
            return
        if self._loading:
            self._loads.end(resident.row)
        self._transfers.forget(resident.row)
        for group in self._groups:
            self._pool.release(group.rows.held(resident.row)[::-1])
        self._residents.release(resident)

    def free_many(self, request_ids: Sequence[str]) -> None:
        """Give back the blocks of requests, in this order, in one call if they share no block."""
        found = dict.fromkeys(map(self._residents.get, request_ids))
        residents = [resident for resident in found if resident is not None]
        for resident in residents:
            if self._loading:
                self._loads.end(resident.row)
            self._transfers.forget(resident.row)
        self._pool.free_many([group.rows.held(resident.row)[::-1] for resident in residents for group in self._groups])
        for resident in residents:
            self._residents.release(resident)


def _runs(plain: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Split rows into stretches of plain rows and stretches of others."""
    if np.logical_and.reduce(plain):  # the usual case
        return [(0, len(plain))] if len(plain) else []
    cuts = (np.diff(plain).nonzero()[0] + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(plain)], strict=True))


def nothing_new(accepted: int) -> BatchSlots:
    """Return the slots of ``accepted`` rows that have all their blocks."""
    return BatchSlots(accepted, _NONE, _NONE, _NONE, _NONE)


def one_by_one(accepted: int, cells: Sequence[tuple[int, int, int, Int32]]) -> BatchSlots:
    """Make BatchSlots of cells, given as (owner, group, first column, blocks). Null blocks are left out."""
    if not cells:
        return nothing_new(accepted)
    owners, groups, firsts, parts = zip(*cells, strict=True)
    counts = list(map(len, parts))
    starts = accumulate(counts, initial=0)
    before = [first - start for first, start in zip(firsts, starts, strict=False)]
    owner, group, column = np.array((owners, groups, before), np.int32).repeat(counts, axis=1)
    block = np.concatenate(parts)
    column += np.arange(len(block), dtype=np.int32)
    if block.all():
        return BatchSlots(accepted, owner, group, column, block)
    held = block != 0
    return BatchSlots(accepted, owner[held], group[held], column[held], block[held])


def take(groups: Sequence[CacheGroup], transfers: TransferLog, rows: Int64, missing: Int64, index: Int64) -> BatchSlots:
    """Give each row its ``missing`` blocks, in the order of rows and groups; ``index``: the rows' places."""
    total = int(missing.sum())
    if not total:
        return nothing_new(0)
    if len(groups) == 1:
        ids = transfers.new_blocks(total, 0)
        owner, column = groups[0].rows.extend_many(rows, missing[:, 0], ids)
        return BatchSlots(0, index[owner].astype(np.int32), np.zeros(total, np.int32), column.astype(np.int32), ids)
    of_group = np.tile(np.arange(len(groups), dtype=np.int32), len(rows)).repeat(missing.ravel())
    ids = transfers.new_blocks_each(of_group)
    of_row, of_column = np.empty(total, np.int32), np.empty(total, np.int32)
    for g, group in enumerate(groups):
        mine = (of_group == g).nonzero()[0]
        owner, column = group.rows.extend_many(rows, missing[:, g], ids[mine])
        of_row[mine], of_column[mine] = index[owner], column
    return BatchSlots(0, of_row, of_group, of_column, ids)


def concat(accepted: int, parts: Sequence[BatchSlots], reason: Reason | None = None) -> BatchSlots:
    """Join the cells of ``parts`` in order."""
    parts = [part for part in parts if len(part.block)]
    if not parts:
        return nothing_new(accepted)._replace(reason=reason)
    if len(parts) == 1:
        return parts[0]._replace(accepted=accepted, reason=reason)
    owner = np.concatenate([part.owner for part in parts])
    group = np.concatenate([part.group for part in parts])
    column = np.concatenate([part.column for part in parts])
    block = np.concatenate([part.block for part in parts])
    return BatchSlots(accepted, owner, group, column, block, reason)


class Batch(NamedTuple):
    """Rows with an event in this step, and their tokens as in Demand. int64[rows] each.

    Attributes:
        place: Their places in the batch.
        rows: Their rows.
        processed, computed, end, total, known: Tokens, as in ``policies.policy.Demand``.
    """

    place: Int64
    rows: Int64
    processed: Int64
    computed: Int64
    end: Int64
    total: Int64
    known: Int64

    def part(self, first: int, last: int) -> Batch:
        """Return rows first .. last-1."""
        return Batch(*(column[first:last] for column in self))


class Needs(NamedTuple):
    """Blocks and columns that the rows of a Batch need.

    Attributes:
        missing: int64[rows, groups], blocks to take.
        plain: bool[rows], the row only drops columns, takes blocks and publishes full ones.
        drop: int64[rows, groups], columns to drop.
    """

    missing: Int64
    plain: NDArray[np.bool_]
    drop: Int64

    def part(self, first: int, last: int) -> Needs:
        """Return rows first .. last-1."""
        return Needs(self.missing[first:last], self.plain[first:last], self.drop[first:last])


def needs_of(groups: Sequence[CacheGroup], batch: Batch) -> Needs:
    """Return the needs of all rows. They do not depend on the rows before them."""
    shape = (len(batch.rows), len(groups))
    missing, drop, plain = np.empty(shape, np.int64), np.empty(shape, np.int64), np.ones(shape[0], np.bool_)
    for g, group in enumerate(groups):
        rows, policy = group.rows, group.policy
        held, dropped = rows.count[batch.rows], rows.dropped[batch.rows]
        asked = batch.end if group.states is not None else batch.total
        missing[:, g] = np.maximum(policy.columns(asked) - held, 0)
        drop[:, g] = np.minimum(np.maximum(policy.droppable(batch.processed), dropped), held)
        plain &= policy.is_plain(missing[:, g], group.published[batch.rows], (batch.computed, batch.end, batch.known))
        if group.pending:
            plain &= ~np.isin(batch.rows, list(group.pending))
    return Needs(missing, plain, drop)


def drop(groups: Sequence[CacheGroup], transfers: TransferLog, batch: Batch, columns: Int64) -> bool:
    """Drop ``columns`` of each row and group, if single calls would give the same result. Returns whether it was done.

    They would if every block that loses its last holder goes to the back of the free order.
    """
    parts: list[tuple[CacheGroup, Int64, Int64]] = []
    owners, numbers, blocks = [], [], []
    for g, group in enumerate(groups):
        some = (columns[:, g] > group.rows.dropped[batch.rows]).nonzero()[0]
        if not some.size:
            continue
        rows, upto = batch.rows[some], columns[some, g]
        owner, ids = group.rows.columns_before(rows, upto)
        parts.append((group, rows, upto))
        owners.append(some[owner])
        numbers.append(np.full(len(ids), g))
        blocks.append(ids)
    if not parts:
        return True
    ids, owner = np.concatenate(blocks), np.concatenate(owners)
    order = np.lexsort((np.concatenate(numbers), owner))
    ids = ids[order]
    ids = ids[ids != 0]
    pool = transfers.pool
    last = pool.last_releases(ids)
    if last is None or not transfers.keeps_all(ids[last]):
        return False
    for group, rows, upto in parts:
        group.rows.drop_rows(rows, upto)
    pool.release_in_turn(ids, last)
    return True
