"""The blocks of a DiskStore that another process has open, read from its file without a lock.

    writer   make the record void | write the block | write the record
    reader   records whose sequence changed | read the block | compare its checksum

A record and a block have checksums, so what is half written is a miss. The reader may lag behind the writer. Then a new
block is a miss, and one that was evicted meanwhile is known until the next look at the records.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.stores.calls import check_keys, checked_into
from hybridkv.stores.disk_file import BlocksFile, Piece
from hybridkv.stores.disk_slots import Entry, geometry_of

_REST: Final = 50
"""A look at all records is followed by so many times its duration without another: at most 2% of a core."""


class DiskView:
    """Finds and reads the blocks of a DiskStore while another process writes it. A BlockStore that keeps nothing.

    For one thread at a time, on the machine of the writer. Before the file exists, every block is missing.

    Args:
        path: The folder of the store.
        max_bytes: As the store's.
        identity: As the store's.
        block_bytes: As the store's.

    Raises:
        ConfigError: As DiskStore, if the file exists.
    """

    def __init__(self, path: str | Path, max_bytes: int, identity: bytes, block_bytes: Sequence[int]) -> None:
        self._opened = partial(BlocksFile, Path(path), geometry_of(max_bytes, block_bytes), identity, writes=False)
        self._path = Path(path) / "blocks"
        self._file: BlocksFile | None = None
        self._seen = dict[int, NDArray[np.uint64]]()
        self._at = dict[tuple[int, int], Entry]()
        self._entries = dict[bytes, Entry]()
        self._next_s = 0.0
        self._look()

    def _look(self) -> None:
        """Follow the records that have changed, unless the last look was just now. O(slots)."""
        begun = time.monotonic()
        if begun < self._next_s:
            return
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._opened()
        for slab, slot, entry in self._file.changes(self._seen):
            gone = self._at.pop((slab, slot), None)
            if gone is not None and self._entries.get(gone.key) is gone:
                del self._entries[gone.key]
            if entry is not None:
                self._at[slab, slot] = entry
                other = self._entries.get(entry.key)
                if other is None or other.sequence < entry.sequence:  # else a replaced block, void soon
                    self._entries[entry.key] = entry
        now = time.monotonic()
        self._next_s = now + _REST * (now - begun)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its block is known. O(keys), and now and then O(slots).

        Args:
            keys: Keys of 1 to 64 bytes.
        """
        check_keys(keys)
        self._look()
        return [key in self._entries for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read blocks, and return for each whether the whole block arrived and its checksum holds. O(bytes).

        Args:
            keys: Keys of 1 to 64 bytes.
            into: A writable buffer for each key, as long as its block.

        Raises:
            ConfigError: As ``DiskStore.get``.
        """
        buffers = checked_into(keys, into)
        self._look()
        found = [False] * len(keys)
        if self._file is None:
            return found
        wanted = [(number, self._entries.get(key), buffers[number]) for number, key in enumerate(keys)]
        pieces = [Piece(at, one.place, data) for at, one, data in wanted if one is not None and one.length == len(data)]
        for number in self._file.read(pieces):
            entry = wanted[number][1]
            found[number] = entry is not None and self._file.checksum(buffers[number]) == entry.checksum
            if not found[number]:  # damaged or replaced: unknown until its record changes
                self._entries.pop(keys[number], None)
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Keep nothing: the other process writes.

        Args:
            keys: Keys of 1 to 64 bytes.
            blocks: Not read.
        """
        del blocks
        return [False] * len(keys)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
