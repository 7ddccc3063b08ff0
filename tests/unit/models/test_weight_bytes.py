"""Bytes of checkpoints: against sizes that are published, and schemes one by one by hand."""

from typing import Any

import pytest

from hybridkv.models import known_model, read_model
from hybridkv.models.fields import Fields
from hybridkv.models.layers import Weights
from hybridkv.models.quantization import weight_bytes

WEIGHTS = Weights(every=1_000, active=200, routed=800, embedded=100)
DENSE = Weights(every=1_000, active=1_000, embedded=100)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "gib", "within"),
    [
        # the model cards of gpt-oss; 688.6 GB of DeepSeek-V3 are with 14.7 GB of its multi-token prediction module
        ("gpt-oss-20b", 12.8, 0.05),
        ("gpt-oss-120b", 60.8, 0.05),
        ("deepseek-v3", (688.6 - 14.7) * 1e9 / 2**30, 2),
        # files on the hub: 595 GB in 4 bits, 230 GB in 8, 16.06 GB in bfloat16
        ("kimi-k2.5", 595e9 / 2**30, 2),
        ("minimax-m2.5", 230e9 / 2**30, 1),
        ("llama-3-8b", 16.06e9 / 2**30, 0.01),
    ],
)
def test_weight_bytes_match_published_sizes(name: str, gib: float, within: float) -> None:
    assert read_model(name).weight_bytes / 2**30 == pytest.approx(gib, abs=within)


def test_weight_bytes_without_scheme_triple_gpt_oss() -> None:
    config = {key: value for key, value in known_model("gpt-oss-20b").config.items() if key != "quantization_config"}
    assert read_model(config).weight_bytes == 2 * read_model("gpt-oss-20b").parameters
    assert read_model({**config, "torch_dtype": "float32"}).weight_bytes == 4 * read_model("gpt-oss-20b").parameters


def experts_of(bits: float) -> int:
    return int(800 * bits / 8) + 200 * 2


def matrices_of(bits: float) -> int:
    return int(900 * bits / 8) + 100 * 2


def packed(**scheme: object) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({}, 2_000),
        ({"quant_method": "mxfp4"}, None),  # of the experts alone: 800 of 900 matrices are not nearly all
        (FP8, matrices_of(8 + 32 / 128**2)),
        ({**FP8, "weight_block_size": None}, matrices_of(8)),
        (
            {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "gate"]},
            matrices_of(8 + 32 / 128**2),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, matrices_of(8)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, matrices_of(4.5)),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, matrices_of(4 + 20 / 128)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, matrices_of(4 + 16 / 128)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, matrices_of(8)),
        (packed(), matrices_of(4.5)),
        (packed(symmetric=False), matrices_of(4 + 20 / 32)),
        (packed(num_bits=8, strategy="channel", group_size=None), matrices_of(8)),
        ({**packed(), "format": "nvfp4-pack-quantized"}, matrices_of(4.5)),
        ({**packed(), "format": "mxfp4-pack-quantized"}, matrices_of(4.25)),
        ({**packed(), "config_groups": {"a": {}, "b": {}}}, None),
        ({**FP8, "modules_to_not_convert": ["model.layers.0.something"]}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ({"quant_method": "awq"}, None),
        ({"quant_method": "awq", "bits": 1 << 40}, None),
        ({**FP8, "weight_block_size": [0, 128]}, None),
        ({"quant_method": 7}, None),
    ],
)
def test_weight_bytes_of_each_scheme_match_hand_calculation(
    quantization: dict[str, object], expected: int | None
) -> None:
    assert weight_bytes(DENSE, Fields(quantization, "x"), 2) == (expected or 0)


def test_weight_bytes_of_experts_in_another_dtype_match_hand_calculation() -> None:
    """DeepSeek-V4: experts of 4 bits with a scale for 32, other matrices of 8 bits with a scale for each block."""
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weights = Weights(every=1_000_000, active=500_000, routed=640_000, embedded=40_000)
    others, embedded = 320_000 + 320_000 // 16384 * 4, 40_000 * 2
    assert weight_bytes(weights, Fields(said, "x"), 2) == 960_000 + int(960_000 / 4096) + embedded
    both = {**said, "expert_dtype": "fp4"}
    assert weight_bytes(weights, Fields(both, "x"), 2) == pytest.approx(340_000 + others + embedded, abs=4)
    assert read_model("deepseek-v4-flash").weight_bytes / 1e9 == pytest.approx(156, abs=1)


def test_weight_bytes_keep_unquantized_modules_whole() -> None:
    """850 of 900 matrices are the experts': all others keep their dtype where the attention does."""
    mostly = Weights(every=1_000, active=200, routed=850, embedded=100)
    beside = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
    for quantization, bits in (({"quant_method": "mxfp4", **beside}, 4.25), ({**FP8, **beside}, 8 + 32 / 128**2)):
        assert weight_bytes(mostly, Fields(quantization, "x"), 2) == int(850 * bits / 8) + 150 * 2
        assert weight_bytes(WEIGHTS, Fields(quantization, "x"), 2) == 0
        assert weight_bytes(DENSE, Fields(quantization, "x"), 2) == 0
