"""What stands between a model and its pages: a StepContext that all modules know, stand-ins for methods, caches.

The StepContext says what the modules must know of the Step that runs: one value, changed before a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from hybridkv.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from hybridkv.runner.attention.formulas import Attended, AttentionForm, PagedStep
    from hybridkv.runner.attention.gather import CrossRead, GatherBatch
    from hybridkv.runner.states.state_batch import StateBatch

Int64 = NDArray[np.int64]
Noting = Callable[[torch.nn.Module, "Attended", Mapping[str, Any]], torch.Tensor]
"""(module, what it attends with, what else it hands to its attention) -> what it attends to."""

CONTEXT: Final = "hybridkv_context"
"""The attribute under which the modules of a model that runs on pages have their StepContext."""


@dataclass(slots=True, eq=False)
class StepContext:
    """attention: how every layer index that caches tokens attends. layer: whose keys were written last.

    states: a StateBatch for every group of states; none while no Step runs.
    cross: what the cross attention of every layer index reads; crossing: which layer's is about to attend.
    positions: int64[tokens] of the Step's tokens, None while none runs.
    forms: of the modules whose attention is known; the others run their own. noting: runs in place of any attention,
    while a runner looks at the model.
    """

    attention: Mapping[int, GatherBatch | PagedStep] = field(default_factory=dict)
    states: Mapping[int, StateBatch] = field(default_factory=dict)
    cross: Mapping[int, CrossRead] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    layer: int | None = None
    crossing: int | None = None
    forms: Mapping[torch.nn.Module, AttentionForm] = field(default_factory=dict)
    noting: Noting | None = None

    def begin(
        self,
        attention: Mapping[int, GatherBatch | PagedStep],
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

    def __reduce__(self) -> NoReturn:
        """A copy of a model that runs on pages would never run again: ConfigError instead."""
        raise ConfigError("an engine holds this model: close the engine before the model is copied or pickled")

    def attention_batch(self) -> GatherBatch | PagedStep:
        """Of the layer whose keys were written last. WorkerError before any, and while no Step runs."""
        return self.attention[self.updated_layer]

    @property
    def updated_layer(self) -> int:
        """The layer whose keys were written last. WorkerError before any, and while no Step runs."""
        if not self.attention:
            raise WorkerError(
                "an engine holds this model, whose attention runs in its steps alone: generate with the engine, or "
                "close it first"
            )
        if self.layer is None:
            raise WorkerError("attention without keys of its own layer: not supported")
        return self.layer


def require_free(model: torch.nn.Module) -> None:
    """Raise ConfigError when some module of ``model`` knows a StepContext: two runners would undo each other's work."""
    if any(CONTEXT in vars(module) for module in model.modules()):
        raise ConfigError(f"another engine holds this {type(model).__name__}: close it first, or load the model again")


def attach(model: torch.nn.Module, context: StepContext) -> None:
    """Every module of ``model`` knows ``context``."""
    for module in model.modules():
        setattr(module, CONTEXT, context)


def detach(model: torch.nn.Module, context: StepContext) -> None:
    """No module of ``model`` knows ``context`` any longer."""
    for module in model.modules():
        if vars(module).get(CONTEXT) is context:
            delattr(module, CONTEXT)


class StandIn:
    """Takes the place of ``method`` of a module's instance, which has none of its own: ``install`` to ``remove``."""

    def __init__(self, module: torch.nn.Module, method: str = "forward") -> None:
        self._module, self._method = module, method

    def install(self) -> None:
        """Let the module call this instead of its class's method."""
        vars(self._module)[self._method] = self

    def remove(self) -> None:
        """Let it call its own again, or what was put in the place of this one meanwhile."""
        if vars(self._module).get(self._method) is self:
            del vars(self._module)[self._method]


class EmptyCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A transformers Cache that says, unless a subclass knows better, that nothing is cached before the call."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def has_previous_state(self, *_args: object, **_kwargs: object) -> bool:
        """Whether there is a state, or padding that masks must hide."""
        return False

    def is_recording_past(self, *_args: object, **_kwargs: object) -> bool:
        """Whether states can be rolled back: they cannot."""
        return False

    def get_seq_length(self, *_args: object, **_kwargs: object) -> torch.Tensor | int:
        """Return how many tokens are cached."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many keys there are, and where they begin: masks are as long as the query."""
        del layer_idx
        return query_length, 0


def on_device(values: Int64, device: torch.device) -> torch.Tensor:
    """Return ``values`` as a tensor on ``device``."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def places_of(tokens: Int64, device: torch.device) -> slice | torch.Tensor:
    """Return where ascending ``tokens`` stand in the step's flattened row: a slice where they are neighbours."""
    contiguous = len(tokens) == tokens[-1] - tokens[0] + 1
    return slice(int(tokens[0]), int(tokens[-1]) + 1) if contiguous else on_device(tokens, device)
