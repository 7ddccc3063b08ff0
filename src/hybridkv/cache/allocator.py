"""Slots of requests: what is planned is carried out, whole steps at once, and given back in the end.

plan_slots -> SlotPlan --commit--> rows hold blocks --free-----> nobody's; what is published stays findable
allocate   all rows of a step: array operations where they lead to the same, plan and commit elsewhere

Slots for all rows of a step at once.

One vector question decides who needs anything: total tokens against each row's next event. Those who do
(one in block_size for a decoding row) are served in (request, group) order, so block ids are those of one
call after the other; a property test holds the two together. Rows that need no more than to drop columns,
take blocks and publish full ones are served with array operations, as far as the order cannot be told from
that of single calls; the others one by one.
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
"""So many rows of a step are sooner served one by one."""

_NONE = np.empty(0, np.int32)


class Slots:
    """The one that changes rows and holds of running requests.

    planner: decides what it does, and knows which rows are being loaded.

    The last one told of a row is ``residents``, which then finds its next event.
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
        self._only_grow = all(one.policy.is_plain(0, 0, (0, 0, 0)) for one in residents.groups)  # who needs nothing

    # -- one request

    def allocate_one(self, request: Request, wanted: SlotDemand) -> tuple[Int32, ...] | Refusal:
        """Plan and commit: the new columns of each group, or why not.

        When they do not fit, columns that are read no longer are given back all the same.
        """
        plan = self._planner.plan(request, wanted)
        if isinstance(plan, Refusal):
            self.drop_skipped(request)
            return plan
        return self.commit(plan)

    def grow(self, request: Request, end_tokens: int, total_tokens: int) -> tuple[Int32, ...] | None:
        """allocate_one for a request that runs and needs no more than blocks at the end of its rows.

        The new columns of each group, () where none is new; None, and nothing done but columns dropped that are read
        no longer, where it takes a plan, or is refused. end_tokens: of the step; total_tokens: with drafts.
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
        """Blocks that ``row`` needs at its end, by group, what it reads no longer dropped; None where states move.

        tokens: computed, end, known.
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
        """``missing`` new blocks, by group, at the end of ``row``."""
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
        if plan.loads:
            request.num_computed_tokens = plan.computed_tokens
            self._loads.begin(row, plan.computed_tokens, plan.hit_tokens)
            self._residents.stall(row)
        else:
            self._residents.refresh(row)
        return new

    def finish_load(self, request: Request, tokens: int | None) -> int:
        """What was loaded for ``request`` has come, its first ``tokens`` tokens; see KVCacheManager.finish_load."""
        row, arrived = self._residents.row_of(request), self._loads.arrived(request, tokens)
        self._loads.end(row)
        request.num_computed_tokens = arrived
        if not arrived:
            self.free(request.request_id)
            return 0
        self._publisher.begin(request, arrived)
        self._checkpoints.go_on(request, arrived)
        self._publisher.publish_computed(request, arrived, written=True)
        self._pool.advance_epoch()
        self._residents.refresh(row)
        return arrived

    def _carry_out(self, plan: SlotPlan, row: int) -> tuple[Int32, ...]:
        """All groups drop before any touches, and touch before any takes.

        So what one frees the others may take, and what one hits nobody evicts.
        """
        work = tuple(zip(self._groups, plan.groups, strict=True))
        for group, part in work:
            self._drop(group, row, part.drop)
        touched = list[Int32]()
        for place, (group, part) in enumerate(work):
            if part.reuse.size:
                touched.append(part.reuse[part.reuse != 0])
                group.rows.extend(row, part.reuse)
            if plan.sources and plan.sources[place]:
                touched.append(np.array([plan.sources[place]], np.int32))
                self._transfers.owe_copy(group, plan.sources[place], row, group.policy.hits.columns(plan.hit_tokens))
        if touched:
            self._pool.hold(touched[0] if len(touched) == 1 else np.concatenate(touched))
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
        """New columns of ``row``: taken, moved from other columns, or null."""
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
        """Columns before ``columns`` are given back, the last one first."""
        dropped = group.rows.each_dropped[row]
        if columns == dropped + 1:
            block = group.rows.drop_one(row)
            if block:
                self._pool.release_one(block)
        elif columns > dropped:
            self._pool.release(group.rows.drop(row, columns))

    def accept_drafts(self, rows: Int64, drafted: Int64, kept: Int64) -> None:
        """Of the last ``drafted[i]`` tokens that ``rows[i]`` computed only the first ``kept[i]`` are its own.

        The state of the last one kept goes on. Rows distinct, their tokens known, no step of theirs in flight.
        """
        certain = self._request_rows.num_computed[rows] - drafted
        self._request_rows.num_computed[rows] = certain + kept
        for group in self._groups:
            if group.states is not None:
                group.accept(rows, group.states.draft_columns(certain, drafted, kept))
        self._checkpoints.pass_drafts(self._request_rows.requests, rows, certain, kept)
        self._publish_accepted(rows[kept > 0])

    def _publish_accepted(self, rows: Int64) -> None:
        """A Python call a row that fills something."""
        if not self._publisher.publishes:
            return
        rows = rows[self._residents.due(rows, self._request_rows.num_computed[rows])]
        for request in self._request_rows.owners(rows):
            self._refuse_short(request, request.num_computed_tokens)
            self._publisher.publish_accepted(request)
            self._residents.refresh(request.row)

    def drop_skipped(self, request: Request) -> None:
        """Give back what ``request`` reads no longer: windows and states before its processed tokens."""
        if request.row < 0 or request.row in self._loading:
            return
        row = self._residents.row_of(request)
        processed = self._request_rows.num_computed.item(row) - self._request_rows.in_flight.item(row)
        for group in self._groups:
            self._drop(group, row, min(group.policy.droppable(processed), group.rows.count.item(row)))
        self._residents.refresh(row)

    def set_state_position(self, row: int, end_tokens: int) -> None:
        """The states of ``row`` are those after ``end_tokens`` tokens, drafts left out, once its step has run."""
        for group in self._states:
            group.state_position[row] = min(end_tokens, self._request_rows.num_tokens.item(row))

    def set_state_positions(self, rows: Int64, end_tokens: Int64) -> None:
        """set_state_position() of many rows. O(rows) a group that keeps states."""
        for group in self._states:
            group.state_position[rows] = np.minimum(end_tokens, self._request_rows.num_tokens[rows])

    # -- all rows of a step

    def allocate(self, rows: Int64, num_new_tokens: Int64 | int, num_lookahead_tokens: int) -> BatchSlots:
        """Slots for ``rows``, distinct; see KVCacheManager.allocate_batch."""
        requests, most = self._request_rows, self._planner.max_model_len
        for row in self._loading:
            if (rows == row).any():
                self._loads.refuse(requests.owner(row))
        end = np.minimum(requests.num_computed[rows] + num_new_tokens, most)
        total = np.minimum(end + num_lookahead_tokens, most)
        due = self._residents.due(rows, total)
        slots = nothing_new(len(rows))
        if due.size and due.size <= FEW and self._only_grow and not self._transfers.ranks:
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
        """_allocate_due of so few rows that a call each takes less time than asking what all of them need."""
        refusal, cells = self._each(place, rows, end, lookahead)
        return cells._replace(accepted=accepted) if refusal is None else cells._replace(reason=refusal.reason)

    def _allocate_due(self, due: Batch, accepted: int, lookahead: int) -> BatchSlots:
        """Slots for the rows of ``due``. accepted: rows of the whole batch, unless one is refused.

        Runs of plain rows are served together; a row that is not, and a run that does not fit or whose order
        could be told, one by one.
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
        """All rows at once; None, and nothing done, where that is not the same as one by one."""
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
        """Whether any row gives a column back."""
        return any(
            bool((needs.drop[:, place] > group.rows.dropped[rows]).any()) for place, group in enumerate(self._groups)
        )

    def _each(self, places: Int64, rows: Int64, end_tokens: Int64, lookahead: int) -> tuple[Refusal | None, BatchSlots]:
        """Row after row: the refusal that ended it, None when none did, and the new cells of those before."""
        cells: list[tuple[int, int, int, Int32]] = []
        for place, row, end in zip(places.tolist(), rows.tolist(), end_tokens.tolist(), strict=True):
            held = [group.rows.count.item(row) for group in self._groups]
            blocks = self._allocate_one(row, end, lookahead)
            if isinstance(blocks, Refusal):
                return blocks, one_by_one(place, cells)
            cells += [(place, g, held[g], ids) for g, ids in enumerate(blocks) if len(ids)]
        return None, one_by_one(0, cells)

    def _allocate_one(self, row: int, end_tokens: int, lookahead: int) -> tuple[Int32, ...] | Refusal:
        """allocate_one for the request in ``row``."""
        request = self._request_rows.owner(row)
        grown = self.grow(request, end_tokens, end_tokens + lookahead)
        if grown is not None:
            return grown
        new = max(end_tokens - self._request_rows.num_computed.item(row), 1)  # 0 at max_model_len
        return self.allocate_one(request, SlotDemand(new, self._no_hit, lookahead_tokens=lookahead))

    def grow_rows(self, rows: Int64) -> None:
        """Slots for one more token of ``rows``, whose blocks there are, as a step of theirs has them.

        CacheError where they are not.
        """
        if self._transfers.ranks:  # who is given up for all of a step's rows is not told row after row
            if (served := self.allocate(rows, 1, 0)).accepted < len(rows):
                raise CacheError(f"rows {rows} were promised blocks for a token more: {served.reason}")
            return
        for row, end in zip(rows.tolist(), (self._request_rows.num_computed[rows] + 1).tolist(), strict=True):
            refusal = self._allocate_one(row, end, 0)
            if isinstance(refusal, Refusal):
                raise CacheError(f"row {row} was promised blocks for {end} tokens: {refusal}")

    # -- published late, and given back

    def publish_computed(self, request: Request, num_computed_tokens: int, *, written: bool = False) -> None:
        """The full blocks of the first ``num_computed_tokens`` tokens can be hit from now on.

        written: whatever step is open, the blocks are there. CacheError, and nothing published, for a request that
        holds no blocks for them.
        """
        row = self._residents.row_of(request)
        self._loads.refuse(request)
        if self._publisher.publishes:
            self._refuse_short(request, num_computed_tokens)
            self._publisher.publish_computed(request, num_computed_tokens, written=written)
            self._residents.refresh(row)

    def _refuse_short(self, request: Request, num_computed_tokens: int) -> None:
        """CacheError for a resident that holds no blocks for so many tokens."""
        known = min(num_computed_tokens, request.num_tokens)
        if any(group.policy.columns(known) > group.rows.count.item(request.row) for group in self._publishing):
            raise CacheError(f"{request.request_id!r} holds no blocks for {known} tokens: allocate slots first")

    def keep_resume_point(self, request: Request) -> None:
        """``request`` ends or is preempted, and no step in flight holds it: its computed tokens can be hit to the last.

        Nothing of one that is being loaded. CacheError for a request that holds no blocks.
        """
        row = self._residents.row_of(request)
        if self._publisher.boundaries(request) is None or row in self._loading:
            return
        computed = request.num_computed_tokens
        self.publish_computed(request, computed, written=True)
        self._publisher.publish_last(request, min(computed, request.num_tokens))
        if computed <= request.num_tokens:
            self._checkpoints.keep_resume_point(request, computed)
        self._pool.advance_epoch()

    def withdraw(self, request: Request) -> None:
        """The open step does not run ``request``: see EngineSide.withdraw."""
        self._publisher.withdraw(self._residents.row_of(request))
        self._pool.advance_epoch()

    def free(self, request_id: str) -> None:
        """Give back what a request holds, group after group, the last block first; nothing if it holds nothing.

        Through free_many this takes 8% more of counted work (`free.per_call` of benchmarks/guard.py).
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
        """Give back what each of ``request_ids`` holds, in this order, in one go where they share no block."""
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
    """Stretches of rows that are plain, and of those that are not."""
    if np.logical_and.reduce(plain):  # as nearly always
        return [(0, len(plain))] if len(plain) else []
    cuts = (np.diff(plain).nonzero()[0] + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(plain)], strict=True))


