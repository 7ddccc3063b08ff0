"""A forward over 3 tokens that shows what a model keeps, and the proof that the plan is of this model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hybridkv.errors import ConfigError, HybridKVError, UnsupportedModelError
from hybridkv.models import Layer, Model, read_model
from hybridkv.runner.attention.attention_form import FormNotes
from hybridkv.runner.encoder_decoder import decode, is_encoder_decoder
from hybridkv.runner.model_call import ModelCall
from hybridkv.runner.states.recurrent import MixerState, RecurrentMixer, StateKind
from hybridkv.runner.step_context import StepContext
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from hybridkv.worker import PagePart

PROBE_TOKENS: Final = 3

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
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """``model`` with the attention function ``name`` for a while; UnsupportedModelError when it cannot switch."""
    before = {id(one.config): (one, one.config._attn_implementation) for one in _with_configs(model)}
    try:
        set_attention(model, name)
        yield
    finally:
        for part, own in before.values():
            if part.config._attn_implementation != own:
                part.set_attn_implementation(own)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make ``model`` call the attention function ``name``. Raises UnsupportedModelError when it cannot switch.

    The stacks of T5 have configs of their own, which a switch of the whole does not reach.
    """
    for part in {id(one.config): one for one in _with_configs(model)}.values():
        if part.config._attn_implementation == name:
            continue
        part.set_attn_implementation(name)
        if part.config._attn_implementation != name:
            raise UnsupportedModelError(
                f"{type(part).__name__} does not take its attention from transformers' AttentionInterface: not "
                "supported"
            )


