"""Run a forward over 3 tokens to find a model's caches, to check the plan, and to see how rows can run.

The rows of a Step run in one of two ways:

    together   one flattened forward for all rows; the model gets every token's position, and attends through
               transformers' attention interface
    by row     one forward for each row; the model makes its own positions, biases and masks from a cache that reports
               the tokens of this one request, as transformers' caches do

Every model that runs on a standard cache runs by row, at the price of a forward for each row. A forward shows which way
a model supports (``forwards_of``). The self-check shows whether its results are right.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridkv.arguments import instance, instances
from hybridkv.errors import ConfigError, HybridKVError, UnsupportedModelError
from hybridkv.models import Layer, Model, read_model
from hybridkv.planner import Plan
from hybridkv.runner.attention import gather
from hybridkv.runner.attention.compressors import keeps_rows, keeps_states, place_of
from hybridkv.runner.attention.formulas import Attended, AttentionForm, attention_modules, eager_function, form_of
from hybridkv.runner.model_call import ModelCall, decode, is_encoder_decoder
from hybridkv.runner.states.passing import OwnStates, OwnStatesWatch
from hybridkv.runner.states.recurrent import MixerState, Outputs, RecurrentMixer, StateKind
from hybridkv.runner.step_context import EmptyCache, Place, StepContext
from hybridkv.spec_fields import Feature, Quantization, require_supported
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    Keeps,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from hybridkv.step import Csr, Step
from hybridkv.units import shown
from hybridkv.worker import PagePart, quantized_parts
from hybridkv.worker.codecs import dequantize, quantize

PROBE_TOKENS: Final = 3
"""Tokens of the forward that shows a model's caches; chosen by hand."""
Heads = tuple[int, torch.dtype]
"""Query heads of a layer, and the dtype of its queries."""
Key = TypeVar("Key", int, Place)
"""What tells the entries of a kind from each other."""

_RUNNABLE: Final = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    MambaSpec,
)


@contextmanager
def kept_attention(parts: Iterable[PreTrainedModel]) -> Iterator[None]:
    """Restore the attention of ``parts`` of a model at the end."""
    own = [(part, part.config._attn_implementation) for part in parts]
    try:
        yield
    finally:
        for part, name in own:
            if part.config._attn_implementation != name:
                part.set_attn_implementation(name)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run ``model`` with the attention function ``name``. Raises UnsupportedModelError if it cannot switch."""
    with kept_attention(_with_configs(model)):
        set_attention(model, name)
        yield


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make ``model`` call the attention function ``name``. Raises UnsupportedModelError if it cannot switch.

    Each part with a config of its own is switched by itself: a switch of the whole T5 does not reach its stacks.
    """
    for part in _with_configs(model):
        if part.config._attn_implementation == name:
            continue
        part.set_attn_implementation(name)
        if part.config._attn_implementation != name:
            raise _unsupported(
                f"{type(part).__name__} does not take its attention from transformers' AttentionInterface"
            )


