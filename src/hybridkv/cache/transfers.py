"""Work of a step besides its rows: block moves, copies, stored states, and the fields of a Step.

take        take blocks for a row or a state; each owner of a block that moves is updated      (TransferLog)
copy        before the forward, copy the end of a hit that lies inside a block or in a state
checkpoint  keep the state at a checkpoint position in a block of its own                      (Checkpoints)
fields      cells of the block tables, states to read and to write, with the ids that the worker uses
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import integers
from hybridkv.cache.eviction_policy import EvictionPolicy
from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.holds import Pins
from hybridkv.cache.placement import Placement
from hybridkv.cache.plan import BatchSlots
from hybridkv.cache.policies import NEVER, StatePolicy, UnitStateHits
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.publisher import Publisher
from hybridkv.request import Request
from hybridkv.request_rows import grown
from hybridkv.step import Cells, Copy, Csr

Int64 = NDArray[np.int64]


class Checkpoints:
    """Keeps recurrent states, and rings, at the positions that the placement asks for.

        tokens   [ hit | computed ........ | this step ...... : ...... ]
                                           ^ computed         ^ position    ^ end

    The forward writes the state at the position into a block of its own. The running state of the row stays where it
    is. A ring that is empty at the position is not kept.

    In the reference layout a chunk that ends inside a block leaves its state in a column that the next step overwrites.
    In a prompt, this state is copied to a block of its own before that step:

        tokens   [ computed ............... | this step ...... ]
                                            ^ one of ``Publisher.resume_points_of``

    Attributes:
        groups: Groups whose states or rings are kept for reuse. Without any, the forward stores no state.
        idle: Neither groups, tails nor the eviction policy need checkpoint positions.
        stored: Positions so far that got a block.
        declined: Positions so far that got no block, for want of room or value.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        publisher: Publisher,
        transfers: TransferLog,
        placement: Placement,
        prefix_multiple: int,
        eviction_policy: EvictionPolicy,
    ) -> None:
        self._tails = tuple([one for one in groups if isinstance(one.policy.hits, UnitStateHits)])
        self.groups = tuple([group for group in groups if group not in self._tails])
        self._of_forward: list[tuple[CacheGroup, int | None]] = [(group, None) for group in self.groups]
        self._publisher = publisher
        self._transfers = transfers
        self._placement = placement
        self._prefix_multiple = prefix_multiple
        self._alignment = placement.alignment
        self._next = np.full(64, NEVER)
        self._eviction_policy = eviction_policy
        self.idle = not (self.groups or self._tails or eviction_policy.ranks)
        self._late: dict[int, list[tuple[int, int]]] = {}
        self._ahead = set[int]()  # rows with a position ahead: steps without any cost nothing
        self.stored = self.declined = 0

    # -- rows

    def begin(self, request: Request, hit_tokens: int, computed_tokens: int) -> None:
        """Note that ``request`` got a row and resumes after ``computed_tokens`` tokens.

        ``hit_tokens`` of them were in the cache.
        """
        if self.idle:
            return
        row = request.row
        if row >= len(self._next):
            self._next = grown(self._next, row + 1, NEVER)
        self._late.pop(row, None)
        self._eviction_policy.begin(request, hit_tokens)
        self.go_on(request, computed_tokens)

    def go_on(self, request: Request, computed_tokens: int) -> None:
        """Note that ``request``, which has a row, resumes after ``computed_tokens`` tokens."""
        if not self.idle:
            self._set_next(request, computed_tokens)

    def _set_next(self, request: Request, after_tokens: int) -> None:
        position = self._next[request.row] = self._next_position(request, after_tokens)
        if position == NEVER:
            self._ahead.discard(request.row)
        else:
            self._ahead.add(request.row)

    @property
    def awaits_checkpoints(self) -> bool:
        """Whether ``store`` may find a state to keep: some row has a position ahead, or drafts passed one."""
        return bool(self._ahead or self._late)

    # -- checkpoint positions

    def positions(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Return the known token counts in start + 1 .. end at which a state of ``request`` should be kept."""
        return self._positions(request, start, end) if self.groups else ()

    def _positions(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Return the positions, also if only tokens are kept there."""
        if not self._keeps_for(request):
            return ()
        positions = self._placement.checkpoints(request, start, end)
        prefix = self._aligned_prefix(request)
        if start < prefix <= end and prefix not in positions:
            positions = tuple(sorted((*positions, prefix)))
        return positions if end <= request.num_tokens else tuple(one for one in positions if one <= request.num_tokens)

    def _aligned_prefix(self, request: Request) -> int:
        """Return the last multiple of ``prefix_multiple`` before the prompt's last token; 0 without one."""
        if not self._prefix_multiple:
            return 0
        prefix = (request.num_prompt_tokens - 1) // self._prefix_multiple * self._prefix_multiple
        return prefix // self._alignment * self._alignment

    def _next_position(self, request: Request, after_tokens: int) -> int:
        """Return the next position after ``after_tokens``; NEVER without one."""
        if not self._keeps_for(request):
            return NEVER
        position, prefix = self._placement.next_checkpoint(request, after_tokens), self._aligned_prefix(request)
        position = prefix if after_tokens < prefix < position else position
        if self._tails:
            position = min([position, *(one + 1 for one in self._copied(request) if after_tokens <= one)])
        return position

    def _copied(self, request: Request) -> list[int]:
        """Return the token counts of states that are copied when the next step begins, ascending."""
        size = self._publisher.ends.block_size
        return [one for one in self._publisher.resume_points_of(request) if one % size]

    def _keeps_for(self, request: Request) -> bool:
        """Return whether any resume point of ``request`` is kept."""
        return not self.idle and request.writes_prefix_cache

    def store(self, requests: Sequence[Request | None], rows: Int64, computed: Int64, end: Int64) -> None:
        """Take a block for each position in computed .. end of each row, in order. O(rows) in array operations.

        Positions that accepted drafts passed before are stored too.
        """
        due = end >= self._next[rows]
        if self._late:
            due |= np.isin(rows, list(self._late))
        for place in due.nonzero()[0].tolist():
            request = requests[rows.item(place)]
            if request is not None:
                self._store_row(request, computed.item(place), end.item(place))

    def store_of(self, request: Request, computed: int, end: int) -> None:
        """Store the states of one request, which has a row."""
        if end >= self._next.item(request.row) or request.row in self._late:
            self._store_row(request, computed, end)

    def _store_row(self, request: Request, computed: int, end: int) -> None:
        for position, column in self._late.pop(request.row, ()):
            in_columns = [(group, column if group.kind.keeps_state else 0) for group in self.groups]
            self._store_states(request, position, in_columns)
        if self._tails and computed in self._copied(request):
            self._store_inside(request, computed)
        for position in self._positions(request, computed, end):
            self._store_states(request, position, self._of_forward)
        self._set_next(request, end)

    def _store_inside(self, request: Request, tokens: int) -> None:
        """Copy the states after ``tokens`` tokens, which the step being made overwrites in their columns."""
        self._store_states(
            request, tokens, [(group, group.states.state_column(tokens)) for group in self._tails if group.states]
        )

    def next_positions(self, rows: Int64) -> Int64:
        """Return the token count at which each of ``rows`` has a state to store, int64[rows]."""
        ahead: Int64 = np.full(len(rows), NEVER) if self.idle else self._next[rows]
        return ahead

    def pass_drafts(self, requests: Sequence[Request | None], rows: Int64, certain: Int64, kept: Int64) -> None:
        """Note that the first ``kept[i]`` drafts after ``certain[i]`` tokens of ``rows[i]`` were accepted.

        The states at positions among them lie in columns of the row: that after the last draft in column 0, the others
        in the column of their draft.
        """
        if self.idle:
            return
        for place in (certain + kept >= self._next[rows]).nonzero()[0].tolist():
            request, start, count = requests[rows.item(place)], certain.item(place), kept.item(place)
            if request is None:
                continue
            late = [
                (position, (position - start) % count) for position in self._positions(request, start, start + count)
            ]
            if late:
                self._late[request.row] = late
            self._set_next(request, start + count)

    def _store_states(self, request: Request, tokens: int, asked: Sequence[tuple[CacheGroup, int | None]]) -> None:
        """Take blocks for the states of the groups ``asked`` at ``tokens``, each with the column that it lies in.

        The column is ``None`` if the forward writes the state.
        """
        lacking = [(group, column) for group, column in asked if group.index.state_at(request, tokens) is None]
        if not lacking:
            if self._eviction_policy.ranks:
                # a row of the reference layout drops its states as it passes them: each may be its last one
                in_output = self._alignment > 1 and tokens > request.num_prompt_tokens
                self._keep(request, tokens, (), ended=in_output)
            return
        needs = [0] * len(self._transfers.pool.classes)
        for group, _ in lacking:
            needs[group.number] = 1
        if not (self._transfers.pool.gives(needs) and self._eviction_policy.admits(request, tokens, needs)):
            self.declined += 1
            return
        taken = [
            self._transfers.store(group, request.row, tokens, self._transfers.new_block(group.number), column)
            for group, column in lacking
        ]
        for stored in taken:  # taking one may have moved those before it
            self._publisher.publish_state(stored.group, request, tokens, stored.block, written=False)
        self.stored += 1
        self._keep(request, tokens, [stored.block for stored in taken], ended=False)

    # -- the end of a request

    def keep_resume_point(self, request: Request, tokens: int, *, ended: bool = True) -> None:
        """Keep the running state of ``request``, written after ``tokens`` tokens. The caller frees the row next.

        States at positions among its last accepted drafts are kept too, except where a ring is needed: the one block
        of the ring is kept for the end.
        """
        if self.idle:
            return
        self._ahead.discard(request.row)
        for position, column in self._late.pop(request.row, ()):
            if not any(one.kind.keeps_ring and one.index.state_at(request, position) is None for one in self.groups):
                self._keep_column(request, position, column, ended=False)
        boundary = tokens // self._alignment * self._alignment
        if self._placement.keeps_final_state and boundary:
            self._keep_column(request, boundary, 0, ended=ended)

    def _keep_column(self, request: Request, tokens: int, column: int, *, ended: bool) -> None:
        """Publish the state after ``tokens`` tokens in its block, which lies in ``column``; rings lie in column 0."""
        lacking = [group for group in self.groups if group.index.state_at(request, tokens) is None]
        blocks = [group.rows.cells.item(group.rows.origin.item(request.row) + column) for group in lacking]
        for group, block in zip(lacking, blocks, strict=True):
            self._publisher.publish_state(group, request, tokens, block, written=True)
        if lacking or self._eviction_policy.ranks:
            self._keep(request, tokens, blocks, ended=ended)

    def _keep(self, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        self._eviction_policy.keep(request, tokens, states, ended=ended)
        if self._transfers.kept is not None:
            self._transfers.kept.append((request, tokens))


Int32 = NDArray[np.int32]


_NO_BLOCKS: Int64 = np.empty(0, np.int64)


class Transfer(NamedTuple):
    """A copy of one block to another; ids as the worker knows them.

    Attributes:
        group: The group of the blocks. Of a move, one of the groups that share these ids.
        source: The block to read.
        destination: The block to write.
        kind: "move", "block" or "state".
    """

    group: int
    source: int
    destination: int
    kind: str


class Checkpoint(NamedTuple):
    """A state that the forward stores.

    Attributes:
        row: Row of the request.
        group: Group of the state.
        tokens: Token count after which the state is stored.
        block: Block to write, as the worker knows it.
    """

    row: int
    group: int
    tokens: int
    block: int


class Transfers(NamedTuple):
    """Work of a step besides its rows.

    Attributes:
        copies: Transfers before the forward, in order.
        checkpoints: States that the forward stores.
        moved: int64[n], the pool's numbers of the blocks to which moves went.
    """

    copies: tuple[Transfer, ...]
    checkpoints: tuple[Checkpoint, ...]
    moved: Int64


@dataclass(slots=True)
class _Copy:
    group: CacheGroup
    source: int
    row: int
    column: int


@dataclass(slots=True)
class Stored:
    """A checkpoint of the step that is being made.

    Attributes:
        group: Group of the state.
        row: Row of the request.
        tokens: Token count after which the state is stored.
        block: Its block; follows moves.
        column: Column of the row from which the state is copied before the forward; ``None`` if the forward writes it.
    """

    group: CacheGroup
    row: int
    tokens: int
    block: int
    column: int | None = None


class TransferLog:
    """Collects the transfers of the step that is being made, until ``take_transfers``. Blocks are the pool's numbers.

    All blocks of rows and checkpoints are taken here, because taking a block may move others. Rows, steps in flight,
    pins and the step that is being made are then updated.

    Attributes:
        kept: Resume points that were kept, as (request, tokens), for a reader that empties it; ``None`` without one.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        *,
        publisher: Publisher,
        pins: Pins,
        eviction_policy: EvictionPolicy,
        kept: list[tuple[Request, int]] | None,
    ) -> None:
        self._groups = tuple(groups)
        self.pool = pool
        self.kept = kept
        self._publisher = publisher
        self._pins = pins
        self._eviction_policy = eviction_policy
        self._first_group = [pool.classes.index(of) for of in range(len(pool.bases))] if groups else []
        self._moves: list[Int64] = []
        self._copies: list[_Copy] = []
        self._stored: list[Stored] = []

    @property
    def idle(self) -> bool:
        """Whether the step that is being made moves, copies and stores nothing."""
        return not (self._moves or self._copies or self._stored)

    @property
    def ranks(self) -> bool:
        """Whether the eviction policy compares resume points by value."""
        return self._eviction_policy.ranks

    def keeps_all(self, ids: Int32) -> bool:
        """Return whether the eviction policy evicts none of the cached blocks ``ids`` when they are released."""
        return self._eviction_policy.all_needed(ids)

    @property
    def held(self) -> list[int]:
        """Blocks held for the step, sources first."""
        return [copy.source for copy in self._copies] + [stored.block for stored in self._stored]

    def owe_copy(self, group: CacheGroup, source: int, row: int, column: int) -> None:
        """Copy ``source``, which the caller holds, into ``column`` of ``row`` before the forward."""
        self._copies.append(_Copy(group, source, row, column))

    def store(self, group: CacheGroup, row: int, tokens: int, block: int, column: int | None = None) -> Stored:
        """Store a state in the new ``block``: written by the forward, or copied from ``column`` of the row."""
        stored = Stored(group, row, tokens, block, column)
        self._stored.append(stored)
        return stored

    def new_blocks(self, n: int, group: int) -> Int32:
        """Take ``n`` blocks for ``group``, int32[n]. Raises BlockError if there are fewer."""
        self._eviction_policy.make_way(n, group)
        return self._take(n, group)

    def new_block(self, group: int) -> int:
        """Take one block for ``group``."""
        self._eviction_policy.make_way(1, group)
        return self.pool.take_one(group) or self._take(1, group).item(0)

    def _take(self, n: int, group: int) -> Int32:
        taken = self.pool.take(n, group)
        for moves, held in zip(taken.moves, taken.held, strict=True):
            self._follow(moves, held)
        return taken.ids

    def make_way(self, needs: Sequence[int]) -> None:
        """Evict resume points for ``needs`` blocks, by group, if there can be room for all of them."""
        if not self.ranks or not self.pool.gives(needs):
            return
        for group, need in zip(self._first_group, self.pool.by_class(needs), strict=True):
            if need:
                self._eviction_policy.make_way(need, group)

    def new_blocks_each(self, of_group: Int32) -> Int32:
        """Take a block for each of ``of_group``, int32; within a class in order.

        None of them moves: see ``takes_alike``.
        """
        pool = self.pool
        if len(pool.bases) == 1:
            return self.new_blocks(len(of_group), 0)
        ids = np.empty(len(of_group), np.int32)
        of_class = np.array(pool.classes)[of_group]
        for of in np.unique(of_class).tolist():
            mine = (of_class == of).nonzero()[0]
            ids[mine] = self.new_blocks(len(mine), pool.classes.index(of))
        return ids

    def _follow(self, moves: Int64, held: NDArray[np.bool_]) -> None:
        """Update the owners of blocks of one class that moved, int64[m, 2]. ``held`` is that of ``Taken``.

        One pass over the rows of its groups, only if requests hold a moved block (docs/design/0010).
        """
        sources, targets = moves[:, 0], moves[:, 1]
        of = self.pool.class_of(int(sources[0]))
        for group in self._groups if held.any() else ():
            if self.pool.classes[group.number] == of:
                group.rows.rewrite(sources[held], targets[held])
        self._publisher.follow(sources, targets)
        self._pins.follow(sources, targets)
        self._moves.append(moves)
        new = dict(moves.tolist())
        for copy in self._copies:
            copy.source = new.get(copy.source, copy.source)
        for stored in self._stored:
            stored.block = new.get(stored.block, stored.block)

    def forget(self, row: int) -> None:
        """Drop the copies of ``row``, which is given back before its step."""
        if not self._copies:
            return
        gone = [copy.source for copy in self._copies if copy.row == row]
        self._copies = [copy for copy in self._copies if copy.row != row]
        for source in gone:
            self.pool.release_one(source)

    def take_transfers(self) -> Transfers:
        """Return all transfers of the step, and release the blocks held for them. O(transfers)."""
        if self.pool.journal.pending:
            self.pool.journal.settle()
        if self.idle:
            self.pool.space.begin_step()
            return Transfers((), (), _NO_BLOCKS)
        held = self.held
        copies = [transfer for moves in self._moves for transfer in self._moved(moves)]
        copies += [self._copied(copy) for copy in self._copies]
        copies += [self._stored_from_column(one, one.column) for one in self._stored if one.column is not None]
        checkpoints = tuple(
            [
                Checkpoint(one.row, one.group.number, one.tokens, self._local(one.group, one.block))
                for one in self._stored
                if one.column is None
            ]
        )
        moved = np.concatenate([moves[:, 1] for moves in self._moves]) if self._moves else _NO_BLOCKS
        self._moves, self._copies, self._stored = [], [], []
        self.pool.space.begin_step()
        for block in held:
            self.pool.release_one(block)
        return Transfers(tuple(copies), checkpoints, moved)

    def cells_of(self, blocks: Int64) -> tuple[Int32, Int32, Int32]:
        """Return (group, row, column), int32 each, of every cell that holds one of ``blocks``."""
        blocks, parts, pool = blocks[self.pool.ref_counts(blocks) > 0], [], self.pool
        of_each = pool.classes_of(blocks)
        for group in self._groups if blocks.size else ():
            mine = blocks[of_each == pool.classes[group.number]]
            if mine.size:
                rows, columns = group.rows.find(mine)
                parts.append(np.stack([np.full(len(rows), group.number), rows, columns]))
        found = np.concatenate(parts, axis=1) if parts else np.empty((3, 0))
        group_of, row, column = found.astype(np.int32)
        return group_of, row, column

    def _moved(self, moves: Int64) -> list[Transfer]:
        of = self.pool.class_of(int(moves[0, 0]))
        base, group = self.pool.bases[of], self._first_group[of]
        return [Transfer(group, source - base, destination - base, "move") for source, destination in moves.tolist()]

    def _copied(self, copy: _Copy) -> Transfer:
        destination = self._block_at(copy.group, copy.row, copy.column)
        kind = "state" if copy.group.states is not None else "block"
        return Transfer(copy.group.number, self._local(copy.group, copy.source), destination, kind)

    def _stored_from_column(self, one: Stored, column: int) -> Transfer:
        source = self._block_at(one.group, one.row, column)
        kind = "state" if one.group.states is not None else "block"
        return Transfer(one.group.number, source, self._local(one.group, one.block), kind)

    def _block_at(self, group: CacheGroup, row: int, column: int) -> int:
        return self._local(group, group.rows.cell(row, column))

    def _local(self, group: CacheGroup, block: int) -> int:
        return block - self.pool.bases[self.pool.classes[group.number]]

    # -- the fields of a Step

    def cells(self, rows: Int64, new: Sequence[Cells], moved: Int64) -> Cells:
        """Return the cells to write in a step of ``rows``, with ids within each group's class, after its moves.

        The cells of all rows that hold one of the ``moved`` blocks are written first.

        Args:
            rows: int64[R], rows of the step.
            new: Cells of new blocks.
            moved: See Transfers.
        """
        cells = join_cells(rotated_cells(self._groups, rows) + list(new))
        if moved.size:
            group, row, column = self.cells_of(moved)
            group, row = np.concatenate((group, cells.group)), np.concatenate((row, cells.row))
            column = np.concatenate((column, cells.column))
            block = np.empty(len(group), np.int32)
            for one in self._groups:
                mine = (group == one.number).nonzero()[0]
                block[mine] = one.rows.at(row[mine].astype(np.int64), column[mine].astype(np.int64))
            cells = Cells(group, row, column, block)
        return Cells(cells.group, cells.row, cells.column, self.pool.local_each(cells.group, cells.block))

    def cells_of_row(self, row: int) -> Cells:
        """Return the cells of a new row: all its blocks, group by group, null columns left out."""
        columns, blocks = list[Int64](), list[Int32]()
        for group in self._groups:
            stored = group.rows.stored(row)
            places = stored.nonzero()[0]
            columns.append(places + group.rows.base[row])
            blocks.append(stored[places])
        of_group = np.arange(len(columns), dtype=np.int32).repeat(list(map(len, columns)))
        rows = np.empty_like(of_group)
        rows.fill(row)
        return Cells(of_group, rows, np.concatenate(columns).astype(np.int32), np.concatenate(blocks))

    def states(self, spans: RowSpans, transfers: Transfers) -> StateMoves:
        """Return the state copies, reads and writes of a step: those of its rows, and those of ``transfers``."""
        return with_transfers(state_moves(self._groups, self.pool, spans), transfers, spans.rows)

    def forget_moved(self, moved: Int64) -> set[int]:
        """Remove the keys of the blocks ``moved``, to which a failed step moved. Returns the rows that hold one."""
        moved = integers("moved", moved, 0)
        if not moved.size:
            return set()
        self.pool.evict_blocks(np.unique(moved).astype(np.int32))
        return set(self.cells_of(moved)[1].tolist())

    def forget_accepted(self, rows: Int64) -> None:
        """Note that ``rows`` run again: from now on the tables show where accepted drafts left their states."""
        for group in self._groups:
            group.forget_accepted(rows)


def cells_of(rows: Int64, slots: BatchSlots) -> Cells:
    """Return the cells of the new blocks of a batch.

    Args:
        rows: int64[R], rows of the batch.
        slots: Its slots.
    """
    return Cells(slots.group, rows[slots.owner].astype(np.int32), slots.column, slots.block)


def rotated_cells(groups: Sequence[CacheGroup], rows: Int64) -> list[Cells]:
    """Return the cells of ``rows`` whose states changed columns since the worker last got them."""
    parts = []
    for group in groups:
        states = group.states
        some = rows[group.rotated[rows] > 0] if states is not None and states.rotates else rows[:0]
        if some.size:
            pairs = np.stack((np.zeros_like(some), group.rotated[some]), axis=1).ravel()
            row = some.repeat(2)
            number = np.full(len(row), group.number, np.int32)
            parts.append(Cells(number, row.astype(np.int32), pairs.astype(np.int32), group.rows.at(row, pairs)))
    return parts


def join_cells(parts: list[Cells]) -> Cells:
    """Join cells in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Cells.empty()
    return Cells(
        np.concatenate([part.group for part in parts]),
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.column for part in parts]),
        np.concatenate([part.block for part in parts]),
    )


