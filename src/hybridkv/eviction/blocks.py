"""Count the blocks that resume points need, and their cost.

A resume point needs, in each group, the blocks that a hit at its token count reads:

full attention      every block of its segment (its parent needs the earlier blocks), and its partial block
windows, chunks     the blocks that the next token reads, and its partial block
states, rings       the state at exactly its token count; none of a ring that is empty there
encoder outputs     all of them, if the cache has all

The partial block holds the last tokens of a resume point that is not at a block boundary.

A block that no kept resume point needs and no request holds is unneeded: no useful hit reads it, so it is reused first.

    counts[block]   how many kept resume points need it
    payers[block]   with several tenants, the charged one: its resume point needed the block first, or inherited it
    owners[block]   the resume points that list it as their own: of a state, a partial block or the encoder's output
    watchers[block] the serial of the last resume point that waits for its release; others are in a table

``read`` follows the changes of blocks in the order of the journal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.journal import BlockFact, Ids, Lost, Moved, Released
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.spaces.ranked_order import RankedOrder
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.eviction.resume_points import (
    ResumePoint,
    children_after,
    children_of,
    detach,
    few,
    keys_of,
    level_of,
    link,
    overtaken_by,
    siblings_of,
    unlink,
)
from hybridkv.eviction.tenants import Weights
from hybridkv.request import Request

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_FEW: Final = 8
"""Up to this many blocks are priced one by one, because arrays have a fixed cost; chosen by hand."""

_MOST_SEGMENTS: Final = 256
"""Segments whose blocks are remembered; chosen by hand."""

_NO_BLOCKS: Final = np.empty(0, np.int64)


class PointBlocks:
    """Count the blocks of resume points as they come and go.

    Args:
        groups: The groups that publish blocks, or find them by digest.
        pool: The pool of the blocks.
        space: The space of ``pool``.
        block_bytes: Bytes of a block of each class.
        tenants: Number of tenants.

    Attributes:
        owners: block -> the resume points that list it as their own.
        counts: Resume points that need each block, int32[blocks].
        payers: The tenant that is charged for each block, int32[blocks]; empty for a single tenant.
        num_watched: Blocks with a watcher; mostly none.
        weights: Bytes that each tenant is charged.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        space: RankedOrder | SlabSpace,
        block_bytes: Sequence[int],
        tenants: int = 1,
    ) -> None:
        self.owners: dict[int, list[ResumePoint]] = {}
        self.space = space
        space.take_unneeded_first()
        self.counts = np.zeros(pool.num_blocks, np.int32)
        self._each = self.counts.data  # a memoryview reads single counts faster
        self._first_place = np.zeros(pool.num_blocks, np.int32)  # scratch memory of _mark_unneeded
        self._watchers = np.zeros(pool.num_blocks, np.int64)
        self._other_watchers: dict[int, set[int]] = {}
        self.num_watched = 0
        self.weights = Weights(tenants)
        self.payers = np.zeros(pool.num_blocks if tenants > 1 else 0, np.int32)
        self._pool = pool
        self._segments: dict[int, tuple[list[bytes], Int64]] = {}  # by serial of a point; its keys, and their blocks
        self._bytes = np.array(block_bytes, np.int64)
        self._bytes_of = [float(size) for size in block_bytes]
        tokens = [one for one in groups if one.kind.keeps_tokens]
        self._states = tuple(one for one in groups if one.kind.in_place)
        self._encoded = tuple(one for one in groups if one.kind.by_digest)
        self._full = tuple(one for one in tokens if one.policy.hits.downward_closed)
        self._windows = tuple(one for one in tokens if not one.policy.hits.downward_closed)
        classes = {pool.classes[group.number] for group in tokens}
        self._token_bytes = self._bytes_of[min(classes)] if len(classes) == 1 else None  # of a block of any such group
        self.overlaps = bool(self._windows) or any(group.hashes_per_block > 1 for group in self._full)
        """Whether a resume point may need blocks before its parent: for windows, and columns of several hash blocks."""

    # -- find the blocks of a resume point

    def segment(self, point: ResumePoint) -> Int64 | None:
        """Return the blocks of full attention in its segment, in order; None if one is missing. O(segment)."""
        start, found = point.depth - len(point.segment), list[int]()
        for group in self._full:
            found += group.index.blocks_of(_columns(group, point.segment, start))
        return None if 0 in found else np.array(found, np.int64)

    def kept_segment(self, point: ResumePoint) -> Int64:
        """Return the blocks of the segment of a kept point, without a block if one is missing.

        Choices of victims ask several times for the same segments. They are remembered until a needed block loses its
        key, or a block moves.
        """
        known = self._segments.get(point.serial)
        if known is not None and known[0] is point.segment:
            return known[1]
        found = self.segment(point)
        if found is None:
            return _NO_BLOCKS
        self._remember(point, found)
        return found

    def _remember(self, point: ResumePoint, segment: Int64) -> None:
        if len(self._segments) >= _MOST_SEGMENTS:
            self._segments.clear()
        self._segments[point.serial] = point.segment, segment

    def window(self, point: ResumePoint) -> list[int] | None:
        """Return the whole blocks that windows and chunks read before it; None if one is missing. O(windows)."""
        found = list[int]()
        if not self._windows:
            return found
        keys_read: dict[tuple[int, int, int], list[bytes]] = {}  # groups with the same window read the same keys
        for group in self._windows:
            size, stride = group.policy.block_size, group.hashes_per_block
            read = group.policy.hits.first_needed(point.tokens) // size, point.tokens // size, stride
            if read not in keys_read:
                keys_read[read] = keys_of(point, read[0] * stride, read[1] * stride)[stride - 1 :: stride]
            found += group.index.blocks_of(keys_read[read])
        return None if 0 in found else found

    def _own(self, request: Request, tokens: int) -> list[int] | None:
        """Return the states, partial blocks and encoder output at ``tokens`` of ``request``.

        None if a state or a partial block is missing.
        """
        found = list[int | None]()
        for group in (*self._full, *self._windows):
            column, rest = divmod(tokens, group.policy.block_size)
            hits = group.policy.hits
            if rest and hits.copies and hits.first_needed(tokens) < tokens:
                found.append(group.index.beginning(request, column, rest))
        found += [group.index.state_at(request, tokens) for group in self._states]
        for group in self._encoded if request.encoder is not None else ():
            found += group.encoded(request).tolist()
        return None if None in found else [block for block in found if block]

    # -- costs

    def _more_blocks(self, point: ResumePoint) -> Int64:
        """Return the blocks that ``point`` pays for next to its own: windows, and its segment if it is a leaf."""
        segment = _NO_BLOCKS if point.children else self.kept_segment(point)
        if not self._windows or not (window := self.window(point)):
            return segment
        return np.concatenate((np.array(window, np.int64), segment))

    def look(self, point: ResumePoint) -> tuple[float, bool]:
        """Return ``saved`` of ``point``, and whether its eviction frees nothing: requests hold all its blocks."""
        more = self._more_blocks(point)
        return self._saved(point, more), self._all_held(point.own, more)

    def watch(self, point: ResumePoint) -> None:
        """Let ``read`` return ``point``, all of whose blocks requests hold, when one of them is released. O(blocks)."""
        ids = np.concatenate((np.array(point.own, np.int64), self._more_blocks(point)))
        before = self._watchers[ids]
        self._watchers[ids] = point.serial
        others = before.nonzero()[0].tolist()
        self.num_watched += len(ids) - len(others)
        for place in others:
            self._other_watchers.setdefault(ids.item(place), set()).add(before.item(place))

    def _watchers_of(self, ids: Int64) -> set[int]:
        """Return the serials of the resume points that watch one of ``ids``, which watch them no longer."""
        if not self.num_watched:
            return set()
        serials, others = self._watchers[ids], self._other_watchers
        self.num_watched -= int(np.count_nonzero(serials))
        self._watchers[ids] = 0
        found = set[int](serials.tolist())
        found.discard(0)  # no point
        return found.union(*(others.pop(block, ()) for block in ids.tolist())) if others else found

    def _all_held(self, own: Sequence[int], more: Int64) -> bool:
        held = self._pool.ref_counts(more)
        return all(map(self._pool.ref_count, own)) and np.count_nonzero(held) == len(held)

    def frees(self, point: ResumePoint, gone: Counter[int], taken: dict[int, int]) -> list[int]:
        """Return how many more blocks of each class become free if ``point`` is evicted too.

        Calls with one ``gone`` form a series: each counts the victims of the calls before. They lower ``weights``;
        ``put_back`` restores them.

        Args:
            point: The next victim.
            gone: For each block that several resume points need, how many victims need it; updated.
            taken: Bytes that each tenant is no longer charged without the victims; updated.
        """
        ids = np.concatenate((np.array(point.own, np.int64), self._more_blocks(point)))
        counts = self.counts[ids]
        shared = ids[counts > 1].tolist()
        gone.update(shared)
        last = [block for block in shared if gone[block] == self.counts.item(block)]
        loose = np.concatenate((ids[counts == 1], np.array(last, np.int64)))
        if self.payers.size:
            self._take_off(loose, taken)
        loose = loose[self._pool.ref_counts(loose) == 0]
        found: list[int] = np.bincount(self._pool.classes_of(loose), minlength=len(self._bytes)).tolist()
        return found

    def saving(self, request: Request, point: ResumePoint, parent: ResumePoint, states: Sequence[int]) -> float:
        """Return the tokens per byte that ``point``, not kept, would save below ``parent``; 0.0 if it needs no byte.

        Bytes count only in blocks that no other resume point needs. states: blocks of each class that it takes.
        """
        counts = list(states)
        for group in self._full:
            keys = _columns(group, request.hashes[parent.depth : point.depth], parent.depth)
            found = np.array(group.index.blocks_of(keys), np.int64)
            counts[self._pool.classes[group.number]] += int(np.count_nonzero(self.counts[found] == 0))
        size = int(np.dot(self._bytes, counts))
        return (point.tokens - parent.tokens) / size if size else 0.0

    def saved(self, point: ResumePoint) -> float:
        """Return the tokens after its parent that ``point``, kept, saves per byte; 0.0 if it pays for no block.

        Resume points that need the same block share its cost. O(its segment).
        """
        return self._saved(point, self._more_blocks(point))

    def _saved(self, point: ResumePoint, more: Int64) -> float:
        price = self._price(point.own) + (self._price_of_many(more) if len(more) > _FEW else self._price(more.tolist()))
        before = 0 if point.parent is None else point.parent.tokens
        return (point.tokens - before) / price if price else 0.0

    def _price(self, ids: list[int]) -> float:
        """Return the bytes of ``ids``, each divided by the number of resume points that need it."""
        sizes, bases, counts = self._bytes_of, self._pool.bases, self._each
        return sum([sizes[bisect_right(bases, block) - 1] / (counts[block] or 1) for block in ids])

    def _price_of_many(self, ids: Int64) -> float:
        """Return ``_price`` of blocks of tokens: additions in the same order, which sums of whole bytes do not need."""
        size, counts = self._token_bytes, self.counts[ids]
        if size is None:
            return self._price(ids.tolist())
        if np.maximum.reduce(counts) <= 1:
            return size * len(ids)
        return sum([size / (count or 1) for count in counts.tolist()])

    # -- resume points come and go

    def put(self, request: Request, point: ResumePoint, parent: ResumePoint) -> list[ResumePoint] | None:
        """Keep ``point``, of ``request``, below ``parent``. Return the points with changed costs. O(its blocks).

        Returns None, and does nothing, if one of its blocks is missing.
        """
        own = self._own(request, point.tokens)
        if own is None:
            return None
        point.segment, point.parent, point.own = request.hashes[parent.depth : point.depth], parent, own
        segment, window = self.segment(point), self.window(point)
        if segment is None or window is None:
            point.segment, point.parent, point.own = [], None, []
            return None
        more = window + own
        self._add(np.concatenate((segment, np.array(more, np.int64))) if more else segment, point.tenant)
        self._remember(point, segment)
        for block in own:
            self.owners.setdefault(block, []).append(point)
        following = self._following(request, point) if point.inside[1] else set[bytes]()
        changed = list[ResumePoint]()
        if parent.inside[1]:
            known = following if parent.depth == point.depth else point.segment[:1]
            changed = [one for late in overtaken_by(parent, known) for one in self._put_below(late, parent)]
        after, paid = children_after(parent, point, following), not parent.children
        if after:
            self._pass_on(point.segment, parent.depth, len(after))
        for child in after:
            unlink(child)
            child.segment = child.segment[len(point.segment) :]
        link(point, parent)
        for child in after:
            link(child, point)
        point.kept = True
        changed += after + self._others(point, segment)
        return [point, parent, *changed] if paid or self.overlaps else [point, *changed]

    def _pass_on(self, keys: Sequence[bytes], start: int, times: int) -> None:
        """Count ``times`` fewer resume points for the blocks of ``keys``, hash blocks from ``start`` on."""
        for group in self._full:
            self.counts[group.index.blocks_of(_columns(group, keys, start))] -= times

    def _following(self, request: Request, point: ResumePoint) -> set[bytes]:
        """Return the known keys of blocks that begin with the tokens of ``point``, which ends inside a block."""
        return self._keys_of(point.own).union(request.hashes[point.depth : point.depth + 1])

    def _put_below(self, point: ResumePoint, parent: ResumePoint) -> list[ResumePoint]:
        """Put ``point`` below ``parent``, now known to be its prefix. Return the points with changed costs."""
        changed, at = [point], parent
        while at is not point.parent and at.parent is not None:
            changed += [at, *self._others(at, self.kept_segment(at))]
            at = at.parent
        before = unlink(point)
        length = parent.depth - before.depth
        self._pass_on(point.segment[:length], before.depth, 1)
        point.segment = point.segment[length:]
        link(point, parent)
        return changed

    def take_out(self, point: ResumePoint) -> tuple[ResumePoint, list[ResumePoint]]:
        """Keep ``point`` no longer, and mark its unneeded blocks. O(its segment, its children).

        Each of its children then needs its segment. Returns its parent, and the points with changed costs.
        """
        segment, children = self.kept_segment(point), children_of(point)
        changed = self._others(point, segment)
        gone = np.array(point.own + (self.window(point) or [])[::-1], np.int64)
        if not children:
            gone = np.concatenate((gone, segment[::-1]))
        elif segment.size:
            self.counts[segment] += len(children) - 1
            if self.payers.size:
                self._discharge(segment)
                self._charge(segment, children[0].tenant)
        loose = self._drop(gone)
        if loose.size:
            loose = loose[self._pool.ref_counts(loose) == 0]
        if loose.size:
            self.space.mark_unneeded(loose)
        parent, children = self.cut(point)
        changed = children + changed
        if not parent.children or self.overlaps:
            changed.append(parent)
        return parent, changed

    def cut(self, point: ResumePoint) -> tuple[ResumePoint, list[ResumePoint]]:
        """Take ``point`` out of the tree, counts unchanged. Return its parent and its children, moved to the parent."""
        for block in point.own:
            owners = self.owners[block]
            owners.remove(point)
            if not owners:
                del self.owners[block]
        self._segments.pop(point.serial, None)
        around = detach(point)
        point.own, point.segment, point.kept = [], [], False
        return around

    def _others(self, point: ResumePoint, segment: Int64) -> list[ResumePoint]:
        """Return other resume points that may share the cost of a block of ``point``, except parent and children.

        Resume points with children pay for no segment, so they are left out unless windows overlap.
        """
        owners, blocks = self.owners, point.own + segment.tolist()
        found, others = list[ResumePoint](), siblings_of(point)
        if not owners.keys().isdisjoint(blocks):
            found = [one for block in blocks if block in owners for one in owners[block] if one is not point]
        if point.own and (keys := self._keys_of(point.own)):  # resume points that continue after its partial block
            others += [one for before in level_of(point) for key in sorted(keys) for one in few(before, key)]
        return found + [one for one in others if self.overlaps or not one.children] if others else found

    def _keys_of(self, blocks: Sequence[int]) -> set[bytes]:
        """Return the keys of ``blocks`` that have one."""
        key_of = self._pool.keys.key_of
        return {key for block in blocks if (key := key_of(block)) is not None}

    # -- changes of blocks

    def read(self, facts: Sequence[BlockFact]) -> tuple[dict[int, int], set[int]]:
        """Follow the changes of blocks. O(their blocks).

        A block that no resume point needs and no request holds is marked as unneeded, in the order of the last
        releases. A block that lost its key is needed no longer.

        Args:
            facts: The changes, in order. No block moves after its release: facts are read when room is made, and room
                is made before blocks move.

        Returns:
            The needed blocks that lost their keys, each with the number of resume points that needed it; and the
            serials of resume points that watch a released block.
        """
        lost, released, watchers = dict[int, int](), list[Int64](), set[int]()
        for fact in facts:
            if isinstance(fact, Released):
                ids = np.asarray(fact.ids, np.int64)
                released.append(ids)
                watchers |= self._watchers_of(ids)
            elif isinstance(fact, Lost):
                if np.count_nonzero(counts := self.counts[fact.ids]):
                    self._segments.clear()
                    needed = fact.ids[counts > 0]
                    lost.update(zip(needed.tolist(), self.counts[needed].tolist(), strict=True))
                    self._discharge(needed)
                    self.counts[needed] = 0
            elif isinstance(fact, Moved):
                lost = self._follow(fact.moves, lost)
        self._mark_unneeded(released)
        return lost, watchers

    def _mark_unneeded(self, released: Sequence[Int64]) -> None:
        """Mark the blocks of ``released`` that nothing needs or holds as unneeded, each at its last release."""
        if not released:
            return
        ids = released[0] if len(released) == 1 else np.concatenate(released[::-1])  # the last released come first
        loose = ids[self.counts[ids] == 0]
        if loose.size:  # seldom
            loose = loose[(self._pool.ref_counts(loose) == 0) & self._pool.keys.are_on(loose)]
        if len(released) > 1 and loose.size > 1:
            places = np.arange(loose.size)
            self._first_place[loose[::-1]] = places[::-1]
            loose = loose[self._first_place[loose] == places]
        if loose.size:
            self.space.mark_unneeded(loose)

    def _follow(self, moves: Int64, lost: dict[int, int]) -> dict[int, int]:
        """Follow moves, int64[m, 2] of (source, target). Return ``lost`` under its new numbers. O(moves)."""
        sources, targets, moved = moves[:, 0], moves[:, 1], dict(moves.tolist())
        self._segments.clear()
        self.counts[targets] = self.counts[sources]
        self.counts[sources] = 0
        self.num_watched -= int(np.count_nonzero(self._watchers[targets]))
        self._watchers[targets] = self._watchers[sources]
        self._watchers[sources] = 0
        self._other_watchers = {moved.get(block, block): serials for block, serials in self._other_watchers.items()}
        if self.payers.size:
            self.payers[targets] = self.payers[sources]
        found = [(source, target, self.owners.pop(source, None)) for source, target in moves.tolist()]
        for source, target, owners in found:
            if owners is not None:
                self.owners[target] = owners
                for point in owners:
                    point.own = [target if block == source else block for block in point.own]
        if not lost:
            return lost
        return {moved.get(block, block): count for block, count in lost.items()}

    def clear(self) -> None:
        """Need no block, since all blocks lost their keys."""
        self.owners.clear()
        self._segments.clear()
        self.counts.fill(0)
        self._watchers.fill(0)
        self.num_watched = 0
        self._other_watchers.clear()
        self.weights.replace([0] * len(self.weights.of))

    def all_needed(self, ids: Ids) -> bool:
        """Return whether some resume point needs each of ``ids``."""
        return bool(self.counts[ids].all())

    def lose(self, lost: Mapping[int, int]) -> tuple[set[ResumePoint], bool]:
        """Remove blocks that lost their keys from ``owners`` and from ``own`` of their resume points.

        Args:
            lost: block -> how many resume points needed it.

        Returns:
            The resume points that owned one, and whether no other resume point needed any of the blocks.
        """
        broken, owned_alone = set[ResumePoint](), True
        for block, count in lost.items():
            owners = self.owners.pop(block, [])
            owned_alone &= len(owners) == count
            for point in owners:
                point.own.remove(block)
                broken.add(point)
        return broken, owned_alone

    def counted(self, points: Sequence[ResumePoint]) -> Int32:
        """Return how many of ``points`` need each block, int32[blocks], counted anew."""
        counts = np.zeros_like(self.counts)
        for point in points:
            np.add.at(counts, self._blocks_of(point), 1)
        return counts

    def recount(self, points: Sequence[ResumePoint]) -> None:
        """Count anew the blocks that ``points`` need: all kept resume points, each with all its blocks."""
        self._recount([(point.tenant, self._blocks_of(point)) for point in points])
        self.space.mark_unneeded((self._pool.cached() & (self.counts == 0)).nonzero()[0])

    def _blocks_of(self, point: ResumePoint) -> Int64:
        """Return the blocks that it needs, without a segment or window that misses a block."""
        own = np.array([*(self.window(point) or []), *point.own], np.int64)
        segment = self.segment(point)
        return own if segment is None else np.concatenate((segment, own))

    # -- counts, and charges of tenants

    def _add(self, ids: Ids, tenant: int) -> None:
        """Count one more resume point of ``tenant`` for each of ``ids``, which are distinct and have keys."""
        if len(ids) > _FEW:
            counts = self.counts[ids]
            new = ids[counts == 0]
            self.counts[ids] = counts + 1
        else:
            each, blocks = self._each, ids.tolist()
            new = np.array([block for block in blocks if not each[block]], np.int64)
            for block in blocks:
                each[block] += 1
        if new.size:
            if self.payers.size:
                self._charge(new, tenant)
            self.space.keep(new)

    def _recount(self, points: Sequence[tuple[int, Ids]]) -> None:
        """Count anew the blocks that resume points need. O(blocks and needs).

        If two blocks have one key and the first was lost, the second is needed in its place, although it was marked as
        unneeded before.

        points: the tenant of each resume point, and the blocks that it needs.
        """
        unneeded = self.counts == 0
        self.counts.fill(0)
        for _, needed in points:
            np.add.at(self.counts, needed, 1)
        again = np.flatnonzero(unneeded & (self.counts > 0))
        self.space.keep(again)
        for tenant, needed in reversed(points) if self.payers.size else ():
            self.payers[np.intersect1d(again, needed)] = tenant
        self.weights.replace(self.charged())

    def _bytes_of_each(self, ids: Ids) -> Int64:
        sizes: Int64 = self._bytes[self._pool.classes_of(ids)]
        return sizes

    def _charge(self, ids: Ids, tenant: int) -> None:
        """Charge ``tenant``, one of several, for ``ids``, for which no tenant is charged."""
        self.payers[ids] = tenant
        self.weights.add(tenant, int(self._bytes_of_each(ids).sum()))

    def _discharge(self, ids: Ids) -> None:
        if self.payers.size:
            self._take_off(ids, {})

    def _take_off(self, ids: Ids, taken: dict[int, int]) -> None:
        """Charge no tenant for ``ids``, and add the former charge of each tenant to ``taken``. O(ids log ids)."""
        payers, place = np.unique(self.payers[ids], return_inverse=True)
        sizes = np.zeros(payers.size, np.int64)
        np.add.at(sizes, place, self._bytes_of_each(ids))
        for tenant, size in zip(payers.tolist(), sizes.tolist(), strict=True):
            self.weights.add(tenant, -size)
            taken[tenant] = taken.get(tenant, 0) + size

    def put_back(self, taken: dict[int, int]) -> None:
        """Charge each tenant again for the bytes that calls of ``frees`` added to ``taken``."""
        for tenant, size in taken.items():
            self.weights.add(tenant, size)

    def charged(self) -> list[int]:
        """Return ``weights`` counted anew. O(blocks + tenants)."""
        sizes = np.zeros(len(self.weights.of), np.int64)
        if self.payers.size:
            needed = np.flatnonzero(self.counts)
            np.add.at(sizes, self.payers[needed], self._bytes_of_each(needed))
        found: list[int] = sizes.tolist()
        return found

    def _drop(self, ids: Ids) -> Ids:
        """Count one resume point less for each of the distinct ``ids``. Return the ids that no resume point needs."""
        counts = self.counts[ids] - 1
        self.counts[ids] = counts
        loose: Ids = ids[counts == 0]
        self._discharge(loose)
        return loose


def _columns(group: CacheGroup, keys: Sequence[bytes], start: int) -> Sequence[bytes]:
    """Return the keys that end a column of ``group``. keys: of the hash blocks from number ``start`` on."""
    stride = group.hashes_per_block
    return keys if stride == 1 else keys[(stride - 1 - start) % stride :: stride]
