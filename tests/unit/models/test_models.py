import json
from pathlib import Path

import pytest

from hybridkv.errors import AssumptionWarning, ConfigError, UnsupportedModelError
from hybridkv.models import Model, known_model, read_model
from hybridkv.planner import plan
from hybridkv.specs import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 100,
    "torch_dtype": "float16",
}
QWEN = {**LLAMA, "model_type": "qwen2"}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
DEEPSEEK: dict[str, object] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def kv_heads(model: Model) -> int:
    spec = model.layers[0].spec
    assert isinstance(spec, FullAttentionSpec)
    return spec.num_kv_heads


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "nemotron-3-nano-30b-a3b", "jamba-1.5-mini", "lfm2-1.2b"])
def test_state_spec_with_drafts_is_wider_and_needs_blocks(name: str) -> None:
    plain = [x.spec for x in read_model(name).layers if isinstance(x.spec, MambaSpec)]
    drafting = [x.spec for x in read_model(name, num_speculative_tokens=2).layers if isinstance(x.spec, MambaSpec)]
    for one, two in zip(plain, drafting, strict=True):
        assert (two.shapes[0][0], two.shapes[0][1]) == (one.shapes[0][0] + 2, one.shapes[0][1])
        assert two.shapes[1:] == one.shapes[1:]
        assert two.num_speculative_blocks == 2


@pytest.mark.parametrize(
    ("name", "tp", "shapes"),
    [
        # heads, groups and channels are split
        ("nemotron-h-8b", 8, ((3, (128 * 64 + 2 * 8 * 128) // 8), (16, 64, 128))),
        ("qwen3.5-35b-a3b", 4, ((3, 8192 // 4), (8, 128, 128))),
        ("jamba-1.5-mini", 2, ((3, 4096), (4096, 16))),
        # a group that cannot be split is repeated: one on every rank
        ("nemotron-h-8b", 16, ((3, 8 * 64 + 2 * 128), (8, 64, 128))),
        ("bamba-9b", 4, ((3, 128 * 64 // 4 + 2 * 128), (32, 64, 128))),
    ],
)
def test_state_shapes_of_a_rank_are_split(name: str, tp: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    specs = {x.spec for x in read_model(name, tp=tp).layers if isinstance(x.spec, MambaSpec)}
    assert [spec.shapes for spec in specs] == [shapes]


def test_tp_that_does_not_divide_the_state_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"tp=3 does not divide the 16 attention heads"):
        read_model("qwen3-next-80b-a3b", tp=3)
    mixed = {**known_model("qwen3-next-80b-a3b").config, "num_attention_heads": 32}
    with pytest.raises(
        ConfigError, match=r"tp=32 does not divide the 16 linear attention key heads .*: use one of 1, 2"
    ):
        read_model(mixed, tp=32)


def test_active_parameters_exclude_embedding_and_idle_experts() -> None:
    dense = read_model("llama-3-8b")
    assert dense.active_parameters == dense.parameters - 128256 * 4096
    # the model card says 36.6 billion, the output head included
    assert round(read_model("deepseek-v3").active_parameters / 1e9, 1) == 36.6
    tied = read_model({**LLAMA, "tie_word_embeddings": True})
    assert tied.active_parameters == tied.parameters == read_model(LLAMA).active_parameters


@pytest.mark.parametrize("source", [str, Path])
def test_model_config_of_file_or_folder_is_read(tmp_path: Path, source: type[str] | type[Path]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    model = read_model(source(tmp_path))
    assert model == read_model(source(tmp_path / "config.json"))
    assert model.name == tmp_path.name
    assert model.layers == read_model(LLAMA).layers


def test_model_sizes_follow_heads_and_options() -> None:
    model = read_model(LLAMA, block_size=32, dtype="fp32")
    assert [layer.name for layer in model.layers] == [f"model.layers.{i}.self_attn" for i in range(4)]
    assert [layer.index for layer in model.layers] == [0, 1, 2, 3]
    assert {layer.spec for layer in model.layers} == {
        FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype="float32")
    }
    assert (model.dtype, model.block_size, model.tp) == ("float32", 32, 1)
    assert read_model({**LLAMA, "head_dim": 24}).layers[0].spec.page_size_bytes == 2 * 16 * 2 * 24 * 2
    assert read_model(LLAMA, backend="transformers") == read_model(LLAMA)


def test_model_without_kv_heads_uses_all_heads() -> None:
    assert kv_heads(read_model({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})) == 8
    assert kv_heads(read_model({**LLAMA, "num_key_value_heads": None})) == 8


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_kv_heads_under_tensor_parallelism_are_at_least_one(tp: int, heads: int) -> None:
    assert kv_heads(read_model(LLAMA, tp=tp)) == heads


def test_latent_under_tensor_parallelism_stays_whole() -> None:
    model = read_model(DEEPSEEK, tp=8)
    assert {layer.spec for layer in model.layers} == {MLAAttentionSpec(block_size=16, head_size=40, dtype="float16")}


@pytest.mark.parametrize(("config", "tp"), [(LLAMA, 3), (LLAMA, 16), (DEEPSEEK, 3)])
def test_tp_that_does_not_divide_lists_valid_sizes(config: dict[str, object], tp: int) -> None:
    with pytest.raises(ConfigError, match=r"use one of 1, 2, 4, 8$"):
        read_model(config, tp=tp)


def test_tp_that_does_not_divide_kv_heads_is_rejected() -> None:
    wide = {**LLAMA, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
    assert kv_heads(read_model(wide, tp=12)) == 1
    with pytest.raises(ConfigError, match=r"use one of 1, 2, 4, 12$"):
        read_model(wide, tp=6)


@pytest.mark.parametrize(
    ("given", "longest"),
    [
        ({}, 256),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}}, 256),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 640),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 256),
    ],
)
def test_model_longest_context_is_read(given: dict[str, object], longest: int | None) -> None:
    assert read_model({**LLAMA, **given}).max_model_len == longest


def test_model_text_config_inside_a_larger_config_is_read() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    outer = {"model_type": "llava", "dtype": "float32", "text_config": inner}
    assert read_model(outer).model_type == "llama"
    assert read_model(outer).dtype == "float32"
    assert read_model({**outer, "text_config": LLAMA}).dtype == "float16"


def test_model_config_without_dtype_gets_default_and_warning() -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    model = read_model(bare)
    assert model.dtype == "bfloat16"
    with pytest.warns(AssumptionWarning, match=r"dtype of keys and values bfloat16 .*--dtype"):
        plan(model, "1GiB")
    said = read_model(bare, dtype="bf16")
    assert (said.dtype, said.assumptions) == ("bfloat16", ())
    plan(said, "1GiB")  # no warning, or the suite fails


SLIDING = "sliding_attention"


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**MISTRAL, "sliding_window": 4096}, [4096] * 4),
        # the config class's own default is a window of 4096
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, [4096] * 4),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096, 4096]),
        ({**QWEN, "layer_types": ["full_attention", SLIDING] * 2, "sliding_window": 8}, [None, 8, None, 8]),
        ({**LLAMA, "sliding_window": 128}, [128] * 4),
        ({**LLAMA, "layer_types": ["full_attention"] * 4}, [None] * 4),
        (MISTRAL, [None] * 4),
        ({**QWEN, "model_type": "qwen3"}, [None] * 4),
        ({**MISTRAL, "sliding_window": 8, "layer_types": ["full_attention"] * 4}, [8] * 4),
    ],
)
def test_model_window_layers_match_the_config(config: dict[str, object], windows: list[int | None]) -> None:
    layers = read_model(config).layers
    assert [
        layer.spec.sliding_window if isinstance(layer.spec, SlidingWindowSpec) else None for layer in layers
    ] == windows


