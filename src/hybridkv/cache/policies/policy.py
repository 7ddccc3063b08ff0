"""What every policy answers, and which one a spec has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.policies.full import FullAttentionPolicy, T
from hybridkv.cache.policies.values import GroupPlan, Hit, Index
from hybridkv.errors import UnsupportedModelError
from hybridkv.specs import FullAttentionSpec, KVCacheSpec


class Policy(Protocol):
    """See hybridkv.cache.policies.full for the meaning of each answer."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def first_live_token(self, num_computed_tokens: int) -> int:
        """The first token that later tokens still read."""
        ...

    def columns(self, num_tokens: T) -> T:
        """Columns that a row of ``num_tokens`` tokens needs."""
        ...

    def longest_hit(self, index: Index, keys: Sequence[bytes], limit_tokens: int) -> Hit:
        """The longest cached prefix of at most ``limit_tokens`` tokens."""
        ...

    def trim(self, hit: Hit, tokens: int) -> Hit:
        """What is left of ``hit`` at ``tokens`` tokens."""
        ...

    def events(self, held: T, published: T) -> tuple[T, T]:
        """The token counts at which a row needs a block, and can publish one."""
        ...

    def plan(
        self, held: int, hit: NDArray[np.int32] | None, total_tokens: int, published: int, known: int
    ) -> GroupPlan:
        """What is missing for ``total_tokens`` tokens."""
        ...


def policy_of(spec: KVCacheSpec) -> Policy:
    """The policy of ``spec``. UnsupportedModelError for a kind that has none."""
    match spec:
        case FullAttentionSpec():
            return FullAttentionPolicy(spec.block_size)
        case _:
            raise UnsupportedModelError(
                f"{type(spec).__name__} has no cache policy: such layers can be planned, not run or replayed yet; "
                "FullAttentionSpec and MLAAttentionSpec can be"
            )
