"""What a quantized checkpoint says of its KV cache, as its tools write it."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli_support import error, run
from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models import known_model, read_model
from hybridkv.planner import plan, plan_from_json, plan_to_json

LLAMA = {**known_model("llama-3-8b").config, "torch_dtype": "bfloat16"}
SCHEME: dict[str, object] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
}
"""As llm-compressor writes it."""


def compressed(scheme: object) -> dict[str, object]:
    weights = {**SCHEME, "strategy": "channel"}
    return {
        "config_groups": {"group_0": {"input_activations": SCHEME, "targets": ["Linear"], "weights": weights}},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": scheme,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def modelopt(scheme: object) -> dict[str, object]:
    return {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quant_algo": "FP8",
        "quant_method": "modelopt",
        "ignore": ["lm_head"],
        "kv_cache_scheme": scheme,
    }


def sidecar(algorithm: object) -> dict[str, object]:
    """hf_quant_config.json of modelopt."""
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.19.0"}, "quantization": inner}


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (compressed(SCHEME), "quantization_config.kv_cache_scheme"),
        (compressed({**SCHEME, "strategy": "attn_head"}), "quantization_config.kv_cache_scheme"),
        (modelopt({"dynamic": False, "num_bits": 8, "type": "float"}), "quantization_config.kv_cache_scheme"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            "quantization_config.kv_cache_quant_algo",
        ),
        ({"quant_method": "modelopt", **sidecar("FP8")}, "quantization_config.quantization.kv_cache_quant_algo"),
    ],
)
def test_kv_scheme_of_fp8_halves_the_bytes(quantization: dict[str, object], said: str) -> None:
    plain, made = read_model(LLAMA), read_model({**LLAMA, "quantization_config": quantization})
    assert (plain.dtype, plain.dtype_from) == ("bfloat16", None)
    assert (made.dtype, made.dtype_from) == ("fp8", said)
    assert made.kv_bytes_per_token * 2 == plain.kv_bytes_per_token
    assert made.layers == read_model(LLAMA, dtype="fp8").layers


def test_kv_dtype_option_overrides_the_scheme() -> None:
    for scheme in (SCHEME, {**SCHEME, "type": "int"}, "nonsense"):
        config = {**LLAMA, "quantization_config": compressed(scheme)}
        for dtype, name in (("bf16", "bfloat16"), ("fp8", "fp8"), ("float32", "float32")):
            made = read_model(config, dtype=dtype)
            assert (made.dtype, made.dtype_from) == (name, None)


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {},
        compressed(None),
        modelopt(None),
        {"quant_method": "modelopt", **sidecar(None)},
        # weights alone
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        {"quant_method": "quark", "export": {"kv_cache_group": [], "pack_method": "reorder"}, "kv_cache_post_rope": 0},
    ],
)
def test_kv_dtype_with_quantized_weights_only_is_unchanged(quantization: dict[str, object] | None) -> None:
    made = read_model({**LLAMA, "quantization_config": quantization})
    assert (made.dtype, made.dtype_from) == ("bfloat16", None)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (compressed({**SCHEME, "type": "int"}), "type 'int'"),
        (compressed({**SCHEME, "num_bits": 4}), "num_bits 4"),
        (compressed({**SCHEME, "num_bits": 8.0}), "num_bits"),
        (compressed({**SCHEME, "num_bits": True}), "num_bits"),
        (compressed({**SCHEME, "strategy": "token", "dynamic": True}), "dynamic True"),
        (compressed({**SCHEME, "strategy": "group", "group_size": 128}), "strategy 'group'"),
        (compressed({**SCHEME, "symmetric": False}), "symmetric False"),
        (compressed({**SCHEME, "rotation": "hadamard"}), "rotation 'hadamard'"),
        (compressed({}), "num_bits None"),
        (compressed("static"), "'static'"),
        (compressed([8, "float"]), r"kv_cache_scheme \[8, 'float'\]"),
        (modelopt({"dynamic": False, "num_bits": 4, "type": "float"}), "num_bits 4"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "'NVFP4'"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "'INT8'"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": 8}, "kv_cache_quant_algo 8"),
        ({"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}, r"export\.kv_cache_group"),
        ({"quant_method": "quark", "kv_cache_quant_config": {"*": {"dtype": "fp8"}}}, "kv_cache_quant_config"),
        (7, "quantization_config must be a dict"),
        ({"quantization": [1]}, "quantization must be a dict"),
    ],
)
def test_kv_scheme_that_is_unknown_is_rejected(quantization: object, message: str) -> None:
    config = {**LLAMA, "quantization_config": quantization}
    with pytest.raises(ConfigError, match=rf"llama-3-8b.*{message}|config of .*{message}"):
        read_model({**config, "_name_or_path": "llama-3-8b"})
    assert read_model(config, dtype="fp8").dtype == "fp8"


def test_kv_scheme_error_names_the_option() -> None:
    with pytest.raises(UnsupportedModelError, match=r"--kv-dtype"):
        read_model({**LLAMA, "quantization_config": compressed({**SCHEME, "type": "int"})})


def test_kv_schemes_that_disagree_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": compressed(SCHEME)}), "utf-8")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar("INT8")), "utf-8")
    with pytest.raises(UnsupportedModelError, match=r"hf_quant_config\.json.*'INT8'"):
        read_model(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar("FP8")), "utf-8")
    assert read_model(tmp_path).dtype == "fp8"


def test_kv_scheme_in_a_separate_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), "utf-8")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar("FP8")), "utf-8")
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        made = read_model(source)
        assert (made.dtype, made.dtype_from) == ("fp8", "hf_quant_config.json: quantization.kv_cache_quant_algo")
    (tmp_path / "hf_quant_config.json").write_text("[", "utf-8")
    assert read_model(tmp_path, dtype="bf16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "nemotron-3-super-120b-a12b", "deepseek-v3", "whisper-large-v3"])
def test_kv_scheme_leaves_state_dtype_unchanged(name: str) -> None:
    config: dict[str, Any] = dict(known_model(name).config)
    made = read_model({**config, "quantization_config": compressed(SCHEME)})
    plain = read_model(config)
    assert made.dtype == "fp8"
    assert made.layers == read_model(config, dtype="fp8").layers
    assert made.state_bytes == plain.state_bytes
    assert made.kv_bytes_per_token * 2 == plain.kv_bytes_per_token


def test_kv_scheme_with_nested_text_config_is_read() -> None:
    inner = {**LLAMA, "quantization_config": compressed(SCHEME)}
    made = read_model({"model_type": "some_vision_model", "text_config": inner})
    assert (made.dtype, made.dtype_from) == ("fp8", "text_config.quantization_config.kv_cache_scheme")
    outer = {"model_type": "x", "text_config": LLAMA, "quantization_config": compressed(SCHEME)}
    assert read_model(outer).dtype_from == "quantization_config.kv_cache_scheme"


def test_plan_document_keeps_the_kv_dtype_source() -> None:
    model = read_model({**LLAMA, "quantization_config": compressed(SCHEME)})
    made = plan(model, "4GiB")
    document = plan_to_json(made)
    assert json.loads(document)["model"]["dtype_from"] == "quantization_config.kv_cache_scheme"
    assert plan_from_json(document) == made
    assert "dtype_from" not in plan_to_json(plan(read_model(LLAMA), "4GiB"))


def test_plan_command_prints_the_kv_dtype_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": compressed(SCHEME)}), "utf-8")
    said = run("plan", tmp_path, "--memory", "4GiB").stdout
    assert "keys and values   fp8, by quantization_config.kv_cache_scheme\n" in said
    assert "keys and values" not in run("plan", tmp_path, "--memory", "4GiB", "--kv-dtype", "fp8").stdout
    int8 = {**LLAMA, "quantization_config": compressed({**SCHEME, "type": "int"})}
    (tmp_path / "config.json").write_text(json.dumps(int8), "utf-8")
    assert "with type 'int'" in error("plan", tmp_path, "--memory", "4GiB")
    assert "fp8 cache" in run("plan", tmp_path, "--memory", "4GiB", "--kv-dtype", "fp8").stdout
