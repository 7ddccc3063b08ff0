"""The transformers Cache of one step: writes keys and values into pages, hands back gathered contexts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers.cache_utils import Cache

from hybridkv.runner.attention.gather_batch import GatherBatch, gathered
from hybridkv.runner.attention.paged import PagedStep
from hybridkv.runner.step_context import StepContext


class StepCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Scatters a flattened step into the arena and gathers what its rows attend to.

    views: for every layer index its keys and values, [num_blocks, block_size, heads, width] each.
    context: has the GatherBatch of every layer. Recurrent mixers do not see this cache: they have one of their own.
    positions: int64[tokens], of the step's tokens, each in its own request.
    """

    def __init__(
        self, views: Mapping[int, tuple[torch.Tensor, ...]], context: StepContext, positions: torch.Tensor
    ) -> None:
        super().__init__(layers=[])
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
        return _through(keys, key_states, batch), _through(values, value_states, batch)

    def has_previous_state(self, *_args: object, **_kwargs: object) -> bool:
        """False: what is asked for is a mask of padding, and there is none."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor | int:
        """What makes positions of places in the step: int64[tokens], position less place, other in every row.

        Models are handed positions, but Llama 4 makes them anew as ``arange(tokens)`` plus this, to scale the queries
        of layers without rotary positions. Who takes it for one length of several tokens gets torch's error.
        """
        del layer_idx
        return self._offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As long as the query: the backend makes its own masks."""
        del layer_idx
        return query_length, 0


def _through(pages: torch.Tensor, states: torch.Tensor, batch: GatherBatch) -> torch.Tensor:
    """Write the step's tokens into ``pages``, then gather the contexts."""
    pages.index_put_((batch.write_block, batch.write_offset), states[0].transpose(0, 1))
    return gathered(pages, batch)
