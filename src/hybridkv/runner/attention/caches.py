"""The transformers Caches of one step, between a model and pages, for self attention and for cross attention.

StepCache writes keys and values into pages, and returns gathered contexts. RowCache does so for a step of one row, and
reports the length of its request as transformers' own caches do:

tokens      0 .. first seen | .. computed | scheduled
keys, values                [ gathered from pages     ]     kv_offset: where they begin; kv_length: how many

Cross attention: encoders run for new inputs, and decoders read their output through block tables.

    rows that encode     encoder -> output [1, n, width] -> the decoder's own projections -> pages, block by block
    all rows of a step   pages -> gathered outputs -> attention, each row over all n tokens of its own

A forward of the decoder over one token makes the keys and values, and its cache records them. So the projections stay
the model's code. Every distinct input of a step is encoded once and alone, so that equal inputs give equal bytes in
every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hybridkv.errors import WorkerError
from hybridkv.runner.attention.formulas import PagedStep
from hybridkv.runner.attention.gather import GatherBatch, PagesRead, cross_batch, gathered, in_order
from hybridkv.runner.inputs import EncoderInputs, require_blocks
from hybridkv.runner.model_call import decode, encode
from hybridkv.runner.probe import ProbeCache, attention_implementation
from hybridkv.runner.step_context import EmptyCache, Place, StepContext
from hybridkv.step import EncoderRead, Step
from hybridkv.worker import CAUSAL, AttentionMask, LayerPages, MultiGroupBlockTable

Int64 = NDArray[np.int64]
Pages = tuple[torch.Tensor, ...]
"""Keys and values of one layer, [blocks, block_size, heads, width] each."""


class StepCache(EmptyCache):
    """Writes the keys and values of a flattened step into pages, and gathers the contexts of its rows.

    Recurrent mixers do not see this cache: they have one of their own.

    Args:
        pages: pages of every layer by index.
        context: has the GatherBatch of every layer.
        positions: positions of the step's tokens in their requests, int64[tokens].
    """

    def __init__(self, pages: Mapping[int, LayerPages], context: StepContext, positions: torch.Tensor) -> None:
        super().__init__()
        self._pages = pages
        self._context = context
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [1, heads, tokens, width], and return the contexts [1, heads, gathered tokens, width].

        Keys that are also the values are one view. The contexts hold what the pages do: quantized keys and values are
        as they were rounded, in every step alike. If a kernel reads the pages, keys and values are returned unchanged.
        """
        self._context.layer = layer_idx
        batch = self._context.attention_batch()
        if isinstance(batch, PagedStep):
            batch.write(layer_idx, key_states, value_states)
            return key_states, value_states
        pages, written = self._pages[layer_idx], [one[0].transpose(0, 1) for one in (key_states, value_states)]
        pages.put(batch.write_block, batch.write_offset, *written)
        keys, values = pages.take(batch.read_blocks, key_states.dtype)
        context = in_order(keys, batch)
        return context, context if values is keys else in_order(values, batch)

    def get_seq_length(self, *_args: object, **_kwargs: object) -> torch.Tensor | int:
        """Return the position of each token minus its index in the step, int64[tokens].

        Models get positions, but Llama 4 computes its own as ``arange(tokens)`` plus this value, to scale the queries
        of layers without rotary positions. A model that uses this value as one length gets torch's error.
        """
        return self._offsets


