"""The gather backend: contexts are copied out of their pages, and each layer attends to them part by part.

    segments   a row's own context, or its bucket's   [rows, heads, queries, ..]  -> out, lse
    pasts      keys that several rows or tokens see   [1, heads, all their queries, ..] -> out, lse, put together

A layer whose form is known (hybridkv.runner.attention.attention_form) runs in dense_attention: no copy of keys for
heads that share them, no mask for chunks. Any other runs in the eager function of its modelling file, on whole
contexts.

Relative position biases (T5): a decoder adds to the scores a bias by the distance of key and query. Its first layer
computes it for one sequence of keys and hands it on to the others. A SegmentBias takes the place of that layer's
``compute_bias`` and gives a bias for each segment of the step; the values are the module's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridkv.errors import WorkerError
from hybridkv.runner.attention.attention_form import Attended, AttentionForm, dense_attention, eager_function
from hybridkv.runner.attention.gather_batch import GatherBatch, Past, Segment, gathered
from hybridkv.runner.attention.paged import PagedStep
from hybridkv.runner.step_context import CONTEXT, StepContext
from hybridkv.worker import with_sink

NAME: Final = "hybridkv_gather"
"""The attention function's name in transformers' AttentionInterface."""


@dataclass(frozen=True, slots=True, eq=False)
class CrossRead:
    """What the cross attention of one layer reads in a step.

    pages: its keys and values, [blocks, block_size, heads, width] each.
    """

    batch: GatherBatch
    pages: tuple[torch.Tensor, ...]

    def contexts(self) -> tuple[torch.Tensor, ...]:
        """[1, heads, gathered tokens, width] of each."""
        return tuple(gathered(pages, self.batch) for pages in self.pages)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,  # noqa: ANN401  # whatever the model hands to its attention goes on to its eager function
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over a flattened step: the signature of transformers' attention functions.

    query: [1, heads, tokens, width]. key, value: [1, kv heads, gathered tokens, width], as StepCache.update
    gave them or as the model expanded them; of cross attention nothing, its pages are gathered here.
    Returns [1, tokens, heads, value width]. The GatherBatch is that of the layer that was updated last (shared modules
    do not know which layer they stand in), or that asked for its encoder's keys.
    position_bias: of T5, one for each segment (SegmentBias); of its cross attention zeros.
    Raises WorkerError outside of a runner.
    """
    del attention_mask  # transformers makes none for a name it does not know; masks are those of the parts
    context: StepContext | None = getattr(module, CONTEXT, None)
    if context is None:
        raise WorkerError(f"{type(module).__name__} runs outside of a ModelRunner: give it its own attention back")
    states = Attended(query, key, value)
    if context.noting is not None:
        return context.noting(module, states, kwargs), None
    read = context.take_cross()
    if read is not None:
        kwargs.pop("position_bias", None)
        return _eager(module, Attended(query, *read.contexts()), read.batch, kwargs), None
    batch, form = context.attention_batch(), context.forms.get(module)
    if isinstance(batch, PagedStep):
        return batch.read(context.updated_layer, query, context.forms[module]), None
    if form is None:
        return _eager(module, states, batch, kwargs), None
    return _by_parts(states, batch, form), None


def _eager(module: torch.nn.Module, states: Attended, batch: GatherBatch, kwargs: dict[str, Any]) -> torch.Tensor:
    """By the function of the module's own, segment by segment: [1, tokens, heads, width]."""
    eager = eager_function(module)
    biases = kwargs.pop("position_bias", None)
    parts: list[torch.Tensor] = []
    for place, segment in enumerate(batch.segments):
        if biases is not None:
            kwargs["position_bias"] = biases[place]
        output, _ = eager(module, *_of_segment(states, segment), segment.mask, **kwargs)
        parts.append(output.reshape(segment.rows * segment.queries, *output.shape[2:]))
    return _in_order(parts, batch.segments)[None]


