"""Plans of public models, kept as files. To write them anew after a change on purpose:

for m in llama-3-8b llama-3-70b qwen2.5-7b deepseek-v3; do
  hybridkv plan $m --memory 40GiB --json > tests/golden/$m.plan.json
done
"""

from pathlib import Path

import pytest

from hybridkv.models import known_models, read_model
from hybridkv.plan import make_plan, plan_to_json, read_plan
from hybridkv.units import GiB

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", [known.name for known in known_models()])
def test_the_plan_is_the_golden_one(name: str) -> None:
    path = HERE / f"{name}.plan.json"
    made = make_plan(read_model(name), 40 * GiB)
    assert plan_to_json(made) == path.read_text("utf-8")
    assert read_plan(path) == made


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
def test_golden_plans_hold_what_arithmetic_says(
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


def test_a_plan_of_the_first_release_is_read() -> None:
    # written before pages could be padded and before there were encoder and speculative tokens
    old = read_plan(HERE / "first-version.plan.json")
    assert old == read_plan(HERE / "qwen2.5-7b.plan.json")
