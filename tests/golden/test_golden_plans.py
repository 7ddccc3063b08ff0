"""Plans of public models, kept as files. To write them anew after a change on purpose:

for m in NAMES; do
  hybridkv plan $m --memory 40GiB --layout reference --json > tests/golden/$m.plan.json
done
hybridkv plan llama-4-scout --memory 40GiB --max-model-len 131072 --layout reference --json \\
  > tests/golden/llama-4-scout.plan.json
hybridkv plan nemotron-3-super-120b-a12b --memory 40GiB --kv-dtype fp8 --layout reference --json \\
  > tests/golden/nemotron-3-super-120b-a12b.fp8.plan.json
"""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridkv.models import read_model
from hybridkv.planner import plan, plan_to_json, read_plan
from hybridkv.units import GiB

HERE = Path(__file__).parent
SHORTER = {"llama-4-scout": 131_072}
"""Of ten million tokens that the config allows, 40 GiB hold less than one."""


NAMES = (
    *("bamba-9b", "deepseek-v3", "falcon-h1-7b", "gemma-3-27b", "gpt-oss-120b", "jamba-1.5-mini", "lfm2-1.2b"),
    *("llama-3-70b", "llama-3-8b", "llama-4-scout", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"),
    *("nemotron-h-8b", "qwen2.5-7b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "whisper-large-v3"),
)
"""One of every kind of plan, of those known by name."""


@pytest.mark.parametrize("name", NAMES)
def test_plan_equals_the_golden_file(name: str) -> None:
    path = HERE / f"{name}.plan.json"
    made = plan(read_model(name), 40 * GiB, max_model_len=SHORTER.get(name), layout="reference")
    assert plan_to_json(made) == path.read_text("utf-8")
    assert read_plan(path) == made


def test_plan_with_fp8_cache_equals_the_golden_file() -> None:
    path = HERE / "nemotron-3-super-120b-a12b.fp8.plan.json"
    made = plan(read_model("nemotron-3-super-120b-a12b", dtype="fp8"), 40 * GiB, layout="reference")
    assert plan_to_json(made) == path.read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "block_size", "groups", "tensors"),
    [
        # docs/contracts.md, 1: the attention block covers the state
        ("qwen3-next-80b-a3b", 544, 4, 12),
        ("qwen3.5-35b-a3b", 1056, 4, 10),
        ("nemotron-h-8b", 528, 7, 4),
        ("nemotron-3-nano-30b-a3b", 2096, 5, 6),
        ("nemotron-3-super-120b-a12b", 4160, 6, 8),
        ("nemotron-3-super-120b-a12b.fp8", 8320, 6, 8),
        ("bamba-9b", 528, 11, 3),
        ("jamba-1.5-mini", 80, 8, 4),
        ("falcon-h1-7b", 1568, 2, 44),
        # a window or a chunk needs no larger block
        ("gemma-3-27b", 16, 7, 10),
        ("gpt-oss-120b", 16, 2, 18),
        ("llama-4-scout", 16, 4, 12),
        ("whisper-large-v3", 16, 2, 32),
        # 2 columns of 2048 channels: less than a page of 16 tokens
        ("lfm2-1.2b", 16, 3, 6),
    ],
)
def test_golden_plans_have_the_reference_block_sizes(name: str, block_size: int, groups: int, tensors: int) -> None:
    golden = read_plan(HERE / f"{name}.plan.json")
    assert {group.spec.block_size for group in golden.config.groups} == {block_size}
    assert (len(golden.config.groups), len(golden.config.tensors)) == (groups, tensors)
    pages = {group.spec.page_size_bytes for group in golden.config.groups}
    assert len(pages) == 1
    holds = golden.capacity
    assert holds.block_bytes == tensors * pages.pop()
    assert holds.num_blocks == 40 * GiB // holds.block_bytes
    assert 0 <= holds.unused_bytes < holds.block_bytes


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token", "longest", "num_blocks", "tokens"),
    [
        # 40 GiB / (16 tokens * bytes per token), rounded down; one block is the null block
        ("llama-3-8b", 131_072, 8192, 20_480, 327_664),
        ("llama-3-70b", 327_680, 8192, 8192, 131_056),
        ("qwen2.5-7b", 57_344, 131_072, 46_811, 748_960),
        ("deepseek-v3", 70_272, 163_840, 38_199, 611_168),
    ],
)
def test_golden_plan_capacity_matches_arithmetic(
    name: str, kv_bytes_per_token: int, longest: int, num_blocks: int, tokens: int
) -> None:
    golden = read_plan(HERE / f"{name}.plan.json")
    holds = golden.capacity
    assert golden.model.kv_bytes_per_token == kv_bytes_per_token
    assert num_blocks == 40 * GiB // (16 * kv_bytes_per_token)
    assert tokens == (num_blocks - 1) * 16
    assert (holds.num_blocks, holds.tokens_that_fit, holds.longest_context) == (num_blocks, tokens, longest)
    assert holds.block_bytes == 16 * kv_bytes_per_token
    assert holds.unused_bytes == 40 * GiB - num_blocks * 16 * kv_bytes_per_token < holds.block_bytes
    assert holds.concurrency == (num_blocks - 1) / (longest // 16)
    assert sum(tensor.size for tensor in golden.config.tensors) == golden.config.arena_bytes <= 40 * GiB
    assert len(golden.config.groups) == 1


def test_plan_file_of_the_first_release_is_read() -> None:
    # written before pages could be padded, before there were encoder and speculative tokens, and before plans told the
    # hidden size, query heads and bytes of the weights; its limits are its own
    old = read_plan(HERE / "first-version.plan.json")
    assert old.limits.max_in_flight_tokens == 0
    assert (old.model.hidden_size, old.model.query_heads, old.model.weight_bytes) == (0, 0, 0)
    now = read_plan(HERE / "qwen2.5-7b.plan.json")
    later = {name: getattr(now.model, name) for name in ("hidden_size", "query_heads", "weight_bytes")}
    model = replace(old.model, **later)
    assert replace(old, model=model, limits=replace(old.limits, max_in_flight_tokens=8192)) == now
