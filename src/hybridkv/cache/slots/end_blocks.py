"""Which blocks an end needs, and what it costs: in each group what a hit that ends there reads.

full attention      every block of its segment (those before are its parent's), and the one its last tokens lie in
windows, chunks     the blocks that the next token reads, and that one
states              the state after its very tokens
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.needs import BlockNeeds
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.slots.end_tree import Node
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
