"""The prefix index of one group: block hash -> the block that holds those tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import CacheError

_FIRST_CHUNK = 32


class PrefixIndex:
    """Keys of one group. Two blocks may carry one key: a look-up gives the one that came first.

    _first: key -> block. _others: key -> later blocks with the same key, oldest first; only keys that
    stand in _first.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Distinct keys."""
        return len(self._first)

    def get(self, key: bytes) -> int | None:
        """The block that got ``key`` first, None for an unknown key."""
        return self._first.get(key)

    def add(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """``blocks[i]`` carries ``keys[i]`` from now on."""
        first = self._first
        if first.keys().isdisjoint(keys) and (len(keys) == 1 or len(set(keys)) == len(keys)):
            first.update(zip(keys, blocks, strict=True))
            return
        for key, block in zip(keys, blocks, strict=True):
            if first.setdefault(key, block) != block:
                self._others.setdefault(key, []).append(block)

    def remove(self, key: bytes, block: int) -> None:
        """``block`` carries ``key`` no longer; the next one with the same key shows."""
        first, others = self._first, self._others
        if key not in others:
            if first.pop(key, None) != block:
                raise CacheError(f"block {block} is not indexed under {key.hex()}")
            return
        later = others[key]
        if first[key] == block:
            first[key] = later.pop(0)
        else:
            later.remove(block)
        if not later:
            del others[key]

    def leading_run(self, keys: Sequence[bytes]) -> NDArray[np.int32]:
        """Blocks of the leading keys that are all known, int32[hits]. O(hits), whatever the rest is."""
        get = self._first.get
        parts: list[NDArray[np.int32]] = []
        start, chunk = 0, _FIRST_CHUNK
        while start < len(keys):
            part = keys[start : start + chunk]
            ids = np.fromiter(map(get, part, repeat(0)), np.int32, len(part))  # 0, the null block, has no key
            if not ids.all():
                parts.append(ids[: int(ids.argmin())])
                break
            parts.append(ids)
            start += chunk
            chunk *= 4
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Every (key, block), a key's blocks in the order they would be found."""
        for key, block in self._first.items():
            yield key, block
            for later in self._others.get(key, ()):
                yield key, later

    def clear(self) -> None:
        """Forget every key."""
        self._first.clear()
        self._others.clear()
