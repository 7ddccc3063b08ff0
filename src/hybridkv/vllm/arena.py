"""The bytes of a cache in the natural layout, block by block of each class; imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hybridkv.planner import SlabLayout
    from hybridkv.vllm.natural_step import Int32


class Arena:
    """storage: uint8[slabs.arena_bytes], which the views of all layers lie in."""

    def __init__(self, storage: torch.Tensor, slabs: SlabLayout) -> None:
        self._blocks = [
            storage[: slabs.num_slabs * slabs.slab_bytes].view(slabs.num_slabs * one.blocks_per_slab, one.block_bytes)
            for one in slabs.classes
        ]

    def copy(self, copies: Int32) -> None:
        """(class, source, target), int32[n, 3], one after the other: a target may be the source of the next."""
        for of, source, target in copies.tolist():
            self._blocks[of][target] = self._blocks[of][source]

    def zero(self, blocks: Int32) -> None:
        """(class, block), int32[n, 2]."""
        for of in set(blocks[:, 0].tolist()):
            rows = self._blocks[of]
            rows.index_fill_(0, torch.from_numpy(blocks[blocks[:, 0] == of, 1].astype("int64")).to(rows.device), 0)
