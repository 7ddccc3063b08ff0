"""A router of two workers compared a worker with the tokens that this worker finds.

The router knows messages alone. All workers are idle when a request arrives, or its messages are late.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random

import pytest
from events_support import BLOCK, Consumer, Message
from exact_support import LARGE_BLOCKS, ON_THE_DEVICE, cache_of_layers

from hybridkv.cache import BlockRemoved, BlockStored, KVCacheEvent
from hybridkv.cache.placement import placement_named
from hybridkv.eviction import eviction_named
from hybridkv.kv_events import EventForm
from hybridkv.kv_events.publisher import Writer
from hybridkv.observe.prefixes import PREFIXES, ExactEvents
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, StepResult

KINDS = [
    *((True, *one) for one in ON_THE_DEVICE.items()),
    *((False, *one) for one in {**ON_THE_DEVICE, **LARGE_BLOCKS}.items()),
]
MOST_TOKENS = 150
Change = Callable[[list[KVCacheEvent]], list[KVCacheEvent]]


def some_tokens(random: Random, least: int, most: int) -> list[int]:
    return [random.randrange(100) for _ in range(random.randint(least, most))]


def prompts(random: Random) -> Iterator[list[int]]:
    """Shared beginnings, chats, and agents that read what tools return and start others from their own prompt."""
    heads = [some_tokens(random, 5, 40) for _ in range(3)]
    chats = [list[int]() for _ in range(4)]
    agents = [some_tokens(random, 20, 50) for _ in range(3)]
    while True:
        kind, at = random.randrange(3), random.randrange(3)
        if kind == 0:
            yield [*random.choice(heads), *some_tokens(random, 1, 20)]
        elif kind == 1:
            chats[at] = [*(chats[at] or random.choice(heads)), *some_tokens(random, 1, 20)]
            yield chats[at]
            chats[at] = [] if len(chats[at]) > MOST_TOKENS - 30 else [*chats[at], 7, *some_tokens(random, 0, 2)]
        elif random.random() < 0.3:
            agents[at] = some_tokens(random, 20, 50)
        else:
            agent = [*agents[at], *some_tokens(random, 1, 15)]
            yield agent
            if len(agent) < MOST_TOKENS - 20:
                agents[random.choice((at, at, random.randrange(3)))] = agent


class Worker:
    """A cache, its scheduler, its messages, and what a router has heard of them."""

    def __init__(self, layers: Sequence[str], random: Random, *, natural: bool, change: Change | None) -> None:
        placement = placement_named(random.choice(("ends", "interval:8", "align:4")), BLOCK) if natural else None
        eviction = eviction_named(random.choice(["lru", "hazard"])) if natural else None
        config, self.cache = cache_of_layers(layers, natural=natural, size=160, placement=placement, eviction=eviction)
        self.scheduler = Scheduler(self.cache, SchedulerLimits(max_running=4, max_batched_tokens=40))
        self._exact, self._change = ExactEvents(config), change
        self._names = count()
        self._writer, self._number = Writer([PREFIXES], EventForm()), 0
        self.heard, self.late = Consumer(), deque[tuple[Message, int]]()

    def add(self, tokens: Sequence[int]) -> Request:
        request = Request(str(next(self._names)), tokens, SamplingParams(max_tokens=1), hasher=self.cache.hasher)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """Run a step and send its message, which is late until ``hear``."""
        step = self.scheduler.schedule()
        self.scheduler.update(
            StepResult(step.id, Csr.from_lists([[7] if one else [] for one in step.samples.tolist()]))
        )
        events = self._exact.filter(self.cache.take_events())
        if self._change is not None:
            events = self._change(events)
        blocks = sum(len(one.block_hashes) for one in events if isinstance(one, BlockStored | BlockRemoved))
        self.late.append(((self._number, self._writer.batch(events, 0.0)), blocks))
        self._number += 1

    def hear(self, waiting: int = 0) -> None:
        """Deliver the messages to the router, but the last ``waiting``."""
        while len(self.late) > waiting:
            self.heard.hear([self.late.popleft()[0]])

    def credited(self, tokens: Sequence[int]) -> int:
        return self.heard.looked_up(tokens, None)

    def found(self, tokens: Sequence[int]) -> int:
        """Whole blocks that the cache finds."""
        request = Request("asked", tokens, hasher=self.cache.hasher)
        return self.cache.find_hit(request).tokens // BLOCK * BLOCK


@dataclass
class Credits:
    """Requests by what they were credited, at all workers.

    between: the prompt leaves another one between two of its resume points. Routers count leading blocks, so they
    expect that it hits as far as both agree (docs/events.md).
    """

    equal: int = 0
    between: int = 0
    wrong: int = 0
    tokens: int = 0

    def compare(self, worker: Worker, tokens: Sequence[int], known: set[tuple[int, ...]]) -> None:
        credited, found = worker.credited(tokens), worker.found(tokens)
        self.tokens += credited
        if credited == found:
            self.equal += 1
        elif credited > found and any(
            one[:credited] == tuple(tokens[:credited]) and worker.found([*one, 101]) >= credited for one in known
        ):
            self.between += 1
        else:
            self.wrong += 1


def credits_of(
    layers: Sequence[str], seed: str, requests: int, *, natural: bool, change: Change | None = None
) -> Credits:
    """Send ``requests`` requests to two idle workers: most to the one with the most credit, others to any."""
    random = Random(seed)
    workers = [Worker(layers, random, natural=natural, change=change) for _ in range(2)]
    compared, known, coming = Credits(), set[tuple[int, ...]](), prompts(random)
    for _ in range(requests):
        tokens = next(coming)
        for worker in workers:
            compared.compare(worker, tokens, known)
        best = max(workers, key=lambda one: one.credited(tokens))
        chosen = random.choice(workers) if random.random() < 0.2 else best
        expected = chosen.found(tokens)
        request = chosen.add(tokens)
        while not chosen.scheduler.drained:
            chosen.step()
        chosen.hear()
        assert request.first_hit_tokens is not None
        assert request.first_hit_tokens // BLOCK * BLOCK == expected
        known.add(tuple(tokens))
    return compared


@pytest.mark.parametrize("requests", [150, pytest.param(2000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("natural", "name", "layers"), KINDS)
def test_idle_worker_is_credited_what_it_finds(natural: bool, name: str, layers: Sequence[str], requests: int) -> None:
    compared = credits_of(layers, f"{name} {requests}", requests, natural=natural)
    assert compared.wrong == 0
    assert compared.tokens > requests * BLOCK


@pytest.mark.parametrize("requests", [150, pytest.param(2000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("natural", "name", "layers"), KINDS)
def test_late_messages_bound_what_a_busy_worker_is_credited(
    natural: bool, name: str, layers: Sequence[str], requests: int
) -> None:
    random = Random(f"{name} {requests}")
    workers = [Worker(layers, random, natural=natural, change=None) for _ in range(2)]
    compared, known, coming, differed = Credits(), set[tuple[int, ...]](), prompts(random), 0
    for _ in range(requests):
        tokens, waiting = next(coming), random.randrange(4)
        for worker in workers:
            worker.hear(waiting)
        chosen = max(workers, key=lambda one: one.credited(tokens))
        before, late = chosen.credited(tokens), sum(blocks for _, blocks in chosen.late)
        chosen.hear()
        compared.compare(chosen, tokens, known)
        assert abs(chosen.credited(tokens) - before) <= late * BLOCK
        differed += chosen.credited(tokens) != before
        chosen.add(tokens)
        known.add(tuple(tokens))
        for worker in workers:
            for _ in range(random.randrange(3)):
                worker.step()
    assert compared.wrong == 0
    assert differed > 0


def without_stored(events: list[KVCacheEvent]) -> list[KVCacheEvent]:
    return [one for one in events if not isinstance(one, BlockStored)]


def without_removed(events: list[KVCacheEvent]) -> list[KVCacheEvent]:
    return [one for one in events if not isinstance(one, BlockRemoved)]


def swapped(events: list[KVCacheEvent]) -> list[KVCacheEvent]:
    """A chain whose blocks are in another order."""
    return [
        replace(one, block_hashes=one.block_hashes[::-1]) if isinstance(one, BlockStored) else one for one in events
    ]


@pytest.mark.parametrize("fault", [without_stored, without_removed, swapped])
@pytest.mark.parametrize("layers", [("full", "state"), ("full", "window")])
def test_changed_messages_are_noticed(fault: Change, layers: Sequence[str]) -> None:
    assert credits_of(layers, "fault", 150, natural=True, change=fault).wrong > 0
