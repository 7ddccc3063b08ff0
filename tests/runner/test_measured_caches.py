"""Plans compared with measured caches of transformers' models (measured_caches.py): all models, variants and faults."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from measured_caches import LayerCache, measured_cache
from measured_models import (
    WRAPPERS,
    as_file,
    cache_by_default,
    config_of,
    device_of,
    differences,
    planned,
    read,
    variants,
)
from measured_table import NOT_BUILT, compare, note
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.models.compressed import COMPRESSED
from hybridkv.models.reader import NOT_YET

torch.set_num_threads(1)

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
SAMPLE = (
    *(
        "bart",
        "falcon",
        "gemma3n_text",
        "gpt2",
        "gpt_bigcode",
        "hy_v4",
        "lfm2_moe",
        "mimo_v2_flash",
        "mixtral",
        "olmo3",
    ),
    "recurrent_gemma",
)
"""Every kind of layer and every rule that a family of its own has not: CI; the rest is `make test-all`'s."""
ALL = [pytest.param(one, marks=() if one in SAMPLE else pytest.mark.thorough) for one in MODEL_TYPES]
DIFFERING = [
    pytest.param(one, marks=() if one in set(SAMPLE) - {"gemma3n_text", "hy_v4"} else pytest.mark.thorough)
    for one in MODEL_TYPES
]
"""Without two of many fields, each of which is left out once."""


@pytest.mark.parametrize("model_type", ALL)
def test_plan_matches_the_measured_cache_of_every_model(model_type: str) -> None:
    found = compare(model_type)
    note(found)
    assert found.outcome in {"equal", "refused", "not built"}, found.reason
    assert (found.outcome == "refused") == (model_type in REFUSED), found.reason
    assert (found.outcome == "not built") == (model_type in NOT_BUILT), found.reason


REFUSED = (
    *("blt", "cpmant", "gemma4_assistant", "gemma4_unified_assistant", "glm4_moe", "openai-gpt"),
    *("qwen4_exp", "qwen4_exp_text", "reformer", "xlm", "xlnet"),
)
"""Model types whose defaults are not planned as transformers keeps them."""


def test_at_most_12_of_178_model_types_are_rejected() -> None:
    assert len(MODEL_TYPES) == 178
    assert len(REFUSED) <= 12


@pytest.mark.parametrize("model_type", [one for one in DIFFERING if one.values[0] not in {*NOT_YET, *COMPRESSED}])
def test_plan_of_a_config_variant_matches_or_is_rejected(model_type: str) -> None:
    """The plan of a variant matches the measured cache, or the variant is rejected."""
    compared = 0
    for label, file in variants(model_type):
        try:
            config = CONFIG_MAPPING[model_type].from_dict(dict(file))
            measured = measured_cache(
                config, device=device_of(model_type), long_run="window" in label or "chunk" in label
            )
        except Exception:  # noqa: BLE001, S112 - a variant that transformers does not build or run measures nothing
            continue
        plan = read_or_refuse(file)
        refusable = label.startswith("without ") or model_type in REFUSED or "add_cross_attention" in str(plan)
        assert isinstance(plan, dict) or refusable, f"{label}: {plan}"
        if isinstance(plan, dict):
            assert list(differences(plan, measured)) == [], label
            compared += 1
    assert compared or model_type in {*NO_VARIANT, *REFUSED}


def read_or_refuse(file: dict[str, Any]) -> dict[int, LayerCache] | ConfigError:
    try:
        return read(file)
    except ConfigError as error:
        return error


NO_VARIANT = ("bamba", "lfm2_moe", "xlstm", "zamba", "zamba2")
"""Model types of which transformers builds no variant."""


def llama() -> dict[str, Any]:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    return as_file(LlamaConfig(**{**sizes, "num_key_value_heads": 2, "head_dim": 24}))


def test_measured_cache_of_llama_matches_hand_count() -> None:
    """Keys and values have two heads of width 24, in 2 bytes each."""
    config = CONFIG_MAPPING["llama"].from_dict(llama())
    assert measured_cache(config) == dict.fromkeys(range(3), LayerCache(token_bytes=2 * 2 * 24 * 2))


def test_long_run_measures_the_window_size() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = CONFIG_MAPPING["mistral"](**sizes, head_dim=16, sliding_window=24)
    assert measured_cache(config, long_run=True) == dict.fromkeys(range(2), LayerCache(window_bytes=256, window=24))
    # a plan whose window is one too small
    file = {**as_file(config), "sliding_window": 23}
    assert len(list(differences(read(file), measured_cache(config, long_run=True)))) == 2


Fault = Callable[[dict[str, Any]], dict[str, Any]]

