"""Padding of models with compressed caches in both layouts: the bytes that one longest request loses to it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from assumed import plan_of
from cli_support import run
from hybridkv.models import read_model
from hybridkv.planner import compare_layouts

TEXT = {"vocab_size": 1000, "max_position_embeddings": 65_536}
HEADS = {"num_attention_heads": 64, "head_dim": 128}
CONFIGS: Mapping[str, dict[str, Any]] = {
    # DeepSeek-V4-Flash: 43 layers and a drafting layer
    "deepseek_v4": {"num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]},
    "deepseek_v41": {
        **HEADS,
        "num_hidden_layers": 8,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": [0, 1, 1, 2, 2, 2, 0, 2],
        "kv_source_layer_ids": [1, 3, 7],
        "index_source_layer_ids": [1, 2, 3, 5, 7],
    },
    "glm5_next_text": {"num_hidden_layers": 45},
    "qwen4_exp_text": {
        "num_hidden_layers": 40,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
        "ple_layer_ids": [2],
    },
    "step5": {
        **HEADS,
        "num_hidden_layers": 48,
        "num_attention_groups": 8,
        "sliding_window": 512,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
        "sparse_config": {"enabled": True, "proxy_dim": 256, "region_block_size": 8},
    },
    "minimax_m3_text": {
        **HEADS,
        "num_hidden_layers": 60,
        "num_key_value_heads": 4,
        "sparse_attention_config": {"sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 57},
    },
}

# bytes lost to padding by one request of 65,536 tokens, and requests of that length, in the reference and the natural
# layout; blocks of 256 tokens, 200 GiB, bfloat16
GOLDEN: Mapping[str, tuple[tuple[int, float], tuple[int, float]]] = {
    "deepseek_v4": ((2_552_194_048, 37.18), (1_769_472, 66.58)),
    "deepseek_v41": ((86_585_344, 700.44), (0, 976.0)),
    "glm5_next_text": ((371_597_312, 152.18), (16_728_064, 202.86)),
    "qwen4_exp_text": ((34_193_408, 147.79), (196_608, 150.6)),
    "step5": ((22_917_120, 46.78), (11_894_784, 46.89)),
    "minimax_m3_text": ((0, 23.83), (0, 23.83)),
}


def config_of(model_type: str) -> dict[str, Any]:
    return {**TEXT, "model_type": model_type, **CONFIGS[model_type]}


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_of_both_layouts_equals_the_golden_bytes(name: str) -> None:
    model = read_model(config_of(name), dtype="bf16", block_size=256)
    found = compare_layouts(lambda layout: plan_of(model, "200GiB", max_model_len=65_536, layout=layout))
    assert tuple(one and (one.padding_bytes, round(one.concurrency, 2)) for one in found) == GOLDEN[name]


def test_plan_command_compares_padding_of_deepseek_v4(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("deepseek_v4")), "utf-8")
    limits = ("--max-model-len", "65536", "--block-size", "256", "--dtype", "bf16")
    text = run("plan", path, "--memory", "200GiB", *limits, "--compare").stdout
    assert re.search(r"lost in a longest request +2\.38 GiB +1\.69 MiB *\n", text)
    assert re.search(r"share of the request +44\.19% +0\.05% *\n", text)
    assert "lost: padding in all blocks of one longest request" in text
