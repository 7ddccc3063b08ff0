"""Engines over quantized pages: the same tokens in every regime, equal to plain transformers with rounded caches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from runner_support import EveryLogit, loaded_model, shared_prompts

from cli_support import error
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.planner import plan
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, Stored, load, plan_for
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.runner.probe import ProbeCache, attention_implementation, planner_model
from hybridkv.spec_fields import Quantization
from hybridkv.units import ceil_div

MODELS = ("llama", "gemma3", "deepseek_v3", "qwen3_next")
"""Full attention, windows, latents as transformers caches them, and states beside attention."""
SERVED = ("int8_per_token_head", "fp8_per_token_head")
TOKENS = 16
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def rounded(states: torch.Tensor, form: str) -> torch.Tensor:
    """What a page of ``form`` gives back, in numpy: one scale for each token and head [1, heads, tokens, width]."""
    exact = states.detach().float().numpy()
    largest = np.abs(exact).max(-1, keepdims=True)
    if form == "int8_per_token_head":
        scale = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny)
        made = np.rint(exact / scale) * scale
    else:
        scale = np.maximum(largest / np.float32(448), np.finfo(np.float32).tiny)
        made = e4m3(exact / scale) * scale
    return torch.from_numpy(made.astype(np.float32)).to(states.dtype)


def e4m3(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The nearest float of 3 bits after the point, exponents from -6 on; ties to even."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-30))), -6)
    step = np.exp2(exponent - 3)
    nearest: np.ndarray[Any, Any] = np.rint(values / step) * step
    return nearest


class Rounding(ProbeCache):
    """Plain transformers, with each key and value as it would come back from a page."""

    def __init__(self, form: str, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.form, self.skipped = form, skipped

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> Any:  # noqa: ANN401 - two tensors
        if layer_idx in self.skipped:
            return key_states, value_states
        return rounded(key_states, self.form), rounded(value_states, self.form)


def engine(name: str, form: str | None, *, memory: int | str | None = None, **given: Any) -> Engine:  # noqa: ANN401
    loaded, stored = loaded_model(name), given.pop("stored", Stored(form))
    drafter = given.pop("speculate", None)
    observer = given.pop("observer", None)
    drafts = 0 if drafter is None else drafter.num_speculative_tokens
    made = plan_for(loaded, [120] * 8, memory=memory, num_speculative_tokens=drafts, stored=stored)
    return Engine(loaded, made, EngineOptions(**given), speculate=drafter, observer=observer)


def outputs(running: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with running:
        return [one.token_ids for one in running.generate(prompts, GREEDY)]


def alone(name: str, form: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Each prompt in an engine that shares nothing."""
    with engine(name, form, prefix_caching=False) as running:
        return [running.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("form", SERVED)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_tokens_are_equal_in_every_regime(name: str, form: str) -> None:
    prompts = shared_prompts(5, seed=3, longest=30)
    prompts += [prompts[0][:37], prompts[1] + prompts[1][-8:]]
    cold = alone(name, form, prompts)
    assert outputs(engine(name, form), prompts) == cold
    assert outputs(engine(name, form, token_budget=13), prompts) == cold
    with engine(name, form) as warm:
        warm.generate(prompts, GREEDY)
        again = warm.generate(prompts, GREEDY)
        assert [one.token_ids for one in again] == cold
        assert sum(one.hit_tokens for one in again) > 7 * 30
    drafting = engine(name, form, speculate=NgramDrafter(3))
    assert outputs(drafting, prompts) == cold
    if name == "llama":
        plain = alone(name, "int8_per_token_head" if form != "int8_per_token_head" else "int4_per_token_head", prompts)
        assert plain != cold  # the form matters


@pytest.mark.parametrize("form", SERVED)
def test_preempted_and_forked_requests_keep_their_tokens(form: str) -> None:
    prompts = shared_prompts(6, seed=4, prefix=4, longest=40)
    cold = alone("llama", form, prompts)
    loaded = loaded_model("llama")
    page = sum(
        layer.spec.page_size_bytes for layer in planner_model(loaded.model, block_size=16, stored=Stored(form)).layers
    )
    longest = ceil_div(max(map(len, prompts)) + TOKENS, 16)
    made = plan(
        planner_model(loaded.model, block_size=16, stored=Stored(form)), page * (2 * longest + 4), max_model_len=120
    )
    with Engine(loaded, made, EngineOptions(prefix_caching=False)) as squeezed:
        assert [one.token_ids for one in squeezed.generate(prompts, GREEDY)] == cold
        assert squeezed.statistics().preemptions > 0
    drawn = replace(GREEDY, n=3, temperature=0.8, seed=5)
    branches = []
    for given in ({}, {"prefix_caching": False}, {"token_budget": 13}):
        with engine("llama", form, **given) as running:
            forked = running.generate([prompts[0], prompts[1]], drawn)
            branches.append([one.token_ids for one in forked])
    assert len(set(branches[0])) == 6
    assert branches[1] == branches[2] == branches[0]


@pytest.mark.parametrize("form", SERVED)
@pytest.mark.parametrize("name", MODELS[:3])  # states need hooks to be kept
def test_logits_are_those_of_plain_transformers_with_rounded_keys(name: str, form: str) -> None:
    seen = EveryLogit()
    skipped = (1,)
    stored = Stored(form, tuple(map(str, skipped))) if name == "llama" else Stored(form)
    prompts = shared_prompts(3, seed=6, longest=30)
    with engine(name, form, stored=stored, observer=seen, token_budget=29) as running:
        done = running.generate(prompts, GREEDY)
        model = running.loaded.model
    for one in done:
        tokens = [*one.prompt_token_ids, *one.token_ids][:-1]
        cache = Rounding(form, skipped if name == "llama" else ())
        with attention_implementation(model, "eager"), torch.inference_mode():
            ids = torch.tensor([tokens])
            wanted = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -TOKENS:].float()
            exact = model(input_ids=ids, use_cache=False).logits[0, -TOKENS:].float()
        found, largest = seen.of(one), wanted.abs().max()
        # a product that rounds to the other side of a half moves one element by one code: far less than all elements do
        assert (found - wanted).abs().max() <= max(2e-4 * largest, (exact - wanted).abs().max() / 4)
        assert (exact - wanted).abs().max() > 2e-4 * largest


