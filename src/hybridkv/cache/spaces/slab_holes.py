"""The holes of slabs: which slabs each class owns, and from which hole the next block is taken.

    slab    null (0) | free, on the stack | owned by a class; pinned if at least one of its blocks is referenced
    block   of an owned slab: hole (free, no key) | live (referenced or cached); blocks of other slabs have no state

    take    a hole of the slab taken from last, if that is pinned; then of a pinned slab, fullest bucket first; then a
            free slab; then a hole of an unpinned slab, fullest bucket first (docs/design/0010)

The blocks of all classes are numbered in one row: block i of slab s of class c is ``bases[c] + s * ks[c] + i``.

Slabs of one class that have holes are kept in queues by how full they are, so that the lowest number of a queue is
found without a scan:

    queue   0 .. 7    unpinned: no block is referenced     bucket 0 is the emptiest eighth, 7 the fullest
            8 .. 15   pinned: at least one block is
            NONE      in no queue: full, free, or of another class

A queue is a heap of slab numbers. A slab that leaves it stays as a stale entry, which is dropped when it comes to the
top. A slab is in a heap at most once, so a heap never outgrows the number of slabs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.spaces.one_size import Ids
from hybridkv.errors import BlockError, ConfigError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Slabs = list[int] | NDArray[np.int64]  # a list where they are few
Bool = NDArray[np.bool_]

FREE: Final = -1
"""Owner of a slab that no class owns."""
NO_SLAB: Final = 0
"""The null slab is never taken from, so its number stands for no slab."""
BUCKETS: Final = 8
QUEUES: Final = 2 * BUCKETS
NONE: Final = -1
_FEW: Final = 32
"""Up to this many blocks are handled in plain Python, because arrays have a fixed cost. Chosen by hand."""
_MOST: Final = np.iinfo(np.int32).max


class Part(NamedTuple):
    """Blocks of one class.

    Attributes:
        of: The class.
        ids: The blocks.
        slabs: The slab of each block; a list if there are few.
    """

    of: int
    ids: Ids
    slabs: Slabs


def counters(n: int) -> tuple[array[int], Int32]:
    """Return ``n`` counters of 0 twice on the same memory: quick to read one by one, and as an array."""
    single = array("i", [0]) * n
    return single, np.frombuffer(single, np.int32)


class SlabHoles:
    """``num_slabs`` slabs (0 is the null slab), which class c cuts into ``ks[c]`` blocks. At first all are free.

    Attributes:
        num_blocks: Blocks of all classes.
        bases: By class, its first block.
        num_free: Slabs on the stack.
        is_hole: bool, by block.
        referenced, holes: By class, numbers of blocks.
        slabs: By class, owned slabs.
        owner, num_holes, num_held, queues: By slab, its class (FREE without one), its holes, its referenced blocks, and
            the heap in which it belongs (NONE for no heap).
        owners, all_holes, all_held: The same memory as arrays.
        heaps: QUEUES heaps for each class.
    """

    def __init__(self, num_slabs: int, ks: Sequence[int]) -> None:
        self.ks = tuple(ks)
        *bases, self.num_blocks = accumulate((num_slabs * k for k in ks), initial=0)
        if self.num_blocks > _MOST:
            raise ConfigError(
                f"{num_slabs} slabs make {self.num_blocks} block ids, more than the limit of {_MOST}: "
                "plan larger slabs or less memory"
            )
        self.bases = tuple(bases)
        self._first_handles = np.array(bases)
        self.referenced, self.holes, self.slabs = [0] * len(ks), [0] * len(ks), [0] * len(ks)
        self._hole_bytes = bytearray(self.num_blocks)
        self.is_hole: Bool = np.frombuffer(self._hole_bytes, np.bool_)  # the same memory
        self.owner, self.owners = counters(num_slabs)
        self.owners.fill(FREE)
        self.num_holes, self.all_holes = counters(num_slabs)
        self.num_held, self.all_held = counters(num_slabs)
        self.queues = array("h", [NONE]) * num_slabs
        self._all_queues: NDArray[np.int16] = np.frombuffer(self.queues, np.int16)  # the same memory
        self.heaps: list[list[int]] = [[] for _ in range(QUEUES * len(ks))]
        self._queued = [bytearray(num_slabs) for _ in self.heaps]  # whether a heap has an entry for a slab
        self._current = [NO_SLAB] * len(ks)  # the slab that each class took from last
        self._stack = np.arange(num_slabs - 1, 0, -1, dtype=np.int64)  # free slabs up to num_free - 1, the top
        self.num_free = num_slabs - 1

    # -- where blocks lie

    def class_of(self, block: int) -> int:
        """Return the class of ``block``. O(log classes)."""
        return bisect_right(self.bases, block) - 1

    def slab_of(self, block: int) -> int:
        """Return the slab of ``block``. O(log classes)."""
        of = self.class_of(block)
        return (block - self.bases[of]) // self.ks[of]

    def blocks_of(self, slab: int, of: int) -> slice:
        """Return the blocks of ``slab`` of class ``of``."""
        first = self.bases[of] + slab * self.ks[of]
        return slice(first, first + self.ks[of])

    def part(self, of: int, ids: Ids) -> Part:
        """Return blocks ``ids`` of class ``of`` with their slabs. O(ids)."""
        base, k = self.bases[of], self.ks[of]
        if len(ids) <= _FEW:
            return Part(of, ids, [(block - base) // k for block in ids.tolist()])
        where = np.asarray(ids, np.int64)
        return Part(of, where, (where - base) // k)

    def parts(self, ids: Ids) -> list[Part]:
        """Split ``ids`` by class, in the order given. Raises BlockError for an unknown block. O(ids)."""
        if not len(ids):
            return []
        first, last = self._classes(ids)
        if first == last:
            return [self.part(first, ids)]
        return [self.part(of, some) for of, some in self._split(ids, first, last)]

    def by_class(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Split ``ids`` by class, without their slabs."""
        if not len(ids):
            return []
        first, last = self._classes(ids)
        return [(first, ids)] if first == last else self._split(ids, first, last)

    def _classes(self, ids: Ids) -> tuple[int, int]:
        """Return the first and the last class of ``ids``. Raises BlockError for an unknown block."""
        if len(ids) <= _FEW:
            few = ids.tolist()
            low, high = min(few), max(few)
        else:
            low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
        if low < 0 or high >= self.num_blocks:
            raise BlockError(
                f"block {low if low < 0 else high} is not one of the {self.num_blocks} blocks of all slabs"
            )
        return bisect_right(self.bases, low) - 1, bisect_right(self.bases, high) - 1

    def _split(self, ids: Ids, first: int, last: int) -> list[tuple[int, Ids]]:
        of_each = self._first_handles.searchsorted(ids, "right") - 1
        return [(of, some) for of in range(first, last + 1) if len(some := ids[of_each == of])]

    def owns(self, block: int, slab: int, of: int) -> bool:
        """Return whether ``block``, of class ``of``, is no hole and lies in a ``slab`` that its class owns."""
        return not self._hole_bytes[block] and self.owner[slab] == of

    def find_unowned(self, part: Part) -> int | None:
        """Return a block of ``part`` that is a hole, or lies in a slab that its class does not own. O(part)."""
        if isinstance(part.slabs, list):
            for block, slab in zip(part.ids.tolist(), part.slabs, strict=True):
                if self._hole_bytes[block] or self.owner[slab] != part.of:
                    return int(block)
            return None
        wrong = self.is_hole[part.ids] | (self.owners[part.slabs] != part.of)
        return int(part.ids[wrong][0]) if np.count_nonzero(wrong) else None

    def free_slabs(self) -> Int64:
        """Return the free slabs, the next to be taken last. O(slabs)."""
        return self._stack[: self.num_free].copy()

    # -- take

    def take(self, n: int, of: int) -> Int32:
        """Take ``n`` blocks of class ``of``, or all that there are without making room. O(n + slabs touched).

        The blocks do not depend on how they are asked for: take(3) is take(1) three times.
        """
        parts: list[Int32] = []
        while n > 0:
            ids = self._take_some(n, of)
            if not ids.size:
                break
            parts.append(ids)
            n -= ids.size
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def takes_in_any_order(self, needs: Sequence[int]) -> bool:
        """Return whether the classes take the same blocks in any order.

        They do if all classes but one take from their current slabs, and that one needs only free slabs besides.
        """
        slabs = []
        for of, need in enumerate(needs):
            current = self._current[of]
            there = self.num_holes[current] if self.owner[current] == of and self.num_held[current] else 0
            if need > there:
                slabs.append(-(-(need - there) // self.ks[of]))
        return len(slabs) < 2 and sum(slabs) <= self.num_free

    def _take_some(self, n: int, of: int) -> Int32:
        """Take at most ``n`` blocks of the next slab, or of several free ones. Empty if there are none left."""
        slab = NO_SLAB
        if self.holes[of]:
            slab = self._current[of]
            if not (self.num_holes[slab] and self.num_held[slab]):
                slab = self.fullest_pinned(of)
        if slab == NO_SLAB:
            if self.num_free:
                return self._take_slabs(n, of) if n >= 2 * self.ks[of] else self._open_slab(min(n, self.ks[of]), of)
            slab = self.fullest_unpinned(of)
            if slab == NO_SLAB:
                return np.empty(0, np.int32)
        self._current[of] = slab
        ids = self._fill(slab, n, of)
        self.num_held[slab] += ids.size
        self._file(slab, of)
        self.referenced[of] += ids.size
        return ids

    def _fill(self, slab: int, n: int, of: int) -> Int32:
        """Take at most ``n`` holes of ``slab``, lowest first."""
        rows = self.blocks_of(slab, of)
        if n == 1:
            block = self._hole_bytes.find(1, rows.start, rows.stop)
            self._hole_bytes[block] = 0
            ids = np.array([block], np.int32)
        else:
            ids = (self.is_hole[rows].nonzero()[0][:n] + rows.start).astype(np.int32)
            self.is_hole[ids] = False
        self.num_holes[slab] -= ids.size
        self.holes[of] -= ids.size
        return ids

    def _open_slab(self, n: int, of: int) -> Int32:
        """Take the first ``n`` blocks of a free slab. Its other blocks become holes."""
        self.num_free -= 1
        slab, holes = self._stack.item(self.num_free), self.ks[of] - n
        rows = self.blocks_of(slab, of)
        self.is_hole[rows.start + n : rows.stop] = True
        self.owner[slab], self.num_holes[slab] = of, holes
        self.slabs[of] += 1
        self.holes[of] += holes
        self.referenced[of] += n
        self.num_held[slab] += n
        self._file(slab, of)
        self._current[of] = slab
        return np.arange(rows.start, rows.start + n, dtype=np.int32)

    def _take_slabs(self, n: int, of: int) -> Int32:
        """Take all blocks of as many free slabs as ``n`` blocks fill, or as there are."""
        k = self.ks[of]
        count = min(n // k, self.num_free)
        self.num_free -= count
        slabs = self._stack[self.num_free : self.num_free + count][::-1]
        self.owners[slabs] = of
        self.all_held[slabs] = k
        self.slabs[of] += count
        self.referenced[of] += count * k
        self._current[of] = slabs.item(-1)
        return self._all_blocks(slabs, of).astype(np.int32)

    def _all_blocks(self, slabs: Int64, of: int) -> Int64:
        blocks: Int64 = ((slabs * self.ks[of] + self.bases[of])[:, None] + np.arange(self.ks[of])).ravel()
        return blocks

    # -- give back

    def hold(self, part: Part, more: int) -> None:
        """Make cached blocks of ``part`` referenced (``more`` 1), or referenced ones cached (-1). O(part)."""
        self.referenced[part.of] += more * len(part.ids)
        self._count(part, held=more)

    def hold_one(self, slab: int, of: int, more: int) -> None:
        """Make one block of ``slab`` of class ``of`` referenced or cached. O(1)."""
        self.referenced[of] += more
        self.num_held[slab] += more
        self._file(slab, of)

    def hold_again(self, part: Part) -> None:
        """Make the cached blocks of ``part`` referenced, as if each had become a hole and been taken, one by one.

        O(part).
        """
        self.hold(part, 1)
        self._current[part.of] = int(part.slabs[-1])

    def make_holes(self, part: Part, *, held: bool) -> Slabs:
        """Make blocks of ``part``, referenced (``held``) or cached, holes. O(part).

        Returns:
            The slabs that became whole, in this order. They have no owner, and are not on the stack yet.
        """
        of, k = part.of, self.ks[part.of]
        self.is_hole[part.ids] = True
        self.holes[of] += len(part.ids)
        if held:
            self.referenced[of] -= len(part.ids)
        touched = self._count(part, held=-1 if held else 0, holes=1)
        whole: Slabs
        if isinstance(touched, list):
            whole = [slab for slab in touched if self.num_holes[slab] == k]
        else:
            whole = touched[self.all_holes[touched] == k]
        if k > 1 and len(whole) > 1:  # a slab becomes whole with the last of its blocks
            whole = list(dict.fromkeys(whole[::-1] if isinstance(whole, list) else whole[::-1].tolist()))[::-1]
        if len(whole):
            self._disown(whole, of)
        return whole

    def _count(self, part: Part, held: int = 0, holes: int = 0) -> Slabs:
        """Add ``held`` and ``holes`` to the slab of each block of ``part``.

        Returns the slabs, some perhaps more than once.
        """
        of, slabs = part.of, part.slabs
        if isinstance(slabs, list):
            return self._count_few(slabs, [1] * len(slabs), of, held, holes)
        if self.ks[of] == 1:  # each block has a slab of its own, which is never half full
            self.all_held[slabs] += held
            self.all_holes[slabs] += holes
            return slabs
        last = np.empty(len(slabs), np.bool_)  # neighbours in a row mostly share a slab: count runs
        last[-1] = True
        np.not_equal(slabs[1:], slabs[:-1], out=last[:-1])
        ends = last.nonzero()[0]
        slabs, runs = slabs[ends], ends.astype(np.int32)
        runs[0] += 1
        runs[1:] -= ends[:-1]
        if len(ends) <= _FEW:
            return self._count_few(slabs.tolist(), runs.tolist(), of, held, holes)
        if held:
            np.add.at(self.all_held, slabs, held * runs)
        if holes:
            np.add.at(self.all_holes, slabs, runs)
        self._file_many(slabs, of)
        return slabs

    def _count_few(self, slabs: list[int], runs: list[int], of: int, held: int, holes: int) -> list[int]:
        """Add ``held`` and ``holes`` to each of ``slabs``, times its run."""
        for slab, run in zip(slabs, runs, strict=True):
            self.num_held[slab] += held * run
            self.num_holes[slab] += holes * run
        for slab in dict.fromkeys(slabs) if self.ks[of] > 1 else ():  # a slab of one block is never half full
            self._file(slab, of)
        return slabs

    def _disown(self, slabs: Slabs, of: int) -> None:
        """Take ``slabs``, all holes, from class ``of``."""
        if isinstance(slabs, list):
            for slab in slabs:
                self.is_hole[self.blocks_of(slab, of)] = False
                self.owner[slab], self.num_holes[slab] = FREE, 0
        else:
            self.is_hole[self._all_blocks(slabs, of)] = False
            self.owners[slabs] = FREE
            self.all_holes[slabs] = 0
        self.slabs[of] -= len(slabs)
        self.holes[of] -= len(slabs) * self.ks[of]
        if self.owner[self._current[of]] != of:
            self._current[of] = NO_SLAB

    def push(self, slabs: Slabs) -> None:
        """Free ``slabs``, which are then taken before all free ones, the first of them first. O(slabs)."""
        self._stack[self.num_free : self.num_free + len(slabs)] = slabs[::-1]
        self.num_free += len(slabs)

    def push_below(self, slabs: Sequence[int]) -> None:
        """Free ``slabs``, which are then taken after all free ones, the first of them first. O(free slabs)."""
        self._stack[len(slabs) : len(slabs) + self.num_free] = self.free_slabs()
        self._stack[: len(slabs)] = slabs[::-1]
        self.num_free += len(slabs)

    # -- move

    def empty(self, victim: int, of: int, sources: Int32, held: Bool) -> Int32:
        """Move the live blocks ``sources`` of ``victim`` into other holes of class ``of``, and free the slab. O(k).

        ``held`` says which of them are referenced. The slab is the next to be taken.

        Returns:
            The hole for each block, int32[n].
        """
        self.queues[victim] = NONE
        targets = self._find_targets(held, of)
        self.num_held[victim] = 0
        self.holes[of] += len(sources)  # the victim has them in place of the targets
        self._disown([victim], of)
        self.push([victim])
        return targets

    def _find_targets(self, held: Bool, of: int) -> Int32:
        """Take a hole for each block: of the fullest pinned slab, else of the fullest unpinned one.

        Going slab by slab gives the same holes as going block by block: a chosen slab gets fuller, and remains the
        choice.
        """
        targets: list[Int32] = []
        done = 0
        while done < len(held):
            slab = self.fullest_pinned(of) or self.fullest_unpinned(of)
            ids = self._fill(slab, len(held) - done, of)
            self.num_held[slab] += int(np.count_nonzero(held[done : done + ids.size]))
            self._file(slab, of)
            targets.append(ids)
            done += ids.size
        return np.concatenate(targets)

    # -- which slab with holes is next

    def _file(self, slab: int, of: int) -> None:
        """Put ``slab`` of class ``of`` into its queue. O(log slabs) if the queue changes."""
        k, holes, queue = self.ks[of], self.num_holes[slab], NONE
        if 0 < holes < k:
            queue = of * QUEUES + (k - holes) * BUCKETS // k + (BUCKETS if self.num_held[slab] else 0)
        if self.queues[slab] != queue:
            self.queues[slab] = queue
            if queue != NONE:
                self._enter(slab, queue)

    def _file_many(self, slabs: Int64, of: int) -> None:
        """Put each of ``slabs``, some perhaps more than once, into its queue.

        Only those that change queues cost Python steps.
        """
        k, holes = self.ks[of], self.all_holes[slabs]
        queues = of * QUEUES + (k - holes) * BUCKETS // k + BUCKETS * (self.all_held[slabs] > 0)
        queues[(holes == 0) | (holes == k)] = NONE
        changed = self._all_queues[slabs] != queues
        slabs, queues = slabs[changed], queues[changed]
        self._all_queues[slabs] = queues
        for slab, queue in zip(slabs.tolist(), queues.tolist(), strict=True):
            if queue != NONE:
                self._enter(slab, queue)

    def _enter(self, slab: int, queue: int) -> None:
        if not self._queued[queue][slab]:
            self._queued[queue][slab] = 1
            heappush(self.heaps[queue], slab)

    def fullest_pinned(self, of: int) -> int:
        """Return the lowest slab of the fullest bucket with pinned slabs, else NO_SLAB. O(log slabs) amortised."""
        return self._first(range((of + 1) * QUEUES - 1, of * QUEUES + BUCKETS - 1, -1))

    def fullest_unpinned(self, of: int) -> int:
        """Return the lowest slab of the fullest bucket with unpinned slabs, else NO_SLAB. O(log slabs) amortised."""
        return self._first(range(of * QUEUES + BUCKETS - 1, of * QUEUES - 1, -1))

    def emptiest(self, of: int, locked: array[int]) -> int:
        """Return the lowest slab of the emptiest bucket, pinned or not, without locked blocks; else NO_SLAB.

        O(log slabs) amortised, O(slabs in a queue) if its first slab is locked. ``locked`` has the locks of each slab.
        """
        for bucket in range(of * QUEUES, of * QUEUES + BUCKETS):
            found = [slab for queue in (bucket, BUCKETS + bucket) if (slab := self._first_unlocked(queue, locked))]
            if found:
                return min(found)
        return NO_SLAB

    def _first(self, queues: Iterable[int]) -> int:
        for queue in queues:
            heap = self.heaps[queue]
            while heap:
                slab = heap[0]
                if self.queues[slab] == queue:
                    return slab
                self._queued[queue][heappop(heap)] = 0
        return NO_SLAB

    def _first_unlocked(self, queue: int, locked: array[int]) -> int:
        slab = self._first((queue,))
        if not locked[slab]:
            return slab
        return min((one for one in self.heaps[queue] if self.queues[one] == queue and not locked[one]), default=NO_SLAB)
