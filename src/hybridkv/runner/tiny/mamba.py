"""Models with selective state spaces, alone and beside attention."""

from __future__ import annotations

from typing import Any, Final

from hybridkv.runner.tiny.family import HEADS, TinyFamily

_FULL: Final = "full_attention"
_LINEAR: Final = "linear_attention"

_HYBRID: Final[dict[str, Any]] = {key: value for key, value in HEADS.items() if key != "head_dim"}
_MAMBA1: Final[dict[str, Any]] = {"num_hidden_layers": 3, "state_size": 8, "time_step_rank": 4}
_MAMBA2: Final[dict[str, Any]] = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_UNCLAMPED: Final = 1e-9
"""NemotronH and Zamba2 raise the step size to ``time_step_min`` in prompts but not in decoding: so low that none is."""

MAMBA: Final = {
    "mamba": TinyFamily("mamba", _MAMBA1),
    "falcon_mamba": TinyFamily("falcon_mamba", _MAMBA1),
    "mamba2": TinyFamily(
        "mamba2",
        {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "bamba": TinyFamily("bamba", {**_HYBRID, **_MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]}),
    "jamba": TinyFamily(
        "jamba",
        {
            **_HYBRID,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "num_experts": 4,
        },
    ),
    "falcon_h1": TinyFamily(
        "falcon_h1", {**HEADS, **_MAMBA2, "num_hidden_layers": 3, "mamba_d_ssm": 128, "attention_out_multiplier": 3.0}
    ),
    "zamba": TinyFamily(
        "zamba",
        {
            **_HYBRID,
            "num_key_value_heads": 4,
            "num_hidden_layers": 8,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
        },
    ),
    "zamba2": TinyFamily(
        "zamba2",
        {
            **_HYBRID,
            "num_key_value_heads": 4,
            "num_hidden_layers": 5,
            "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "time_step_min": _UNCLAMPED,
        },
    ),
    "granite_hybrid": TinyFamily(
        "granitemoehybrid",
        {
            **_HYBRID,
            **_MAMBA2,
            "num_hidden_layers": 4,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL],
            "num_local_experts": 4,
            "intermediate_size": 64,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.25,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": TinyFamily(
        "nemotron_h",
        {
            **HEADS,
            "layers_block_type": [_LINEAR, "mlp", _FULL, _LINEAR, "moe", _FULL],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "time_step_min": _UNCLAMPED,
        },
    ),
}
