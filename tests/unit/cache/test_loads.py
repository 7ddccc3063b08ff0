"""Blocks written from elsewhere: taken for nothing that is computed now, found by nobody until they are there."""

import numpy as np
import pytest

from caches import cache_with
from hybridkv import KVCacheManager, Request
from hybridkv.cache import Admission, BlockStored, Refusal
from hybridkv.errors import BlockError, CacheError, ConfigError
from hybridkv.eviction import eviction_named
from hybridkv.extra_keys import EncoderInput
from hybridkv.planner import KVCacheConfig
from hybridkv.specs import RequestLimits
from hybridkv.testing.configs import (
    chunk_spec,
    cross_spec,
    full_spec,
    model_config,
    natural_model_config,
    rate_spec,
    ring_spec,
    state_spec,
    window_spec,
)

REFERENCE = {
    "full": model_config(40, (full_spec(4),)),
    "window": model_config(40, (full_spec(4), window_spec(4, 6))),
    "chunk": model_config(40, (full_spec(4), chunk_spec(4, 8))),
    "state": model_config(40, (full_spec(4), state_spec(4))),
}
NATURAL = {
    "full": natural_model_config(20, (full_spec(4),), [2]),
    "window": natural_model_config(20, (full_spec(4), window_spec(4, 6)), [2, 2]),
    "state": natural_model_config(20, (full_spec(4), state_spec(4)), [2, 1]),
}
EVERY = [*REFERENCE.values(), *NATURAL.values()]
IDS = [*(f"reference-{name}" for name in REFERENCE), *(f"natural-{name}" for name in NATURAL)]

every_layout = pytest.mark.parametrize("config", EVERY, ids=IDS)


def made(config: KVCacheConfig, **options: object) -> KVCacheManager:
    return cache_with(config, 100, enable_kv_cache_events=True, **options)


def request(cache: KVCacheManager, name: str = "r", tokens: int = 21) -> Request:
    return Request(name, list(range(tokens)), hasher=cache.hasher)


def hit_tokens(cache: KVCacheManager, tokens: int = 21) -> int:
    return cache.find_hit(request(cache, "look", tokens)).tokens


def loading(cache: KVCacheManager, tokens: int = 21, external: int = 16) -> Request:
    one = request(cache, tokens=tokens)
    blocks, hit = cache.get_computed_blocks(one)
    taken = cache.allocate_slots(
        one, 0, hit, blocks, delay_cache_blocks=True, num_external_computed_tokens=external - hit
    )
    assert taken is not None
    cache.fields.take_transfers()
    return one


@every_layout
def test_loaded_blocks_are_hit_after_the_load(config: KVCacheConfig) -> None:
    cache = made(config)
    one = loading(cache)
    cache.check()
    assert one.num_computed_tokens == 16
    assert cache.usage > 0
    assert hit_tokens(cache) == 0
    assert cache.take_events() == []
    assert cache.engine.finish_load(one) == 16
    cache.check()
    assert one.num_computed_tokens == 16
    # what a running state has behind it is a checkpoint's affair: the row's own block is rewritten by its next step
    kept = cache.placement is not None and any(group.states is not None for group in cache.groups)
    assert hit_tokens(cache) == (0 if kept else 16)
    assert kept or any(isinstance(event, BlockStored) for event in cache.take_events())
    assert cache.allocate_slots(one, 5) is not None
    cache.check()
    cache.free(one)
    cache.check()
    assert cache.usage == 0


@every_layout
def test_loading_blocks_are_locked_until_the_load_ends(config: KVCacheConfig) -> None:
    cache = made(config)
    one = loading(cache)
    for ask in (
        lambda: cache.allocate_slots(one, 1),
        lambda: cache.plan_slots(one, 1),
        lambda: cache.allocate_batch(np.array([one.row]), 1),
        lambda: cache.cache_blocks(one, 16),
        lambda: cache.engine.blocks_to_share(one),
    ):
        with pytest.raises(CacheError, match="being loaded"):
            ask()
    cache.keep_resume_point(one)
    cache.engine.drop_skipped(one)
    cache.check()
    assert hit_tokens(cache) == 0
    cache.free(one)
    cache.check()
    assert not list(cache.locks)
    assert hit_tokens(cache) == 0


@every_layout
def test_partial_load_leaves_the_rest_to_compute(config: KVCacheConfig) -> None:
    cache = made(config)
    one = loading(cache)
    went_on = cache.engine.finish_load(one, 12)
    cache.check()
    whole = all(group.policy.droppable(16) == 0 and group.states is None for group in cache.groups)
    assert went_on == (12 if whole else 0)
    if went_on:
        assert hit_tokens(cache) == 12
        assert cache.allocate_slots(one, 9) is not None
        assert hit_tokens(cache) == 20
    else:
        assert one.row < 0
        assert cache.usage == 0
        blocks, hit = cache.get_computed_blocks(one)
        assert hit == 0
        assert cache.allocate_slots(one, 21, hit, blocks) is not None
    cache.check()


