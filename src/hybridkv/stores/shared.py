"""A store of blocks on a server or a file system that several processes share (docs/design/0041).

    value   checksum of 16 bytes | block
    name    hkv1, then the key, in the way of each client

The checksum begins from the key, so a block under another key is a miss, too. A client moves values. What every store
guarantees is here, once: checks, checksums, timeouts, and misses instead of errors.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from hybridkv.arguments import instance, integer, real
from hybridkv.errors import ConfigError
from hybridkv.stores.bounded import BoundedCalls, Call
from hybridkv.stores.calls import OpenCalls, check_keys, checked_blocks, checked_into
from hybridkv.units import MiB, format_bytes

CHECKSUM_BYTES: Final = 16

_BATCH_BYTES: Final = 16 * MiB
"""Most bytes of the values of one request, unless one is longer. The client holds them twice for a moment."""

_BATCH_KEYS: Final = 1024
"""Most keys of one request. A Redis server answers nobody else meanwhile."""

_THREADS: Final = 8
"""Most calls at once. Calls that hang keep their threads, and the others must go on."""

_LONGEST_BLOCK_BYTES: Final = 256 * MiB
"""Redis takes values of 512 MiB."""


class Value(NamedTuple):
    """What is kept for a key: the checksum, and the bytes of the block."""

    key: bytes
    checksum: bytes
    block: memoryview


@runtime_checkable
class StoreClient(Protocol):
    """Moves values between this process and an engine. Several threads call it at once; each call may raise or hang.

    Attributes:
        name: Name of the engine in messages, without passwords.
    """

    name: str

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether there is a value.

        Args:
            keys: At most 1,024 keys.
        """
        ...

    def read(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Iterable[tuple[int, bytes | memoryview]]:
        """Yield the values that are there, each with its place in ``keys``. A value is used before the next one.

        Args:
            keys: At most 1,024 keys.
            lengths: The bytes of each value that are wanted. Values of other lengths may be left out.
        """
        ...

    def write(self, values: Sequence[Value]) -> Sequence[bool]:
        """Write values, and return for each whether it is kept.

        Args:
            values: At most 1,024 values, of at most 16 MiB or the longest value.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values.

        Args:
            keys: Keys; some may have no value.
        """
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class SharedStoreStatistics:
    """Work of a shared store since it was made.

    Attributes:
        found: Blocks that were read.
        found_bytes: Their bytes.
        missed: Blocks that ``get`` did not find, damaged ones among them.
        damaged: Blocks that had another checksum. They are removed.
        stored: Blocks that were written.
        stored_bytes: Their bytes.
        dropped: Blocks that were not written.
        failed: Calls that raised or took too long. Blocks that came before count as found or stored.
        skipped: Calls that were not begun, because one failed less than a second before.
        get_s: Seconds of all calls of ``get``.
        put_s: Seconds of all calls of ``put``.
    """

    found: int
    found_bytes: int
    missed: int
    damaged: int
    stored: int
    stored_bytes: int
    dropped: int
    failed: int
    skipped: int
    get_s: float
    put_s: float


class SharedStore:
    """Keeps blocks where other processes find them. A BlockStore; the guarantees are listed there.

    Thread safe: up to 8 calls run at once. A call answers within ``timeout_s``; blocks that came until then are found.
    After a call that failed, calls for a second answer False at once. Then one call tries again. Blocks are neither
    encrypted nor signed: who can write to the engine can forge a block.

    Args:
        client: Moves values to the engine and back.
        timeout_s: Most seconds of a call, at most an hour.
        max_block_bytes: Most bytes of a block, at most 256 MiB.

    Raises:
        ConfigError: A value is out of range, or the package xxhash is missing.
    """

    def __init__(self, client: StoreClient, timeout_s: float = 1.0, max_block_bytes: int = 16 * MiB) -> None:
        if not 0 < real("timeout_s", timeout_s) <= 3600:
            raise ConfigError(f"timeout_s must be more than 0 and at most 3600 seconds, got {timeout_s}")
        self._max_block_bytes = integer("max_block_bytes", max_block_bytes, 1, _LONGEST_BLOCK_BYTES)
        self._client: StoreClient = instance("client", client, StoreClient)  # type: ignore[type-abstract]
        self._checksum = _checksum()
        self._bounded = BoundedCalls(client.name, timeout_s, _THREADS)
        self._calls = OpenCalls(f"the store on {client.name}")
        self._counts = Counter[str]()
        self._seconds = Counter[str]()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the engine has a value. Its bytes are not read. O(keys).

        Args:
            keys: Keys of 1 to 64 bytes.

        Raises:
            ConfigError: A key has another length or type.
            CacheError: The store is closed.
        """
        check_keys(keys)
        known = [False] * len(keys)

        def look_up(call: Call) -> None:
            for begin in range(0, len(keys), _BATCH_KEYS):
                answers = self._client.exists(keys[begin : begin + _BATCH_KEYS])
                with call:
                    known[begin : begin + _BATCH_KEYS] = map(bool, answers)

        with self._calls:
            self._run(look_up, keys)
        return known

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read blocks, and return for each whether the whole block arrived in time and its checksum holds. O(bytes).

        A block that is damaged is removed.

        Args:
            keys: Keys of 1 to 64 bytes.
            into: A writable buffer for each key, as long as its block. Where the answer is False, its content is
                undefined. After the call, it is not written.

        Raises:
            ConfigError: A key has another length or type; a buffer cannot be written, or is not contiguous; or there
                are more or fewer buffers than keys.
            CacheError: The store is closed.
        """
        buffers = checked_into(keys, into)
        found, damaged = [False] * len(keys), list[bytes]()

        def read(call: Call) -> None:
            for places in _batches(buffers):
                wanted = [keys[place] for place in places]
                lengths = [len(buffers[place]) + CHECKSUM_BYTES for place in places]
                bad = list[bytes]()
                for number, value in self._client.read(wanted, lengths):
                    block, buffer = memoryview(value)[CHECKSUM_BYTES:], buffers[places[number]]
                    if self._checksum(wanted[number], block) != value[:CHECKSUM_BYTES]:
                        bad.append(wanted[number])
                    elif len(block) == len(buffer):
                        with call:
                            _copy(block, buffer)
                            found[places[number]] = True
                if bad:
                    with call:
                        damaged.extend(bad)
                    self._client.remove(bad)

        with self._calls:
            seconds = self._run(read, keys)
            self._count("found", found, buffers, "missed", get=seconds)
            with self._lock:
                self._counts["damaged"] += len(damaged)
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Write blocks, and return for each whether the engine has it. O(bytes).

        False: the engine rejected it, has no room, or did not answer in time. It may have the block nevertheless.

        Args:
            keys: Keys of 1 to 64 bytes.
            blocks: The bytes of each block. They may change after the call.

        Raises:
            ConfigError: A key has another length or type; a block has no bytes, or more than ``max_block_bytes``, or
                is not contiguous; or there are more or fewer blocks than keys.
            CacheError: The store is closed.
        """
        buffers = checked_blocks(keys, blocks)
        for buffer in buffers:
            if len(buffer) > self._max_block_bytes:
                raise ConfigError(
                    f"a block of {format_bytes(len(buffer))} is longer than max_block_bytes, which is "
                    f"{format_bytes(self._max_block_bytes)}: give a larger max_block_bytes"
                )
        kept = [False] * len(keys)

        def write(call: Call) -> None:
            for places in _batches(buffers):
                answers = self._client.write(
                    [Value(keys[at], self._checksum(keys[at], buffers[at]), buffers[at]) for at in places]
                )
                with call:
                    for place, answer in zip(places, answers, strict=True):
                        kept[place] = bool(answer)

        with self._calls:
            seconds = self._run(write, keys)
            self._count("stored", kept, buffers, "dropped", put=seconds)
        return kept

    def _run(self, work: Callable[[Call], None], keys: Sequence[bytes]) -> float:
        """Run a call, count it if it failed, and return its seconds."""
        if not keys:
            return 0.0
        begun = time.perf_counter()
        is_done = self._bounded.run(work)
        seconds = time.perf_counter() - begun
        if not is_done:
            with self._lock:
                self._counts["skipped" if is_done is None else "failed"] += 1
        return seconds

    def _count(self, yes: str, done: Sequence[bool], buffers: Sequence[memoryview], no: str, **seconds: float) -> None:
        """Count blocks under the names ``yes`` or ``no``, and the seconds of their call."""
        with self._lock:
            self._counts[yes] += done.count(True)
            self._counts[no] += done.count(False)
            self._counts[f"{yes}_bytes"] += sum(
                len(buffer) for buffer, is_done in zip(buffers, done, strict=True) if is_done
            )
            self._seconds.update(seconds)

    def statistics(self) -> SharedStoreStatistics:
        """Return the work of the store since it was made."""
        names = ("found", "found_bytes", "missed", "damaged", "stored", "stored_bytes", "dropped", "failed", "skipped")
        with self._lock:
            return SharedStoreStatistics(
                **{name: self._counts[name] for name in names}, get_s=self._seconds["get"], put_s=self._seconds["put"]
            )

    def close(self) -> None:
        """Wait for calls of other threads, then close connections. Later calls raise CacheError.

        A server that hangs is waited for ``timeout_s`` at most; connections are closed when it is back.
        """
        if self._calls.close():
            self._bounded.close(self._client.close)


def _batches(buffers: Sequence[memoryview]) -> Iterator[range]:
    """Yield the places of buffers that one request moves."""
    begin, size = 0, 0
    for end, buffer in enumerate(buffers):
        size += len(buffer) + CHECKSUM_BYTES
        if end > begin and (size > _BATCH_BYTES or end - begin >= _BATCH_KEYS):
            yield range(begin, end)
            begin, size = end, len(buffer) + CHECKSUM_BYTES
    yield range(begin, len(buffers))


def _copy(block: memoryview, buffer: memoryview) -> None:
    """Copy bytes as numpy does, which lets other threads run meanwhile."""
    np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(block, np.uint8))


def _checksum() -> Callable[[bytes, memoryview], bytes]:
    """Return XXH3 with 128 bits, which begins from the key. Its speed is in 0039."""
    try:
        import xxhash  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise ConfigError("a shared store needs the package xxhash: pip install 'hybridkv[hash]'") from error
    return lambda key, block: xxhash.xxh3_128_digest(block, xxhash.xxh3_64_intdigest(key))
