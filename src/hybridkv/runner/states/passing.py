"""States that a module keeps or passes on without a transformers Cache, and how such modules are found.

    an argument      out, states = block(hidden, states)             RWKV (all layers stacked), xLSTM
    attributes       block.state is read, and then replaced          RecurrentGemma

A call sets the states where the module looks for them, and takes them from there afterwards. The module itself keeps
none: its attributes are restored. The probe watches one forward, and notes the modules that do either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard

import torch

States = tuple[torch.Tensor, ...]
"""One tensor [rows, *shape] for every state of a mixer, in its order."""

_NONE_YET: Final = object()


class Held(Protocol):
    """The states of one mixer over one or several calls, as its forward expects them."""

    @property
    def states(self) -> States:
        """The states after the last call."""
        ...

    def run(self, call: Callable[[Mapping[str, Any]], Any]) -> Any:  # noqa: ANN401  # the forward's result
        """Run ``call`` with further arguments of the forward, keep the states after it, and return its result."""
        ...


@dataclass(frozen=True, slots=True)
class StateArgument:
    """States in an argument of the forward, which also returns them.

    Attributes:
        parameter: name of the argument.
        place: index of the states in the forward's result.
        layers: layers of the model if each tensor has the states of all of them along its last axis, which are then
            written in place; None if the argument has one layer's states.
    """

    parameter: str
    place: int
    layers: int | None

    def hold(self, module: torch.nn.Module, states: States) -> Held:
        """Return ``states`` for calls of ``module``. Stacked states may be written in place."""
        del module
        return _InArgument(self, states)


class _InArgument:
    """States that are an argument. Stacked, each layer's index reaches the one layer's memory."""

    def __init__(self, how: StateArgument, states: States) -> None:
        self._how, self.states = how, states

    def run(self, call: Callable[[Mapping[str, Any]], Any]) -> Any:  # noqa: ANN401  # the forward's result
        """Run ``call`` with the states, and keep the ones that it returns."""
        layers = self._how.layers
        if layers is not None:
            stacked = [state.unsqueeze(-1).expand(*state.shape, layers) for state in self.states]
            return call({self._how.parameter: stacked})
        result = call({self._how.parameter: self.states})
        after = result[self._how.place]
        self.states = tuple(new.to(old.dtype) for new, old in zip(after, self.states, strict=True))
        return result


@dataclass(frozen=True, slots=True)
class StateAttributes:
    """States in attributes of a module or of modules inside it.

    Attributes:
        names: path of the module inside the mixer ("" for itself) and name of the attribute, for each state.
    """

    names: tuple[tuple[str, str], ...]

    def hold(self, module: torch.nn.Module, states: States) -> Held:
        """Return ``states`` for calls of ``module``."""
        return _InAttributes([(module.get_submodule(path), name) for path, name in self.names], states)


class _InAttributes:
    """States that are attributes during a call. The attributes are restored after it."""

    def __init__(self, owners: Sequence[tuple[torch.nn.Module, str]], states: States) -> None:
        self._owners, self.states = owners, states

    def run(self, call: Callable[[Mapping[str, Any]], Any]) -> Any:  # noqa: ANN401  # the forward's result
        """Run ``call`` with the states set, and keep the ones that are set after it."""
        own = [vars(module).get(name) for module, name in self._owners]
        for (module, name), state in zip(self._owners, self.states, strict=True):
            setattr(module, name, state)
        try:
            result = call({})
            after = [vars(module)[name] for module, name in self._owners]
        finally:
            for (module, name), value in zip(self._owners, own, strict=True):
                setattr(module, name, value)
        self.states = tuple(new.to(old.dtype) for new, old in zip(after, self.states, strict=True))
        return result


Passing = StateArgument | StateAttributes


@dataclass(frozen=True, slots=True, eq=False)
class OwnStates:
    """A module with states of its own, as one forward showed them.

    Attributes:
        module: the module.
        layer_index: the number of its layer, from its name.
        width: width of its input.
        passing: how it takes the states.
        states: each state's shape of one request, its dtype, and its value before the first token.
        result: the forward's result.
    """

    module: torch.nn.Module
    layer_index: int
    width: int
    passing: Passing
    states: tuple[tuple[tuple[int, ...], torch.dtype, float], ...]
    result: object


class OwnStatesWatch:
    """Notes modules of ``model`` with states of their own during a forward over one row."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._before = {
            module: {name: value for name, value in vars(module).items() if _may_be_state(name, value)}
            for module in self._names
        }
        self._given = dict[torch.nn.Module, tuple[str, Sequence[torch.Tensor], States]]()
        self._widths = dict[torch.nn.Module, int]()
        self._results = dict[torch.nn.Module, object]()
        self._arguments = dict[torch.nn.Module, OwnStates]()

    def enter(self, module: torch.nn.Module, named: Mapping[str, object], hidden: object) -> None:
        """Note the arguments of a call of ``module``. ``hidden`` is the first one."""
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            return
        self._widths[module] = hidden.shape[-1]
        for name, value in named.items():
            if _are_tensors(value):
                self._given[module] = name, value, tuple(one.clone() for one in value)

    def leave(self, module: torch.nn.Module, result: object) -> None:
        """Note the result of a call of ``module``."""
        self._results[module] = result
        if module not in self._given or not isinstance(result, tuple):
            return
        name, given, before = self._given.pop(module)
        shapes = [one.shape for one in given]
        for place, after in enumerate(result):
            if place and _are_tensors(after) and [one.shape for one in after] == shapes:
                number, layer = self._layer(module)
                layers = number if after is given and {shape[-1] for shape in shapes} == {number} else None
                states = tuple(one[..., layer] if layers else one for one in before)
                passing = StateArgument(name, place, layers)
                self._arguments[module] = self._noted(module, passing, states)
                return

    def found(self) -> tuple[OwnStates, ...]:
        """Return the modules that passed states on, or changed attributes, and restore these attributes.

        Of modules inside each other, the outermost is returned.
        """
        changed = dict[torch.nn.Module, list[tuple[torch.nn.Module, str, torch.Tensor]]]()
        for module, before in self._before.items():
            for name, value in list(vars(module).items()):
                was = before.get(name, _NONE_YET)
                if isinstance(value, torch.Tensor) and _may_be_state(name, value) and value is not was:
                    owner = self._outermost(module, changed)
                    changed.setdefault(owner, []).append((module, name, value))
                    if was is _NONE_YET:
                        delattr(module, name)
                    else:
                        setattr(module, name, was)
        passed = [one for one in self._arguments.values() if self._outermost(one.module, self._arguments) is one.module]
        for owner, attributes in changed.items():
            if owner in self._widths and all(value.shape[:1] == (1,) for _, _, value in attributes):
                names = tuple(
                    (self._names[module].removeprefix(self._names[owner]).lstrip("."), name)
                    for module, name, _ in attributes
                )
                states = tuple(torch.zeros_like(value) for _, _, value in attributes)
                passed.append(self._noted(owner, StateAttributes(names), states))
        return tuple(one for one in passed if one.layer_index >= 0)

    def _outermost(self, module: torch.nn.Module, known: Mapping[torch.nn.Module, object]) -> torch.nn.Module:
        """Return the first of ``known`` that has ``module`` inside, or ``module``."""
        name = self._names[module]
        return next((one for one in known if name.startswith(f"{self._names[one]}.")), module)

    def _layer(self, module: torch.nn.Module) -> tuple[int, int]:
        """Return how many layers there are, and which one ``module`` is part of, -1 if its name has no number."""
        parts = self._names[module].split(".")
        at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            return 0, -1
        beside = ".".join(parts[:at])
        layers = {name.removeprefix(f"{beside}.").split(".")[0] for name in self._names.values() if beside in name}
        return sum(one.isdecimal() for one in layers), int(parts[at])

    def _noted(self, module: torch.nn.Module, passing: Passing, states: States) -> OwnStates:
        before = [(tuple(one.shape[1:]), one.dtype, float(one.flatten()[0])) for one in states]
        layer = self._layer(module)[1]
        return OwnStates(module, layer, self._widths[module], passing, tuple(before), self._results.get(module))


def _are_tensors(value: object) -> TypeGuard[Sequence[torch.Tensor]]:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, torch.Tensor) for one in value)


def _may_be_state(name: str, value: object) -> bool:
    """Return whether an attribute may hold a state: a tensor, or None, that is no weight and no buffer."""
    return not name.startswith("_") and (value is None or isinstance(value, torch.Tensor))
