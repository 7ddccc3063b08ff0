"""Several tokens of each of several rows in one call of a mixer, with the states behind every token.

    drafts [rows, tokens, width]   projections, convolution, norms   in one go, by the mixer's own forward
                                   the recurrence                    token by token: which drafts are accepted is not
                                                                     known yet, and the next step goes on from any
    states behind token t          the convolution's last inputs up to t, and what the recurrence left there

The recurrence is the function among the globals of the forward that is handed the recurrent state; it is found by
running the forward (``recurrence_of``). Modelling modules keep their kernels as such globals, by names of their own.

A stand-in runs it token by token and keeps every state. A recurrence that is handed its state is called with one token
after the other. The two kinds of selective scan that transformers has are not, or fill every call up to a chunk: the
function that decodes one token runs in their place, as the forward itself calls it. They are known by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, cast

import torch

from hybridkv.errors import WorkerError
from hybridkv.runner.states.recurrent import MixerState, RecurrentMixer, StateCache, StateKind, States
from hybridkv.runner.states.superposition import own_forward, with_globals

_PROBED: Final = (2, 5)
"""Rows and tokens of the calls that show the recurrence: unlike each other, and more than one."""
_CHUNK: Final = "chunk_size"
"""What recurrences call the number of tokens that they fill up to."""

Function = Callable[..., Any]
Name = int | str
"""Of an argument: its place, or its keyword."""


class SteppedRecurrence:
    """``function`` from ``state`` on. sliced: its arguments that have a token each, [rows, tokens, ...].

    states: behind each token; another number of them where it was not called just once.
    """

    def __init__(self, function: Function, state: torch.Tensor, sliced: frozenset[Name]) -> None:
        self._function, self._state, self._sliced = function, state, sliced
        self.states: list[torch.Tensor] = []

    def __call__(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Its output [rows, tokens, ...] and the last state."""
        given = dict[Name, Any]([*enumerate(args), *kwargs.items()])
        if _CHUNK in given:
            given[_CHUNK] = 1
        tokens = {given[name].shape[1] for name in self._sliced}
        outputs, state = [], self._state
        for token in range(*tokens):
            now = {name: self._of_token(name, value, token, state) for name, value in given.items()}
            out, state = self._function(*(now[at] for at in range(len(args))), **{name: now[name] for name in kwargs})
            outputs.append(out)
            self.states.append(state)
        return torch.cat(outputs, dim=1), state

    def _of_token(self, name: Name, value: Any, token: int, state: torch.Tensor) -> object:  # noqa: ANN401  # whatever a forward hands over
        if value is self._state:
            return state
        return value[:, token : token + 1] if name in self._sliced else value


