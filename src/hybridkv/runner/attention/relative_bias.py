"""Relative position biases (T5) over a flattened step.

A T5 decoder adds to the scores a bias by the distance of key and query. Its first layer computes it for one sequence of
keys, behind whatever stands for the number of tokens seen, and hands it on to the others. Here that layer's
``compute_bias`` is stood in for by one that gives a bias for each segment of the step; the values are the module's own.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridkv.errors import WorkerError
from hybridkv.runner.attention.gather_batch import GatherBatch, Segment
from hybridkv.runner.step_context import StepContext


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
