"""Stand-ins for a mixer's recurrence over several tokens, which run it token by token and keep every state.

A recurrence that is handed its state is called with one token after the other. The two kinds of selective scan that
transformers has are not, or fill every call up to a chunk: the function that decodes one token runs in their place, as
the forward itself calls it. They are known by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

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
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        /,
        *,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **options: Any,  # noqa: ANN401  # how to scan all tokens at once is no question here
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As transformers' scan. b, c: [rows, state size, tokens]."""
        state = self._state if self._state.dim() == 3 else self._state[:, len(self._heads)]
        outputs, states = [], list[torch.Tensor]()
        for at in range(hidden_states.shape[-1]):
            state = state.clone()
            gate = None if z is None else z[..., at]
            given = (hidden_states[..., at], dt[..., at], a, b[..., at], c[..., at], options.get("D"))
            outputs.append(self._update(state, *given, z=gate, dt_bias=delta_bias, dt_softplus=delta_softplus))
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
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        /,
        *,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        return_final_states: bool = False,
        **options: Any,  # noqa: ANN401  # as of SteppedScans
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As transformers' scan. dt: [rows, tokens, heads]; a: [heads]; b, c: [rows, tokens, groups, state size]."""
        width, z, state = hidden_states.shape[-1], options.get("z"), self._state
        a = a[:, None, None].expand(-1, width, b.shape[-1])
        skip, bias = (None if one is None else one[:, None].expand(-1, width) for one in (options.get("D"), dt_bias))
        outputs = []
        for at in range(hidden_states.shape[1]):
            state = state.clone()
            step = dt[:, at, :, None].expand(-1, -1, width)
            gate = None if z is None else z[:, at]
            given = (hidden_states[:, at], step, a, b[:, at], c[:, at], skip)
            outputs.append(self._update(state, *given, z=gate, dt_bias=bias, dt_softplus=dt_softplus))
            self.states.append(state)
        out = torch.stack(outputs, dim=1)
        return (out, state) if return_final_states else out


Stepped = SteppedRecurrence | SteppedScans | SteppedStateSpaces

BY_NAME: Final[Mapping[str, tuple[str, type[SteppedScans | SteppedStateSpaces]]]] = {
    "mamba_selective_scan": ("mamba_selective_state_update", SteppedScans),
    "mamba2_chunk_scan": ("mamba2_selective_state_update", SteppedStateSpaces),
}
"""By the name of a scan: that of the function which decodes one token, and what calls it for each."""
