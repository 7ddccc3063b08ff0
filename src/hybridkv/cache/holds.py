"""What is held besides rows: cached prefixes that stay whoever needs room, and blocks in a transfer to elsewhere.

Rows whose blocks are written from elsewhere while steps go on: by another engine, or from another memory.

0 new tokens, external ones   blocks are taken and locked; nothing of them is published, so nobody hits them
finish: all came              the row goes on behind them, and they can be hit
finish: some came             behind those, where every group has what comes before them
finish: too few came, free    blocks are given back: the next look-up finds what is here, the rest is computed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.lookup import Hit
from hybridkv.cache.pool import BlockPool
from hybridkv.errors import CacheError, CapacityError, ConfigError
from hybridkv.request import Request

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A prefix that stays. tokens: how many of those asked for are cached. blocks: int32 ids, per group."""

    number: int
    tokens: int
    blocks: tuple[Int32, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(len(ids) for ids in self.blocks)


class Pins:
    """Pins that are held; together at most ``max_blocks`` blocks, those in several pins counted for each."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pool = pool
        self._held: dict[int, Pin] = {}
        self._next = 0

    def __iter__(self) -> Iterator[Pin]:
        return iter(tuple(self._held.values()))

    @property
    def num_blocks(self) -> int:
        """Blocks of all pins."""
        return sum(pin.num_blocks for pin in self._held.values())

    def holds(self, group: int, ids: Int32) -> Int32:
        """How many pins hold each of ``ids``, int32[len(ids)]. O(pinned blocks)."""
        counts = np.zeros(len(ids), np.int32)
        for pin in self._held.values():
            counts += np.isin(ids, pin.blocks[group])
        return counts

    def add(self, hit: Hit, drops: Sequence[bool]) -> Pin:
        """Hold the blocks of ``hit``. CapacityError, and nothing held, beyond the limit.

        drops: per group, whether it drops for EAGLE: then the block that a look-up sees past the hit is held too.
        """
        blocks = tuple(
            np.union1d(part.blocks, part.seen) if past else part.blocks
            for part, past in zip(hit.groups, drops, strict=True)
        )
        pin = Pin(self._next, hit.tokens, tuple(ids[ids != 0] for ids in blocks))
        if self.num_blocks + pin.num_blocks > self.max_blocks:
            raise CapacityError(
                f"a pin of {pin.tokens} tokens needs {pin.num_blocks} blocks, {self.num_blocks} of "
                f"{self.max_blocks} are pinned: release a pin or raise max_pinned_blocks"
            )
        for ids in pin.blocks:
            self._pool.touch(ids)
        self._held[pin.number] = pin
        self._next += 1
        return pin

    def follow(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Blocks moved from ``sources`` to ``targets``: pins name the latter. O(pinned blocks)."""
        new = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        for pin in self._held.values():
            for ids in pin.blocks:
                ids[:] = [new.get(block, block) for block in ids.tolist()]

    def release(self, pin: Pin) -> None:
        """Its blocks can be evicted again, the last one first. CacheError for a pin that is not held."""
        if self._held.get(pin.number) is not pin:
            raise CacheError(f"pin {pin.number} is not held here: release a pin once, where it was made")
        del self._held[pin.number]
        for ids in pin.blocks:
            self._pool.free_blocks(ids[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class BlockLock:
    """blocks: int32, the pool's numbers, by group."""

    blocks: tuple[Int32, ...]


class Locks:
    """Locks that are held; each block has one more holder for each."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: list[BlockLock] = []

    def __iter__(self) -> Iterator[BlockLock]:
        return iter(tuple(self._held))

    def add(self, blocks: Sequence[Int32]) -> BlockLock:
        """Hold and lock ``blocks``, by group, which somebody holds."""
        lock = BlockLock(tuple(blocks))
        for ids in filter(len, lock.blocks):
            self._pool.touch(ids)
            self._pool.lock(ids)
        self._held.append(lock)
        return lock

    def release(self, lock: BlockLock) -> None:
        """Undo it. CacheError for a lock that is not held."""
        if lock not in self._held:
            raise CacheError("this lock is not held: unlock what was locked, once")
        self._held.remove(lock)
        for ids in filter(len, lock.blocks):
            self._pool.unlock(ids)
            self._pool.free_blocks(ids[::-1])


class _Load(NamedTuple):
    """tokens: computed once all has come. hit_tokens: those of them that were here before."""

    tokens: int
    hit_tokens: int
    lock: BlockLock


class Loads:
    """Rows of ``groups`` that wait for a transfer. locks: those of the cache, by which their blocks stay in place.

    of_row: what each of them waits for; for reading, always the same mapping.
    """

    def __init__(self, groups: Sequence[CacheGroup], locks: Locks) -> None:
        self._groups = tuple(groups)
        self._locks = locks
        self.of_row: dict[int, _Load] = {}

    def begin(self, row: int, tokens: int, hit_tokens: int) -> None:
        """Of the first ``tokens`` tokens of ``row``, which holds its blocks, those behind a hit are to come."""
        self.of_row[row] = _Load(tokens, hit_tokens, self._locks.add([group.rows.held(row) for group in self._groups]))

    def end(self, row: int) -> None:
        """No transfer writes the blocks of ``row`` any longer; nothing for a row that waits for none."""
        load = self.of_row.pop(row, None)
        if load is not None:
            self._locks.release(load.lock)

    def refuse(self, request: Request) -> None:
        """CacheError for a request that is loaded."""
        if self.of_row and request.row in self.of_row:
            raise CacheError(f"tokens of {request.request_id!r} are being loaded: tell finish_load what came first")

    def arrived(self, request: Request, tokens: int | None) -> int:
        """Behind how many tokens ``request`` can go on when ``tokens`` came, None for all; 0 behind none.

        Never inside its hit: those blocks are others', too, and what they hold is there.
        ConfigError for more than were asked for, CacheError for a request that is not loaded.
        """
        load = self.of_row.get(request.row)
        if load is None:
            raise CacheError(f"nothing of {request.request_id!r} is being loaded: admit it with 0 new tokens")
        if tokens is None or tokens == load.tokens:
            return load.tokens
        if tokens > load.tokens:
            raise ConfigError(f"{load.tokens} tokens of {request.request_id!r} are loaded, {tokens} cannot have come")
        there = max(tokens, load.hit_tokens)
        for group in self._groups:
            read = slice(group.policy.droppable(there), group.policy.columns(there))
            if group.states is not None or not group.rows.ids(request.row)[read].all():
                return 0  # a state was to be that behind all tokens
        return there