class StateMoves(NamedTuple):
    """The state fields of a Step; see ``Step``.

    Attributes:
        zero: int32[Z, 2], (group, block) to clear.
        copies: Copies before and after the forward, in order.
        state_read: int32[R, G], block of each row's state.
        state_writes: int32[W, 4], (index into rows, group, token count, block).
    """

    zero: Int32
    copies: tuple[Copy, ...]
    state_read: Int32
    state_writes: Int32


class RowSpans(NamedTuple):
    """Rows of a step and their tokens. int64[R] each.

    Attributes:
        rows: Rows of the step.
        computed: Tokens computed before it.
        certain: Tokens that it runs, without drafts.
        drafts: Drafts after them; ``None`` if no row has any.
    """

    rows: Int64
    computed: Int64
    certain: Int64
    drafts: Csr | None = None


def _drafted(spans: RowSpans) -> Int64:
    """Return the drafts of each row, int64[R]."""
    return np.zeros_like(spans.rows) if spans.drafts is None else np.diff(spans.drafts.indptr)


def _written(spans: RowSpans) -> tuple[Int64, Int64]:
    """Return, for each state that is written, the index into rows and the number of drafts before it."""
    if spans.drafts is None:
        return np.arange(len(spans.rows)), np.zeros_like(spans.rows)
    counts = _drafted(spans) + 1
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts).repeat(counts)


