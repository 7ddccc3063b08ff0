"""Token ids and token counts as callers give them, checked."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from operator import index
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.units import MOST_COUNT, shown

MAX_TOKEN_ID: Final = MOST_COUNT

_UNSIGNED: Final = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}
"""Read so, negative numbers are the largest: one pass over an array tells of both ends."""


def check_ids(ids: Iterable[int], what: str) -> None:
    """ConfigError, about ``what``, unless all ``ids`` lie in 0 .. 2**31 - 1."""
    if any(not 0 <= token <= MAX_TOKEN_ID for token in ids):
        raise ConfigError(f"{what} must lie in 0 .. 2**31 - 1, got {', '.join(map(shown, ids))}")


def token_array(tokens: Sequence[int] | NDArray[np.integer]) -> array[int]:
    """A copy of ``tokens`` as unsigned 32-bit integers below 2**31, type code I; ConfigError for ids that do not fit.

    O(n); a list costs some ten times what an array does.
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
        out = array("I", tokens)  # a third of the time that signed ones take
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
    """Whether all of ``ids``, at least one, are token ids."""
    unsigned = _UNSIGNED.get(ids.dtype)
    if unsigned is None:
        return int(ids.min()) >= 0 and int(ids.max()) <= MAX_TOKEN_ID
    return bool(np.maximum.reduce(ids.view(unsigned)) <= MAX_TOKEN_ID)


def is_number(value: object) -> bool:
    """Whether it is an array of no dimension, which says that it can be iterated."""
    return isinstance(value, np.ndarray) and not value.ndim


def checked_marks(marks: object, what: str = "marks") -> tuple[int, ...]:
    """``marks`` ascending. ConfigError, about ``what``, unless they are distinct token counts, 1 .. 2**31 - 1."""
    if type(marks) is tuple and not marks:
        return ()  # as nearly always
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
