"""What the modules of a model must know of the Step that runs: one value, in all of them, changed before a forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from hybridkv.errors import WorkerError

if TYPE_CHECKING:
    from hybridkv.runner.attention_gather import CrossRead, GatherBatch
    from hybridkv.runner.state_batch import StateBatch

CONTEXT: Final = "hybridkv_context"
"""The attribute under which the modules of a model that runs on pages have their StepContext."""


@dataclass(slots=True, eq=False)
class StepContext:
    """attention: a GatherBatch for every layer index that caches tokens. layer: whose keys were written last.

    states: a StateBatch for every group of states; none while no Step runs.
    cross: what the cross attention of every layer index reads; crossing: which layer's is about to attend.
    positions: int64[tokens] of the Step's tokens, None while none runs.
    """

    attention: Mapping[int, GatherBatch] = field(default_factory=dict)
    states: Mapping[int, StateBatch] = field(default_factory=dict)
    cross: Mapping[int, CrossRead] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    layer: int | None = None
    crossing: int | None = None

    def begin(
        self,
        attention: Mapping[int, GatherBatch],
        states: Mapping[int, StateBatch],
        cross: Mapping[int, CrossRead] | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """A forward begins."""
        self.attention, self.states, self.cross, self.positions = attention, states, cross or {}, positions
        self.layer = self.crossing = None

    def end(self) -> None:
        """It is over: nothing of it is kept alive."""
        self.begin({}, {})

    def take_cross(self) -> CrossRead | None:
        """What is read by the cross attention that asked for its keys last; None where self attention runs."""
        layer, self.crossing = self.crossing, None
        return None if layer is None else self.cross[layer]

    def attention_batch(self) -> GatherBatch:
        """Of the layer whose keys were written last. WorkerError before any."""
        if self.layer is None:
            raise WorkerError("attention without keys of its own layer: not supported")
        return self.attention[self.layer]


def attach(model: torch.nn.Module, context: StepContext) -> None:
    """Every module of ``model`` knows ``context``."""
    for module in model.modules():
        setattr(module, CONTEXT, context)


def detach(model: torch.nn.Module) -> None:
    """No module of ``model`` does any longer."""
    for module in model.modules():
        module.__dict__.pop(CONTEXT, None)
