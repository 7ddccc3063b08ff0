"""Which prefixes hold most memory, and how often they were hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from hybridkv.cache.slots.end_tree import Node
from hybridkv.cache.statistics import PrefixStatistics


def heaviest(
    root: Node, kept: Sequence[Node], size_of: Callable[[Node], int], most: int, now: float
) -> tuple[PrefixStatistics, ...]:
    """Up to ``most`` ends below ``root``, each behind its parent, those with most bytes behind them first. O(kept).

    kept: all of them, parents first. size_of: bytes of an end beside its parent's.
    """
    bytes_of = {id(node): size_of(node) for node in kept}
    hits = {id(node): node.end.hits for node in kept}
    for node in reversed(kept):
        parent = node.parent
        if parent is not None and parent is not root:
            bytes_of[id(parent)] += bytes_of[id(node)]
            hits[id(parent)] += hits[id(node)]
    found: list[PrefixStatistics] = []
    behind: list[tuple[int, int, Node]] = []

    def open_up(node: Node) -> None:
        for child in node.heirs():
            heappush(behind, (-bytes_of[id(child)], child.end.serial, child))

    open_up(root)
    while behind and len(found) < most:
        size, serial, node = heappop(behind)
        parent = None if node.parent in (None, root) else node.parent
        end = node.end
        found.append(
            PrefixStatistics(
                serial,
                None if parent is None else parent.end.serial,
                end.kind.name.lower(),
                end.tokens,
                -size,
                hits[id(node)],
                len(node.heirs()),
                max(now - end.used, 0.0),
            )
        )
        open_up(node)
    return tuple(found)
