"""Block ids as the manager hands them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.pool import NULL_BLOCK, BlockPool
from hybridkv.errors import ConfigError

Int32 = NDArray[np.int32]

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheBlocks:
    """Block ids of one request, per group. ids: one int32 array a group."""

    ids: tuple[Int32, ...]

    @property
    def blocks(self) -> tuple[list[int], ...]:
        """``blocks[group][i]`` is a block id."""
        return tuple(ids.tolist() for ids in self.ids)

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Group by group. ConfigError when the numbers of groups differ."""
        if len(self.ids) != len(other.ids):
            raise ConfigError(f"blocks of {len(self.ids)} and of {len(other.ids)} groups cannot be joined")
        return KVCacheBlocks(tuple(np.concatenate(pair) for pair in zip(self.ids, other.ids, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.blocks == other.blocks

    __hash__ = None  # type: ignore[assignment]  # equal by content, and content is arrays

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids per group; None only when asked for and all groups are empty."""
        if allow_none and not any(len(ids) for ids in self.ids):
            return None
        return self.blocks

    def get_unhashed_block_ids(self, pool: BlockPool) -> list[int]:
        """Ids without key, null blocks left out, in ``pool``. ConfigError with more than one group."""
        if len(self.ids) != 1:
            raise ConfigError(f"get_unhashed_block_ids needs exactly one group, these blocks have {len(self.ids)}")
        return [block for block in self.blocks[0] if block != NULL_BLOCK and pool.key_of(block) is None]

    def new_empty(self) -> KVCacheBlocks:
        """No block, in as many groups."""
        return KVCacheBlocks((_NONE,) * len(self.ids))

    def views(self, pool: BlockPool) -> tuple[Sequence[BlockView], ...]:
        """The same blocks as views that answer for their state in ``pool``."""
        return tuple([BlockView(block, pool) for block in group] for group in self.blocks)


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block with the attributes that users of vLLM know; always the state of now."""

    block_id: int
    pool: BlockPool

    @property
    def ref_cnt(self) -> int:
        """How many rows hold it."""
        return self.pool.ref_count(self.block_id)

    @property
    def block_hash(self) -> bytes | None:
        """The key under which it can be hit."""
        return self.pool.key_of(self.block_id)

    @property
    def is_null(self) -> bool:
        """Whether it is the null block."""
        return self.block_id == NULL_BLOCK
