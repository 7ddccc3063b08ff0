"""Recurrent mixers: what a layer keeps between tokens, and running one mixer from given states to new ones.

    hidden [rows, tokens, width] + states [rows, *shape] -> the mixer's own forward on a StateCache -> hidden, states

A mixer sees a cache of its one layer. The forward that runs is always that of the mixer's class, so that the
instance's may be replaced by one that calls these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from transformers.cache_utils import Cache

from hybridkv.errors import WorkerError
from hybridkv.runner.states.superposition import superposed_forward

States = tuple[torch.Tensor, ...]
"""One tensor [rows, *shape] for every MixerState of a mixer, in its order."""


class StateKind(StrEnum):
    """conv: the last inputs of a causal convolution, [channels, columns]. recurrent: what a scan carries on."""

    CONV = "conv"
    RECURRENT = "recurrent"


class Continuation(StrEnum):
    """How a mixer goes on from a state over several tokens.

    native: its own forward does. superposition: a selective scan from zero, and what the state adds.
    token: one forward a token.
    """

    NATIVE = "native"
    SUPERPOSITION = "superposition"
    TOKEN = "token"  # noqa: S105  # no password


@dataclass(frozen=True, slots=True)
class MixerState:
    """One state tensor of a mixer, ``shape`` a request in ``dtype``. index: which of the layer's states of its kind."""

    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one request's."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMixer:
    """A module that keeps states. layer_index: under which it keeps them.

    cache_parameter: what its forward calls the cache. width: of its input. parts: its states, conv first, by index.
    """

    module: torch.nn.Module
    layer_index: int
    cache_parameter: str
    width: int
    parts: tuple[MixerState, ...]

    def zeros(self, rows: int = 1) -> States:
        """The states of ``rows`` requests before their first token."""
        device = next(self.module.parameters()).device
        return tuple(torch.zeros((rows, *part.shape), dtype=part.dtype, device=device) for part in self.parts)


class StateCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The transformers Cache of one mixer over one call: ``states`` at first, some of them written in place.

    continues: whether there is something before the call; without it the states must be zeros.
    """

    def __init__(self, mixer: RecurrentMixer, states: States, *, continues: bool) -> None:
        super().__init__(layers=[])
        self._parts, self._continues = mixer.parts, continues
        self.layers = _OneLayer(mixer.parts, states)

    @property
    def states(self) -> States:
        """As the last call left them."""
        layer = self.layers
        return tuple(
            (layer.conv_states if part.kind is StateKind.CONV else layer.recurrent_states)[part.index]
            for part in self._parts
        )

    def has_previous_state(self, *_args: object, **_kwargs: object) -> bool:
        """Whether the mixer is to go on from the states."""
        return self._continues

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """What mixers of newer transformers ask for: the state, None where there is nothing before the call."""
        del layer_idx
        return self.layers.conv_states[state_idx] if self._continues else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As ``get_conv_state``."""
        del layer_idx
        return self.layers.recurrent_states[state_idx] if self._continues else None

    def is_recording_past(self, layer_idx: int) -> bool:
        """No: nothing is rolled back here."""
        del layer_idx
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """Keep the last columns of [rows, channels, tokens]; what was kept before and they together back."""
        del layer_idx
        kept = self.layers.conv_states[state_idx]
        joined = torch.cat((kept, conv_states.to(kept.dtype)), dim=-1)
        kept.copy_(joined[..., -kept.shape[-1] :])
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """Keep [rows, *shape] itself, for a copy would be written once more to its block; it back as it is kept."""
        del layer_idx
        kept = self.layers.recurrent_states
        kept[state_idx] = recurrent_states.to(kept[state_idx].dtype)
        return kept[state_idx]


