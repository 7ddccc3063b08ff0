"""Counted weights against the parameters of transformers' own models (weights_of.py)."""

from typing import Any

import pytest
import torch
from measured_models import as_file, config_of, variants
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from weights_of import weights_of

from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.models.counting import recipes
from hybridkv.models.reading import text_parts

torch.set_num_threads(1)

SAMPLE = ("dots1", "gemma3n_text", "gemma4_text", "glm_moe_dsa", "mimo_v2_flash", "qwen2_moe", "starcoder2")
"""Every rule that a recipe can have: CI; the rest is `make test-all`'s."""
ELSEWHERE = ("bailing_moe_linear",)
"""Types that transformers has no model of: `tests/unit/models/test_lightning.py` holds them against model cards."""
ALL = [
    pytest.param(one, marks=() if one in SAMPLE else pytest.mark.thorough) for one in recipes() if one not in ELSEWHERE
]
NO_WIDTH = {"glm4_moe": {"head_dim": 128}, "hunyuan_v1_dense": {}}
"""What the defaults of a class lack to be planned."""


def built_as(model_type: str) -> str:
    """The model that a text part is measured in."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return model_type
    return {"emu3_text_model": "emu3"}.get(model_type) or next(
        whole for whole, part in text_parts().items() if part == model_type and not whole.endswith(("omni", "edge"))
    )


def measured(config: PreTrainedConfig, model_type: str) -> tuple[int, int]:
    """Parameters of its model, and those that one token uses."""
    mixture, text = recipes()[model_type].mixture, config.get_text_config(decoder=True)
    counts = (1, 1) if mixture is None else (getattr(text, mixture.chosen), getattr(text, mixture.count))
    return weights_of(config, *(one or 1 for one in counts))


def counted(file: dict[str, Any]) -> tuple[int, int]:
    model = read_model(file)
    return model.parameters, model.active_parameters


@pytest.mark.parametrize("model_type", ALL)
def test_counted_weights_match_the_model(model_type: str) -> None:
    config = config_of(built_as(model_type))
    for key, value in NO_WIDTH.get(model_type, {}).items():
        setattr(config, key, value)
    assert counted(as_file(config)) == measured(config, model_type)


CHANGES: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "use_bias": True, "qkv_bias": False, "use_qkv_bias": True, "mlp_bias": True},
    "an output bias": {"attention_out_bias": True},
    "another head": {"tie_word_embeddings": "flipped"},
    "norms of heads": {"use_qk_norm": True},
    "dense layers first": {"first_k_dense_replace": 2},
    "two shared experts": {"n_shared_experts": 2, "num_shared_experts": 2},
    "a wide shared expert": {"shared_expert_intermediate_size": 48},
    "every second layer sparse": {"decoder_sparse_step": 2},
    "a dense layer between": {"mlp_only_layers": [1]},
    "queries without a latent": {"q_lora_rank": None, "index_head_dim": None},
    "a mixture beside": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "wide MLPs where keys are shared": {"use_double_wide_mlp": True, "num_kv_shared_layers": 2},
    "no embeddings of layers": {"hidden_size_per_layer_input": 0},
    "one width for all": {"intermediate_size": 64},
}


@pytest.mark.parametrize("model_type", ALL)
def test_counted_weights_of_a_config_variant_match_or_are_missing(model_type: str) -> None:
    """The count equals the measured number, or the config is not counted."""
    if built_as(model_type) != model_type:
        pytest.skip("a part: its whole's file has no such fields")
    compared = 0
    for label, file in [*variants(model_type), *changed(model_type)]:
        try:
            config = CONFIG_MAPPING[model_type].from_dict(dict(file))
            there = measured(config, model_type)
        except Exception:  # noqa: BLE001, S112 - a variant that transformers does not build measures nothing
            continue
        try:
            found = counted(file)
        except ConfigError:
            continue
        assert found in {there, (0, 0)}, label
        compared += found == there
    assert compared >= 3


def changed(model_type: str) -> list[tuple[str, dict[str, Any]]]:
    label, base = next(iter(variants(model_type)))
    base |= NO_WIDTH.get(model_type, {})
    found = [(label, base)]
    for label, change in CHANGES.items():
        applied = {key: value for key, value in change.items() if key in base}
        if "tie_word_embeddings" in applied:
            applied = {"tie_word_embeddings": not base["tie_word_embeddings"]}
        if applied:
            found.append((label, {**base, **applied}))
    return found


def test_config_without_a_width_has_no_counted_weights() -> None:
    file = as_file(config_of("mixtral"))
    assert counted(file)[0] > 0
    stranger = {key: value for key, value in file.items() if key != "intermediate_size"} | {"model_type": "stranger"}
    assert counted(stranger) == (0, 0)
    # what the caller says comes first
    given = read_model(file, fields={"parameters": 7, "active_parameters": 5})
    assert (given.parameters, given.active_parameters) == (7, 5)
    assert read_model(file, fields={"parameters": 7}).active_parameters == 7
    with pytest.raises(ConfigError, match="num_local_experts must be an integer"):
        read_model({**file, "num_local_experts": "many"})