class _Columns(NamedTuple):
    """Columns of the states of a step's rows in groups of one kind.

    Attributes:
        read: Where each row's state is read.
        left: Indices of rows whose state leaves its column.
        source: The columns that these states leave.
        written: Where states are written.
    """

    read: Int64
    left: Int64
    source: Int64
    written: Int64


def state_moves(groups: Sequence[CacheGroup], pool: BlockPool, spans: RowSpans) -> StateMoves:
    """Return the state copies, reads and writes of the rows of a step, in order of rows, groups and tokens.

    A state that leaves its column is copied, so that a published block is never written again. A row with drafts, or
    after accepted ones, reads its state where it is and writes to other columns.
    """
    keeping = [(group, group.states) for group in groups if group.states is not None]
    rows = spans.rows
    if not keeping or not len(rows):
        return StateMoves(_NO_ZERO, (), np.empty((0, len(groups)), np.int32), _NO_WRITES)
    numbers = np.array([group.number for group, _ in keeping])
    owner, drafts_before = _written(spans)
    reads, writes, copies = list[Int32](), list[Int32](), list[tuple[int, int, int]]()
    columns, alike = dict[object, _Columns](), True
    for place, (group, states) in enumerate(keeping):
        of = columns.get(group.policy)  # groups of one kind are alike
        if of is None:
            of = columns[group.policy] = _columns_of(group, states, spans, owner, drafts_before)
        reads.append(group.rows.at(rows, of.read))
        alike &= of.written is of.read
        writes.append(reads[-1] if of.written is of.read else group.rows.at(rows[owner], of.written))
        if of.left.size:
            source = pool.local(group.number, group.rows.at(rows[of.left], of.source))
            copies += zip(of.left.tolist(), [place] * len(of.left), source.tolist(), strict=True)
    read_blocks = pool.local_each(numbers, np.array(reads).T)
    written_blocks = read_blocks if alike else pool.local_each(numbers, np.array(writes).T)
    read = np.empty((len(rows), len(groups)), np.int32)
    read.fill(-1)
    read[:, numbers] = read_blocks
    moved = tuple(
        [
            Copy("before", int(numbers[place]), source, int(read_blocks[i, place]), "state")
            for i, place, source in sorted(copies)
        ]
    )
    tokens = (spans.computed + spans.certain)[owner] + drafts_before
    zero = _zeroed(spans.computed, numbers, read_blocks)
    return StateMoves(zero, moved, read, _writes(owner, numbers, tokens, written_blocks))


