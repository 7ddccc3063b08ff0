"""Models with changed forwards: subclasses, patches, wrappers and compiled models."""

import functools

import pytest
import torch
from runner_support import generated, greedy, loaded_model, shared_prompts
from transformers import LlamaForCausalLM, MambaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hybridkv.errors import ConfigError
from hybridkv.runner import Engine, EngineOptions, byte_tokenizer, tiny_model, wrap
from hybridkv.runner.model_call import ModelCall
from hybridkv.runner.probe import Forwards

PROMPTS = shared_prompts(3, 2)
OUTPUT = 8


class HandsOn(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: object) -> CausalLMOutputWithPast:
        return super().forward(input_ids=input_ids, **kwargs)


class HandsOnStates(MambaForCausalLM):  # type: ignore[misc]  # transformers is not typed
    def forward(self, *args: object, **kwargs: object) -> CausalLMOutputWithPast:
        return super().forward(*args, **kwargs)


class NoPositions(LlamaForCausalLM):  # type: ignore[misc]  # transformers is not typed
    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: Cache | None = None,
        *,
        use_cache: bool,
        logits_to_keep: torch.Tensor | int = 0,
    ) -> CausalLMOutputWithPast:
        return super().forward(
            input_ids, past_key_values=past_key_values, use_cache=use_cache, logits_to_keep=logits_to_keep
        )


def as_class(name: str, of: type[PreTrainedModel]) -> PreTrainedModel:
    model = tiny_model(name)
    model.__class__ = of
    return model


def patched(name: str, *, tells: bool) -> PreTrainedModel:
    """The forward replaced on the instance; by one that ``tells`` its parameters."""
    model = tiny_model(name)
    own = model.forward

    def forward(*args: object, **kwargs: object) -> CausalLMOutputWithPast:
        return own(*args, **kwargs)

    model.forward = functools.wraps(own)(forward) if tells else forward
    return model


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("llama", as_class("llama", HandsOn)),
        ("mamba", as_class("mamba", HandsOnStates)),
        ("llama", patched("llama", tells=True)),
        ("llama", patched("llama", tells=False)),
        ("qwen3_next", patched("qwen3_next", tells=False)),
    ],
)
def test_forward_that_passes_arguments_on_gets_positions(name: str, model: PreTrainedModel) -> None:
    given: list[object] = []
    model.get_submodule("model" if name != "mamba" else "backbone").register_forward_pre_hook(
        lambda _module, _args, kwargs: given.append(kwargs.get("position_ids")), with_kwargs=True
    )
    options = EngineOptions(self_check=False)  # which runs the model alone as well
    with Engine(model, options=options, tokenizer=byte_tokenizer(), memory="2MiB", max_model_len=256) as engine:
        done = engine.generate(PROMPTS, greedy(OUTPUT))
    assert [one.token_ids for one in done] == [generated(loaded_model(name), one, OUTPUT) for one in PROMPTS]
    assert all((one is None) == (name == "mamba") for one in given)


class Wrapping(PreTrainedModel):  # type: ignore[misc]  # transformers is not typed
    """A model inside another, whose class says nothing of what the one inside takes."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__(inner.config)
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> CausalLMOutputWithPast:
        return self.inner(input_ids, **kwargs)


def test_forward_without_named_arguments_gets_positions_for_attention_only() -> None:
    positions = torch.arange(3)[None]
    for name, wanted in (("llama", True), ("mamba", False)):
        arguments = ModelCall(Wrapping(loaded_model(name).model)).arguments(Cache(layers=[]), positions)
        assert ("position_ids" in arguments) == wanted


def test_model_without_positions_runs_row_by_row() -> None:
    model = as_class("llama", NoPositions)
    with Engine(model, memory="2MiB", max_model_len=256) as engine:
        assert engine.runner.forwards is Forwards.BY_ROW
        found = [one.token_ids for one in engine.generate(PROMPTS, greedy(OUTPUT))]
    assert found == [generated(loaded_model("llama"), one, OUTPUT) for one in PROMPTS]
    assert model.config._attn_implementation == "eager"


def test_model_of_another_type_is_rejected() -> None:
    compiled = torch.compile(tiny_model("llama"), backend="eager")
    for model, kind in ((compiled, "OptimizedModule"), (torch.nn.Linear(1, 1), "Linear"), ("llama", "str")):
        with pytest.raises(ConfigError, match=f"must be a transformers PreTrainedModel, got {kind}"):
            wrap(model)
        with pytest.raises(ConfigError, match=f"must be a transformers PreTrainedModel, got {kind}"):
            Engine(model)
