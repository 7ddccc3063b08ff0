"""Parts between a model and its pages: a StepContext that all modules have, and replacements of methods and caches.

The StepContext tells modules about the running Step. It changes before each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from hybridkv.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from hybridkv.runner.attention.compressors import CompressorStep
    from hybridkv.runner.attention.formulas import Attended, AttentionForm, PagedStep
    from hybridkv.runner.attention.gather import GatherBatch, PagesRead
    from hybridkv.runner.lora import LoraTokens
    from hybridkv.runner.states.state_batch import StateBatch

Int64 = NDArray[np.int64]
Noting = Callable[[torch.nn.Module, "Attended", Mapping[str, Any]], torch.Tensor]
"""(module, its attention's inputs, further arguments) -> the attention's output."""

Place = tuple[int, str]
"""A compressor: the index of its layer, and its name in transformers' cache layer (``compressor`` or ``indexer``)."""

CONTEXT: Final = "hybridkv_context"
"""The attribute that holds the StepContext in each module of a model that runs on pages."""


@dataclass(slots=True, eq=False)
class StepContext:
    """The running Step, for the modules of the model. It is empty while no Step runs.

    Attributes:
        attention: how each layer attends, by index; only layers that cache tokens.
        states: the StateBatch of every group of states.
        cross: the reads of each layer's cross attention, by index.
        indexers: the reads of each layer's keys of an indexer, by index.
        compressors: the part of each compressor in the Step.
        positions: positions of the Step's tokens, int64[tokens].
        lora: the adapters of the tokens that layers see now; None if no request of the Step has one.
        layer: the layer that wrote keys last.
        crossing: the layer whose cross attention is about to run.
        forms: the form of attention by module; other modules run their own attention.
        noting: replaces all attention while a runner inspects the model.
    """

    attention: Mapping[int, GatherBatch | PagedStep] = field(default_factory=dict)
    states: Mapping[int, StateBatch] = field(default_factory=dict)
    cross: Mapping[int, PagesRead] = field(default_factory=dict)
    indexers: Mapping[int, PagesRead] = field(default_factory=dict)
    compressors: Mapping[Place, CompressorStep] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    lora: LoraTokens | None = None
    layer: int | None = None
    crossing: int | None = None
    forms: Mapping[torch.nn.Module, AttentionForm] = field(default_factory=dict)
    noting: Noting | None = None

    @contextmanager
    def running(
        self,
        attention: Mapping[int, GatherBatch | PagedStep],
        states: Mapping[int, StateBatch],
        cross: Mapping[int, PagesRead] | None,
        positions: torch.Tensor,
        *,
        indexers: Mapping[int, PagesRead] | None = None,
        compressors: Mapping[Place, CompressorStep] | None = None,
        lora: LoraTokens | None = None,
    ) -> Iterator[None]:
        """Hold a Step for one forward, and release it at the end."""
        self.attention, self.states, self.cross, self.positions = attention, states, cross or {}, positions
        self.indexers, self.compressors, self.lora = indexers or {}, compressors or {}, lora
        try:
            yield
        finally:
            self.attention, self.states, self.cross, self.indexers, self.compressors = {}, {}, {}, {}, {}
            self.positions = self.layer = self.crossing = self.lora = None

    @contextmanager
    def seeing(self, places: slice | torch.Tensor) -> Iterator[None]:
        """Let the layers of a mixer see the step's tokens at ``places`` only; one place stands for a whole request."""
        of_step = self.lora
        if of_step is not None:
            self.lora = of_step.at(places)
        try:
            yield
        finally:
            self.lora = of_step

    def take_cross(self) -> PagesRead | None:
        """Return the reads of the cross attention that is about to run; None if self attention runs."""
        layer, self.crossing = self.crossing, None
        return None if layer is None else self.cross[layer]

    def __reduce__(self) -> NoReturn:
        """Raise ConfigError: a copy of a model that runs on pages could never run again."""
        raise ConfigError("an engine holds this model: close the engine before the model is copied or pickled")

    def attention_batch(self) -> GatherBatch | PagedStep:
        """Return how the layer that wrote keys last attends. Raises WorkerError outside of a Step."""
        return self.attention[self.updated_layer]

    @property
    def updated_layer(self) -> int:
        """The layer that wrote keys last. Raises WorkerError before the first one, and while no Step runs."""
        if not self.attention:
            raise WorkerError(
                "an engine holds this model, and its attention runs only in the engine's steps: generate with the "
                "engine, or close it first"
            )
        if self.layer is None:
            raise WorkerError(
                "a layer attends before any layer has cached keys, which is not supported: run this model with plain "
                "transformers"
            )
        return self.layer


def require_free(model: torch.nn.Module) -> None:
    """Raise ConfigError if another runner holds ``model``: each would undo the other's changes."""
    if any(CONTEXT in vars(module) for module in model.modules()):
        raise ConfigError(f"another engine holds this {type(model).__name__}: close it first, or load the model again")


def attach(model: torch.nn.Module, context: StepContext) -> None:
    """Give every module of ``model`` the ``context``."""
    for module in model.modules():
        setattr(module, CONTEXT, context)


def detach(model: torch.nn.Module, context: StepContext) -> None:
    """Remove ``context`` from every module of ``model``."""
    for module in model.modules():
        if vars(module).get(CONTEXT) is context:
            delattr(module, CONTEXT)


class StandIn:
    """Replaces a method of one module, from ``install`` to ``remove``; the module must have no replacement yet."""

    def __init__(self, module: torch.nn.Module, method: str = "forward") -> None:
        self._module, self._method = module, method

    def install(self) -> None:
        """Make the module call this instead of its class's method."""
        vars(self._module)[self._method] = self

    def remove(self) -> None:
        """Restore the class's method, unless something else has replaced this one meanwhile."""
        if vars(self._module).get(self._method) is self:
            del vars(self._module)[self._method]


class EmptyCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A transformers Cache that reports an empty past, unless a subclass says otherwise.

    Attributes:
        poses_as: the cache class of a model's own that ``isinstance`` must find; None for transformers' Cache.
    """

    poses_as: type[Cache] | None = None

    def __init__(self) -> None:
        super().__init__(layers=_Layers(self))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that a model may ask for. What the cache does is this class's own (as in unittest.mock)."""
        return self.poses_as or type(self)

    def has_previous_state(self, *_args: object, **_kwargs: object) -> bool:
        """Return whether there is a state, or padding that masks must hide."""
        return False

    def is_recording_past(self, *_args: object, **_kwargs: object) -> bool:
        """Return False: states cannot be rolled back."""
        return False

    def get_seq_length(self, *_args: object, **_kwargs: object) -> torch.Tensor | int:
        """Return how many tokens are cached."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys and the index of the first: masks are as long as the query."""
        del layer_idx
        return query_length, 0

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the recurrent state, by MiniMax's name."""
        state: torch.Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, states: torch.Tensor) -> None:
        """Keep a recurrent state, by MiniMax's name."""
        self.update_recurrent_state(states, layer_idx)


