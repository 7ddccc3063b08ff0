"""A store of blocks in the memory of the process: bounded, and the least recently used blocks make room.

Recency       which keys fit into so many bytes: no bytes and no locks, so it serves simulations too
MemoryStore   a BlockStore that keeps the bytes of these keys
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import integer
from hybridkv.errors import CacheError
from hybridkv.stores.calls import OpenCalls, check_keys, checked_blocks, checked_into
from hybridkv.stores.changes import UNHEARD, Hears
from hybridkv.units import MOST_BYTES


@dataclass(frozen=True, slots=True)
class MemoryStoreStatistics:
    """Blocks and work of a store in memory since it was made.

    Attributes:
        blocks: Blocks that can be found.
        block_bytes: Their bytes.
        found: Blocks that were read.
        found_bytes: Their bytes.
        missed: Blocks that ``get`` did not find.
        stored: Blocks that were kept.
        stored_bytes: Their bytes.
        dropped: Blocks that were not kept, because they and the others of their call are larger than the store.
        evicted: Blocks that made room for others.
    """

    blocks: int
    block_bytes: int
    found: int
    found_bytes: int
    missed: int
    stored: int
    stored_bytes: int
    dropped: int
    evicted: int


class Recency:
    """Keys with their lengths, in order of use. The least recently used ones make room. Not thread safe.

    Args:
        max_bytes: Most bytes of all lengths.

    Attributes:
        max_bytes: The bound.
        used_bytes: Sum of the lengths of all keys.
        evicted: Keys that made room.

    Raises:
        ConfigError: ``max_bytes`` is out of range.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = integer("max_bytes", max_bytes, 1, MOST_BYTES)
        self.used_bytes = 0
        self.evicted = 0
        self._lengths = OrderedDict[bytes, int]()

    def __len__(self) -> int:
        return len(self._lengths)

    def __contains__(self, key: bytes) -> bool:
        return key in self._lengths

    def length(self, key: bytes) -> int | None:
        """Return the length of a key; ``None`` if it is not kept.

        Args:
            key: A key.
        """
        return self._lengths.get(key)

    def touch(self, key: bytes) -> None:
        """Make a key the most recently used one.

        Args:
            key: A key that is kept.
        """
        self._lengths.move_to_end(key)

    def admit(self, keys: Sequence[bytes], lengths: Sequence[int]) -> tuple[list[bool], list[bytes]]:
        """Keep keys as the most recently used ones. No key of this call makes room for another one. O(keys), amortised.

        Args:
            keys: Keys; one that is kept gets its new length.
            lengths: The bytes of each.

        Returns:
            For each key whether it is kept, and the keys that made room.
        """
        kept, gone, fresh = list[bool](), list[bytes](), dict[bytes, int]()
        fresh_bytes = 0
        for key, length in zip(keys, lengths, strict=True):
            later = fresh_bytes - fresh.get(key, 0) + length
            kept.append(later <= self.max_bytes)
            if not kept[-1]:
                continue
            self.remove(key)
            while self.used_bytes + length > self.max_bytes:  # the keys of this call are the last in the order
                oldest = next(iter(self._lengths))
                self.remove(oldest)
                gone.append(oldest)
                self.evicted += 1
            self._lengths[key] = fresh[key] = length
            self.used_bytes += length
            fresh_bytes = later
        return kept, [key for key in gone if key not in fresh]

    def remove(self, key: bytes) -> bool:
        """Remove a key, and return whether it was kept.

        Args:
            key: A key.
        """
        length = self._lengths.pop(key, None)
        self.used_bytes -= length or 0
        return length is not None

    def check(self) -> None:
        """Check all invariants. O(keys).

        Raises:
            CacheError: One does not hold.
        """
        if sum(self._lengths.values()) != self.used_bytes or not 0 <= self.used_bytes <= self.max_bytes:
            raise CacheError(f"{self.used_bytes} bytes are counted for {len(self)} keys within {self.max_bytes}")