FAULTS: dict[str, tuple[str, Fault]] = {
    "KV heads taken for heads": ("mixtral", lambda f: {**f, "num_key_value_heads": f["num_attention_heads"]}),
    "the width of a head from the hidden size": ("gemma", lambda f: {**f, "head_dim": None}),
    "windows overlooked": ("gemma2", lambda f: {**f, "layer_types": ["full_attention"] * len(f["layer_types"])}),
    "every layer windowed": ("olmo3", lambda f: {**f, "layer_types": ["sliding_attention"] * len(f["layer_types"])}),
    "a window one too small": ("mistral", lambda f: {**f, "sliding_window": f["sliding_window"] - 1}),
    "the chunk of another config": ("llama4_text", lambda f: {**f, "attention_chunk_size": 4096}),
    "shared layers counted": ("gemma3n_text", lambda f: {**f, "num_kv_shared_layers": 0}),
    "one shared layer too many": ("gemma3n_text", lambda f: {**f, "num_kv_shared_layers": 16}),
    "the rotary part left out of a latent": ("youtu", lambda f: {**f, "qk_rope_head_dim": 1}),
    "keys and values in place of a latent": ("minicpm3", lambda f: {**f, "kv_lora_rank": None}),
    "an indexer overlooked": ("deepseek_v32", lambda f: {**f, "layer_types": ["full_attention"] * 61}),
    "an indexer in layers that share one": ("hy_v4", lambda f: {**f, "indexer_types": ["full"] * 34}),
    "multi-query attention overlooked": ("gpt_bigcode", lambda f: {**f, "multi_query": False}),
    "values as wide as keys": ("mimo_v2_flash", lambda f: {**f, "v_head_dim": None}),
    "one layer too few": ("gpt2", lambda f: {**f, "n_layer": f["n_layer"] - 1}),
    "encoder and decoder mixed up": ("blenderbot", lambda f: {**f, "decoder_layers": f["encoder_layers"]}),
    "cross attention left out": ("bart", lambda f: {**f, "is_encoder_decoder": False}),
    "a cycle left out": ("hrm_text", lambda f: {**f, "num_hidden_layers": f["num_hidden_layers"] - 16}),
    "global heads as wide as others": (
        "gemma4_text",
        lambda f: {**f, "per_layer_config": None, "global_head_dim": 256},
    ),
    "a narrow recurrence": ("recurrent_gemma", lambda f: {**f, "lru_width": 1280}),
    "a short convolution": ("lfm2_moe", lambda f: {**f, "conv_L_cache": 2}),
    "states in the wrong layers": ("lfm2_moe", lambda f: {**f, "layer_types": f["layer_types"][::-1]}),
    "windowed layers with the others' heads": ("inkling_text", lambda f: {**f, "swa_num_key_value_heads": 8}),
}
"""A shape rule broken on purpose: the file that is read, where the model is built from the right one."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if model_type in {*SAMPLE, "llama4_text", "minicpm3"} else pytest.mark.thorough)
        for fault, (model_type, _) in FAULTS.items()
    ],
)
def test_wrong_config_reading_differs_from_the_measured_cache(fault: str) -> None:
    model_type, break_it = FAULTS[fault]
    file, measured = as_file(config_of(model_type)), cache_by_default(model_type)
    assert list(differences(read(file), measured)) == []
    assert list(differences(read(break_it(file)), measured)) != []


def test_cache_dtype_and_state_dtype_change_their_own_bytes_only() -> None:
    """Only state_dtype changes the dtype of the convolutions' inputs."""
    file = as_file(config_of("lfm2_moe"))
    models = read_model(file), read_model(file, state_dtype="fp32"), read_model(file, dtype="fp8")
    plain, wide, narrow = map(planned, models)
    for index, layer in plain.items():
        assert wide[index].states == tuple((shape, "float32") for shape, _ in layer.states)
        assert narrow[index].states == layer.states
        assert narrow[index].token_bytes * 2 == layer.token_bytes == wide[index].token_bytes


@pytest.mark.parametrize("model_type", [pytest.param(one, marks=pytest.mark.thorough) for one in WRAPPERS])
def test_plan_of_a_wrapper_matches_its_measured_text_part(model_type: str) -> None:
    config = config_of(model_type)
    file = as_file(config)
    assert list(differences(read(file), measured_cache(config))) == []


def test_plan_of_a_wrapper_equals_plan_of_its_text_part() -> None:
    for model_type in ("gemma3", "qwen3_5", "llama4", "fuyu", "got_ocr2", "emu3"):
        config = config_of(model_type)
        assert read(as_file(config)) == read(as_file(config.get_text_config(decoder=True)))
