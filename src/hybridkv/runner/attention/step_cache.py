"""The transformers Cache of one step: writes keys and values into pages, hands back gathered contexts.

Of a step of one row, RowCache is as long as its request, and as transformers' own says it:

tokens      0 .. first seen | .. computed | scheduled
keys, values                [ gathered from pages     ]     kv_offset: where they begin; kv_length: how many
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridkv.runner.attention.gather import GatherBatch, gathered
from hybridkv.runner.attention.paged import PagedStep
from hybridkv.runner.step_context import EmptyCache, StepContext
from hybridkv.worker import CAUSAL, AttentionMask


class StepCache(EmptyCache):
    """Scatters a flattened step into the arena and gathers what its rows attend to.

    views: for every layer index its keys and values, [num_blocks, block_size, heads, width] each.
    context: has the GatherBatch of every layer. Recurrent mixers do not see this cache: they have one of their own.
    positions: int64[tokens], of the step's tokens, each in its own request.
    """

    def __init__(
        self, views: Mapping[int, tuple[torch.Tensor, ...]], context: StepContext, positions: torch.Tensor
    ) -> None:
        super().__init__()
        self._views = views
        self._context = context
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [1, heads, tokens, width]; the contexts [1, heads, gathered tokens, width] back.

        What a kernel reads from pages comes back as it is.
        """
        keys, values = self._views[layer_idx]
        self._context.layer = layer_idx
        batch = self._context.attention_batch()
        if isinstance(batch, PagedStep):
            batch.write(layer_idx, key_states, value_states)
            return key_states, value_states
        for pages, states in ((keys, key_states), (values, value_states)):
            pages.index_put_((batch.write_block, batch.write_offset), states[0].transpose(0, 1))
        return gathered(keys, batch), gathered(values, batch)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor | int:
        """What makes positions of places in the step: int64[tokens], position less place, other in every row.

        Models are handed positions, but Llama 4 makes them anew as ``arange(tokens)`` plus this, to scale the queries
        of layers without rotary positions. Who takes it for one length of several tokens gets torch's error.
        """
        del layer_idx
        return self._offsets


class RowCache(StepCache):
    """Writes the row's tokens, hands back what it attends to in order. The model makes its own masks and positions.

    views, context: as StepCache has them, of a step of one row. masks: of every layer index that attends.
    positions: int64[tokens] of the row's tokens, consecutive.
    """

    def __init__(
        self,
        views: Mapping[int, tuple[torch.Tensor, ...]],
        context: StepContext,
        positions: torch.Tensor,
        masks: Mapping[int, AttentionMask],
    ) -> None:
        super().__init__(views, context, positions)
        self._computed, self._tokens, self._masks = int(positions[0]), len(positions), masks

    @property
    def is_sliding(self) -> list[bool | None]:
        """By layer index, None where nothing attends: by it transformers finds a layer for each of its masks."""
        masks = (self._masks.get(index) for index in range(max(self._masks, default=-1) + 1))
        return [None if mask is None else mask != CAUSAL for mask in masks]

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
