"""Paged storage: one arena of bytes, every layer's strided view of its pages, and writes of keys and values into them.

    page, NHD     [ part 0: block_size x heads x width ][ part 1: ... ][ padding ]        (keys, then values)
    page, HND     [ part 0: heads x block_size x width ][ part 1: ... ][ padding ]
    view, NHD     [blocks, block_size, heads, width]     view, HND   [blocks, heads, block_size, width]
    latents       [blocks, block_size, width], in either order: there are no heads
    states        [blocks, *shape]: a block holds one state, whatever its tokens

From block to block it is ``block_stride_bytes``. In the natural layout a block may be made of kernel blocks, each with
that share of the page of every layer: then a view's first dimension, and its tokens, are those of kernel blocks.

Keys and values go where the slots say: ``slot = block * block_size + offset``, -1 for tokens that go nowhere.

    slots [ 30 31 -1 12 ], block_size 4   ->   tokens 0 1 3 to blocks 7 7 3 at offsets 2 3 0

A step's slots are checked and taken apart once for a group, and used by every layer of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import Final

import numpy as np
import torch

from hybridkv.errors import ConfigError, WorkerError
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


_ROUNDED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of states that pages of float8 take."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteSlots:
    """Where a step's tokens go in one group.

    num_tokens: of the step, those that go nowhere included. tokens, blocks, offsets: int64[n], the tokens that are
    written and where. num_blocks, block_size: of the pages they were made for.
    """

    num_tokens: int
    num_blocks: int
    block_size: int
    tokens: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor


def write_slots(slots: torch.Tensor, num_blocks: int, block_size: int) -> WriteSlots:
    """``slots``, int64[tokens], for pages of ``num_blocks`` blocks of ``block_size`` tokens.

    Raises WorkerError for a slot below -1 or behind the last block, and for two tokens in one slot.
    O(tokens log tokens), and a wait for the device that the slots are on.
    """
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise WorkerError(f"slots must be int64[tokens], got {slots.dtype} of shape {tuple(slots.shape)}")
    tokens = torch.nonzero(slots != -1).flatten()
    held = slots[tokens]
    if len(held):
        ordered = held.sort().values
        first, last, limit = int(ordered[0]), int(ordered[-1]), num_blocks * block_size
        if first < 0 or last >= limit:
            raise WorkerError(
                f"slots must lie in 0 .. {limit - 1} ({num_blocks} blocks of {block_size} tokens), or be -1 for a "
                f"token that is not kept; got {first} .. {last}"
            )
        twice = torch.nonzero(ordered[1:] == ordered[:-1]).flatten()
        if len(twice):
            raise WorkerError(
                f"two tokens go to slot {int(ordered[twice[0]])}: a block that is written belongs to one request, and "
                "each position is scheduled once"
            )
    blocks = torch.div(held, block_size, rounding_mode="floor")
    return WriteSlots(len(slots), num_blocks, block_size, tokens, blocks, held % block_size)


def write_kv(slots: WriteSlots, pages: KVPages, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Keys and values of a step's tokens into their slots.

    keys: [tokens, kv heads, width], values likewise, both in the dtype of the pages. Into pages of float8_e4m3fn also
    in another float dtype: divided by the pages' scales, rounded to the nearest, ties to even; what is too large
    becomes the largest, 448. Raises WorkerError, with nothing written, for shapes, dtypes or pages that do not match.
    O(tokens).
    """
    _write(slots, _parts(slots.num_tokens, pages, keys, values))


def write_latent(
    slots: WriteSlots, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, *, scale: float = 1.0
) -> None:
    """The latents of a step's tokens, and their rotary parts behind them, into their slots.

    pages: [blocks, block_size, kv_lora_rank + rotary width]. latent: [tokens, kv_lora_rank]; rotary:
    [tokens, rotary width]; dtypes as of ``write_kv``. scale: of pages of float8. Raises WorkerError as ``write_kv``
    does. O(tokens).
    """
    _write(slots, _latent_parts(slots.num_tokens, pages, latent, rotary, scale))


def triton_write_kv(slots: torch.Tensor, pages: KVPages, keys: torch.Tensor, values: torch.Tensor) -> None:
    """What ``write_kv`` writes, to the bit, in one launch of Triton; a CUDA graph may capture it.

    slots: int64[tokens], contiguous, on the device of the pages, as slot mappings are made. They are not looked at
    before: tokens whose slot does not exist go nowhere, and no two may have one slot (``write_slots`` checks both).
    Raises WorkerError as ``write_kv`` does, ConfigError where Triton is not installed.
    """
    _check_slots(slots)
    _launch(slots, _parts(len(slots), pages, keys, values))


