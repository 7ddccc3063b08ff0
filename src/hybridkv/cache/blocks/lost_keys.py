"""Keys that blocks have lost, for as long as that is remembered: what was evicted, when, and how much has been since.

whole     group, key -> Lost              inside a block     group, parent -> the bytes of its tokens -> Lost

Two generations: when the young one is full, the old one is forgotten. Nobody keeps it unless misses are explained
(docs/design/0029).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple


class Lost(NamedTuple):
    """at_s: on the cache's clock. before_bytes: of all blocks that had lost their keys before."""

    at_s: float
    before_bytes: int


class _Generation:
    """size: keys."""

    def __init__(self, groups: int) -> None:
        self.whole: list[dict[bytes, Lost]] = [{} for _ in range(groups)]
        self.inside: list[dict[bytes, dict[bytes, Lost]]] = [{} for _ in range(groups)]
        self.size = 0


class LostKeys:
    """most: keys that are remembered, at least half of them. block_bytes: of each group. clock: seconds.

    For reading: lost_bytes, of blocks that lost their keys so far.
    """

    def __init__(self, most: int, block_bytes: Sequence[int], clock: Callable[[], float]) -> None:
        self._most_young = max(most // 2, 1)
        self._block_bytes = tuple(block_bytes)
        self._clock = clock
        self.lost_bytes = 0
        self.clear()

    def clear(self) -> None:
        """Nothing is remembered."""
        self._young, self._old = (_Generation(len(self._block_bytes)) for _ in range(2))

    def note(self, group: int, keys: Sequence[bytes], tails: Sequence[tuple[bytes, bytes]], blocks: int) -> None:
        """``blocks`` of ``group`` lose ``keys`` and ``tails``, (parent, bytes of tokens) each. O(keys + tails)."""
        lost, young = Lost(self._clock(), self.lost_bytes), self._young
        self.lost_bytes += self._block_bytes[group] * blocks
        young.whole[group].update(zip(keys, repeat(lost)))
        for parent, tokens in tails:
            young.inside[group].setdefault(parent, {})[tokens] = lost
        young.size += len(keys) + len(tails)
        if young.size > self._most_young:
            self._old, self._young = young, _Generation(len(self._block_bytes))

    def whole(self, group: int, key: bytes) -> Lost | None:
        """Of a block of ``group`` with that key."""
        return self._young.whole[group].get(key) or self._old.whole[group].get(key)

    def inside(self, group: int, parent: bytes) -> Iterator[tuple[bytes, Lost]]:
        """The bytes of the tokens behind ``parent`` that a block of ``group`` began with, the last ones first."""
        for generation in (self._young, self._old):
            yield from generation.inside[group].get(parent, {}).items()

    def knows(self, group: int) -> tuple[dict[bytes, Lost], dict[bytes, Lost]]:
        """Keys of ``group``, to look up many."""
        return self._young.whole[group], self._old.whole[group]
