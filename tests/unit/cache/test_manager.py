"""KVCacheManager driven without a scheduler: the full-attention lines of docs/contracts.md, 4, 5 and 9."""

from itertools import count

import numpy as np
import pytest

from caches import cache_with
from hybridkv.cache import (
    Admission,
    BlockHasher,
    KVCacheBlocks,
    KVCacheManager,
    PrefixCacheStats,
    Reason,
    Refusal,
    SlotPlan,
)
from hybridkv.errors import BlockError, CacheError, ConfigError, StalePlanError, UnsupportedModelError
from hybridkv.planner import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request
from hybridkv.specs import AttentionSpec, Keeps, RequestLimits
from hybridkv.testing import attention_config

_numbers = count()


def manager(num_blocks: int = 32, block_sizes: tuple[int, ...] = (4,), **options: bool) -> KVCacheManager:
    config = attention_config(num_blocks, block_sizes)
    return cache_with(config, 1000, **options)


def request(cache: KVCacheManager, prompt: range | list[int], **options: str) -> Request:
    name = options.pop("request_id", f"request {next(_numbers)}")
    return Request(name, prompt, hasher=cache.hasher, **options)  # type: ignore[arg-type]  # the salt


def run(cache: KVCacheManager, one: Request) -> int:
    """Look up, allocate and compute all of its tokens; tokens hit."""
    blocks, hit = cache.get_computed_blocks(one)
    new = cache.allocate_slots(one, one.num_tokens - hit, hit, blocks)
    assert new is not None
    one.num_computed_tokens = one.num_tokens
    cache.check()
    return hit


# -- hits


def test_requests_with_different_salts_share_no_blocks() -> None:
    cache = manager()
    run(cache, request(cache, range(14), cache_salt="a"))
    hits = [run(cache, request(cache, range(14), cache_salt=salt)) for salt in ("a", "b")]
    assert [*hits, run(cache, request(cache, range(14)))] == [12, 0, 0]


def test_request_of_another_hasher_is_rejected() -> None:
    cache = manager()
    stranger = Request("r", range(14), hasher=BlockHasher(4))
    for one in (stranger, Request("s", range(14))):
        with pytest.raises(ConfigError, match=r"hasher=cache\.hasher"):
            cache.get_computed_blocks(one)
        with pytest.raises(ConfigError, match=r"hasher=cache\.hasher"):
            cache.allocate_slots(one, 14)
    cache.check()
    assert cache.block_pool.get_num_free_blocks() == 31


def test_hash_block_that_divides_every_block_gives_hits() -> None:
    with pytest.raises(ConfigError, match="group 1 has blocks of 6 tokens, no multiple of the hash block 4"):
        KVCacheManager(attention_config(40, (4, 6)), 100, hasher=BlockHasher(4))
    cache = manager(40, (4, 6))
    assert cache.hasher is not None
    assert cache.hasher.block_size == 2
    run(cache, request(cache, range(30)))
    assert run(cache, request(cache, range(30))) == 24


# -- slots


def test_allocation_of_no_tokens_is_rejected() -> None:
    cache = manager()
    one = request(cache, range(14))
    for tokens in (0, -1):
        with pytest.raises(ConfigError, match=f"nothing to allocate .* num_new_tokens is {tokens}"):
            cache.allocate_slots(one, tokens)
    assert cache.block_pool.get_num_free_blocks() == 31


def test_refusal_carries_its_reason() -> None:
    cache = manager(num_blocks=6)
    one = request(cache, range(30))
    assert cache.plan_slots(one, 21) == Refusal(Reason.NO_SPACE, 0, 6, 5)
    plan = cache.plan_slots(one, 4, admission=Admission(RequestLimits(21)))
    assert plan == Refusal(Reason.ADMISSION_LIMIT, 0, 6, 5, takes=(1,))
    assert cache.plan_slots(one, 4, admission=Admission(RequestLimits(20), reserve_blocks=1)) == Refusal(
        Reason.ADMISSION_LIMIT, 0, 6, 5, takes=(1,)
    )
    assert isinstance(cache.plan_slots(one, 4, admission=Admission(RequestLimits(20))), SlotPlan)
    assert [str(reason) for reason in Reason] == ["no_space", "fragmented", "admission_limit", "prefix_not_written"]


