"""Fields that place layers and that no reader knows are refused by name; those that mean nothing for it are not."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import known_model, known_models, read_model
from hybridkv.models.fields import Fields
from hybridkv.models.reader import FAMILIES, NOT_YET, NOTING, text_fields
from hybridkv.models.reading import refuse_unread

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 20,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "torch_dtype": "float16",
}
STRANGER = {**LLAMA, "model_type": "stranger", "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize("config", [LLAMA, STRANGER, {**STRANGER, "model_type": "mixtral"}])
@pytest.mark.parametrize(
    "odd",
    [
        {"keeps_list": [0, 1] * 10},
        {"keeps_list": ["a"] * 20},
        {"block_configs": [{"attention": {"no_op": True}}] * 20},
        {"ends": list(range(21))},
        {"kv_heads_by_layer": [2] * 19},
        {"layer_group_size": 5},
        {"full_attention_interval": 4},
        {"softmax_every_n_layers": 8},
        {"kda_period": 3},
        {"attn_types": "LLLG"},
        {"hybrid_pattern": "M*M*"},
        {"local_stride": 2},
        {"hybrid_layer_ids": [0, 7, 14]},
        {"full_attn_idxs": [3, 9]},
        {"softmax_attn_layers": "0,4,8,12,16,20"},
        {"hybrid_ratio": 7},
        {"hybrid_attention": True},
        {"hybrid_setting": {"mamba": 3}},
        {"use_linear_attn": True},
        {"linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20]}},
        {"cache_config": {"kinds": [0, 1] * 10}},
    ],
)
def test_unread_field_that_places_layers_is_rejected(config: dict[str, object], odd: dict[str, object]) -> None:
    (name,) = odd
    with pytest.raises(UnsupportedModelError, match=name):
        read_model({**config, **odd})
    # what the message says lets it through
    read_model({**config, **odd}, fields={name: None, "layer_types": ["full_attention"] * 20})


@pytest.mark.parametrize(
    "even",
    [
        {"save_interval": 100, "exit_layers": [1] * 20},
        {"moe_topk": [8] * 20},
        {"num_shared_expert": [1] * 20},
        {"mlp_layer_types": ["dense"] * 20},
        {"swiglu_limits": [0.0] * 20},
        {"layer_rope_theta": [1e4] * 20},
        {"rope_interval": 2},
        {"moe_layer_freq": 2},
        {"expert_layer_period": 2},
        {"eos_token_id": [1, 2]},
        {"layer_group_size": 1},
        {"full_attention_interval": None},
        {"sliding_window_pattern": 0},
        {"keeps_list": [1, 2, 3]},
        {"layer_marks": [7, 3]},
        {"layer_marks": [5, 100]},
        {"hybrid_attention": False},
        {"hybrid_setting": {}},
        {"rope_setting": {"short": [1.0] * 20}},
        {"any_config": {"kinds": [0, 1]}},
        {"moe_layers_enum": "4,5,6"},
        {"cla_share_factor": 2},
    ],
)
def test_unread_field_of_weights_or_positions_is_accepted(even: dict[str, object]) -> None:
    for config in (LLAMA, STRANGER):
        assert read_model({**config, **even}).layers == read_model(config).layers


def text_parts(model_type: str) -> Iterator[dict[str, Any]]:
    """Fields of the language model of transformers' config class, as files have them; none where it needs its parts."""
    try:
        made = CONFIG_MAPPING[model_type]()
    except Exception:  # noqa: BLE001 - each class has its own reasons
        return
    yield text_fields(made.to_dict(), model_type).values  # type: ignore[misc]  # a mapping of a config


TYPES = sorted(
    {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
)


def test_unread_fields_of_transformers_configs_are_accepted() -> None:
    refused, seen = {}, 0
    for model_type in TYPES:
        for values in text_parts(model_type):
            own = str(values.get("model_type"))
            if own in NOT_YET:
                continue
            seen += 1
            try:
                refuse_unread(Fields(values, own), own, general=own not in FAMILIES and own not in NOTING)
            except UnsupportedModelError as error:
                refused[own] = str(error)
    assert seen > 150
    assert refused == {}


def test_unread_fields_of_published_configs_are_accepted() -> None:
    assert len([read_model(one.name) for one in known_models()]) == len(known_models())


@pytest.mark.parametrize("model_type", ["deepseek_v2", "qwen3_next", "gpt_oss", "jamba", "granitemoehybrid", "llama"])
def test_missing_weight_field_still_allows_a_plan(model_type: str) -> None:
    name = {"deepseek_v2": "deepseek-v3", "qwen3_next": "qwen3-next-80b-a3b", "gpt_oss": "gpt-oss-20b"}.get(model_type)
    name = name or {"jamba": "jamba-1.5-mini", "granitemoehybrid": "granite-4.0-h-small"}.get(model_type, "llama-3-8b")
    config = {**known_model(name).config, "model_type": model_type}
    whole = read_model(config)
    widths = ("intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "shared_intermediate_size")
    bare = read_model({key: value for key, value in config.items() if key not in widths})
    assert bare.layers == whole.layers
    assert whole.parameters > 0
    assert (bare.parameters, bare.weight_bytes) == (0, 0)
    (fact,) = bare.assumptions
    assert (fact.what, fact.value) == ("parameters", "not counted")
    assert "is missing" in fact.field
    assert "--set parameters=N" in fact.field
    assert read_model(config, fields={"parameters": 7}).parameters == 7


def test_missing_cache_field_is_rejected() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads is missing"):
        read_model({key: value for key, value in LLAMA.items() if key != "num_attention_heads"})
    with pytest.raises(ConfigError, match="intermediate_size must be an integer"):
        read_model({**LLAMA, "intermediate_size": "wide"})
