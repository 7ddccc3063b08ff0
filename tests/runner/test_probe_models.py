"""The probe of every tiny model against the planner and against what transformers' own cache holds."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import Model, read_model
from hybridkv.runner import TINY_MODELS, tiny_model
from hybridkv.runner.model_call import ModelCall
from hybridkv.runner.probe import Probed, page_layout, planner_model, probe, state_layout
from hybridkv.runner.states.recurrent import MixerState, RecurrentMixer, StateKind
from hybridkv.specs import Keeps, MambaSpec
from hybridkv.worker import PagePart

torch.set_num_threads(1)

RECURRENT = [
    *("mamba", "falcon_mamba", "mamba2", "bamba", "jamba", "falcon_h1", "zamba", "zamba2", "granite_hybrid"),
    *("nemotron_h", "qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2"),
]
DTYPES = (torch.float32, torch.bfloat16)


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(name).to(dtype)


def planned_of(model: PreTrainedModel) -> Model:
    dtype = str(model.dtype).removeprefix("torch.")
    return read_model(model.config.to_dict(), backend="transformers", dtype=dtype, block_size=16)


def own_cache(model: PreTrainedModel, tokens: int) -> DynamicCache:
    held = DynamicCache(config=model.config)
    positions = torch.arange(tokens)[None]
    with torch.inference_mode():
        model(input_ids=positions + 40, use_cache=True, **ModelCall(model).arguments(held, positions))
    return held


def states_in(layer: object) -> Iterator[tuple[StateKind, int, tuple[int, ...], torch.dtype]]:
    for kind in StateKind:
        for index, state in getattr(layer, f"{kind}_states", {}).items():
            if state is not None:
                yield kind, index, tuple(state.shape[1:]), state.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_probe_finds_the_cache_parts_of_transformers(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    probed, held = probe(model), own_cache(model, 9)
    attention = {
        at: tuple(PagePart((one.shape[1], one.shape[3]), one.dtype) for one in (layer.keys, layer.values))
        for at, layer in enumerate(held.layers)
        if getattr(layer, "keys", None) is not None
    }
    assert probed.attention == attention
    states = {at: list(states_in(layer)) for at, layer in enumerate(held.layers)}
    assert {
        mixer.layer_index: [(part.kind, part.index, part.shape, part.dtype) for part in mixer.parts]
        for mixer in probed.mixers
    } == {at: found for at, found in states.items() if found}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_planned_page_bytes_match_the_probe(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    planned, probed = planned_of(model), probe(model)
    pages, states = page_layout(planned, probed), state_layout(planned, probed)
    assert set(pages) == {layer.name for layer in planned.layers}
    assert set(states) == {layer.name for layer in planned.layers if layer.spec.keeps is Keeps.STATE}
    for layer in planned.layers:
        if isinstance(layer.spec, MambaSpec):
            (mixer,) = states[layer.name]
            assert layer.spec.page_size_bytes == sum(part.token_bytes for part in pages[layer.name])
            assert pages[layer.name] == tuple(PagePart(part.shape, part.dtype) for part in mixer.parts)
            assert layer.spec.shapes == tuple(part.shape for part in mixer.parts)
            assert layer.spec.dtypes == tuple(str(part.dtype).removeprefix("torch.") for part in mixer.parts)
            assert model.get_submodule(layer.name) is mixer.module
        else:
            assert layer.spec.page_size_bytes == 16 * sum(part.token_bytes for part in pages[layer.name])


def test_probe_does_not_change_the_model() -> None:
    model = tiny_model("falcon_h1")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    probe(model)
    assert model.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_probe_finds_the_cache_argument_of_mixers() -> None:
    names = {name: {mixer.cache_parameter for mixer in probe(model_of(name)).mixers} for name in RECURRENT}
    newest = "cache" in inspect.signature(model_of("llama").forward).parameters  # transformers 5.24
    older = {name: "past_key_values" if name == "lfm2" else "cache_params" for name in RECURRENT}
    assert names == {name: {"cache" if newest else older[name]} for name in RECURRENT}


def config_of(model_type: str, **fields: object) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
    special = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **special, **fields)).eval()


def test_model_that_caches_nothing_is_rejected() -> None:
    model = config_of("openai-gpt", num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match="cached nothing in a forward"):
        probe(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class Shared(torch.nn.Module):
    """One module for the states of two layers."""

    def forward(self, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        for layer in (0, 1):
            cache.update_recurrent_state(hidden.mean(dim=1), layer)
        return hidden


class Outside(torch.nn.Module):
    """Keeps states of several kinds in a module that was handed the cache by position, inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Several()

    def forward(self, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        out: torch.Tensor = self.inner(hidden, cache)
        cache.update_recurrent_state(out.mean(dim=1), 7)
        return out


class Several(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, memory: Cache) -> torch.Tensor:
        memory.update_recurrent_state(hidden.mean(dim=1), 3, state_idx=1)
        memory.update_recurrent_state(hidden.double().mean(dim=1)[:, :2], layer_idx=3)
        memory.update_conv_state(hidden.transpose(1, 2), 3, conv_kernel_size=5)
        return hidden


def with_mixer(mixer: torch.nn.Module) -> PreTrainedModel:
    """A llama whose first MLP is followed by ``mixer``, handed the cache."""
    model = tiny_model("llama")
    layer = model.model.layers[0]
    forward = layer.forward

    def extended(*args: object, **kwargs: object) -> torch.Tensor:
        cache = next(one for one in kwargs.values() if isinstance(one, Cache))  # its name depends on the version
        out: torch.Tensor = mixer(forward(*args, **kwargs), cache)
        return out

    layer.forward = extended
    layer.add_module("mixer", mixer)
    return model


def test_probe_assigns_states_to_the_innermost_module() -> None:
    model = with_mixer(Outside())
    outer = model.model.layers[0].mixer
    mixers = probe(model).mixers
    parts = (
        MixerState(StateKind.CONV, 0, (64, 5), torch.float32),
        MixerState(StateKind.RECURRENT, 0, (2,), torch.float64),
        MixerState(StateKind.RECURRENT, 1, (64,), torch.float32),
    )
    assert [(mixer.module, mixer.layer_index, mixer.cache_parameter, mixer.width) for mixer in mixers] == [
        (outer.inner, 3, "memory", 64),
        (outer, 7, "cache", 64),
    ]
    assert [mixer.parts for mixer in mixers] == [parts, (MixerState(StateKind.RECURRENT, 0, (64,), torch.float32),)]


def test_module_with_states_of_two_layers_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="one module keeps the states of several layers"):
        probe(with_mixer(Shared()))


