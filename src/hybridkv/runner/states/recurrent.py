"""Recurrent mixers: the states that a layer keeps, and running one mixer from given states to new ones.

    hidden [rows, tokens, width] + states [rows, *shape] -> the mixer's own forward on a StateCache -> hidden, states

A mixer sees a cache of its one layer, or gets its states as states/passing.py says. The forward that runs is always
the forward of the mixer's class, so the instance's forward may be replaced by one that calls these functions. If
another function must run inside of it, the forward runs with globals of its own: modelling modules keep their kernels
as globals, and stay unchanged.

Superposition. Transformers' selective scan starts from zero. The recurrence h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t,
y_t = C_t h_t (Mamba, arXiv 2312.00752, equation 2) is linear in h: h_0 contributes exp(A * (dt_1 + ... + dt_t)) h_0 at
token t, for any x. So the scan runs from zero, and the state's part is added:

    y_t += C_t exp(A * cumsum(dt)_t) h_0    before the gate
    h_T += exp(A * sum(dt)) h_0             the state after the last token

Drafts. Several tokens of each of several rows run in one call, with the states after every token:

    drafts [rows, tokens, width]   projections, convolution, norms   together, by the mixer's own forward
                                   the recurrence                    token by token: the next step may resume at any
                                                                     draft, because the accepted ones are not known yet
    states after token t           the convolution's last inputs up to t, and the state of the recurrence

The recurrence is the function among the globals of the forward that receives the recurrent state; a watched forward
finds it (``recurrence_of``). A stand-in runs it token by token and keeps every state. Transformers' two kinds of
selective scan receive no state, or fill every call up to a chunk: the function that decodes one token runs in their
place, as the forward itself calls it. They are known by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

from hybridkv.errors import WorkerError
from hybridkv.runner.states.passing import Held, Passing, States
from hybridkv.runner.step_context import EmptyCache

Outputs = tuple[tuple[int, ...] | None, ...] | None
"""What a mixer's forward returns (RecurrentMixer.outputs)."""
Function = Callable[..., Any]
Name = int | str
"""Of an argument: its place, or its keyword."""

SCAN: Final = "mamba_selective_scan"
"""The name of the scan over a sequence in modelling modules: a global that the forward of their mixers looks up."""
_PROBED: Final = (2, 5)
"""Rows and tokens of the calls that show the recurrence: unlike each other, and more than one."""
_CHUNK: Final = "chunk_size"
"""The argument of recurrences with the number of tokens that they fill up to."""


class StateKind(StrEnum):
    """Name the kinds of states.

    conv: the last inputs of a causal convolution, [channels, columns]. recurrent: the state of a scan.
    """

    CONV = "conv"
    RECURRENT = "recurrent"


class Continuation(StrEnum):
    """Name the ways in which a mixer resumes from a state over several tokens.

    native: its own forward resumes. superposition: a selective scan from zero, plus the state's part. token: one
    forward for each token.
    """

    NATIVE = "native"
    SUPERPOSITION = "superposition"
    TOKEN = "token"  # noqa: S105  # no password


