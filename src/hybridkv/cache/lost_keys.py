"""Keys that blocks have lost, for as long as that is remembered: what was evicted, when, and how much has been since.

whole     group, key -> number              inside a block     group, parent -> the bytes of its tokens -> number
number -> Lost                              losses are counted: what was lost earlier has a smaller number

Two generations: when the young one is full, the old one is forgotten. Nobody keeps it unless misses are explained
(docs/design/0029).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Lost(NamedTuple):
    """at_s: on the cache's clock. before_bytes: of all blocks that had lost their keys before.

    by: the request that room was made for, None where it was for requests that went on. idle_s: how long nobody had
    come for it, None where that is not counted.
    """

    at_s: float
    before_bytes: int
    by: str | None = None
    idle_s: float | None = None


class _Generation:
    """first: number of its first loss. noted: of each note, the number of its first. idle_s: of each loss."""

    def __init__(self, groups: int, first: int) -> None:
        self.first = first
        self.whole: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.inside: list[dict[bytes, dict[bytes, int]]] = [{} for _ in range(groups)]
        self.noted: list[int] = []
        self.lost: list[Lost] = []
        self.idle_s = array("d")


class LostKeys:
    """most: keys that are remembered, at least half of them. block_bytes: of each group. clock: seconds.

    For reading: lost_bytes, of blocks that lost their keys so far.
    """

    def __init__(self, most: int, block_bytes: Sequence[int], clock: Callable[[], float]) -> None:
        self._most_young = max(most // 2, 1)
        self._block_bytes = tuple(block_bytes)
        self._clock = clock
        self._by: str | None = None
        self._next = 0
        self.lost_bytes = 0
        self.clear()

    def clear(self) -> None:
        """Nothing is remembered."""
        self._young, self._old = (_Generation(len(self._block_bytes), self._next) for _ in range(2))

    @contextmanager
    def evicting_for(self, by: str) -> Iterator[None]:
        """What is lost inside makes room for the request ``by``."""
        self._by = by
        try:
            yield
        finally:
            self._by = None

    def note(
        self,
        group: int,
        keys: Sequence[bytes],
        tails: Sequence[tuple[bytes, bytes]],
        blocks: int,
        idle_s: NDArray[np.float64] | None = None,
    ) -> None:
        """``blocks`` of ``group`` lose ``keys`` and ``tails``, (parent, bytes of tokens) each. O(keys + tails).

        idle_s: how long nobody came, of each key, then of each tail; None where nobody knows.
        """
        young, first, count = self._young, self._next, len(keys) + len(tails)
        young.noted.append(first)
        young.lost.append(Lost(self._clock(), self.lost_bytes, self._by))
        if idle_s is not None:
            young.idle_s.frombytes(idle_s.tobytes())
        self.lost_bytes += self._block_bytes[group] * blocks
        self._next += count
        young.whole[group].update(zip(keys, range(first, first + len(keys)), strict=True))
        for number, (parent, tokens) in enumerate(tails, first + len(keys)):
            young.inside[group].setdefault(parent, {})[tokens] = number
        if self._next - young.first > self._most_young:
            self._old, self._young = young, _Generation(len(self._block_bytes), self._next)

    def whole(self, group: int, key: bytes) -> int | None:
        """The number of the loss of a block of ``group`` with that key."""
        found = self._young.whole[group].get(key)
        return self._old.whole[group].get(key) if found is None else found

    def inside(self, group: int, parent: bytes) -> Iterator[tuple[bytes, int]]:
        """The bytes of the tokens behind ``parent`` that a block of ``group`` began with, the last ones first."""
        for generation in (self._young, self._old):
            yield from generation.inside[group].get(parent, {}).items()

    def knows(self, group: int) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """Keys of ``group``, to look up many."""
        return self._young.whole[group], self._old.whole[group]

    def lost(self, number: int) -> Lost:
        """What is known of a loss that is remembered. O(log notes)."""
        of = self._young if number >= self._young.first else self._old
        lost = of.lost[bisect_right(of.noted, number) - 1]
        return lost._replace(idle_s=of.idle_s[number - of.first]) if of.idle_s else lost
