"""Every token that a step reads is the row's own, though it may have come up from host memory, late or not at all."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from how_much import how_many
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.errors import CapacityError
from hybridkv.eviction.choice import HAZARD
from hybridkv.planner import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Int32, Step, TierCopies
from hybridkv.testing import ContentError, DifferenceError, FakeWorker, TierFaults, digest_model
from hybridkv.testing.configs import chunk_spec, full_spec, natural_model_config, state_spec, window_spec
from hybridkv.testing.fake_tier import FakeTier
from hybridkv.tiers import HostTier, TierLimits

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

Specs = tuple[KVCacheSpec, ...]
SLABS: dict[Callable[[int], Specs], tuple[tuple[int, ...], ...]] = {
    lambda _drafts: (full_spec(4),): ((1,), (3,)),
    lambda _drafts: (full_spec(4), window_spec(2, 5)): ((1, 2), (4, 3)),
    lambda _drafts: (full_spec(4), chunk_spec(4, 8)): ((2, 1), (1, 3)),
    lambda drafts: (full_spec(4), state_spec(4, drafts)): ((4, 1), (3, 2)),
    lambda drafts: (full_spec(4), state_spec(4, drafts), window_spec(2, 5)): ((4, 1, 2), (5, 1, 3)),
}
"""Blocks in a slab, for each kind of model."""

VOCABULARY, LONGEST, CHATS, MAX_LEN = 4, 36, 3, 48


class Run:
    """Chats whose turns come again, on a device that holds one or two of them."""

    def __init__(self, seed: int, tier: type[FakeTier] = FakeTier) -> None:
        self.random = random = Random(seed)
        self.now = 0.0
        self.in_flight, drafts = random.choice((1, 1, 2)), random.choice((0, 0, 2))
        limits = SchedulerLimits(random.choice((1, 2, 4)), 16, self.in_flight, num_speculative_tokens=drafts)
        kind = random.choice(list(SLABS))
        specs, blocks_per_slab = kind(drafts), random.choice(SLABS[kind])
        device = self.smallest(limits, specs, blocks_per_slab)
        host = natural_model_config(random.choice((1, 2, 5)) * device.num_blocks, specs, blocks_per_slab)
        self.cache = KVCacheManager(device, MAX_LEN, options=self.options(logs=True))
        upstairs = KVCacheManager(host, MAX_LEN, hasher=self.cache.hasher, options=self.options())
        bounds = TierLimits(random.choice((1, 2, 3)), least_tokens=random.choice((1, 4, 9)))
        self.tier = HostTier(self.cache, upstairs, bounds)
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: self.now, tier=self.tier)
        self.worker = FakeWorker(device, digest_model(device, VOCABULARY), tier=host)
        faults = TierFaults(lost=0.1, late=random.choice((0.0, 0.4)), most_steps=2, seed=seed)
        self.bytes = self.worker.tier = tier(device, self.worker.storage, host, faults)
        self.chats = [self.some_tokens(12) for _ in range(CHATS)]
        self.flights = list[Step]()
        self.seen = Counter[str]()
        self.added = 0

    def options(self, *, logs: bool = False) -> CacheOptions:
        return CacheOptions(placement=EndsPlacement(), eviction=HAZARD, log_resume_points=logs, clock=lambda: self.now)

    def smallest(self, limits: SchedulerLimits, specs: Specs, blocks_per_slab: tuple[int, ...]) -> KVCacheConfig:
        """Of the configs that take the longest request, one of the smallest."""
        for slabs in range(4, 80):
            config = natural_model_config(slabs + self.random.randint(0, 3), specs, blocks_per_slab)
            scheduler = Scheduler(KVCacheManager(config, MAX_LEN), limits)
            with suppress(CapacityError):
                longest = [0] * (LONGEST + 6)
                scheduler.add(Request("r", longest, SamplingParams(max_tokens=6), hasher=scheduler.cache.hasher))
                return config
        raise AssertionError("no config is large enough")

    def some_tokens(self, most: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, most))]

    def add(self) -> None:
        random, chat = self.random, self.random.randrange(CHATS)
        if len(self.chats[chat]) > LONGEST:
            self.chats[chat] = self.some_tokens(12)
        sampling = SamplingParams(max_tokens=random.randint(1, 6))
        salt = random.choice((None, None, None, "a"))
        asked = Request(f"r{self.added}", self.chats[chat], sampling, hasher=self.cache.hasher, cache_salt=salt)
        self.scheduler.add(asked)
        self.chats[chat] = self.chats[chat] + self.some_tokens(6)
        self.added += 1

    def step(self) -> None:
        random, scheduler = self.random, self.scheduler
        if scheduler.num_waiting < 3 and random.random() < 0.5:
            self.add()
        if self.added and random.random() < 0.03:
            scheduler.abort(f"r{random.randrange(self.added)}")
        self.now += 3 * random.random()
        for request in scheduler.running_requests() if scheduler.limits.num_speculative_tokens else ():
            scheduler.propose({request.request_id: self.some_tokens(2)})
        if scheduler.num_in_flight < self.in_flight:
            self.flights.append(scheduler.schedule())
        if scheduler.num_in_flight == self.in_flight or random.random() < 0.5:
            self.finish()
        scheduler.check()

    def finish(self) -> None:
        step, *self.flights = self.flights
        if self.random.random() < 0.03:
            self.worker.break_down(step, self.random)
            self.scheduler.fail(step.id, RuntimeError("broken on purpose"))
            self.flights.clear()
            self.seen["failed"] += 1
            return
        for done in self.scheduler.update(self.worker.execute(step)).finished:
            if self.random.random() < 0.7:
                tokens = done.request.token_ids().tolist()
                self.chats[self.random.randrange(CHATS)] = [*tokens, *self.some_tokens(3)]

    def run(self, steps: int = 150) -> Counter[str]:
        for _ in range(steps):
            self.step()
        while self.flights:
            self.finish()
        for _ in range(200):  # nothing waits for ever
            if self.scheduler.drained and not self.tier.num_in_flight:
                break
            self.now += 1
            self.flights.append(self.scheduler.schedule())
            self.finish()
        else:
            raise AssertionError("requests wait, and nothing runs")
        counts = self.tier.statistics()
        self.seen += Counter({name: getattr(counts, name) for name in ("stores", "loads", "lost", "stores_refused")})
        self.seen["moves"] += self.bytes.moved
        return self.seen


def test_rows_read_their_own_tokens_through_a_host_tier() -> None:
    seen = sum((Run(seed).run() for seed in range(how_many(150))), Counter[str]())
    assert all(seen[name] > 20 for name in ("stores", "loads", "lost", "failed", "moves")), seen
    assert seen["stores_refused"] > 5


class SkipsAStore(FakeTier):
    """Copies a block less."""

    def begin(self, step: Step) -> None:
        number, at = np.unique(step.stores.transfer, return_index=True)
        skipped = at[np.isin(number, step.stores.transfer[np.setdiff1d(np.arange(len(step.stores)), at)])][:1]
        kept = np.delete(np.arange(len(step.stores)), skipped)
        columns = (step.stores.transfer, step.stores.group, step.stores.source, step.stores.destination)
        super().begin(replace(step, stores=TierCopies(*(column[kept] for column in columns))))


class LoadsFirst(FakeTier):
    """Loads before blocks are moved, cleared and copied."""

    def begin(self, step: Step) -> None:
        super().begin(step)
        super().load(step)

    def load(self, step: Step) -> None:
        pass


class LosesSilently(FakeTier):
    """Reports lost transfers as arrived."""

    def finish(self) -> tuple[Int32, Int32]:
        arrived, lost = super().finish()
        return np.append(arrived, lost), lost[:0]


class SkipsTierMoves(FakeTier):
    """Makes no copies within the host's arena."""

    def begin(self, step: Step) -> None:
        super().begin(replace(step, tier_copies=()))


@pytest.mark.parametrize("fault", [SkipsAStore, LoadsFirst, LosesSilently, SkipsTierMoves])
def test_faults_of_a_host_tier_are_caught(fault: type[FakeTier]) -> None:
    for seed in range(100):
        with suppress(DifferenceError):  # another token was sampled before a wrong one was read
            try:
                Run(seed, fault).run()
            except ContentError:
                return
    pytest.fail(f"100 runs did not see a worker that is wrong: {fault.__doc__}")
