"""What must always hold of ends that are kept by what they are worth, made anew from the ends and compared.

Each function yields one line a violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.eviction.resume_points import Node

if TYPE_CHECKING:
    from hybridkv.eviction.ranked import JudgedEnds


def check_ends(kept: JudgedEnds) -> Iterator[str]:
    """Every invariant of ``kept`` that does not hold. O(ends and segments)."""
    needs, nodes = kept._needs, kept._tree.kept()
    wrong = np.flatnonzero(kept._blocks.counted(nodes) != needs.counts)
    yield from (f"block {block} is needed by {needs.counts[block]} ends by count" for block in wrong.tolist())
    at: dict[bytes, list[Node]] = {}
    for node in nodes:
        at.setdefault(node.chain, []).append(node)
    for node in nodes:
        yield from _place(kept, node)
        yield from _behind(node, at)
        yield from _worth(kept, node)
    for node in kept._tree.nodes.values():
        if node.kept == (node in kept._ghosts):
            yield f"the end of {node.tokens} tokens is kept: {node.kept}, and a ghost or not as well"
    given, cached = needs.space.given_up(), kept._pool.cached()
    for block in np.flatnonzero(cached & (given != (needs.counts == 0))).tolist():
        yield f"block {block}, cached, is given up: {bool(given[block])}, needed by {needs.counts[block]}"
    if needs.weights.of != needs.charged():
        yield f"tenants are charged {needs.weights.of} bytes, not {needs.charged()}"
    yield from kept._rankings.check(Counter(node.end.tenant for node in nodes if node.ranked))
    yield from kept._queue.check(kept._tree)


def _place(kept: JudgedEnds, node: Node) -> Iterator[str]:
    parent = node.parent
    if parent is None or not parent.kept or node not in parent.children.get(node.first_key, ()):
        yield f"the end of {node.tokens} tokens has no parent that is kept and knows it"
    elif parent.depth + len(node.segment) != node.depth or (node.segment and node.segment[-1] != node.chain):
        yield f"the segment of the end of {node.tokens} tokens does not reach from its parent to itself"
    if any(node not in kept._shares.owners.get(block, ()) for block in node.own):
        yield f"a block of the end of {node.tokens} tokens does not know it"


def _behind(node: Node, at: Mapping[bytes, Sequence[Node]]) -> Iterator[str]:
    """at: kept ends by their chains. The parent is the last end that ``node`` is known to begin with."""
    parent = node.parent
    if parent is None:
        return
    wrong = f"the end of {node.tokens} tokens stands behind that of {parent.tokens}"
    if not node.segment and not parent.begins_block_of(node):
        yield f"{wrong}, with which it does not begin"
    for chain, key in pairwise([parent.chain, *node.segment]):
        for other in at.get(key, ()):
            if parent.tokens < other.tokens < node.tokens and not other.inside[1]:
                yield f"{wrong}, not behind that of {other.tokens}"
        for other in at.get(chain, ()):
            if other is not parent and key in other.children:
                yield f"{wrong}, and others with its key behind that of {other.tokens}"
    for other in at.get(node.chain, ()):
        if parent.tokens < other.tokens < node.tokens and other.begins_block_of(node):
            yield f"{wrong}, not behind that of {other.tokens}, inside the same block"


def _worth(kept: JudgedEnds, node: Node) -> Iterator[str]:
    saved = kept._blocks.saved(node)
    if node.end.saved != saved and not node.crowded and not kept._blocks.overlaps:
        yield f"the end of {node.tokens} tokens saves {saved} a byte, not {node.end.saved}"
    may_go = node.end.saved > 0.0 and node.end.serial not in kept._parked
    if node.ranked != may_go:
        yield f"the end of {node.tokens} tokens is ranked: {node.ranked}, against what it saves or who holds it"
