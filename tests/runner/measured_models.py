"""Which configs are measured (measured_caches.py), and what a plan says in the same words."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from measured_caches import LayerCache, measured_cache
from transformers import CONFIG_MAPPING, PreTrainedConfig

from hybridkv.models import Model, read_model
from hybridkv.specs import AttentionSpec, ChunkedLocalAttentionSpec, Keeps, KVCacheSpec, MambaSpec, SlidingWindowSpec

_SOUND = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
_LFM2_TYPES = ["conv", "conv", "full_attention", "conv"] * 8

REPAIRS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 26},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": _LFM2_TYPES},
    "ministral": {"head_dim": 128},
    **dict.fromkeys(("musicgen", "musicgen_melody"), _SOUND),
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""What the defaults of a config class lack for its model to be built and run."""

_SMALL = {"hidden_size": 96, "intermediate_size": 32, "vocab_size": 99, "num_hidden_layers": 3}
ON_CPU: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {**_SMALL, "num_attention_heads": 4},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 3, "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64}},
    "megatron-bert": {**_SMALL, "num_attention_heads": 4},
    "rembert": {**_SMALL, "num_attention_heads": 6, "input_embedding_size": 16},
    "roformer": {**_SMALL, "num_attention_heads": 4, "embedding_size": 16},
    "xmod": {**_SMALL, "num_attention_heads": 4},
    "jetmoe": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99},
    "longcat_flash": {
        "hidden_size": 64,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "n_routed_experts": 8,
        "zero_expert_num": 4,
        "moe_topk": 2,
        "vocab_size": 99,
        "num_layers": 3,
    },
}
"""Models whose forward reads numbers, which the meta device has none of: what makes them small enough for a CPU."""


