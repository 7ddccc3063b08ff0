"""One group at work: its policy, its rows and its index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridkv.cache.block_rows import BlockRows
from hybridkv.cache.index import PrefixIndex
from hybridkv.cache.policies import Policy
from hybridkv.errors import ConfigError
from hybridkv.request import Request


class CacheGroup:
    """What the manager keeps of one group.

    number: position in the config. rows: block tables of the resident requests. published: int64[rows],
    how many leading columns of a row are published (or were hits). key_stride: hash blocks of a block.
    """

    def __init__(self, number: int, policy: Policy, index: PrefixIndex, hash_block_size: int) -> None:
        if policy.block_size % hash_block_size:
            raise ConfigError(
                f"group {number} has blocks of {policy.block_size} tokens, no multiple of the hash block "
                f"{hash_block_size}: choose a hash block that divides every block size"
            )
        self.number = number
        self.policy = policy
        self.index = index
        self.rows = BlockRows()
        self.published = np.zeros(len(self.rows.start), np.int64)
        self.key_stride = policy.block_size // hash_block_size

    def keys(self, request: Request) -> Sequence[bytes]:
        """One key per full block of ``request`` in this group."""
        stride = self.key_stride
        return request.hashes if stride == 1 else request.hashes[stride - 1 :: stride]

    def key_run(self, request: Request, first: int, last: int) -> list[bytes]:
        """Keys of columns first .. last-1."""
        stride = self.key_stride
        return request.hashes[(first + 1) * stride - 1 : last * stride : stride]

    def knows(self, request: Request, column: int) -> bool:
        """Whether a hit of ``request`` may go on with ``column``: not its last token's, and its key is indexed."""
        if (column + 1) * self.policy.block_size >= request.num_tokens:
            return False
        return any(self.index.get(key) is not None for key in self.key_run(request, column, column + 1))

    def ensure_rows(self, capacity: int) -> None:
        """Rows 0 .. capacity - 1 exist."""
        self.rows.ensure_rows(capacity)
        missing = capacity - len(self.published)
        if missing > 0:
            self.published = np.concatenate((self.published, np.zeros(missing, np.int64)))

    def clear(self, row: int) -> None:
        """``row`` holds nothing."""
        self.rows.clear(row)
        self.published[row] = 0

    def next_event(self, row: int) -> int:
        """The token count at which ``row`` needs or can publish a block."""
        return min(self.policy.events(self.rows.count.item(row), self.published.item(row)))