@every_layout
def test_load_after_a_local_hit_covers_both(config: KVCacheConfig) -> None:
    cache = made(config)
    first = request(cache, "first", 9)
    for tokens in (8, 1):
        assert cache.allocate_slots(first, tokens) is not None
        first.num_computed_tokens += tokens
    cache.keep_resume_point(first)
    cache.free(first)
    natural = cache.placement is not None
    assert hit_tokens(cache) == (9 if natural else 8)
    one = request(cache)
    blocks, hit = cache.get_computed_blocks(one)
    external = 16 - hit
    assert cache.allocate_slots(one, 0, hit, blocks, delay_cache_blocks=True, num_external_computed_tokens=external)
    copies = cache.fields.take_transfers().copies
    assert {copy.kind for copy in copies} == ({"block"} if natural else set())  # a state comes from elsewhere
    assert cache.engine.finish_load(one) == 16
    cache.check()


def test_load_publishes_resume_points_within_it() -> None:
    cache = made(NATURAL["full"], eviction=eviction_named("hazard"))
    one = Request("r", list(range(21)), hasher=cache.hasher, marks=(14,))
    assert cache.allocate_slots(one, 0, delay_cache_blocks=True, num_external_computed_tokens=16) is not None
    assert cache.engine.finish_load(one, 13) == 13
    for end in (15, 21):
        assert cache.allocate_slots(one, end - one.num_computed_tokens) is not None
        cache.store_checkpoints(np.array([one.row]), np.array([one.num_computed_tokens]), np.array([end]))
        one.num_computed_tokens = end
    other = Request("other", [*range(14), *[99] * 7], hasher=cache.hasher)
    assert cache.find_hit(other).tokens == 14
    assert sum(end.kept for end in cache.statistics().ends) == 2  # at the mark, and before the prompt's last token
    cache.check()


def test_load_finished_inside_a_step_can_be_hit_in_it() -> None:
    """Told inside a step, it is there all the same: a state can be hit in that very step."""
    cache = made(REFERENCE["state"])
    one = loading(cache)
    with cache.step(0):
        cache.engine.finish_load(one)
        other = request(cache, "other")
        blocks, hit = cache.get_computed_blocks(other)
        assert hit == 16
        assert cache.allocate_slots(other, 5, hit, blocks) is not None
    cache.revoke(0)
    assert hit_tokens(cache) == 16
    cache.check()


def test_loading_blocks_survive_free_in_both_layouts() -> None:
    for config in (REFERENCE["full"], NATURAL["full"]):
        cache = made(config)
        one = loading(cache)
        usage = cache.usage
        lock = cache.engine.lock(one)
        cache.free(one)
        cache.check()
        assert cache.usage == usage
        cache.engine.unlock(lock)
        assert cache.usage == 0
        cache.check()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_new_tokens": 0}, "nothing to allocate"),
        ({"num_new_tokens": -1, "num_external_computed_tokens": 4, "delay_cache_blocks": True}, "nothing to allocate"),
        ({"num_new_tokens": 0, "num_external_computed_tokens": 4}, "delay_cache_blocks=True"),
        ({"num_new_tokens": 0, "num_external_computed_tokens": 21, "delay_cache_blocks": True}, "nothing to compute"),
    ],
)
def test_load_with_invalid_arguments_is_rejected(asked: dict[str, int], said: str) -> None:
    cache = made(REFERENCE["full"])
    with pytest.raises(ConfigError, match=said):
        cache.allocate_slots(request(cache), **asked)  # type: ignore[arg-type]
    cache.check()


def test_load_that_was_not_started_is_rejected() -> None:
    cache = made(REFERENCE["full"])
    one = loading(cache)
    with pytest.raises(ConfigError, match="so 17 cannot arrive"):
        cache.engine.finish_load(one, 17)
    cache.engine.finish_load(one)
    with pytest.raises(CacheError, match="nothing of 'r' is being loaded"):
        cache.engine.finish_load(one)
    with pytest.raises(CacheError, match="holds no blocks"):
        cache.engine.finish_load(request(cache, "nobody"))


# -- admission


def test_admission_leaves_blocks_that_other_prefills_need() -> None:
    """39 blocks: 6 of the chunk fit beside 33, and not beside 34, though the whole fits either way."""
    cache = made(REFERENCE["full"])
    one = request(cache, tokens=40)
    whole = RequestLimits(40)
    plan = cache.plan_slots(one, 24, admission=Admission(whole, chunk_reserve=34))
    assert isinstance(plan, Refusal)
    assert (plan.reason, plan.needed_blocks) == ("admission_limit", 40)
    assert not isinstance(cache.plan_slots(one, 24, admission=Admission(whole, chunk_reserve=33)), Refusal)
    assert isinstance(cache.plan_slots(one, 24, admission=Admission(whole, reserve_blocks=30)), Refusal)


