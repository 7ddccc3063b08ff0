"""Paged storage: one arena of bytes, a strided view of every layer's pages, and writes of keys and values into pages.

    page, NHD     [ part 0: block_size x heads x width ][ part 1: ... ][ padding ]        (keys, then values)
    page, HND     [ part 0: heads x block_size x width ][ part 1: ... ][ padding ]
    view, NHD     [blocks, block_size, heads, width]     view, HND   [blocks, heads, block_size, width]
    latents       [blocks, block_size, width], in either order: there are no heads
    states        [blocks, *shape]: a block holds one state, however many tokens it covers
    compressed    as above, with block_size / tokens_per_state compressed states in place of block_size tokens
    packed        [blocks, compressed states or tokens, (heads,) bytes], uint8: only a kernel knows what is in the bytes
    ring          as keys and values, or keys alone: token p lies at p % block_size of its request's one block
    quantized     scales of keys and of values, then codes of both (quantized.py)

Neighbouring blocks are ``block_stride_bytes`` apart. In the natural layout, a block may consist of kernel blocks, each
with an equal part of the page of every layer. The first dimension of a view, and its tokens, are then those of kernel
blocks.

Keys and values are written to slots: ``slot = block * block_size + offset``, -1 for tokens that are not written.

    slots [ 30 31 -1 12 ], block_size 4   ->   tokens 0 1 3 to blocks 7 7 3 at offsets 2 3 0

The slots of a step are checked and split once for each group; every layer of the group uses them.
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
from hybridkv.spec_fields import Feature, Quantization, require_supported
from hybridkv.specs import AttentionSpec, KVCacheSpec, MambaSpec
from hybridkv.units import format_bytes
from hybridkv.worker.codecs import stored_shapes

_FP8: Final = {"fp8": torch.float8_e4m3fn}
"""Cache dtypes that have another name in torch."""


_SUPPORTED: Final = frozenset(
    {
        *(Feature.RATE, Feature.RING, Feature.INDEXER, Feature.RETAINED, Feature.PACKED, Feature.REPLICATED),
        Feature.QUANTIZED,
    }
)
"""Features of specs whose pages ``parts_of`` knows, or that do not change the contents of a page."""


class PageOrder(StrEnum):
    """The order within a block's keys, and within its values: tokens first (NHD) or heads first (HND)."""

    NHD = "NHD"
    HND = "HND"


@dataclass(frozen=True, slots=True)
class PagePart:
    """One array in a layer's page.

    Attributes:
        shape: for attention, the shape of one token, or of one compressed state: (kv heads, head size), or (width,) for
            a latent that all heads share. For a recurrent layer, the shape of the state.
        dtype: of the elements; uint8 for packed bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, or of one state."""
        return math.prod(self.shape) * self.dtype.itemsize


def parts_of(spec: KVCacheSpec) -> tuple[PagePart, ...]:
    """Return the parts of a layer's page: keys and values, keys alone, one latent, packed bytes, or its states.

    Args:
        spec: the spec of one layer.

    Raises:
        ConfigError: the spec is of several layers, or of an unknown kind.
    """
    match spec:
        case MambaSpec():
            pairs = zip(spec.shapes, spec.dtypes, strict=True)
            return tuple(PagePart(shape, _torch_dtype(dtype)) for shape, dtype in pairs)
        case AttentionSpec():
            heads = spec.num_kv_heads if spec.num_head_slots is None else spec.num_head_slots
            if spec.state_content_bytes is not None:
                return (PagePart(_of_heads(spec, heads, spec.state_content_bytes), torch.uint8),)
            widths = (spec.head_size, spec.elements_per_token - spec.head_size)
            if spec.quantization is not None:
                return _coded_parts(spec, spec.quantization, widths)
            return tuple(PagePart(_of_heads(spec, heads, width), _torch_dtype(spec.dtype)) for width in widths if width)
        case _:
            raise ConfigError(f"{type(spec).__name__} does not define the parts of a page: give the spec of one layer")


