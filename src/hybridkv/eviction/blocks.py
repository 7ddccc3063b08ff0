"""Which blocks an end needs, and what it costs: in each group what a hit that ends there reads.

full attention      every block of its segment (those before are its parent's), and the one its last tokens lie in
windows, chunks     the blocks that the next token reads, and that one
states              the state after its very tokens

Ends in the tree and the blocks they need, changed together: who comes or goes, and whose cost that changes.

put        an end needs its blocks, those behind it no longer what it needs for them
take_out   it needs nothing, those behind it what it needed for them
owners     of each block that ends need by themselves: states, and what their last tokens lie in

What kept ends need: a block that none needs, and nobody holds, can never be hit with profit and goes first.

    counts[block]   how many kept ends need it; who keeps ends counts (hybridkv.eviction.ranked)
    payers[block]   of several tenants the one whose end needed it first; who it is charged to until none needs it

A block that loses its key is needed by nobody any longer: ``take_lost`` says which of them some end still counted on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.spaces.space import ClassedSpace
from hybridkv.eviction.ranking import Weights
from hybridkv.eviction.resume_points import Node
from hybridkv.request import Request

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_FEW: Final = 3
"""So many blocks are priced one by one sooner than it is seen that they have one size."""


class EndBlocks:
    """groups: all that publish. needs: how many ends need each block of ``pool``."""

    def __init__(self, groups: Sequence[CacheGroup], pool: BlockPool, needs: BlockNeeds) -> None:
        self._pool = pool
        self._needs = needs
        self._bytes = np.array(needs.block_bytes, np.int64)
        self._bytes_of = [float(size) for size in needs.block_bytes]
        tokens = [one for one in groups if one.states is None and not one.kind.by_digest]
        self._states = tuple(one for one in groups if one.states is not None)
        self._full = tuple(one for one in tokens if one.policy.hits.downward_closed)
        self._windows = tuple(one for one in tokens if not one.policy.hits.downward_closed)

    @property
    def overlaps(self) -> bool:
        """Whether what an end needs may reach behind its parent: windows do, and columns of several hash blocks."""
        return bool(self._windows) or any(group.key_stride > 1 for group in self._full)

    # -- where things are

    def segment(self, node: Node) -> list[int] | None:
        """Blocks of full attention in its segment, in order; None where one is not there. O(segment)."""
        start, found = node.depth - len(node.segment), list[int]()
        for group in self._full:
            found += group.index.blocks_of(_columns(group, node.segment, start))
        return None if 0 in found else found

    def window(self, node: Node) -> list[int] | None:
        """Whole blocks that windows and chunks read before it; None where one is not there. O(windows)."""
        found = list[int]()
        keys_of: dict[tuple[int, int, int], list[bytes]] = {}  # groups with the same window read the same keys
        for group in self._windows:
            size, stride = group.policy.block_size, group.key_stride
            read = group.policy.hits.first_needed(node.tokens) // size, node.tokens // size, stride
            if read not in keys_of:
                keys_of[read] = node.keys(read[0] * stride, read[1] * stride)[stride - 1 :: stride]
            found += group.index.blocks_of(keys_of[read])
        return None if 0 in found else found

    def own(self, request: Request, tokens: int) -> list[int] | None:
        """Its states and the blocks that its last tokens lie in; None where one is not there."""
        tails = [_tail(group, request, tokens) for group in (*self._full, *self._windows)]
        found = tails + [group.view(request).labelled(tokens) for group in self._states]
        blocks = [block for block in found if block]
        return None if None in found else blocks

    # -- what it costs

    def charged(self, node: Node) -> list[int]:
        """What ``node`` pays for: its own blocks, its windows, and its segment unless ends behind it need that."""
        return node.own + self._besides(node)

    def _besides(self, node: Node) -> list[int]:
        """All of that but its own blocks. O(its segment)."""
        found = self.window(node) or [] if self._windows else []
        return found if node.children else found + (self.segment(node) or [])

    def _classes(self, ids: Int64) -> Int64:
        of: Int64 = np.searchsorted(self._pool.bases, ids, side="right") - 1
        return of

    def are_held(self, node: Node) -> bool:
        """Whether nothing that ``node`` pays for would be free without it, whichever other ends go: all is held."""
        held = self._pool.ref_count
        return all(map(held, node.own)) and all(map(held, self._besides(node)))

    def frees(self, node: Node, gone: Counter[int], taken: dict[int, int]) -> list[int]:
        """Blocks by class that are free without ``node`` and all those asked before with the same ``gone``.

        gone: for each block that several ends need, how many of those asked do. taken: bytes that each tenant is
        charged no longer without them, those of ``node`` are added; see BlockNeeds.put_back.
        """
        ids = np.array(self.charged(node), np.int64)
        counts = self._needs.counts[ids]
        shared = ids[counts > 1].tolist()
        gone.update(shared)
        last = [block for block in shared if gone[block] == self._needs.counts.item(block)]
        loose = np.concatenate((ids[counts == 1], np.array(last, np.int64)))
        if self._needs.payers.size:
            self._needs.take_off(loose, taken)
        loose = loose[self._pool.ref_counts(loose) == 0]
        found: list[int] = np.bincount(self._classes(loose), minlength=len(self._bytes)).tolist()
        return found

    def would_need(self, request: Request, parent: Node, depth: int, states: Sequence[int]) -> list[int]:
        """Blocks by class of an end at ``depth`` hash blocks behind ``parent`` that no other needs, and ``states``."""
        counts = list(states)
        for group in self._full:
            keys = _columns(group, request.hashes[parent.depth : depth], parent.depth)
            found = np.array(group.index.blocks_of(keys), np.int64)
            counts[self._pool.classes[group.number]] += int(np.count_nonzero(self._needs.counts[found] == 0))
        return counts

    def saving(self, tokens: int, blocks: Sequence[int]) -> float:
        """Tokens saved a byte of ``blocks``, by class; 0.0 where there is none."""
        size = int(np.dot(self._bytes, blocks))
        return tokens / size if size else 0.0

    def saved(self, node: Node) -> float:
        """What ``node``, kept, saves: tokens behind its parent, a byte; 0.0 where it pays for nothing.

        Ends that need the same block share what it costs. O(its segment).
        """
        price = self._price(node.own) + self._price(self._besides(node))
        before = 0 if node.parent is None else node.parent.end.tokens
        return (node.end.tokens - before) / price if price else 0.0

    def _price(self, ids: list[int]) -> float:
        """Bytes of ``ids``, each shared by those that need it."""
        sizes, bases, counts = self._bytes_of, self._pool.bases, self._needs.each
        if len(ids) > _FEW and (of := bisect_right(bases, min(ids))) == bisect_right(bases, max(ids)):
            size = sizes[of - 1]
            return sum([size / (counts[block] or 1) for block in ids])
        return sum([sizes[bisect_right(bases, block) - 1] / (counts[block] or 1) for block in ids])

    # -- counted

    def count(self, node: Node) -> list[int] | None:
        """``node``, whose own blocks are known, needs its blocks: its segment.

        None, and nothing done, where one of all is not there.
        """
        segment, window = self.segment(node), self.window(node)
        if segment is None or window is None:
            return None
        self._needs.add(np.array(segment + window + node.own, np.int64), node.end.tenant)
        return segment

    def discount(self, node: Node, segment: list[int] | None) -> None:
        """``node``, just before it leaves the tree, needs nothing; its children need its ``segment`` each.

        What nobody needs or holds any longer is given up.
        """
        gone = node.own + (self.window(node) or [])[::-1]
        heirs = node.heirs()
        if not heirs:
            gone += (segment or [])[::-1]
        elif segment:
            ids = np.array(segment, np.int64)
            self._needs.counts[ids] += len(heirs) - 1
            self._needs.hand_on(ids, heirs[0].end.tenant)
        loose = self._needs.drop(np.array(gone, np.int64))
        if loose.size:
            loose = loose[self._pool.ref_counts(loose) == 0]
        if loose.size:
            self._needs.space.give_up(loose)

    def pass_on(self, keys: Sequence[bytes], start: int, times: int) -> None:
        """``times`` ends that needed the hash blocks ``keys``, from number ``start`` on, leave them to another."""
        for group in self._full if times else ():
            self._needs.counts[group.index.blocks_of(_columns(group, keys, start))] -= times

    def counted(self, nodes: Sequence[Node]) -> Int32:
        """How many of ``nodes`` need each block, int32[blocks], counted anew."""
        counts = np.zeros_like(self._needs.counts)
        for node in nodes:
            np.add.at(counts, self._blocks_of(node), 1)
        return counts

    def _blocks_of(self, node: Node) -> Int64:
        """All that it needs, those of its segment and windows that are there."""
        return np.array([*(self.segment(node) or []), *(self.window(node) or []), *node.own], np.int64)

    def recount(self, nodes: Sequence[Node]) -> None:
        """``nodes``, whole ones, are all that need anything."""
        self._needs.recount([(node.end.tenant, self._blocks_of(node)) for node in nodes])
        self._needs.space.give_up(np.flatnonzero(self._pool.cached() & (self._needs.counts == 0)))


def _columns(group: CacheGroup, keys: Sequence[bytes], start: int) -> Sequence[bytes]:
    """Of ``keys``, those of hash blocks from ``start`` on, the ones that end a column of ``group``."""
    stride = group.key_stride
    return keys if stride == 1 else keys[(stride - 1 - start) % stride :: stride]


def _tail(group: CacheGroup, request: Request, tokens: int) -> int | None:
    """The block that the last tokens lie in where they fill none; 0 where they do, None where it is not there."""
    column, rest = divmod(tokens, group.policy.block_size)
    hits, view = group.policy.hits, group.view(request)
    if not (rest and hits.copies) or hits.first_needed(tokens) >= tokens:
        return 0
    return view.beginning(column, rest)


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


Ids = NDArray[np.int32] | NDArray[np.int64]

_NONE = np.empty(0, np.int32)


class BlockNeeds:
    """Counts for the blocks of ``space``. block_bytes: of each class. tenants: among whom ``weights`` tells apart.

    For reading: both, counts, and each (the same, quick to read singly); lost (as ``take_lost`` will say); weights;
    cleared (how often all keys were lost at once).
    """

    def __init__(self, space: ClassedSpace, block_bytes: Sequence[int], tenants: int = 1) -> None:
        self.space = space
        space.take_given_first()
        self.block_bytes = tuple(block_bytes)
        self.counts = np.zeros(space.num_blocks, np.int32)
        self.each = self.counts.data
        self._sizes = np.array(block_bytes, np.int64)
        self.weights = Weights(tenants)
        self.payers = np.zeros(space.num_blocks if tenants > 1 else 0, np.int32)
        self.cleared = 0
        self.lost: dict[int, int] = {}

    def add(self, ids: Ids, tenant: int) -> None:
        """One more end of ``tenant`` needs each of ``ids``, distinct, with keys; those given up are kept again."""
        counts = self.counts[ids]
        new = ids[counts == 0]
        self.counts[ids] = counts + 1
        if new.size:
            if self.payers.size:
                self.payers[new] = tenant
                self.weights.add(tenant, self._bytes_of(new))
            self.space.keep(new)

    def recount(self, ends: Sequence[tuple[int, Ids]]) -> None:
        """Ends of these tenants, each of which needs these blocks, are all there are. O(blocks and what ends need).

        Of two blocks with one key the first may have been lost: the other one, given up before, is needed in its place.
        """
        unneeded = self.counts == 0
        self.counts.fill(0)
        for _, needed in ends:
            np.add.at(self.counts, needed, 1)
        again = np.flatnonzero(unneeded & (self.counts > 0))
        self.space.keep(again)
        for tenant, needed in reversed(ends) if self.payers.size else ():
            self.payers[np.intersect1d(again, needed)] = tenant
        self.weights.replace(self.charged())

    def _bytes_of_each(self, ids: Ids) -> Int64:
        sizes: Int64 = self._sizes[np.searchsorted(self.space.bases, ids, side="right") - 1]
        return sizes

    def _bytes_of(self, ids: Ids) -> int:
        return int(self._bytes_of_each(ids).sum())

    def hand_on(self, ids: Ids, tenant: int) -> None:
        """``tenant`` is charged for ``ids``, which its ends need, from now on."""
        if self.payers.size:
            self._discharge(ids)
            self.payers[ids] = tenant
            self.weights.add(tenant, self._bytes_of(ids))

    def _discharge(self, ids: Ids) -> None:
        if self.payers.size:
            self.take_off(ids, {})

    def take_off(self, ids: Ids, taken: dict[int, int]) -> None:
        """Of several tenants charge none for ``ids``, and add to ``taken`` what each was charged. O(ids log ids)."""
        payers, place = np.unique(self.payers[ids], return_inverse=True)
        sizes = np.zeros(payers.size, np.int64)
        np.add.at(sizes, place, self._bytes_of_each(ids))
        for tenant, size in zip(payers.tolist(), sizes.tolist(), strict=True):
            self.weights.add(tenant, -size)
            taken[tenant] = taken.get(tenant, 0) + size

    def put_back(self, taken: dict[int, int]) -> None:
        """Charge each tenant again for what ``take_off`` has added to ``taken``."""
        for tenant, size in taken.items():
            self.weights.add(tenant, size)

    def charged(self) -> list[int]:
        """``weights`` counted anew. O(blocks + tenants)."""
        sizes = np.zeros(len(self.weights.of), np.int64)
        if self.payers.size:
            needed = np.flatnonzero(self.counts)
            np.add.at(sizes, self.payers[needed], self._bytes_of_each(needed))
        found: list[int] = sizes.tolist()
        return found

    def drop(self, ids: Ids) -> Ids:
        """One end less needs each of ``ids``, distinct; those that none needs now."""
        counts = self.counts[ids] - 1
        self.counts[ids] = counts
        loose: Ids = ids[counts == 0]
        self._discharge(loose)
        return loose

    def all_needed(self, ids: Ids) -> bool:
        """Whether some end needs each of ``ids``."""
        return bool(self.counts[ids].all())

    def release(self, ids: Ids) -> None:
        """Those that no end needs are given up."""
        loose = ids[self.counts[ids] == 0]
        if loose.size:
            self.space.give_up(loose)

    def release_one(self, block: int) -> None:
        """It is given up if no end needs it."""
        if not self.each[block]:
            self.space.give_up(np.array([block]))

    def lose(self, ids: Ids) -> None:
        """No end needs them, whatever it counted on."""
        if not (self.counts.item(ids.item(0)) if len(ids) == 1 else self.counts[ids].any()):
            return
        needed = ids[self.counts[ids] > 0]
        self.lost.update(zip(needed.tolist(), self.counts[needed].tolist(), strict=True))
        self._discharge(needed)
        self.counts[needed] = 0

    def lose_one(self, block: int) -> None:
        """As ``lose``."""
        if self.each[block]:
            self.lose(np.array([block]))

    def take_lost(self) -> dict[int, int]:
        """Return the blocks that lost their keys since the last call, with how many ends needed each: 1 or more."""
        lost, self.lost = self.lost, {}
        return lost

    def follow(self, moves: Int64) -> None:
        """Counts go with the blocks, and so do blocks that are lost and not yet taken by ``take_lost``."""
        sources, targets = moves[:, 0], moves[:, 1]
        if self.lost:
            moved = dict(moves.tolist())
            self.lost = {moved.get(block, block): count for block, count in self.lost.items()}
        self.counts[targets] = self.counts[sources]
        self.counts[sources] = 0
        if self.payers.size:
            self.payers[targets] = self.payers[sources]

    def clear(self) -> None:
        """No end needs any block."""
        self.counts.fill(0)
        self.weights.replace([0] * len(self.weights.of))
        self.lost = {}
        self.cleared += 1
