"""What must always hold of ends that are kept by what they are worth, made anew from the ends and compared.

Each function yields one line a violation.
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
    """Every invariant of ``kept`` that does not hold. O(ends and segments)."""
    needs, points = kept._blocks, kept._tree.kept()
    wrong = np.flatnonzero(kept._blocks.counted(points) != needs.counts)
    yield from (f"block {block} is needed by {needs.counts[block]} ends by count" for block in wrong.tolist())
    at: dict[bytes, list[ResumePoint]] = {}
    for point in points:
        at.setdefault(point.chain, []).append(point)
    for point in points:
        yield from _place(kept, point)
        yield from _behind(point, at)
        yield from _worth(kept, point)
    for point in kept._tree.points.values():
        if point.kept == (point.serial in kept._ghost_entries[point.tenant]):
            yield f"the resume point of {point.tokens} tokens is kept: {point.kept}, and a ghost or not as well"
    given, cached = needs.space.unneeded_blocks(), kept._pool.cached()
    for block in np.flatnonzero(cached & (given != (needs.counts == 0))).tolist():
        yield f"block {block}, cached, is given up: {bool(given[block])}, needed by {needs.counts[block]}"
    if needs.weights.of != needs.charged():
        yield f"tenants are charged {needs.weights.of} bytes, not {needs.charged()}"
    yield from kept._rankings.check(Counter(point.tenant for point in points if point.ranked))
    yield from kept._tree.check_waiting()


def _place(kept: RankedResumePoints, point: ResumePoint) -> Iterator[str]:
    parent = point.parent
    if parent is None or not parent.kept or point not in parent.children.get(first_key(point), ()):
        yield f"the resume point of {point.tokens} tokens has no parent that is kept and knows it"
    elif parent.depth + len(point.segment) != point.depth or (point.segment and point.segment[-1] != point.chain):
        yield f"the segment of the resume point of {point.tokens} tokens does not reach from its parent to itself"
    if any(point not in kept._blocks.owners.get(block, ()) for block in point.own):
        yield f"a block of the resume point of {point.tokens} tokens does not know it"


def _behind(point: ResumePoint, at: Mapping[bytes, Sequence[ResumePoint]]) -> Iterator[str]:
    """at: kept ends by their chains. The parent is the last end that ``point`` is known to begin with."""
    parent = point.parent
    if parent is None:
        return
    wrong = f"the resume point of {point.tokens} tokens stands behind that of {parent.tokens}"
    if not point.segment and not begins_block_of(parent, point):
        yield f"{wrong}, with which it does not begin"
    for chain, key in pairwise([parent.chain, *point.segment]):
        for other in at.get(key, ()):
            if parent.tokens < other.tokens < point.tokens and not other.inside[1]:
                yield f"{wrong}, not behind that of {other.tokens}"
        for other in at.get(chain, ()):
            if other is not parent and key in other.children:
                yield f"{wrong}, and others with its key behind that of {other.tokens}"
    for other in at.get(point.chain, ()):
        if parent.tokens < other.tokens < point.tokens and begins_block_of(other, point):
            yield f"{wrong}, not behind that of {other.tokens}, inside the same block"


def _worth(kept: RankedResumePoints, point: ResumePoint) -> Iterator[str]:
    saved = kept._blocks.saved(point)
    if point.saved != saved and not is_crowded(point) and not kept._blocks.overlaps:
        yield f"the resume point of {point.tokens} tokens saves {saved} a byte, not {point.saved}"
    may_go = point.saved > 0.0 and point.serial not in kept._parked
    if point.ranked != may_go:
        yield f"the resume point of {point.tokens} tokens is ranked: {point.ranked}, and should not be, or should"
