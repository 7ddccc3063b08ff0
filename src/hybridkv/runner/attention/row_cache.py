"""The transformers Cache of one row of a step: as long as its request, and as transformers' own says it.

tokens      0 .. first seen | .. computed | scheduled
keys, values                [ gathered from pages     ]     kv_offset: where they begin; kv_length: how many
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridkv.runner.attention.attention_window import AttentionWindow
from hybridkv.runner.attention.gather_batch import GatherBatch
from hybridkv.runner.attention.step_cache import StepCache
from hybridkv.runner.step_context import StepContext


class RowCache(StepCache):
    """Writes the row's tokens, hands back what it attends to in order. The model makes its own masks and positions.

    views, context: as StepCache has them, of a step of one row. reaches: of every layer index that attends.
    positions: int64[tokens] of the row's tokens, consecutive.
    """

    def __init__(
        self,
        views: Mapping[int, tuple[torch.Tensor, ...]],
        context: StepContext,
        positions: torch.Tensor,
        reaches: Mapping[int, AttentionWindow],
    ) -> None:
        super().__init__(views, context, positions)
        self._computed, self._tokens, self._reaches = int(positions[0]), len(positions), reaches

    @property
    def is_sliding(self) -> list[bool | None]:
        """By layer index, None where nothing attends: by it transformers finds a layer for each of its masks."""
        reaches = (self._reaches.get(index) for index in range(max(self._reaches, default=-1) + 1))
        return [None if reach is None else reach != AttentionWindow() for reach in reaches]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [1, heads, tokens, width]; those from the first one seen on back."""
        keys, values = super().update(key_states, value_states, layer_idx)
        length = self._length(layer_idx)
        return keys[:, :, :length], values[:, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the request before these."""
        del layer_idx
        return self._computed

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys there are, and where they begin."""
        del query_length
        length = self._length(layer_idx)
        return length, self._computed + self._tokens - length

    def _length(self, layer_idx: int) -> int:
        batch = self._context.attention.get(layer_idx)
        return batch.segments[0].length if isinstance(batch, GatherBatch) else self._computed + self._tokens
