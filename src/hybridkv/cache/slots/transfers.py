"""Blocks that a step must move and copy before its forward, and what is held until it is on its way.

moves     made while blocks were taken: whoever names a block that moved is told at once
copies    a hit that ends inside a block, or at a state: source -> the row's own block
held      sources of copies and new checkpoints, so that nothing else of the same step overwrites them;
          steps run in order, so a later one may
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.write_log import WriteLog
from hybridkv.cache.slots.holds import Pins
from hybridkv.cache.slots.kept import KeptEnds

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


_NO_BLOCKS: Int64 = np.empty(0, np.int64)


class Transfer(NamedTuple):
    """Copy block ``source`` to block ``destination``, ids as the worker knows them. kind: "move", "block" or "state".

    group: whose block it is. Of a move, one of the groups whose blocks have these bytes: they share ids.
    """

    group: int
    source: int
    destination: int
    kind: str


class Checkpoint(NamedTuple):
    """A state to be stored: of the request in ``row``, after ``tokens`` tokens, in ``block`` of ``group``."""

    row: int
    group: int
    tokens: int
    block: int


class Transfers(NamedTuple):
    """What a step must do besides its rows: transfers in order, then the checkpoints that its forward stores.

    moved: the pool's numbers of the blocks that moves ended in.
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
    """A checkpoint of the step that is being made. block: where it lies, whatever moves.

    column: of the row, from which it is copied before the forward; None: the forward writes it.
    """

    group: CacheGroup
    row: int
    tokens: int
    block: int
    column: int | None = None


