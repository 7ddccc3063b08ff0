"""Blocks as vLLM's schedulers, workers and connectors take them: ids by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.cache import KVCacheBlocks


class Block(NamedTuple):
    """A block as connectors look at it. block_hash: its key, None for one that cannot be hit."""

    block_id: int
    block_hash: bytes | None
    is_null: bool


class Blocks:
    """What vLLM calls KVCacheBlocks. held: ours, which a hit is adopted from."""

    __slots__ = ("held",)

    def __init__(self, held: KVCacheBlocks) -> None:
        self.held = held

    @property
    def blocks(self) -> tuple[list[Block], ...]:
        """Each block of each group."""
        key_of = _no_key if self.held.pool is None else self.held.pool.key_of
        return tuple([Block(one, key_of(one), one == 0) for one in ids.tolist()] for ids in self.held.ids)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Ids by group, of ``group_ids`` where they are given; None for none at all with ``allow_none``."""
        if allow_none and group_ids is None and not any(map(len, self.held.ids)):
            return None
        every = self.held.blocks
        ids = every if group_ids is None else tuple(every[group] for group in group_ids)
        return None if allow_none and not any(ids) else ids

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids by group of the blocks that cannot be hit yet."""
        return [[one.block_id for one in group if one.block_hash is None and not one.is_null] for group in self.blocks]

    def get_unhashed_block_ids(self) -> list[int]:
        """The same of the only group."""
        (ids,) = self.get_unhashed_block_ids_all_groups()
        return ids

    def new_empty(self) -> Blocks:
        """No block in every group."""
        return Blocks(KVCacheBlocks(tuple(ids[:0] for ids in self.held.ids), self.held.pool))


def _no_key(block: int) -> None:
    """Of a block that is nowhere."""
    del block
