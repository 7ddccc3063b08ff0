"""Cross attention over pages: encoders run for what is not there, decoders read their output through block tables.

    rows that encode     encoder -> output [1, n, width] -> the decoder's own projections -> pages, block by block
    all rows of a step   pages -> gathered outputs -> attention, each row over all n tokens of its own

Keys and values come from a forward of the decoder over one token, whose cache takes what cross attention hands over:
the projections stay the model's code. Every distinct input of a step is encoded once and alone, so that equal inputs
give equal bytes whatever runs beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hybridkv.errors import WorkerError
from hybridkv.runner.attention.gather import CrossRead, cross_batch
from hybridkv.runner.encoder_decoder import decode, encode
from hybridkv.runner.encoder_inputs import EncoderInputs
from hybridkv.runner.probe import ProbeCache, attention_implementation
from hybridkv.runner.row_blocks import require_blocks
from hybridkv.runner.step_context import EmptyCache, StepContext
from hybridkv.step import EncoderRead, NewRow, Step
from hybridkv.worker import MultiGroupBlockTable

Int64 = NDArray[np.int64]
Pages = tuple[torch.Tensor, ...]
"""Keys and values of one layer, [blocks, block_size, heads, width] each."""


@dataclass(frozen=True, slots=True, eq=False)
class CrossLayer:
    """The cross attention of decoder layer ``index``: its group and pages."""

    index: int
    group: int
    pages: Pages


class CrossAttention:
    """The encoder's side of a runner. layers: one a decoder layer. inputs: what encoders read, by digest.

    tables: whose rows say where each row's output lies. context: of the model. encoded: inputs encoded so far.
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
        """What the encoders of ``step`` read stays until ``release_inputs``, whoever ends meanwhile."""
        for new in _encoding(step):
            self.inputs.hold_again(_read_of(step, new).digest)

    def release_inputs(self, step: Step) -> None:
        """``step`` ran, or never will."""
        for new in _encoding(step):
            self.inputs.release(_read_of(step, new).digest)

    # -- before the forward

    def check(self, step: Step) -> None:
        """Raise WorkerError, with nothing changed, for a Step whose encoders cannot run or be read."""
        tokens = self._tokens.copy()
        for new in step.new_rows:
            tokens[new.row] = _read_of(step, new).num_tokens
        for new in _encoding(step):
            if (digest := _read_of(step, new).digest) not in self.inputs:
                raise WorkerError(
                    f"Step {step.id}: row {new.row} encodes input {digest!r}, which is not here: hold it first"
                )
        for group in self._groups:
            require_blocks(step, self._tables[group], group, tokens[step.rows], "encoder tokens")

    def begin(self, step: Step) -> None:
        """``step`` was applied to the tables: encode what its new rows bring."""
        for new in step.new_rows:
            self._tokens[new.row] = _read_of(step, new).num_tokens
        rows: dict[bytes | str, list[NewRow]] = {}
        for new in _encoding(step):
            rows.setdefault(_read_of(step, new).digest, []).append(new)
        if not rows:
            return
        with attention_implementation(self._model, "eager"), torch.inference_mode():
            for digest, mine in rows.items():
                self._encode(step, digest, mine)

    def _encode(self, step: Step, digest: bytes | str, rows: Sequence[NewRow]) -> None:
        """Run the encoder on one input, and write what cross attention makes of its output for each of ``rows``."""
        output = encode(self._model, self.inputs[digest])
        self.encoded += 1
        said = {_read_of(step, new).num_tokens for new in rows}
        if said != {output.shape[1]}:
            raise WorkerError(f"Step {step.id}: input {digest!r} has {output.shape[1]} encoder tokens, not {said}")
        taking = _TakingCache()
        first = torch.zeros(1, dtype=torch.int64, device=output.device)
        decode(self._model, first, first, output, caches=(ProbeCache(), taking))
        for layer in self._layers:
            table = self._tables[layer.group]
            at = np.arange(output.shape[1])
            offset = torch.from_numpy(at % table.block_size).to(output.device)
            for new in rows:
                blocks = table.get_numpy_array()[new.row, at // table.block_size].astype(np.int64)
                block = torch.from_numpy(blocks).to(output.device)
                for pages, state in zip(layer.pages, taking.taken[layer.index], strict=True):
                    pages.index_put_((block, offset), state[0].transpose(0, 1).to(pages.dtype))

    # -- the forward

    def reads(self, step: Step) -> Mapping[int, CrossRead]:
        """What each layer reads in ``step``, by its index."""
        tokens = self._tokens[step.rows]
        batches = {group: cross_batch(step, self._tables[group], tokens, self._model.dtype) for group in self._groups}
        return {layer.index: CrossRead(batches[layer.group], layer.pages) for layer in self._layers}

    def cache(self) -> Cache:
        """For the decoder: keys and values of all layers are there, in pages."""
        return _PagedCache(self._layers, self._context)


def _encoding(step: Step) -> Iterable[NewRow]:
    return [new for new in step.new_rows if new.encoder is not None and new.encoder.encodes]


def _read_of(step: Step, new: NewRow) -> EncoderRead:
    if new.encoder is None:
        raise WorkerError(f"Step {step.id}: row {new.row} begins without an encoder input: this model needs one")
    return new.encoder


class _TakingCache(EmptyCache):
    """Takes what cross attention makes of an encoder's output. taken: keys and values by layer index."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[int, Pages] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> Pages:
        """Keep [1, heads, tokens, width] of keys and values, and hand them back."""
        self.taken[layer_idx] = (key_states, value_states)
        return key_states, value_states


class _PagedCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Cross attention whose keys and values are in pages: who asks for a layer's will attend to them next."""

    def __init__(self, layers: Sequence[CrossLayer], context: StepContext) -> None:
        by_index = {layer.index: layer for layer in layers}
        super().__init__(layers=[_PagedLayer(by_index[index], context) for index in range(len(layers))])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Something is cached, whatever it is: positions are not made of it."""
        del layer_idx
        return 1


class _PagedLayer:
    """The layer of a _PagedCache. Its tensors hold no token: the attention function reads pages itself."""

    def __init__(self, layer: CrossLayer, context: StepContext) -> None:
        self._layer, self._context = layer, context

    @property
    def keys(self) -> torch.Tensor:
        """[1, heads, 0, width]."""
        self._context.crossing = self._layer.index
        return self._empty(self._layer.pages[0])

    @property
    def values(self) -> torch.Tensor:
        """[1, heads, 0, width]."""
        return self._empty(self._layer.pages[1])

    @staticmethod
    def _empty(pages: torch.Tensor) -> torch.Tensor:
        return pages.new_empty((1, pages.shape[2], 0, pages.shape[3]))