class TransferLog:
    """Collects until ``take_transfers``. Blocks are the pool's numbers.

    All blocks of rows and checkpoints are taken here, since taking may move others: rows, the steps in flight
    (``log``), pins and the step that is being made then name them anew.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], pool: BlockPool, *, log: WriteLog, pins: Pins, kept: KeptEnds
    ) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._log = log
        self._pins = pins
        self._ends = kept
        self._first_group = [pool.classes.index(of) for of in range(len(pool.bases))] if groups else []
        self._moves: list[Int64] = []
        self._copies: list[_Copy] = []
        self._stored: list[Stored] = []

    @property
    def idle(self) -> bool:
        """Whether the step that is being made moves, copies and stores nothing."""
        return not (self._moves or self._copies or self._stored)

    @property
    def judges(self) -> bool:
        """Whether evictions give up ends, one against the other."""
        return self._ends.judges

    @property
    def held(self) -> list[int]:
        """Blocks held for the step, sources first."""
        return [copy.source for copy in self._copies] + [stored.block for stored in self._stored]

    def owe_copy(self, group: CacheGroup, source: int, row: int, column: int) -> None:
        """``column`` of ``row`` begins as ``source``, which the caller has touched."""
        self._copies.append(_Copy(group, source, row, column))

    def store(self, group: CacheGroup, row: int, tokens: int, block: int, column: int | None = None) -> Stored:
        """The forward stores a state in ``block``, new and of nobody's row; or it is copied from ``column``."""
        stored = Stored(group, row, tokens, block, column)
        self._stored.append(stored)
        return stored

    def new_blocks(self, n: int, group: int) -> Int32:
        """Take ``n`` blocks for ``group``, int32[n]. BlockError if n cannot be had."""
        self._ends.make_way(n, group)
        return self._take(n, group)

    def new_block(self, group: int) -> int:
        """new_blocks of one."""
        self._ends.make_way(1, group)
        return self._pool.take_one(group) or self._take(1, group).item(0)

    def _take(self, n: int, group: int) -> Int32:
        taken = self._pool.take(n, group)
        for moves, held in zip(taken.moves, taken.held, strict=True):
            self._follow(moves, held)
        return taken.ids

    def make_way(self, needs: Sequence[int]) -> None:
        """Ends are given up for ``needs`` blocks, by group, at once, if there can be room for all of them."""
        if not self.judges or not self._pool.gives(needs):
            return
        for group, need in zip(self._first_group, self._pool.by_class(needs), strict=True):
            if need:
                self._ends.make_way(need, group)

    def new_blocks_each(self, of_group: Int32) -> Int32:
        """A block for each of ``of_group``, int32; within a class in order. None of them moves: see takes_alike."""
        pool = self._pool
        if len(pool.bases) == 1:
            return self.new_blocks(len(of_group), 0)
        ids = np.empty(len(of_group), np.int32)
        of_class = np.array(pool.classes)[of_group]
        for of in np.unique(of_class).tolist():
            mine = np.flatnonzero(of_class == of)
            ids[mine] = self.new_blocks(len(mine), pool.classes.index(of))
        return ids

    def _follow(self, moves: Int64, held: NDArray[np.bool_]) -> None:
        """Blocks of one class moved, int64[m, 2]; ``held`` as Taken says.

        One pass over the rows of its groups, where any may have one (docs/design/0010).
        """
        sources, targets = moves[:, 0], moves[:, 1]
        of = self._pool.class_of(int(sources[0]))
        for group in self._groups if held.any() else ():
            if self._pool.classes[group.number] == of:
                group.rows.rewrite(sources[held], targets[held])
        self._log.follow(sources, targets)
        self._pins.follow(sources, targets)
        self._ends.follow(moves)
        self._moves.append(moves)
        new = dict(moves.tolist())
        for copy in self._copies:
            copy.source = new.get(copy.source, copy.source)
        for stored in self._stored:
            stored.block = new.get(stored.block, stored.block)

    def forget(self, row: int) -> None:
        """``row`` is given back before its step: its copies are not made."""
        if not self._copies:
            return
        gone = [copy.source for copy in self._copies if copy.row == row]
        self._copies = [copy for copy in self._copies if copy.row != row]
        for source in gone:
            self._pool.free_blocks(np.array([source], np.int32))

    def take_transfers(self) -> Transfers:
        """All of it, and nothing is held any longer. O(transfers)."""
        if self.idle:
            self._pool.begin_step()
            return Transfers((), (), _NO_BLOCKS)
        held = self.held
        copies = [transfer for moves in self._moves for transfer in self._moved(moves)]
        copies += [self._copied(copy) for copy in self._copies]
        copies += [self._kept(one, one.column) for one in self._stored if one.column is not None]
        checkpoints = tuple(
            Checkpoint(one.row, one.group.number, one.tokens, self._local(one.group, one.block))
            for one in self._stored
            if one.column is None
        )
        moved = np.concatenate([moves[:, 1] for moves in self._moves]) if self._moves else _NO_BLOCKS
        self._moves, self._copies, self._stored = [], [], []
        self._pool.begin_step()
        for block in held:
            self._pool.free_blocks(np.array([block], np.int32))
        return Transfers(tuple(copies), checkpoints, moved)

    def cells_of(self, blocks: Int64) -> tuple[Int32, Int32, Int32]:
        """(group, row, column) of every cell that holds one of ``blocks``, int32 each."""
        blocks, parts, pool = blocks[self._pool.ref_counts(blocks) > 0], [], self._pool
        of_each = np.searchsorted(pool.bases, blocks, "right") - 1
        for group in self._groups if blocks.size else ():
            mine = blocks[of_each == pool.classes[group.number]]
            if mine.size:
                rows, columns = group.rows.find(mine)
                parts.append(np.stack([np.full(len(rows), group.number), rows, columns]))
        found = np.concatenate(parts, axis=1) if parts else np.empty((3, 0))
        group_of, row, column = found.astype(np.int32)
        return group_of, row, column

    def _moved(self, moves: Int64) -> list[Transfer]:
        of = self._pool.class_of(int(moves[0, 0]))
        base, group = self._pool.bases[of], self._first_group[of]
        return [Transfer(group, source - base, destination - base, "move") for source, destination in moves.tolist()]

    def _copied(self, copy: _Copy) -> Transfer:
        destination = self._block_at(copy.group, copy.row, copy.column)
        kind = "state" if copy.group.states is not None else "block"
        return Transfer(copy.group.number, self._local(copy.group, copy.source), destination, kind)

    def _kept(self, one: Stored, column: int) -> Transfer:
        source = self._block_at(one.group, one.row, column)
        return Transfer(one.group.number, source, self._local(one.group, one.block), "state")

    def _block_at(self, group: CacheGroup, row: int, column: int) -> int:
        return self._local(group, group.rows.at(np.array([row]), np.array([column])).item(0))

    def _local(self, group: CacheGroup, block: int) -> int:
        return block - self._pool.bases[self._pool.classes[group.number]]
