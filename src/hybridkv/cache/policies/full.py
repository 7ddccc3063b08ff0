"""Full attention (and MLA): every token is needed to the end, blocks are written once and shared freely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.policies.values import GroupPlan, Hit, Index

T = TypeVar("T", int, NDArray[np.int64])

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class FullAttentionPolicy:
    """Blocks of ``block_size`` tokens, column i holding tokens i * block_size .. (i + 1) * block_size - 1."""

    block_size: int

    def first_live_token(self, num_computed_tokens: int) -> int:  # noqa: ARG002 - the answer of a policy
        """The first token that later tokens still read: always 0."""
        return 0

    def columns(self, num_tokens: T) -> T:
        """Columns that a row of ``num_tokens`` tokens needs. A number or an int64 array."""
        return -(-num_tokens // self.block_size)

    def longest_hit(self, index: Index, keys: Sequence[bytes], limit_tokens: int) -> Hit:
        """The longest cached prefix of at most ``limit_tokens`` tokens: left to right until the first miss.

        keys: one per block of this group. O(blocks of the hit).
        """
        blocks = index.leading_run(keys, limit_tokens // self.block_size)
        return Hit(len(blocks) * self.block_size, blocks)

    def trim(self, hit: Hit, tokens: int) -> Hit:
        """The first ``tokens`` of a hit; a prefix of a full-attention hit is one too (downward closed)."""
        return Hit(tokens, hit.blocks[: tokens // self.block_size])

    def events(self, held: T, published: T) -> tuple[T, T]:
        """The token counts at which a row needs a block, and can publish one. Numbers or int64 arrays."""
        return held * self.block_size + 1, (published + 1) * self.block_size

    def plan(
        self, held: int, hit: NDArray[np.int32] | None, total_tokens: int, published: int, known: int
    ) -> GroupPlan:
        """What is missing for ``total_tokens`` tokens, and what can be published then.

        held: columns that the row has. hit: blocks to adopt (a new row only). published: columns already
        published. known: tokens whose ids and place are settled by this plan: min(total, tokens known).
        """
        reuse = _NONE if hit is None else hit
        take = self.columns(total_tokens) - held - len(reuse)
        last = known // self.block_size
        first = max(published, len(reuse))
        return GroupPlan(reuse, max(take, 0), first, max(first, last))