@dataclass(frozen=True, slots=True)
class MixerState:
    """One state tensor of a mixer.

    Attributes:
        kind: its kind.
        index: its number among the states of its kind.
        shape: shape of one request's state.
        dtype: dtype of the state.
        initial: its value before the first token.
    """

    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMixer:
    """A module that keeps states.

    Attributes:
        module: the module.
        layer_index: the layer index under which it keeps its states.
        cache_parameter: name of the cache argument of its forward.
        width: width of its input.
        parts: its states, conv first, by index.
        outputs: for each entry of the tuple that its forward returns, the shape of one token's output; None for other
            entries. None if the forward returns one tensor.
        passing: how its forward gets the states; None for a cache.
    """

    module: torch.nn.Module
    layer_index: int
    cache_parameter: str
    width: int
    parts: tuple[MixerState, ...]
    outputs: Outputs = None
    passing: Passing | None = None

    def initial(self, rows: int = 1) -> States:
        """Return the states of ``rows`` requests before their first token."""
        device = next(self.module.parameters()).device
        return tuple(
            torch.full((rows, *part.shape), part.initial, dtype=part.dtype, device=device) for part in self.parts
        )

    def hold(self, states: States, *, continues: bool) -> Held:
        """Return ``states`` as the forward expects them; some may be written in place."""
        if self.passing is not None:
            return self.passing.hold(self.module, states)
        return StateCache(self, states, continues=continues)

    @property
    def out_width(self) -> int:
        """The elements of a token in all outputs together."""
        if self.outputs is None:
            return self.width
        return sum(math.prod(shape) for shape in self.outputs if shape is not None)

    def joined(self, result: Any) -> torch.Tensor:  # noqa: ANN401  # the forward's result
        """Return all outputs of tokens side by side, [rows, tokens, out_width]."""
        if self.outputs is None:
            alone: torch.Tensor = result
            return alone
        kept = [one.flatten(2) for one, shape in zip(result, self.outputs, strict=True) if shape is not None]
        return torch.cat(kept, dim=-1) if len(kept) > 1 else kept[0]

    def parted(self, out: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Return ``out``, [rows, tokens, out_width], as the forward returns it, with None for other entries."""
        if self.outputs is None:
            return out
        parted, end = list[torch.Tensor | None](), 0
        for shape in self.outputs:
            begin, end = end, end + (0 if shape is None else math.prod(shape))
            parted.append(None if shape is None else out[..., begin:end].view(*out.shape[:-1], *shape))
        return tuple(parted)


class StateCache(EmptyCache):
    """The transformers Cache of one mixer over one call.

    Args:
        mixer: the mixer.
        states: the states before the call; some may be written in place.
        continues: whether tokens came before the call; otherwise the states must be the initial ones.
        keeps: whether to overwrite nothing.

    Attributes:
        joined: with ``keeps``, the inputs of each convolution, [rows, channels, kept + tokens], by its index.
    """

    def __init__(self, mixer: RecurrentMixer, states: States, *, continues: bool, keeps: bool = False) -> None:
        super().__init__()
        self._parts, self._continues, self._keeps = mixer.parts, continues, keeps
        self._parameter = mixer.cache_parameter
        self.layers = _OneLayer(mixer.parts, states)
        self.joined: dict[int, torch.Tensor] = {}

    @property
    def states(self) -> States:
        """The states after the last call."""
        return tuple(self.layers.of_kind[part.kind][part.index] for part in self._parts)

    def run(self, call: Callable[[Mapping[str, Any]], Any]) -> Any:  # noqa: ANN401  # the forward's result
        """Run ``call`` with this cache, and return its result."""
        return call({self._parameter: self})

    def has_previous_state(self, *_args: object, **_kwargs: object) -> bool:
        """Return whether the mixer must resume from the states."""
        return self._continues

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the conv state; None if no token came before the call. Mixers of newer transformers call this."""
        del layer_idx
        return self.layers.conv_states[state_idx] if self._continues else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the recurrent state; None if no token came before the call."""
        del layer_idx
        return self.layers.recurrent_states[state_idx] if self._continues else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """Keep the last columns of [rows, channels, tokens]; return the kept columns and the new ones together."""
        del layer_idx
        kept = self.layers.conv_states[state_idx]
        joined = torch.cat((kept, conv_states.to(kept.dtype)), dim=-1)
        if self._keeps:
            self.joined[state_idx] = joined
        else:
            kept.copy_(joined[..., -kept.shape[-1] :])
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """Keep [rows, *shape] itself and return it; a copy would be written once more to its block."""
        del layer_idx
        if self._keeps:
            return recurrent_states
        kept = self.layers.recurrent_states
        kept[state_idx] = recurrent_states.to(kept[state_idx].dtype)
        return kept[state_idx]


class _OneLayer(list[Any]):
    """The layers of a StateCache: one, under every index. Its attributes are those of transformers' cache layers."""

    record_past = False

    def __init__(self, parts: Sequence[MixerState], states: States) -> None:
        super().__init__()
        self.of_kind: dict[StateKind, dict[int, torch.Tensor]] = {kind: {} for kind in StateKind}
        for part, state in zip(parts, states, strict=True):
            self.of_kind[part.kind][part.index] = state
        self.conv_states, self.recurrent_states = (self.of_kind[kind] for kind in StateKind)

    def __getitem__(self, _index: object) -> _OneLayer:
        return self


# -- running a mixer


def run_segment(
    mixer: RecurrentMixer,
    hidden: torch.Tensor,
    states: States | None,
    how: Continuation,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, States]:
    """Run ``mixer`` over one request's tokens.

    hidden: [1, tokens, width], at least one token. states: before them, unchanged; None at the start of a request.
    positions: int64[1, tokens]; None for a mixer that takes none. Returns output [1, tokens, out width] and the states
    after the tokens, [1, *shape]. Raises WorkerError for shapes or dtypes that are not the mixer's.
    """
    if hidden.dim() != 3 or hidden.shape[0] != 1:
        raise WorkerError(f"a segment must be [1, tokens, width] of one request, got {tuple(hidden.shape)}")
    _check(mixer, hidden, states)
    if states is None:
        held = mixer.hold(mixer.initial(), continues=False)
        return _call(mixer, hidden, held, positions), held.states
    held = mixer.hold(tuple(state.clone() for state in states), continues=True)
    if how is Continuation.TOKEN and hidden.shape[1] > 1:
        each = [slice(at, at + 1) for at in range(hidden.shape[1])]
        calls = [_call(mixer, hidden[:, at], held, None if positions is None else positions[:, at]) for at in each]
        out = torch.cat(calls, dim=1)
    elif how is Continuation.SUPERPOSITION and hidden.shape[1] > 1:
        scans = _SuperposedScans(mixer, states)
        out = _call(mixer, hidden, held, positions, {SCAN: scans})
        scans.require_all()
    else:
        out = _call(mixer, hidden, held, positions)
    return out, held.states


def run_decode(
    mixer: RecurrentMixer, hidden: torch.Tensor, states: States, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, States]:
    """Run ``mixer`` over one token of each of several requests.

    hidden: [rows, 1, width]. states: [rows, *shape] each; the mixer may **overwrite** them, because gathering made a
    copy already. positions: int64[rows, 1], as in ``run_segment``. Returns
    output [rows, 1, out width], and the states after it. Raises WorkerError for shapes or dtypes that are not the
    mixer's.
    """
    if hidden.dim() != 3 or hidden.shape[1] != 1:
        raise WorkerError(f"a decode batch must be [rows, 1, width], got {tuple(hidden.shape)}")
    _check(mixer, hidden, states)
    held = mixer.hold(states, continues=True)
    return _call(mixer, hidden, held, positions), held.states


def _check(mixer: RecurrentMixer, hidden: torch.Tensor, states: States | None) -> None:
    name = type(mixer.module).__name__
    if hidden.shape[1] < 1 or hidden.shape[2] != mixer.width:
        raise WorkerError(f"{name} needs at least one token of width {mixer.width}, got {tuple(hidden.shape)}")
    if states is None:
        return
    wanted = [((hidden.shape[0], *part.shape), part.dtype) for part in mixer.parts]
    given = [(tuple(state.shape), state.dtype) for state in states]
    if given != wanted:
        raise WorkerError(f"{name} needs states of shapes and dtypes {wanted}, got {given}")


def _call(
    mixer: RecurrentMixer,
    hidden: torch.Tensor,
    held: Held,
    positions: torch.Tensor | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Run the forward of the mixer's class. With functions ``replaced``, by name, its decorators are left out.

    Required arguments other than the hidden states, the mixer's states and positions are None.
    """
    forward = type(mixer.module).forward
    if replaced is not None:
        own = inspect.unwrap(forward)
        known = {**own.__globals__, **replaced}
        forward = FunctionType(own.__code__, known, own.__name__, own.__defaults__, own.__closure__)
        forward.__kwdefaults__ = own.__kwdefaults__
    required, takes_positions = _further(type(mixer.module).forward)
    others: dict[str, Any] = dict.fromkeys(required)
    if takes_positions and positions is not None:
        others[_POSITIONS] = positions
    return mixer.joined(held.run(lambda given: forward(mixer.module, hidden, **{**others, **given})))


_POSITIONS: Final = "position_ids"


@cache
def _further(forward: Function) -> tuple[tuple[str, ...], bool]:
    """Return the required arguments of a mixer's forward after the hidden states, and whether it takes positions."""
    parameters = list(inspect.signature(forward).parameters.values())[2:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return tuple(one.name for one in named if one.default is one.empty), _POSITIONS in {one.name for one in named}


def functions_of(module: torch.nn.Module) -> dict[str, Function]:
    """Return the functions that the forward of ``module``'s class looks up among its globals, by name."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return {}
    used = {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}
    return {name: one for name, one in used.items() if callable(one) and not isinstance(one, type)}


# -- superposition

_INSTEAD: Final = "run it natively or token by token"


class _SuperposedScans:
    """Stands in for the scan: each call resumes from the state of one head, or of all channels, instead of zero.

    Raises WorkerError for a mixer without a scan, and unless it has one recurrent state.
    """

    def __init__(self, mixer: RecurrentMixer, states: States) -> None:
        name, functions = type(mixer.module).__name__, functions_of(mixer.module)
        found = [state for part, state in zip(mixer.parts, states, strict=True) if part.kind is StateKind.RECURRENT]
        if len(found) != 1:
            raise WorkerError(f"{name} keeps {len(found)} recurrent states, but superposition needs one: {_INSTEAD}")
        if SCAN not in functions:
            raise WorkerError(f"{name} runs no {SCAN}, so it cannot be superposed: {_INSTEAD}")
        self._scan = functions[SCAN]
        # [rows, heads, channels, state size] if the mixer scans head by head, else [rows, channels, state size]
        self._left = iter(found[0].unbind(1) if found[0].dim() == 4 else found)

    def __call__(
        self,
        *scanned: torch.Tensor,
        return_last_state: bool = False,
        **options: Any,  # noqa: ANN401 - go on to the scan
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Scan hidden states, dt, a, b and c as transformers does, in this order.

        hidden states, dt, options' z: [rows, channels, tokens]; b, c: [rows, state size, tokens]. a: [channels, state
        size], negative. options' delta_bias: [channels].
        """
        state = next(self._left, None)
        if state is None:
            raise WorkerError(f"the mixer scans more often than it has heads, so it cannot be superposed: {_INSTEAD}")
        out, final = self._scan(*scanned, return_last_state=True, **options)
        _, dt, a, _, c = scanned
        state, bias, z = state.float(), options.get("delta_bias"), options.get("z")
        if bias is not None:
            dt = dt + bias.to(dt.dtype)[..., None]
        # step sizes as the scan makes them
        elapsed = (F.softplus(dt) if options.get("delta_softplus", False) else dt).float().cumsum(dim=-1)
        added = torch.zeros_like(elapsed)
        for one in range(state.shape[-1]):  # all at once would need a tensor as large as the scan's largest
            added += torch.exp(a[None, :, one, None] * elapsed) * state[..., one, None] * c[:, None, one].float()
        if z is not None:
            added *= F.silu(z.float())
        out = (out.float() + added).to(out.dtype)
        final = final + torch.exp(a[None] * elapsed[..., -1:]) * state
        return (out, final) if return_last_state else out

    def require_all(self) -> None:
        """Raise WorkerError if some head was not scanned."""
        if next(self._left, None) is not None:
            raise WorkerError(f"the mixer scans less often than it has heads, so it cannot be superposed: {_INSTEAD}")


# -- the states after every token


class _Stepped:
    """Replaces ``function``: calls it for one token after the other, starting from ``state``.

    Args:
        function: runs one token.
        state: the state before the first token.
        sliced: its arguments with one entry for each token, [rows, tokens, ...].

    Attributes:
        states: the state after each token. Their number differs from the tokens if the mixer did not call this once
            for every head.
    """

    def __init__(self, function: Function, state: torch.Tensor, sliced: frozenset[Name]) -> None:
        self._function, self._state, self._sliced = function, state, sliced
        self._heads: list[list[torch.Tensor]] = []
        self.states: list[torch.Tensor] = []

    def _scan(
        self,
        state: torch.Tensor,
        scanned: Sequence[torch.Tensor],
        axis: int,
        **options: Any,  # noqa: ANN401 - of the function
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output and the states after each token along ``axis`` of ``scanned``: hidden, dt, a, b and c."""
        hidden, dt, a, b, c = scanned
        outputs, states, skip, z = [], list[torch.Tensor](), options.pop("skip"), options.pop("z")
        for at in range(hidden.shape[axis]):
            state = state.clone()
            now, step, b_now, c_now = (one.select(axis, at) for one in (hidden, dt, b, c))
            gate = None if z is None else z.select(axis, at)
            outputs.append(self._function(state, now, step, a, b_now, c_now, skip, z=gate, **options))
            states.append(state)
        return torch.stack(outputs, dim=axis), states


class _SteppedRecurrence(_Stepped):
    """A recurrence that receives its state, over [rows, tokens, ...]."""

    def __call__(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return its output [rows, tokens, ...] and the last state."""
        given = dict[Name, Any]([*enumerate(args), *kwargs.items()])
        if _CHUNK in given:
            given[_CHUNK] = 1
        tokens = {given[name].shape[1] for name in self._sliced}
        outputs, state = [], self._state
        for token in range(*tokens):
            now = {name: given[name][:, token : token + 1] for name in self._sliced}
            now |= {name: state for name, value in given.items() if value is self._state}
            now = given | now
            out, state = self._function(*(now[at] for at in range(len(args))), **{name: now[name] for name in kwargs})
            outputs.append(out)
            self.states.append(state)
        return torch.cat(outputs, dim=1), state


class _SteppedScans(_Stepped):
    """Mamba's scan, called once or once a head with [rows, channels, tokens]. Its function decodes a token in place."""

    def __call__(
        self,
        *scanned: torch.Tensor,
        return_last_state: bool = False,
        **options: Any,  # noqa: ANN401 - of the scan
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Scan hidden states, dt, a, b and c as transformers does. b, c: [rows, state size, tokens]."""
        by_head = self._state.dim() == 4
        out, states = self._scan(
            self._state[:, len(self._heads)] if by_head else self._state,
            scanned,
            -1,
            skip=options.get("D"),
            z=options.get("z"),
            dt_bias=options.get("delta_bias"),
            dt_softplus=options.get("delta_softplus", False),
        )
        self._heads.append(states)
        complete = len(self._heads) == (self._state.shape[1] if by_head else 1)
        whole = [torch.stack(heads, dim=1) for heads in zip(*self._heads, strict=True)] if by_head else states
        self.states = whole if complete else []
        return (out, states[-1]) if return_last_state else out


class _SteppedStateSpaces(_Stepped):
    """Mamba-2's scan over [rows, tokens, heads, width]. Its function decodes a token in place."""

    def __call__(
        self,
        *scanned: torch.Tensor,
        return_final_states: bool = False,
        **options: Any,  # noqa: ANN401 - of the scan
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Scan hidden states, dt, a, b and c as transformers does.

        dt: [rows, tokens, heads]; a: [heads]; b, c: [rows, tokens, groups, state size].
        """
        hidden, dt, a, b, c = scanned
        width = hidden.shape[-1]
        skip, bias = (
            None if one is None else one[:, None].expand(-1, width) for one in map(options.get, ("D", "dt_bias"))
        )
        each = (hidden, dt[..., None].expand(*dt.shape, width), a[:, None, None].expand(-1, width, b.shape[-1]), b, c)
        softplus = options.get("dt_softplus", False)
        out, states = self._scan(
            self._state, each, 1, skip=skip, z=options.get("z"), dt_bias=bias, dt_softplus=softplus
        )
        self.states += states
        return (out, states[-1]) if return_final_states else out


_BY_NAME: Final[Mapping[str, tuple[str, type[_SteppedScans | _SteppedStateSpaces]]]] = {
    SCAN: ("mamba_selective_state_update", _SteppedScans),
    "mamba2_chunk_scan": ("mamba2_selective_state_update", _SteppedStateSpaces),
}
"""For each scan, by name: the name of the function that decodes one token, and the class that calls it for each."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The part of a mixer's forward that runs token by token.

    Attributes:
        core: the global that the forward calls for several tokens; None if the mixer only keeps inputs of convolutions.
        step: the global that runs one token: the function of the forward's own decoding if it is known or takes the
            same arguments, else ``core``.
        sliced: arguments of ``core`` with one entry for each token, [rows, tokens, ...]; empty for functions known by
            name.
    """

    core: str | None = None
    step: str = ""
    sliced: frozenset[Name] = frozenset()


def recurrence_of(mixer: RecurrentMixer) -> Recurrence | None:
    """Find the recurrence of ``mixer``; None if there are several, or if it is not seen. Up to two short forwards."""
    recurrent = [part for part in mixer.parts if part.kind is StateKind.RECURRENT]
    if mixer.passing is not None:
        return None
    if not isinstance(inspect.unwrap(type(mixer.module).forward), FunctionType) or len(recurrent) > 1:
        return None
    if not recurrent:
        return Recurrence()
    used = functions_of(mixer.module)
    for core, (step, _) in _BY_NAME.items():
        if core in used and step in used:
            return Recurrence(core, step)
    over_several, over_one = (_seen(mixer, tokens) for tokens in (_PROBED[1], 1))
    if over_several is None:
        return None
    core, names, sliced = over_several
    return Recurrence(core, over_one[0] if over_one is not None and over_one[1] == names else core, sliced)


def run_every(
    mixer: RecurrentMixer,
    hidden: torch.Tensor,
    states: States,
    recurrence: Recurrence,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[States]]:
    """Run ``mixer`` over [rows, tokens, width] from ``states``; return its output, and the states after each token.

    states: [rows, *shape] each, unchanged. positions: int64[rows, tokens], as in ``run_segment``. Raises WorkerError if
    the mixer does not run as it did when its recurrence was found.
    """
    cache, replaced = StateCache(mixer, states, continues=True, keeps=True), dict[str, _Stepped]()
    if recurrence.core is not None:
        made = _BY_NAME[recurrence.core][1] if recurrence.core in _BY_NAME else _SteppedRecurrence
        step = inspect.unwrap(type(mixer.module).forward).__globals__[recurrence.step]
        (state,) = cache.layers.recurrent_states.values()
        replaced[recurrence.core] = made(step, state, recurrence.sliced)
    out, tokens, parts = _call(mixer, hidden, cache, positions, replaced), hidden.shape[1], list[list[torch.Tensor]]()
    for part in mixer.parts:
        if part.kind is StateKind.RECURRENT:
            after = [state.to(part.dtype) for stepped in replaced.values() for state in stepped.states]
            if len(after) != tokens:
                raise WorkerError("the mixer did not run its recurrence once: run its drafts token by token")
        else:
            joined = cache.joined.get(part.index)
            if joined is None:
                raise WorkerError("the mixer did not pass its inputs to the cache: run its drafts token by token")
            width, end = part.shape[-1], joined.shape[-1] - tokens + 1
            after = [joined[..., end + token - width : end + token] for token in range(tokens)]
        parts.append(after)
    return out, list(zip(*parts, strict=True))


def _seen(mixer: RecurrentMixer, tokens: int) -> tuple[str, tuple[Name, ...], frozenset[Name]] | None:
    """Return the one global to which a forward over ``tokens`` passes the state; None if there are more or fewer.

    The result is its name, its arguments, and its arguments with one entry for each token.
    """
    shape = (_PROBED[0], tokens)
    cache = StateCache(mixer, mixer.initial(_PROBED[0]), continues=True, keeps=True)
    (state,) = cache.layers.recurrent_states.values()
    found = list[tuple[str, tuple[Name, ...], frozenset[Name]]]()

    def watched(name: str, function: Function) -> Function:
        def call(*args: object, **kwargs: object) -> object:
            given = dict[Name, object]([*enumerate(args), *kwargs.items()])
            tensors = {at: one for at, one in given.items() if isinstance(one, torch.Tensor)}
            others = {at: one for at, one in tensors.items() if one is not state}
            if len(others) < len(tensors):
                sliced = frozenset(at for at, one in others.items() if one.dim() > 2 and one.shape[:2] == shape)
                found.append((name, tuple(given), sliced))
            return function(*args, **kwargs)

        return call

    functions = {name: watched(name, one) for name, one in functions_of(mixer.module).items()}
    hidden = next(mixer.module.parameters()).new_zeros(*shape, mixer.width)
    with torch.inference_mode():
        _call(mixer, hidden, cache, replaced=functions)
    return found[0] if len(found) == 1 else None
