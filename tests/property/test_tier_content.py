"""Every token that a step reads is the row's own, though it may have come up from host memory, late or not at all."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from how_much import how_many
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.errors import CapacityError
from hybridkv.eviction.choice import HAZARD
from hybridkv.planner import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Step, StepResult, TierCopies
from hybridkv.testing import ContentError, DifferenceError, FakeWorker, digest_model
from hybridkv.testing.configs import chunk_spec, full_spec, natural_model_config, state_spec, window_spec
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


@dataclass(frozen=True)
class Load:
    """A transfer to the device that arrives late. ``blocks``: (group, block, bytes) of each copy."""

    transfer: int
    arrives: int
    blocks: tuple[tuple[int, int, bytes], ...]


class TierWorker(FakeWorker):
    """A FakeWorker with a second arena. Transfers arrive up to two steps late, or are lost and leave random bytes."""

    def __init__(self, device: KVCacheConfig, host: KVCacheConfig, random: Random) -> None:
        super().__init__(device, digest_model(device, VOCABULARY))
        self.sizes = [device.block_bytes_of(group) for group in range(len(device.groups))]
        self.host = bytearray(random.randbytes(host.arena_bytes))
        self.random = random
        self.late = list[Load]()
        self.stored, self.lost_stores = list[tuple[int, int]](), list[int]()
        self.ran = self.moves = 0

    def bytes_at(self, arena: bytearray, group: int, block: int) -> bytes:
        size = self.sizes[group]
        return bytes(arena[block * size : (block + 1) * size])

    def put(self, arena: bytearray, group: int, block: int, data: bytes) -> None:
        size = self.sizes[group]
        arena[block * size : (block + 1) * size] = data

    def execute(self, step: Step) -> StepResult:
        self.ran += 1
        arrived = self.store(step)
        result = super().execute(step)
        loads = self.load(step)
        self.late += loads
        due = [one for one in self.late if one.arrives <= self.ran or not len(step)]
        self.late = [one for one in self.late if one not in due]
        lost = [one.transfer for one in due if self.random.random() < 0.1]
        for one in due:
            for group, block, data in one.blocks:
                wrong = one.transfer in lost
                self.put(self.storage, group, block, self.random.randbytes(len(data)) if wrong else data)
        for number, until in self.stored:
            (arrived if until <= self.ran or not len(step) else []).append(number)
        self.stored = [one for one in self.stored if one[0] not in arrived]
        arrived += [one.transfer for one in due if one.transfer not in lost]
        return replace(result, arrived=np.array(arrived, np.int32), lost=np.array([*lost, *self.lost_stores], np.int32))

    def store(self, step: Step) -> list[int]:
        """Copy what is on the device now; return the transfers that arrive in this step."""
        copies = zip(*(values.tolist() for values in self.columns(step.stores)), strict=True)
        read = [(number, group, to, self.bytes_at(self.storage, group, block)) for number, group, block, to in copies]
        for copy in step.tier_copies:
            self.moves += copy.kind == "move"
            self.put(self.host, copy.group, copy.destination, self.bytes_at(self.host, copy.group, copy.source))
        numbers = sorted({number for number, *_ in read})
        self.lost_stores = [number for number in numbers if self.random.random() < 0.1]
        for number, group, to, data in read:
            lost = number in self.lost_stores
            self.put(self.host, group, to, self.random.randbytes(len(data)) if lost else data)
        kept = [number for number in numbers if number not in self.lost_stores]
        now = [number for number in kept if self.random.random() < 0.7]
        self.stored += [(number, self.ran + 1) for number in kept if number not in now]
        return now

    def load(self, step: Step) -> list[Load]:
        """Fill the blocks to load with random bytes, and return what arrives there later."""
        found: dict[int, list[tuple[int, int, bytes]]] = {}
        for number, group, block, to in zip(*(values.tolist() for values in self.columns(step.loads)), strict=True):
            found.setdefault(number, []).append((group, to, self.bytes_at(self.host, group, block)))
            self.put(self.storage, group, to, self.random.randbytes(self.sizes[group]))
        return [
            Load(number, self.ran + self.random.choice((0, 0, 1, 2)), tuple(some)) for number, some in found.items()
        ]

    @staticmethod
    def columns(copies: TierCopies) -> list[NDArray[np.int32]]:
        return [getattr(copies, name) for name in ("transfer", "group", "source", "destination")]

    def break_down(self, step: Step, random: Random) -> None:
        """Fail halfway: some transfers are done, others leave random bytes."""
        for arena, copies in ((self.host, step.stores), (self.storage, step.loads)):
            for _, group, _, to in zip(*(values.tolist() for values in self.columns(copies)), strict=True):
                self.put(arena, group, to, random.randbytes(self.sizes[group]))
        for copy in step.tier_copies[: random.randint(0, len(step.tier_copies))]:
            self.put(self.host, copy.group, copy.destination, random.randbytes(self.sizes[copy.group]))
        super().break_down(step, random)


class Run:
    """Chats whose turns come again, on a device that holds one or two of them."""

    def __init__(self, seed: int, worker: type[TierWorker] = TierWorker) -> None:
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
        self.worker = worker(device, host, random)
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
        self.seen["moves"] += self.worker.moves
        return self.seen


def test_rows_read_their_own_tokens_through_a_host_tier() -> None:
    seen = sum((Run(seed).run() for seed in range(how_many(150))), Counter[str]())
    assert all(seen[name] > 20 for name in ("stores", "loads", "lost", "failed", "stores_refused", "moves")), seen


class SkipsAStore(TierWorker):
    """Copies a block less."""

    def put(self, arena: bytearray, group: int, block: int, data: bytes) -> None:
        if arena is not self.host or self.random.random() > 0.05:
            super().put(arena, group, block, data)


class LoadsFirst(TierWorker):
    """Loads before blocks are moved, cleared and copied."""

    def store(self, step: Step) -> list[int]:
        arrived = super().store(step)
        for one in super().load(step):
            for group, block, data in one.blocks:
                self.put(self.storage, group, block, data)
            self.late.append(replace(one, blocks=()))
        return arrived

    def load(self, step: Step) -> list[Load]:
        return [] if len(step.loads) else super().load(step)


class LosesSilently(TierWorker):
    """Reports lost loads as arrived."""

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        stores = set(step.stores.transfer.tolist()) | {number for number, _ in self.stored}
        told = [number for number in result.lost.tolist() if number not in stores and number not in self.lost_stores]
        lost = [number for number in result.lost.tolist() if number not in told]
        return replace(
            result, arrived=np.append(result.arrived, np.array(told, np.int32)), lost=np.array(lost, np.int32)
        )


class SkipsTierMoves(TierWorker):
    """Makes no copies within the host's arena."""

    def store(self, step: Step) -> list[int]:
        return super().store(replace(step, tier_copies=()))


@pytest.mark.parametrize("fault", [SkipsAStore, LoadsFirst, LosesSilently, SkipsTierMoves])
def test_faults_of_a_host_tier_are_caught(fault: type[TierWorker]) -> None:
    for seed in range(100):
        with suppress(DifferenceError):  # another token was sampled before a wrong one was read
            try:
                Run(seed, fault).run()
            except ContentError:
                return
    pytest.fail(f"100 runs did not see a worker that is wrong: {fault.__doc__}")
