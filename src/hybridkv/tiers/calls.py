"""Arguments of the calls of stores, and the calls that are open: the same for every store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores.store import MOST_KEY_BYTES
from hybridkv.units import shown


class OpenCalls:
    """The calls of all threads that a store has begun and not ended: ``with`` it around each. Thread safe.

    Args:
        store: The store's name in messages.

    Raises:
        CacheError: A call begins after ``close``.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._idle = threading.Condition()
        self._count = 0
        self._is_closed = False

    def __enter__(self) -> None:
        with self._idle:
            if self._is_closed:
                raise CacheError(f"{self._store} is closed: open it again")
            self._count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._idle:
            self._count -= 1
            if not self._count:
                self._idle.notify_all()

    def close(self) -> bool:
        """Reject later calls, wait for those of other threads, and return whether this is the first ``close``."""
        with self._idle:
            is_first, self._is_closed = not self._is_closed, True
            self._idle.wait_for(lambda: not self._count)
        return is_first


def check_sequence(name: str, values: object) -> None:
    """Check that ``values`` is a sequence, but no text or bytes.

    Args:
        name: Its name in the message.
        values: A list, a tuple or another sequence.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(values, list | tuple):
        return
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} must be a list, got {shown(values)}")


def check_keys(keys: Sequence[bytes]) -> None:
    """Check the keys of a call. O(keys).

    Args:
        keys: Bytes, 1 to 64 of them for each key.

    Raises:
        ConfigError: A key is something else, or ``keys`` is no sequence.
    """
    check_sequence("keys", keys)
    for key in keys:
        if not isinstance(key, bytes) or not 1 <= len(key) <= MOST_KEY_BYTES:
            raise ConfigError(f"a key must be bytes, 1 to {MOST_KEY_BYTES} of them, got {shown(key)}: hash it")


def checked_blocks(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[memoryview]:
    """Check keys and blocks of a call, and return the blocks as views of bytes. O(keys).

    Args:
        keys: Bytes, 1 to 64 of them for each key.
        blocks: A contiguous buffer of at least 1 byte for each key.

    Raises:
        ConfigError: A key or a block is something else, or there are more or fewer blocks than keys.
    """
    check_keys(keys)
    check_sequence("blocks", blocks)
    if len(keys) != len(blocks):
        raise ConfigError(f"{len(keys)} keys came with {len(blocks)} blocks: give one block for each key")
    buffers = list[memoryview]()
    for block in blocks:
        try:
            buffer = memoryview(block).cast("B")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"each block must be a contiguous buffer, got {shown(block)} ({error})") from error
        if not len(buffer):
            raise ConfigError("a block must have at least 1 byte, got 0")
        buffers.append(buffer)
    return buffers


def checked_into(keys: Sequence[bytes], into: Sequence[memoryview]) -> list[memoryview]:
    """Check keys and buffers of a ``get``, and return the buffers as views of bytes. O(keys).

    Args:
        keys: Bytes, 1 to 64 of them for each key.
        into: A contiguous, writable buffer of at least 1 byte for each key.

    Raises:
        ConfigError: A key or a buffer is something else, or there are more or fewer buffers than keys.
    """
    buffers = checked_blocks(keys, into)
    for buffer in buffers:
        if buffer.readonly:
            raise ConfigError("each of into must be writable: give the memoryview of a bytearray or an array")
    return buffers
