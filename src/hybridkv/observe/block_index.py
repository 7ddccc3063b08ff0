"""What the KV events of a cache say that it has: how routers estimate the hits of a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


class BlockIndex:
    """The blocks of one cache, in its groups. Hashes may have any form, but all the same one."""

    def __init__(self) -> None:
        self._copies = Counter[tuple[int, Hashable]]()
        self._sizes: dict[int, int] = {}

    def store(self, group: int, block_size: int, hashes: Iterable[Hashable]) -> None:
        """Add one copy of each block. O(hashes).

        Args:
            group: the group of the blocks.
            block_size: their tokens.
            hashes: their hashes.
        """
        self._sizes[group] = block_size
        self._copies.update((group, key) for key in hashes)

    def remove(self, group: int, hashes: Iterable[Hashable]) -> None:
        """Remove one copy of each block. O(hashes).

        Args:
            group: the group of the blocks.
            hashes: their hashes.
        """
        for key in hashes:
            self._copies[group, key] -= 1
            if self._copies[group, key] <= 0:
                del self._copies[group, key]

    def clear(self) -> None:
        """Forget all blocks."""
        self._copies.clear()

    def known_tokens(self, hashes: Sequence[Hashable], hash_block: int) -> int:
        """Return the leading tokens of a prompt that the cache has, in the best of its groups. O(groups x hashes).

        Args:
            hashes: the hashes of the prompt's full blocks.
            hash_block: tokens of each of them.
        """
        known = 0
        for group, size in self._sizes.items():
            step, leading = size // hash_block, 0
            for key in hashes[step - 1 :: step]:
                if (group, key) not in self._copies:
                    break
                leading += 1
            known = max(known, leading * size)
        return known
