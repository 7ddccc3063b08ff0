"""Pages of codes with scales: writes that quantize, and reads that return keys and values.

    page    [ scales of keys ][ scales of values ][ codes of keys ][ codes of values ][ padding ]
    latent  [ scale of the latent, scale of its rotary part ][ codes of both ][ padding ]

A token's codes and scales depend on its own keys and values alone. So a page holds the same bytes whether its tokens
were written in one step or in several, and copies of blocks carry the scales along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.spec_fields import Quantization
from hybridkv.specs import KVCacheSpec
from hybridkv.worker.codecs import dequantize, quantize
from hybridkv.worker.pages import KVPages, PageOrder, WriteSlots

_VIEWS: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedPages:
    """Views of a layer's codes and scales, tokens before heads in either order of memory.

    Attributes:
        form: the form of the codes.
        key_scales: [blocks, block_size, kv heads], or [.., width / 16] for NVFP4.
        value_scales: the same for values.
        key_codes: [blocks, block_size, kv heads, bytes].
        value_codes: [blocks, block_size, kv heads, bytes].
    """

    form: Quantization
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    key_codes: torch.Tensor
    value_codes: torch.Tensor

    @classmethod
    def of_views(
        cls, form: Quantization, views: tuple[torch.Tensor, ...], order: PageOrder = PageOrder.NHD
    ) -> QuantizedPages:
        """Make the pages of a layer with quantized keys and values.

        Args:
            form: the layer's quantization.
            views: the layer's four views in a PagedStorage.
            order: the order of that storage.

        Raises:
            ConfigError: the views are not scales and codes of keys and values.
        """
        if len(views) != _VIEWS:
            raise ConfigError(f"{len(views)} views are not scales and codes of keys and values: give the four views")
        # scales of a head are in one order alone, unless a head has several
        turned = [one.transpose(1, 2) if order is PageOrder.HND and one.dim() == 4 else one for one in views]
        return cls(form, *turned)

    @classmethod
    def of_latent(cls, form: Quantization, views: tuple[torch.Tensor, ...], kv_lora_rank: int) -> QuantizedPages:
        """Make pages whose keys are latents of ``kv_lora_rank`` columns, and whose values are their rotary parts.

        Args:
            form: the layer's quantization, which has one scale for a head.
            views: the layer's two views in a PagedStorage.
            kv_lora_rank: columns of the latent.

        Raises:
            ConfigError: the views are not scales and codes of latents of this rank.
        """
        ends = kv_lora_rank * form.code_bits // 8
        if len(views) != 2 or form.scaled or kv_lora_rank % form.multiple or not 0 < ends < views[1].shape[2]:
            raise ConfigError(f"{len(views)} views do not hold latents of rank {kv_lora_rank} as {form}: give the rank")
        scales, codes = views
        return cls(form, scales[:, :, :1], scales[:, :, 1:], codes[:, :, None, :ends], codes[:, :, None, ends:])

    @property
    def num_blocks(self) -> int:
        """Number of blocks with the null block; kernel blocks if blocks are split."""
        return self.key_codes.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block on this rank."""
        return self.key_codes.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_codes.shape[2]

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a key and of a value in one head."""
        key, value = (codes.shape[3] * 8 // self.form.code_bits for codes in (self.key_codes, self.value_codes))
        return key, value

    def put(self, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the codes and scales of tokens. O(tokens).

        Args:
            blocks: int64[n].
            offsets: int64[n], their places in the blocks.
            keys: float[n, kv heads, width].
            values: float[n, kv heads, value width].
        """
        for codes, scales, states in (
            (self.key_codes, self.key_scales, keys),
            (self.value_codes, self.value_scales, values),
        ):
            made = quantize(self.form, states)
            for pages, one in zip((codes, scales), made, strict=True):
                pages.index_put_((blocks, offsets), one)

    def take(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of blocks, [n, block_size, kv heads, width] each, in ``dtype``. O(tokens).

        Args:
            blocks: int64[n].
            dtype: a float dtype.
        """
        keys, values = (
            dequantize(self.form, codes.index_select(0, blocks), scales.index_select(0, blocks), dtype)
            for codes, scales in ((self.key_codes, self.key_scales), (self.value_codes, self.value_scales))
        )
        return keys, values


LayerPages = KVPages | QuantizedPages
"""The pages of a layer with keys and values."""


def layer_pages(spec: KVCacheSpec, views: tuple[torch.Tensor, ...], order: PageOrder = PageOrder.NHD) -> LayerPages:
    """Return the pages of a layer with keys and values, quantized if its spec says so.

    Args:
        spec: the spec of the layer.
        views: its views in a PagedStorage; one where the keys are also the values.
        order: the order of that storage.

    Raises:
        ConfigError: the views are not of keys and values.
    """
    form = getattr(spec, "quantization", None)
    if form is None and len(views) == 1:
        return KVPages(views[0], views[0])
    return KVPages.of_views(views, order) if form is None else QuantizedPages.of_views(form, views, order)


def write_quantized(slots: WriteSlots, pages: QuantizedPages, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Quantize the keys and values of a step's tokens, and write codes and scales into their slots. O(tokens).

    Args:
        slots: where the tokens go, made for pages of this group.
        pages: the layer's pages.
        keys: float[tokens, kv heads, width]; for pages of latents, [tokens, 1, kv_lora_rank].
        values: float[tokens, kv heads, value width]; for pages of latents, [tokens, 1, rotary width].

    Raises:
        WorkerError: shapes, dtypes or pages do not match. Nothing has been written then.
    """
    if (slots.num_blocks, slots.block_size) != (pages.num_blocks, pages.block_size):
        raise WorkerError(
            f"the slots were made for {slots.num_blocks} blocks of {slots.block_size} tokens, the pages have "
            f"{pages.num_blocks} of {pages.block_size}: use the slots of this layer's group"
        )
    for name, states, width in zip(("keys", "values"), (keys, values), pages.widths, strict=True):
        wanted = (slots.num_tokens, pages.num_kv_heads, width)
        if tuple(states.shape) != wanted or not states.is_floating_point():
            raise WorkerError(
                f"{name} are {states.dtype} of shape {tuple(states.shape)}: give floats of shape {wanted}"
            )
    pages.put(slots.blocks, slots.offsets, keys[slots.tokens], values[slots.tokens])
