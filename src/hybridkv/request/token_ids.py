"""Token ids and token counts as callers give them, checked."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT, shown

MAX_TOKEN_ID: Final = MOST_COUNT


def check_ids(ids: Iterable[int], what: str) -> None:
    """ConfigError, about ``what``, unless all ``ids`` lie in 0 .. 2**31 - 1."""
    if any(not 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise ConfigError(f"{what} must lie in 0 .. 2**31 - 1, got {', '.join(map(shown, ids))}")


def token_array(tokens: Sequence[int] | NDArray[np.integer]) -> array[int]:
    """A copy of ``tokens`` as 32-bit integers; ConfigError for ids that do not fit."""
    if type(tokens) is not list and isinstance(tokens, bytes | bytearray | str | Mapping | AbstractSet | Iterator):
        raise ConfigError(f"token ids must be a sequence of integers, got {type(tokens).__name__}: tokenize it first")
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise ConfigError(f"token ids must be a one-dimensional integer array, got {tokens.dtype}{tokens.shape}")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN_ID):
            raise ConfigError("token ids must lie in 0 .. 2**31 - 1")
        out = array("i")
        out.frombytes(np.ascontiguousarray(tokens, np.int32).view(np.uint8).data)
        return out
    try:
        out = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be integers in 0 .. 2**31 - 1: {error}") from None
    smallest = int(np.frombuffer(out, np.int32).min()) if out else 0
    if smallest < 0:
        raise ConfigError(f"token ids must not be negative, got {smallest}")
    return out


def is_number(value: object) -> bool:
    """Whether it is an array of no dimension, which says that it can be iterated."""
    return isinstance(value, np.ndarray) and not value.ndim


def checked_marks(marks: object, what: str = "marks") -> tuple[int, ...]:
    """``marks`` ascending. ConfigError, about ``what``, unless they are distinct token counts, 1 .. 2**31 - 1."""
    if not isinstance(marks, Iterable) or isinstance(marks, str | bytes | bytearray) or is_number(marks):
        raise ConfigError(f"{what} must be a list of token counts, got {shown(marks)}")
    given = list(marks)
    for mark in given:
        whole = isinstance(mark, int | np.integer) and not isinstance(mark, bool)
        if not whole or not 0 < mark <= MAX_TOKEN_ID:
            raise ConfigError(f"{what} must be token counts, 1 .. 2**31 - 1, got {shown(mark)}")
    ascending = sorted(map(int, given))
    twice = next((mark for mark, after in pairwise(ascending) if mark == after), None)
    if twice is not None:
        raise ConfigError(f"{what} must be distinct, got {twice} twice")
    return tuple(ascending)
