"""How far back the tokens of a layer see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.specs import KVCacheSpec

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """What a query at position p sees of the tokens up to p: all of them, or those of its window or chunk.

    window W: p-W+1 .. p. chunk C: floor(p/C)*C .. p. At most one of the two.
    """

    window: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, spec: KVCacheSpec) -> AttentionWindow:
        """Of an attention layer."""
        return cls(*spec.mask)

    def first_seen(self, positions: Int64) -> Int64:
        """The first token that each query sees, int64 of the same shape."""
        if self.window is not None:
            return np.maximum(positions - self.window + 1, 0)
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return np.zeros_like(positions)