def test_plan_changes_nothing_before_commit() -> None:
    cache = manager()
    one = request(cache, range(14))
    plan = cache.plan_slots(one, 14)
    assert isinstance(plan, SlotPlan)
    assert cache.block_pool.get_num_free_blocks() == 31
    assert one.row == -1
    assert cache.commit(plan).blocks == ([1, 2, 3, 4],)
    with pytest.raises(StalePlanError, match="plan again"):
        cache.commit(plan)
    cache.check()


@pytest.mark.parametrize("what", ["allocate", "free", "publish", "reset"])
def test_stale_plan_commit_raises(what: str) -> None:
    cache = manager()
    held, other = request(cache, range(9)), request(cache, range(50, 60))
    cache.allocate_slots(held, 9, delay_cache_blocks=True)
    if what == "reset":
        cache.free(held)
    plan = cache.plan_slots(other, 10)
    assert isinstance(plan, SlotPlan)
    if what == "allocate":
        cache.allocate_slots(held, 20)
    elif what == "free":
        cache.free(held)
    elif what == "publish":
        cache.cache_blocks(held, 9)
    else:
        cache.reset_prefix_cache()
    with pytest.raises(StalePlanError, match="planned: plan again"):
        cache.commit(plan)
    cache.check()
    assert cache.allocate_slots(other, 10) is not None


@pytest.mark.parametrize("batched", [False, True])
def test_plan_after_a_commit_without_new_blocks_is_stale(batched: bool) -> None:
    cache = manager()
    held, other = request(cache, range(8)), request(cache, range(50, 60))
    cache.allocate_slots(held, 7)
    held.num_computed_tokens = 7
    plan = cache.plan_slots(other, 10)
    assert isinstance(plan, SlotPlan)
    before = cache.block_pool.get_num_free_blocks()
    if batched:
        cache.allocate_batch(np.array([held.row]), 1)
    else:
        cache.allocate_slots(held, 1)
    assert cache.block_pool.get_num_free_blocks() == before
    assert cache.block_pool.get_cached_block(held.hashes[1]) is not None
    with pytest.raises(StalePlanError, match="planned: plan again"):
        cache.commit(plan)


def test_delayed_blocks_are_published_by_cache_blocks() -> None:
    cache = manager()
    one = request(cache, range(14))
    cache.allocate_slots(one, 14, delay_cache_blocks=True)
    one.num_computed_tokens = 14
    assert cache.get_computed_blocks(request(cache, range(14)))[1] == 0
    cache.check()
    cache.cache_blocks(one, 9)
    assert cache.get_computed_blocks(request(cache, range(14)))[1] == 8
    cache.cache_blocks(one, 100)
    assert cache.get_computed_blocks(request(cache, range(14)))[1] == 12
    cache.check()


def test_cache_blocks_publishes_held_blocks_only() -> None:
    cache = manager()
    one = request(cache, range(14))
    with pytest.raises(CacheError, match="holds no blocks here"):
        cache.cache_blocks(one, 4)
    cache.allocate_slots(one, 5, delay_cache_blocks=True)
    with pytest.raises(CacheError, match="12 tokens"):
        cache.cache_blocks(one, 12)
    cache.check()
    cache.cache_blocks(one, 5)
    assert cache.block_pool.keys.key_of(1) is not None


# -- free and reset


def test_reset_with_blocks_in_use_is_rejected() -> None:
    cache = manager(log_stats=True)
    one = request(cache, range(14))
    run(cache, one)
    assert not cache.reset_prefix_cache()
    cache.free(one)
    assert cache.reset_prefix_cache()
    assert cache.get_computed_blocks(request(cache, range(14)))[1] == 0
    stats = cache.make_prefix_cache_stats()
    assert stats is not None
    assert stats.reset
    cache.check()


