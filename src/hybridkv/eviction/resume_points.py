r"""Ends by prefix: those kept in a tree, each behind the nearest one before it, and those that are remembered.

root --- end --- end        segment: the keys of the hash blocks between an end and its parent
  \        `---- end        chain: the key of the last whole hash block before it, under which it is found
   `---- end                inside: what tells the tokens behind that block apart

A parent begins as its children do, token for token. Of an end that stops inside a block, and one that was there before
it and goes on behind the same whole blocks, that is not always known: of whole blocks only keys are kept. Then the one
is not before the other; of those that go on with the same key it is before all, or none.

Requests that wait, and the deepest kept end that each begins with: it goes after all others of its tenant.

Tokens that a request gets while it waits, of steps that were in flight when it was preempted, are not looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from hybridkv.cache.groups import parent_key
from hybridkv.errors import CacheError
from hybridkv.eviction.ranking import End, Kind
from hybridkv.request import Request

CROWD: Final = 8
"""Ends that begin with the same block behind their parent: of more of them, what each saves is not followed."""

_FIRST_CHUNK: Final = 32
"""Hash blocks that are looked at together, then twice as many each time."""

_WHOLE: Final = (b"", b"")
"""``Node.inside`` of a resume point at the edge of a hash block."""

_INSIDE: Final = attrgetter("inside")


class Node:
    """An end in the tree. depth: whole hash blocks before it. chain, inside, segment: see the module.

    own: blocks of its own, states and those of its last tokens. children: by the first key of their segments; those
    without a segment under b"", sorted by ``inside``, for thousands may differ inside one hash block.
    kept: it is no ghost. ranked: it may be given up.
    """

    __slots__ = ("chain", "children", "depth", "end", "inside", "kept", "own", "parent", "ranked", "segment", "tokens")

    def __init__(self, end: End, depth: int, chain: bytes, inside: tuple[bytes, bytes]) -> None:
        self.end = end
        self.tokens = end.tokens
        self.depth = depth
        self.chain = chain
        self.inside = inside
        self.parent: Node | None = None
        self.children: dict[bytes, list[Node]] = {}
        self.segment: list[bytes] = []
        self.own: list[int] = []
        self.kept = self.ranked = False

    @property
    def first_key(self) -> bytes:
        """Under which its parent has it."""
        return self.segment[0] if self.segment else b""

    def heirs(self) -> list[Node]:
        """All children."""
        return [child for bucket in self.children.values() for child in bucket]

    def level(self) -> list[Node]:
        """Ends behind the same whole hash blocks as this one, each behind the one before; few ones."""
        top = self
        while not top.segment and top.parent is not None:
            top = top.parent
        found = [top]
        for one in found:
            found += one.few(b"")
        return found

    def few(self, key: bytes) -> list[Node]:
        """Children whose segments begin with ``key``, unless more than one of them is too many."""
        found = self.children.get(key, [])
        return found if len(found) <= CROWD + 1 else []

    def siblings(self) -> list[Node]:
        """Others that begin as it does behind its parent; few ones."""
        if self.parent is None or not self.segment:
            return []
        return [one for one in self.parent.few(self.first_key) if one is not self]

    @property
    def crowded(self) -> bool:
        """Whether what it saves is not followed, for too many begin as it does."""
        before = [] if self.parent is None else self.parent.level()
        return any(len(one.children.get(key, ())) > CROWD for one in before for key in (self.first_key, b""))

    def behind(self, other: Node, known: Collection[bytes]) -> list[Node]:
        """Return the children that ``other``, new behind this node, lies before.

        O(children that share its first hash block), O(log children + found) inside one hash block.

        known: keys of the next hash blocks that begin as ``other`` does, if ``other`` ends inside one.
        """
        length = len(other.segment)
        if not length:
            found = self._inside(other.inside)
        else:
            passing = self._through(other.segment)
            found = [one for one in passing if len(one.segment) == length and other.begins_block_of(one)]
            if not other.inside[1]:
                return found + [one for one in passing if len(one.segment) > length]
        return found + [one for key in known for one in self._through([*other.segment, key])]

    def _inside(self, prefix: tuple[bytes, bytes]) -> list[Node]:
        """Return the children behind the same whole hash blocks whose ``inside`` begins with ``prefix``."""
        bucket, found = self.children.get(b"", []), list[Node]()
        for place in range(bisect_left(bucket, prefix, key=_INSIDE), len(bucket)):
            parent, tokens = bucket[place].inside
            if parent != prefix[0] or not tokens.startswith(prefix[1]):
                break
            found.append(bucket[place])
        return found

    def _through(self, keys: Sequence[bytes]) -> list[Node]:
        """Children whose segments begin with ``keys``, one at least."""
        length = len(keys)
        bucket = self.children.get(keys[0], ())
        return [one for one in bucket if len(one.segment) >= length and one.segment[length - 1] == keys[-1]]

    def begins_block_of(self, other: Node) -> bool:
        """Whether ``other``, behind the same whole blocks, begins as this end does."""
        inside = self.inside[1]
        return not inside or (other.inside[0] == self.inside[0] and other.inside[1].startswith(inside))

    def overtaken_by(self, known: Collection[bytes]) -> list[Node]:
        """Ends with a next key of ``known`` behind the same whole blocks as this one, which stand behind one before it.

        O(children of those that end inside the same block).
        """
        found, at = list[Node](), self
        while at.inside[1] and at.parent is not None:
            found += [one for key in known for one in at.parent._through([*at.segment, key])]
            if at.segment:
                break
            at = at.parent
        return found

    def link(self, parent: Node) -> None:
        """``parent`` is the nearest kept end before."""
        self.parent = parent
        bucket = parent.children.setdefault(self.first_key, [])
        if self.segment:
            bucket.append(self)
        else:
            insort(bucket, self, key=_INSIDE)

    def unlink(self) -> Node:
        """The parent, whose child it is no longer."""
        parent = self.parent
        if parent is None:
            raise CacheError(f"the end of {self.tokens} tokens has no parent")
        bucket = parent.children[self.first_key]
        del bucket[bucket.index(self) if self.segment else bisect_left(bucket, self.inside, key=_INSIDE)]
        if not bucket:
            del parent.children[self.first_key]
        self.parent = None
        return parent

    def detach(self) -> tuple[Node, list[Node]]:
        """Leave the tree: the parent, and the children, which are that one's now. O(their segments)."""
        heirs, parent = self.heirs(), self.unlink()
        for child in heirs:
            child.unlink()
            child.segment = self.segment + child.segment
            child.link(parent)
        return parent, heirs

    def keys(self, first: int, last: int) -> list[bytes]:
        """Keys of hash blocks first .. last-1 of its prefix. O(them + ends before it)."""
        parts: list[list[bytes]] = []
        at: Node | None = self
        while at is not None and at.depth > first:
            start = at.depth - len(at.segment)
            parts.append(at.segment[max(first - start, 0) : max(last - start, 0)])
            at = at.parent
        return [key for part in reversed(parts) for key in part]