def _unsupported(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{reason}, which is not supported: run this model with plain transformers")


def _with_configs(model: PreTrainedModel) -> Iterable[PreTrainedModel]:
    """Return a part of ``model`` for each config in it."""
    return {id(one.config): one for one in model.modules() if isinstance(one, PreTrainedModel)}.values()


class ProbeCache(EmptyCache):
    """Record the last keys and values of each layer, shapes and dtypes of states, and the modules that passed them.

    Attributes:
        updated: index of the layer that cached tokens last.
        taken: keys and values of each layer, by index.
        indexed: an indexer's keys of each layer that has one, by index.
        rows: values and gates of each compressor.
        pooled: states of each compressor.
        callers: the running modules that received the cache, outermost first.
        ran: all modules that ran.
        states: the states that each caller keeps for each layer.
        own: the modules with states of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.updated: int | None = None
        self.taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.indexed: dict[int, torch.Tensor] = {}
        self.rows: dict[Place, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pooled: dict[Place, torch.Tensor] = {}
        self.callers: list[_Call] = []
        self.ran: set[torch.nn.Module] = set()
        self.states: dict[tuple[_Call, int], dict[tuple[StateKind, int], MixerState]] = {}
        self.own: tuple[OwnStates, ...] = ()
        self._kept: list[torch.Tensor] = []
        self._outputs: dict[_Call, Outputs] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record keys and values [1, heads, tokens, width], and return them."""
        self.updated, self.taken[layer_idx] = layer_idx, (key_states, value_states)
        return key_states, value_states

    @property
    def attention(self) -> dict[int, tuple[PagePart, ...]]:
        """The page parts of a token, by layer index: one part where the keys are also the values."""
        kept = {layer: (keys,) if keys is values else (keys, values) for layer, (keys, values) in self.taken.items()}
        return {
            layer: tuple(PagePart((one.shape[1], one.shape[3]), one.dtype) for one in states)
            for layer, states in kept.items()
        }

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: object,
    ) -> torch.Tensor:
        """Record [1, channels, tokens], from which a cache keeps ``conv_kernel_size`` columns, and return it."""
        columns = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        return self._noted(conv_states, StateKind.CONV, layer_idx, state_idx, (*conv_states.shape[1:-1], columns))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """Record [1, *shape], and return it."""
        shape = tuple(recurrent_states.shape[1:])
        return self._noted(recurrent_states, StateKind.RECURRENT, layer_idx, state_idx, shape)

    def _noted(
        self, states: torch.Tensor, kind: StateKind, layer_idx: int, state_idx: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if not self.callers:
            raise _unsupported("states are kept outside of the modules that received the cache")
        kept = self.states.setdefault((self.callers[-1], layer_idx), {})
        kept[kind, state_idx] = MixerState(kind, state_idx, shape, states.dtype)
        self._kept.append(states)
        return states

    def leave(self, result: object) -> None:
        """Note the result of the innermost running caller, which ends."""
        self._outputs[self.callers.pop()] = _outputs(result, self._kept)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: no state is cached."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: no state is cached."""

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Record an indexer's keys [1, tokens, width], and return them."""
        self.indexed[layer_idx] = indexer_key_states
        return indexer_key_states

    def take_rows(
        self, place: Place, values: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Record a compressor's rows [1, tokens, width], and return none, as if no group ended."""
        self.rows[place] = (values, gates)
        return values[:, :0], gates[:, :0], 0

    def keep_states(self, place: Place, states: torch.Tensor) -> torch.Tensor:
        """Record a compressor's states [1, groups, width], and return them."""
        self.pooled[place] = states
        return states

    @property
    def compressors(self) -> dict[Place, tuple[PagePart, PagePart]]:
        """The page parts of a token's row and of a state, by compressor."""
        return {
            place: (
                PagePart((1, values.shape[2] + gates.shape[2]), values.dtype),
                PagePart((1, self.pooled[place].shape[2]), self.pooled[place].dtype),
            )
            for place, (values, gates) in self.rows.items()
        }

    @property
    def indexers(self) -> dict[int, tuple[PagePart, ...]]:
        """The page part of a token's indexer key, by layer index."""
        return {layer: (PagePart((1, keys.shape[2]), keys.dtype),) for layer, keys in self.indexed.items()}

    def mixers(self) -> tuple[RecurrentMixer, ...]:
        """Return the modules that kept states, in the order of their layers."""
        found = [
            RecurrentMixer(
                call.module,
                layer,
                call.cache_parameter,
                call.width,
                tuple(kept[key] for key in sorted(kept)),
                self._outputs.get(call),
            )
            for (call, layer), kept in self.states.items()
        ]
        if len({mixer.module for mixer in found}) < len(found):
            raise _unsupported("one module keeps the states of several layers")
        return tuple(sorted(found, key=lambda mixer: (mixer.layer_index, mixer.parts[0].kind, mixer.parts[0].index)))


def _outputs(result: object, kept: Iterable[torch.Tensor]) -> Outputs:
    """Return the shape of one token's output for each entry of a forward's result (RecurrentMixer.outputs)."""
    if not isinstance(result, tuple):
        return None
    shape = (1, PROBE_TOKENS)
    return tuple(
        tuple(one.shape[2:])
        if isinstance(one, torch.Tensor) and one.shape[:2] == shape and not any(one is state for state in kept)
        else None
        for one in result
    )


def _with_own_states(one: OwnStates) -> RecurrentMixer:
    """Return the mixer of a module with states of its own."""
    parts = tuple(
        MixerState(StateKind.RECURRENT, index, shape, dtype, initial)
        for index, (shape, dtype, initial) in enumerate(one.states)
    )
    return RecurrentMixer(one.module, one.layer_index, "", one.width, parts, _outputs(one.result, ()), one.passing)


class RoundedCache(ProbeCache):
    """Returns keys and values as quantized pages would hold them, without pages.

    Args:
        forms: the quantization of each layer that has one, by index.
    """

    def __init__(self, forms: Mapping[int, Quantization]) -> None:
        super().__init__()
        self._forms = forms

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [1, heads, tokens, width], rounded."""
        form = self._forms.get(layer_idx)
        if form is None:
            return key_states, value_states
        keys, values = (dequantize(form, *quantize(form, one), one.dtype) for one in (key_states, value_states))
        return keys, values


def rounded_logits(model: PreTrainedModel, ids: torch.Tensor, forms: Mapping[int, Quantization]) -> torch.Tensor:
    """Return the logits after each of int64[tokens] ``ids``, [tokens, vocabulary], with a RoundedCache."""
    cache, positions = RoundedCache(forms), torch.arange(len(ids), device=ids.device)
    with attention_implementation(model, "eager"), _callers(model, cache):
        return ModelCall(model).logits_after(ids, positions, cache, positions)


@dataclass(frozen=True, slots=True)
class _Call:
    """A module's forward that received the cache, the name of that argument, and the width of the module's input."""

    module: torch.nn.Module
    cache_parameter: str
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The caches of a model.

    Attributes:
        attention: page parts of a token, by layer index.
        mixers: the modules that keep states in the cache.
        cross: page parts of a token of the encoder's output, by layer index; empty without cross attention.
        indexers: page part of a token's key in an indexer, by layer index; empty without indexers.
        compressors: page parts of a token's row and of a state, by compressor; empty without compressors.
        takes_positions: whether the forward takes the positions of tokens.
        ran: modules that ran in the forward.
        own: modules that may keep states of their own. Modules may keep other tensors, too, so only layers that the
            plan gives states are run from pages.
    """

    attention: Mapping[int, tuple[PagePart, ...]]
    mixers: tuple[RecurrentMixer, ...]
    cross: Mapping[int, tuple[PagePart, ...]] = field(default_factory=dict)
    indexers: Mapping[int, tuple[PagePart, ...]] = field(default_factory=dict)
    compressors: Mapping[Place, tuple[PagePart, PagePart]] = field(default_factory=dict)
    takes_positions: bool = True
    ran: frozenset[torch.nn.Module] = frozenset()
    own: tuple[RecurrentMixer, ...] = ()


def probe(model: PreTrainedModel) -> Probed:
    """Find the cache of every layer of ``model`` by a forward over PROBE_TOKENS tokens.

    Raises UnsupportedModelError for a model that caches through anything but ``update``, ``update_indexer``,
    ``update_conv_state`` and ``update_recurrent_state`` of the cache it is given, or as states/passing.py says.
    """
    cache, crossed = ProbeCache(), ProbeCache()
    with attention_implementation(model, "eager"), _callers(model, cache), torch.inference_mode():
        try:
            takes_positions = _forward(model, cache, crossed)
        except (HybridKVError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model may raise any error for a cache that it does not expect
            reason = f"{type(model).__name__} does not run on a cache of keys, values and states ({error})"
            raise _unsupported(reason) from error
    if not cache.taken and not cache.states and not cache.own:
        raise _unsupported(f"{type(model).__name__} cached nothing in a forward")
    return Probed(
        cache.attention,
        cache.mixers(),
        crossed.attention,
        cache.indexers,
        cache.compressors,
        takes_positions,
        frozenset(cache.ran),
        tuple(map(_with_own_states, cache.own)),
    )


class FormNotes:
    """Runs and records every attention of a forward with ``cache``, which returns the keys and values that it gets.

    Attributes:
        forms: the form of each module; modules without a known form run their own attention.
    """

    def __init__(self, cache: ProbeCache) -> None:
        self.forms: dict[torch.nn.Module, AttentionForm] = {}
        self._cache = cache
        self._seen: dict[int | None, dict[torch.nn.Module, set[Heads | None]]] = {}

    def __call__(self, module: torch.nn.Module, states: Attended, handed: Mapping[str, Any]) -> torch.Tensor:
        """Record the form of ``module``, and attend."""
        eager, layer = eager_function(module), self._cache.updated
        if not any(module in seen for seen in self._seen.values()):
            form = form_of(module, eager, states, handed)
            if form is not None:
                self.forms[module] = form
        heads = None
        if layer is not None:
            cached = self._cache.taken[layer][0]
            if states.key.shape == cached.shape and states.key.data_ptr() == cached.data_ptr():
                heads = (states.query.shape[1], states.query.dtype)
        self._seen.setdefault(layer, {}).setdefault(module, set()).add(heads)
        mask = states.query.new_zeros((1, 1, states.query.shape[2], states.key.shape[2]))  # hides no token
        return eager(module, *states, mask, **handed)[0]

    @property
    def layers(self) -> dict[int, Heads | None]:
        """The layers in which all attention modules have a known form, by index; their contexts may come in parts.

        The value is the number and dtype of query heads of a layer that attends to its keys as they were cached: a
        kernel may read such keys from pages. It is None for other layers.
        """
        found = dict[int, Heads | None]()
        for layer, seen in self._seen.items():
            if layer is not None and seen.keys() <= self.forms.keys():
                heads = set[Heads | None]().union(*seen.values())
                found[layer] = heads.pop() if len(heads) == 1 else None
        return found


def forms_of(model: PreTrainedModel, context: StepContext) -> FormNotes:
    """Find the attention forms of ``model``, which runs with ``context``, by a forward over PROBE_TOKENS tokens.

    The result is empty for an encoder-decoder.
    """
    cache = ProbeCache()
    notes = FormNotes(cache)
    if is_encoder_decoder(model):
        return notes
    context.noting = notes
    try:
        with _callers(model, cache), torch.inference_mode():
            _forward(model, cache, cache)
    finally:
        context.noting = None
    return notes


def _forward(model: PreTrainedModel, cache: ProbeCache, crossed: ProbeCache) -> bool:
    """Run PROBE_TOKENS tokens, and as many of an encoder-decoder's encoder. Return whether it takes positions."""
    ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(PROBE_TOKENS, device=model.device)
    if is_encoder_decoder(model):
        encoded = torch.zeros((1, PROBE_TOKENS, model.config.hidden_size), dtype=model.dtype, device=model.device)
        decode(model, ids, positions, encoded, caches=(cache, crossed))
        return True
    call = ModelCall(model)
    model(input_ids=ids[None], use_cache=True, **call.arguments(cache, positions[None]))
    return call.takes_positions


@contextmanager
def _callers(model: PreTrainedModel, cache: ProbeCache) -> Iterator[None]:
    """Record in ``cache.callers`` the running modules of ``model`` that received the cache, outermost first.

    Record in ``cache.ran`` all modules that ran, and in ``cache.own`` the ones with states of their own.
    """
    watch = OwnStatesWatch(model)

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache.ran.add(module)
        parameters = list(inspect.signature(module.forward).parameters)
        named = dict(zip(parameters, args, strict=False)) | kwargs
        name = next((name for name, value in named.items() if value is cache), None)
        if name is not None:
            hidden = named.get(parameters[0])
            width = hidden.shape[-1] if isinstance(hidden, torch.Tensor) else 0
            cache.callers.append(_Call(module, name, width))
        watch.enter(module, named, named.get(parameters[0]) if parameters else None)

    def leave(module: torch.nn.Module, _: object, result: object) -> None:
        if cache.callers and cache.callers[-1].module is module:
            cache.leave(result)
        watch.leave(module, result)

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        cache.own = watch.found()


@dataclass(frozen=True, slots=True)
class Stored:
    """The form of keys and values in pages.

    Attributes:
        kv_dtype: name of a Quantization; None for the dtype of the model.
        skipped: layers without quantization, as ``read_model`` takes them.

    Raises:
        ConfigError: ``kv_dtype`` names no Quantization, or ``skipped`` is not a sequence of strings.
    """

    kv_dtype: str | None = None
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and Quantization.named(instance("kv_dtype", self.kv_dtype, str)) is None:
            raise ConfigError(
                f"the runner stores keys and values in the model's dtype or as {', '.join(Quantization)}, got "
                f"{shown(self.kv_dtype)}: use one of these"
            )
        object.__setattr__(self, "skipped", tuple(instances("skipped", self.skipped, str)))

    @classmethod
    def of_plan(cls, plan: Plan) -> Stored:
        """Return the form that a plan has. O(layers).

        Args:
            plan: a plan of the model.

        Raises:
            ConfigError: ``plan`` is not a Plan.
        """
        instance("plan", plan, Plan)
        form, forms = Quantization.named(plan.model.dtype), forms_of_layers(plan.model)
        attending = {one.index for one in plan.model.layers if isinstance(one.spec, AttentionSpec)}
        return AS_COMPUTED if form is None else cls(form, tuple(map(str, sorted(attending - forms.keys()))))


AS_COMPUTED: Final = Stored()
"""Keys and values in the dtype of the model."""


def planner_model(
    model: PreTrainedModel,
    *,
    block_size: int,
    name: str | None = None,
    num_speculative_tokens: int = 0,
    stored: Stored = AS_COMPUTED,
) -> Model:
    """Read the planner's view of ``model`` from its config, with the dtype of its weights.

    The config has the dtype of a checkpoint, which may have been cast. Assumed values are left out of ``read_from``,
    because page_layout later checks them against a forward.

    Args:
        model: the model.
        block_size: tokens of a block.
        name: name of the model in messages; None for the name in its config.
        num_speculative_tokens: drafts of a step for which recurrent layers have room.
        stored: the form of keys and values in pages.

    Raises:
        ConfigError: no layer can have the form ``stored``.
        UnsupportedModelError: as ``require_runnable``.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    source = {**model.config.to_dict(), "dtype": dtype}
    if isinstance(text := source.get("text_config"), dict):
        source["text_config"] = {**text, "dtype": dtype}
    if name is not None:
        source["_name_or_path"] = name
    planned = read_model(
        source,
        block_size=block_size,
        dtype=dtype if stored.kv_dtype is None else stored.kv_dtype,
        dtype_skip_layers=stored.skipped,
        backend="transformers",
        num_speculative_tokens=num_speculative_tokens,
    )
    require_runnable(planned)
    return replace(planned, read_from=tuple(fact for fact in planned.read_from if fact not in planned.assumptions))


def require_runnable(planned: Model) -> None:
    """Raise UnsupportedModelError, with their names, for layers that the runner cannot run.

    It runs attention over all tokens, a window or a chunk, MLA, indexers, compressors, cross attention, and recurrent
    states.
    """
    kinds = [(layer.name, type(layer.spec)) for layer in planned.layers]
    wrong = [f"{name} ({kind.__name__})" for name, kind in kinds if kind not in _RUNNABLE]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UnsupportedModelError(
            f"{planned.name} can be planned, but not run: {wrong[0]}{more} of {len(planned.layers)} layers cannot run; "
            "use a model of attention (full, window, chunk, MLA, cross) and recurrent layers"
        )
    specs = [layer.spec for layer in planned.layers]
    others = [one for one in specs if one.features != {Feature.QUANTIZED} or one.keeps is Keeps.ENCODER]
    require_supported(others, f"the runner of {planned.name}", {Feature.INDEXER, Feature.RATE})


def page_layout(planned: Model, probed: Probed) -> dict[str, tuple[PagePart, ...]]:
    """Return the page parts of every planned layer: keys and values of a token, or the states of a recurrent layer.

    Raises ConfigError unless the forward cached in exactly the planned layers, tokens and states, and as many bytes
    in each.
    """
    layers, tokens, forms = planned.layers, {Keeps.TOKENS, Keeps.WINDOW}, forms_of_layers(planned)
    kept = {at: _stored(planned, forms[at], of) if at in forms else of for at, of in probed.attention.items()}
    attending = {one.index: one for one in layers if one.spec.keeps in tokens and attends(one)}
    indexing = {one.index: one for one in layers if is_indexer(one)}
    rows, states = ({place_of(one): one for one in layers if keeps(one)} for keeps in (keeps_rows, keeps_states))
    encoded = {one.index: one for one in layers if one.spec.keeps is Keeps.ENCODER}
    return (
        _checked(planned, attending, "caches", kept)
        | _checked(planned, indexing, "caches an indexer's keys", probed.indexers)
        | _checked(planned, rows, "caches rows", {place: parts[:1] for place, parts in probed.compressors.items()})
        | _checked(planned, states, "compresses", {place: parts[1:] for place, parts in probed.compressors.items()})
        | _checked(planned, encoded, "reads an encoder's output", probed.cross)
        | {name: _page_parts(mixers) for name, mixers in state_layout(planned, probed).items()}
    )


def _stored(planned: Model, form: Quantization, parts: tuple[PagePart, ...]) -> tuple[PagePart, ...]:
    """Return the parts of a page that holds ``parts`` as codes."""
    if len(parts) != 2:
        raise UnsupportedModelError(
            f"{planned.name} keeps keys that are also its values, which {form} does not support: drop kv_dtype"
        )
    return quantized_parts(form, parts)


def forms_of_layers(planned: Model) -> dict[int, Quantization]:
    """Return the quantization of each layer that has one, by its index."""
    specs = [(layer.index, layer.spec) for layer in planned.layers if isinstance(layer.spec, AttentionSpec)]
    return {index: spec.quantization for index, spec in specs if spec.quantization is not None}


def state_layout(planned: Model, probed: Probed) -> dict[str, tuple[RecurrentMixer, ...]]:
    """Return the mixers of every planned layer that keeps a state; their parts follow each other in its page.

    Raises ConfigError unless the forward kept states in exactly the planned layers, and as many bytes in each.
    """
    keeping = {one.index: one for one in planned.layers if one.spec.keeps is Keeps.STATE}
    missing = keeping.keys() - {mixer.layer_index for mixer in probed.mixers}
    mixers = dict[int, tuple[RecurrentMixer, ...]]()
    for mixer in (*probed.mixers, *(one for one in probed.own if one.layer_index in missing)):
        mixers[mixer.layer_index] = (*mixers.get(mixer.layer_index, ()), mixer)
    found = {index: _page_parts(mine) for index, mine in mixers.items()}
    states = _checked(planned, keeping, "keeps states", found)
    return {layer.name: mixers[layer.index] for layer in planned.layers if layer.name in states}


def is_indexer(layer: Layer) -> bool:
    """Return whether ``layer`` keeps an indexer's key of each token, next to the attention of the same index."""
    return Feature.INDEXER in layer.spec.features and not keeps_states(layer)


def attends(layer: Layer) -> bool:
    """Return whether attention itself caches in ``layer``, and neither an indexer nor a compressor."""
    return not (is_indexer(layer) or keeps_rows(layer) or keeps_states(layer))


def _page_parts(mixers: Iterable[RecurrentMixer]) -> tuple[PagePart, ...]:
    return tuple(PagePart(part.shape, part.dtype) for mixer in mixers for part in mixer.parts)


def _checked(
    planned: Model, layers: Mapping[Key, Layer], does: str, found: Mapping[Key, tuple[PagePart, ...]]
) -> dict[str, tuple[PagePart, ...]]:
    """Return the page parts ``found`` in ``layers``, by name. does: a verb for the message."""
    if layers.keys() != found.keys():
        raise ConfigError(
            f"{planned.name}: the plan has layers {sorted(layers)}, but a forward {does} in layers {sorted(found)}: "
            "correct the config, which does not describe this model"
        )
    for index, layer in layers.items():
        tokens = layer.spec.num_states if isinstance(layer.spec, AttentionSpec) else 1
        held = tokens * sum(part.token_bytes for part in found[index])
        if held != layer.spec.page_size_bytes:
            shapes = " and ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in found[index])
            what = f"states {shapes}" if layer.spec.keeps is Keeps.STATE else f"{tokens} tokens of {shapes}"
            raise ConfigError(
                f"{planned.name}, layer {layer.name}: the plan has {layer.spec.page_size_bytes} bytes a page, but a "
                f"forward caches {held} ({what}): correct the config, which does not describe this model"
            )
    return {layer.name: found[index] for index, layer in layers.items()}


# -- how a Step becomes forwards


class Forwards(StrEnum):
    """How a Step becomes forwards: one for all rows, or one for each row."""

    TOGETHER = "together"
    BY_ROW = "by row"


def forwards_of(model: PreTrainedModel, probed: Probed) -> Forwards:
    """Return TOGETHER if every attention layer takes positions and gathered contexts, else BY_ROW.

    An indexer scores all keys that its cache returns, and so does attention with the states of a compressor. So rows of
    a model with indexers or compressors run one by one.
    Raises UnsupportedModelError for attention in both directions, and for encoder-decoders that cannot run together.
    Attention that is not causal in the decoder of an encoder-decoder is cross attention, which is allowed.
    """
    crosses = is_encoder_decoder(model)
    modules = [one for one in attention_modules(model.get_decoder() if crosses else model) if one in probed.ran]
    for module in modules:
        if not (module.is_causal or crosses):
            raise _unsupported(f"{type(module).__name__} attends in both directions")
    if probed.indexers or probed.compressors or (probed.attention and not probed.takes_positions):
        return Forwards.BY_ROW
    gather.register()
    try:
        for module in modules:
            eager_function(module)
        with attention_implementation(model, gather.NAME):
            pass
    except UnsupportedModelError:
        if crosses:
            raise
        return Forwards.BY_ROW
    return Forwards.TOGETHER


def rows_of(step: Step) -> Iterator[Step]:
    """Yield a one-row Step for each row, with its tokens and states but without the work before the forward."""
    for row in range(len(step)):
        mine = slice(row, row + 1)
        writes = step.state_writes[step.state_writes[:, 0] == row].copy()
        writes[:, 0] = 0
        yield replace(
            step,
            rows=step.rows[mine],
            num_computed=step.num_computed[mine],
            num_scheduled=step.num_scheduled[mine],
            samples=step.samples[mine],
            token_ids=_row(step.token_ids, row),
            drafts=_row(step.drafts, row),
            finished_rows=np.empty(0, np.int32),
            new_rows=(),
            zero=np.empty((0, 2), np.int32),
            copies=(),
            state_read=step.state_read[mine],
            state_writes=writes,
        )


def _row(lists: Csr, row: int) -> Csr:
    """Return list ``row`` of ``lists`` as a Csr of its own."""
    values = lists[row]
    return Csr(np.array([0, len(values)], np.int64), values)
