"""What must always hold of slabs, rebuilt from the states of single blocks and compared with the counts.

Each function yields one line a violation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.spaces.slab_holes import BUCKETS, NONE, QUEUES

if TYPE_CHECKING:
    from hybridkv.cache.spaces.slabs import SlabSpace

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]


def check_slabs(space: SlabSpace, ref: Int32, keyed: Bool) -> Iterator[str]:
    """Every invariant of ``space`` that does not hold. O(handles).

    ref: holders of each handle. keyed: which have a key.
    """
    if len(ref) != space.num_blocks:
        yield f"holders of {len(ref)} blocks were given, the space has {space.num_blocks}"
        return
    yield from _stack(space)
    yield from _keys(space, keyed)
    for of, (base, k) in enumerate(zip(space.bases, space.ks, strict=True)):
        rows = slice(base, base + k * (space.num_slabs + 1))
        hole = space._holes.is_hole[rows].reshape(-1, k)
        cached = space.are_cached(rows).reshape(-1, k)
        held = (ref[rows] > 0).reshape(-1, k)
        yield from _blocks(space, of, hole, cached, held)
        yield from _counts(space, of, hole, cached, held)
        yield from _candidates(space, of, hole, held)
        yield from _lru(space, of)
        yield from _locks(space, of, held)


def _stack(space: SlabSpace) -> Iterator[str]:
    """The stack has every slab that nobody owns, once; the null slab is nobody's."""
    free = space.free_slabs()
    unowned = (np.flatnonzero(space._holes.owners[1:] < 0) + 1).tolist()
    if sorted(free) != unowned:
        yield f"slabs {sorted(free)} are on the stack, {unowned} have no owner"
    if space.owner(0) >= 0:
        yield f"the null slab belongs to class {space.owner(0)}"
    for name, counts in (
        ("holes", space._holes.all_holes),
        ("referenced blocks", space._holes.all_held),
        ("locks", np.array(space.slab_locks)),
    ):
        wrong = np.flatnonzero((space._holes.owners < 0) & (counts != 0))
        yield from (f"slab {slab} is nobody's and counts {counts[slab]} {name}" for slab in wrong.tolist())


def _keys(space: SlabSpace, keyed: Bool) -> Iterator[str]:
    """What waits to be evicted has a key, and what has one and no holder waits."""
    free = space.order()
    for block, waits in zip(free.tolist(), space.are_cached(free).tolist(), strict=True):
        if waits != keyed[block]:
            yield f"block {block} is free; it has a key: {not waits}, it waits to be evicted: {waits}"


def _blocks(space: SlabSpace, of: int, hole: Bool, cached: Bool, held: Bool) -> Iterator[str]:
    """Blocks of owned slabs are one thing, others nothing; an owned slab has live blocks."""
    owned = space._holes.owners == of
    states = hole.astype(np.int8) + cached + held
    for slab, i in np.argwhere(states != owned[:, None])[:1].tolist():
        what = [name for name, is_so in (("hole", hole), ("cached", cached), ("referenced", held)) if is_so[slab, i]]
        block = space.bases[of] + slab * space.ks[of] + i
        whose = f"a slab of class {space.owner(slab)}" if space.owner(slab) >= 0 else "a slab that nobody owns"
        yield f"block {block} of class {of} lies in {whose} and is {' and '.join(what) or 'nothing'}"
    for slab in np.flatnonzero(owned & hole.all(axis=1)).tolist():
        yield f"slab {slab} has no live block but belongs to class {of}"


def _counts(space: SlabSpace, of: int, hole: Bool, cached: Bool, held: Bool) -> Iterator[str]:
    """Counts of slabs and classes are those of their blocks."""
    owned = space._holes.owners == of
    for name, counts, blocks in (
        ("holes", space._holes.all_holes, hole),
        ("referenced blocks", space._holes.all_held, held),
    ):
        wrong = np.flatnonzero(owned & (counts != np.count_nonzero(blocks, axis=1)))
        yield from (f"slab {slab} of class {of} counts {counts[slab]} {name}" for slab in wrong.tolist())
    for name, count, found in (
        ("slabs", space.slabs[of], np.count_nonzero(owned)),
        ("holes", space.holes[of], np.count_nonzero(hole)),
        ("cached blocks", space.cached[of], np.count_nonzero(cached)),
        ("referenced blocks", space.referenced[of], np.count_nonzero(held)),
    ):
        if count != found:
            yield f"class {of} counts {count} {name}, there are {found}"


def _candidates(space: SlabSpace, of: int, hole: Bool, held: Bool) -> Iterator[str]:
    """Every slab with holes, and no other, is in the queue that it belongs in, once."""
    k, first = space.ks[of], of * QUEUES
    holes, pinned = np.count_nonzero(hole, axis=1).tolist(), np.count_nonzero(held, axis=1).tolist()
    expected = {
        slab: (k - free) * BUCKETS // k + (BUCKETS if pins else 0)
        for slab, (free, pins) in enumerate(zip(holes, pinned, strict=True))
        if 0 < free < k
    }
    for slab, number in enumerate(space._holes.queues):
        queue = number - first if 0 <= number - first < QUEUES else NONE
        if queue != expected.get(slab, NONE):
            yield f"slab {slab} is in queue {queue} of class {of}, not in {expected.get(slab, NONE)}"
    entries = sorted(
        (slab, queue)
        for queue, heap in enumerate(space._holes.heaps[first : first + QUEUES])
        for slab in heap
        if space._holes.queues[slab] == first + queue
    )
    if not {slab for slab, _ in entries} >= set(expected) or len(set(entries)) != len(entries):
        yield f"the queues of class {of} have {entries}, not {sorted(expected.items())}"


def _lru(space: SlabSpace, of: int) -> Iterator[str]:
    """An LRU is in the order of its stamps, none of which is of the future; each block stands in it once."""
    ids = space.lru(of)
    stamps = space.stamps[ids]
    if (stamps[1:] < stamps[:-1]).any() or (stamps > space.now).any():
        yield f"the LRU of class {of} is not in the order of its stamps {stamps.tolist()}, {space.now} being the last"
    if len(ids) != space.cached[of] or len(np.unique(ids)) != len(ids):
        yield f"the LRU of class {of} has {len(ids)} entries, {space.cached[of]} are counted"


def _locks(space: SlabSpace, of: int, held: Bool) -> Iterator[str]:
    """Locked blocks are referenced; slabs and the class count them."""
    base, k = space.bases[of], space.ks[of]
    locks = space.locks[base : base + held.size].reshape(-1, k)
    for slab, i in np.argwhere((locks > 0) & ~held)[:1].tolist():
        yield f"block {base + slab * k + i} of class {of} is locked but not referenced"
    owned = space._holes.owners == of
    wrong = np.flatnonzero(owned & (np.array(space.slab_locks) != locks.sum(axis=1)))
    yield from (f"slab {slab} of class {of} counts {space.slab_locks[slab]} locks" for slab in wrong.tolist())
    found = np.count_nonzero(owned & (locks > 0).any(axis=1))
    if space.locked_slabs[of] != found:
        yield f"class {of} counts {space.locked_slabs[of]} slabs with locks, there are {found}"