class _Place:
    """Resume points that share all of their whole hash blocks, by the tokens that follow the last whole one.

    A look-up costs one dictionary access for each length in use, however many resume points there are.

    Attributes
        by_inside: the resume point of each ``Node.inside``.
        lengths: bytes of the tokens inside the block -> how many resume points have so many.
    """

    __slots__ = ("by_inside", "lengths")

    def __init__(self) -> None:
        self.by_inside: dict[tuple[bytes, bytes], Node] = {}
        self.lengths: dict[int, int] = {}

    def add(self, node: Node) -> None:
        """Add ``node``. O(1)."""
        length = len(node.inside[1])
        self.by_inside[node.inside] = node
        self.lengths[length] = self.lengths.get(length, 0) + 1

    def remove(self, node: Node) -> None:
        """Remove ``node``. O(1)."""
        length = len(node.inside[1])
        del self.by_inside[node.inside]
        self.lengths[length] -= 1
        if not self.lengths[length]:
            del self.lengths[length]


class EndTree:
    """hash_block: tokens. For reading: root, which is kept and is no end; nodes, by the serials of their ends."""

    def __init__(self, hash_block: int) -> None:
        self.root = Node(End(-1, Kind.GRID, 0, 0.0, None), 0, b"", _WHOLE)
        self.root.kept = True
        self.nodes: dict[int, Node] = {}
        self._hash_block = hash_block
        self._places: dict[bytes, _Place] = {}
        self._next = 0

    def back(self, request: Request, limit: int) -> Iterator[Node]:
        """Yield the resume points, kept or remembered, that ``request`` begins with, the deepest first.

        O(hash blocks) dictionary look-ups up to the last one that is asked for; Python operations at each place that
        has resume points: as many as there are lengths inside a hash block, at most.

        request: whose tokens are compared.
        limit: most tokens of a resume point.
        """
        hashes, get = request.hashes, self._places.get
        stop, chunk = min(limit // self._hash_block, len(hashes)), _FIRST_CHUNK
        while stop > 0:
            start = max(stop - chunk, 0)
            for depth, place in zip(range(stop, start, -1), map(get, reversed(hashes[start:stop])), strict=True):
                if place is not None:
                    yield from self._within(place, request, depth, limit)
            stop, chunk = start, 2 * chunk

    def _within(self, place: _Place, request: Request, depth: int, limit: int) -> Iterator[Node]:
        """Yield those of ``place``, behind ``depth`` hash blocks, that ``request`` begins with, the deepest first."""
        found = place.by_inside
        lengths = sorted(place.lengths, reverse=True)
        if lengths[0]:
            parent = parent_key(request, depth, 1)
            start = depth * self._hash_block
            own = request.token_bytes(start, min(limit, start + self._hash_block - 1))
            for length in lengths:
                if 0 < length <= len(own) and (node := found.get((parent, own[:length]))) is not None:
                    yield node
        if (node := found.get(_WHOLE)) is not None:
            yield node

    def deepest(self, request: Request, limit: int) -> Node | None:
        """The last kept one of them."""
        return next((node for node in self.back(request, limit) if node.kept), None)

    def begins_with(self, request: Request, node: Node) -> bool:
        """Whether ``request``, all but its last token, begins with the tokens of ``node``. O(1)."""
        keys = request.hashes
        there = node.depth <= len(keys) and node.tokens < request.num_tokens and keys[node.depth - 1] == node.chain
        return there and self._inside(request, node.tokens) == node.inside

    def _inside(self, request: Request, tokens: int) -> tuple[bytes, bytes]:
        """What tells the tokens inside a hash block apart, of the first ``tokens`` of ``request``."""
        depth, rest = divmod(tokens, self._hash_block)
        if not rest:
            return _WHOLE
        return parent_key(request, depth, 1), request.token_bytes(depth * self._hash_block, tokens)

    def find(self, request: Request, tokens: int) -> Node | None:
        """Return the resume point at ``tokens`` tokens of ``request``, kept or remembered; None without one. O(1)."""
        if not self.has_room(request, tokens):
            return None
        place = self._places.get(request.hashes[tokens // self._hash_block - 1])
        return None if place is None else place.by_inside.get(self._inside(request, tokens))

    def has_room(self, request: Request, tokens: int) -> bool:
        """Whether ``tokens`` fill a hash block at least, and are known."""
        return 0 < tokens // self._hash_block <= len(request.hashes)

    def make(  # noqa: PLR0917 - what an end is
        self, request: Request, kind: Kind, tokens: int, now: float, gap: float | None, tenant: int
    ) -> Node:
        """A new end of ``tenant``, remembered and not kept."""
        depth = tokens // self._hash_block
        end = End(self._next, kind, tokens, now, gap, tenant)
        self._next += 1
        node = Node(end, depth, request.hashes[depth - 1], self._inside(request, tokens))
        self._places.setdefault(node.chain, _Place()).add(node)
        self.nodes[end.serial] = node
        return node

    def forget(self, node: Node) -> None:
        """``node``, not kept, is found no longer."""
        del self.nodes[node.end.serial]
        place = self._places[node.chain]
        place.remove(node)
        if not place.by_inside:
            del self._places[node.chain]

    def parent_of(self, request: Request, tokens: int) -> Node:
        """The nearest kept end before ``tokens`` of ``request``, or the root."""
        return self.deepest(request, tokens - 1) or self.root

    def kept(self) -> list[Node]:
        """Kept ends, parents first. O(ends log ends)."""
        return sorted((node for node in self.nodes.values() if node.kept), key=lambda node: node.tokens)


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
