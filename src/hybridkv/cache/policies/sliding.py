"""Sliding-window attention: a token reads itself and the ``window - 1`` tokens before it.

    columns  [ null | null | live | live | live, partly filled ]
                           ^ the block of token max(0, computed - window + 1)

Blocks behind the window are given back; a hit needs only the blocks that the next token still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.policies.values import Hit, Index

_NO_HIT = Hit(0, np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class SlidingWindowPolicy:
    """Blocks of ``block_size`` tokens, of which the last ``window`` tokens are read.

    one_more: EAGLE looks a block past the hit and drops it again, so a run is one block longer.
    """

    block_size: int
    window: int
    one_more: bool = False

    @property
    def run_blocks(self) -> int:
        """Consecutive blocks that a hit needs: ceil((window - 1) / block_size), and EAGLE's one."""
        return -(-(self.window - 1) // self.block_size) + self.one_more

    def first_live_token(self, num_computed_tokens: int) -> int:
        """The first token that the next one still reads."""
        return max(0, num_computed_tokens - self.window + 1)

    def longest_hit(self, index: Index, keys: Sequence[bytes], limit_tokens: int, alignment_tokens: int) -> Hit:
        """The longest prefix of at most ``limit_tokens`` whose window is cached; its other columns are null.

        Ends lie on the alignment. Right to left: a miss at a column rules out every end whose window holds it,
        so each key is looked up at most once. O(keys) look-ups, O(run) for a hit at the limit.
        """
        stride = alignment_tokens // self.block_size
        end = min(len(keys), limit_tokens // self.block_size) // stride * stride
        while end > 0:
            need = min(self.run_blocks, end)
            ids = index.blocks(keys[end - need : end])
            misses = np.flatnonzero(ids == 0)
            if not misses.size:
                return Hit(end * self.block_size, np.concatenate((np.zeros(end - need, np.int32), ids)))
            end = (end - need + int(misses[-1])) // stride * stride
        return _NO_HIT
