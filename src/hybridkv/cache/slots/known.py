"""Prefixes that were seen, by their keys, long after their blocks are gone: where requests branch off stays known."""

from __future__ import annotations

from collections.abc import Sequence


class KnownTokens:
    """The keys seen last, between half of ``most`` and ``most`` of them.

    Two generations: when the young one is full, the old one is forgotten. Keys are remembered by their hashes: two that
    agree would cost one state kept in vain, no more.
    """

    def __init__(self, most: int) -> None:
        self._most_young = max(most // 2, 1)
        self._young: set[int] = set()
        self._old: set[int] = set()

    def add(self, keys: Sequence[bytes]) -> None:
        """A request has these keys, its first block's first. O(keys)."""
        self._young.update(map(hash, keys))
        if len(self._young) > self._most_young:
            self._old, self._young = self._young, set(map(hash, keys))

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` from the first on are known: with a key, all before it were seen. O(log keys)."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            key = hash(keys[middle])
            if key in self._young or key in self._old:
                low = middle + 1
            else:
                high = middle
        return low

    def clear(self) -> None:
        """Nothing was seen."""
        self._young.clear()
        self._old.clear()
