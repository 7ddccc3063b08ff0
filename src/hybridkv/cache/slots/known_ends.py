"""Ends that are remembered though they are not kept: of each tenant so many, the oldest go first."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from hybridkv.cache.slots.end_tree import Node

_MOST: Final = 4000


class Ghosts:
    """most: of each tenant."""

    def __init__(self) -> None:
        self.most = _MOST
        self._of = defaultdict[int, dict[int, Node]](dict)

    def __len__(self) -> int:
        """Of all tenants."""
        return sum(map(len, self._of.values()))

    def __contains__(self, node: Node) -> bool:
        """Whether it is remembered."""
        return node.end.serial in self._of[node.end.tenant]

    def add(self, node: Node) -> Node | None:
        """``node`` is the youngest of its tenant's; the one that is too many."""
        ghosts = self._of[node.end.tenant]
        ghosts.pop(node.end.serial, None)
        ghosts[node.end.serial] = node
        return next(iter(ghosts.values())) if len(ghosts) > self.most else None

    def discard(self, node: Node) -> None:
        """``node`` is none, whether or not it was."""
        self._of[node.end.tenant].pop(node.end.serial, None)

    def clear(self) -> None:
        """There are none."""
        self._of.clear()