def test_model_chunk_layers_match_the_config() -> None:
    model = read_model({**LLAMA, "attention_chunk_size": 8})
    assert {layer.spec for layer in model.layers} == {
        ChunkedLocalAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float16", attention_chunk_size=8)
    }


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {**LLAMA, "layer_types": ["linear_attention", "conv", "conv", "mamba"]},
            r"0 \(linear_.*1-2 \(conv\); 3 \(mamba\)",
        ),
        ({**LLAMA, "is_encoder_decoder": True}, r"layers 0-3 \(cross_attention\)"),
        ({**DEEPSEEK, "layer_types": ["full_attention"] * 3 + [SLIDING]}, r"layers 3 \(sliding_attention\)"),
        ({"model_type": "reformer"}, "'reformer'.*its layers keep buckets of hidden states"),
        ({**LLAMA, "model_type": "minimax", "layer_types": [SLIDING] * 3 + ["full_attention"]}, r"layers 0-2 \(slid"),
        ({"model_type": "brand_new"}, "'brand_new'.*is not known, and nothing like num_hidden_layers"),
        ({}, "model_type is missing"),
    ],
)
def test_model_that_cannot_be_planned_is_rejected(config: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_model(config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing: add it"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 0}, "at least 1, got 0"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer"),
        ({"num_attention_heads": 7}, "7 attention heads do not divide hidden_size 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "int4"}, "unknown cache dtype 'int4'"),
        ({"rope_scaling": [1]}, "rope_scaling must be a dict"),
        ({"text_config": 3}, "text_config must be a dict"),
        ({"model_type": 3}, "model_type must be a str"),
    ],
)
def test_model_config_with_malformed_field_names_it(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_model({**LLAMA, **given})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-3-80b", "did you mean llama-3-8b"),
        ("qwen3-8", "did you mean qwen3-8b"),
        ("qwen3_8B", "did you mean qwen3-8b"),
        ("meta-llama/llama-3-8b-hf", "did you mean llama-3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "did you mean qwen2.5-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "did you mean mistral-7b"),
        ("deepseek", "did you mean deepseek-r1, deepseek-v3 or deepseek-v3.2"),
        ("zzz", r"known model: \(`hybridkv models` lists them\)"),
        ("nowhere/config.json", "neither a file, a folder nor a known model"),
    ],
)
def test_model_with_unknown_name_lists_similar_names(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_model(name)


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[]", "no JSON object"), (b"\xff", "cannot read")])
def test_model_file_without_config_is_rejected(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        read_model(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"block_size": 0}, {"block_size": -16}, {"tp": 0}, {"backend": "tensorrt"}, {"dtype": "int4"}]
)
def test_model_option_that_is_invalid_is_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        read_model(LLAMA, **wrong)  # type: ignore[arg-type]  # wrong on purpose
