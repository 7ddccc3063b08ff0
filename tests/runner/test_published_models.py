"""Known public models against transformers' models of their configs: measured caches and weights.

Each model is built on the meta device from the stored fields of its published config (measured_caches.py,
weights_of.py).
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from measured_caches import measured_cache
from measured_models import differences, read
from transformers import CONFIG_MAPPING, PreTrainedConfig
from weights_of import weights_of

from hybridkv.models import known_model, known_models, read_model
from hybridkv.models.compressed import COMPRESSED
from hybridkv.models.reading import text_parts

torch.set_num_threads(1)

ALIKE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types that transformers has by another name."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
TOTAL = ("num_experts", "n_routed_experts", "num_local_experts")
SAMPLE = (
    "deepseek-v4-flash",
    "gemma-4-e2b",
    "glm-4.7-flash",
    "gpt-oss-20b",
    "granite-4.0-h-tiny",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
)
NAMES = [pytest.param(one.name, marks=() if one.name in SAMPLE else pytest.mark.thorough) for one in known_models()]


def language_model(name: str) -> dict[str, Any]:
    """The config of its language model, as transformers calls that."""
    config: dict[str, Any] = copy.deepcopy(dict(known_model(name).config))
    tied = config.get("tie_word_embeddings")
    part: dict[str, Any] = config.get("text_config") or config
    if tied is not None:
        part["tie_word_embeddings"] = tied
    part.setdefault("model_type", config["model_type"])
    part["model_type"] = text_parts().get(part["model_type"], part["model_type"])
    part["model_type"] = ALIKE.get(part["model_type"], part["model_type"])
    part["dtype"] = "bfloat16"
    for one in ("torch_dtype", "rope_scaling", "rope_parameters"):  # rotations keep nothing
        part.pop(one, None)
    return part


def built(name: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[str(language_model(name)["model_type"])].from_dict(language_model(name))


NO_CAUSAL_LM = ("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Text parts that are built in their wholes only."""


@pytest.mark.parametrize("name", NAMES)
def test_plan_of_a_known_model_matches_its_measured_cache(name: str) -> None:
    part = language_model(name)
    if part["model_type"] in NO_CAUSAL_LM:
        whole = known_model(name).config
        config = CONFIG_MAPPING[str(whole["model_type"])].from_dict(copy.deepcopy(dict(whole)))
    else:
        config = built(name)
    if part["model_type"] not in COMPRESSED:  # there a token's bytes depend on its place: engines compare the pages
        plan, measured = read(dict(known_model(name).config)), measured_cache(config)
        assert list(differences(plan, measured)) == []
    model = read_model(name)
    if part["model_type"] in {"whisper", "t5"}:
        return  # tests/runner/test_encoder_decoder.py has them
    chosen, total = (next((part[key] for key in keys if part.get(key)), 1) for keys in (CHOSEN, TOTAL))
    assert (model.parameters, model.active_parameters) == weights_of(config, chosen, total)


def test_changed_config_differs_from_the_measured_model() -> None:
    config, file = built("glm-4.7-flash"), dict(known_model("glm-4.7-flash").config)
    assert list(differences(read(file), measured_cache(config))) == []
    assert list(differences(read({**file, "kv_lora_rank": 256}), measured_cache(config))) != []
    assert read_model({**file, "moe_intermediate_size": 1535}).parameters != weights_of(config, 4, 64)[0]
    assert dataclasses.replace(known_model("glm-4.7-flash"), name="x").config == file
