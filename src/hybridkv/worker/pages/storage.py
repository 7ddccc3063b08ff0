"""Paged storage: one arena of bytes, and every layer's strided view of its pages.

    page, NHD     [ part 0: block_size x heads x width ][ part 1: ... ][ padding ]        (keys, then values)
    page, HND     [ part 0: heads x block_size x width ][ part 1: ... ][ padding ]
    view, NHD     [blocks, block_size, heads, width]     view, HND   [blocks, heads, block_size, width]
    latents       [blocks, block_size, width], in either order: there are no heads
    states        [blocks, *shape]: a block holds one state, whatever its tokens

From block to block it is ``block_stride_bytes``. In the natural layout a block may be made of kernel blocks, each with
that share of the page of every layer: then a view's first dimension, and its tokens, are those of kernel blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheTensor
from hybridkv.specs import AttentionSpec, Keeps, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec
from hybridkv.units import format_bytes

_FP8: Final = {"fp8": torch.float8_e4m3fn}
"""Names of cache dtypes that torch calls otherwise."""


class PageOrder(StrEnum):
    """What comes first within a block's keys, and within its values: tokens (NHD) or heads (HND)."""

    NHD = "NHD"
    HND = "HND"


@dataclass(frozen=True, slots=True)
class PagePart:
    """One array in a layer's page, in ``dtype``.

    shape: of attention, what a token has of it: (kv heads, head size), or (width,) of a latent that all heads share.
    Of a recurrent layer, the state's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, or of one state."""
        return math.prod(self.shape) * self.dtype.itemsize


def parts_of(spec: KVCacheSpec) -> tuple[PagePart, ...]:
    """What a layer of ``spec`` keeps in its page: keys and values, one latent, or its states.

    Raises ConfigError for a spec of several layers, or of an unknown kind.
    """
    match spec:
        case MambaSpec():
            pairs = zip(spec.shapes, spec.dtypes, strict=True)
            return tuple(PagePart(shape, _torch_dtype(dtype)) for shape, dtype in pairs)
        case MLAAttentionSpec() | SlidingWindowMLASpec():
            return (PagePart((spec.head_size,), _torch_dtype(spec.dtype)),)
        case AttentionSpec():
            dtype, heads = _torch_dtype(spec.dtype), spec.num_kv_heads
            widths = (spec.head_size, spec.elements_per_token - spec.head_size)
            return tuple(PagePart((heads, width), dtype) for width in widths)
        case _:
            raise ConfigError(
                f"{type(spec).__name__} does not say what its page is made of: hand in the spec of one layer"
            )


