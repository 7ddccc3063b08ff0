"""What stands for a hasher where an engine hashes its requests itself, and lends them (hybridkv.request.Lent)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra
from hybridkv.units import MOST_COUNT


class EngineHashes:
    """A Hasher that computes nothing: keys are those that requests were lent with. block_size: tokens of each."""

    root = b""

    def __init__(self, block_size: int) -> None:
        self.block_size = integer("block_size", block_size, 1, MOST_COUNT)

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """None of fewer tokens than a block has. ConfigError for others."""
        del parent, extras
        if len(tokens) >= self.block_size:
            raise ConfigError("the engine hashes its requests itself: lend theirs with their hashes")
        return []

    def hash_rows(
        self, parents: Sequence[bytes | None], tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """ConfigError."""
        del parents
        return self.hash_chain(None, tokens.ravel(), extras)
