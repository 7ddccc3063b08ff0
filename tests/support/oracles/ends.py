"""Ends as plain lists of tokens: whom each goes on from, who is hit, and what each saves, by looking at all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest

from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.eviction.resume_points import Kind, Place, ResumePoint, ResumePointTree, is_crowded
from hybridkv.request import Request
from hybridkv.testing.event_follower import DifferenceError, same


class Prefix(NamedTuple):
    """keys: of its whole hash blocks; the first says whose it is besides."""

    keys: tuple[bytes, ...]
    tokens: tuple[int, ...]

    def begins(self, other: Prefix) -> bool:
        """Whether ``other`` goes on from here."""
        return self.keys[:1] == other.keys[:1] and self.tokens == other.tokens[: len(self.tokens)]


def prefix_of(request: Request, tokens: int, block: int) -> Prefix:
    """The first ``tokens`` tokens of ``request``."""
    return Prefix(tuple(request.hashes[: tokens // block]), tuple(request.token_ids(0, tokens).tolist()))


class PlainEnds:
    """Hears of every end that is made while it watches, and of every request that begins; see ``watched``.

    unknown: how often an end stood behind another than the last that it begins with, since that one ends inside a block
    of which only the key is known. compared: ends so far. hits: by whether the end was kept.
    """

    def __init__(self) -> None:
        self.prefixes: dict[ResumePoint, Prefix] = {}
        self.unknown = self.compared = 0
        self.hits: Counter[bool] = Counter()

    def expected_hits(
        self, kept: RankedResumePoints, request: Request, without: ResumePoint | None = None
    ) -> list[ResumePoint]:
        """The deepest end that is kept, and the deepest that is known, if nobody knew ``without``."""
        whole = prefix_of(request, request.num_prompt_tokens - 1, kept._hash_block)
        known = [node for node in kept._tree.points.values() if node is not without]
        known = [node for node in known if self.prefixes[node].begins(whole)]
        deepest = max(known, key=lambda node: node.tokens, default=None)
        consumed = max((node for node in known if node.kept), key=lambda node: node.tokens, default=None)
        return [node for node in known if node in {deepest, consumed}]

    def check(self, kept: RankedResumePoints) -> None:
        """DifferenceError where an end stands behind one that it does not begin with, or saves something else."""
        kept._renew_stale(kept._clock())
        nodes = [node for node in kept._tree.points.values() if node.kept]
        before = {node: self.before(node, nodes) or kept._tree.root for node in nodes}
        needs = {node: self.needs(kept, node, before[node]) for node in nodes}
        counts = Counter(block for blocks in needs.values() for block in blocks)
        sizes = kept._blocks._bytes_of
        for node in nodes:
            self.compared += 1
            if kept._blocks.overlaps or is_crowded(node):
                continue
            leaf = node not in before.values()
            blocks = [block for block in needs[node] if leaf or block in node.own]
            price = sum(sizes[kept._pool.class_of(block)] / counts[block] for block in blocks)
            saved = (node.tokens - before[node].tokens) / price if price else 0.0
            if node.saved != pytest.approx(saved, rel=1e-9):
                raise DifferenceError(f"the end of {node.tokens} tokens saves {saved} a byte, not {node.saved}")

    def before(self, node: ResumePoint, nodes: list[ResumePoint]) -> ResumePoint | None:
        """The last end that ``node`` begins with, None without one."""
        own, real = self.prefixes[node], node.parent
        found = [one for one in nodes if one is not node and self.prefixes[one].begins(own)]
        nearest = max(found, key=lambda one: one.tokens, default=None)
        if real is None or (real.parent is not None and real not in found):
            raise DifferenceError(f"the end of {node.tokens} tokens stands behind one that it does not begin with")
        if nearest is None or nearest is real:
            return nearest
        if not nearest.inside[1] or nearest.depth == node.depth:
            raise DifferenceError(f"the end of {node.tokens} tokens does not stand behind that of {nearest.tokens}")
        self.unknown += 1
        return None if real.parent is None else real

    def needs(self, kept: RankedResumePoints, node: ResumePoint, before: ResumePoint) -> list[int]:
        """Its own blocks, and those of whole hash blocks behind ``before``."""
        keys = self.prefixes[node].keys[before.depth :]
        return node.own + [group.index.get(key) or 0 for group in kept._blocks._full for key in keys]


@contextmanager
def watched() -> Iterator[PlainEnds]:
    """Every end, and every request that begins, is looked at: DifferenceError where another is hit than should be."""
    plain, begin = PlainEnds(), RankedResumePoints.begin
    make, place_of, asked = ResumePointTree.make, ResumePointTree.place_of, dict[Place, Prefix]()

    def watch_place(self: ResumePointTree, request: Request, tokens: int) -> Place | None:
        place = place_of(self, request, tokens)
        if place is not None:
            asked[place] = prefix_of(request, tokens, self._hash_block)
        return place

    def watch_make(  # noqa: PLR0917 - what an end is
        self: ResumePointTree, place: Place, kind: Kind, tokens: int, now: float, gap: float | None, tenant: int
    ) -> ResumePoint:
        node = make(self, place, kind, tokens, now, gap, tenant)
        plain.prefixes[node] = asked[place]
        return node

    def watch_begin(self: RankedResumePoints, request: Request, hit_tokens: int) -> None:
        self.settle()
        before = {end: end.hits for end in ends_of(self)}
        known = self._tree.find(request, hit_tokens)
        expected, again, lost = list[ResumePoint](), None, list[ResumePoint]()
        if request.first_hit_tokens is None and request.reads_prefix_cache:
            expected = plain.expected_hits(self, request)
            if known is not None and not known.kept and known.tokens < request.num_prompt_tokens:
                deeper = [node for node in expected if node.tokens > known.tokens]
                # it is kept again, and consumed, if it can be: what a branch shares with its parent may be unpublished
                expected, again, lost = [*deeper, known], known, plain.expected_hits(self, request, known)
        plain.hits.update(node.kept for node in expected)
        begin(self, request, hit_tokens)
        wanted = set(expected if again is None or again.kept else lost)
        for end in ends_of(self):
            same(f"hits of the end of {end.tokens} tokens", end.hits - before.get(end, 0), int(end in wanted))

    with (
        patch.object(ResumePointTree, "place_of", watch_place),
        patch.object(ResumePointTree, "make", watch_make),
        patch.object(RankedResumePoints, "begin", watch_begin),
    ):
        yield plain


def ends_of(kept: RankedResumePoints) -> list[ResumePoint]:
    """Kept and remembered."""
    return list(kept._tree.points.values())
