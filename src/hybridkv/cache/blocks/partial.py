"""Partial keys of one group: tokens that end inside a block -> the block that begins with them.

    block   [ tail of an entry | written later, or by nobody ]       parent: the key of the tokens before the block

Found by comparing tails, not by hashing them: a parent has at most a few (docs/contracts.md, 10).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

MOST_TAILS: Final = 4
"""Entries of one parent."""

_TOKEN_BYTES: Final = 4


class Tail(NamedTuple):
    """tokens: the bytes of an int32 array. block: it begins with them."""

    tokens: bytes
    block: int

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.tokens) // _TOKEN_BYTES


class PartialKeys:
    """parent -> its tails, oldest first; and the parent of every block that has one (a block has one place)."""

    def __init__(self) -> None:
        self._tails: dict[bytes, list[Tail]] = {}
        self._parent: dict[int, bytes] = {}
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def __contains__(self, block: int) -> bool:
        return block in self._parent

    def of(self, parent: bytes) -> list[Tail]:
        """The tails behind ``parent``, oldest first; not to be changed."""
        return self._tails.get(parent, _NONE)

    def add(self, parent: bytes, tail: Tail) -> int | None:
        """One more entry; the block whose oldest entry had to go, if one had to. The same tail must not be there."""
        tails = self._tails.setdefault(parent, [])
        gone = None
        if len(tails) == MOST_TAILS:
            gone = tails.pop(0).block
            self._entries -= 1
            if all(other.block != gone for other in tails):
                del self._parent[gone]
        tails.append(tail)
        self._entries += 1
        self._parent[tail.block] = parent
        return gone

    def remove(self, block: int) -> int:
        """All entries of ``block``; how many there were."""
        parent = self._parent.pop(block, None)
        if parent is None:
            return 0
        tails = self._tails[parent]
        kept = [tail for tail in tails if tail.block != block]
        if kept:
            self._tails[parent] = kept
        else:
            del self._tails[parent]
        gone = len(tails) - len(kept)
        self._entries -= gone
        return gone

    def rename(self, source: int, target: int) -> None:
        """What ``source`` carried ``target`` carries, in its place."""
        parent = self._parent.pop(source, None)
        if parent is None:
            return
        self._parent[target] = parent
        self._tails[parent] = [Tail(t.tokens, target) if t.block == source else t for t in self._tails[parent]]

    def entries(self) -> Iterator[tuple[bytes, Tail]]:
        """Every (parent, tail), a parent's oldest first."""
        for parent, tails in self._tails.items():
            for tail in tails:
                yield parent, tail

    def clear(self) -> None:
        """Forget everything."""
        self._tails.clear()
        self._parent.clear()
        self._entries = 0


_NONE: list[Tail] = []