class SteppedScans:
    """Mamba's scan, once or once a head, [rows, channels, tokens] each. update: decodes a token, in place."""

    def __init__(self, update: Function, state: torch.Tensor, _sliced: frozenset[Name]) -> None:
        self._update, self._state = update, state
        self._heads: list[list[torch.Tensor]] = []

    @property
    def states(self) -> list[torch.Tensor]:
        """Behind each token; none where not every head was scanned just once."""
        if self._state.dim() == 3:
            return self._heads[0] if len(self._heads) == 1 else []
        if len(self._heads) != self._state.shape[1]:
            return []
        return [torch.stack(heads, dim=1) for heads in zip(*self._heads, strict=True)]

    def __call__(
        self,
        *scanned: torch.Tensor,
        return_last_state: bool = False,
        **options: Any,  # noqa: ANN401 - of the scan
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As transformers' scan of hidden states, dt, a, b and c. b, c: [rows, state size, tokens]."""
        hidden_states, dt, a, b, c = scanned
        state = self._state if self._state.dim() == 3 else self._state[:, len(self._heads)]
        bias = {"dt_bias": options.get("delta_bias"), "dt_softplus": options.get("delta_softplus", False)}
        outputs, states = [], list[torch.Tensor]()
        for at in range(hidden_states.shape[-1]):
            state = state.clone()
            gate = None if options.get("z") is None else options["z"][..., at]
            given = (hidden_states[..., at], dt[..., at], a, b[..., at], c[..., at], options.get("D"))
            outputs.append(self._update(state, *given, z=gate, **bias))
            states.append(state)
        self._heads.append(states)
        out = torch.stack(outputs, dim=-1)
        return (out, state) if return_last_state else out


class SteppedStateSpaces:
    """Mamba-2's scan over [rows, tokens, heads, width]. update: decodes a token, in place. states: behind each one."""

    def __init__(self, update: Function, state: torch.Tensor, _sliced: frozenset[Name]) -> None:
        self._update, self._state = update, state
        self.states: list[torch.Tensor] = []

    def __call__(
        self,
        *scanned: torch.Tensor,
        return_final_states: bool = False,
        **options: Any,  # noqa: ANN401 - of the scan
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As transformers' scan of hidden states, dt, a, b and c.

        dt: [rows, tokens, heads]; a: [heads]; b, c: [rows, tokens, groups, state size].
        """
        hidden_states, dt, a, b, c = scanned
        width, z, state = hidden_states.shape[-1], options.get("z"), self._state
        a = a[:, None, None].expand(-1, width, b.shape[-1])
        skip, bias = (
            None if one is None else one[:, None].expand(-1, width) for one in map(options.get, ("D", "dt_bias"))
        )
        outputs = []
        for at in range(hidden_states.shape[1]):
            state = state.clone()
            step = dt[:, at, :, None].expand(-1, -1, width)
            gate = None if z is None else z[:, at]
            given = (hidden_states[:, at], step, a, b[:, at], c[:, at], skip)
            softplus = options.get("dt_softplus", False)
            outputs.append(self._update(state, *given, z=gate, dt_bias=bias, dt_softplus=softplus))
            self.states.append(state)
        out = torch.stack(outputs, dim=1)
        return (out, state) if return_final_states else out


Stepped = SteppedRecurrence | SteppedScans | SteppedStateSpaces

BY_NAME: Final[Mapping[str, tuple[str, type[SteppedScans | SteppedStateSpaces]]]] = {
    "mamba_selective_scan": ("mamba_selective_state_update", SteppedScans),
    "mamba2_chunk_scan": ("mamba2_selective_state_update", SteppedStateSpaces),
}
"""By the name of a scan: that of the function which decodes one token, and what calls it for each."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What runs token by token in a mixer's forward; ``core`` is None where it keeps a convolution's inputs alone.

    core: the global that the forward calls for it over several tokens. step: the one that runs one token: that of the
    forward's own decoding where it is known or called alike, else ``core``. sliced: arguments of ``core`` that have a
    token each, [rows, tokens, ...]; none of what is known by name.
    """

    core: str | None = None
    step: str = ""
    sliced: frozenset[Name] = frozenset()


def recurrence_of(mixer: RecurrentMixer) -> Recurrence | None:
    """The recurrence of ``mixer``; None where there is more than one, or none is seen. Up to two short forwards."""
    recurrent = [part for part in mixer.parts if part.kind is StateKind.RECURRENT]
    if not isinstance(_own_forward(mixer), FunctionType) or len(recurrent) > 1:
        return None
    if not recurrent:
        return Recurrence()
    used = _used(mixer)
    for core, (step, _) in BY_NAME.items():
        if core in used and step in used:
            return Recurrence(core, step)
    over_several, over_one = (_seen(mixer, tokens) for tokens in (_PROBED[1], 1))
    if over_several is None:
        return None
    core, names, sliced = over_several
    alike = over_one is not None and over_one[1] == names
    return Recurrence(core, over_one[0] if alike and over_one is not None else core, sliced)


def run_every(
    mixer: RecurrentMixer, hidden: torch.Tensor, states: States, recurrence: Recurrence
) -> tuple[torch.Tensor, list[States]]:
    """``mixer`` over [rows, tokens, width] from ``states``: its output, and the states behind each of the tokens.

    states: [rows, *shape] each, left as they are. Raises WorkerError for a mixer that does not run as it did when its
    recurrence was looked for.
    """
    cache, replaced = _KeepingInputs(mixer, states), dict[str, Any]()
    stepped: Stepped | None = None
    if recurrence.core is not None:
        made = BY_NAME[recurrence.core][1] if recurrence.core in BY_NAME else SteppedRecurrence
        step = _own_forward(mixer).__globals__[recurrence.step]
        stepped = replaced[recurrence.core] = made(step, cache.recurrent, recurrence.sliced)
    out = _run(mixer, replaced, hidden, cache)
    recurrent = [] if stepped is None else stepped.states
    parts = [_behind_each(part, hidden.shape[1], cache, recurrent) for part in mixer.parts]
    return out, list(zip(*parts, strict=True))


def _behind_each(
    part: MixerState, tokens: int, cache: _KeepingInputs, recurrent: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The states of one part behind each of the tokens."""
    if part.kind is StateKind.RECURRENT:
        if len(recurrent) != tokens:
            raise WorkerError("the mixer did not run its recurrence once: its drafts must run token by token")
        return [state.to(part.dtype) for state in recurrent]
    joined = cache.joined.get(part.index)
    if joined is None:
        raise WorkerError("the mixer did not hand its inputs to the cache: its drafts must run token by token")
    width, end = part.shape[-1], joined.shape[-1] - tokens + 1
    return [joined[..., end + token - width : end + token] for token in range(tokens)]


def _own_forward(mixer: RecurrentMixer) -> FunctionType:
    return cast("FunctionType", own_forward(mixer.module))


def _used(mixer: RecurrentMixer) -> dict[str, Function]:
    """Functions among the globals of the forward, by name."""
    forward = _own_forward(mixer)
    used = {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}
    return {name: one for name, one in used.items() if callable(one) and not isinstance(one, type)}


def _run(mixer: RecurrentMixer, replaced: Mapping[str, Any], hidden: torch.Tensor, cache: StateCache) -> torch.Tensor:
    """The forward of the mixer's class with functions ``replaced``, by name."""
    bound = with_globals(_own_forward(mixer), replaced)
    out: torch.Tensor = bound(mixer.module, hidden, **{mixer.cache_parameter: cache})
    return out


class _KeepingInputs(StateCache):
    """Remembers the inputs of convolutions, [rows, channels, kept + tokens], and overwrites nothing."""

    def __init__(self, mixer: RecurrentMixer, states: States) -> None:
        super().__init__(mixer, states, continues=True)
        self.joined: dict[int, torch.Tensor] = {}

    @property
    def recurrent(self) -> torch.Tensor:
        """The one recurrent state."""
        (state,) = self.layers.recurrent_states.values()
        return state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """What was kept before and [rows, channels, tokens] together."""
        del layer_idx
        kept = self.layers.conv_states[state_idx]
        self.joined[state_idx] = torch.cat((kept, conv_states.to(kept.dtype)), dim=-1)
        return self.joined[state_idx]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """The state behind the last token; it was seen where it was made."""
        del layer_idx, state_idx
        return recurrent_states


def _seen(mixer: RecurrentMixer, tokens: int) -> tuple[str, tuple[Name, ...], frozenset[Name]] | None:
    """The one global that a forward over ``tokens`` hands the state to: its name, its arguments, those of tokens."""
    states = mixer.zeros(_PROBED[0])
    cache = _KeepingInputs(mixer, states)
    found = list[tuple[str, tuple[Name, ...], frozenset[Name]]]()
    shape = (_PROBED[0], tokens)

    def watched(name: str, function: Function) -> Function:
        def call(*args: object, **kwargs: object) -> object:
            given = dict[Name, object]([*enumerate(args), *kwargs.items()])
            if any(value is cache.recurrent for value in given.values()):
                sliced = [
                    at
                    for at, value in given.items()
                    if isinstance(value, torch.Tensor)
                    and value is not cache.recurrent
                    and value.dim() > len(shape)
                    and value.shape[:2] == shape
                ]
                found.append((name, tuple(given), frozenset(sliced)))
            return function(*args, **kwargs)

        return call

    functions = {name: watched(name, one) for name, one in _used(mixer).items()}
    hidden = next(mixer.module.parameters()).new_zeros(*shape, mixer.width)
    with torch.inference_mode():
        _run(mixer, functions, hidden, cache)
    return found[0] if len(found) == 1 else None