def _of_heads(spec: AttentionSpec, heads: int, width: int) -> tuple[int, ...]:
    """Return the shape of one token or compressed state. A latent has no heads, unless its heads are packed."""
    return (width,) if spec.is_latent and heads == 1 else (heads, width)


def _coded_parts(spec: AttentionSpec, form: Quantization, widths: Sequence[int]) -> tuple[PagePart, ...]:
    """Return the parts of a page of codes. A latent has two scales, and one run of codes."""
    if spec.is_latent:
        codes = spec.head_size * form.code_bits // 8
        return PagePart((2,), torch.float32), PagePart((codes,), _torch_dtype(form.dtype))
    return quantized_parts(form, [PagePart((spec.num_kv_heads, width), torch.float32) for width in widths])


def quantized_parts(form: Quantization, parts: Sequence[PagePart]) -> tuple[PagePart, ...]:
    """Return the parts of a page that holds ``parts`` as codes: the scales of each, then the codes of each.

    Args:
        form: the form of the codes.
        parts: keys and values of one token, (heads, width) each.
    """
    of_scale, of_code = torch.uint8 if form.scaled else torch.float32, _torch_dtype(form.dtype)
    stored = [stored_shapes(form, *part.shape) for part in parts]
    scales = tuple(PagePart(scale, of_scale) for scale, _ in stored)
    return scales + tuple(PagePart(code, of_code) for _, code in stored)