def nothing_new(accepted: int) -> BatchSlots:
    """All rows have the blocks they need."""
    return BatchSlots(accepted, _NONE, _NONE, _NONE, _NONE)


def one_by_one(accepted: int, cells: Sequence[tuple[int, int, int, Int32]]) -> BatchSlots:
    """Cells given as (owner, group, first column, blocks); null blocks are left out."""
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
    """Give every row its missing blocks, which can be taken in any order. index: the rows' places in the batch."""
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
    """All cells in order."""
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
    """Rows that something is due for, and what they ask for. All int64[rows].

    place: their places in the batch. The others: tokens, as in policies.values.Demand.
    """

    place: Int64
    rows: Int64
    processed: Int64
    computed: Int64
    end: Int64
    total: Int64
    known: Int64

    def part(self, first: int, last: int) -> Batch:
        """Rows first .. last-1."""
        return Batch(*(column[first:last] for column in self))


class Needs(NamedTuple):
    """What the rows of a Batch need.

    missing: int64[rows, groups], blocks. plain: bool[rows], nothing but columns to drop, blocks to take and
    full ones to publish. drop: int64[rows, groups], columns.
    """

    missing: Int64
    plain: NDArray[np.bool_]
    drop: Int64

    def part(self, first: int, last: int) -> Needs:
        """Rows first .. last-1."""
        return Needs(self.missing[first:last], self.plain[first:last], self.drop[first:last])