class PagedStorage:
    """The arena of ``config`` on ``device`` and its views.

    layout: for every layer the parts of its page, in order; None for what its spec says (``parts_of``). order: of
    tokens and heads within a block, for every part with heads. ``arena``: uint8[arena_bytes], zeros at first.
    ``views[layer]``: a tensor for each part, of the shapes above; no copies, O(layers). Blocks are the ids of
    the layer's group, those of the null block or slab included.
    Raises ConfigError for a layer without a tensor or without parts, for parts that do not fill the
    planned page to the byte, padding aside, for an offset or stride that cuts an element, and for an unknown order.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        layout: Mapping[str, Sequence[PagePart]] | None = None,
        device: torch.device | str = "cpu",
        *,
        order: PageOrder = PageOrder.NHD,
    ) -> None:
        if order not in tuple(PageOrder):
            raise ConfigError(f"unknown order {order!r} of a page: use one of {', '.join(PageOrder)}")
        self.config, self.order = config, PageOrder(order)
        tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
        parts: dict[str, Sequence[PagePart]] = {}
        for group in config.groups:
            for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
                if name not in tensors or (layout is not None and name not in layout):
                    where = "tensor in the plan" if name not in tensors else "page parts"
                    raise ConfigError(f"layer {name!r} has no {where}: plan this very model")
                parts[name] = parts_of(spec) if layout is None else layout[name]
                _check_page(name, parts[name], spec)
        try:
            self.arena = torch.zeros(config.arena_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot allocate {format_bytes(config.arena_bytes)} on {device}: plan less memory ({error})"
            ) from error
        self.views: dict[str, tuple[torch.Tensor, ...]] = {
            name: self._views(name, tensors[name], parts[name], number)
            for number, group in enumerate(config.groups)
            for name in group.layer_names
        }

    def _views(
        self, name: str, tensor: KVCacheTensor, parts: Sequence[PagePart], group: int
    ) -> tuple[torch.Tensor, ...]:
        views = []
        start = tensor.offset_bytes
        spec, pieces = self.config.groups[group].spec, self.config.kernel_blocks_of(group)
        blocks, stride_bytes = self.config.blocks_of(group) * pieces, tensor.block_stride_bytes // pieces
        tokens = None if spec.keeps is Keeps.STATE else spec.block_size // pieces
        for part in parts:
            size = part.dtype.itemsize
            if start % size or stride_bytes % size:
                raise ConfigError(
                    f"layer {name!r} starts at byte {start}, {stride_bytes} bytes from block to block: "
                    f"both must be multiples of the {size} bytes of {part.dtype}"
                )
            inner = part.shape if tokens is None else (tokens, *part.shape)
            if self.order is PageOrder.HND and len(inner) == 3 and tokens is not None:
                inner = (inner[1], inner[0], inner[2])
            strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
            whole = self.arena[: self.arena.numel() // size * size].view(part.dtype)
            views.append(whole.as_strided((blocks, *inner), (stride_bytes // size, *strides), start // size))
            start += math.prod(inner) * size
        return tuple(views)


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = _FP8[name] if name in _FP8 else getattr(torch, name)
    return dtype


def _check_page(name: str, parts: Sequence[PagePart], spec: KVCacheSpec) -> None:
    """Raise ConfigError unless ``parts`` are what ``spec`` has planned for, to the byte."""
    state = spec.keeps is Keeps.STATE
    held = (1 if state else spec.block_size) * sum(part.token_bytes for part in parts)
    if held != spec.content_bytes:
        shapes = " + ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in parts)
        many = "a state" if state else f"{spec.block_size} tokens"
        raise ConfigError(
            f"layer {name!r}: the plan gives a page {spec.content_bytes} bytes, the model keeps {held} "
            f"({many} of {shapes}): plan this very model, with its dtype"
        )


@dataclass(frozen=True, slots=True, eq=False)
class KVPages:
    """Views of a layer's pages, tokens first whatever their order in memory.

    keys: [blocks, block_size, kv heads, width]; values: the same but for the width. Of a latent, values are the
    first columns of the keys. key_scale, value_scale: what is stored times these is what is meant, for float8.
    Raises ConfigError for shapes that do not match, and for scales that are not positive.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.keys.dim() != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise ConfigError(
                f"pages of keys {tuple(self.keys.shape)} and of values {tuple(self.values.shape)}: give "
                "[blocks, block_size, kv heads, width] of both, equal but for the width"
            )
        for name in ("key_scale", "value_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a positive number, got {getattr(self, name)}; 1 for none")

    @classmethod
    def of_views(cls, views: tuple[torch.Tensor, ...], order: PageOrder = PageOrder.NHD) -> KVPages:
        """Of a layer's two views in a PagedStorage of that order."""
        if len(views) != 2 or any(view.dim() != 4 for view in views):
            raise ConfigError(
                f"{len(views)} views of shapes {[tuple(view.shape) for view in views]} are no keys and values"
            )
        keys, values = views
        if order is PageOrder.HND:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return cls(keys, values)

    @classmethod
    def of_latent(cls, view: torch.Tensor, kv_lora_rank: int) -> KVPages:
        """Of a layer with multi-head latent attention, absorbed: one KV head, whose values are part of its keys.

        view: [blocks, block_size, kv_lora_rank + rotary width].
        """
        if view.dim() != 3 or not 0 < kv_lora_rank <= view.shape[2]:
            raise ConfigError(
                f"a view of shape {tuple(view.shape)} holds no latents of {kv_lora_rank}: "
                "give [blocks, block_size, kv_lora_rank + rotary width]"
            )
        keys = view[:, :, None]
        return cls(keys, keys[..., :kv_lora_rank])

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included; kernel blocks where blocks are split."""
        return self.keys.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block on this rank."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[2]
