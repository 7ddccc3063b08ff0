"""Requests that wait, and the deepest kept end that each begins with: it goes after all others of its tenant.

Tokens that a request gets while it waits, of steps that were in flight when it was preempted, are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hybridkv.cache.slots.end_tree import EndTree, Node
from hybridkv.request import Request

_MOST: Final = 1024
"""Requests that are looked at: of a longer queue the others wait too long to keep anything for."""


@dataclass(slots=True)
class _Waiting:
    request: Request
    tokens: int
    node: Node | None = None

    def deepest(self, tree: EndTree) -> Node | None:
        """The kept end that it would go on from. O(its hash blocks)."""
        return tree.deepest(self.request, self.tokens - 1)


class KnownQueue:
    """Who changes the ends hears of each change as (end, whether somebody waits for it), to be carried out at once."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, tree: EndTree) -> Iterator[tuple[Node, bool]]:
        """``request`` waits from now on. O(its hash blocks)."""
        if request.reads_prefix_cache and len(self._waiting) < _MOST:
            one = self._waiting[request.request_id] = _Waiting(request, request.num_tokens)
            yield from self._move(one, one.deepest(tree))

    def remove(self, request: Request) -> Iterator[tuple[Node, bool]]:
        """``request`` waits no longer, if it did."""
        one = self._waiting.pop(request.request_id, None)
        if one is not None:
            yield from self._move(one, None)

    def note_kept(self, node: Node, tree: EndTree) -> Iterator[tuple[Node, bool]]:
        """``node`` is kept from now on. O(waiting)."""
        for one in list(self._waiting.values()):
            least = 0 if one.node is None else one.node.tokens
            if least < node.tokens < one.tokens and tree.begins_with(one.request, node):
                yield from self._move(one, node)

    def note_gone(self, node: Node, tree: EndTree) -> Iterator[tuple[Node, bool]]:
        """``node`` is kept no longer. O(waiting), and the hash blocks of those that waited for it."""
        for one in list(self._waiting.values()) if node.end.awaited else ():
            if one.node is node:
                yield from self._move(one, one.deepest(tree))

    def forget_ends(self) -> None:
        """Nothing is kept."""
        for one in self._waiting.values():
            one.node = None

    def _move(self, one: _Waiting, node: Node | None) -> Iterator[tuple[Node, bool]]:
        before, one.node = one.node, node
        if before is not None:
            yield before, any(other.node is before for other in self._waiting.values())
        if node is not None:
            yield node, True

    def check(self, tree: EndTree) -> Iterator[str]:
        """A line for each request that begins with another end. O(waiting times their hash blocks)."""
        for one in self._waiting.values():
            if one.node is not one.deepest(tree):
                yield f"request {one.request.request_id!r} waits for another end than the deepest that it begins with"
        awaited = {id(one.node) for one in self._waiting.values()}
        for node in tree.nodes.values():
            if node.end.awaited != (id(node) in awaited):
                yield f"the end of {node.tokens} tokens is awaited: {node.end.awaited}"
