"""Any causal language model of transformers, small enough to run here: its config class's defaults, shrunk by name.

    config class -> its defaults (measured_models.REPAIRS) -> sizes by the fields that classes share -> seeded weights

No class has code of its own here; what a few need beside the shared fields stands in FIELDS.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from measured_caches import installed_parts
from measured_models import REPAIRS, config_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybridkv.runner import tiny_model
from hybridkv.runner.tiny import VOCAB_SIZE, fill

LAYERS, _HEADS = 4, 4
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_DATA = json.loads((Path(__file__).parent / "shrunk_models.json").read_text("utf-8"))
_LATENT = {"head_dim": 8, "qk_head_dim": 24}
_SIZE_OF = {name: int(size) for size, names in _DATA["sizes"].items() for name in names}
"""What fields become that classes share, by name."""
_DECODERS = {model_type: {"is_decoder": True} for model_type in _DATA["decoders"]}
FIELDS: Mapping[str, Mapping[str, Any]] = {**_DATA["fields"], **_DECODERS}
"""What sharing names does not say: states, and that an encoder is to be used as a decoder."""


def small_config(model_type: str) -> PreTrainedConfig:
    """The defaults of a config class, shrunk."""
    if model_type == "dbrx":  # takes no whole file of its own
        return config_of(model_type)
    whole = CONFIG_MAPPING[model_type](**deepcopy(dict(REPAIRS.get(model_type, {}))))
    return CONFIG_MAPPING[model_type](**_shrunk(whole.to_dict(), model_type))


def _shrunk(file: dict[str, Any], model_type: str) -> dict[str, Any]:
    """``file`` with other sizes; parts of it, too."""
    layers = {file[key] for key in _LAYERS if isinstance(file.get(key), int)}
    small: dict[str, Any] = {}
    for key, value in file.items():
        if isinstance(value, dict) and "model_type" in value:
            small[key] = _shrunk(value, value["model_type"])
        elif key in _LATENT and file.get("kv_lora_rank"):
            small[key] = _LATENT[key]
        elif key in _SIZE_OF and isinstance(value, int) and not isinstance(value, bool) and value:
            small[key] = _SIZE_OF[key]
        elif key in {"num_key_value_heads", "num_kv_heads"} and value is not None:
            small[key] = _HEADS if file.get("kv_lora_rank") else min(value, 2)
        elif isinstance(value, list) and len(value) in layers:
            small[key] = _sampled(value)
        else:
            small[key] = value
    for name in ("pad_token_id", "bos_token_id"):
        if isinstance(small.get(name), int) and small[name] >= VOCAB_SIZE:
            small[name] = 0
    if "eos_token_id" in small:
        small["eos_token_id"] = VOCAB_SIZE - 1
    return {**small, **FIELDS.get(model_type, {})}


def _sampled(value: list[Any]) -> list[Any]:
    """LAYERS of its entries, every kind among them, in their order."""
    kinds = list({repr(one): at for at, one in reversed(list(enumerate(value)))}.values())
    more = [at for at in range(len(value)) if at not in kinds]
    return [value[at] for at in sorted(sorted(kinds)[:LAYERS] + more[: max(0, LAYERS - len(kinds))])]


TINY = ("jamba", "zamba", "zamba2")
"""Of which ``tiny_model`` has one: where their layers attend lies in several fields."""


def _built(config: PreTrainedConfig) -> PreTrainedModel:
    """As transformers builds it. The class of a model with a decoder takes the decoder's config."""
    decoder = getattr(config, "decoder", None)
    with installed_parts():
        if isinstance(decoder, PreTrainedConfig):
            known = AutoModelForCausalLM._model_mapping[type(config)]
            return known._from_config(decoder, attn_implementation="eager")
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def small_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """In float32 on the CPU, with weights with which what is cached matters (hybridkv.runner.tiny)."""
    if model_type in TINY:
        return tiny_model(model_type, seed)
    model = _built(small_config(model_type)).float().eval()
    fill(model, torch.Generator().manual_seed(seed))
    built: PreTrainedModel = model
    return built