class _OneLayer(list[Any]):
    """The layers of a StateCache: one, under every index. Its attributes are those of transformers' cache layers."""

    record_past = False

    def __init__(self, parts: Sequence[MixerState], states: States) -> None:
        super().__init__()
        self.conv_states = _by_index(StateKind.CONV, parts, states)
        self.recurrent_states = _by_index(StateKind.RECURRENT, parts, states)

    def __getitem__(self, _index: object) -> _OneLayer:
        return self


def _by_index(kind: StateKind, parts: Sequence[MixerState], states: States) -> dict[int, torch.Tensor]:
    return {part.index: state for part, state in zip(parts, states, strict=True) if part.kind is kind}


def run_segment(
    mixer: RecurrentMixer, hidden: torch.Tensor, states: States | None, how: Continuation
) -> tuple[torch.Tensor, States]:
    """``mixer`` over one request's tokens: its output [1, tokens, width] and the states behind them, [1, *shape] each.

    hidden: [1, tokens, width], at least one token. states: before them, left as they are; None where a request begins.
    Raises WorkerError for shapes or dtypes that are not the mixer's.
    """
    if hidden.dim() != 3 or hidden.shape[0] != 1:
        raise WorkerError(f"a segment is one request's [1, tokens, width], got {tuple(hidden.shape)}")
    _check(mixer, hidden, states)
    if states is None:
        cache = StateCache(mixer, mixer.zeros(), continues=False)
        return _call(mixer, hidden, cache), cache.states
    cache = StateCache(mixer, tuple(state.clone() for state in states), continues=True)
    if how is Continuation.TOKEN and hidden.shape[1] > 1:
        out = torch.cat([_call(mixer, hidden[:, at : at + 1], cache) for at in range(hidden.shape[1])], dim=1)
    elif how is Continuation.SUPERPOSITION and hidden.shape[1] > 1:
        forward = superposed_forward(mixer.module, _only_recurrent(mixer, states))
        out = forward(hidden, **{mixer.cache_parameter: cache})
    else:
        out = _call(mixer, hidden, cache)
    return out, cache.states


def run_decode(mixer: RecurrentMixer, hidden: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
    """``mixer`` over one token of each of several requests, as one batch: output [rows, 1, width], states behind it.

    hidden: [rows, 1, width]. states: [rows, *shape] each, zeros for a request that begins; the mixer may **overwrite**
    them, for gathering them made a copy already. Raises WorkerError for shapes or dtypes that are not the mixer's.
    """
    if hidden.dim() != 3 or hidden.shape[1] != 1:
        raise WorkerError(f"a decode batch is [rows, 1, width], got {tuple(hidden.shape)}")
    _check(mixer, hidden, states)
    cache = StateCache(mixer, states, continues=True)
    return _call(mixer, hidden, cache), cache.states


def _call(mixer: RecurrentMixer, hidden: torch.Tensor, cache: StateCache) -> torch.Tensor:
    """The forward of the mixer's class."""
    out: torch.Tensor = type(mixer.module).forward(mixer.module, hidden, **{mixer.cache_parameter: cache})
    return out


def _only_recurrent(mixer: RecurrentMixer, states: States) -> torch.Tensor:
    found = [state for part, state in zip(mixer.parts, states, strict=True) if part.kind is StateKind.RECURRENT]
    if len(found) != 1:
        raise WorkerError(f"{type(mixer.module).__name__} keeps {len(found)} recurrent states: superposition needs one")
    return found[0]


def _check(mixer: RecurrentMixer, hidden: torch.Tensor, states: States | None) -> None:
    name = type(mixer.module).__name__
    if hidden.shape[1] < 1 or hidden.shape[2] != mixer.width:
        raise WorkerError(f"{name} takes at least one token of width {mixer.width}, got {tuple(hidden.shape)}")
    if states is None:
        return
    wanted = [((hidden.shape[0], *part.shape), part.dtype) for part in mixer.parts]
    given = [(tuple(state.shape), state.dtype) for state in states]
    if given != wanted:
        raise WorkerError(f"{name} keeps states {wanted}, got {given}")