class MemoryStore:
    """Keeps blocks in the memory of the process. A BlockStore; the guarantees are listed there.

    Thread safe: threads copy blocks at once, and long copies let other threads run. If a key is put again, its block is
    replaced. While a ``put`` runs, its blocks take memory beyond ``max_bytes``.

    Args:
        max_bytes: Most bytes of all blocks together.
        heard: Is told of each block that is kept, makes room or is removed.

    Raises:
        ConfigError: ``max_bytes`` is out of range.
    """

    def __init__(self, max_bytes: int, heard: Hears = UNHEARD) -> None:
        self._recency, self._heard = Recency(max_bytes), heard
        self._blocks = dict[bytes, NDArray[np.uint8]]()
        self._counts = Counter[str]()
        self._lock = threading.Lock()
        self._calls = OpenCalls("the store in memory")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._blocks)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its block is kept. This is no use of it. O(keys).

        Args:
            keys: Keys of 1 to 64 bytes.

        Raises:
            ConfigError: A key has another length or type.
            CacheError: The store is closed.
        """
        check_keys(keys)
        with self._calls, self._lock:
            return [key in self._blocks for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Copy blocks into buffers, and return for each whether its block is there and as long as its buffer. O(bytes).

        Args:
            keys: Keys of 1 to 64 bytes.
            into: A writable buffer for each key, as long as its block. Where the answer is False, it is not written.

        Raises:
            ConfigError: A key has another length or type; a buffer cannot be written, or is not contiguous; or there
                are more or fewer buffers than keys.
            CacheError: The store is closed.
        """
        buffers = checked_into(keys, into)
        with self._calls:
            with self._lock:
                blocks = [self._blocks.get(key) for key in keys]
                found = [
                    block is not None and len(block) == len(buffer)
                    for block, buffer in zip(blocks, buffers, strict=True)
                ]
                for key, is_found in zip(keys, found, strict=True):
                    if is_found:
                        self._recency.touch(key)
                self._count(found, buffers, "found", "missed")
            for block, buffer, is_found in zip(blocks, buffers, found, strict=True):
                if is_found and block is not None:  # a block is never written again, so it needs no lock
                    np.copyto(np.frombuffer(buffer, np.uint8), block)
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Copy blocks, and return for each whether it is kept. O(bytes), amortised.

        False: the blocks of this call before it leave no room for it. They make no room for each other.

        Args:
            keys: Keys of 1 to 64 bytes.
            blocks: The bytes of each block. They may change after the call.

        Raises:
            ConfigError: A key has another length or type; a block has no bytes, or is not contiguous; or there are
                more or fewer blocks than keys.
            CacheError: The store is closed.
        """
        buffers = checked_blocks(keys, blocks)
        with self._calls:
            copies = [np.frombuffer(buffer, np.uint8).copy() for buffer in buffers]
            with self._lock:
                kept, gone = self._recency.admit(keys, [len(buffer) for buffer in buffers])
                for key in gone:
                    del self._blocks[key]
                    self._heard.gone(key)
                for key, block, is_kept in zip(keys, copies, kept, strict=True):
                    if is_kept:
                        self._blocks[key] = block
                        self._heard.there(key)
                self._count(kept, buffers, "stored", "dropped")
        return kept

    def _count(self, done: Sequence[bool], buffers: Sequence[memoryview], yes: str, no: str) -> None:
        """Count blocks under the names ``yes`` or ``no``."""
        self._counts[yes] += done.count(True)
        self._counts[no] += done.count(False)
        self._counts[f"{yes}_bytes"] += sum(
            len(buffer) for buffer, is_done in zip(buffers, done, strict=True) if is_done
        )

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove blocks, and return for each whether it was there. O(keys).

        Args:
            keys: Keys of 1 to 64 bytes.

        Raises:
            ConfigError: A key has another length or type.
            CacheError: The store is closed.
        """
        check_keys(keys)
        with self._calls, self._lock:
            for key in keys:
                self._recency.remove(key)
                self._heard.gone(key)
            return [self._blocks.pop(key, None) is not None for key in keys]

    def statistics(self) -> MemoryStoreStatistics:
        """Return the blocks of the store, and its work since it was made."""
        with self._lock:
            names = ("found", "found_bytes", "missed", "stored", "stored_bytes", "dropped")
            return MemoryStoreStatistics(
                blocks=len(self._blocks),
                block_bytes=self._recency.used_bytes,
                evicted=self._recency.evicted,
                **{name: self._counts[name] for name in names},
            )

    def close(self) -> None:
        """Wait for calls of other threads, then give the memory back. Later calls raise CacheError."""
        if self._calls.close():
            with self._lock:
                for key in self._blocks:
                    self._recency.remove(key)
                self._blocks.clear()

    def check(self) -> None:
        """Check all invariants. O(blocks).

        Raises:
            CacheError: One does not hold.
        """
        with self._lock:
            self._recency.check()
            for key, block in self._blocks.items():
                if self._recency.length(key) != len(block):
                    raise CacheError(f"{key!r} has {len(block)} bytes, but {self._recency.length(key)} are counted")
            if len(self._recency) != len(self._blocks):
                raise CacheError(f"{len(self._recency)} keys are counted for {len(self._blocks)} blocks")