WRAPPERS = (
    *("cosmos3_edge", "ernie4_5_vl_moe", "glm_ocr", "mistral4", "muse_glimmer", "paddleocr_vl", "qwen2_5_omni_thinker"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
)
"""Models of images and text whose text part is no causal language model of its own, and is measured in them."""


def config_of(model_type: str) -> PreTrainedConfig:
    """The defaults of a config class with its repairs."""
    given = {**REPAIRS.get(model_type, {}), **ON_CPU.get(model_type, {})}
    return CONFIG_MAPPING[model_type](**deepcopy(given))  # some classes take their parts out of it


@cache
def cache_by_default(model_type: str) -> Mapping[int, LayerCache]:
    """What the model of ``config_of`` keeps: built once, whatever is compared with it. Raises NotMeasured."""
    return MappingProxyType(measured_cache(config_of(model_type), device=device_of(model_type)))


def variants(model_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Files that differ from the default in one thing that bytes depend on, or leave one out, of few layers.

    Coincidences of the defaults end here: as many KV heads as heads, heads that fill the hidden size, no window.
    """
    base = as_file(config_of(model_type))
    counts = [
        key for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers") if key in base
    ]
    layers = {base[key] for key in counts}
    lists = {key: value for key, value in base.items() if isinstance(value, list) and len(value) in layers}
    base |= dict.fromkeys(counts, 6) | {key: value[:5] + value[-1:] for key, value in lists.items()}
    if base.get("num_kv_shared_layers"):
        base["num_kv_shared_layers"] = 1
    if "per_layer_config" in base:
        base["per_layer_config"] = {"5": {"head_dim": 32, "num_key_value_heads": 1}}
    yield "few layers", base
    for label, change in _CHANGES.items():
        applied = {key: value for key, value in change.items() if key in base}
        if applied and next(iter(change)) in applied:
            yield label, {**base, **applied}
    for key in _LEFT_OUT:
        if base.get(key) is not None:
            yield f"without {key}", {name: value for name, value in base.items() if name != key}


_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "two KV heads": {"num_key_value_heads": 2},
    "two KV heads of another name": {"num_kv_heads": 2, "multi_query": False},
    "no multi-query attention": {"multi_query": False},
    "new decoder architecture": {"new_decoder_architecture": True, "num_kv_heads": 1},
    "wide heads": {"head_dim": 288},
    "a window": {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2},
    "a window that is off": {"use_sliding_window": False, "sliding_window": 12},
    "a window of another name": {"sliding_window_size": 12},
    "a window by its span": {"local_attention": 24},
    "no window": {"sliding_window": None},
    "a chunk": {"attention_chunk_size": 12},
    "a narrow latent": {"kv_lora_rank": 48},
    "a wide rotary part": {"qk_rope_head_dim": 96},
    "a wide indexer": {"index_head_dim": 256},
    "shared layers": {"num_kv_shared_layers": 2},
    "a decoder": {"is_decoder": True},
    "the decoder alone": {"is_encoder_decoder": False, "is_decoder": True},
    "values of another width": {"v_head_dim": 64},
    "attention both ways": {"use_bidirectional_attention": "all"},
    "keys for values": {"attention_k_eq_v": True},
    "more cycles": {"H_cycles": 3, "num_layers_per_stack": 2, "num_hidden_layers": 24},
    "a wide recurrence": {"lru_width": 512},
    "a wide attention": {"attention_hidden_size": 512},
    "a wide convolution": {"conv_kernel_size": 6},
    "three taps": {"conv_L_cache": 4},
    "other times": {"cca_time0": 4},
    "other windowed heads": {"swa_num_key_value_heads": 4},
}
"""What is changed, where the class has the first of the fields."""
_LEFT_OUT = (
    *("num_key_value_heads", "head_dim", "layer_types", "sliding_window", "use_sliding_window", "per_layer_config"),
    *("index_head_dim", "indexer_types", "kv_lora_rank", "num_kv_shared_layers", "multi_query", "num_kv_heads"),
    *("num_layers_per_stack", "attention_chunk_size", "v_head_dim", "num_attention_heads", "hidden_size"),
)
"""Fields that files may leave to their class."""


def device_of(model_type: str) -> str:
    """Where its model is measured."""
    return "cpu" if model_type in ON_CPU else "meta"


def planned(model: Model) -> dict[int, LayerCache]:
    """What the layers of ``model`` keep, by index, as measured_caches.py says it."""
    layers: dict[int, LayerCache] = {}
    for layer in model.layers:
        layers[layer.index] = _added(layers.get(layer.index, LayerCache()), layer.spec)
    return layers


def _added(was: LayerCache, spec: KVCacheSpec) -> LayerCache:
    if isinstance(spec, MambaSpec):
        return replace(was, states=(*was.states, *zip(spec.shapes, spec.dtypes, strict=True)))
    assert isinstance(spec, AttentionSpec)
    each = spec.content_bytes // spec.block_size
    if spec.keeps is Keeps.ENCODER:
        return replace(was, encoder_bytes=was.encoder_bytes + each)
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        # transformers keeps a chunk as it keeps a window of the same size
        size = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else spec.attention_chunk_size
        return replace(was, window_bytes=was.window_bytes + each, window=size)
    return replace(was, token_bytes=was.token_bytes + each)


def read(file: dict[str, Any]) -> dict[int, LayerCache]:
    """What is planned of a config's file, states as transformers lays them out."""
    return planned(read_model(file, backend="transformers", dtype="bfloat16"))


def as_file(config: PreTrainedConfig) -> dict[str, Any]:
    """The config as its file has it, of a model in bfloat16. dbrx takes its parts without what all configs have."""
    parts = {key: value for key, value in config.to_dict().items() if isinstance(value, dict)}
    without = {key: {name: one for name, one in part.items() if name not in _OF_ALL} for key, part in parts.items()}
    return {**config.to_dict(), **without, "dtype": "bfloat16"}


_OF_ALL = ("_name_or_path", "output_attentions")


def differences(plan: Mapping[int, LayerCache], measured: Mapping[int, LayerCache]) -> Iterator[str]:
    """Layers that are not planned as they are measured."""
    for index in sorted({*plan, *measured}):
        if plan.get(index) != measured.get(index):
            yield f"layer {index}: planned {plan.get(index)}, kept {measured.get(index)}"
