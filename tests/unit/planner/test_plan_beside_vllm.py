"""Blocks and concurrency that vLLM 0.32 computes (get_kv_cache_configs) from the same layers, in 40 GiB.

Noted by hand on 22 November 2026 from vLLM's own classes on a CPU. vLLM divides all blocks by those of a request, the
null block included; a plan leaves that one out.
"""

import pytest

from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import Plan, plan, plan_from_json, plan_to_json
from hybridkv.specs import BATCHED_TOKENS, MambaSpec, RequestLimits

CASES = [
    # model, tokens of a step, states that a Mamba-2 layer writes inside a step of a prompt, blocks, concurrency
    ("llama-3-70b", 8192, 0, 8192, 16.0),
    ("llama-3-8b", 8192, 0, 20_480, 40.0),
    ("qwen2.5-7b", 8192, 0, 46_811, 5.7142333984375),
    ("deepseek-v3", 8192, 0, 38_199, 3.73037109375),
    ("gemma-3-27b", 8192, 0, 32_768, 2.8117384588982324),
    ("gemma-3-27b", 2048, 0, 32_768, 3.5045989304812832),
    ("gpt-oss-120b", 8192, 0, 72_817, 8.357282221967175),
    ("gpt-oss-120b", 2048, 0, 72_817, 8.742586144795293),
    ("llama-4-scout", 8192, 0, 54_613, 4.848455255681818),
    ("llama-4-scout", 2048, 0, 54_613, 5.400810917721519),
    ("lfm2-1.2b", 8192, 0, 218_453, 27.29297851074463),
    ("qwen3-next-80b-a3b", 8192, 0, 3212, 6.581967213114754),
    ("qwen3.5-35b-a3b", 8192, 0, 1985, 7.784313725490196),
    ("jamba-1.5-mini", 8192, 1, 32_768, 9.956852020662412),
    ("nemotron-h-8b", 8192, 0, 4964, 177.28571428571428),
    ("nemotron-h-8b", 8192, 1, 4964, 146.0),
    ("nemotron-3-nano-30b-a3b", 8192, 0, 3335, 24.888059701492537),
    ("nemotron-3-nano-30b-a3b", 8192, 1, 3335, 24.166666666666668),
    ("nemotron-3-super-120b-a12b", 8192, 0, 1260, 17.027027027027028),
    ("nemotron-3-super-120b-a12b", 8192, 1, 1260, 15.949367088607595),
    ("bamba-9b", 8192, 0, 6619, 12.802707930367506),
    ("bamba-9b", 8192, 1, 6619, 12.559772296015181),
    ("falcon-h1-7b", 8192, 0, 607, 3.570588235294118),
    ("falcon-h1-7b", 8192, 1, 607, 3.5497076023391814),
]
SHORTER = {"llama-4-scout": 131_072}


def made(name: str, batched: int, checkpoints: int) -> Plan:
    return plan(
        read_model(name),
        "40GiB",
        max_model_len=SHORTER.get(name),
        max_batched_tokens=batched,
        prefill_checkpoints=checkpoints,
        layout="reference",
    )


@pytest.mark.parametrize(("name", "batched", "checkpoints", "blocks", "concurrency"), CASES)
def test_plan_matches_vllm_blocks_and_concurrency(
    name: str, batched: int, checkpoints: int, blocks: int, concurrency: float
) -> None:
    found = made(name, batched, checkpoints).capacity
    each = sum(group.blocks_per_request for group in found.groups)
    assert found.num_blocks == blocks
    assert found.num_blocks / each == pytest.approx(concurrency, rel=1e-12)
    assert found.concurrency == (blocks - 1) / each


def test_plan_without_step_size_assumes_8192_tokens() -> None:
    gemma = plan(read_model("gemma-3-27b"), "40GiB")
    assert BATCHED_TOKENS == 8192
    assert gemma.limits.max_in_flight_tokens == 8192
    assert gemma == plan(read_model("gemma-3-27b"), "40GiB", max_batched_tokens=8192, max_in_flight=1)
    two = plan(read_model("gemma-3-27b"), "40GiB", max_batched_tokens=4096, max_in_flight=2)
    assert two.capacity == gemma.capacity


def test_plan_prefill_checkpoints_need_mamba2_and_kept_states() -> None:
    limits = RequestLimits(100, prefill_checkpoints=1)
    for mamba_type, mode, blocks in (("mamba2", "align", 3), ("mamba1", "align", 2), ("mamba2", "none", 1)):
        spec = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=("float32",), mamba_type=mamba_type, cache_mode=mode)
        assert spec.max_request_blocks(limits) == blocks
    with pytest.raises(ConfigError, match="prefill_checkpoints 1 has no meaning in the natural layout"):
        plan(read_model("bamba-9b"), "40GiB", prefill_checkpoints=1)


def test_plan_document_keeps_prefill_checkpoints() -> None:
    found = made("bamba-9b", 4096, 1)
    assert plan_from_json(plan_to_json(found)) == found
    assert '"prefill_checkpoints": 1' in plan_to_json(found)
    assert "prefill_checkpoints" not in plan_to_json(made("bamba-9b", 4096, 0))