def test_requests_with_the_same_id_are_rejected() -> None:
    cache = manager()
    run(cache, request(cache, range(5), request_id="same"))
    with pytest.raises(CacheError, match="request ids must be unique"):
        cache.allocate_slots(request(cache, range(5), request_id="same"), 5)
    cache.check()


def test_request_of_another_manager_is_rejected() -> None:
    here = manager()
    there = KVCacheManager(attention_config(32, (4,)), 1000, hasher=here.hasher)
    one = Request("r", range(9), hasher=here.hasher)
    here.allocate_slots(one, 9)
    for tokens in (1, 40):
        with pytest.raises(CacheError, match="holds blocks of another manager"):
            there.allocate_slots(one, tokens)
    there.check()


# -- answers


def test_common_prefix_blocks_count_blocks_of_all_running_requests() -> None:
    cache = manager(64, (4, 8))
    first, second = request(cache, range(20)), request(cache, [*range(16), 99, 98, 97])
    run(cache, first)
    assert cache.get_num_common_prefix_blocks(first, 1) == [5, 3]
    assert cache.get_num_common_prefix_blocks(first.request_id, 2) == [0, 0]
    run(cache, second)
    assert cache.get_num_common_prefix_blocks(first, 2) == [4, 2]
    assert cache.get_num_common_prefix_blocks(second, 2) == [4, 2]
    cache.free(second)
    with pytest.raises(CacheError, match="ask for a running one"):
        cache.get_num_common_prefix_blocks(second, 1)


def test_prefix_cache_statistics_reset_when_read() -> None:
    assert manager().make_prefix_cache_stats() is None
    cache = manager(log_stats=True)
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()
    run(cache, request(cache, range(14)))
    run(cache, request(cache, range(14)))
    assert cache.make_prefix_cache_stats() == PrefixCacheStats(reset=False, requests=2, queries=28, hits=12)
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()


def test_cache_statistics_report_requests_and_usage() -> None:
    cache = manager(num_blocks=10)
    first = request(cache, range(14))
    run(cache, first)
    second = request(cache, range(14))
    run(cache, second)
    cache.free(first)
    now = cache.statistics()
    assert (now.num_blocks, now.free_blocks, now.cached_blocks, now.unwritten_blocks) == (9, 5, 3, 0)
    assert (now.resident_requests, now.evictions) == (1, 0)
    assert cache.engine.resident_requests() == (second,)
    assert cache.usage == pytest.approx(4 / 9)


def test_request_blocks_add_and_compare_by_group() -> None:
    blocks = KVCacheBlocks((np.array([1, 2], np.int32), np.array([3], np.int32)))
    more = KVCacheBlocks((np.array([4], np.int32), np.array([], np.int32)))
    assert (blocks + more).blocks == ([1, 2, 4], [3])
    assert blocks.blocks[0][1] == 2
    assert blocks.get_block_ids() == ([1, 2], [3])
    empty = blocks.new_empty()
    assert empty.blocks == ([], [])
    assert empty.get_block_ids() == ([], [])
    assert empty.get_block_ids(allow_none=True) is None
    assert blocks.get_block_ids(allow_none=True) == ([1, 2], [3])
    assert blocks == blocks + empty
    assert blocks != more
    assert blocks != ([1, 2], [3])
    with pytest.raises(ConfigError, match="2 and of 1 groups"):
        blocks + KVCacheBlocks((np.array([], np.int32),))


# -- construction


def test_manager_with_invalid_limits_is_rejected() -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at least 1, got 0"):
        KVCacheManager(attention_config(8), 0)


def test_spec_without_cache_policy_is_rejected() -> None:
    class OtherSpec(AttentionSpec):
        keeps = Keeps.TOKENS

        def max_request_blocks(self, limits: RequestLimits) -> int:
            return limits.max_model_len

    spec = OtherSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float16")
    with pytest.raises(UnsupportedModelError, match="OtherSpec has no cache policy"):
        KVCacheManager(KVCacheConfig(8, (), (KVCacheGroupSpec(("layer",), spec),)), 100)


