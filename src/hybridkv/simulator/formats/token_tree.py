"""Token ids as pieces: what begins alike has the same pieces, and nothing else is kept of what the ids were.

[7 7 3 1]     ->  (0, 0, 4)
[7 7 5]       ->  (0, 0, 2) (1, 0, 1)
[7 7 5 9 9]   ->  (0, 0, 2) (1, 0, 1) (2, 0, 2)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hybridkv.simulator.tokens import Piece

Ids = NDArray[np.int32]


class _Branch:
    """Tokens of a segment from ``offset`` on, and what follows behind the last, by its first token."""

    __slots__ = ("ids", "next", "offset", "segment")

    def __init__(self, segment: int, offset: int, ids: Ids) -> None:
        self.segment = segment
        self.offset = offset
        self.ids = ids
        self.next: dict[int, _Branch] = {}

    def cut(self, tokens: int) -> None:
        """The branch ends behind ``tokens``; the rest follows."""
        rest = _Branch(self.segment, self.offset + tokens, self.ids[tokens:])
        rest.next, self.next = self.next, {int(rest.ids[0]): rest}
        self.ids = self.ids[:tokens]


class TokenTree:
    """All token runs of one pass that may share a beginning. segments: numbers of those that are new."""

    def __init__(self, segments: Iterator[int]) -> None:
        self._segments = segments
        self._first: dict[int, _Branch] = {}

    def pieces(self, ids: Ids) -> list[Piece]:
        """``ids``, int32[n], as pieces, from the first on. O(n); tokens that are new are kept, 4 bytes each."""
        found: list[Piece] = []
        following, at = self._first, 0
        while at < len(ids):
            branch = following.get(int(ids[at]))
            if branch is None:
                segment = next(self._segments)
                following[int(ids[at])] = _Branch(segment, 0, ids[at:].copy())
                found.append((segment, 0, len(ids) - at))
                break
            shared = _alike(branch.ids, ids[at:])
            if shared < len(branch.ids) and at + shared < len(ids):
                branch.cut(shared)
            if found and found[-1][0] == branch.segment:
                found[-1] = (branch.segment, found[-1][1], found[-1][2] + shared)
            else:
                found.append((branch.segment, branch.offset, shared))
            following, at = branch.next, at + shared
        return found


def _alike(one: Ids, other: Ids) -> int:
    """Leading tokens that are equal."""
    most = min(len(one), len(other))
    different = np.flatnonzero(one[:most] != other[:most])
    return int(different[0]) if different.size else most


def split(pieces: list[Piece], tokens: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The first ``tokens``, and the rest."""
    first: list[Piece] = []
    rest: list[Piece] = []
    for segment, offset, length in pieces:
        taken = min(max(tokens, 0), length)
        if taken:
            first.append((segment, offset, taken))
        if taken < length:
            rest.append((segment, offset + taken, length - taken))
        tokens -= length
    return tuple(first), tuple(rest)
