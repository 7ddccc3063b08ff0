"""Events say in which memory blocks are: what a consumer knows of each medium is what that cache has."""

from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from events_support import BLOCK, asked, settled
from exact_support import CACHES, Known, Run, cache_of_layers, can_be_hit

from how_much import how_many
from hybridkv.cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsDropped,
    KVCacheEvent,
    KVCacheManager,
    Medium,
)
from hybridkv.eviction.choice import HAZARD
from hybridkv.kv_events import SNAPSHOT, KVEventPublisher
from hybridkv.kv_events.publisher import PublishedBlocks
from hybridkv.observe.prefixes import ExactEvents
from hybridkv.planner.config import KVCacheConfig
from hybridkv.testing import EventFollower
from hybridkv.tiers import HostTier, TierLimits


def tier_of(layers: str, random: Random) -> tuple[KVCacheConfig, HostTier]:
    """A device that holds some prompts, and a host that does not hold all of them either."""
    config, device = cache_of_layers(CACHES[layers], natural=True, size=random.choice([10, 12]), eviction=HAZARD)
    _, host = cache_of_layers(CACHES[layers], natural=True, size=random.choice([12, 30]), eviction=HAZARD, above=device)
    return config, HostTier(device, host, TierLimits(least_tokens=BLOCK))


def within(medium: Medium, events: list[KVCacheEvent]) -> list[KVCacheEvent]:
    """Those that a consumer of one medium reads."""
    return [one for one in events if isinstance(one, AllBlocksCleared | EventsDropped) or one.medium == medium]


@pytest.mark.parametrize("layers", CACHES)
def test_exact_events_of_a_tier_match_what_each_medium_can_hit(layers: str) -> None:
    loads = 0
    for seed in range(how_many(12) + 1):
        random = Random(seed)
        config, tier = tier_of(layers, random)
        exact, published, run = ExactEvents(config), PublishedBlocks(), Run(tier.device, random, tier)
        caches: dict[Medium, KVCacheManager] = {Medium.GPU: tier.device, Medium.CPU: tier.host}
        known, most = {medium: Known() for medium in caches}, dict.fromkeys(caches, 0)
        for _ in range(100):
            run.turn()
            events = exact.filter(tier.take_events())
            published.add(events)
            for medium, cache in caches.items():
                known[medium].hear(within(medium, events))
                if run.settled:
                    hittable = can_be_hit(cache, run.prompts())
                    assert known[medium].prefixes() == hittable
                    most[medium] = max(most[medium], len(hittable))
        late = published.snapshot()
        for medium in caches:
            reader = Known()
            reader.hear(within(medium, list(late)))
            assert reader.prefixes() == known[medium].prefixes()
        assert min(most.values()) > 4
        loads += tier.statistics().loads
    assert loads > 0


@pytest.mark.parametrize("layers", CACHES)
def test_raw_events_of_host_memory_match_its_blocks(layers: str) -> None:
    random = Random(3)
    _, tier = tier_of(layers, random)
    run, host, device = Run(tier.device, random, tier), EventFollower(tier.host), EventFollower(tier.device)
    media = set[str | None]()
    for _ in range(80):
        run.turn()
        events = tier.take_events()
        media |= {one.medium for one in events if isinstance(one, BlockStored | BlockRemoved)}
        host.hear(within(Medium.CPU, events))
        device.hear(within(Medium.GPU, events))
    assert media == {"GPU", "CPU"}


def test_clearing_of_either_medium_comes_before_the_events_after_it() -> None:
    """A consumer forgets both media at a clearing, so nothing that was stored since may come before it."""
    config, device = cache_of_layers(CACHES["states"], natural=True, size=14, eviction=HAZARD)
    _, host = cache_of_layers(CACHES["states"], natural=True, size=30, eviction=HAZARD, above=device)
    tier, random = HostTier(device, host, TierLimits(least_tokens=BLOCK)), Random(1)
    run = Run(device, random, tier)
    run.complete([5] * 20)
    assert host.statistics().cached_blocks > 0
    while not tier.reset():
        run.turn()
    run.complete([6] * 20)
    events = tier.take_events()
    assert [isinstance(one, AllBlocksCleared) for one in events] == [True] + [False] * (len(events) - 1)
    exact = ExactEvents(config).filter(events)
    for medium, cache in ((Medium.GPU, device), (Medium.CPU, host)):
        known = Known()
        known.hear(within(medium, exact))
        assert known.prefixes() == can_be_hit(cache, run.prompts())
        assert (None, (6,) * BLOCK) in known.prefixes()


@pytest.mark.parametrize("media", [None, [Medium.GPU], [Medium.CPU]])
def test_publisher_sends_the_media_that_it_is_asked_for(context: zmq.Context[Any], media: list[Medium] | None) -> None:
    random, anywhere = Random(2), "tcp://127.0.0.1:0"
    config, tier = tier_of("windows", random)
    run = Run(tier.device, random, tier)
    with KVEventPublisher(config, anywhere, anywhere, media=media) as publisher:
        for _ in range(30):
            run.turn()
            if events := tier.take_events():
                publisher.publish(events)
        settled(publisher, context)
        batches = asked(context, publisher, 0) + asked(context, publisher, SNAPSHOT)
        found = [one.get("medium") for _, batch in batches for one in msgspec.msgpack.decode(batch)[1]]
    assert set(found) - {None} == set(media or Medium)