def _zeroed(computed: Int64, numbers: Int64, read_blocks: Int32) -> Int32:
    """Return Step.zero: the states of rows that have computed nothing. ``read_blocks`` is int32[rows, groups]."""
    new = (computed == 0).nonzero()[0]
    if not new.size:
        return _NO_ZERO
    zero = np.empty((len(new), len(numbers), 2), np.int32)
    zero[:, :, 0], zero[:, :, 1] = numbers, read_blocks[new]
    return zero.reshape(-1, 2)


def _columns_of(
    group: CacheGroup, states: StatePolicy, spans: RowSpans, owner: Int64, drafts_before: Int64
) -> _Columns:
    """Return where the states of ``group`` are. ``owner`` and ``drafts_before`` are those of ``_written``."""
    if states.rotates and spans.drafts is None:  # the state never leaves its column
        column = np.zeros_like(spans.rows)
        return _Columns(column, _NO_BLOCKS, _NO_BLOCKS, column)
    computed, certain = spans.computed, spans.computed + spans.certain
    before, after = states.state_column(computed), states.state_column(certain)
    accepted = group.accepted[spans.rows]
    stays = accepted >= 0
    if spans.drafts is not None:
        stays |= _drafted(spans) > 0
    moves = ((computed > 0) & ~stays & (before != after)).nonzero()[0]
    if not np.count_nonzero(stays):
        return _Columns(after, moves, before[moves], after)
    read = np.where(stays, np.where(accepted >= 0, accepted, before), after)
    return _Columns(
        read, moves, before[moves], states.draft_columns(certain[owner], _drafted(spans)[owner], drafts_before)
    )


