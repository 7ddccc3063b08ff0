"""What a request asks of others: where it lives while it holds blocks, and who hashes its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, HashError
from hybridkv.extra_keys import Extra
from hybridkv.units import shown


class Columns(Protocol):
    """Where a resident request lives; see hybridkv.request_rows.RequestRows."""

    num_tokens: NDArray[np.int64]
    num_computed: NDArray[np.int64]
    num_lent: int
    tail: NDArray[np.int32]

    def append_one(self, row: int, token: int) -> None:
        """One token behind the known ones of ``row``."""
        ...

    def append(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> dict[int, HashError]:
        """One token behind the known ones of each of ``rows``; those that could not take theirs, and why."""
        ...

    def least_tokens(self, row: int) -> int:
        """Tokens of ``row`` that cannot be forgotten: computed, or promised to others."""
        ...

    def truncate(self, row: int, num_tokens: int) -> None:
        """Only the first ``num_tokens`` tokens of ``row`` are left, at least one of them."""
        ...


class Hasher(Protocol):
    """Hashes blocks of tokens; see hybridkv.cache.hashing.BlockHasher."""

    @property
    def block_size(self) -> int:
        """Tokens of a hash block."""
        ...

    @property
    def root(self) -> bytes:
        """What the first block's hash builds on."""
        ...

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Hashes of consecutive full blocks, a new list; a tail shorter than a block is left out."""
        ...

    def hash_rows(
        self, parents: Sequence[bytes | None], tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Hashes of unrelated blocks, one a row of ``tokens`` [n, block_size], each with its own parent."""
        ...


def checked_hasher(hasher: Hasher) -> Hasher:
    """``hasher``; ConfigError for what is none."""
    asked = ("block_size", "root", "hash_chain", "hash_rows")
    missing = [name for name in asked if not hasattr(hasher, name)]
    if missing:
        raise ConfigError(f"hasher must have {', '.join(missing)}, got {shown(hasher)}: hand over cache.hasher")
    return hasher