def triton_write_latent(
    slots: torch.Tensor, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, *, scale: float = 1.0
) -> None:
    """What ``write_latent`` writes, as ``triton_write_kv`` writes it."""
    _check_slots(slots)
    _launch(slots, _latent_parts(len(slots), pages, latent, rotary, scale))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """States that go to a view [blocks, block_size, heads, width]; times ``factor`` where they are rounded."""

    view: torch.Tensor
    states: torch.Tensor
    factor: float

    @property
    def rounded(self) -> bool:
        return self.view.dtype != self.states.dtype

    def stored(self) -> torch.Tensor:
        """The states as the view holds them."""
        if not self.rounded:
            return self.states
        largest = torch.finfo(self.view.dtype).max
        return (self.states.float() * self.factor).clamp(-largest, largest).to(self.view.dtype)


def _parts(
    num_tokens: int, pages: KVPages, keys: torch.Tensor, values: torch.Tensor, names: Sequence[str] = ("keys", "values")
) -> tuple[_Part, _Part]:
    """Of keys and of values, checked."""
    return (
        _part(num_tokens, pages.keys, keys, names[0], pages.key_scale),
        _part(num_tokens, pages.values, values, names[1], pages.value_scale),
    )


def _latent_parts(
    num_tokens: int, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, scale: float
) -> tuple[_Part, _Part]:
    """Of latents and of what stands behind them, checked."""
    fit = latent.dim() == rotary.dim() == 2 and pages.dim() == 3
    if not fit or latent.shape[1] + rotary.shape[1] != pages.shape[2]:
        raise WorkerError(
            f"latents of shape {tuple(latent.shape)} and rotary parts of shape {tuple(rotary.shape)} do not fill "
            f"pages of shape {tuple(pages.shape)}: give [tokens, width] of both"
        )
    if not 0 < scale < math.inf:
        raise WorkerError(f"the scale of latents must be a positive number, got {scale}; 1 for none")
    width = latent.shape[1]
    views = KVPages(pages[:, :, None, :width], pages[:, :, None, width:], scale, scale)
    return _parts(num_tokens, views, latent[:, None], rotary[:, None], ("latents", "rotary parts"))


def _part(num_tokens: int, view: torch.Tensor, states: torch.Tensor, name: str, scale: float) -> _Part:
    wanted = (num_tokens, *view.shape[2:])
    fits = states.dtype == view.dtype or (view.dtype == torch.float8_e4m3fn and states.dtype in _ROUNDED)
    if states.shape != wanted or not fits:
        raise WorkerError(
            f"{name} of shape {tuple(states.shape)} in {states.dtype}: the pages take {wanted} in {view.dtype}"
        )
    # a float32, as both ways multiply by it
    return _Part(view, states, float(np.float32(1 / scale)))


def _write(slots: WriteSlots, parts: tuple[_Part, _Part]) -> None:
    made_for = (slots.num_blocks, slots.block_size)
    for part in parts:
        if part.view.shape[:2] != made_for:
            raise WorkerError(
                f"slots of {made_for} (blocks, tokens of a block) do not fit pages of {tuple(part.view.shape[:2])}"
            )
    for part in parts:
        view, states = _as_bytes(part.view), _as_bytes(part.stored())
        view[slots.blocks, slots.offsets] = states[slots.tokens]


def _launch(slots: torch.Tensor, parts: tuple[_Part, _Part]) -> None:
    kernels = load_kernels("write_kv")
    if parts[0].rounded != parts[1].rounded:
        raise WorkerError(f"states of {parts[0].states.dtype} and {parts[1].states.dtype}: give both in one dtype")
    if len(slots):
        keys, values = ((_as_bytes(part.view), _as_bytes(part.states), part.factor) for part in parts)
        kernels.launch_write(slots, keys, values, fp8=parts[0].rounded)


def load_kernels(instead: str) -> ModuleType:
    """This library's kernels in Triton, which is optional. ConfigError without it, with what to use ``instead``."""
    try:
        return import_module("hybridkv.worker.kernels")
    except ImportError as error:
        raise ConfigError(f"Triton is not installed: pip install 'hybridkv[gpu]', or use {instead}") from error


def _check_slots(slots: torch.Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise WorkerError(f"slots must be int64[tokens], side by side, got {slots.dtype} of shape {tuple(slots.shape)}")


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes as bytes: torch writes them by index, and Triton loads them, of float8 on some devices only."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
