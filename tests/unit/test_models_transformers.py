"""Our readers against transformers' own config and model classes, on small random configs."""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridkv.models import read_model
from hybridkv.specs import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")


def random_config(model_type: str, seed: int) -> dict[str, object]:
    rng = random.Random(f"{model_type} {seed}")
    kv_heads, repeats = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    heads = kv_heads * repeats
    config: dict[str, object] = {
        "hidden_size": heads * 16,
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "vocab_size": rng.choice([50, 99]),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
    }
    if rng.random() < 0.5 and model_type in ("llama", "mistral", "qwen3"):
        config["head_dim"] = 8
    if model_type == "llama":
        config["mlp_bias"] = rng.random() < 0.5
    if model_type == "mistral":
        config["sliding_window"] = None
    if model_type.startswith("deepseek"):
        sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
        experts = {"n_routed_experts": 8, "n_shared_experts": rng.randint(1, 2), "num_experts_per_tok": 2}
        config |= sizes | experts | {"n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
        config |= {"q_lora_rank": rng.choice([None, 16]), "first_k_dense_replace": rng.randint(0, 2)}
        config["num_key_value_heads"] = heads
        config["attention_bias"] = False
    return config


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("seed", range(4))
def test_parameters_and_heads(model_type: str, seed: int) -> None:
    config = AutoConfig.for_model(model_type, **random_config(model_type, seed))
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config)
    model = read_model(config.to_dict(), dtype="bf16")
    assert model.parameters == sum(parameter.numel() for parameter in weights.parameters())
    assert len(model.layers) == config.num_hidden_layers
    for layer in model.layers:
        attention = weights.get_submodule(layer.name)
        if isinstance(layer.spec, MLAAttentionSpec):
            assert layer.spec.head_size == attention.kv_a_proj_with_mqa.out_features
        else:
            assert isinstance(layer.spec, FullAttentionSpec)
            assert layer.spec.num_kv_heads * layer.spec.head_size == attention.k_proj.out_features


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("switch", [None, False, True])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_windows_are_seen_where_transformers_sees_them(
    model_type: str, switch: bool | None, window: int | None, first: int
) -> None:
    given = {
        **random_config(model_type, 0),
        "num_hidden_layers": 2,
        "sliding_window": window,
        "max_window_layers": first,
    }
    if switch is not None:
        given["use_sliding_window"] = switch
    types = AutoConfig.for_model(model_type, **given).layer_types
    layers = read_model({"model_type": model_type, **given}, dtype="bf16").layers
    windows = [layer.spec.sliding_window if isinstance(layer.spec, SlidingWindowSpec) else None for layer in layers]
    assert windows == [window if kind == "sliding_attention" else None for kind in types]
