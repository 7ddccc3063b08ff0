"""Recurrent layers (Mamba, gated delta rule, short convolution): one state instead of a token's row each.

    none    [ state | speculative states ]             rewritten in place, never shared
    align   [ null | null | state | state being written ]
                           ^ after column 2's last token  a checkpoint where a chunk ended on a block edge
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.policies.values import Hit, Index

_NO_HIT = Hit(0, np.empty(0, np.int32))
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class MambaAlignPolicy:
    """A column every ``block_size`` tokens, of which only those where a chunk ended hold a state."""

    block_size: int
    num_speculative_blocks: int = 0

    def first_live_token(self, num_computed_tokens: int) -> int:
        """The last computed token: its column holds the state that the next one continues."""
        return max(0, num_computed_tokens - 1)

    def longest_hit(self, index: Index, keys: Sequence[bytes], limit_tokens: int, alignment_tokens: int) -> Hit:
        """The right-most stored state at or before ``limit_tokens``; all columns before it are null.

        O(columns right of it) look-ups.
        """
        stride = alignment_tokens // self.block_size
        end = min(len(keys), limit_tokens // self.block_size)
        while end > 0:
            begin = max(0, end - _CHUNK)
            ids = index.blocks(keys[begin:end])
            columns = np.flatnonzero(ids) + begin
            columns = columns[(columns + 1) % stride == 0]
            if columns.size:
                last = int(columns[-1])
                blocks = np.zeros(last + 1, np.int32)
                blocks[last] = ids[last - begin]
                return Hit((last + 1) * self.block_size, blocks)
            end = begin
        return _NO_HIT


@dataclass(frozen=True, slots=True)
class MambaNonePolicy:
    """One state a request, and one for each speculative token; nothing to share."""

    block_size: int
    num_speculative_blocks: int = 0

    def first_live_token(self, num_computed_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """Nothing is ever dropped."""
        return 0

    def longest_hit(self, index: Index, keys: Sequence[bytes], limit_tokens: int, alignment_tokens: int) -> Hit:  # noqa: ARG002 - same
        """Never a hit."""
        return _NO_HIT
