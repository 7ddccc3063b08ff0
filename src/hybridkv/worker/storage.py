"""Paged storage: one arena of bytes, and every layer's strided view of its pages.

page of a block in one layer   [ part 0: block_size x shape ][ part 1: block_size x shape ]   (keys, then values)
view of part k                 [blocks, block_size, *shape], from block to block block_stride_bytes apart

In the natural layout a block may be made of kernel blocks, each with that share of the page of every layer: then the
view's first two dimensions are kernel blocks and their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridkv.errors import ConfigError
from hybridkv.plan.config import KVCacheConfig, KVCacheTensor
from hybridkv.units import format_bytes


@dataclass(frozen=True, slots=True)
class PagePart:
    """One array in a layer's page: ``shape`` a token in ``dtype``, for example (kv heads, head size) of the keys."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return math.prod(self.shape) * self.dtype.itemsize


class PagedStorage:
    """The arena of ``config`` on ``device`` and its views.

    layout: for every layer the parts of its page, in order. ``arena``: uint8[arena_bytes], zeros at first.
    ``views[layer]``: a tensor [blocks, block_size, *shape] for each part; no copies, O(layers). Blocks are the ids of
    the layer's group, those of the null block or slab included.
    Raises ConfigError for a layer without a tensor or without parts, for parts that do not fill the
    planned page to the byte, and for an offset or stride that cuts an element.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        layout: Mapping[str, Sequence[PagePart]],
        device: torch.device | str = "cpu",
    ) -> None:
        tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
        for name in (name for group in config.groups for name in group.layer_names):
            if name not in tensors or name not in layout:
                where = "tensor in the plan" if name not in tensors else "page parts"
                raise ConfigError(f"layer {name!r} has no {where}: plan this very model")
        for group in config.groups:
            for name in group.layer_names:
                _check_page(name, layout[name], group.spec.block_size, group.spec.page_size_bytes)
        self.config = config
        try:
            self.arena = torch.zeros(config.arena_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot allocate {format_bytes(config.arena_bytes)} on {device}: plan less memory ({error})"
            ) from error
        self.views: dict[str, tuple[torch.Tensor, ...]] = {
            name: self._views(name, tensors[name], layout[name], number)
            for number, group in enumerate(config.groups)
            for name in group.layer_names
        }
        self._layers = [group.layer_names for group in config.groups]

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Block ``target`` of ``group`` holds what ``source`` holds. O(bytes of a block).

        In the natural layout that is a move, too: all bytes of the block, whichever group of the class it belongs to.
        """
        slabs = self.config.slabs
        if slabs is None:
            for name in self._layers[group]:
                for view in self.views[name]:
                    view[target] = view[source]
            return
        size = slabs.class_of(group).block_bytes
        self.arena[target * size : (target + 1) * size] = self.arena[source * size : (source + 1) * size]

    def _views(
        self, name: str, tensor: KVCacheTensor, parts: Sequence[PagePart], group: int
    ) -> tuple[torch.Tensor, ...]:
        views = []
        start = tensor.offset_bytes
        slabs = self.config.slabs
        pieces = 1 if slabs is None else slabs.kernel_blocks[group]
        blocks, stride_bytes = self.config.blocks_of(group) * pieces, tensor.block_stride_bytes // pieces
        block_size = self.config.groups[group].spec.block_size // pieces
        for part in parts:
            size = part.dtype.itemsize
            if start % size or stride_bytes % size:
                raise ConfigError(
                    f"layer {name!r} starts at byte {start}, {stride_bytes} bytes from block to block: "
                    f"both must be multiples of the {size} bytes of {part.dtype}"
                )
            inner = (block_size, *part.shape)
            strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
            whole = self.arena[: self.arena.numel() // size * size].view(part.dtype)
            views.append(whole.as_strided((blocks, *inner), (stride_bytes // size, *strides), start // size))
            start += block_size * part.token_bytes
        return tuple(views)


def _check_page(name: str, parts: Sequence[PagePart], block_size: int, page_bytes: int) -> None:
    held = block_size * sum(part.token_bytes for part in parts)
    if held != page_bytes:
        shapes = " + ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in parts)
        raise ConfigError(
            f"layer {name!r}: the plan gives a page {page_bytes} bytes, the model keeps {held} "
            f"({block_size} tokens of {shapes}): plan this very model, with its dtype"
        )
