"""Every family against transformers: a small model runs three tokens, and what it cached is what we planned."""

from collections.abc import Iterator
from itertools import groupby

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
)

from hybridkv.models import Layer, Model, read_model
from hybridkv.specs import AttentionSpec, ChunkedLocalAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

ATTENTION = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
DENSE = {**ATTENTION, "intermediate_size": 48}
MAMBA: dict[str, object] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "state_size": 4}
DELTA: dict[str, object] = {
    **DENSE,
    "num_hidden_layers": 5,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
NEMOTRON = {
    **DENSE,
    "head_dim": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
}
GRANITE = {**DENSE, "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_state": 16, "shared_intermediate_size": 24}
ZAMBA2 = {
    **ATTENTION,
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
    "num_hidden_layers": 7,
}
KIMI: dict[str, object] = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "vocab_size": 50,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
WHISPER: dict[str, object] = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "d_model": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "vocab_size": 60,
    "max_source_positions": 20,
    "max_target_positions": 30,
    "num_mel_bins": 8,
}
T5: dict[str, object] = {
    "num_layers": 2,
    "num_decoder_layers": 3,
    "d_model": 32,
    "num_heads": 4,
    "d_kv": 6,
    "d_ff": 48,
    "vocab_size": 60,
}

DEEPSEEK: dict[str, object] = {
    **KIMI,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
}

