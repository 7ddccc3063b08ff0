"""Keys and values of one layer, as writes and attention see them: [blocks, block_size, heads, width], in any order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybridkv.errors import ConfigError
from hybridkv.worker.pages.storage import PageOrder


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
