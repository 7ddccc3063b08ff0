"""Token ids and counts as callers give them, and the protocols that a request uses: its lender and its hasher."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from operator import index
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import integer
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import Extra
from hybridkv.units import MOST_COUNT, shown

MAX_TOKEN_ID: Final = MOST_COUNT

_UNSIGNED: Final = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}
"""Unsigned views, in which negative numbers are the largest: one pass over an array checks both limits."""


def check_ids(ids: Iterable[int], name: str) -> None:
    """Raise ConfigError unless all ids lie in 0 .. 2**31 - 1.

    Args:
        ids: Token ids.
        name: Their name, for the message.
    """
    if any(not 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise ConfigError(f"{name} must lie in 0 .. 2**31 - 1, got {', '.join(map(shown, ids))}")


def token_array(tokens: Sequence[int] | NDArray[np.integer]) -> array[int]:
    """Return a copy of token ids as unsigned 32-bit integers below 2**31, type code I. O(n).

    A list takes about ten times as long as an array.

    Args:
        tokens: Token ids.

    Raises:
        ConfigError: These are no token ids.
    """
    if type(tokens) is not list and isinstance(tokens, bytes | bytearray | str | Mapping | AbstractSet | Iterator):
        raise ConfigError(f"token ids must be a sequence of integers, got {type(tokens).__name__}: tokenize it first")
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ConfigError(f"token ids must be a one-dimensional integer array, got {tokens.dtype}{tokens.shape}")
        if tokens.size and not _all_fit(tokens):
            raise ConfigError("token ids must lie in 0 .. 2**31 - 1")
        out = array("I")
        out.frombytes(np.ascontiguousarray(tokens, np.int32).view(np.uint8).data)
        return out
    try:
        out = array("I", tokens)  # unsigned: takes a third of the time of signed integers
        if not out or _all_fit(np.frombuffer(out, np.int32)):
            return out
    except TypeError as error:
        raise ConfigError(f"token ids must be integers in 0 .. 2**31 - 1: {error}") from None
    except OverflowError:
        pass
    wrong = next(token for token in map(index, tokens) if not 0 <= token <= MAX_TOKEN_ID)
    if wrong < 0:
        raise ConfigError(f"token ids must not be negative, got {shown(wrong)}")
    raise ConfigError(f"token ids must be integers in 0 .. 2**31 - 1, got {shown(wrong)}")


def _all_fit(ids: NDArray[np.integer]) -> bool:
    """Return whether all of ``ids``, at least one, are token ids."""
    unsigned = _UNSIGNED.get(ids.dtype)
    if unsigned is None:
        return int(ids.min()) >= 0 and int(ids.max()) <= MAX_TOKEN_ID
    return bool(np.maximum.reduce(ids.view(unsigned)) <= MAX_TOKEN_ID)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, of Python or numpy, and no truth value.

    Args:
        value: The value.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is an array without dimensions, which claims to be iterable.

    Args:
        value: The value.
    """
    return isinstance(value, np.ndarray) and not value.ndim


def checked_marks(marks: object, name: str = "marks") -> tuple[int, ...]:
    """Return marks in ascending order.

    Args:
        marks: Token counts.
        name: Their name, for the message.

    Raises:
        ConfigError: They are no distinct token counts in 1 .. 2**31 - 1.
    """
    if type(marks) is tuple and not marks:
        return ()  # the usual case
    if not isinstance(marks, Iterable) or isinstance(marks, str | bytes | bytearray) or is_number(marks):
        raise ConfigError(f"{name} must be a list of token counts, got {shown(marks)}")
    given = list(marks)
    for mark in given:
        if not is_integer(mark) or not 0 < mark <= MAX_TOKEN_ID:
            raise ConfigError(f"{name} must be token counts, 1 .. 2**31 - 1, got {shown(mark)}")
    ascending = sorted(map(int, given))
    twice = next((mark for mark, after in pairwise(ascending) if mark == after), None)
    if twice is not None:
        raise ConfigError(f"{name} must be distinct, got {twice} twice")
    return tuple(ascending)


class Lender(Protocol):
    """An engine's own request. Tokens are appended to it, and never changed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and outputs."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Their ids, of which slices are read."""


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """Stands in place of a Request's prompt, if an engine keeps the tokens.

    Attributes:
        lender: The engine's own request.
        num_prompt_tokens: Tokens of its prompt.
        hashes: The engine's own list with one key a full hash block, which grows as the engine hashes. ``None``: the
            request's hasher hashes the tokens.

    Raises:
        ConfigError: A value of another kind.
    """

    lender: Lender
    num_prompt_tokens: int
    hashes: list[bytes] | None = None

    def __post_init__(self) -> None:
        if not (hasattr(self.lender, "num_tokens") and hasattr(self.lender, "all_token_ids")):
            raise ConfigError(f"lender must have num_tokens and all_token_ids, got {shown(self.lender)}")
        integer("num_prompt_tokens", self.num_prompt_tokens, 1, MOST_COUNT)
        if self.hashes is not None and not isinstance(self.hashes, list):
            raise ConfigError(f"hashes must be the engine's own list, which grows, or None, got {shown(self.hashes)}")


class Hasher(Protocol):
    """Hashes blocks of tokens; see ``hybridkv.cache.hashing.BlockHasher``."""

    @property
    def block_size(self) -> int:
        """Tokens of a hash block."""

    @property
    def root(self) -> bytes:
        """The parent of the first block's hash."""

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Return the hashes of consecutive full blocks, a new list; an incomplete last block is left out.

        Args:
            parent: Hash of the block before them; ``None`` for the root.
            tokens: int32, their tokens.
            extras: Extra keys of each block; ``None`` if no block has any.
        """

    def hash_rows(
        self, parents: Sequence[bytes | None], tokens: NDArray[np.int32], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        """Return the hashes of unrelated blocks.

        Args:
            parents: Hash of the block before each; ``None`` for the root.
            tokens: int32[n, block_size], one block a row.
            extras: Extra keys of each block; ``None`` if no block has any.
        """


def checked_hasher(hasher: Hasher) -> Hasher:
    """Return a hasher that has all methods.

    Args:
        hasher: The hasher.

    Raises:
        ConfigError: A method is missing.
    """
    asked = ("block_size", "root", "hash_chain", "hash_rows")
    missing = [name for name in asked if not hasattr(hasher, name)]
    if missing:
        raise ConfigError(f"hasher must have {', '.join(missing)}, got {shown(hasher)}: pass cache.hasher")
    return hasher
