"""Which tokens of a request lie on a context parallel rank, and in what order they follow each other there.

    two ranks, interleave 2
    token        0 1 2 3 4 5 6 7 8 9
    rank         0 0 1 1 0 0 1 1 0 0
    local index  0 1 0 1 2 3 2 3 4 5

Ranks take turns of ``interleave`` tokens. A rank's tokens fill its blocks one behind the other: a block of
``block_size`` slots serves ``block_size * world_size`` tokens of the request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextParallelRank:
    """One rank among ``dcp_world_size * pcp_world_size``; alone by default.

    interleave: consecutive tokens that a rank keeps before the next one's turn. It means nothing on a single rank.
    Raises ConfigError for sizes below 1 and ranks outside their world.
    """

    dcp_world_size: int = 1
    dcp_rank: int = 0
    pcp_world_size: int = 1
    pcp_rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("dcp", "pcp"):
            size, rank = getattr(self, f"{name}_world_size"), getattr(self, f"{name}_rank")
            if size < 1:
                raise ConfigError(f"{name}_world_size must be at least 1, got {size}")
            if not 0 <= rank < size:
                raise ConfigError(f"{name}_rank must lie in 0 .. {size - 1} ({name}_world_size {size}), got {rank}")
        if self.interleave < 1:
            raise ConfigError(f"cp_kv_cache_interleave_size must be at least 1, got {self.interleave}")

    @property
    def world_size(self) -> int:
        """Ranks that share the tokens of a request."""
        return self.dcp_world_size * self.pcp_world_size

    @property
    def rank(self) -> int:
        """``pcp_rank * dcp_world_size + dcp_rank``."""
        return self.pcp_rank * self.dcp_world_size + self.dcp_rank

    @property
    def round_tokens(self) -> int:
        """Tokens until it is a rank's turn again."""
        return self.world_size * self.interleave

    def check_block_size(self, block_size: int) -> None:
        """Raise ConfigError where a turn of ``interleave`` tokens would run across the edge of a block."""
        if self.world_size > 1 and block_size % self.interleave:
            raise ConfigError(
                f"cp_kv_cache_interleave_size {self.interleave} does not divide the block size {block_size} of the "
                "kernel: slots of different tokens would collide; choose a divisor"
            )

    def local_tokens(self, context_lens: Int64) -> Int64:
        """How many of the first ``context_lens[i]`` tokens of a request lie here, int64[n].

        Of every full round ``interleave``; of the rest what is left behind the turns of the ranks before this
        one, at most ``interleave``. O(n).
        """
        rounds, rest = np.divmod(context_lens, self.round_tokens)
        local: Int64 = rounds * self.interleave + np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        return local