class _Layers(list[Any]):
    """The layers of ``cache``: an empty list that has a layer under every index, for models that call layers.

    These call methods of the cache that are named for their part: ``update_indexer``, ``take_rows``, ``keep_states``.
    """

    def __init__(self, cache: EmptyCache) -> None:
        super().__init__()
        self._cache = ref(cache)  # no cycle: a cache has its engine's pages, which must go with the engine

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  # as lists take and return it
        cache = self._cache()
        assert cache is not None  # noqa: S101 - the model that calls this holds it
        return _Layer(cache, index)


@dataclass(slots=True, eq=False)
class _Layer:
    """Layer ``index`` of ``cache``, with the methods of transformers' cache layers that a Cache has not."""

    cache: Cache
    index: int

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """The positions that the cache has, where Qwen4-exp of transformers 5.24 reads and writes them."""
        return getattr(self.cache, "position_ids", None)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        """Drop the positions of the step: the next step's cache has them."""

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Cache the keys [1, 1, tokens, width] of MiniMax-M3's indexer, and return all of the request."""
        keys: torch.Tensor = self.cache.update_indexer(idx_k[:, 0], self.index)
        return keys[:, None]

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Cache the rows [1, tokens, width] of DeepSeek-V4's compressor ``name``; return rows of whole groups.

        The result also has the position of the first.
        """
        taken: tuple[torch.Tensor, torch.Tensor, int] = self.cache.take_rows((self.index, name), kv, gate)
        return taken

    def update_overlap_state(self, *_args: object) -> tuple[None, None]:
        """Return no group before: where groups overlap, it is among the rows."""
        return None, None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Cache the states [1, groups, width] of compressor ``name``, and return all of the request."""
        states: torch.Tensor = self.cache.keep_states((self.index, name), compressed)
        return states


def on_device(values: Int64, device: torch.device) -> torch.Tensor:
    """Return ``values`` as a tensor on ``device``."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def places_of(tokens: Int64, device: torch.device) -> slice | torch.Tensor:
    """Return ascending indices ``tokens`` of the flattened step: a slice if they are contiguous, else a tensor."""
    contiguous = len(tokens) == tokens[-1] - tokens[0] + 1
    return slice(int(tokens[0]), int(tokens[-1]) + 1) if contiguous else on_device(tokens, device)
