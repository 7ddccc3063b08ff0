"""Exact events tell the prefixes that the cache itself can hit, after every step: none more, none less."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import zmq
from events_support import BLOCK, Consumer, asked, publisher_of, settled
from exact_support import CACHES, LARGE_BLOCKS, ON_THE_DEVICE, Known, Prompt, Run, cache_of_layers, can_be_hit

from hybridkv.cache import BlockRemoved, BlockStored, ResumePointRemoved, ResumePointStored
from hybridkv.cache.placement import placement_named
from hybridkv.errors import ConfigError
from hybridkv.eviction import eviction_named
from hybridkv.kv_events import SNAPSHOT, KVEventPublisher
from hybridkv.kv_events.publisher import PublishedBlocks
from hybridkv.observe.prefixes import ExactEvents
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler
from hybridkv.step import Csr, StepResult
from hybridkv.testing.configs import chunk_spec, full_spec, model_config, natural_model_config, state_spec, window_spec

PLACEMENTS = ("ends", "interval:8", "align:4")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("natural", "name", "layers"),
    [
        *((True, *one) for one in ON_THE_DEVICE.items()),
        *((False, *one) for one in {**ON_THE_DEVICE, **LARGE_BLOCKS}.items()),
    ],
)
def test_exact_events_match_what_can_be_hit(natural: bool, name: str, layers: Sequence[str], seed: int) -> None:
    random = Random(f"{seed} {name}")
    placement = placement_named(random.choice(PLACEMENTS), BLOCK) if natural else None
    eviction = eviction_named(random.choice(["lru", "hazard"])) if natural else None
    config, cache = cache_of_layers(
        layers, natural=natural, size=random.choice([24, 36]), placement=placement, eviction=eviction
    )
    exact, known, published, run = ExactEvents(config), Known(), PublishedBlocks(), Run(cache, random)
    most = compared = 0
    for _ in range(100):
        run.turn()
        events = exact.filter(cache.take_events())
        known.hear(events)
        published.add(events)
        if run.settled:
            hittable = can_be_hit(cache, run.prompts())
            assert known.prefixes() == hittable
            most, compared = max(most, len(hittable)), compared + 1
    late = Known()
    late.hear(published.snapshot())
    assert late.prefixes() == known.prefixes()
    assert (most > 4, compared > 25) == (True, True)
    cache.check()


def believed(consumer: Consumer, prompts: set[Prompt]) -> set[Prompt]:
    """Prefixes of ``prompts`` of which a router expects to find all blocks."""
    found = set[Prompt]()
    for salt, tokens in prompts:
        hit = consumer.looked_up((*tokens, 77), salt)
        found.update((salt, tokens[:end]) for end in range(BLOCK, hit + 1, BLOCK))
    return found


def test_exact_events_with_lost_messages_recover(context: zmq.Context[Any]) -> None:
    random = Random(5)
    config, cache = cache_of_layers(CACHES["states"], natural=True, size=24)
    anywhere, run, most = "tcp://127.0.0.1:0", Run(cache, random), 0
    with KVEventPublisher(config, anywhere, anywhere, exact=True, kept_batches=8) as publisher:
        steady, lossy = Consumer(), Consumer()
        for turn in range(90):
            run.turn()
            if events := cache.take_events():
                publisher.publish(events)
                steady.hear(asked(context, publisher, settled(publisher, context)))
            if turn % 30 < 25 or not run.settled:
                continue
            late = Consumer()
            late.begin_with(asked(context, publisher, SNAPSHOT))
            lossy.hear(asked(context, publisher, lossy.last + 1))
            hittable = can_be_hit(cache, run.prompts())
            most = max(most, len(hittable))
            for consumer in (steady, lossy, late):
                assert believed(consumer, run.prompts()) == hittable
    assert most > 4


def test_raw_events_report_no_resume_points(context: zmq.Context[Any]) -> None:
    config, plain = cache_of_layers(CACHES["states"], natural=True, size=24)
    events = plain.take_events()
    run = Run(plain, Random(2))
    for _ in range(30):
        run.turn()
        events += plain.take_events()
    assert {type(event) for event in events} >= {ResumePointStored, ResumePointRemoved}
    with publisher_of(config) as publisher:
        publisher.publish([ResumePointStored(0, None, b"p", b"1234"), ResumePointRemoved(0, b"p", b"1234")])
        last = settled(publisher, context)
        consumer = Consumer()
        consumer.hear(asked(context, publisher, 0))
        assert consumer.last == last
    _, reference = cache_of_layers(CACHES["states"], natural=False, size=24)
    run = Run(reference, Random(2))
    for _ in range(30):
        run.turn()
    assert not any(isinstance(event, ResumePointStored | ResumePointRemoved) for event in reference.take_events())


def test_exact_events_remove_a_prefix_whose_partial_block_is_gone() -> None:
    config, _ = cache_of_layers(CACHES["states"], natural=True, size=24)
    exact, tokens = ExactEvents(config), tuple(range(BLOCK))
    first = BlockStored((b"1",), None, tokens, BLOCK)
    inside = np.array(tokens[:2], np.int32).tobytes()
    assert exact.filter([first, ResumePointStored(1, b"1", b"p", inside)]) == []
    assert exact.filter([BlockStored((b"2",), b"1", tokens, BLOCK)]) == [first]
    assert exact.filter([BlockRemoved((b"2",))]) == [BlockRemoved((b"1",))]


def test_exact_events_report_a_resume_point_when_written() -> None:
    _, cache = cache_of_layers(CACHES["states"], natural=True, size=24)
    scheduler = Scheduler(cache)
    scheduler.add(Request("one", [1] * 11, SamplingParams(max_tokens=1), hasher=cache.hasher))
    step = scheduler.schedule()
    assert cache.take_events() == []
    scheduler.update(StepResult(step.id, Csr.from_lists([[9]])))
    ends = [
        (event.group_idx, len(event.partial_tokens) // 4)
        for event in cache.take_events()
        if isinstance(event, ResumePointStored)
    ]
    assert (0, 2) in ends
    assert 1 in dict(ends)


def test_exact_events_with_too_many_resume_points_drop_the_oldest() -> None:
    _, cache = cache_of_layers(CACHES["states"], natural=True, size=40)
    run, kept = Run(cache, Random(0)), set[tuple[int, bytes, bytes]]()
    for last in range(7):
        run.complete([1] * BLOCK + [last] * 2)
        for event in cache.take_events():
            match event:
                case ResumePointStored():
                    kept.add((event.group_idx, event.parent, event.partial_tokens))
                case ResumePointRemoved():
                    kept.remove((event.group_idx, event.parent, event.partial_tokens))
    there = {
        (group.number, parent, tail.tokens) for group in cache.groups for parent, tail in group.index.partial_entries()
    }
    assert {one for one in kept if one[2]} == there
    assert max(Counter(parent for group, parent, _ in there if group == 0).values()) == 4


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (model_config(9, (chunk_spec(4, 8),)), "neither"),
        (model_config(9, (state_spec(4),)), "neither"),
        (model_config(9, (full_spec(8), state_spec(4))), "blocks of 4 and 8 tokens"),
        (natural_model_config(9, (full_spec(4), window_spec(8, 8)), [2, 2]), "blocks of 4 and 8 tokens"),
    ],
)
def test_exact_events_for_unsupported_config_are_rejected(config: KVCacheConfig, what: str) -> None:
    anywhere = "tcp://127.0.0.1:0"
    with pytest.raises(ConfigError, match=what):
        KVEventPublisher(config, anywhere, exact=True)
