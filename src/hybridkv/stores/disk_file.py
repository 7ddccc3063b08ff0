"""The file of a disk store: its format, its lock, and reads and writes of it.

    header   magic, version, sizes of slots and slabs, identity, seed of checksums | checksum, at the end of the page
    table    for each slab the size of its slots | checksum
    order    the last sequence, and (slab, slot) of all blocks, the least recently used first | checksum
    record   slab, slot, size, sequence, key, length and checksum of a block | checksum; zeros: void

Integers are little-endian. A damaged entry of the table loses nothing, because records name the size of their slot, and
a damaged order only changes what is evicted next. ``disk_slots`` draws where these lie.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.stores.disk_slots import (
    ORDER_ENTRY_BYTES,
    ORDER_HEAD_BYTES,
    PAGE,
    RECORD_BYTES,
    TABLE_ENTRY_BYTES,
    Entry,
    Geometry,
    Place,
)
from hybridkv.units import MiB, format_bytes, shown

FORMAT_VERSION: Final = 1
MOST_IDENTITY_BYTES: Final = 256
MOST_SIZES: Final = 64

_MAGIC: Final = b"hybridkv"
_HEAD: Final = struct.Struct("<8sIIQQIH256s")
"""Magic, version, number of sizes, seed, bytes of a slab, slabs, length of the identity, and the identity."""

_RECORD: Final = struct.Struct("<IIHHIQ16s64s16x")
"""Slab, slot, size, length of the key, length of the block, sequence, checksum, key; then 8 bytes of checksum."""

_SEQUENCE: Final = 2
"""The place of the sequence among the words of 8 bytes of a record."""

_ORDER: Final = struct.Struct("<QQQ")
"""Checksum, last sequence, and number of (slab, slot) that follow."""

_CHECK_BYTES: Final = 8
_NO_SIZE: Final = (1 << 32) - 1

_MOST_BUFFERS: Final = 512
"""Most blocks of one read or write: each may need a second buffer that fills its slot, and Linux takes 1,024."""

_MOST_RUN_BYTES: Final = 64 * MiB
"""Most bytes of one read or write. If it fails, it is repeated block by block."""

_ZEROS: Final = memoryview(bytes(PAGE))


class Piece(NamedTuple):
    """Bytes to be read or written: a number to name them, their slot, and their buffer."""

    number: int
    place: Place
    data: memoryview


class _At(NamedTuple):
    """A piece with its offset in the file, and how many bytes are reserved for it there."""

    number: int
    offset: int
    reserved: int
    data: memoryview


class SlabContent(NamedTuple):
    """A slab in the file: the index of its size, its blocks, and slots with a damaged record."""

    size: int
    entries: list[Entry]
    damaged: list[int]


class BlocksFile:
    """The open file of a store, locked if it is written. Reads and writes of blocks are thread safe, the rest is not.

    Args:
        folder: The folder of the file, made if it is missing.
        geometry: Sizes and offsets.
        identity: At most 256 bytes. A file of another identity is rejected.
        writes: Otherwise the file must exist, and another process may write it.

    Attributes:
        path: The file.

    Raises:
        ConfigError: The file is of another identity, version or geometry, is damaged, is in use, or cannot be made or
            read; or the package xxhash is missing.
    """

    def __init__(self, folder: Path, geometry: Geometry, identity: bytes, *, writes: bool = True) -> None:
        self.path = folder / "blocks"
        self._geometry = geometry
        self._seed = 0
        self._file = self._lock = -1
        self.checksum, self._record_checksum = _checksums()
        try:
            if writes:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = _locked(folder)
                if not self.path.exists():
                    self._create(identity)
            self._file = os.open(self.path, os.O_RDWR if writes else os.O_RDONLY)
            self._seed = self._check_head(os.pread(self._file, PAGE, 0), identity)
            if writes and os.fstat(self._file).st_size < geometry.file_bytes:  # cut off: what it lost reads as zeros
                _reserve(self._file, geometry.file_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"no disk store of {format_bytes(geometry.file_bytes)} can be opened in {folder}: {error.strerror}: "
                "give another folder, or less max_bytes if the disk is full"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file and let others open it."""
        for opened in (self._file, self._lock):
            if opened >= 0:
                os.close(opened)
        self._file = self._lock = -1

    # -- a new file

    def _create(self, identity: bytes) -> None:
        """Make the file of an empty store. It gets its name when it is whole."""
        geometry, new = self._geometry, self.path.with_name("blocks.new")
        new.unlink(missing_ok=True)  # of a process that died here
        self._seed = secrets.randbits(64)
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _reserve(file, geometry.file_bytes)
            os.pwrite(file, self._head(identity), 0)
            os.pwrite(file, b"".join(self._table_entry(slab, _NO_SIZE) for slab in range(geometry.num_slabs)), PAGE)
            os.fsync(file)
            new.rename(self.path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def _head(self, identity: bytes) -> bytes:
        geometry = self._geometry
        fields = len(geometry.sizes), self._seed, geometry.slab_bytes, geometry.num_slabs, len(identity), identity
        sizes = struct.pack(f"<{len(geometry.sizes)}I", *geometry.sizes)
        page = (_HEAD.pack(_MAGIC, FORMAT_VERSION, *fields) + sizes).ljust(PAGE - _CHECK_BYTES, b"\0")
        return page + self._record_checksum(page, 0)

    def _check_head(self, page: bytes, identity: bytes) -> int:
        """Return the seed of the file. ConfigError if another store made it."""
        other = f"delete {self.path.parent}, or give another folder"
        if len(page) < PAGE or page[-_CHECK_BYTES:] != self._record_checksum(page[:-_CHECK_BYTES], 0):
            raise ConfigError(f"the header of {self.path} is damaged: {other}")
        magic, version, num_sizes, seed, slab_bytes, num_slabs, length, found = _HEAD.unpack_from(page)
        if (magic, version) != (_MAGIC, FORMAT_VERSION):
            raise ConfigError(f"{self.path} has format {version}, and this version reads {FORMAT_VERSION}: {other}")
        if found[:length] != identity:
            raise ConfigError(
                f"{self.path} was made for another model, weights, dtype, layout or version (identity "
                f"{shown(found[:length])}, wanted {shown(identity)}): {other}"
            )
        made = Geometry(struct.unpack_from(f"<{num_sizes}I", page, _HEAD.size), slab_bytes, num_slabs)
        if made != self._geometry:
            raise ConfigError(
                f"{self.path} has {format_bytes(made.file_bytes)} with slots of {[*made.sizes]} bytes, but max_bytes "
                f"and block_bytes give {format_bytes(self._geometry.file_bytes)} with {[*self._geometry.sizes]}: give "
                f"the same as before, or {other}"
            )
        return int(seed)

    # -- blocks

    def read(self, pieces: Sequence[Piece]) -> set[int]:
        """Read blocks from their slots, and return the numbers of the blocks that were read. O(bytes).

        Args:
            pieces: Writable buffers, as long as their blocks.
        """
        return self._transferred(pieces, self._fill, memoryview(bytearray(PAGE)))

    def write(self, pieces: Sequence[Piece]) -> set[int]:
        """Write blocks into their slots, and return the numbers of the blocks that were written. O(bytes).

        Args:
            pieces: The bytes of the blocks.
        """
        return self._transferred(pieces, self._write, _ZEROS)

    def _transferred(
        self, pieces: Sequence[Piece], transfer: Callable[[Sequence[memoryview], int], None], padding: memoryview
    ) -> set[int]:
        """Read or write ``pieces`` in long runs, and return the numbers of the pieces that succeeded."""
        sizes, done = self._geometry.sizes, set[int]()
        for run in _runs([_At(n, self._geometry.block_offset(at), sizes[at.size], data) for n, at, data in pieces]):
            try:
                transfer(_buffers(run, padding), run[0].offset)
                done.update(piece.number for piece in run)
            except OSError:
                for piece in run:
                    with suppress(OSError):
                        transfer([piece.data], piece.offset)
                        done.add(piece.number)
        return done

    def _fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill ``buffers`` from ``offset``. OSError if the file ends before."""
        while buffers:
            count = os.preadv(self._file, buffers, offset)
            if not count:
                raise OSError(errno.EIO, "the file is too short", str(self.path))
            buffers, offset = _after(buffers, count), offset + count

    def _write(self, buffers: Sequence[memoryview], offset: int) -> None:
        while buffers:
            count = os.pwritev(self._file, buffers, offset)
            buffers, offset = _after(buffers, count), offset + count

    # -- records

    def write_records(self, entries: Sequence[Entry]) -> None:
        """Write the records of blocks. O(entries).

        Args:
            entries: Blocks that were written.

        Raises:
            OSError: Some of the records may be written.
        """
        self._write_records([(entry.place, self._record(entry)) for entry in entries])

    def make_void(self, places: Sequence[Place]) -> None:
        """Make the records of slots void. O(places).

        Args:
            places: Slots.

        Raises:
            OSError: Some of the records may be void.
        """
        self._write_records([(place, bytes(RECORD_BYTES)) for place in places])

    def _write_records(self, records: Sequence[tuple[Place, bytes]]) -> None:
        offset = self._geometry.record_offset
        for run in _runs([_At(0, offset(place), RECORD_BYTES, memoryview(record)) for place, record in records]):
            self._write([piece.data for piece in run], run[0].offset)

    def _record(self, entry: Entry) -> bytes:
        size, slab, slot = entry.place
        fields = slab, slot, size, len(entry.key), entry.length, entry.sequence, entry.checksum, entry.key
        content = _RECORD.pack(*fields)
        return content + self._record_checksum(content, self._seed)

    def _entry(self, record: bytes, slab: int, slot: int) -> Entry | None:
        """Return the block of the record of a slot; ``None`` if it is void or damaged."""
        content = record[: _RECORD.size]
        if self._record_checksum(content, self._seed) != record[_RECORD.size :]:
            return None
        at_slab, at_slot, size, key_length, length, sequence, checksum, key = _RECORD.unpack(content)
        if (at_slab, at_slot) != (slab, slot):
            return None
        return Entry(key[:key_length], Place(size, slab, slot), length, checksum, sequence)

    # -- slabs

    def assign(self, slab: int, size: int) -> None:
        """Make all records of an empty slab void, then note its size. O(slots).

        Args:
            slab: The slab.
            size: The index of the size of its slots.

        Raises:
            OSError: Some of the records may be void.
        """
        records = bytes(self._geometry.num_slots[0] * RECORD_BYTES)
        self._write([memoryview(records)], self._geometry.record_offset(Place(size, slab, 0)))
        self._write([memoryview(self._table_entry(slab, size))], PAGE + slab * TABLE_ENTRY_BYTES)

    def _table_entry(self, slab: int, size: int) -> bytes:
        content = struct.pack("<I", size)
        return content + self._record_checksum(content + struct.pack("<I", slab), self._seed)[:4]

    def slabs(self) -> Iterator[SlabContent | None]:
        """Yield the content of each slab; ``None`` without a size. O(slots)."""
        table = self._content(PAGE, TABLE_ENTRY_BYTES * self._geometry.num_slabs)
        for slab, begin in enumerate(range(0, len(table), TABLE_ENTRY_BYTES)):
            yield self._slab(slab, table[begin : begin + TABLE_ENTRY_BYTES])

    def _slab(self, slab: int, table_entry: bytes) -> SlabContent | None:
        size = int.from_bytes(table_entry[:4], "little")
        if table_entry == self._table_entry(slab, _NO_SIZE):
            return None
        if size >= len(self._geometry.sizes) or table_entry != self._table_entry(slab, size):
            return self._slab_without_size(slab)
        entries, damaged = list[Entry](), list[int]()
        for slot, entry in self._records(slab, size):
            if entry is None or entry.place.size != size:
                damaged.append(slot)
            else:
                entries.append(entry)
        return SlabContent(size, entries, damaged)

    def _slab_without_size(self, slab: int) -> SlabContent | None:
        """Return the content of a slab with a damaged entry of the table: its records name the size."""
        for _, entry in self._records(slab, 0):  # the smallest slots have the most records
            if entry is not None:
                table_entry = self._table_entry(slab, entry.place.size)
                with suppress(OSError):
                    self._write([memoryview(table_entry)], PAGE + slab * TABLE_ENTRY_BYTES)
                return self._slab(slab, table_entry)
        return None

    def _records(self, slab: int, size: int) -> Iterator[tuple[int, Entry | None]]:
        """Yield the slot and block of each record of a slab that is not void; ``None`` if it is damaged."""
        slots = self._geometry.num_slots[size]
        content = self._content(self._geometry.record_offset(Place(size, slab, 0)), slots * RECORD_BYTES)
        is_used = np.frombuffer(content, np.uint8).reshape(slots, RECORD_BYTES).any(axis=1)
        for slot in np.flatnonzero(is_used).tolist():
            yield slot, self._entry(content[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES], slab, slot)

    def changes(self, seen: dict[int, NDArray[np.uint64]]) -> Iterator[tuple[int, int, Entry | None]]:
        """Yield slab, slot and block of each record that another process changed; ``None`` for no block. O(slots).

        Args:
            seen: The sequence of each record by slab, which this call updates; empty at first.
        """
        table = np.frombuffer(self._content(PAGE, TABLE_ENTRY_BYTES * self._geometry.num_slabs), "<u4")[::2]
        for slab in np.flatnonzero(table < len(self._geometry.sizes)).tolist():
            slots = self._geometry.num_slots[table[slab]]
            content = self._content(self._geometry.record_offset(Place(0, slab, 0)), slots * RECORD_BYTES)
            now = np.frombuffer(content, "<u8").reshape(slots, -1)[:, _SEQUENCE].copy()
            before = seen.get(slab, now[:0])
            if len(before) != slots:  # the slab has another size than before
                yield from ((slab, slot, None) for slot in range(len(before)))
                before = np.zeros_like(now)
            for slot in np.flatnonzero(now != before).tolist():
                entry = self._entry(content[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES], slab, slot)
                if entry is None:
                    now[slot] = 0  # void, or half written: then it is read again
                yield slab, slot, entry
            seen[slab] = now

    def _content(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes of the file; zeros if they cannot be read."""
        content = bytearray(count)
        with suppress(OSError):
            self._fill([memoryview(content)], offset)
        return bytes(content)

    # -- the order of use

    def save_order(self, sequence: int, entries: Sequence[Entry]) -> None:
        """Save the order of use. O(entries).

        Args:
            sequence: The last sequence of a put.
            entries: All blocks, the least recently used first.

        Raises:
            OSError: No order may be saved.
        """
        places = np.array([entry.place[1:] for entry in entries], "<u4").tobytes()
        content = struct.pack("<QQ", sequence, len(entries)) + places
        self._write([memoryview(self._record_checksum(content, self._seed) + content)], self._geometry.order_offset)

    def saved_order(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the last sequence and (slab, slot) of the saved order; nothing of one that is damaged. O(entries)."""
        offset = self._geometry.order_offset
        _, sequence, count = _ORDER.unpack(self._content(offset, ORDER_HEAD_BYTES))
        if count > self._geometry.order_bytes // ORDER_ENTRY_BYTES:
            return 0, []
        content = self._content(offset, ORDER_HEAD_BYTES + ORDER_ENTRY_BYTES * count)
        if self._record_checksum(content[_CHECK_BYTES:], self._seed) != content[:_CHECK_BYTES]:
            return 0, []
        places = np.frombuffer(content, "<u4", offset=ORDER_HEAD_BYTES).reshape(-1, 2)
        return sequence, [(slab, slot) for slab, slot in places.tolist()]

    def sync(self) -> None:
        """Write all to the disk.

        Raises:
            OSError: The disk rejected a write.
        """
        os.fsync(self._file)


def _checksums() -> tuple[Callable[[memoryview], bytes], Callable[[bytes, int], bytes]]:
    """Return XXH3 with 128 bits for blocks, and with 64 bits and a seed for records.

    XXH3 takes 55 GB/s of memory on one core, CRC-32 of zlib 4 GB/s, SHA-256 1.6 GB/s and BLAKE2b 0.7 GB/s (0039).
    """
    try:
        import xxhash  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise ConfigError("a disk store needs the package xxhash: pip install 'hybridkv[hash]'") from error
    return xxhash.xxh3_128_digest, xxhash.xxh3_64_digest


def _locked(folder: Path) -> int:
    """Lock ``folder`` against other stores, and return the open file of the lock. It ends with the process."""
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError as error:
        raise ConfigError("a disk store needs flock, which this system lacks: use Linux or macOS") from error
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise ConfigError(f"{folder} is in use by another store: close it, or give another folder") from error
    return file


def _reserve(file: int, num_bytes: int) -> None:
    """Reserve space on the disk, so that no later write finds it full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:  # macOS
        os.ftruncate(file, num_bytes)


def _runs(pieces: list[_At]) -> Iterator[list[_At]]:
    """Yield pieces that follow each other in the file, as far as one call of the system takes them."""
    pieces.sort(key=lambda piece: piece.offset)
    begin = 0
    for end, (one, after) in enumerate(pairwise(pieces), 1):
        is_adjacent = after.offset == one.offset + one.reserved and one.reserved - len(one.data) <= PAGE
        is_long = end - begin >= _MOST_BUFFERS or after.offset - pieces[begin].offset >= _MOST_RUN_BYTES
        if is_long or not is_adjacent:
            yield pieces[begin:end]
            begin = end
    if begin < len(pieces):
        yield pieces[begin:]


def _buffers(run: Sequence[_At], padding: memoryview) -> list[memoryview]:
    """Return the buffers of a run, each padded to its slot: to write a part of a page, the kernel may read the page."""
    buffers = list[memoryview]()
    for piece in run:
        buffers.append(piece.data)
        gap = piece.reserved - len(piece.data)
        if 0 < gap <= PAGE:
            buffers.append(padding[:gap])
    return buffers


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return ``buffers`` without their first ``count`` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []
