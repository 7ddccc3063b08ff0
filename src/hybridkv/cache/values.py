"""Block ids as the manager hands them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.pool import NULL_BLOCK, BlockPool
from hybridkv.errors import ConfigError
from hybridkv.request import Request

Int32 = NDArray[np.int32]

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheBlocks:
    """Block ids of one request, per group.

    ids: one int32 array a group. pool: where the blocks are, None for ids that were put together by hand.
    evictions: of the pool when these blocks were found in a look-up; None for others.
    sources: of a hit that ends inside a block or at a state: the block of each group to copy its end from, 0: none.
    parent: whose blocks these are, for a branch of that request: they need no keys. None for all others.
    With slabs ``ids`` are the pool's numbers; what is read out (``blocks``, views) are ids within each group's class.
    """

    ids: tuple[Int32, ...]
    pool: BlockPool | None = field(default=None, repr=False)
    evictions: int | None = field(default=None, repr=False)
    sources: tuple[int, ...] = ()
    parent: Request | None = field(default=None, repr=False)

    @property
    def is_fork(self) -> bool:
        """Whether these are the blocks of a running request."""
        return self.parent is not None

    @property
    def is_stale(self) -> bool:
        """Whether a block lost its key since the look-up: it may hold other tokens by now."""
        if self.evictions is None or self.pool is None:
            return False
        read = (*self.ids, np.array(self.sources, np.int32))
        return not all(self.pool.keys.kept_since(ids[ids != 0], self.evictions) for ids in read)

    @property
    def blocks(self) -> tuple[list[int], ...]:
        """``blocks[group][i]`` is a block id."""
        if self.pool is None:
            return tuple(ids.tolist() for ids in self.ids)
        return tuple(self.pool.local(group, ids).tolist() for group, ids in enumerate(self.ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Group by group. ConfigError when the numbers of groups differ."""
        if len(self.ids) != len(other.ids):
            raise ConfigError(f"blocks of {len(self.ids)} and of {len(other.ids)} groups cannot be joined")
        return KVCacheBlocks(tuple(np.concatenate(pair) for pair in zip(self.ids, other.ids, strict=True)), self.pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.blocks == other.blocks

    __hash__ = None  # type: ignore[assignment]  # equal by content, and content is arrays

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Ids per group; None only when asked for and all groups are empty."""
        if allow_none and not any(len(ids) for ids in self.ids):
            return None
        return self.blocks

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids without key, null blocks left out. ConfigError with more than one group, or without a pool."""
        if len(self.ids) != 1:
            raise ConfigError(f"get_unhashed_block_ids needs exactly one group, these blocks have {len(self.ids)}")
        pool = self._known_pool()
        return [block for block in self.ids[0].tolist() if block != NULL_BLOCK and pool.key_of(block) is None]

    def new_empty(self) -> KVCacheBlocks:
        """No block, in as many groups."""
        return KVCacheBlocks((_NONE,) * len(self.ids), self.pool)

    def views(self) -> tuple[Sequence[BlockView], ...]:
        """The same blocks as views that answer for their state. ConfigError without a pool."""
        pool = self._known_pool()
        return tuple(
            [BlockView(block, pool, number) for block, number in zip(local, ids.tolist(), strict=True)]
            for local, ids in zip(self.blocks, self.ids, strict=True)
        )

    def _known_pool(self) -> BlockPool:
        if self.pool is None:
            raise ConfigError("these blocks name no pool: use those that a manager handed out, or give pool=")
        return self.pool


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block with the attributes that users of vLLM know; always the state of now. number: the pool's."""

    block_id: int
    pool: BlockPool
    number: int

    @property
    def ref_cnt(self) -> int:
        """How many rows hold it."""
        return self.pool.ref_count(self.number)

    @property
    def block_hash(self) -> bytes | None:
        """The key under which it can be hit."""
        return self.pool.key_of(self.number)

    @property
    def is_null(self) -> bool:
        """Whether it is the null block."""
        return self.block_id == NULL_BLOCK
