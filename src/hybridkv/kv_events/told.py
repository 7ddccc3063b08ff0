"""What consumers have been told can be hit: for those who come late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hybridkv.cache.journal import BlockRemoved, BlockStored, KVCacheEvent

_Key = tuple[int, bytes]


class Told:
    """Blocks that events told of, each as an event of its own; several blocks of one key count as often."""

    def __init__(self) -> None:
        self._blocks: dict[_Key, BlockStored] = {}
        self._copies: dict[_Key, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """``events`` are told. O(blocks)."""
        for event in events:
            match event:
                case BlockStored():
                    for one in single_blocks(event):
                        key = event.group_idx, one.block_hashes[0]
                        self._blocks[key] = one
                        self._copies[key] = self._copies.get(key, 0) + 1
                case BlockRemoved():
                    for block in event.block_hashes:
                        self._remove((event.group_idx, block))
                case _:
                    self._blocks.clear()
                    self._copies.clear()

    def _remove(self, key: _Key) -> None:
        left = self._copies.pop(key, 0) - 1
        if left > 0:
            self._copies[key] = left
        else:
            self._blocks.pop(key, None)

    def snapshot(self) -> list[BlockStored]:
        """All of them, parents in front of their children. O(blocks)."""
        told: list[BlockStored] = []
        seen: set[_Key] = set()
        for key in self._blocks:
            chain: list[BlockStored] = []
            at: _Key | None = key
            while at is not None and at in self._blocks and at not in seen:
                seen.add(at)
                block = self._blocks[at]
                chain += [block] * self._copies[at]
                parent = block.parent_block_hash
                at = None if parent is None else (at[0], parent)
            told += reversed(chain)
        return told


def single_blocks(event: BlockStored) -> Iterator[BlockStored]:
    """``event`` as one event a block."""
    size, parent = event.block_size, event.parent_block_hash
    for at, key in enumerate(event.block_hashes):
        yield replace(
            event,
            block_hashes=(key,),
            parent_block_hash=parent,
            token_ids=event.token_ids[at * size : (at + 1) * size],
            extra_keys=None if event.extra_keys is None else event.extra_keys[at : at + 1],
        )
        parent = key
