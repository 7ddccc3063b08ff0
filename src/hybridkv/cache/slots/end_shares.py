"""Ends in the tree and the blocks they need, changed together: who comes or goes, and whose cost that changes.

put        an end needs its blocks, those behind it no longer what it needs for them
take_out   it needs nothing, those behind it what it needed for them
owners     of each block that ends need by themselves: states, and what their last tokens lie in
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.needs import BlockNeeds
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.slots.end_blocks import EndBlocks
from hybridkv.cache.slots.end_tree import Node
from hybridkv.request import Request

Int64 = NDArray[np.int64]


class EndShares:
    """groups: all that publish. needs: counts of blocks of ``pool``. For reading: blocks, and owners by block."""

    def __init__(self, groups: Sequence[CacheGroup], pool: BlockPool, needs: BlockNeeds) -> None:
        self._pool = pool
        self.blocks = EndBlocks(groups, pool, needs)
        self.owners: dict[int, list[Node]] = {}

    def clear(self) -> None:
        """There are no ends."""
        self.owners = {}

    # -- who comes and goes

    def put(self, request: Request, node: Node, parent: Node) -> list[Node] | None:
        """``node``, of ``request``, is kept behind ``parent``; those whose costs are others now. O(its blocks).

        None, and nothing done, where one of its blocks is not there.
        """
        own = self.blocks.own(request, node.tokens)
        node.segment, node.parent = request.hashes[parent.depth : node.depth], parent
        node.own = own or []
        segment = None if own is None else self.blocks.count(node)
        if segment is None:
            node.parent, node.segment, node.own = None, [], []
            return None
        for block in node.own:
            self.owners.setdefault(block, []).append(node)
        following = self._following(request, node)
        changed = list[Node]()
        if parent.inside[1]:
            known = following if parent.depth == node.depth else node.segment[:1]
            changed = [one for late in parent.overtaken_by(known) for one in self._put_behind(late, parent)]
        behind, paid = parent.behind(node, following), not parent.children
        self.blocks.pass_on(node.segment, parent.depth, len(behind))
        for child in behind:
            child.unlink()
            child.segment = child.segment[len(node.segment) :]
        node.link(parent)
        for child in behind:
            child.link(node)
        node.kept = True
        changed += behind + self.beside(node, segment)
        return [node, parent, *changed] if paid or self.blocks.overlaps else [node, *changed]

    def _following(self, request: Request, node: Node) -> set[bytes]:
        """Keys of blocks that begin with the last tokens of ``node``, which fill none: those that are known."""
        if not node.inside[1]:
            return set()
        keys = {key for block in node.own if (key := self._pool.key_of(block)) is not None}
        return keys.union(request.hashes[node.depth : node.depth + 1])

    def _put_behind(self, node: Node, parent: Node) -> list[Node]:
        """``node`` is known to begin as ``parent``, which stands behind the same end; whose costs are others now."""
        changed, at = [node], parent
        while at is not node.parent and at.parent is not None:
            changed += [at, *self.beside(at, self.blocks.segment(at))]
            at = at.parent
        before = node.unlink()
        length = parent.depth - before.depth
        self.blocks.pass_on(node.segment[:length], before.depth, 1)
        node.segment = node.segment[length:]
        node.link(parent)
        return changed

    def take_out(self, node: Node) -> tuple[Node, list[Node]]:
        """``node`` is kept no longer: its parent, and all whose costs are others now. O(its segment, its children).

        What nobody needs or holds any longer is given up.
        """
        segment = self.blocks.segment(node)
        changed = self.beside(node, segment)
        self.blocks.discount(node, segment)
        parent, heirs = self.cut(node)
        changed = heirs + changed
        if not parent.children or self.blocks.overlaps:
            changed.append(parent)
        return parent, changed

    def cut(self, node: Node) -> tuple[Node, list[Node]]:
        """Out of the tree, what it needs being counted as before: its parent, and the children, now that one's."""
        for block in node.own:
            owners = self.owners[block]
            owners.remove(node)
            if not owners:
                del self.owners[block]
        around = node.detach()
        node.own, node.segment, node.kept = [], [], False
        return around

    # -- who is concerned

    def beside(self, node: Node, segment: list[int] | None) -> list[Node]:
        """Ends that may pay for a block that ``node`` needs, children and parent left out; windows are not looked at.

        Those with ends behind them pay for no segment.
        """
        owners = self.owners
        found = [
            one for block in node.own + (segment or []) if block in owners for one in owners[block] if one is not node
        ]
        others = node.siblings()
        keys = {key for block in node.own if (key := self._pool.key_of(block)) is not None}
        if keys:  # who goes on behind the block that it ends in
            others += [one for before in node.level() for key in sorted(keys) for one in before.few(key)]
        return found + [one for one in others if self.blocks.overlaps or not one.children]

    # -- what happens to blocks

    def follow(self, moves: Int64) -> None:
        """Blocks moved, int64[m, 2] of (source, target). O(moves)."""
        pairs = moves.tolist()
        found = [(source, target, self.owners.pop(source, None)) for source, target in pairs]
        for source, target, owners in found:
            if owners is None:
                continue
            self.owners[target] = owners
            for node in owners:
                node.own = [target if block == source else block for block in node.own]

    def lose(self, lost: Mapping[int, int]) -> tuple[set[Node], bool]:
        """Forget blocks that lost their keys, as blocks of their own of resume points.

        lost: block -> how many resume points needed it. O(lost and their owners).

        Returns the resume points that owned one, and whether no other resume point needed any of them.
        """
        broken, owned_alone = set[Node](), True
        for block, count in lost.items():
            owners = self.owners.pop(block, [])
            owned_alone &= len(owners) == count
            for node in owners:
                node.own.remove(block)
                broken.add(node)
        return broken, owned_alone