def test_plan_of_pages_that_the_runner_cannot_make_is_rejected() -> None:
    loaded = loaded_model("llama")
    with pytest.raises(ConfigError, match="the runner stores keys and values in the model's dtype or as int8"):
        plan_for(loaded, [32], stored=Stored("fp8"))
    with pytest.raises(ConfigError, match="have no effect without a quantization"):
        plan_for(loaded, [32], stored=Stored(None, ("1",)))
    with pytest.raises(ConfigError, match="a plan has its own memory, max_model_len and stored"):
        Engine(loaded, plan_for(loaded, [32]), stored=Stored("int8_per_token_head"))
    with pytest.raises(ConfigError, match=r"no layer of .* keeps keys and values that"):
        plan_for(loaded_model("mamba"), [32], stored=Stored("int8_per_token_head"))
    for name in ("t5", "deepseek_v4"):  # cross attention, compressed latents
        with pytest.raises(UnsupportedModelError, match="does not support codes with scales"):
            plan_for(loaded_model(name), [32], stored=Stored("int8_per_token_head"))


def test_states_and_skipped_layers_keep_their_dtype() -> None:
    with engine("qwen3_next", "int8_per_token_head") as running:
        specs = {layer.name: layer.spec for layer in running.plan.model.layers}
        forms = {name: getattr(spec, "quantization", "state") for name, spec in specs.items()}
    assert set(forms.values()) == {"state", Quantization.INT8}
    with engine("llama", "int8_per_token_head", stored=Stored("int8_per_token_head", ("0",))) as running:
        assert [layer.spec.quantization for layer in running.plan.model.layers][:2] == [None, Quantization.INT8]  # type: ignore[attr-defined]


def test_self_check_finds_scales_of_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridkv.worker import QuantizedPages  # noqa: PLC0415 - patched here

    own = QuantizedPages.take

    def shifted(pages: QuantizedPages, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        turned = replace(pages, key_scales=pages.key_scales.roll(1, 1))
        return own(turned, blocks, dtype)

    monkeypatch.setattr(QuantizedPages, "take", shifted)
    loaded = load("tiny:llama", seed=31)
    loaded.model.config.attention_dropout = 0.125  # a kind of its own, which no earlier test has compared
    with pytest.raises(UnsupportedModelError, match="computes other logits on paged caches"):
        Engine(loaded, plan_for(loaded, [120], stored=Stored("int8_per_token_head")))


def test_commands_reject_what_contradicts_a_quantization() -> None:
    options = ("generate", "--model", "tiny:llama", "--kv-dtype", "int8_per_token_head")
    assert "drop it, or --kv-dtype" in error(*options, "--check")
    assert "use one of these" in error("generate", "--model", "tiny:llama", "--kv-dtype", "fp8")
