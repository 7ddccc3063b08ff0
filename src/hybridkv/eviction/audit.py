"""Check the invariants of kept resume points: recompute the counts, segments and ranks, and compare them.

Each function yields one line per violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.eviction.resume_points import ResumePoint, begins_block_of, first_key, is_crowded

if TYPE_CHECKING:
    from hybridkv.eviction.ranked import RankedResumePoints


def check_points(kept: RankedResumePoints) -> Iterator[str]:
    """Yield a line for each violated invariant of ``kept``. O(resume points and segments)."""
    needs, points = kept._blocks, kept._tree.kept()
    wrong = np.flatnonzero(kept._blocks.counted(points) != needs.counts)
    yield from (f"block {block} has the wrong count {needs.counts[block]} of resume points" for block in wrong.tolist())
    at: dict[bytes, list[ResumePoint]] = {}
    for point in points:
        at.setdefault(point.chain, []).append(point)
    for point in points:
        yield from _place(kept, point)
        yield from _follows_nearest(point, at)
        segment = needs.segment(point)
        if segment is not None and not np.array_equal(needs.kept_segment(point), segment):
            yield f"the blocks remembered for the segment of the resume point of {point.tokens} tokens are others now"
        yield from _saved_and_ranked(kept, point)
    for point in kept._tree.points.values():
        if point.kept == (point.serial in kept._ghost_entries[point.tenant]):
            yield f"the resume point of {point.tokens} tokens must be either kept or a ghost entry; kept: {point.kept}"
    unneeded, cached = needs.space.unneeded_blocks(), kept._pool.cached()
    for block in np.flatnonzero(cached & (unneeded != (needs.counts == 0))).tolist():
        count = needs.counts[block]
        yield f"cached block {block} is unneeded: {bool(unneeded[block])}, but {count} resume points need it"
    if needs.num_watched != (watched := int(np.count_nonzero(needs._watchers))):
        yield f"{watched} blocks have a watcher, not {needs.num_watched}"
    if needs.weights.of != needs.charged():
        yield f"tenants are charged {needs.weights.of} bytes, not {needs.charged()}"
    yield from kept._rankings.check(Counter(point.tenant for point in points if point.ranked))
    yield from kept._tree.check_waiting()


def _place(kept: RankedResumePoints, point: ResumePoint) -> Iterator[str]:
    parent = point.parent
    if parent is None or not parent.kept or point not in parent.children.get(first_key(point), ()):
        yield f"the resume point of {point.tokens} tokens is not a child of a kept parent"
    elif parent.depth + len(point.segment) != point.depth or (point.segment and point.segment[-1] != point.chain):
        yield f"the segment of the resume point of {point.tokens} tokens does not reach from its parent to itself"
    if any(point not in kept._blocks.owners.get(block, ()) for block in point.own):
        yield f"a block of the resume point of {point.tokens} tokens does not list it as its owner"


def _follows_nearest(point: ResumePoint, at: Mapping[bytes, Sequence[ResumePoint]]) -> Iterator[str]:
    """Check that the parent is the nearest resume point before ``point``. at: the kept resume points of each chain."""
    parent = point.parent
    if parent is None:
        return
    wrong = f"the resume point of {point.tokens} tokens follows that of {parent.tokens}"
    if not point.segment and not begins_block_of(parent, point):
        yield f"{wrong}, which is not its prefix"
    for chain, key in pairwise([parent.chain, *point.segment]):
        for other in at.get(key, ()):
            if parent.tokens < other.tokens < point.tokens and not other.inside[1]:
                yield f"{wrong}, but should follow that of {other.tokens}"
        for other in at.get(chain, ()):
            if other is not parent and key in other.children:
                yield f"{wrong}, but others with its key follow that of {other.tokens}"
    for other in at.get(point.chain, ()):
        if parent.tokens < other.tokens < point.tokens and begins_block_of(other, point):
            yield f"{wrong}, but should follow that of {other.tokens} inside the same block"


def _saved_and_ranked(kept: RankedResumePoints, point: ResumePoint) -> Iterator[str]:
    saved = kept._blocks.saved(point)
    if point.saved != saved and not is_crowded(point) and not kept._blocks.overlaps:
        yield f"the resume point of {point.tokens} tokens saves {saved} tokens per byte, not {point.saved}"
    may_go = point.saved > 0.0 and point.serial not in kept._parked
    if point.ranked != may_go:
        yield f"the resume point of {point.tokens} tokens is ranked: {point.ranked}, but should be: {may_go}"
    waits = point.serial in kept._parked and point.serial not in kept._released
    if waits and not kept._blocks.look(point)[1]:
        yield f"the resume point of {point.tokens} tokens is parked, but its eviction would free a block"