def _writes(owner: Int64, numbers: Int64, tokens: Int64, blocks: Int32) -> Int32:
    """Return Step.state_writes.

    int64[n] each: ``owner``, ``tokens``; int64[groups]: ``numbers``; int32[n, groups]: ``blocks``.
    """
    writes = np.empty((*blocks.shape, 4), np.int32)
    writes[:, :, 0], writes[:, :, 1], writes[:, :, 2], writes[:, :, 3] = (
        owner[:, None],
        numbers,
        tokens[:, None],
        blocks,
    )
    flat = writes.reshape(-1, 4)
    if len(numbers) > 1 and len(owner) > owner[-1] + 1:  # several states of a row: group after group
        flat = flat[np.lexsort((flat[:, 2], flat[:, 1], flat[:, 0]))]
    return flat


_NO_ZERO = np.empty((0, 2), np.int32)
_NO_WRITES = np.empty((0, 4), np.int32)


def with_transfers(moves: StateMoves, transfers: Transfers, rows: Int64) -> StateMoves:
    """Add the transfers of the cache to ``moves``: its moves and copies before, its checkpoints after all others."""
    if not (transfers.copies or transfers.checkpoints):
        return moves
    asked = tuple([Copy("before", *transfer) for transfer in transfers.copies])
    stored = np.array([tuple(one) for one in transfers.checkpoints], np.int32).reshape(-1, 4)
    place = np.empty(int(rows.max(initial=0)) + 1, np.int32)  # a load copies without a row
    place[rows] = np.arange(len(rows), dtype=np.int32)
    stored[:, 0] = place[stored[:, 0]]
    writes = np.concatenate((moves.state_writes, stored))
    return moves._replace(copies=asked + moves.copies, state_writes=writes)