def needs_of(groups: Sequence[CacheGroup], batch: Batch) -> Needs:
    """Needs of all rows, whatever the rows before them do."""
    shape = (len(batch.rows), len(groups))
    missing, drop, plain = np.empty(shape, np.int64), np.empty(shape, np.int64), np.ones(shape[0], np.bool_)
    for g, group in enumerate(groups):
        rows, policy = group.rows, group.policy
        held, dropped = rows.count[batch.rows], rows.dropped[batch.rows]
        asked = batch.end if group.states is not None else batch.total
        missing[:, g] = np.maximum(policy.columns(asked) - held, 0)
        drop[:, g] = np.minimum(np.maximum(policy.droppable(batch.processed), dropped), held)
        if group.kind.publishes:
            plain &= policy.is_plain(
                missing[:, g], group.published[batch.rows], (batch.computed, batch.end, batch.known)
            )
            if group.pending:
                plain &= ~np.isin(batch.rows, list(group.pending))
        else:
            missing[:, g] = 0
    return Needs(missing, plain, drop)


def drop(groups: Sequence[CacheGroup], transfers: TransferLog, batch: Batch, columns: Int64) -> bool:
    """Drop ``columns`` of each row and group, if single calls would lead to the same; whether it was done.

    They would when every block that loses its last holder goes to the back of the free order.
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
