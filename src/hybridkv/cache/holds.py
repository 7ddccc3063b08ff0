"""Blocks that are held without a row: pinned prefixes, locked blocks, and rows that are being loaded.

A load writes the blocks of a row from elsewhere while steps go on: from another engine, or from another memory.

    plan with 0 new tokens and external ones   blocks are taken and locked; unpublished, so no request hits them
    finish_load, all tokens arrived            the row resumes after them, and they can be hit
    finish_load, some arrived                  the row resumes after these, if every group has the tokens it reads there
    finish_load, too few arrived               the blocks are freed; the next look-up finds the cached ones again
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
    """A prefix that stays in the cache.

    Attributes:
        number: Number of the pin.
        tokens: How many of the requested tokens are cached.
        blocks: int32 ids of each group.
    """

    number: int
    tokens: int
    blocks: tuple[Int32, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(len(ids) for ids in self.blocks)


class Pins:
    """All pins of a cache.

    Args:
        pool: The blocks.
        max_blocks: Most blocks that pins hold together; a block in two pins counts twice.
    """

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
        """Return how many pins hold each of ``ids`` of ``group``, int32[len(ids)]. O(pinned blocks)."""
        counts = np.zeros(len(ids), np.int32)
        for pin in self._held.values():
            counts += np.isin(ids, pin.blocks[group])
        return counts

    def add(self, hit: Hit, drops: Sequence[bool]) -> Pin:
        """Hold the blocks of ``hit``.

        Args:
            hit: The prefix.
            drops: By group, whether it drops blocks for EAGLE. Then the block that a look-up sees after the hit is held
                too.

        Raises:
            CapacityError: The limit would be exceeded. Nothing was held.
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
        """Rename blocks that moved from ``sources`` to ``targets``. O(pinned blocks)."""
        new = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        for pin in self._held.values():
            for ids in pin.blocks:
                ids[:] = [new.get(block, block) for block in ids.tolist()]

    def release(self, pin: Pin) -> None:
        """Release a pin, the last block first. Raises CacheError for a pin that is not held."""
        if self._held.get(pin.number) is not pin:
            raise CacheError(f"pin {pin.number} is not held here: release a pin once, where it was made")
        del self._held[pin.number]
        for ids in pin.blocks:
            self._pool.free_blocks(ids[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class BlockLock:
    """Blocks that a transfer reads.

    Attributes:
        blocks: int32 numbers of the pool, by group.
    """

    blocks: tuple[Int32, ...]


class Locks:
    """All locks of a cache. Each lock is one more holder of its blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._held: list[BlockLock] = []

    def __iter__(self) -> Iterator[BlockLock]:
        return iter(tuple(self._held))

    def add(self, blocks: Sequence[Int32]) -> BlockLock:
        """Hold and lock ``blocks``, by group. Each already has a holder."""
        lock = BlockLock(tuple(blocks))
        for ids in filter(len, lock.blocks):
            self._pool.touch(ids)
            self._pool.lock(ids)
        self._held.append(lock)
        return lock

    def release(self, lock: BlockLock) -> None:
        """Release a lock. Raises CacheError for a lock that is not held."""
        if lock not in self._held:
            raise CacheError("this lock is not held: unlock each lock once")
        self._held.remove(lock)
        for ids in filter(len, lock.blocks):
            self._pool.unlock(ids)
            self._pool.free_blocks(ids[::-1])


class _Load(NamedTuple):
    """A load in progress: ``tokens`` are computed when all have arrived, ``hit_tokens`` of them were cached before."""

    tokens: int
    hit_tokens: int
    lock: BlockLock


class Loads:
    """Rows that wait for a transfer.

    Args:
        groups: All groups.
        locks: Keep the blocks of these rows in place.
        whole: A load ends at a multiple of so many tokens, so that it divides no state and all rings are empty.

    Attributes:
        of_row: row -> its load; always the same mapping.
    """

    def __init__(self, groups: Sequence[CacheGroup], locks: Locks, whole: int) -> None:
        self._groups = tuple(groups)
        self._locks = locks
        self.whole = whole
        self.of_row: dict[int, _Load] = {}

    def begin(self, row: int, tokens: int, hit_tokens: int) -> None:
        """Note that the tokens of ``row`` after its hit, up to ``tokens``, will arrive in its blocks."""
        self.of_row[row] = _Load(tokens, hit_tokens, self._locks.add([group.rows.held(row) for group in self._groups]))

    def end(self, row: int) -> None:
        """Note that no transfer writes the blocks of ``row`` any longer. Ignores rows without a load."""
        load = self.of_row.pop(row, None)
        if load is not None:
            self._locks.release(load.lock)

    def refuse(self, request: Request) -> None:
        """Raise CacheError for a request that is being loaded."""
        if self.of_row and request.row in self.of_row:
            raise CacheError(f"tokens of {request.request_id!r} are being loaded: call finish_load first")

    def arrived(self, request: Request, tokens: int | None) -> int:
        """Return the token count at which ``request`` can resume when ``tokens`` arrived (``None``: all); 0 for none.

        It is never inside the hit, because other requests share these blocks.

        Raises:
            ConfigError: More tokens arrived than were requested.
            CacheError: The request is not being loaded.
        """
        load = self.of_row.get(request.row)
        if load is None:
            raise CacheError(f"nothing of {request.request_id!r} is being loaded: admit it with 0 new tokens")
        if tokens is None or tokens == load.tokens:
            return load.tokens
        if tokens > load.tokens:
            raise ConfigError(f"{load.tokens} tokens of {request.request_id!r} are loaded, so {tokens} cannot arrive")
        there = max(tokens // self.whole * self.whole, load.hit_tokens)
        if there % self.whole:
            return 0  # the ring of the hit was not copied, because the whole load would have emptied it
        for group in self._groups:
            if group.kind.by_digest and group.rows.count.item(request.row) > group.published.item(request.row):
                return 0  # an output of the encoder that did not arrive whole
            read = slice(group.unread(there), group.policy.columns(there))
            if group.states is not None or not group.rows.ids(request.row)[read].all():
                return 0  # the loaded state would have followed all tokens
        return there