class RowCache(StepCache):
    """Writes the tokens of one row, and returns its context in order. The model makes its own masks and positions.

    Args:
        pages: as in StepCache.
        context: as in StepCache, for a step of one row.
        positions: consecutive positions of the row's tokens, int64[tokens].
        masks: the mask of every layer that attends, by index.
    """

    def __init__(
        self,
        pages: Mapping[int, LayerPages],
        context: StepContext,
        positions: torch.Tensor,
        masks: Mapping[int, AttentionMask],
    ) -> None:
        super().__init__(pages, context, positions)
        self._computed, self._tokens, self._masks = int(positions[0]), len(positions), masks
        # Qwen4-exp rotates an indexer's raw keys once their group is complete, and keeps the positions in its cache
        self.position_ids = torch.arange(self._computed, device=positions.device).expand(3, 1, -1)

    @property
    def is_sliding(self) -> list[bool | None]:
        """Whether each layer, by index, sees less than all tokens; None if it does not attend.

        Transformers reads it, and the next two, to find a layer for each of its masks.
        """
        return [None if mask is None else mask != CAUSAL for mask in self._by_layer]

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer, by index, does not attend."""
        return [mask is None for mask in self._by_layer]

    @property
    def is_dummy(self) -> list[bool]:
        """Whether each layer keeps nothing: none that has an index here."""
        return [False for _ in self._by_layer]

    @property
    def _by_layer(self) -> list[AttentionMask | None]:
        return [self._masks.get(index) for index in range(max(self._masks, default=-1) + 1)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [1, heads, tokens, width]; return the context from the first token that is seen."""
        keys, values = super().update(key_states, value_states, layer_idx)
        length = self._length(layer_idx)
        return keys[:, :, :length], values[:, :, :length]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write an indexer's keys [1, tokens, width]; return those of the request, [1, context, width]."""
        batch, (pages,) = self._context.indexers[layer_idx]
        pages.index_put_((batch.write_block, batch.write_offset), indexer_key_states[0].unsqueeze(1))
        return gathered(pages, batch)[:, 0, : batch.segments[0].length]

    def take_rows(
        self, place: Place, values: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Write a compressor's rows [1, tokens, width]; return those of whole groups, and the first position."""
        return self._context.compressors[place].take(values, gates)

    def keep_states(self, place: Place, states: torch.Tensor) -> torch.Tensor:
        """Write a compressor's states [1, groups, width], and return all of the request, [1, states, width]."""
        return self._context.compressors[place].keep(states)

    def get_seq_length(self, *_args: object, **_kwargs: object) -> int:
        """Return the number of the request's tokens before the row's."""
        return self._computed

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys, and the position of the first."""
        del query_length
        length = self._length(layer_idx)
        return length, self._computed + self._tokens - length

    def _length(self, layer_idx: int) -> int:
        batch = self._context.attention.get(layer_idx)
        return batch.segments[0].length if isinstance(batch, GatherBatch) else self._computed + self._tokens


# -- cross attention


@dataclass(frozen=True, slots=True, eq=False)
class CrossLayer:
    """The cross attention of decoder layer ``index``: its group and pages."""

    index: int
    group: int
    pages: Pages


class CrossAttention:
    """The encoder's side of a runner.

    Args:
        model: an encoder-decoder.
        layers: the cross attention of each decoder layer.
        tables: the block tables, with the blocks of each row's encoder output.
        context: the StepContext of the model.

    Attributes:
        inputs: encoder inputs by digest.
        encoded: number of inputs encoded so far.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[CrossLayer], tables: MultiGroupBlockTable, context: StepContext
    ) -> None:
        self.inputs = EncoderInputs()
        self.encoded = 0
        self._model, self._layers, self._tables, self._context = model, tuple(layers), tables, context
        self._groups = sorted({layer.group for layer in layers})
        self._tokens: Int64 = np.zeros(tables.max_num_reqs, np.int64)

    # -- inputs of steps in flight

    def hold_inputs(self, step: Step) -> None:
        """Hold the encoder inputs of ``step`` until ``release_inputs``, even if their requests end before."""
        for _, read in _encoding(step):
            self.inputs.hold_again(read.digest)

    def release_inputs(self, step: Step) -> None:
        """Release the encoder inputs of ``step``, which has run or failed."""
        for _, read in _encoding(step):
            self.inputs.release(read.digest)

    # -- before the forward

    def check(self, step: Step) -> None:
        """Raise WorkerError, with nothing changed, for a Step whose encoders cannot run or be read."""
        tokens = self._with_new_rows(step)
        for row, read in _encoding(step):
            if read.digest not in self.inputs:
                raise WorkerError(
                    f"Step {step.id}: row {row} encodes input {read.digest!r}, which this runner does not have: hold "
                    "it first"
                )
        for group in self._groups:
            require_blocks(step, self._tables[group], group, tokens[step.rows], "encoder tokens")

    def begin(self, step: Step) -> None:
        """Encode the inputs of the new rows of ``step``, which has been applied to the tables."""
        self._tokens = self._with_new_rows(step)
        rows: dict[bytes | str, dict[int, int]] = {}
        for row, read in _encoding(step):
            rows.setdefault(read.digest, {})[row] = read.num_tokens
        if not rows:
            return
        with attention_implementation(self._model, "eager"), torch.inference_mode():
            for digest, mine in rows.items():
                self._encode(step, digest, mine)

    def _with_new_rows(self, step: Step) -> Int64:
        """Return the encoder tokens of each row after ``step`` is applied, int64[rows].

        Raises WorkerError for a new row without an encoder input.
        """
        tokens = self._tokens.copy()
        for new in step.new_rows:
            if new.encoder is None:
                raise WorkerError(
                    f"Step {step.id}: row {new.row} begins without an encoder input: give one, this model needs it"
                )
            tokens[new.row] = new.encoder.num_tokens
        return tokens

    def _encode(self, step: Step, digest: bytes | str, rows: Mapping[int, int]) -> None:
        """Run the encoder on one input, and write the keys and values of cross attention for each of ``rows``.

        rows: the number of encoder tokens that each row expects.
        """
        output = encode(self._model, self.inputs[digest])
        self.encoded += 1
        if set(rows.values()) != {output.shape[1]}:
            expected = " and ".join(map(str, sorted(set(rows.values()))))
            raise WorkerError(
                f"Step {step.id}: input {digest!r} has {output.shape[1]} encoder tokens, but its rows expect "
                f"{expected}: give its number of tokens"
            )
        taking = ProbeCache()
        first = torch.zeros(1, dtype=torch.int64, device=output.device)
        decode(self._model, first, first, output, caches=(ProbeCache(), taking))
        for layer in self._layers:
            table, at = self._tables[layer.group], np.arange(output.shape[1])
            offset = torch.from_numpy(at % table.block_size).to(output.device)
            for row in rows:
                blocks = table.get_numpy_array()[row, at // table.block_size].astype(np.int64)
                block = torch.from_numpy(blocks).to(output.device)
                for pages, state in zip(layer.pages, taking.taken[layer.index], strict=True):
                    pages.index_put_((block, offset), state[0].transpose(0, 1).to(pages.dtype))

    # -- the forward

    def reads(self, step: Step) -> Mapping[int, PagesRead]:
        """Return the reads of each layer in ``step``, by its index."""
        tokens = self._tokens[step.rows]
        batches = {group: cross_batch(step, self._tables[group], tokens, self._model.dtype) for group in self._groups}
        return {layer.index: (batches[layer.group], layer.pages) for layer in self._layers}

    def cache(self) -> Cache:
        """Return the decoder's cache of cross attention, which has the keys and values of all layers in pages."""
        return _PagedCache(self._layers, self._context)


def _encoding(step: Step) -> list[tuple[int, EncoderRead]]:
    """Return the new rows of ``step`` that encode their input, with that input."""
    return [(new.row, new.encoder) for new in step.new_rows if new.encoder is not None and new.encoder.encodes]


class _PagedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Reports the keys and values of cross attention as cached; they are in pages.

    A module that asks for the keys of a layer attends to them next.
    """

    def __init__(self, layers: Sequence[CrossLayer], context: StepContext) -> None:
        by_index = {layer.index: layer for layer in layers}
        super().__init__(layers=[_PagedLayer(by_index[index], context) for index in range(len(layers))])

    def get_seq_length(self, *_args: object, **_kwargs: object) -> int:
        """Return 1: something is cached. No model computes positions from this length."""
        return 1


class _PagedLayer:
    """The layer of a _PagedCache. Its tensors have no token, because the attention function reads pages itself.

    Each is [1, heads, 0, width].
    """

    def __init__(self, layer: CrossLayer, context: StepContext) -> None:
        self._layer, self._context = layer, context
        self._empty = [pages.new_empty((1, pages.shape[2], 0, pages.shape[3])) for pages in layer.pages]

    @property
    def keys(self) -> torch.Tensor:
        """No keys; reading them marks this layer as the one with cross attention next."""
        self._context.crossing = self._layer.index
        return self._empty[0]

    @property
    def values(self) -> torch.Tensor:
        """No values."""
        return self._empty[1]