def _by_parts(states: Attended, batch: GatherBatch, form: AttentionForm) -> torch.Tensor:
    """By dense_attention: [1, tokens, heads, width]."""
    outs, sums = list[torch.Tensor](), list[torch.Tensor]()
    for segment in batch.segments:
        mine = _of_segment(states, segment)
        out, lse = dense_attention(mine, form.scale, mask=segment.mask, causal=segment.causal, softcap=form.softcap)
        outs.append(out.transpose(1, 2).flatten(0, 1))
        sums.append(lse.transpose(1, 2).flatten(0, 1))
    out, lse = _in_order(outs, batch.segments), _in_order(sums, batch.segments)
    for past in batch.pasts:
        mine = _of_past(states, past)
        seen, more = (one[0].transpose(0, 1) for one in dense_attention(mine, form.scale, softcap=form.softcap))
        before = lse[past.tokens]
        total = torch.logaddexp(before, more)
        weighted = out[past.tokens] * torch.exp(before - total)[..., None] + seen * torch.exp(more - total)[..., None]
        out[past.tokens], lse[past.tokens] = weighted.to(out.dtype), total
    if form.sinks is not None:
        out = with_sink(out, lse, form.sinks)[0]
    return out.to(states.query.dtype)[None]


def _of_segment(states: Attended, segment: Segment) -> Attended:
    """Its queries, and its rows' own contexts."""
    mine = states.query[0, :, segment.tokens]
    query = mine.reshape(mine.shape[0], segment.rows, segment.queries, mine.shape[2]).transpose(0, 1)
    return Attended(query, _contexts(states.key, segment), _contexts(states.value, segment))


def _of_past(states: Attended, past: Past) -> Attended:
    """All its queries, in one row, and the keys that they see."""
    keys = slice(past.start, past.start + past.length)
    return Attended(states.query[:, :, past.tokens], states.key[:, :, keys], states.value[:, :, keys])


def _contexts(states: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[1, heads, gathered tokens, width] -> [rows, heads, length, width], a view."""
    mine = states[0, :, segment.start : segment.start + segment.rows * segment.padded]
    heads, width = mine.shape[0], mine.shape[2]
    return mine.view(heads, segment.rows, segment.padded, width).transpose(0, 1)[:, :, : segment.length]


def _in_order(parts: Sequence[torch.Tensor], segments: Sequence[Segment]) -> torch.Tensor:
    """The outputs of all segments in the order of the step's tokens, [tokens, heads, width]."""
    if len(parts) == 1:
        return parts[0]
    out = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
    for part, segment in zip(parts, segments, strict=True):
        out[segment.tokens] = part
    return out


class SegmentBias:
    """Stands in for ``compute_bias`` of ``module``. context: has the segments of the Step that runs, and positions."""

    def __init__(self, module: torch.nn.Module, context: StepContext) -> None:
        self._module, self._context = module, context

    def install(self) -> None:
        """The module's instance calls this instead of its class's method."""
        self._module.__dict__["compute_bias"] = self

    def remove(self) -> None:
        """It calls its own again."""
        self._module.__dict__.pop("compute_bias", None)

    def __call__(self, query_length: int, key_length: int, **known: Any) -> torch.Tensor | list[torch.Tensor]:  # noqa: ANN401  # as the module's own method takes them
        """A bias [rows, heads, queries, length] for each segment; while no Step runs, what the module itself computes.

        O(heads * queries * length) a segment.
        """
        positions = self._context.positions
        if positions is None:
            return self._own(query_length, key_length, **known)
        batch = self._context.attention_batch()
        if not isinstance(batch, GatherBatch):
            raise WorkerError("a layer with biases of its own reads pages, and the kernels have no biases")
        return [self._of(segment, positions) for segment in batch.segments]

    def _of(self, segment: Segment, positions: torch.Tensor) -> torch.Tensor:
        queries, length = positions[segment.tokens].view(segment.rows, segment.queries), segment.length
        if segment.rows == 1:
            return self._own(segment.queries, length, past_seen_tokens=int(queries[0, 0]))
        # biases of the last of ``length`` tokens, by distance, shifted to where each query is
        last = self._own(1, length, past_seen_tokens=length - 1)[0, :, 0]
        keys = torch.arange(length, device=last.device) + (length - 1 - queries)[..., None]
        return last[:, keys.clamp(max=length - 1)].transpose(0, 1)  # keys behind a query are masked

    def _own(self, query_length: int, key_length: int, **known: Any) -> torch.Tensor:  # noqa: ANN401  # as above
        own: Any = type(self._module)
        bias: torch.Tensor = own.compute_bias(self._module, query_length, key_length, **known)
        return bias


def segment_biases(decoder: torch.nn.Module, context: StepContext) -> list[SegmentBias]:
    """One for every module of ``decoder`` that has biases of its own; most models have none."""
    return [
        SegmentBias(module, context)
        for module in decoder.modules()
        if getattr(module, "has_relative_attention_bias", False)
    ]


def register() -> None:
    """Make the backend known to transformers under NAME."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, attend)