CASES: list[tuple[str, dict[str, object]]] = [
    ("llama", {**DENSE, "num_hidden_layers": 2}),
    ("llama", {**DENSE, "num_hidden_layers": 1, "head_dim": 6, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 12, "first_k_dense_replace": 2}),
    ("mistral", {**DENSE, "num_hidden_layers": 2, "sliding_window": 8}),
    (
        "qwen2",
        {**DENSE, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    ("qwen3", {**DENSE, "num_hidden_layers": 2, "head_dim": 8}),
    ("gemma2", {**DENSE, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8}),
    ("gemma3_text", {**DENSE, "num_hidden_layers": 7, "head_dim": 8, "sliding_window": 8}),
    ("gpt_oss", {**DENSE, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4}),
    (
        "llama4_text",
        {
            **DENSE,
            "num_hidden_layers": 5,
            "head_dim": 8,
            "intermediate_size_mlp": 40,
            "attention_chunk_size": 8,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
    ),
    ("llama4_text", {**DENSE, "num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 0], "num_local_experts": 2}),
    ("mamba", MAMBA),
    ("mamba", {**MAMBA, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "time_step_rank": 5}),
    ("falcon_mamba", MAMBA),
    ("mamba2", {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2}),
    ("mamba2", {**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "use_bias": True, "tie_word_embeddings": True}),
    (
        "bamba",
        {
            **DENSE,
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    ("jamba", {**DENSE, "num_hidden_layers": 6, "mamba_d_state": 4, "num_experts": 4}),
    ("jamba", {**DENSE, "num_hidden_layers": 3, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 0}),
    ("falcon_h1", {**DENSE, "num_hidden_layers": 2, "mamba_d_ssm": 48, "mamba_n_heads": 6, "head_dim": 16}),
    (
        "falcon_h1",
        {
            **DENSE,
            "num_hidden_layers": 2,
            "mamba_d_ssm": None,
            "mamba_n_heads": 4,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "mamba_n_groups": 2,
        },
    ),
    ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M-ME*"}),
    ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M*EM", "moe_latent_size": 16, "use_bias": True}),
    ("nemotron_h", {**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp"]}),
    ("zamba", {**DENSE, "num_key_value_heads": 4, "num_hidden_layers": 8, "mamba_d_state": 4}),
    ("zamba2", {**ZAMBA2, "num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 3}),
    ("zamba2", {**ZAMBA2, "mamba_ngroups": 2}),
    ("granitemoehybrid", {**GRANITE, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4}),
    ("granitemoehybrid", {**GRANITE, "layer_types": ["attention", "mamba", "mamba"], "num_local_experts": 0}),
    ("qwen3_next", {**DELTA, **EXPERTS}),
    ("qwen3_next", {**DELTA, **EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
    ("qwen3_5_text", DELTA),
    ("qwen3_5_moe_text", {**DELTA, **EXPERTS}),
    ("olmo_hybrid", {**DENSE, "num_hidden_layers": 5}),
    ("olmo_hybrid", {**DELTA, "num_hidden_layers": 3, "head_dim": 8}),
    ("kimi_linear", KIMI),
    ("kimi_linear", {**KIMI, "linear_attn_config": {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4]}}),
    ("lfm2", {**DENSE, "num_hidden_layers": 4, "full_attn_idxs": [1]}),
    ("lfm2", {**DENSE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}),
    ("whisper", WHISPER),
    ("t5", T5),
    ("t5", {**T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 1}),
]
SPECIAL = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
AUTO = {"whisper": AutoModelForSpeechSeq2Seq, "t5": AutoModelForSeq2SeqLM}


def ids(case: tuple[str, dict[str, object]] | object) -> str | None:
    return case if isinstance(case, str) else None


@pytest.mark.parametrize(("model_type", "given"), CASES, ids=ids)
def test_weights_and_modules(model_type: str, given: dict[str, object]) -> None:
    config = AutoConfig.for_model(model_type, **given, **SPECIAL)
    with torch.device("meta"):
        weights = AUTO.get(model_type, AutoModelForCausalLM).from_config(config)
    for source in ({"model_type": model_type, **given}, config.to_dict()):
        model = read_model(source, dtype="bf16")
        assert model.parameters == sum(parameter.numel() for parameter in weights.parameters())
        assert 0 < model.active_parameters <= model.parameters
        for layer in model.layers:
            module = weights.get_submodule(layer.name)
            if isinstance(layer.spec, MLAAttentionSpec) and hasattr(module, "kv_a_proj_with_mqa"):
                assert layer.spec.head_size == module.kv_a_proj_with_mqa.out_features


def cached(layer: object) -> Iterator[tuple[tuple[int, ...], str]]:
    """Shapes without the batch, and dtypes, of everything that a cache layer of transformers holds."""
    states = [getattr(layer, kind, None) or {} for kind in ("conv_states", "recurrent_states")]
    for tensor in [tensor for state in states for tensor in state.values() if tensor is not None]:
        yield tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")


def check_attention(spec: AttentionSpec, layer: object) -> None:
    keys, values = layer.keys, layer.values  # type: ignore[attr-defined]  # of transformers' cache layers
    per_token = keys[0, :, 0].numel() + values[0, :, 0].numel()
    assert spec.num_kv_heads * spec.elements_per_token == per_token
    if not isinstance(spec, MLAAttentionSpec):
        assert (spec.num_kv_heads, spec.head_size) == (keys.shape[1], keys.shape[3])
    limit = getattr(layer, "sliding_window", None)
    if isinstance(spec, SlidingWindowSpec):
        assert spec.sliding_window == limit
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        assert spec.attention_chunk_size == limit
    else:
        assert limit is None


def check_layers(model: Model, cache: DynamicCache) -> None:
    by_index = {index: list(group) for index, group in groupby(model.layers, key=lambda layer: layer.index)}
    for index, held in enumerate(cache.layers):
        planned: list[Layer] = by_index.pop(index, [])
        states = [layer.spec for layer in planned if isinstance(layer.spec, MambaSpec)]
        attention = [layer.spec for layer in planned if isinstance(layer.spec, AttentionSpec)]
        expected = [pair for spec in states for pair in zip(spec.shapes, spec.dtypes, strict=True)]
        assert list(cached(held)) == expected
        assert bool(attention) == (getattr(held, "keys", None) is not None)
        for spec in attention:
            check_attention(spec, held)
    assert not by_index


@pytest.mark.parametrize(
    ("model_type", "given"), [case for case in CASES if case[0] not in AUTO and not case[0].startswith("deep")], ids=ids
)
def test_a_forward_caches_what_is_planned(model_type: str, given: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **given, **SPECIAL)
    config.dtype = "bfloat16"
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=config)
    name = "cache_params" if "mamba" in model_type else "past_key_values"
    with torch.no_grad():
        weights(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **{name: cache})
    check_layers(read_model(config.to_dict(), backend="transformers"), cache)
    check_layers(read_model({"model_type": model_type, **given, "dtype": "bfloat16"}, backend="transformers"), cache)


@pytest.mark.parametrize(("model_type", "given"), [case for case in CASES if case[0] in AUTO], ids=ids)
def test_cross_attention_keeps_the_encoder_output(model_type: str, given: dict[str, object]) -> None:
    config = AutoConfig.for_model(model_type, **given, **SPECIAL, decoder_start_token_id=1)
    weights = AUTO[model_type].from_config(config).eval()
    model = read_model({"model_type": model_type, **given}, dtype="fp32")
    encoder_ids = {"input_ids": torch.ones((1, 5), dtype=torch.int64)}
    inputs = {"input_features": torch.zeros((1, 8, 40))} if model_type == "whisper" else encoder_ids
    with torch.no_grad():
        out = weights(**inputs, decoder_input_ids=torch.tensor([[1, 2, 3]]), use_cache=True)
    own, cross = out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache
    assert len(own.layers) == len(cross.layers) == len(model.layers) // 2
    for planned, held in zip(
        model.layers, [one for pair in zip(own.layers, cross.layers, strict=True) for one in pair], strict=True
    ):
        assert isinstance(planned.spec, AttentionSpec)
        assert held.keys.shape[1::2] == (planned.spec.num_kv_heads, planned.spec.head_size)
    assert {layer.spec.keeps.value for layer in model.layers} == {"tokens", "encoder"}
    if model_type == "whisper":
        assert cross.layers[0].keys.shape[2] == model.max_encoder_tokens == 20
        assert model.max_model_len == 30


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("switch", [None, False, True])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_windows_are_seen_where_transformers_sees_them(
    model_type: str, switch: bool | None, window: int | None, first: int
) -> None:
    given = {**DENSE, "num_hidden_layers": 2, "sliding_window": window, "max_window_layers": first}
    if switch is not None:
        given["use_sliding_window"] = switch
    types = AutoConfig.for_model(model_type, **given).layer_types
    layers = read_model({"model_type": model_type, **given}, dtype="bf16").layers
    windows = [layer.spec.sliding_window if isinstance(layer.spec, SlidingWindowSpec) else None for layer in layers]
    assert windows == [window if kind == "sliding_attention" else None for kind in types]