def test_handmade_blocks_without_pool_have_no_views() -> None:
    blocks = KVCacheBlocks((np.array([1], np.int32),))
    for ask in (blocks.views, blocks.get_unhashed_block_ids):
        with pytest.raises(ConfigError, match="name no pool"):
            ask()


# -- what is handed over wrongly


def test_hit_with_evicted_blocks_is_rejected() -> None:
    cache = manager(num_blocks=6)
    cache.free(run_and_return(cache, range(9)))
    late = request(cache, range(9))
    blocks, tokens = cache.get_computed_blocks(late)
    assert tokens == 8
    cache.free(run_and_return(cache, range(50, 70)))
    before = cache.block_pool.free_order()
    with pytest.raises(StalePlanError, match="were evicted since: look up again"):
        cache.allocate_slots(late, 1, tokens, blocks)
    assert cache.block_pool.free_order() == before
    assert late.row == -1
    cache.check()


def run_and_return(cache: KVCacheManager, tokens: range) -> Request:
    one = request(cache, tokens)
    cache.allocate_slots(one, len(tokens))
    return one


def test_hit_on_foreign_blocks_is_rejected() -> None:
    cache = manager(num_blocks=6)
    one = request(cache, range(9))
    for ids in ([1, 99], [-3, 1]):
        with pytest.raises(BlockError, match="is not one of this pool's"):
            cache.allocate_slots(one, 1, 8, KVCacheBlocks((np.array(ids, np.int32),)))
    with pytest.raises(ConfigError, match="a hit needs blocks of 1 groups, got 2"):
        cache.allocate_slots(one, 1, 8, KVCacheBlocks((np.array([1, 2], np.int32),) * 2))
    cache.check()


@pytest.mark.parametrize(
    "known",
    [
        {"num_encoder_tokens": 3},
        {"num_encoder_tokens": False},
        {"num_lookahead_tokens": -9},
        {"num_external_computed_tokens": 4},
        {"num_new_computed_tokens": 0.0},
    ],
)
def test_allocation_arguments_are_checked_without_new_blocks(known: dict[str, int]) -> None:
    cache = manager()
    one = request(cache, range(30))
    cache.allocate_slots(one, 3)
    one.num_computed_tokens = 3
    for new in (1, 2):
        with pytest.raises(ConfigError):
            cache.allocate_slots(one, new, **known)  # type: ignore[arg-type]  # by name


def test_published_tokens_cannot_be_truncated() -> None:
    cache = manager()
    one = request(cache, range(5))
    for token in range(5, 13):
        one.append(token)
    cache.allocate_slots(one, 12)  # nothing counts as computed yet, but 12 tokens can be hit
    with pytest.raises(ConfigError, match="cannot be cut to 9"):
        one.truncate(9)
    one.truncate(12)
    cache.check()


def test_hit_of_another_prompt_is_rejected() -> None:
    cache = manager()
    run_and_return(cache, range(9))
    blocks, tokens = cache.get_computed_blocks(request(cache, range(9)))
    for prompt, message in ((range(100, 109), "holds other tokens"), (range(8), "leaves nothing to compute of 8")):
        with pytest.raises(ConfigError, match=message):
            cache.allocate_slots(request(cache, prompt), 1, tokens, blocks)
    cache.check()


def test_finished_request_with_held_blocks_is_not_counted_as_running() -> None:
    cache = manager()
    for name, tokens in (("a", range(9)), ("b", range(9)), ("x", range(50, 59))):
        one = Request(name, tokens, hasher=cache.hasher)
        blocks, hit = cache.get_computed_blocks(one)
        cache.allocate_slots(one, 9 - hit, hit, blocks)
    assert cache.get_num_common_prefix_blocks("a", 2) == [0]  # "b" ended, "x" holds other blocks
