"""Chunked local attention: a token reads the tokens of its own chunk up to itself.

    chunks   [ 0 .. C-1 | C .. 2C-1 | 2C .. ]
    columns  [ null     | null      | live, partly filled ]        computed tokens in the third chunk

Blocks of finished chunks are given back. A hit that ends inside a chunk needs the blocks of that chunk.
One that ends on a chunk's edge needs none, and so proves nothing: the last block before the edge must be
known, unless another group has seen the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.policies.values import Hit, Index

_NO_HIT = Hit(0, np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class ChunkedLocalPolicy:
    """Blocks of ``block_size`` tokens in chunks of ``chunk`` tokens."""

    block_size: int
    chunk: int

    def first_live_token(self, num_computed_tokens: int) -> int:
        """The first token of the chunk that the next token belongs to."""
        return num_computed_tokens // self.chunk * self.chunk

    def longest_hit(
        self, index: Index, keys: Sequence[bytes], limit_tokens: int, alignment_tokens: int, *, proven: bool = False
    ) -> Hit:
        """The longest prefix of at most ``limit_tokens`` whose last chunk is cached; other columns are null.

        proven: another group has this prefix. Ends lie on the alignment. O(blocks of the chunks tried).
        """
        limit = min(limit_tokens, len(keys) * self.block_size) // alignment_tokens * alignment_tokens
        while limit > 0:
            first = self.first_live_token(limit) // self.block_size
            known = index.leading_run(keys[first : limit // self.block_size])
            end = (first + len(known)) * self.block_size // alignment_tokens * alignment_tokens
            start = self.first_live_token(limit)
            if end > start:
                ids = known[: end // self.block_size - first]
                return Hit(end, np.concatenate((np.zeros(first, np.int32), ids)))
            if start and start % alignment_tokens == 0 and (proven or index.get(keys[first - 1]) is not None):
                return Hit(start, np.zeros(first, np.int32))
            limit = (start - 1) // alignment_tokens * alignment_tokens if start else 0
        return _NO_HIT
