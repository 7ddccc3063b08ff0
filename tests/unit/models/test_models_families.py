"""Every family against transformers: weights and modules, what cross attention keeps, and which layers have windows."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from hybridkv.models import read_model
from hybridkv.specs import AttentionSpec, MLAAttentionSpec, SlidingWindowSpec

ATTENTION = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
DENSE = {**ATTENTION, "intermediate_size": 48}
CASES: list[tuple[str, dict[str, object]]] = [
    (model_type, given)
    for model_type, given in json.loads(Path(__file__).with_name("family_cases.json").read_text("utf-8"))
]
"""Model types, and fields of a small model of each; some twice, for what other fields change."""
SPECIAL = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
AUTO = {"whisper": AutoModelForSpeechSeq2Seq, "t5": AutoModelForSeq2SeqLM}


def ids(case: tuple[str, dict[str, object]] | object) -> str | None:
    return case if isinstance(case, str) else None


@pytest.mark.parametrize(("model_type", "given"), CASES, ids=ids)
def test_model_family_matches_transformers_weights_and_modules(model_type: str, given: dict[str, object]) -> None:
    config = AutoConfig.for_model(model_type, **given, **SPECIAL)
    with torch.device("meta"):
        weights = AUTO.get(model_type, AutoModelForCausalLM).from_config(config)
    for source in ({"model_type": model_type, **given}, config.to_dict()):
        model = read_model(source, dtype="bf16")
        assert model.parameters == sum(parameter.numel() for parameter in weights.parameters())
        assert 0 < model.active_parameters <= model.parameters
        for layer in model.layers:
            module = weights.get_submodule(layer.name)
            if isinstance(layer.spec, MLAAttentionSpec) and hasattr(module, "kv_a_proj_with_mqa"):
                assert layer.spec.head_size == module.kv_a_proj_with_mqa.out_features


@pytest.mark.parametrize(("model_type", "given"), [case for case in CASES if case[0] in AUTO], ids=ids)
def test_model_family_cross_attention_keeps_the_encoder_output(model_type: str, given: dict[str, object]) -> None:
    config = AutoConfig.for_model(model_type, **given, **SPECIAL, decoder_start_token_id=1)
    weights = AUTO[model_type].from_config(config).eval()
    model = read_model({"model_type": model_type, **given}, dtype="fp32")
    encoder_ids = {"input_ids": torch.ones((1, 5), dtype=torch.int64)}
    inputs = {"input_features": torch.zeros((1, 8, 40))} if model_type == "whisper" else encoder_ids
    with torch.no_grad():
        out = weights(**inputs, decoder_input_ids=torch.tensor([[1, 2, 3]]), use_cache=True)
    own, cross = out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache
    assert len(own.layers) == len(cross.layers) == len(model.layers) // 2
    for planned, held in zip(
        model.layers, [one for pair in zip(own.layers, cross.layers, strict=True) for one in pair], strict=True
    ):
        assert isinstance(planned.spec, AttentionSpec)
        assert held.keys.shape[1::2] == (planned.spec.num_kv_heads, planned.spec.head_size)
    assert {layer.spec.keeps.value for layer in model.layers} == {"tokens", "encoder"}
    if model_type == "whisper":
        assert cross.layers[0].keys.shape[2] == model.max_encoder_tokens == 20
        assert model.max_model_len == 30


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("switch", [None, False, True])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_model_family_windows_match_transformers(
    model_type: str, switch: bool | None, window: int | None, first: int
) -> None:
    given = {**DENSE, "num_hidden_layers": 2, "sliding_window": window, "max_window_layers": first}
    if switch is not None:
        given["use_sliding_window"] = switch
    types = AutoConfig.for_model(model_type, **given).layer_types
    layers = read_model({"model_type": model_type, **given}, dtype="bf16").layers
    windows = [layer.spec.sliding_window if isinstance(layer.spec, SlidingWindowSpec) else None for layer in layers]
    assert windows == [window if kind == "sliding_attention" else None for kind in types]
