"""A store of blocks in one file on a disk, which survives its process (docs/design/0039).

    put    take slots, make their old records void | write the blocks | write their records
    get    look up | read the blocks | compare their checksums

A record names key, slot, length and checksum of a block, and has a checksum of its own. It is written after the block,
and made void before its slot is written again. So a process that dies at any moment leaves each block whole or void:
what it wrote stays in the kernel's memory. After a loss of power, writes may be missing in any order. Then the checksum
of the block decides.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hybridkv.arguments import instance, integer
from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores.calls import OpenCalls, check_keys, check_sequence, checked_blocks, checked_into
from hybridkv.stores.changes import UNHEARD, Hears
from hybridkv.stores.disk_file import MOST_IDENTITY_BYTES, MOST_SIZES, BlocksFile, Piece
from hybridkv.stores.disk_slots import Entry, Place, Slots, geometry_of
from hybridkv.units import MOST_BYTES, MiB

_MOST_BLOCK_BYTES: Final = 16 * MiB


@dataclass(frozen=True, slots=True)
class DiskStoreStatistics:
    """Blocks and work of a disk store since it was opened.

    Attributes:
        blocks: Blocks that can be found.
        block_bytes: Their bytes.
        found: Blocks that were read.
        found_bytes: Their bytes.
        missed: Blocks that ``get`` did not find, damaged ones among them.
        damaged: Blocks that could not be read, or had another checksum. They are forgotten.
        stored: Blocks that were written.
        stored_bytes: Their bytes.
        dropped: Blocks that were not written: no slot was free, or the disk rejected the write.
        evicted: Blocks that made room for others.
    """

    blocks: int
    block_bytes: int
    found: int
    found_bytes: int
    missed: int
    damaged: int
    stored: int
    stored_bytes: int
    dropped: int
    evicted: int


class DiskStore:
    """Keeps blocks in slots of one preallocated file. A BlockStore; the guarantees are listed there.

    Thread safe: reads and writes of several threads run at once. Blocks are not encrypted; the folder is made for its
    user alone. If a key is put again, its block is replaced. One process at a time opens a folder.

    After the process dies, all blocks of calls that returned are found. After a loss of power, blocks since the
    last ``sync`` may be missing, and removed or replaced blocks may be back. No block has wrong bytes.

    Args:
        path: A folder, which is made if it is missing.
        max_bytes: Most bytes of the file, all of them reserved when it is made.
        identity: 1 to 256 bytes, a hash of all that gives a block's bytes their meaning: model, weights, dtype, layout
            and version of the library. A folder of another identity is rejected.
        block_bytes: Sizes of blocks, 1 to 64 of them, from 1 byte to 16 MiB. Each gets slots of its own size; a
            shorter block takes the smallest slot that holds it.
        heard: Is told of each block that is kept, used, evicted, damaged or removed.

    Attributes:
        path: The folder.

    Raises:
        ConfigError: A value is out of range; the folder is of another identity, version or size, is damaged, is in use
            or cannot be written; the disk has no room; or the package xxhash is missing.
    """

    def __init__(
        self, path: str | Path, max_bytes: int, identity: bytes, block_bytes: Sequence[int], heard: Hears = UNHEARD
    ) -> None:
        integer("max_bytes", max_bytes, 1, MOST_BYTES)
        if not 1 <= len(instance("identity", identity, bytes)) <= MOST_IDENTITY_BYTES:
            raise ConfigError(f"identity must have 1 to {MOST_IDENTITY_BYTES} bytes, got {len(identity)}: hash it")
        check_sequence("block_bytes", block_bytes)
        if not 1 <= len(block_bytes) <= MOST_SIZES:
            raise ConfigError(f"block_bytes must have 1 to {MOST_SIZES} sizes, got {len(block_bytes)}")
        for one in block_bytes:
            integer("each of block_bytes", one, 1, _MOST_BLOCK_BYTES)
        self.path = Path(path)
        self._geometry = geometry_of(max_bytes, block_bytes)
        self._lock = threading.Lock()
        self._calls = OpenCalls(f"the store in {self.path}")
        self._counts = Counter[str]()
        self._file = BlocksFile(self.path, self._geometry, identity)
        self._slots = Slots(self._geometry, self._file.assign, heard)
        self._sequence = self._load()

    def _load(self) -> int:
        """Find the blocks of the file, and return the last sequence. O(slots)."""
        slabs = list(self._file.slabs())
        newest = dict[bytes, Entry]()
        for entry in (entry for slab in slabs if slab is not None for entry in slab.entries):
            other = newest.get(entry.key)
            if other is None or other.sequence < entry.sequence:
                newest[entry.key] = entry
        for number, slab in enumerate(slabs):
            if slab is not None:
                replaced = [entry.place.slot for entry in slab.entries if newest[entry.key] is not entry]
                live = [entry for entry in slab.entries if newest[entry.key] is entry]
                self._slots.restore(number, slab.size, live, slab.damaged + replaced)
        last, order = self._file.saved_order()
        at = {place: number for number, place in enumerate(order)}

        def use(entry: Entry) -> tuple[int, int]:
            return at.get(entry.place[1:], -1) if entry.sequence <= last else len(at), entry.sequence

        self._slots.order(sorted(newest.values(), key=use))
        with suppress(OSError):  # a replaced block must not be back after its later one is removed
            self._make_void(list(self._slots.all_stale()))
        return max([last, *(entry.sequence for entry in newest.values())])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._slots.entries)

    # -- the calls

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its block is known. Its bytes are not read. O(keys).

        Args:
            keys: Keys of 1 to 64 bytes.
        """
        check_keys(keys)
        with self._calls, self._lock:
            return [key in self._slots.entries for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read blocks, and return for each whether the whole block arrived and its checksum holds.

        A block that is damaged is forgotten. Blocks in adjacent slots are read in one call of the system. O(bytes).

        Args:
            keys: Keys of 1 to 64 bytes.
            into: A writable buffer for each key, as long as its block. Where the answer is False, its content is
                undefined.

        Raises:
            ConfigError: A buffer cannot be written, or is not contiguous; or there are more or fewer buffers than keys.
        """
        buffers = checked_into(keys, into)
        with self._calls:
            with self._lock:
                entries = [self._slots.entries.get(key) for key in keys]
            pieces = [
                Piece(number, entry.place, buffer)
                for number, (entry, buffer) in enumerate(zip(entries, buffers, strict=True))
                if entry is not None and entry.length == len(buffer)
            ]
            arrived = self._file.read(pieces)
            checksums = {piece.number: self._file.checksum(piece.data) for piece in pieces if piece.number in arrived}
            with self._lock:
                found, damaged = [False] * len(keys), list[Entry]()
                for number in (piece.number for piece in pieces):
                    entry = entries[number]
                    if entry is not None and checksums.get(number) == entry.checksum:
                        found[number] = True
                        self._slots.touch(entry)
                        self._counts["found_bytes"] += entry.length
                    elif entry is not None and self._slots.entries.get(entry.key) is entry:
                        self._slots.drop(entry)  # if it is not live, it was evicted while it was read
                        damaged.append(entry)
                self._counts["found"] += found.count(True)
                self._counts["missed"] += found.count(False)
                self._counts["damaged"] += len(damaged)
                with suppress(OSError):  # then their slots stay stale, and are not written before this succeeds
                    self._make_void([entry.place for entry in damaged])
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Write blocks, and return for each whether it is kept.

        False: all slots are being written, or the disk rejected the write. Blocks in adjacent slots are written in one
        call of the system. O(bytes), amortised.

        Args:
            keys: Keys of 1 to 64 bytes.
            blocks: The bytes of each block. They may change after the call.

        Raises:
            ConfigError: A key or a block has no bytes, or more than the store holds; a block is not contiguous; or
                there are more or fewer blocks than keys.
        """
        buffers = checked_blocks(keys, blocks)
        sizes = [self._geometry.size_of(len(buffer)) for buffer in buffers]
        with self._calls:
            places = self._take(sizes)
            pieces = [Piece(number, place, buffers[number]) for number, place in enumerate(places) if place is not None]
            try:
                written = self._file.write(pieces)
                checksums = {number: self._file.checksum(buffers[number]) for number in written}
            except BaseException:
                with self._lock:
                    for _, place, _ in pieces:
                        self._slots.give_back(place, stale=False)
                raise
            with self._lock:
                kept = self._publish(keys, buffers, places, checksums)
                lengths = [len(buffer) for buffer, is_kept in zip(buffers, kept, strict=True) if is_kept]
                self._counts["dropped"] += kept.count(False)
                self._counts["stored"] += len(lengths)
                self._counts["stored_bytes"] += sum(lengths)
        return kept

    def _take(self, sizes: Sequence[int]) -> list[Place | None]:
        """Take slots and make their records void, in the order of the file for each size."""
        with self._lock:
            places = [self._slots.take(size) for size in sizes]
            taken = [place for place in places if place is not None]
            try:
                self._make_void(taken)
            except OSError:
                for place in taken:
                    self._slots.give_back(place, stale=False)
                return [None] * len(sizes)
        by_size = {size: iter(sorted(place for place in taken if place.size == size)) for size in set(sizes)}
        return [place and next(by_size[place.size]) for place in places]

    def _publish(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        places: Sequence[Place | None],
        checksums: dict[int, bytes],
    ) -> list[bool]:
        """Write the records of written blocks, and free the slots of the others."""
        entries = dict[int, Entry]()
        for number, place in enumerate(places):
            if number in checksums and place is not None:
                self._sequence += 1
                length = len(buffers[number])
                entries[number] = Entry(keys[number], place, length, checksums[number], self._sequence)
            elif place is not None:
                self._slots.give_back(place, stale=False)
        try:
            self._file.write_records([*entries.values()])
        except OSError:
            for entry in entries.values():
                self._slots.give_back(entry.place, stale=True)
            with suppress(OSError):
                self._make_void([entry.place for entry in entries.values()])
            return [False] * len(keys)
        replaced = [self._slots.publish(entry) for entry in entries.values()]
        with suppress(OSError):  # the record of the new block is later, so it holds
            self._make_void([entry.place for entry in replaced if entry is not None])
        return [number in entries for number in range(len(keys))]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that blocks were used, so that others are evicted before them. O(keys).

        Args:
            keys: Keys of 1 to 64 bytes. Unknown ones are ignored.
        """
        check_keys(keys)
        with self._calls, self._lock:
            for key in keys:
                entry = self._slots.entries.get(key)
                if entry is not None:
                    self._slots.touch(entry)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove blocks, and return for each whether it was there. O(keys).

        Args:
            keys: Keys of 1 to 64 bytes.

        Raises:
            CacheError: The disk rejected the write. The blocks are gone, but may be back when the folder is opened.
        """
        check_keys(keys)
        with self._calls, self._lock:
            gone, there = list[Entry](), list[bool]()
            for key in keys:
                entry = self._slots.entries.get(key)
                there.append(entry is not None)
                if entry is not None:
                    self._slots.drop(entry)
                    gone.append(entry)
            try:
                self._make_void([entry.place for entry in gone])
            except OSError as error:
                raise CacheError(
                    f"{self._file.path} rejected a write ({error.strerror}), so removed blocks may be back when the "
                    "folder is opened: check the disk, then call sync"
                ) from error
        return there

    def sync(self) -> None:
        """Write all blocks and the order of use to the disk, so that a loss of power leaves them. O(bytes since then).

        Raises:
            CacheError: The disk rejected the write.
        """
        with self._calls:
            try:
                with self._lock:
                    self._make_void(list(self._slots.all_stale()))
                    self._file.save_order(self._sequence, self._slots.by_use())
                self._file.sync()
            except OSError as error:
                raise CacheError(f"{self._file.path} cannot be written: {error.strerror}: check the disk") from error

    def statistics(self) -> DiskStoreStatistics:
        """Return the blocks of the store, and its work since it was opened. O(blocks)."""
        with self._lock:
            names = ("found", "found_bytes", "missed", "damaged", "stored", "stored_bytes", "dropped")
            entries = self._slots.entries
            return DiskStoreStatistics(
                blocks=len(entries),
                block_bytes=sum(entry.length for entry in entries.values()),
                evicted=self._slots.evicted,
                **{name: self._counts[name] for name in names},
            )

    def close(self) -> None:
        """Wait for calls of other threads, save the order of use, and let others open the folder.

        Later calls raise CacheError; ``close`` again does nothing.
        """
        if self._calls.close():
            with self._lock:
                with suppress(OSError):  # the order since the last save is lost, and no block
                    self._make_void(list(self._slots.all_stale()))
                    self._file.save_order(self._sequence, self._slots.by_use())
                self._file.close()

    def check(self) -> None:
        """Check all invariants of slots and blocks in memory. O(slots).

        Raises:
            CacheError: One does not hold.
        """
        with self._lock:
            self._slots.check()

    def _make_void(self, places: Iterable[Place]) -> None:
        """Make the stale records among ``places`` void."""
        stale = self._slots.stale(places)
        self._file.make_void(stale)
        self._slots.cleared(stale)