class PagedStorage:
    """The memory of a plan on one device, and its views.

    Args:
        config: the KV cache of the plan.
        layout: for every layer the parts of its page, in order; None takes them from the specs (``parts_of``).
        device: device of the arena.
        order: the order of tokens and heads within a block, for every part that has heads.
        arena: uint8[config.arena_bytes] to use; None allocates it.

    Attributes:
        parts: for every layer the parts of its page.
        arena: uint8[config.arena_bytes], zeros at first.
        views: for every layer a tensor for each part, of the shapes above, without copies. Blocks are numbered by the
            ids of the layer's group, from the null block or null slab on.

    Raises:
        ConfigError: a layer has no tensor or no parts, its parts do not have the bytes that the plan gives a page, an
            offset or stride cuts an element, the order is unknown, the arena has another size, or the device has too
            little memory.
        UnsupportedModelError: a spec needs a page of another form.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        layout: Mapping[str, Sequence[PagePart]] | None = None,
        device: torch.device | str = "cpu",
        *,
        order: PageOrder = PageOrder.NHD,
        arena: torch.Tensor | None = None,
    ) -> None:
        if order not in tuple(PageOrder):
            raise ConfigError(f"unknown order {order!r} of a page: use one of {', '.join(PageOrder)}")
        require_supported((group.spec for group in config.groups), "the worker's paged storage", _SUPPORTED)
        self.config, self.order = config, PageOrder(order)
        tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
        parts: dict[str, Sequence[PagePart]] = {}
        for group in config.groups:
            for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
                if name not in tensors or (layout is not None and name not in layout):
                    where = "tensor in the plan" if name not in tensors else "page parts"
                    raise ConfigError(f"layer {name!r} has no {where}: make the plan from this very model")
                parts[name] = parts_of(spec) if layout is None else layout[name]
                _check_page(name, parts[name], spec)
        self.parts = parts
        if arena is not None and (arena.dtype != torch.uint8 or arena.shape != (config.arena_bytes,)):
            raise ConfigError(
                f"an arena is {arena.dtype} of {tuple(arena.shape)}: give uint8[{config.arena_bytes}], as planned"
            )
        try:
            self.arena = torch.zeros(config.arena_bytes, dtype=torch.uint8, device=device) if arena is None else arena
        except RuntimeError as error:
            raise ConfigError(
                f"cannot allocate {format_bytes(config.arena_bytes)} on {device}: plan less memory ({error})"
            ) from error
        self.views: dict[str, tuple[torch.Tensor, ...]] = {
            name: self._views(name, tensors[name], parts[name], number, _rows_of(spec))
            for number, group in enumerate(config.groups)
            for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
        }

    def _views(
        self, name: str, tensor: KVCacheTensor, parts: Sequence[PagePart], group: int, rows: int | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the views of a layer's parts. rows: of a block, ``None`` for a block that is one state."""
        views = []
        start = tensor.offset_bytes
        pieces = self.config.kernel_blocks_of(group)
        blocks, stride_bytes = self.config.blocks_of(group) * pieces, tensor.block_stride_bytes // pieces
        for part in parts:
            size = part.dtype.itemsize
            if start % size or stride_bytes % size:
                raise ConfigError(
                    f"layer {name!r} starts at byte {start}, {stride_bytes} bytes from block to block: "
                    f"both must be multiples of the {size} bytes of {part.dtype}"
                )
            inner = part.shape if rows is None else (rows // pieces, *part.shape)
            if self.order is PageOrder.HND and len(inner) == 3 and rows is not None:
                inner = (inner[1], inner[0], inner[2])
            strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
            whole = self.arena[: self.arena.numel() // size * size].view(part.dtype)
            views.append(whole.as_strided((blocks, *inner), (stride_bytes // size, *strides), start // size))
            start += math.prod(inner) * size
        return tuple(views)


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = _FP8[name] if name in _FP8 else getattr(torch, name)
    return dtype


def _rows_of(spec: KVCacheSpec) -> int | None:
    """Return the tokens, or the compressed states, of a block; ``None`` for a block that is one recurrent state."""
    return spec.num_states if isinstance(spec, AttentionSpec) else None


def _check_page(name: str, parts: Sequence[PagePart], spec: KVCacheSpec) -> None:
    """Raise ConfigError unless ``parts`` have exactly the bytes that ``spec`` has planned for."""
    rows = _rows_of(spec)
    held = (1 if rows is None else rows) * sum(part.token_bytes for part in parts)
    if held != spec.content_bytes:
        shapes = " + ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in parts)
        many = "a state" if rows is None else f"{rows} {'tokens' if rows == spec.block_size else 'compressed states'}"
        raise ConfigError(
            f"layer {name!r}: the plan gives a page {spec.content_bytes} bytes, the model keeps {held} "
            f"({many} of {shapes}): make the plan from this very model, with its dtype"
        )


@dataclass(frozen=True, slots=True, eq=False)
class KVPages:
    """Views of a layer's pages, tokens before heads in either order of memory.

    Attributes:
        keys: [blocks, block_size, kv heads, width].
        values: [blocks, block_size, kv heads, value width]. The values of a latent are the first columns of its keys.
        key_scale: stored float8 keys times this factor are the keys; 1 for no scale.
        value_scale: the same for values.

    Raises:
        ConfigError: shapes do not match, or a scale is not positive.
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
                raise ConfigError(f"{name} must be a positive number, got {getattr(self, name)}: give 1 for no scale")

    @classmethod
    def of_views(cls, views: tuple[torch.Tensor, ...], order: PageOrder = PageOrder.NHD) -> KVPages:
        """Make the pages of a layer with keys and values.

        Args:
            views: the layer's two views in a PagedStorage.
            order: the order of that storage.

        Raises:
            ConfigError: the views are not keys and values.
        """
        if len(views) != 2 or any(view.dim() != 4 for view in views):
            raise ConfigError(
                f"{len(views)} views of shapes {[tuple(view.shape) for view in views]} are not keys and values: give "
                "two views of 4 dimensions"
            )
        keys, values = views
        if order is PageOrder.HND:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return cls(keys, values)

    @classmethod
    def of_latent(cls, view: torch.Tensor, kv_lora_rank: int) -> KVPages:
        """Make the pages of absorbed multi-head latent attention: one KV head, with its values inside its keys.

        Args:
            view: [blocks, block_size, kv_lora_rank + rotary width].
            kv_lora_rank: columns of the latent, which are the values.

        Raises:
            ConfigError: the view does not hold latents of this rank.
        """
        if view.dim() != 3 or not 0 < kv_lora_rank <= view.shape[2]:
            raise ConfigError(
                f"a view of shape {tuple(view.shape)} does not hold latents of rank {kv_lora_rank}: "
                "give [blocks, block_size, kv_lora_rank + rotary width]"
            )
        keys = view[:, :, None]
        return cls(keys, keys[..., :kv_lora_rank])

    @property
    def num_blocks(self) -> int:
        """Number of blocks with the null block; kernel blocks if blocks are split."""
        return self.keys.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block on this rank."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[2]

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a key and of a value in one head."""
        return self.keys.shape[3], self.values.shape[3]

    def put(self, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values of tokens, in the dtype of the pages, without checks or scales. O(tokens).

        Args:
            blocks: int64[n].
            offsets: int64[n], their places in the blocks.
            keys: [n, kv heads, width].
            values: [n, kv heads, value width].
        """
        self.keys.index_put_((blocks, offsets), keys)
        if self.values is not self.keys:
            self.values.index_put_((blocks, offsets), values)

    def take(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of blocks, [n, block_size, kv heads, width] each, in ``dtype``. O(tokens).

        Args:
            blocks: int64[n].
            dtype: a float dtype.
        """
        keys = _scaled(self.keys.index_select(0, blocks).to(dtype), self.key_scale)
        if self.values is self.keys:
            return keys, keys
        return keys, _scaled(self.values.index_select(0, blocks).to(dtype), self.value_scale)


def _scaled(states: torch.Tensor, scale: float) -> torch.Tensor:
    return states if scale == 1 else states * scale


_ROUNDED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that pages of float8 take and round."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteSlots:
    """The places in one group's pages to which a step's tokens are written.

    Attributes:
        num_tokens: tokens of the step, with tokens that are not written.
        num_blocks: blocks of the pages.
        block_size: tokens of a block.
        tokens: int64[n], the tokens that are written.
        blocks: int64[n], their blocks.
        offsets: int64[n], their offsets in the blocks.
    """

    num_tokens: int
    num_blocks: int
    block_size: int
    tokens: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor


def write_slots(slots: torch.Tensor, num_blocks: int, block_size: int) -> WriteSlots:
    """Check and split the slots of a step. O(tokens log tokens); waits for the device of the slots.

    Args:
        slots: int64[tokens]; -1 for a token that is not written.
        num_blocks: blocks of the pages.
        block_size: tokens of a block.

    Raises:
        WorkerError: a slot is out of range, or two tokens have one slot.
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
                f"token that is not written; got {first} .. {last}"
            )
        twice = torch.nonzero(ordered[1:] == ordered[:-1]).flatten()
        if len(twice):
            raise WorkerError(
                f"two tokens go to slot {int(ordered[twice[0]])}: give each token a slot of its own, in a block that "
                "one request alone writes"
            )
    blocks = torch.div(held, block_size, rounding_mode="floor")
    return WriteSlots(len(slots), num_blocks, block_size, tokens, blocks, held % block_size)


def write_kv(slots: WriteSlots, pages: KVPages, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write the keys and values of a step's tokens into their slots. O(tokens).

    Pages of float8_e4m3fn also take another float dtype. These values are divided by the pages' scales and rounded to
    nearest, ties to even; values too large become the largest, 448.

    Args:
        slots: where the tokens go, made for pages of this group.
        pages: the layer's pages.
        keys: [tokens, kv heads, width], in the dtype of the pages.
        values: [tokens, kv heads, value width], in the dtype of the pages.

    Raises:
        WorkerError: shapes, dtypes or pages do not match. Nothing has been written then.
    """
    _write(slots, _parts(slots.num_tokens, pages, keys, values))


def write_latent(
    slots: WriteSlots, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, *, scale: float = 1.0
) -> None:
    """Write the latents of a step's tokens, followed by their rotary parts, into their slots. O(tokens).

    Args:
        slots: where the tokens go, made for pages of this group.
        pages: [blocks, block_size, kv_lora_rank + rotary width].
        latent: [tokens, kv_lora_rank], dtypes as in ``write_kv``.
        rotary: [tokens, rotary width].
        scale: stored float8 values times this factor are the values; 1 for no scale.

    Raises:
        WorkerError: as ``write_kv``.
    """
    _write(slots, _latent_parts(slots.num_tokens, pages, latent, rotary, scale))


def write_states(slots: WriteSlots, pages: torch.Tensor, states: torch.Tensor, *, scale: float = 1.0) -> None:
    """Write rows of one part into their slots: compressed states, keys of an indexer, packed bytes, or a ring's keys.

    O(rows).

    Args:
        slots: where the rows go, made for pages of this group.
        pages: [blocks, block_size, width] or [blocks, block_size, heads, width]; block_size counts rows.
        states: [slots.num_tokens, width] or [slots.num_tokens, heads, width], dtypes as in ``write_kv``.
        scale: stored float8 values times this factor are the values; 1 for no scale.

    Raises:
        WorkerError: as ``write_kv``.
    """
    _write(slots, _state_parts(slots.num_tokens, pages, states, scale))


def triton_write_kv(slots: torch.Tensor, pages: KVPages, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write exactly the bits that ``write_kv`` writes, in one Triton launch, which a CUDA graph may capture.

    Slots are not checked: a token with a slot that does not exist is not written, and two tokens must not share a slot
    (``write_slots`` checks both).

    Args:
        slots: int64[tokens], contiguous, on the device of the pages, like BlockTable.slot_mapping.
        pages: the layer's pages.
        keys: [tokens, kv heads, width], as in ``write_kv``.
        values: [tokens, kv heads, value width], as in ``write_kv``.

    Raises:
        WorkerError: as ``write_kv``.
        ConfigError: Triton is not installed.
    """
    _check_slots(slots)
    _launch(slots, _parts(len(slots), pages, keys, values))


def triton_write_latent(
    slots: torch.Tensor, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, *, scale: float = 1.0
) -> None:
    """Write the bits that ``write_latent`` writes, as ``triton_write_kv`` does.

    Args:
        slots: int64[tokens], as in ``triton_write_kv``.
        pages: [blocks, block_size, kv_lora_rank + rotary width].
        latent: [tokens, kv_lora_rank].
        rotary: [tokens, rotary width].
        scale: as in ``write_latent``.
    """
    _check_slots(slots)
    _launch(slots, _latent_parts(len(slots), pages, latent, rotary, scale))


def triton_write_states(slots: torch.Tensor, pages: torch.Tensor, states: torch.Tensor, *, scale: float = 1.0) -> None:
    """Write the bits that ``write_states`` writes, as ``triton_write_kv`` does.

    Args:
        slots: int64[rows], as in ``triton_write_kv``.
        pages: as in ``write_states``.
        states: as in ``write_states``.
        scale: as in ``write_states``.
    """
    _check_slots(slots)
    _launch(slots, _state_parts(len(slots), pages, states, scale))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Values to write into a view [blocks, block_size, heads, width], multiplied by ``factor`` if they are rounded."""

    view: torch.Tensor
    states: torch.Tensor
    factor: float

    @property
    def rounded(self) -> bool:
        """Whether the view has another dtype, float8."""
        return self.view.dtype != self.states.dtype

    def stored(self) -> torch.Tensor:
        """Return the values in the dtype of the view."""
        if not self.rounded:
            return self.states
        largest = torch.finfo(self.view.dtype).max
        return (self.states.float() * self.factor).clamp(-largest, largest).to(self.view.dtype)


def _parts(
    num_tokens: int, pages: KVPages, keys: torch.Tensor, values: torch.Tensor, names: Sequence[str] = ("keys", "values")
) -> tuple[_Part, _Part]:
    """Return the parts of keys and of values, checked."""
    return (
        _part(num_tokens, pages.keys, keys, names[0], pages.key_scale),
        _part(num_tokens, pages.values, values, names[1], pages.value_scale),
    )


def _latent_parts(
    num_tokens: int, pages: torch.Tensor, latent: torch.Tensor, rotary: torch.Tensor, scale: float
) -> tuple[_Part, _Part]:
    """Return the parts of latents and of rotary values, checked."""
    fit = latent.dim() == rotary.dim() == 2 and pages.dim() == 3
    if not fit or latent.shape[1] + rotary.shape[1] != pages.shape[2]:
        raise WorkerError(
            f"latents of shape {tuple(latent.shape)} and rotary parts of shape {tuple(rotary.shape)} do not fill "
            f"pages of shape {tuple(pages.shape)}: give [tokens, width] of both"
        )
    _check_scale(scale)
    width = latent.shape[1]
    views = KVPages(pages[:, :, None, :width], pages[:, :, None, width:], scale, scale)
    return _parts(num_tokens, views, latent[:, None], rotary[:, None], ("latents", "rotary parts"))


def _state_parts(num_rows: int, pages: torch.Tensor, states: torch.Tensor, scale: float) -> tuple[_Part, _Part]:
    """Return the rows as a part, checked, and a part without columns."""
    if pages.dim() not in {3, 4} or states.dim() != pages.dim() - 1:
        raise WorkerError(
            f"states of shape {tuple(states.shape)} do not fit pages of shape {tuple(pages.shape)}: give "
            "[rows, width] or [rows, heads, width] for [blocks, rows of a block, (heads,) width]"
        )
    _check_scale(scale)
    if pages.dim() == 3:
        pages, states = pages[:, :, None], states[:, None]
    views = KVPages(pages, pages[..., :0], scale, scale)
    return _parts(num_rows, views, states, states[..., :0], ("states", "no values"))


def _check_scale(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise WorkerError(f"the scale of latents must be a positive number, got {scale}: give 1 for no scale")


def _part(num_tokens: int, view: torch.Tensor, states: torch.Tensor, name: str, scale: float) -> _Part:
    wanted = (num_tokens, *view.shape[2:])
    fits = states.dtype == view.dtype or (view.dtype == torch.float8_e4m3fn and states.dtype in _ROUNDED)
    if states.shape != wanted or not fits:
        raise WorkerError(
            f"{name} have shape {tuple(states.shape)} and {states.dtype}: give {wanted} in {view.dtype}, like the pages"
        )
    # in float32 precision, so that torch and Triton multiply by the same factor
    return _Part(view, states, float(np.float32(1 / scale)))


def _write(slots: WriteSlots, parts: tuple[_Part, _Part]) -> None:
    made_for = (slots.num_blocks, slots.block_size)
    for part in parts:
        if part.view.shape[:2] != made_for:
            raise WorkerError(
                f"slots made for {made_for} (blocks, tokens of a block) do not fit pages of "
                f"{tuple(part.view.shape[:2])}: use the slots of this layer's group"
            )
    for part in parts:
        view, states = as_bytes(part.view), as_bytes(part.stored())
        view[slots.blocks, slots.offsets] = states[slots.tokens]


def _launch(slots: torch.Tensor, parts: tuple[_Part, _Part]) -> None:
    kernels = load_kernels("write_kv")
    if parts[0].rounded != parts[1].rounded:
        raise WorkerError(
            f"the two states have dtypes {parts[0].states.dtype} and {parts[1].states.dtype}: give both in one dtype"
        )
    if len(slots):
        keys, values = ((as_bytes(part.view), as_bytes(part.states), part.factor) for part in parts)
        kernels.launch_write(slots, keys, values, fp8=parts[0].rounded)


def load_kernels(instead: str) -> ModuleType:
    """Import the Triton kernels. Without Triton, raise a ConfigError that names the function to use ``instead``."""
    try:
        return import_module("hybridkv.worker.kernels")
    except ImportError as error:
        raise ConfigError(f"Triton is not installed: pip install 'hybridkv[gpu]', or use {instead}") from error


def _check_slots(slots: torch.Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise WorkerError(f"slots must be contiguous int64[tokens], got {slots.dtype} of shape {tuple(slots.shape)}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View 1-byte elements as uint8: not every device of torch or Triton indexes, loads or concatenates float8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
