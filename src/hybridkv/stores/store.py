"""The protocol of stores that keep blocks by key outside of an engine's memory: a disk, or a service on the network.

    exists   which blocks can be read now
    get      read blocks into buffers; a block arrives whole, or the answer is False
    put      write blocks; a block is kept whole, or the answer is False

A caller gives a key one content: the key covers the tokens, the group and whatever else decides the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

MOST_KEY_BYTES: Final = 64
"""Longest key that every store takes."""
MOST_PIECE_BYTES: Final = 8 << 20
"""Longest block that every store takes; a longer one is put in pieces."""


def pieces_of(size: int) -> list[int]:
    """Return the sizes of the pieces of a block.

    Args:
        size: Bytes of the block.
    """
    return [min(MOST_PIECE_BYTES, size - first) for first in range(0, size, MOST_PIECE_BYTES)]


def share_key(key: bytes, number: int) -> bytes:
    """Return the key of a share of a block; share 0 has that of the block.

    Args:
        key: The key of the block.
        number: The number of the share.
    """
    return key + number.to_bytes(2, "little") if number else key


class BlockStore(Protocol):
    """Blocks by key. A store is a cache: it may drop any block at any time, and then answers False.

    Every implementation guarantees:

    * A block is found whole or not at all, also after this process or another one was killed in the middle of a call.
    * A block that is found has the bytes that were put under its key. If these bytes were damaged, it is not found.
    * A block that is missing, damaged or out of reach raises nothing: the answer is False.
    * If a key was put more than once with different bytes, any one of these contents may be found.

    Each implementation says whether several threads may call it at once.
    """

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its block can be read now. A later ``get`` may still answer False.

        Args:
            keys: Keys of 1 to 64 bytes.
        """
        ...

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read blocks, and return for each whether the whole block arrived and its checksum holds.

        Args:
            keys: Keys of 1 to 64 bytes.
            into: A writable buffer for each key, as long as its block. Where the answer is False, its content is
                undefined.
        """
        ...

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Write blocks, and return for each whether it is kept. False: dropped, for example because there is no room.

        Args:
            keys: Keys of 1 to 64 bytes.
            blocks: The bytes of each block. They may change after the call.
        """
        ...

    def close(self) -> None:
        """Wait for calls of other threads, then close files and connections. Later calls raise CacheError."""
        ...