def changed(mixers: tuple[RecurrentMixer, ...], part: int, **fields: object) -> tuple[RecurrentMixer, ...]:
    parts = list(mixers[1].parts)
    parts[part] = replace(parts[part], **fields)  # type: ignore[arg-type]  # any field
    return mixers[0], replace(mixers[1], parts=tuple(parts)), *mixers[2:]


def test_plan_of_other_states_is_rejected() -> None:
    model = model_of("qwen3_next")
    planned, probed = planned_of(model), probe(model)
    fewer = Probed(probed.attention, probed.mixers[:-1])
    with pytest.raises(ConfigError, match=r"has layers \[0, 1, 3\], but a forward keeps states in layers \[0, 1\]"):
        page_layout(planned, fewer)
    narrow = Probed(probed.attention, changed(probed.mixers, 0, shape=(96, 3)))
    with pytest.raises(
        ConfigError, match=r"layers\.1\.linear_attn: the plan has 3584 bytes a page, but .* caches 3200 \("
    ):
        page_layout(planned, narrow)
    half = Probed(probed.attention, changed(probed.mixers, 1, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"caches 2560 \(states \(96, 4\) float32 and \(4, 16, 8\) bfloat16\)"):
        state_layout(planned, half)
    with pytest.raises(ConfigError, match=r"the plan has layers \[2, 4\], but a forward caches in layers \[\]"):
        page_layout(planned, Probed({}, probed.mixers))


def test_states_are_planned_in_the_dtype_of_the_weights() -> None:
    """The config has another dtype, because the model was cast."""
    model = tiny_model("qwen3_next").to(torch.bfloat16)
    model.config.dtype = torch.float32
    planned = planner_model(model, block_size=16, name="cast")
    assert planned.name == "cast"
    layout = page_layout(planned, probe(model))
    assert [part.dtype for part in layout["model.layers.0.linear_attn"]] == [torch.bfloat16, torch.float32]
