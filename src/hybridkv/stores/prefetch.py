"""Find the longest stored prefix of a request and hold its bytes, beside the steps of an engine; store blocks likewise.

    find    which blocks exist | the longest prefix | read its blocks; if one is lost, a shorter prefix
    take    the blocks in memory, whole: no load from here can lose one
    store   blocks in staging memory -> the store, on a thread; dropped if too many bytes wait

Prefixes end at multiples of a unit, at which every group has block boundaries, as in vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import HybridKVError
from hybridkv.stores.stack import Counts, StoreStack
from hybridkv.units import MiB, ceil_div

MOST_PIECE_BYTES: Final = 8 * MiB
"""Blocks that are larger are stored in pieces: stores bound the bytes under a key."""
_FAILURES: Final = (HybridKVError, OSError, MemoryError, RuntimeError)
"""A store must not raise, but memory can run out and devices fail. Then blocks are missed, and steps go on."""

Rows: TypeAlias = NDArray[np.uint8]
"""uint8[n, bytes]: one block in each row."""
Has: TypeAlias = Callable[[int, int], bool]
"""(group, column) -> whether the block is there."""
Stage: TypeAlias = Callable[[], tuple[Rows, Callable[[], None]]]
"""() -> rows, and a function that waits until their bytes have arrived."""
KeyOf: TypeAlias = Callable[[int, int], bytes]
"""(group, column) -> the key of the block."""


@dataclass(frozen=True, slots=True)
class GroupNeeds:
    """Which blocks of a group a request needs to resume after a number of tokens.

    Attributes:
        block_tokens: Tokens of a column.
        window: Only the last so many tokens are read by the next one; ``None`` for all.
        chunk: Only tokens of the next one's chunk of so many tokens are read; ``None`` without chunks.
        is_state: One block instead: the state after exactly the last token.
    """

    block_tokens: int
    window: int | None = None
    chunk: int | None = None
    is_state: bool = False

    @property
    def reads_all(self) -> bool:
        """Whether each earlier token is read."""
        return self.window is None and self.chunk is None and not self.is_state

    def columns(self, start: int, end: int) -> range:
        """Return the columns that a request with ``start`` tokens lacks to resume after ``end``.

        Args:
            start: Tokens that the request has: a multiple of ``block_tokens``.
            end: More tokens: a multiple of ``block_tokens``.
        """
        last = end // self.block_tokens
        if self.is_state:
            return range(last - 1, last)
        first = start
        if self.window is not None:
            first = max(first, end - self.window)
        if self.chunk is not None:
            first = max(first, end // self.chunk * self.chunk)
        return range(first // self.block_tokens, last)


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """Which prefixes can be resumed, and the hashes that name their blocks.

    Attributes:
        groups: What each group needs.
        unit: A prefix ends at a multiple of so many tokens, which is a multiple of each group's ``block_tokens``.
        hash_tokens: Tokens of a hash block: a divisor of each ``block_tokens``. The hash covers all tokens before, too.
    """

    groups: tuple[GroupNeeds, ...]
    unit: int
    hash_tokens: int

    def hash_of(self, hashes: Sequence[bytes], start: int, group: int, column: int) -> bytes:
        """Return the hash of the tokens up to the end of a block.

        Args:
            hashes: Of each hash block from ``start`` on.
            start: Tokens before the first of them.
            group: A group.
            column: A column of it that ends after ``start``.
        """
        end = (column + 1) * self.groups[group].block_tokens
        return hashes[(end - start) // self.hash_tokens - 1]

    def longest(self, start: int, most: int, has: Has) -> int:
        """Return the tokens of the longest prefix of which all blocks are there, ``start`` if none is longer.

        O(columns of all groups), and O(units * columns of a window).

        Args:
            start: Tokens that the request has.
            most: Most tokens.
            has: Whether a block is there.
        """
        for number, group in enumerate(self.groups):
            if group.reads_all and most > start:
                columns = group.columns(start, most // self.unit * self.unit)
                run = next((column for column in columns if not has(number, column)), columns.stop)
                most = min(most, run * group.block_tokens)
        others = [(number, group) for number, group in enumerate(self.groups) if not group.reads_all]
        for end in range(most // self.unit * self.unit, start, -self.unit):
            if all(has(number, column) for number, group in others for column in group.columns(start, end)):
                return end
        return start


def pieces_of(block_bytes: int) -> list[slice]:
    """Return the bytes of each piece in which a block is stored: as few as possible, and equal but for the last.

    Args:
        block_bytes: Bytes of the block.
    """
    size = ceil_div(block_bytes, ceil_div(block_bytes, MOST_PIECE_BYTES))
    return [slice(first, min(first + size, block_bytes)) for first in range(0, block_bytes, size)]


@dataclass(frozen=True, slots=True)
class Found:
    """A prefix in memory.

    Attributes:
        start: Tokens that the request had.
        end: Tokens of the prefix; ``start`` if nothing was found.
        columns: Columns of each group that are held.
        rows: Their blocks.
        num_bytes: Bytes of all rows.
    """

    start: int
    end: int
    columns: tuple[range, ...] = ()
    rows: tuple[Rows, ...] = ()
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """Bounds of the memory of a Prefetcher.

    Attributes:
        held_bytes: Most bytes of prefixes that were found and not taken. A prefix for which no room is left is cut.
        staged_bytes: Most bytes that wait to be stored. More are dropped.
    """

    held_bytes: int
    staged_bytes: int


class Prefetcher:
    """Finds and holds prefixes, and stores blocks, on threads of its own. One thread calls it.

    Args:
        store: Where blocks are. It is closed with the Prefetcher.
        rules: Which prefixes can be resumed.
        block_bytes: Bytes of a block of each group.
        limits: Bounds of its memory.
        allocate: Returns memory for some blocks of some bytes. It is called by other threads.
    """

    def __init__(
        self,
        store: StoreStack,
        rules: PrefixRules,
        block_bytes: Sequence[int],
        limits: PrefetchLimits,
        allocate: Callable[[int, int], Rows],
    ) -> None:
        self._store, self._rules, self._block_bytes = store, rules, tuple(block_bytes)
        self._limits, self._allocate = limits, allocate
        self._pieces = [pieces_of(size) for size in block_bytes]
        self._finders = ThreadPoolExecutor(2, "hybridkv-find")
        self._writer = ThreadPoolExecutor(1, "hybridkv-store")
        self._looking = dict[int, Future[Found]]()
        self._found = dict[int, Found]()
        self._lock = threading.Lock()
        self._held_bytes = self._staged_bytes = 0
        self._counts = Counts()

    # -- prefixes

    def find(self, number: int, start: int, most: int, key_of: KeyOf) -> None:
        """Begin to look for a prefix.

        Args:
            number: Names this look-up in later calls.
            start: Tokens that the request has already.
            most: Most tokens of the prefix.
            key_of: Returns the key of the block in a group's column. Another thread calls it.
        """
        self._looking[number] = self._finders.submit(self._find, start, most, key_of)

    def answers(self, wait_s: float = 0.0) -> dict[int, int]:
        """Return the tokens of each prefix whose look-up has ended since the last call.

        Args:
            wait_s: Wait so many seconds for the first one, if look-ups have begun.
        """
        if wait_s and self._looking:
            wait(self._looking.values(), wait_s, FIRST_COMPLETED)
        ended = [number for number, one in self._looking.items() if one.done()]
        for number in ended:
            self._found[number] = self._looking.pop(number).result()
        return {number: self._found[number].end for number in ended}

    def take(self, number: int) -> Found | None:
        """Return the prefix that was found, and hold it no longer; ``None`` for an unknown look-up.

        Args:
            number: The look-up.
        """
        found = self._found.pop(number, None)
        if found is not None:
            self._release(found)
        return found

    def drop(self, number: int) -> None:
        """Forget a look-up and its blocks.

        Args:
            number: The look-up; unknown ones are ignored.
        """
        looking = self._looking.pop(number, None)
        if looking is not None and not looking.cancel():
            looking.add_done_callback(lambda one: self._release(one.result()))
        self.take(number)

    def _find(self, start: int, most: int, key_of: KeyOf) -> Found:
        began = perf_counter()
        try:
            found = self._read(start, most, key_of)
        except _FAILURES:
            self._counts.add(failed_finds=1)
            return Found(start, start)
        self._counts.add(finds=1, find_seconds=perf_counter() - began, found_tokens=found.end - found.start)
        return found

    def _read(self, start: int, most: int, key_of: KeyOf) -> Found:
        """Read the longest prefix; a block that is lost meanwhile leaves a shorter one."""
        groups, unit = self._rules.groups, self._rules.unit
        most -= most % unit
        places = [
            (number, column)
            for number, group in enumerate(groups)
            for column in range(start // group.block_tokens, most // group.block_tokens)
        ]
        keys = [key for group, column in places for key in self._keys(group, key_of(group, column))]
        known = self._whole(places, self._store.exists(keys))

        def has(group: int, column: int) -> bool:
            return (group, column) in known

        while True:
            end = self._rules.longest(start, most, has)
            if end <= start:
                return Found(start, start)
            columns = tuple(group.columns(start, end) for group in groups)
            num_bytes = sum(len(part) * size for part, size in zip(columns, self._block_bytes, strict=True))
            room = self._hold(num_bytes)
            if room < num_bytes:
                self._counts.add(cut_finds=1)
                most = min(end - unit, start + (end - start) * max(room, 0) // num_bytes)
                continue
            try:
                parts = [self._allocate(len(part), size) for part, size in zip(columns, self._block_bytes, strict=True)]
                wanted = [(number, column) for number, part in enumerate(columns) for column in part]
                into = [piece for number, rows in enumerate(parts) for piece in self._views(number, rows)]
                keys = [key for group, column in wanted for key in self._keys(group, key_of(group, column))]
                arrived = self._whole(wanted, self._store.get(keys, into))
            except BaseException:
                self._hold(-num_bytes)
                raise
            if len(arrived) == len(wanted):
                return Found(start, end, columns, tuple(parts), num_bytes)
            self._counts.add(lost_blocks=len(wanted) - len(arrived))
            known.difference_update(set(wanted) - arrived)
            self._hold(-num_bytes)

    def _keys(self, group: int, key: bytes) -> list[bytes]:
        """Return the key of each piece of a block."""
        count = len(self._pieces[group])
        return [key] if count == 1 else [key + number.to_bytes(2, "little") for number in range(count)]

    def _views(self, group: int, rows: Rows) -> list[memoryview]:
        """Return the bytes of each piece of each row."""
        return [memoryview(row)[piece] for row in rows for piece in self._pieces[group]]

    def _whole(self, places: Sequence[tuple[int, int]], answers: Sequence[bool]) -> set[tuple[int, int]]:
        """Return the blocks with all their pieces, given the answer for each piece."""
        each = iter(answers)
        answered = [(place, [next(each) for _ in self._pieces[place[0]]]) for place in places]
        return {place for place, pieces in answered if all(pieces)}

    def _hold(self, num_bytes: int) -> int:
        """Reserve memory, or give it back; return how much room there was. Nothing is reserved if it is too little."""
        with self._lock:
            room = self._limits.held_bytes - self._held_bytes
            if num_bytes <= room:
                self._held_bytes += num_bytes
        return room

    def _release(self, found: Found) -> None:
        self._hold(-found.num_bytes)

    # -- blocks

    def store(self, group: int, keys: Sequence[bytes], stage: Stage) -> None:
        """Copy blocks to staging memory and begin to store them; drop and count them if too many bytes wait already.

        Args:
            group: Their group.
            keys: The key of each block.
            stage: Copies them: it returns the rows and a function that waits for their bytes, which another thread
                calls.
        """
        num_bytes = len(keys) * self._block_bytes[group]
        with self._lock:
            has_room = self._staged_bytes + num_bytes <= self._limits.staged_bytes
            if has_room:
                self._staged_bytes += num_bytes
        if has_room:
            self._writer.submit(self._write, group, keys, *stage())
        else:
            self._counts.add(dropped_blocks=len(keys), dropped_bytes=num_bytes)

    def _write(self, group: int, keys: Sequence[bytes], rows: Rows, ready: Callable[[], None]) -> None:
        try:
            ready()
            self._store.put([piece for key in keys for piece in self._keys(group, key)], self._views(group, rows))
        except _FAILURES:
            self._counts.add(failed_blocks=len(keys))
        finally:
            with self._lock:
                self._staged_bytes -= rows.nbytes

    # -- counts and end

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, those of the store included."""
        return self._counts.take() | self._store.take_counts()

    def close(self) -> None:
        """Wait for stores that have begun, then close the store. Look-ups that have not begun are cancelled."""
        self._finders.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._store.close()
