"""Prompt lookup: what followed when a request's newest tokens stood in it before.

    tokens  [ . . a b c d e . . . a b c ]     the longest match of the last tokens: a b c
                        ^ ^ drafts            what stood behind it: d e

The method of Saxena ("Prompt lookup decoding", 2023), which transformers and vLLM have, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import check_fields, each, integer, one_of
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.runner.drafters.drafter import checked_count

if TYPE_CHECKING:
    from hybridkv.runner.load import LoadedModel

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_NOWHERE: Final[Int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """Drafts from a request's own prompt and output; it keeps nothing between steps.

    max_ngram, min_ngram: the most and the fewest newest tokens that must have stood there before.
    Raises ConfigError for counts that cannot be.
    """

    num_speculative_tokens: int = 4
    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        check_fields(self, integer, "num_speculative_tokens", "max_ngram", "min_ngram")
        checked_count(self.num_speculative_tokens)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(f"n-grams need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")

    def require(self, target: LoadedModel) -> None:
        """Any model will do."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """What stood behind the longest match; none where nothing matches. O(tokens) a request."""
        return [self._behind(request.token_ids()) for request in each(one_of(Request))("requests", requests)]

    def close(self) -> None:
        """Nothing is held."""

    def _behind(self, tokens: Int32) -> list[int]:
        """Of the longest matches the last one with all drafts behind it, else the first: it has the most."""
        ends = self._longest(tokens)
        if not len(ends):
            return []
        count = self.num_speculative_tokens
        full = ends[ends + count < len(tokens)]
        end = int(full[-1] if len(full) else ends[0])
        drafts: list[int] = tokens[end + 1 : end + 1 + count].tolist()
        return drafts

    def _longest(self, tokens: Int32) -> Int64:
        """Where earlier copies of the newest tokens end, ascending: those of the longest match."""
        found, ends = _NOWHERE, np.flatnonzero(tokens[:-1] == tokens[-1])
        for length in range(1, self.max_ngram + 1):
            if not len(ends):
                break
            if length >= self.min_ngram:
                found = ends
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]]
        return found
