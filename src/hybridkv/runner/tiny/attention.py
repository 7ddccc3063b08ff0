"""Models of attention alone: full, with a window, in chunks, latent."""

from __future__ import annotations

from typing import Any, Final

from hybridkv.runner.tiny.family import HEADS, TinyFamily

WINDOW: Final = 24
"""Tokens of windowed layers: no multiple of a block."""
CHUNK: Final = 32
FLOOR_SCALE: Final = 16
"""Tokens from which on, and behind each so many, Llama 4 scales the queries of layers without rotary positions."""

_WIDE: Final[dict[str, Any]] = {**HEADS, "num_hidden_layers": 3}
_LATENT: Final[dict[str, Any]] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_ALTERNATING: Final = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

ATTENTION: Final = {
    "llama": TinyFamily("llama", _WIDE),
    "qwen2": TinyFamily("qwen2", {key: value for key, value in _WIDE.items() if key != "head_dim"}),
    "mistral": TinyFamily("mistral", {**_WIDE, "sliding_window": WINDOW}),
    "gemma2": TinyFamily(
        "gemma2", {**HEADS, "num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    ),
    "gemma3": TinyFamily(
        "gemma3_text",
        {
            **HEADS,
            "num_hidden_layers": 4,
            "layer_types": _ALTERNATING,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt_oss": TinyFamily(
        "gpt_oss",
        {
            **HEADS,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "layer_types": _ALTERNATING,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": TinyFamily(
        "llama4_text",
        {
            **HEADS,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": CHUNK,
            "floor_scale": FLOOR_SCALE,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
        },
    ),
    "deepseek_v2": TinyFamily("deepseek_v2", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": TinyFamily("deepseek_v3", {**_LATENT, "q_lora_rank": 32}),
}