def _with_configs(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Parts of ``model`` that have a config."""
    return (one for one in model.modules() if isinstance(one, PreTrainedModel))


class ProbeCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Keeps nothing but the shapes and dtypes of what each layer hands over, and which module did.

    updated, keys: the index of the layer that cached tokens last, and which.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.updated: int | None = None
        self.keys: torch.Tensor | None = None
        self.attention: dict[int, tuple[PagePart, ...]] = {}
        self.callers: list[_Call] = []
        self.ran: set[torch.nn.Module] = set()
        self.states: dict[tuple[_Call, int], dict[tuple[StateKind, int], MixerState]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note [1, heads, tokens, width] of keys and values and hand them back."""
        self.updated, self.keys = layer_idx, key_states
        self.attention[layer_idx] = tuple(
            PagePart((states.shape[1], states.shape[3]), states.dtype) for states in (key_states, value_states)
        )
        return key_states, value_states

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: object,
    ) -> torch.Tensor:
        """Note [1, channels, tokens], of which as many columns are kept as the kernel is wide, and hand it back."""
        columns = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(StateKind.CONV, layer_idx, state_idx, (*conv_states.shape[1:-1], columns), conv_states.dtype)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: object
    ) -> torch.Tensor:
        """Note [1, *shape] and hand it back."""
        shape = tuple(recurrent_states.shape[1:])
        self._note(StateKind.RECURRENT, layer_idx, state_idx, shape, recurrent_states.dtype)
        return recurrent_states

    def _note(
        self, kind: StateKind, layer_idx: int, state_idx: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        if not self.callers:
            raise UnsupportedModelError(
                "states are kept outside of the modules that were handed the cache: not supported"
            )
        kept = self.states.setdefault((self.callers[-1], layer_idx), {})
        kept[kind, state_idx] = MixerState(kind, state_idx, shape, dtype)

    def has_previous_state(self, *_args: object, **_kwargs: object) -> bool:
        """Nothing is cached."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing is cached."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing is cached."""

    def update_indexer(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Pages have no room for them."""
        raise UnsupportedModelError("an indexer's keys are kept beside keys and values: not supported")

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is."""
        del layer_idx
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is cached."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As long as the query."""
        del layer_idx
        return query_length, 0

    def mixers(self) -> tuple[RecurrentMixer, ...]:
        """The modules that kept states, in the order of their layers."""
        found = [
            RecurrentMixer(
                call.module, layer, call.cache_parameter, call.width, tuple(kept[key] for key in sorted(kept))
            )
            for (call, layer), kept in self.states.items()
        ]
        if len({mixer.module for mixer in found}) < len(found):
            raise UnsupportedModelError("one module keeps the states of several layers: not supported")
        return tuple(sorted(found, key=lambda mixer: mixer.layer_index))


@dataclass(frozen=True, slots=True)
class _Call:
    """A module's forward that was handed the cache, as which argument, and the width of its input."""

    module: torch.nn.Module
    cache_parameter: str
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What a model keeps. attention: the parts of a token by layer index. mixers: the modules that keep states.

    cross: the parts of a token of the encoder's output by layer index, none without cross attention.
    takes_positions: whether the forward could be told where tokens stand. ran: modules that took part.
    """

    attention: Mapping[int, tuple[PagePart, ...]]
    mixers: tuple[RecurrentMixer, ...]
    cross: Mapping[int, tuple[PagePart, ...]] = field(default_factory=dict)
    takes_positions: bool = True
    ran: frozenset[torch.nn.Module] = frozenset()


def probe(model: PreTrainedModel) -> Probed:
    """What every layer of ``model`` keeps, from a forward over PROBE_TOKENS tokens.

    Raises UnsupportedModelError for a model that caches through anything but ``update``, ``update_conv_state``
    and ``update_recurrent_state`` of the cache it is given.
    """
    cache, crossed = ProbeCache(), ProbeCache()
    with attention_implementation(model, "eager"), _callers(model, cache), torch.inference_mode():
        try:
            takes_positions = _forward(model, cache, crossed)
        except (HybridKVError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model that gets a cache which it does not expect raises anything
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run on a cache of keys, values and states: not supported ({error})"
            ) from error
    if not cache.attention and not cache.states:
        raise UnsupportedModelError(f"{type(model).__name__} cached nothing in a forward: not supported")
    return Probed(cache.attention, cache.mixers(), crossed.attention, takes_positions, frozenset(cache.ran))


def forms_of(model: PreTrainedModel, context: StepContext) -> FormNotes:
    """What the attention of ``model``, which runs with ``context``, computes: from a forward over PROBE_TOKENS tokens.

    Of an encoder-decoder nothing is known.
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
    """PROBE_TOKENS tokens, behind an encoder's output of as many where there is one; whether positions were taken."""
    ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(PROBE_TOKENS, device=model.device)
    if is_encoder_decoder(model):
        encoded = torch.zeros((1, PROBE_TOKENS, model.config.hidden_size), dtype=model.dtype, device=model.device)
        decode(model, ids, positions, encoded, caches=(cache, crossed))
        return True
    call = ModelCall.of(model)
    model(input_ids=ids[None], use_cache=True, **call.arguments(cache, positions[None]))
    return call.takes_positions


@contextmanager
def _callers(model: PreTrainedModel, cache: ProbeCache) -> Iterator[None]:
    """Keep in ``cache.callers`` which modules of ``model`` that were handed the cache are running, outermost first.

    And in ``cache.ran`` all that ran.
    """

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache.ran.add(module)
        parameters = list(inspect.signature(module.forward).parameters)
        named = dict(zip(parameters, args, strict=False)) | kwargs
        name = next((name for name, value in named.items() if value is cache), None)
        if name is not None:
            hidden = named.get(parameters[0])
            width = hidden.shape[-1] if isinstance(hidden, torch.Tensor) else 0
            cache.callers.append(_Call(module, name, width))

    def leave(module: torch.nn.Module, *_: object) -> None:
        if cache.callers and cache.callers[-1].module is module:
            cache.callers.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def planner_model(
    model: PreTrainedModel, *, block_size: int, name: str | None = None, num_speculative_tokens: int = 0
) -> Model:
    """``planner_view`` of a model that can be run. Raises UnsupportedModelError as require_runnable does."""
    planned = planner_view(model, block_size=block_size, name=name, num_speculative_tokens=num_speculative_tokens)
    require_runnable(planned)
    return planned


def planner_view(
    model: PreTrainedModel, *, block_size: int, name: str | None = None, num_speculative_tokens: int = 0
) -> Model:
    """The planner's view of ``model``: from its config, with the dtype of its weights.

    num_speculative_tokens: drafts a step for which recurrent layers have room.
    The config's own dtype is that of a checkpoint, which may have been cast. Nothing is assumed: what layers keep is
    compared with what a forward leaves behind (page_layout).
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
        dtype=dtype,
        backend="transformers",
        num_speculative_tokens=num_speculative_tokens,
    )
    return replace(planned, read_from=tuple(fact for fact in planned.read_from if fact not in planned.assumptions))


def require_runnable(planned: Model) -> None:
    """Raise UnsupportedModelError, naming them, for layers that the runner would run wrongly.

    It runs attention over all tokens, a window or a chunk, MLA, cross attention, and recurrent states.
    """
    wrong = [f"{layer.name} ({type(layer.spec).__name__})" for layer in planned.layers if not _is_runnable(layer.spec)]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UnsupportedModelError(
            f"{planned.name} can be planned, but not run yet: {wrong[0]}{more} of {len(planned.layers)} layers; "
            "attention (full, window, chunk, MLA, cross) and recurrent layers can be run"
        )


def _is_runnable(spec: KVCacheSpec) -> bool:
    """Whether ``spec`` is of a kind that the backends know, none of its relatives."""
    return type(spec) in _RUNNABLE


def page_layout(planned: Model, probed: Probed) -> dict[str, tuple[PagePart, ...]]:
    """The page parts of every planned layer: keys and values of a token, or the states of a recurrent layer.

    Raises ConfigError unless the forward cached in exactly the planned layers, tokens and states, and as many bytes
    in each.
    """
    own = {layer.index: layer for layer in planned.layers if layer.spec.keeps in {Keeps.TOKENS, Keeps.WINDOW}}
    cross = {layer.index: layer for layer in planned.layers if layer.spec.keeps is Keeps.ENCODER}
    layout = _token_layout(planned.name, "caches", own, probed.attention)
    layout |= _token_layout(planned.name, "reads an encoder's output", cross, probed.cross)
    states = state_layout(planned, probed)
    return layout | {
        name: tuple(PagePart(part.shape, part.dtype) for part in mixer.parts) for name, mixer in states.items()
    }


def _token_layout(
    name: str, does: str, planned: Mapping[int, Layer], probed: Mapping[int, tuple[PagePart, ...]]
) -> dict[str, tuple[PagePart, ...]]:
    """The parts of a token in every one of ``planned``, which the forward must have shown. does: for the message."""
    _require_layers(name, does, set(planned), set(probed))
    for index, layer in planned.items():
        parts = probed[index]
        held = layer.spec.block_size * sum(part.token_bytes for part in parts)
        _require_bytes(name, layer, held, f"{layer.spec.block_size} tokens of {_shapes(parts)}")
    return {layer.name: probed[index] for index, layer in planned.items()}


def state_layout(planned: Model, probed: Probed) -> dict[str, RecurrentMixer]:
    """The mixer of every planned layer that keeps a state; its parts lie in the layer's page one after the other.

    Raises ConfigError unless the forward kept states in exactly the planned layers, and as many bytes in each.
    """
    states = {layer.index: layer for layer in planned.layers if layer.spec.keeps is Keeps.STATE}
    mixers = {mixer.layer_index: mixer for mixer in probed.mixers}
    _require_layers(planned.name, "keeps states", set(states), set(mixers))
    for index, layer in states.items():
        parts = mixers[index].parts
        _require_bytes(planned.name, layer, sum(part.nbytes for part in parts), f"states {_shapes(parts)}")
    return {layer.name: mixers[index] for index, layer in states.items()}


def _require_layers(name: str, does: str, planned: set[int], probed: set[int]) -> None:
    if planned != probed:
        raise ConfigError(
            f"{name}: planned layers {sorted(planned)}, but a forward {does} in layers {sorted(probed)}: "
            "the config does not describe this model"
        )


def _require_bytes(name: str, layer: Layer, held: int, what: str) -> None:
    if held != layer.spec.page_size_bytes:
        raise ConfigError(
            f"{name}, layer {layer.name}: planned {layer.spec.page_size_bytes} bytes a page, but a forward "
            f"caches {held} ({what}): the config does not describe this model"
        )


def _shapes(parts: Sequence[PagePart] | Sequence[MixerState]) -> str:
    return " and ".join(f"{part.shape} {str(part.dtype).removeprefix('torch.')}" for part in parts)
