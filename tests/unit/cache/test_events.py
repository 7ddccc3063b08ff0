"""Events in the ecosystem's schema, of written blocks only."""

from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest

from caches import cache_with
from hybridkv.cache import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    BlockStored,
    CacheOptions,
    EventsDropped,
    KVCacheManager,
)
from hybridkv.cache.placement import placement_named
from hybridkv.errors import ConfigError
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import UniformTypeKVCacheSpecs
from hybridkv.step import Csr, StepResult
from hybridkv.testing import DifferenceError, attention_config, natural_model_config
from hybridkv.testing.configs import full_spec, state_spec
from hybridkv.testing.event_follower import EventFollower


def manager(
    num_blocks: int = 16, block_sizes: tuple[int, ...] = (4,), *, events: bool = True, **options: object
) -> KVCacheManager:
    config = attention_config(num_blocks, block_sizes)
    return cache_with(config, 100, enable_kv_cache_events=events, **options)


def started(cache: KVCacheManager, tokens: range, *, salt: str | None = None) -> Request:
    request = Request(f"{salt}{tokens}", tokens, hasher=cache.hasher, cache_salt=salt)
    blocks, hit = cache.get_computed_blocks(request)
    assert cache.allocate_slots(request, len(tokens) - hit, hit, blocks) is not None
    request.num_computed_tokens = len(tokens)
    return request


def keys_of(tokens: range) -> tuple[bytes, ...]:
    return tuple(BlockHasher(4).hash_chain(None, np.array(tokens)))


def test_event_schema_has_the_ecosystem_fields() -> None:
    assert [f.name for f in fields(BlockStored)] == [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "lora_name",
        "medium",
        "extra_keys",
        "group_idx",
        "cache_salt",
    ]
    assert [f.name for f in fields(BlockRemoved)] == ["block_hashes", "medium", "group_idx"]
    assert fields(AllBlocksCleared) == ()


def test_stored_run_with_evicted_middle_is_reported_in_two_events() -> None:
    cache = manager()
    log = cache._parts.publisher
    log.begin_step(0)
    started(cache, range(13))
    log.end_step()
    cache.block_pool.evict_blocks(np.array([2], np.int32))
    log.mark_written(0)
    keys = keys_of(range(12))
    assert cache.take_events() == [
        BlockStored(keys[:1], None, (0, 1, 2, 3), 4),
        BlockStored(keys[2:], keys[1], (8, 9, 10, 11), 4),
    ]


# -- events that nobody takes


def test_events_not_taken_are_dropped_and_counted() -> None:
    cache = manager(block_sizes=(4,), max_event_blocks=6)
    for number in range(4):
        cache.free(started(cache, range(100 * number, 100 * number + 10)))  # two blocks each
    kept = [
        BlockStored(keys_of(tokens), None, tuple(tokens), 4) for tokens in (range(n, n + 8) for n in (100, 200, 300))
    ]
    assert cache.take_events() == [EventsDropped(1), *kept]
    assert cache.take_events() == []
    cache.free(started(cache, range(400, 410)))
    assert cache.take_events() == [BlockStored(keys_of(range(400, 408)), None, tuple(range(400, 408)), 4)]


def test_event_above_the_block_limit_is_dropped() -> None:
    cache = manager(max_event_blocks=2)
    cache.free(started(cache, range(13)))
    assert cache.take_events() == [EventsDropped(1)]
    assert cache.reset_prefix_cache()
    assert cache.take_events() == [AllBlocksCleared()]


@pytest.mark.parametrize("most", [3, 12, 40])
def test_event_follower_that_resets_at_gaps_has_no_stale_block(most: int) -> None:
    cache, random = manager(num_blocks=12, block_sizes=(4,), max_event_blocks=most), Random(most)
    follower, gaps = EventFollower(cache), 0
    for number in range(300):
        tokens = range(4 * random.randrange(6), 24 + 4 * random.randrange(5))
        cache.free(started(cache, tokens))
        if not random.randrange(40):
            assert cache.reset_prefix_cache()
        if not random.randrange(1 + number % 9):
            events = cache.take_events()
            gaps += any(isinstance(event, EventsDropped) for event in events)
            follower.hear(events)
    assert gaps > 3


def test_event_follower_with_mixed_state_sizes_gets_no_state_events() -> None:
    """In the natural layout, where such layers are one group, too."""
    layers = tuple(
        (f"group1.layer{i}", replace(state_spec(4, 0, "none"), shapes=((size,),))) for i, size in enumerate((5, 3))
    )
    states = UniformTypeKVCacheSpecs(block_size=4, layers=layers)
    config = natural_model_config(60, [full_spec(4), states], [2, 2], layers_per_group=2)
    cache = KVCacheManager(
        config, 100, enable_kv_cache_events=True, options=CacheOptions(placement=placement_named("ends", 1))
    )
    scheduler, follower = Scheduler(cache, SchedulerLimits()), EventFollower(cache)
    for number in range(3):
        scheduler.add(
            Request(str(number), range(10 * number, 10 * number + 9), SamplingParams(max_tokens=3), hasher=cache.hasher)
        )
    while not scheduler.drained:
        step = scheduler.schedule()
        scheduler.update(StepResult(step.id, Csr.from_lists([[1] if samples else [] for samples in step.samples])))
        follower.follow()
    assert cache.take_events() == []
    with pytest.raises(DifferenceError, match="events"):
        follower.hear([BlockRemoved((bytes(32),))])


@pytest.mark.parametrize("most", [0, -1, 1.5, None, True])
def test_max_event_blocks_that_is_no_count_is_rejected(most: object) -> None:
    with pytest.raises(ConfigError, match=r"max_event_blocks must be (an integer|at least 1)"):
        manager(max_event_blocks=most)
