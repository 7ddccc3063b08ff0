"""Models with linear attention by the delta rule, or short convolutions, beside attention."""

from __future__ import annotations

from typing import Any, Final

from hybridkv.runner.tiny.family import HEADS, TinyFamily

_FULL: Final = "full_attention"
_LINEAR: Final = "linear_attention"
_TYPES: Final = [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL]

_DELTA: Final[dict[str, Any]] = {
    **HEADS,
    "num_hidden_layers": 5,
    "layer_types": _TYPES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}

DELTA: Final = {
    "qwen3_next": TinyFamily(
        "qwen3_next",
        {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_5": TinyFamily("qwen3_5_text", _DELTA),
    "olmo_hybrid": TinyFamily("olmo_hybrid", {key: value for key, value in _DELTA.items() if key != "head_dim"}),
    "kimi_linear": TinyFamily(
        "kimi_linear",
        {
            "num_hidden_layers": 5,
            "layer_types": _TYPES,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "lfm2": TinyFamily(
        "lfm2",
        {
            **{key: value for key, value in HEADS.items() if key != "head_dim"},
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", _FULL, "conv", _FULL],
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
