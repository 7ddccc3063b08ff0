"""examples/foreign_engine.py: a manager without a Scheduler, and the steps that its loop tells the manager of."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from hybridkv import KVCacheManager, Request, plan, read_model
from hybridkv.cache import Reason, Refusal
from hybridkv.errors import CacheError
from hybridkv.testing.configs import full_spec, natural_model_config

EXAMPLE = Path(__file__).parents[3] / "examples" / "foreign_engine.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_foreign_engine_example_gives_outputs_of_no_cache(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    example["main"]()
    told = capsys.readouterr().out
    assert all(f"blocks copied: {kind}: " in told for kind in ("block", "move", "state"))
    assert "16 outputs as without a cache" in told


def test_preempted_request_in_foreign_engine_gives_the_same_outputs(example: dict[str, Any]) -> None:
    planned = plan(read_model("llama-3-8b"), "80MiB", max_model_len=400)  # 39 blocks
    engine = example["Engine"](planned)
    prompts = [[100 * n + i for i in range(90)] for n in range(6)]
    asked = [(engine.add(str(n), prompt, 80), prompt) for n, prompt in enumerate(prompts)]
    while engine.waiting or engine.running:
        engine.step()
        engine.cache.check()
    assert engine.counts["preemptions"] > 0
    assert all(request.output_token_ids == engine.plain(prompt, 80) for request, prompt in asked)


# -- steps


def cache_of_blocks() -> KVCacheManager:
    return KVCacheManager(natural_model_config(40, (full_spec(4),), [2]), 100, enable_kv_cache_events=True)


def admit(cache: KVCacheManager, name: str, tokens: int) -> object:
    request = Request(name, list(range(tokens)), hasher=cache.hasher)
    blocks, hit = cache.get_computed_blocks(request)
    return cache.plan_slots(request, tokens - hit, hit, blocks)


def test_block_unwritten_in_a_step_is_not_copied_in_it() -> None:
    cache = cache_of_blocks()
    with cache.step(0):
        first = Request("first", list(range(10)), hasher=cache.hasher)
        assert cache.allocate_slots(first, 10) is not None
        refused = admit(cache, "second", 10)  # would begin inside the third block, which is not there yet
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.PREFIX_NOT_WRITTEN
    with cache.step(1):
        assert not isinstance(admit(cache, "second", 10), Refusal)  # steps run in order


def test_manager_steps_out_of_order_are_rejected() -> None:
    cache = cache_of_blocks()
    with cache.step(3), pytest.raises(CacheError, match="step 4 begins while step 3 is open"), cache.step(4):
        pass
    with pytest.raises(CacheError, match="step 3 begins after step 3, which is in flight"), cache.step(3):
        pass
    cache.mark_written(3)
    with cache.step(0):
        pass
