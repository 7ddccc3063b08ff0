"""Where the blocks of a disk store lie: slabs, slots, and which block is evicted next. No files.

    blocks file   [ header | slab table | order of use | slab 0 | slab 1 | ... ]
    slab          [ records of its slots | slot 0 | slot 1 | ... ]

A slab has slots of one size. It takes a size when it is first needed, and another one after all its blocks were
evicted. The records of a slab begin at its first byte whatever its size of slots is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Final, NamedTuple

from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores.changes import UNHEARD, Hears
from hybridkv.units import KiB, MiB, format_bytes, round_up

PAGE: Final = 4 * KiB
"""Regions and large slots begin at pages: a write of whole pages reads nothing from the disk."""

RECORD_BYTES: Final = 128
TABLE_ENTRY_BYTES: Final = 8
ORDER_HEAD_BYTES: Final = 24
ORDER_ENTRY_BYTES: Final = 8

_SLAB_BYTES: Final = 16 * MiB
"""Runs of adjacent slots end with their slab: slabs of 1 MiB are read 2.5 times as slowly from a disk (0039)."""

_LEAST_SLABS: Final = 8
"""Fewest slabs for each size: a size takes whole slabs from others."""

_MOST_SLABS: Final = 1 << 14
"""More slabs of a large store cost memory and time when it is opened."""

_MOST_HEADS: Final = 8
"""Least recently used blocks of a size that are looked at for a slab without writes in flight."""


class Place(NamedTuple):
    """A slot: the index of its size, its slab, and its number in the slab."""

    size: int
    slab: int
    slot: int


@dataclass(frozen=True)
class Geometry:
    """Sizes and offsets of a blocks file. Offsets and sizes are in bytes.

    Attributes:
        sizes: Bytes of a slot by size, ascending.
        slab_bytes: Bytes of a slab, with its records.
        num_slabs: Number of slabs.
    """

    sizes: tuple[int, ...]
    slab_bytes: int
    num_slabs: int

    @cached_property
    def num_slots(self) -> tuple[int, ...]:
        """Number of slots in a slab, by size."""
        return tuple(_num_slots(self.slab_bytes, size) for size in self.sizes)

    @property
    def order_offset(self) -> int:
        """Offset of the order of use, which follows the slab table."""
        return PAGE + round_up(TABLE_ENTRY_BYTES * self.num_slabs, PAGE)

    @property
    def order_bytes(self) -> int:
        """Bytes of the order of use: a head, and an entry for each slot."""
        return round_up(ORDER_HEAD_BYTES + ORDER_ENTRY_BYTES * self.num_slabs * self.num_slots[0], PAGE)

    @cached_property
    def slabs_offset(self) -> int:
        """Offset of the first slab."""
        return self.order_offset + self.order_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.slabs_offset + self.num_slabs * self.slab_bytes

    def record_offset(self, place: Place) -> int:
        """Return the offset of the record of a slot."""
        return self.slabs_offset + place.slab * self.slab_bytes + place.slot * RECORD_BYTES

    def block_offset(self, place: Place) -> int:
        """Return the offset of a slot. Slots end where their slab ends."""
        end = self.slabs_offset + (place.slab + 1) * self.slab_bytes
        return end - (self.num_slots[place.size] - place.slot) * self.sizes[place.size]

    def size_of(self, num_bytes: int) -> int:
        """Return the index of the smallest size with slots that hold ``num_bytes``.

        Raises:
            ConfigError: No slot is that large.
        """
        if num_bytes > self.sizes[-1]:
            raise ConfigError(
                f"a block of {num_bytes} bytes is larger than every slot, and the largest has {self.sizes[-1]}: "
                "name its size in block_bytes"
            )
        return bisect_left(self.sizes, num_bytes)


def _num_slots(slab_bytes: int, slot_bytes: int) -> int:
    """Return how many slots fit a slab, with their records."""
    return slab_bytes // (slot_bytes + RECORD_BYTES)


def slot_bytes(block_bytes: int) -> int:
    """Return the bytes of a slot: whole pages for large blocks, where they waste at most a sixteenth."""
    return round_up(block_bytes, 256 if block_bytes < 16 * PAGE else PAGE)


def geometry_of(max_bytes: int, block_bytes: Sequence[int]) -> Geometry:
    """Return the sizes and slabs of a store of at most ``max_bytes``.

    Of eight sizes of slabs, the one that wastes the least of any size of slots is chosen.

    Args:
        max_bytes: Most bytes of the file.
        block_bytes: Sizes of blocks, in bytes.

    Raises:
        ConfigError: The file cannot hold a slab for each size.
    """
    sizes = tuple(sorted({slot_bytes(one) for one in block_bytes}))
    largest, limit = sizes[-1], max_bytes // (_LEAST_SLABS * len(sizes))
    first = max(1, min(max(_SLAB_BYTES, max_bytes // _MOST_SLABS), limit) // largest)
    slabs = [round_up(n * (largest + RECORD_BYTES), PAGE) for n in range(first, first + 8)]
    fits = [one for one in slabs if one <= limit] or slabs[:1]
    slab_bytes = min(fits, key=lambda one: (max(_waste(max_bytes, one, size) for size in sizes), one))
    of_each = slab_bytes + TABLE_ENTRY_BYTES + ORDER_ENTRY_BYTES * _num_slots(slab_bytes, sizes[0])
    geometry = Geometry(sizes, slab_bytes, max(0, max_bytes - PAGE) // of_each)
    while geometry.num_slabs and geometry.file_bytes > max_bytes:  # what is rounded up to pages
        geometry = Geometry(sizes, slab_bytes, geometry.num_slabs - 1)
    if geometry.num_slabs < len(sizes):
        least = Geometry(sizes, slab_bytes, len(sizes)).file_bytes
        raise ConfigError(
            f"max_bytes {max_bytes} is too small for blocks of {format_bytes(largest)}: give at least {least}"
        )
    return geometry


def _waste(max_bytes: int, slab_bytes: int, slot_bytes: int) -> float:
    """Return the share of ``max_bytes`` that is not in slots, if all slabs have slots of ``slot_bytes``."""
    return 1 - max_bytes // slab_bytes * _num_slots(slab_bytes, slot_bytes) * slot_bytes / max_bytes


@dataclass(slots=True, eq=False)
class Entry:
    """A block that can be found. Only ``used`` changes.

    Attributes:
        key: Its key.
        place: Its slot.
        length: Its bytes.
        checksum: 16 bytes, XXH3-128 of its bytes.
        sequence: Number of its put; of two records of one key the later one holds.
        used: Time of its last use, in uses of all blocks.
    """

    key: bytes
    place: Place
    length: int
    checksum: bytes
    sequence: int
    used: int = 0


@dataclass(slots=True, eq=False)
class _Slab:
    """A slab. ``size`` is -1 before it has one.

    Each slot is free, in flight (taken, and its block not yet published), or live.

    Attributes:
        size: The index of the size of its slots.
        free: Free slots; the last is taken next.
        live: Blocks by slot.
        in_flight: Number of slots that are being written.
        stale: Slots that are not live, whose record on the disk may be whole.
        used: Sum of ``Entry.used`` of its blocks.
    """

    size: int = -1
    free: list[int] = field(default_factory=list)
    live: dict[int, Entry] = field(default_factory=dict)
    in_flight: int = 0
    stale: set[int] = field(default_factory=set)
    used: int = 0


class Slots:
    """The blocks of a store by key, and its free slots. Not thread safe.

    A slot comes from a slab with room, from an empty slab, or from an eviction. The least recently used block of its
    size is evicted, or a whole slab of another size if its blocks were on average used before that.

    Args:
        geometry: Sizes and number of slabs.
        assign: Called with (slab, size) before an empty slab takes another size. It makes all records of the slab void
            on the disk; if it raises OSError, the slab stays empty.
        heard: Is told of each block that is published, used or dropped.

    Attributes:
        geometry: Sizes and number of slabs.
        entries: Blocks by key.
        evicted: Number of blocks that were evicted.
    """

    def __init__(self, geometry: Geometry, assign: Callable[[int, int], None], heard: Hears = UNHEARD) -> None:
        self.geometry = geometry
        self.entries: dict[bytes, Entry] = {}
        self.evicted = 0
        self._assign, self._heard = assign, heard
        self._slabs = [_Slab() for _ in range(geometry.num_slabs)]
        self._empty = dict.fromkeys(range(geometry.num_slabs))  # in order, for long runs
        self._with_room: list[dict[int, None]] = [{} for _ in geometry.sizes]
        self._by_use: list[OrderedDict[bytes, Entry]] = [OrderedDict() for _ in geometry.sizes]
        self._clock = 0

    def restore(self, slab: int, size: int, entries: Iterable[Entry], stale: Iterable[int]) -> None:
        """Set the content of an empty slab, as the disk has it. O(slots).

        Args:
            slab: The slab.
            size: The index of its size.
            entries: Its blocks. Their keys are new.
            stale: Other slots with records that may be whole.
        """
        one = self._slabs[slab]
        one.size = size
        one.live = {entry.place.slot: entry for entry in entries}
        one.stale = set(stale)
        self.entries.update((entry.key, entry) for entry in one.live.values())
        if one.live:
            self._open(slab)

    def order(self, entries: Iterable[Entry]) -> None:
        """Set the order of use of all blocks.

        Args:
            entries: All blocks, the least recently used first.
        """
        for entry in entries:
            self._slabs[entry.place.slab].used += self._use(entry)

    def by_use(self) -> list[Entry]:
        """Return all blocks, the least recently used first. O(n log n)."""
        return sorted(self.entries.values(), key=lambda entry: entry.used)

    def touch(self, entry: Entry) -> None:
        """Note a use of a block. It does nothing if ``entry`` is not live."""
        if self.entries.get(entry.key) is entry:
            self._slabs[entry.place.slab].used += self._use(entry)
            self._heard.there(entry.key)  # a block of an earlier process may be new to the listener

    def _use(self, entry: Entry) -> int:
        """Make ``entry`` the most recently used block of its size, and return by how much ``used`` grew."""
        self._clock += 1
        grown = self._clock - entry.used
        entry.used = self._clock
        order = self._by_use[entry.place.size]
        order[entry.key] = entry
        order.move_to_end(entry.key)
        return grown

    # -- slots

    def take(self, size: int) -> Place | None:
        """Take a slot for a write, and evict if no slot is free; ``None`` if there is no room.

        Amortised O(1 + evicted blocks).

        Args:
            size: The index of the slot's size.
        """
        with_room = self._with_room[size]
        while not with_room:
            if not self._make_room(size):
                return None
        slab = next(iter(with_room))
        one = self._slabs[slab]
        slot = one.free.pop()
        one.in_flight += 1
        if not one.free:
            del with_room[slab]
        return Place(size, slab, slot)

    def _make_room(self, size: int) -> bool:
        """Make room for a slot of ``size``, if there is a way."""
        if self._empty:
            return self._give_size(next(iter(self._empty)), size)
        oldest = next(iter(self._by_use[size].values()), None)
        slab = self._older_slab(size, oldest)
        if slab is None:
            if oldest is None:
                return False
            self.evicted += 1
            self.drop(oldest)
            return True
        self.evicted += len(self._slabs[slab].live)
        for entry in list(self._slabs[slab].live.values()):
            self.drop(entry)
        return True

    def _older_slab(self, size: int, oldest: Entry | None) -> int | None:
        """Return a slab of another size if its blocks were used before ``oldest``, on average."""
        best, found = (None if oldest is None else float(oldest.used)), None
        for other, order in enumerate(self._by_use):
            if other == size:
                continue
            for entry in islice(order.values(), _MOST_HEADS):
                slab = self._slabs[entry.place.slab]
                if slab.in_flight:
                    continue
                mean = slab.used / len(slab.live)
                if best is None or mean < best:
                    best, found = mean, entry.place.slab
                break
        return found

    def _give_size(self, slab: int, size: int) -> bool:
        """Give an empty slab a size, and return whether the disk took it."""
        one = self._slabs[slab]
        if one.size != size:
            try:
                self._assign(slab, size)
            except OSError:
                return False
            one.size = size
            one.stale.clear()
        self._open(slab)
        return True

    def _open(self, slab: int) -> None:
        """Fill in the free slots of a slab that has no writes in flight."""
        one = self._slabs[slab]
        self._empty.pop(slab, None)
        one.free = [slot for slot in reversed(range(self.geometry.num_slots[one.size])) if slot not in one.live]
        if one.free:
            self._with_room[one.size][slab] = None

    def give_back(self, place: Place, *, stale: bool) -> None:
        """Free a slot whose write failed.

        Args:
            place: A slot that ``take`` returned.
            stale: Whether its record may be whole on the disk.
        """
        slab = self._slabs[place.slab]
        slab.in_flight -= 1
        if stale:
            slab.stale.add(place.slot)
        self._free(place)

    def _free(self, place: Place) -> None:
        slab = self._slabs[place.slab]
        slab.free.append(place.slot)
        if slab.live or slab.in_flight:
            self._with_room[place.size][place.slab] = None
        else:
            self._with_room[place.size].pop(place.slab, None)
            self._empty[place.slab] = None

    # -- blocks

    def publish(self, entry: Entry) -> Entry | None:
        """Make a block found, and return the block that it replaces.

        Args:
            entry: A block in a slot that ``take`` returned.
        """
        replaced = self.entries.get(entry.key)
        if replaced is not None:
            self.drop(replaced)
        slab = self._slabs[entry.place.slab]
        slab.in_flight -= 1
        slab.live[entry.place.slot] = entry
        self.entries[entry.key] = entry
        slab.used += self._use(entry)
        self._heard.there(entry.key)
        return replaced

    def drop(self, entry: Entry) -> None:
        """Forget a live block. Its slot is free, and its record on the disk is stale.

        Args:
            entry: A live block.
        """
        del self.entries[entry.key]
        del self._by_use[entry.place.size][entry.key]
        slab = self._slabs[entry.place.slab]
        del slab.live[entry.place.slot]
        slab.used -= entry.used
        slab.stale.add(entry.place.slot)
        self._free(entry.place)
        self._heard.gone(entry.key)

    # -- stale records

    def stale(self, places: Iterable[Place]) -> list[Place]:
        """Return those of ``places`` that are not live and whose record may be whole on the disk."""
        return [place for place in places if place.slot in self._slabs[place.slab].stale]

    def all_stale(self) -> Iterator[Place]:
        """Yield all stale slots. O(slabs)."""
        for number, slab in enumerate(self._slabs):
            for slot in slab.stale:
                yield Place(slab.size, number, slot)

    def cleared(self, places: Iterable[Place]) -> None:
        """Note that the records of ``places`` are void on the disk."""
        for place in places:
            self._slabs[place.slab].stale.discard(place.slot)

    def check(self) -> None:
        """Check all invariants. O(slots).

        Raises:
            CacheError: One does not hold.
        """
        seen = 0
        for number, slab in enumerate(self._slabs):
            seen += len(slab.live)
            if number in self._empty:
                broken = bool(slab.live or slab.in_flight)
            else:
                slots = self.geometry.num_slots[slab.size]
                broken = len({*slab.free} | {*slab.live}) + slab.in_flight != slots or (
                    bool(slab.free) != (number in self._with_room[slab.size])
                )
            wrong_use = slab.used != sum(entry.used for entry in slab.live.values())
            wrong_entry = any(
                self.entries.get(entry.key) is not entry or entry.place != (slab.size, number, slot)
                for slot, entry in slab.live.items()
            )
            if broken or wrong_use or wrong_entry or slab.stale & slab.live.keys():
                raise CacheError(f"slab {number} is inconsistent: {slab}")
        if seen != len(self.entries) or seen != sum(map(len, self._by_use)):
            raise CacheError(f"{seen} blocks lie in slabs, {len(self.entries)} have keys")
