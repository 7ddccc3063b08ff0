"""Any causal language model of transformers, small enough to run here: its config class's defaults, shrunk by name.

    config class -> its defaults (kept_models.REPAIRS) -> sizes by the fields that classes share -> seeded weights

No class has code of its own here; what a few need beside the shared fields stands in FIELDS.
"""

from collections.abc import Mapping
from typing import Any

import torch
from kept_models import REPAIRS, config_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybridkv.runner import tiny_model
from hybridkv.runner.tiny import VOCAB_SIZE, fill

LAYERS, _HEADS = 4, 4
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_SIZES: Mapping[int, tuple[str, ...]] = {
    VOCAB_SIZE: ("vocab_size", "vocab_size_per_layer_input"),
    64: (
        "hidden_size",
        "d_model",
        "n_embd",
        "embed_dim",
        "word_embed_proj_dim",
        "dim",
        "embedding_size",
        "lru_width",
        "attention_hidden_size",
    ),
    4: (
        *_LAYERS,
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
        *("encoder_attention_heads", "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    ),
    16: ("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels", "global_head_dim", "swa_head_dim"),
    128: ("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"),
    32: (
        "kv_lora_rank",
        "q_lora_rank",
        "moe_intermediate_size",
        "attention_chunk_size",
        "shared_expert_intermediate_size",
    ),
    24: ("sliding_window", "sliding_window_size", "attention_window_size"),
    8: ("qk_rope_head_dim", "rotary_dim"),
    2: ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "n_shared_experts", "top_k_experts"),
    1: ("n_group", "topk_group", "first_k_dense_replace"),
    512: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"),
}
_LATENT = {"head_dim": 8, "qk_head_dim": 24}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_SHARING = {
    "layer_types": _ALTERNATING,
    "num_kv_shared_layers": 2,
    "per_layer_config": {at: {"head_dim": 32, "num_key_value_heads": 1} for at in ("1", "3")},
}
_DECODER = {"is_decoder": True}
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "axk1": {"n_group": 2},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "camembert": _DECODER,
    "cohere_compass_text": {"head_dim": 128},
    "data2vec-text": _DECODER,
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "electra": _DECODER,
    "ernie": _DECODER,
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "gemma3n_text": {
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**_SHARING, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": _SHARING,
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"H_cycles": 1, "L_cycles": 1, "num_layers_per_stack": 2},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "zero_expert_num": 4, "num_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 16},
    "megatron-bert": _DECODER,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "rembert": _DECODER,
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": _DECODER,
    "roformer": _DECODER,
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": _DECODER,
    "zaya": {"num_experts_per_tok": 1},
}
"""What sharing names does not say: states, and that an encoder is to be used as a decoder."""


def small_config(model_type: str) -> PreTrainedConfig:
    """The defaults of a config class, shrunk."""
    if model_type == "dbrx":  # takes no whole file of its own
        return config_of(model_type)
    given = dict(REPAIRS.get(model_type, {}))
    return CONFIG_MAPPING[model_type](**_shrunk(CONFIG_MAPPING[model_type](**given).to_dict(), model_type))


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


def small_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """In float32 on the CPU, with weights with which what is cached matters (hybridkv.runner.tiny)."""
    if model_type in TINY:
        return tiny_model(model_type, seed)
    model = AutoModelForCausalLM.from_config(small_config(model_type), attn_implementation="eager").float().eval()
    fill(model, torch.Generator().manual_seed(seed))
    built: PreTrainedModel = model
    return built
