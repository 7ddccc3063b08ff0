"""Blocks as bytes: what a copy of a whole block must take, in both layouts.

reference   a block of a group is its page in every layer of the group; pages lie in the layers' tensors
natural     a block of a class is block_bytes of the arena in one piece, whichever group of the class it belongs to
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from hybridkv.worker.copies.copy_kernels import stack_layers
from hybridkv.worker.pages.storage import PagedStorage

_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class ByteBlocks:
    """Blocks that have the same bytes under the same id.

    groups: whose blocks they are. null_blocks, num_blocks: requests have ids null_blocks .. num_blocks - 1.
    spacing: blocks of two ByteBlocks can share bytes only where id * spacing lies in the same slab (natural), or is
    equal (reference). stacks: [layers, num_blocks, words] each, together all bytes of a block.
    """

    groups: tuple[int, ...]
    null_blocks: int
    num_blocks: int
    spacing: int
    stacks: tuple[torch.Tensor, ...]


def byte_blocks(storage: PagedStorage) -> tuple[ByteBlocks, ...]:
    """One for each class of the natural layout, one for each group of the reference. No copies, O(layers)."""
    return tuple(_of_classes(storage) if storage.config.slabs is not None else _of_groups(storage))


def _of_classes(storage: PagedStorage) -> Iterator[ByteBlocks]:
    for of in storage.config.slabs.classes if storage.config.slabs is not None else ():
        blocks, size = storage.config.blocks_of(of.groups[0]), of.block_bytes
        pages = _pages(storage.arena, 0, size, size, blocks)
        yield ByteBlocks(of.groups, of.blocks_per_slab, blocks, size, stack_layers([pages]))


def _of_groups(storage: PagedStorage) -> Iterator[ByteBlocks]:
    config = storage.config
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    for number, group in enumerate(config.groups):
        views = [
            _pages(
                storage.arena,
                tensors[name].offset_bytes,
                tensors[name].block_stride_bytes,
                spec.content_bytes,
                config.num_blocks,
            )
            for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
        ]
        yield ByteBlocks((number,), 1, config.num_blocks, 1, stack_layers(views))


def _pages(arena: torch.Tensor, offset: int, stride: int, size: int, blocks: int) -> torch.Tensor:
    """[blocks, words] of ``size`` bytes, ``stride`` apart, from byte ``offset`` on, in the widest words that fit."""
    width, dtype = next(word for word in _WORDS if not (offset % word[0] or stride % word[0] or size % word[0]))
    words = arena[: arena.numel() // width * width].view(dtype)
    return words.as_strided((blocks, size // width), (stride // width, 1), offset // width)
