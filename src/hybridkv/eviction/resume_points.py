r"""Find resume points by prefix: a tree of the kept ones, and ghost entries for evicted or declined ones.

A ghost entry (ARC: Megiddo & Modha, FAST 2003) records a resume point without its blocks. The parent of a kept resume
point is the nearest kept one before it:

    root ---- A ----- B         segment: the keys of the hash blocks between a resume point and its parent
      \        `----- C         chain: the key of the last whole hash block before it, under which it is found
       `----- D                 inside: the tokens after that block, with the key that they continue

    tokens    0 ........ A ............ B
    blocks    |  segment of A  |  segment of B  |inside|

A parent is a prefix of its children, token for token. The tree knows whole blocks only by their keys, so it cannot
order a resume point inside a block and an older one that continues after the same whole blocks: neither becomes the
parent of the other. A resume point inside a block is a prefix of all resume points that continue with one key, or of no
such point.

Each resume point has a kind:

PROMPT    before the last token of a prompt          BRANCH    where requests diverged, or a resume mark
OUTPUT    after the output of a request              GRID      any other checkpoint position of a placement
BOUNDARY  the last block boundary of a prompt, if hits may also end inside the block after it

and a hint (docs/design/0026):

NOTHING   no hint concerns it                        NEVER     its session is over, or continues elsewhere
BY_ALL    within the prefix shared by many           SOMETIME  its session resumes here
WITHIN    and greater values: its session resumes here within 4, 16, 64 ... seconds

For the ranking each hint is a class of its own with an initial rate, which observed hits outweigh.

The tree also knows the requests that wait, and the deepest kept resume point of each: it is evicted after all others of
its tenant. Tokens that a request gets while it waits (from steps in flight when it was preempted) are ignored.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from typing import Final, NamedTuple

from hybridkv.cache.eviction_policy import Below
from hybridkv.cache.index import TOKEN_BYTES, opening
from hybridkv.cache.publisher import HitEnds
from hybridkv.errors import CacheError
from hybridkv.request import NO_HINTS, Hints, Request

NOTHING: Final = 0
NEVER: Final = 1
BY_ALL: Final = 2
SOMETIME: Final = 3
WITHIN: Final = 4

WHOLE: Final = (b"", b"")
"""``ResumePoint.inside`` at the boundary of a hash block."""

_SHORTEST_GAP: Final = 1e-3
"""The smallest counted number of seconds between two hits; chosen by hand."""


class Kind(IntEnum):
    """Say where a resume point was made; see the module."""

    PROMPT = 0
    OUTPUT = 1
    BRANCH = 2
    GRID = 3
    BOUNDARY = 4


@dataclass(slots=True, eq=False)
class ResumePoint:
    """A token count of a prefix at which a later request can resume: kept, or a ghost entry.

    Attributes:
        serial: Its number in the order in which resume points were first made.
        kind, hint: Where it was made, and its hint (both are explained at the top of this module).
        tokens: Tokens of the prefix.
        used: The time in seconds when it was kept or last hit.
        session_gap: Seconds that its session had paused when it was made; None for a new session.
        tenant: Number of the tenant that is charged for its blocks.
        depth: Whole hash blocks before it.
        chain, inside, parent, children, segment: Its place in the tree (drawn at the top of this module).
        own: Blocks at exactly its token count, its states and its partial blocks; and its encoder's output.
        kept: Whether it is kept; otherwise it is a ghost entry.
        ranked: Whether it may be evicted.
        hits: Hits so far.
        log_gap: Mean of the natural logarithm of the seconds between hits, in which the last counts half; 0.0 before
            the first.
        saved: Tokens after its parent for each byte that it needs.
        worth: ``saved``, or the tokens computed in the time in which a byte comes back from its copy, if fewer.
        below: Its copy on the tier below; None if none is known.
        awaited: Whether a waiting request will resume here.
        safe_until: The time in seconds at which the longest time to live ends that a request asked for.
        protected: Whether it is evicted after all others of its tenant: it is awaited, or its time to live lasts.
        class_number, row, ring, heir, value, until, learned: Values of its ranking (hybridkv.eviction.hazard).
    """

    serial: int
    kind: Kind
    tokens: int
    used: float
    session_gap: float | None
    tenant: int = 0
    depth: int = 0
    chain: bytes = b""
    inside: tuple[bytes, bytes] = WHOLE
    parent: ResumePoint | None = field(default=None, repr=False)
    children: dict[bytes, list[ResumePoint]] = field(default_factory=dict, repr=False)
    segment: list[bytes] = field(default_factory=list, repr=False)
    own: list[int] = field(default_factory=list)
    kept: bool = False
    ranked: bool = False
    hits: int = 0
    log_gap: float = 0.0
    saved: float = 0.0
    worth: float = 0.0
    below: Below | None = field(default=None, repr=False)
    hint: int = NOTHING
    awaited: bool = False
    safe_until: float = -math.inf
    protected: bool = False
    class_number: int = -1
    row: int = -1
    ring: tuple[int, int] | None = None
    heir: Heir | None = None
    value: float = math.inf
    until: float = -math.inf
    learned: int = 0


class Heir(NamedTuple):
    """Hold the class and the last use of an evicted resume point."""

    class_number: int
    used: float


def worth_of(point: ResumePoint) -> float:
    """Return the tokens per byte that are computed, or could be, to bring back ``point`` after its eviction."""
    return point.saved if point.below is None else min(point.saved, _restored(point.below))


def _restored(below: Below) -> float:
    """Return the tokens computed in the time in which a byte comes back. A copy that is gone may have one below it."""
    copy, price = below
    if copy.kept:
        return price
    return math.inf if copy.below is None else price + _restored(copy.below)


def note_hit(point: ResumePoint, now: float) -> None:
    """Count a hit of ``point`` at time ``now``, in seconds."""
    gap = math.log(max(now - point.used, _SHORTEST_GAP))
    point.log_gap = (point.log_gap + gap) / 2 if point.hits else gap
    point.hits += 1
    point.used = now


_BASE: Final = 4.0
"""The factor between two bounds of WITHIN, in seconds; chosen by hand."""

_MOST: Final = 11
"""The number of the last bound, 4**12 s or half a year; chosen by hand."""

KINDS: Final = len(Kind)


def kind_of(request: Request, tokens: int, ends: HitEnds, *, ended: bool) -> Kind:
    """Return the kind of a resume point at ``tokens`` of ``request``.

    Args:
        request: The request.
        tokens: Where a hit may end.
        ends: Where hits may end.
        ended: The request ended there.
    """
    if ended:
        return Kind.OUTPUT
    last, branch = request.num_prompt_tokens - 1, request.branch_tokens
    if branch and tokens == ends.last(branch):
        return Kind.BRANCH
    if request.marks and any(tokens == ends.last(one) for one in request.marks):
        return Kind.BRANCH
    if tokens == last or tokens == ends.last(last):
        return Kind.PROMPT
    return Kind.BOUNDARY if ends.block_size and tokens == last - last % ends.block_size else Kind.GRID


def hint_of(request: Request, tokens: int) -> int:
    """Return the hint of ``request`` about the resume point at ``tokens``. O(marks)."""
    hints = request.hints
    if hints is NO_HINTS:
        return NOTHING
    if tokens <= hints.shared_tokens:
        return BY_ALL
    if tokens in request.marks:
        return of_session(hints)
    if tokens == request.branch_tokens:
        return NOTHING
    elsewhere = hints.goes_on and any(mark > hints.shared_tokens for mark in request.marks)
    return NEVER if elsewhere else of_session(hints)


def of_session(hints: Hints) -> int:
    """Return the hint about the resume point from which a session continues."""
    if hints.over or hints.scratch:
        return NEVER
    if hints.within_s is not None:
        return WITHIN + _step_of(hints.within_s)
    return SOMETIME if hints.goes_on else NOTHING


def _step_of(seconds: float) -> int:
    step, bound = 0, _BASE
    while seconds > bound and step < _MOST:
        step, bound = step + 1, bound * _BASE
    return step


def is_of_session(hint: int) -> bool:
    """Return whether a hint concerns a single session, and ends when the session continues."""
    return hint not in {NOTHING, BY_ALL}


def in_words(hint: int) -> str:
    """Return a hint as the reports name it."""
    if hint >= WITHIN:
        return f"within {_BASE ** (1 + hint - WITHIN):.0f} s"
    return {NOTHING: "", NEVER: "never", BY_ALL: "by all", SOMETIME: "some time"}[hint]


# -- as part of a class


def class_kind(kind: Kind, hint: int) -> int:
    """Return one number for a kind and a hint."""
    return int(kind) + KINDS * hint


def parts_of(number: int) -> tuple[Kind, int]:
    """Return the kind and the hint of a ``class_kind``."""
    return Kind(number % KINDS), number // KINDS


def is_hinted(number: int) -> bool:
    """Return whether ``number``, a ``class_kind``, has a hint."""
    return number >= KINDS


def hinted_rate(number: int, usual: float, age: float) -> float:
    """Return the initial hits per second of ``class_kind`` ``number`` at ``age`` seconds. usual: the rate of all."""
    hint = number // KINDS
    if hint >= WITHIN:
        bound = _BASE ** (1 + hint - WITHIN)
        return max(usual, 2 / bound) if age < bound else usual
    return usual * {NOTHING: 1.0, NEVER: 1e-3, BY_ALL: 100.0, SOMETIME: 10.0}[hint]


# -- the tree

Place = tuple[bytes, tuple[bytes, bytes]]
"""``ResumePoint.chain`` and ``inside``."""

CROWD: Final = 8
"""Most children with one first block that share costs exactly; a larger crowd is not updated. Chosen by hand."""

_FIRST_CHUNK: Final = 32
"""Hash blocks of the first group that ``back`` looks up; each later group is twice as large. Chosen by hand."""

_MOST_WAITING: Final = 1024
"""Waiting requests that are followed. Later ones of a longer queue wait too long; chosen by hand."""

_INSIDE: Final = attrgetter("inside")


# -- one resume point in the tree


def first_key(point: ResumePoint) -> bytes:
    """Return the key of ``point`` in ``children`` of its parent; b"" without a segment."""
    return point.segment[0] if point.segment else b""


def children_of(point: ResumePoint) -> list[ResumePoint]:
    """Return all children of ``point``."""
    return [child for bucket in point.children.values() for child in bucket]


def few(point: ResumePoint, key: bytes) -> Sequence[ResumePoint]:
    """Return the children of ``point`` with segments that begin with ``key``; empty if they are a crowd."""
    found = point.children.get(key, ())
    return found if len(found) <= CROWD + 1 else ()


def level_of(point: ResumePoint) -> list[ResumePoint]:
    """Return the resume points after the same whole hash blocks as ``point``, parents first, without crowds."""
    top = point
    while not top.segment and top.parent is not None:
        top = top.parent
    found = [top]
    for one in found:
        found += few(one, b"")
    return found


def siblings_of(point: ResumePoint) -> list[ResumePoint]:
    """Return the other children of its parent that begin as ``point`` does; empty if they are a crowd."""
    if point.parent is None or not point.segment:
        return []
    return [one for one in few(point.parent, point.segment[0]) if one is not point]


def is_crowded(point: ResumePoint) -> bool:
    """Return whether ``point`` belongs to a crowd, so that its saved tokens per byte may be out of date."""
    before = [] if point.parent is None else level_of(point.parent)
    return any(len(one.children.get(key, ())) > CROWD for one in before for key in (first_key(point), b""))


def children_after(parent: ResumePoint, new: ResumePoint, known: Collection[bytes]) -> list[ResumePoint]:
    """Return the children of ``parent`` that have ``new``, a new child, as a prefix.

    O(children that share its first hash block), O(log children + found) inside one hash block.

    known: keys of the next hash blocks that begin as ``new`` does, if it ends inside one.
    """
    length = len(new.segment)
    if not length:
        found = _inside(parent, new.inside)
    else:
        passing = _through(parent, new.segment)
        found = [one for one in passing if len(one.segment) == length and begins_block_of(new, one)]
        if not new.inside[1]:
            return found + [one for one in passing if len(one.segment) > length]
    return found + [one for key in known for one in _through(parent, [*new.segment, key])]


def _inside(parent: ResumePoint, prefix: tuple[bytes, bytes]) -> list[ResumePoint]:
    """Return the children after the same whole hash blocks with an ``inside`` that begins with ``prefix``."""
    bucket, found = parent.children.get(b"", []), list[ResumePoint]()
    for place in range(bisect_left(bucket, prefix, key=_INSIDE), len(bucket)):
        chain, tokens = bucket[place].inside
        if chain != prefix[0] or not tokens.startswith(prefix[1]):
            break
        found.append(bucket[place])
    return found


def _through(parent: ResumePoint, keys: Sequence[bytes]) -> list[ResumePoint]:
    """Return the children of ``parent`` with segments that begin with ``keys``, one key or more."""
    length = len(keys)
    bucket = parent.children.get(keys[0], ())
    return [one for one in bucket if len(one.segment) >= length and one.segment[length - 1] == keys[-1]]


def begins_block_of(point: ResumePoint, other: ResumePoint) -> bool:
    """Return whether ``other``, after the same whole blocks, begins as ``point`` does."""
    inside = point.inside[1]
    return not inside or (other.inside[0] == point.inside[0] and other.inside[1].startswith(inside))


def overtaken_by(point: ResumePoint, known: Collection[bytes]) -> list[ResumePoint]:
    """Return the resume points that continue with a key of ``known`` and are children of ``point`` or of an ancestor.

    Only ancestors that end inside the same block count. O(their children).
    """
    found, at = list[ResumePoint](), point
    while at.inside[1] and at.parent is not None:
        found += [one for key in known for one in _through(at.parent, [*at.segment, key])]
        if at.segment:
            break
        at = at.parent
    return found


def link(point: ResumePoint, parent: ResumePoint) -> None:
    """Make ``point`` a child of ``parent``, the nearest kept resume point before it."""
    point.parent = parent
    bucket = parent.children.setdefault(first_key(point), [])
    if point.segment:
        bucket.append(point)
    else:
        insort(bucket, point, key=_INSIDE)


def unlink(point: ResumePoint) -> ResumePoint:
    """Remove ``point`` from its parent, and return the parent."""
    parent, key = point.parent, first_key(point)
    if parent is None:
        raise CacheError(f"the resume point of {point.tokens} tokens has no parent")
    bucket = parent.children[key]
    del bucket[bucket.index(point) if point.segment else bisect_left(bucket, point.inside, key=_INSIDE)]
    if not bucket:
        del parent.children[key]
    point.parent = None
    return parent


def detach(point: ResumePoint) -> tuple[ResumePoint, list[ResumePoint]]:
    """Take ``point`` out of the tree. Return its parent and its children, moved to the parent. O(their segments)."""
    children, parent = children_of(point), unlink(point)
    for child in children:
        unlink(child)
        child.segment = point.segment + child.segment
        link(child, parent)
    return parent, children


def keys_of(point: ResumePoint, first: int, last: int) -> list[bytes]:
    """Return the keys of hash blocks first .. last-1 of its prefix. O(them + resume points before it)."""
    parts: list[list[bytes]] = []
    at: ResumePoint | None = point
    while at is not None and at.depth > first:
        start = at.depth - len(at.segment)
        parts.append(at.segment[max(first - start, 0) : max(last - start, 0)])
        at = at.parent
    return [key for part in reversed(parts) for key in part]


# -- all of them


@dataclass(slots=True)
class _Inside:
    """Index the resume points after the same whole hash blocks by the tokens that follow.

    A look-up costs one dictionary access for each length in use, however many resume points there are.

    Attributes:
        by_inside: The resume point of each ``ResumePoint.inside``.
        lengths: Bytes of the tokens inside the block -> the number of resume points with that length.
    """

    by_inside: dict[tuple[bytes, bytes], ResumePoint] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Waiting:
    """A waiting request, its tokens when it began to wait, and the deepest kept resume point of its prefix."""

    request: Request
    tokens: int
    point: ResumePoint | None = None


class ResumePointTree:
    """Find resume points by the tokens of a request.

    Args:
        hash_block: Tokens of a hash block.

    Attributes:
        root: A resume point of no tokens, which is always kept.
        points: All other resume points, kept ones and ghost entries, by their serials.
        waiting: The followed requests that wait, by id.
    """

    def __init__(self, hash_block: int) -> None:
        self.root = ResumePoint(-1, Kind.GRID, 0, 0.0, None, kept=True)
        self.points: dict[int, ResumePoint] = {}
        self.waiting: dict[str, _Waiting] = {}
        self._hash_block = hash_block
        self._places: dict[bytes, _Inside] = {}
        self._next = 1  # watchers of blocks have 0 for none

    def clear(self) -> None:
        """Forget all resume points. Requests still wait."""
        self.root.children.clear()
        self.points.clear()
        self._places.clear()
        for one in self.waiting.values():
            one.point = None

    def back(self, request: Request, limit: int) -> Iterator[ResumePoint]:
        """Yield the resume points, kept ones and ghost entries, that are prefixes of ``request``, the deepest first.

        O(hash blocks) dictionary look-ups, up to the last resume point that the caller takes. A hash block with resume
        points also costs a few Python operations for each length inside it.

        Args:
            request: Its tokens are compared.
            limit: Most tokens of a resume point.
        """
        hashes, known, get, size = request.hashes, self._places.keys(), self._places.get, self._hash_block
        stop, chunk = min(limit // size, len(hashes)), _FIRST_CHUNK
        while stop > 0:
            start = max(stop - chunk, 0)
            for depth in () if known.isdisjoint(hashes[start:stop]) else range(stop, start, -1):
                place = get(hashes[depth - 1])
                if place is None:
                    continue
                found, lengths = place.by_inside, sorted(place.lengths, reverse=True)
                if lengths[0]:
                    chain, own = opening(request, depth, 1)
                    own = own[: min(limit - depth * size, size - 1) * TOKEN_BYTES]
                    for length in lengths:
                        if 0 < length <= len(own) and (point := found.get((chain, own[:length]))) is not None:
                            yield point
                if (point := found.get(WHOLE)) is not None:
                    yield point
            stop, chunk = start, 2 * chunk

    def deepest(self, request: Request, limit: int) -> ResumePoint | None:
        """Return the deepest kept resume point of at most ``limit`` tokens of ``request``; None without one."""
        for point in self.back(request, limit):
            if point.kept:
                return point
        return None

    def parent_of(self, request: Request, tokens: int) -> ResumePoint:
        """Return the nearest kept resume point before ``tokens`` of ``request``, or the root."""
        return self.deepest(request, tokens - 1) or self.root

    def _inside(self, request: Request, tokens: int) -> tuple[bytes, bytes]:
        """Return ``ResumePoint.inside`` of the first ``tokens`` tokens of ``request``."""
        depth, rest = divmod(tokens, self._hash_block)
        if not rest:
            return WHOLE
        chain, own = opening(request, depth, 1)
        return chain, own[: rest * TOKEN_BYTES]

    def place_of(self, request: Request, tokens: int) -> Place | None:
        """Return the place of a resume point at ``tokens`` tokens of ``request``; None below one known hash block."""
        if not self.has_room(request, tokens):
            return None
        return request.hashes[tokens // self._hash_block - 1], self._inside(request, tokens)

    def at(self, place: Place) -> ResumePoint | None:
        """Return the resume point or ghost entry at ``place``; None without one. O(1)."""
        found = self._places.get(place[0])
        return None if found is None else found.by_inside.get(place[1])

    def find(self, request: Request, tokens: int) -> ResumePoint | None:
        """Return the resume point or ghost entry at ``tokens`` tokens of ``request``; None without one. O(1)."""
        place = self.place_of(request, tokens)
        return None if place is None else self.at(place)

    def has_room(self, request: Request, tokens: int) -> bool:
        """Return whether ``tokens`` fill a hash block or more, and ``request`` has the keys of all whole ones."""
        return 0 < tokens // self._hash_block <= len(request.hashes)

    def make(  # noqa: PLR0917 - the fields of a resume point
        self, place: Place, kind: Kind, tokens: int, now: float, gap: float | None, tenant: int
    ) -> ResumePoint:
        """Make a resume point of ``tokens`` tokens at ``place``, not kept yet. gap: its ``session_gap``."""
        chain, inside = place
        point = ResumePoint(self._next, kind, tokens, now, gap, tenant, tokens // self._hash_block, chain, inside)
        self._next += 1
        found = self._places.get(chain)
        if found is None:
            found = self._places[chain] = _Inside()
        found.by_inside[inside] = point
        length = len(inside[1])
        found.lengths[length] = found.lengths.get(length, 0) + 1
        self.points[point.serial] = point
        return point

    def forget(self, point: ResumePoint) -> None:
        """Remove ``point``, which is not kept, from the index."""
        del self.points[point.serial]
        place, length = self._places[point.chain], len(point.inside[1])
        del place.by_inside[point.inside]
        place.lengths[length] -= 1
        if not place.lengths[length]:
            del place.lengths[length]
        if not place.by_inside:
            del self._places[point.chain]

    def kept(self) -> list[ResumePoint]:
        """Return the kept resume points, parents first. O(n log n)."""
        return sorted((point for point in self.points.values() if point.kept), key=attrgetter("tokens"))

    # -- requests that wait: yields (resume point, whether it is awaited) for each change; the caller applies it at once

    def expect(self, request: Request) -> Iterator[tuple[ResumePoint, bool]]:
        """Note that ``request`` waits. O(its hash blocks)."""
        if request.reads_prefix_cache and len(self.waiting) < _MOST_WAITING:
            one = self.waiting[request.request_id] = _Waiting(request, request.num_tokens)
            yield from self._move(one, self.deepest(request, one.tokens - 1))

    def expect_no_longer(self, request: Request) -> Iterator[tuple[ResumePoint, bool]]:
        """Note that ``request`` waits no longer, if it did."""
        one = self.waiting.pop(request.request_id, None)
        if one is not None and one.point is not None:
            yield from self._move(one, None)

    def note_kept(self, point: ResumePoint) -> Iterator[tuple[ResumePoint, bool]]:
        """Let requests that begin with ``point``, which is newly kept, wait for it. O(waiting)."""
        for one in list(self.waiting.values()):
            least = 0 if one.point is None else one.point.tokens
            if least < point.tokens < one.tokens and self._begins_with(one.request, point):
                yield from self._move(one, point)

    def note_evicted(self, point: ResumePoint) -> Iterator[tuple[ResumePoint, bool]]:
        """Let requests that waited for ``point``, which was evicted, wait for another. O(waiting, hash blocks)."""
        for one in list(self.waiting.values()) if point.awaited else ():
            if one.point is point:
                yield from self._move(one, self.deepest(one.request, one.tokens - 1))

    def _begins_with(self, request: Request, point: ResumePoint) -> bool:
        """Return whether ``point`` is a prefix of ``request`` without its last token. O(1)."""
        keys, depth = request.hashes, point.depth
        known = depth <= len(keys) and point.tokens < request.num_tokens and keys[depth - 1] == point.chain
        return known and self._inside(request, point.tokens) == point.inside

    def _move(self, one: _Waiting, point: ResumePoint | None) -> Iterator[tuple[ResumePoint, bool]]:
        before, one.point = one.point, point
        if before is not None:
            yield before, any(other.point is before for other in self.waiting.values())
        if point is not None:
            yield point, True

    def check_waiting(self) -> Iterator[str]:
        """Yield a line for each request that does not wait for its deepest resume point. O(waiting, hash blocks)."""
        for one in self.waiting.values():
            if one.point is not self.deepest(one.request, one.tokens - 1):
                yield f"request {one.request.request_id!r} waits for another resume point than its deepest"
        awaited = {id(one.point) for one in self.waiting.values()}
        for point in self.points.values():
            if point.awaited != (id(point) in awaited):
                yield f"the resume point of {point.tokens} tokens is awaited: {point.awaited}"