@every_layout
def test_admission_counts_loaded_blocks_as_held(config: KVCacheConfig) -> None:
    cache = made(config)
    one = loading(cache)
    cache.engine.finish_load(one)
    none = [0] * len(cache.block_pool.bases)
    free = cache.block_pool.space.weigh(none, none).free
    fresh = cache.plan_slots(request(cache, "fresh"), 21, admission=Admission(RequestLimits(21), reserve_blocks=free))
    own = cache.plan_slots(one, 5, admission=Admission(RequestLimits(21), reserve_blocks=free))
    assert isinstance(fresh, Refusal)
    assert isinstance(own, Refusal)
    assert own.needed_blocks < fresh.needed_blocks


@every_layout
def test_blocks_to_come_exclude_held_blocks(config: KVCacheConfig) -> None:
    cache = made(config)
    limits = RequestLimits(21)
    whole = cache.engine.blocks_to_come(request(cache), limits)
    assert 0 < whole <= cache.bounds.peak_blocks(limits, 1)
    one = loading(cache)
    assert 0 < cache.engine.blocks_to_come(one, limits) < whole
    cache.engine.finish_load(one)
    assert cache.allocate_slots(one, 5) is not None
    assert cache.engine.blocks_to_come(one, limits) <= 1  # a window or a state: steps in flight


# -- connectors


@pytest.mark.parametrize("config", [REFERENCE["window"], NATURAL["window"]], ids=["reference", "natural"])
def test_block_with_failed_load_is_not_hit(config: KVCacheConfig) -> None:
    cache = made(config)
    one = request(cache)
    assert cache.allocate_slots(one, 21) is not None
    one.num_computed_tokens = 21
    table = cache.get_block_ids("r")
    cache.evict_blocks(0, table[0][3:])
    cache.check()
    assert hit_tokens(cache) == 12
    assert cache.get_block_ids("r") == table
    cache.evict_blocks(0, [0, table[0][0]])
    assert hit_tokens(cache) == 0
    with pytest.raises(BlockError, match="group 1 has no block 999"):
        cache.evict_blocks(1, [999])
    with pytest.raises(ConfigError, match="group"):
        cache.evict_blocks(2, [1])


@every_layout
@pytest.mark.parametrize("came", [0, 3, 6])
def test_partial_load_never_resumes_inside_shared_blocks(config: KVCacheConfig, came: int) -> None:
    """Less came than the hit has: the request goes on behind that, or looks again."""
    cache = made(config)
    first = Request("a", list(range(13)), hasher=cache.hasher)
    assert cache.allocate_slots(first, 13) is not None
    cache.fields.take_transfers()
    hit = hit_tokens(cache)
    one = loading(cache, external=16)
    held = {block for ids in cache.get_block_ids("a") for block in ids}
    went_on = cache.engine.finish_load(one, came)
    cache.check()
    assert went_on in {0, hit} if hit else went_on in {0, came}
    if not went_on:
        assert one.row < 0
        return
    mine = [set(ids[went_on // 4 :]) for ids in cache.get_block_ids(one.request_id)]
    assert not any(ids & held for ids in mine), "it would write where another reads"
    assert cache.allocate_slots(one, 21 - went_on) is not None
    cache.check()


# -- prefixes that a transfer brings whole


def test_load_of_a_whole_prefix_ends_inside_a_ring() -> None:
    cache = made(natural_model_config(40, (full_spec(4), rate_spec(8, 4), ring_spec(4, 4)), [2, 1, 1]))
    one = request(cache)
    with pytest.raises(ConfigError, match="external tokens up to 18 end inside a state"):
        cache.allocate_slots(one, 0, delay_cache_blocks=True, num_external_computed_tokens=18)
    assert cache.engine.begin_load(one, cache.find_hit(one), 18) is not None
    assert cache.engine.finish_load(one) == 18
    cache.keep_resume_point(one)
    cache.free(one)
    hit = cache.find_hit(request(cache, "look", 19))
    assert hit.tokens == 18
    assert hit.sources[2]  # the ring that was loaded
    cache.check()


def hearing(cache: KVCacheManager, name: str, digest: str = "speech") -> Request:
    return Request(name, list(range(21)), hasher=cache.hasher, encoder=EncoderInput(digest, 10))


@pytest.mark.parametrize("arrived", [None, 8])
def test_output_of_an_encoder_is_found_once_it_was_loaded_whole(arrived: int | None) -> None:
    cache = made(natural_model_config(40, (full_spec(4), cross_spec(4)), [2, 1]))
    one = hearing(cache, "one")
    with pytest.raises(ConfigError, match="the encoder of 'one' does not run while"):
        cache.allocate_slots(one, 0, delay_cache_blocks=True, num_encoder_tokens=10, num_external_computed_tokens=16)
    assert cache.engine.begin_load(one, cache.find_hit(one), 16, 10) is not None
    held = cache.get_blocks("one").ids[1].tolist()
    assert not cache.engine.encoder_blocks(hearing(cache, "look"))
    assert cache.engine.finish_load(one, arrived) == (16 if arrived is None else 0)
    cache.free(one)
    found = cache.engine.encoder_blocks(hearing(cache, "look"))
    assert {group: ids.tolist() for group, ids in found.items()} == ({1: held} if arrived is None else {})
    assert not cache.engine.encoder_blocks(hearing(cache, "other", "music"))
    cache.check()
