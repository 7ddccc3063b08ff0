"""Random runs of a scheduler over host memory and a store, with a worker that checks all that a step reads.

A run fails if a row reads other content than its own, if an invariant of a manager does not hold, if a prefix that the
store got whole is not found, if nothing runs while a request could, or if requests wait for ever.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np

from hybridkv.cache import CacheOptions, KVCacheManager, SlotPlan
from hybridkv.cache.placement import EndsPlacement
from hybridkv.errors import CapacityError
from hybridkv.eviction import EVERYBODY, TenantShares
from hybridkv.eviction.choice import HAZARD
from hybridkv.extra_keys import EncoderInput
from hybridkv.planner import KVCacheConfig
from hybridkv.request import Hints, Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits, Wait, WaitReason
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Step
from hybridkv.stores import MemoryStore
from hybridkv.stores.marks import tails_of
from hybridkv.testing import ContentError, FakeWorker, TierFaults, digest_model
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
from hybridkv.testing.fake_tier import FakeTier
from hybridkv.tiers import HostTier, Prefixes, StoreLookups, TierLimits, parts_of
from hybridkv.tiers.carriers import Way

Specs = tuple[KVCacheSpec, ...]
SLABS: dict[Callable[[int], Specs], tuple[tuple[int, ...], ...]] = {
    lambda _drafts: (full_spec(4),): ((1,), (3,)),
    lambda _drafts: (full_spec(4), window_spec(2, 5)): ((1, 2), (4, 3)),
    lambda _drafts: (full_spec(4), chunk_spec(4, 8)): ((2, 1), (1, 3), (1, 1)),
    lambda drafts: (full_spec(4), state_spec(4, drafts)): ((4, 1), (3, 2)),
    lambda drafts: (full_spec(4), state_spec(4, drafts), window_spec(2, 5)): ((4, 1, 2), (5, 1, 3)),
}
RINGS: dict[Callable[[int], Specs], tuple[tuple[int, ...], ...]] = {
    lambda drafts: (full_spec(4), rate_spec(8, 4), ring_spec(4 + drafts, 4)): ((2, 1, 1), (3, 2, 1)),
    lambda drafts: (rate_spec(8, 4), state_spec(4, drafts), ring_spec(8 + drafts, 4)): ((2, 2, 1),),
}
ENCODERS: dict[Callable[[int], Specs], tuple[tuple[int, ...], ...]] = {
    lambda _drafts: (full_spec(4), cross_spec(2), cross_spec(4)): ((2, 1, 1), (1, 2, 1)),
    lambda drafts: (full_spec(4), state_spec(4, drafts), cross_spec(2)): ((2, 1, 1), (3, 1, 2)),
}
"""Blocks in a slab, for each kind of model."""

HINTS = (*[None] * 6, Hints(ttl_s=5), Hints(ttl_s=100, demote=True), Hints(demote=True), Hints(prefetch=True))

ENCODED = (EncoderInput("short", 3), EncoderInput("long", 9))
"""Inputs of encoders."""

VOCABULARY, LONGEST, CHATS, MAX_LEN = 4, 36, 3, 48


# the groups of SLABS and RINGS, in blocks of one size
REFERENCE: dict[Callable[[int], Specs], tuple[tuple[int, ...], ...]] = dict.fromkeys([*SLABS, *RINGS], ((),))


def config_of(num_units: int, specs: Specs, blocks_per_slab: tuple[int, ...]) -> KVCacheConfig:
    """A config of so many slabs, or of so many blocks of one size where ``blocks_per_slab`` is empty."""
    if blocks_per_slab:
        return natural_model_config(num_units, specs, blocks_per_slab)
    return model_config(num_units, specs)


class StallError(Exception):
    """Requests wait, although something could run."""


class Later(Executor):
    """Answers look-ups when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401 - Executor's
        answer = Future[Any]()
        self.asked.append((answer, partial(fn, *args, **kwargs)))
        return answer

    def work(self, random: Random) -> None:
        asked, self.asked = self.asked, []
        for one in asked:
            if random.random() < 0.5:
                one[0].set_result(one[1]())
            else:
                self.asked.append(one)


class Run:
    """Chats whose turns come again, on a device that holds one or two of them.

    With ``stored``, a store lies behind the host, and the process ends and starts again now and then, perhaps with
    other weights. ``shares`` are those of tenants, on the device and on the host. ``timed`` transfers say how long they
    took, at random, so that some prefixes are computed instead. ``kinds`` are the models to choose from.
    """

    def __init__(
        self,
        seed: int,
        *,
        stored: bool = False,
        hinted: bool = False,
        shares: TenantShares = EVERYBODY,
        timed: bool = False,
        kinds: Mapping[Callable[[int], Specs], tuple[tuple[int, ...], ...]] = SLABS,
    ) -> None:
        self.random = random = Random(seed)
        self.now = 0.0
        self.in_flight, drafts = random.choice((1, 1, 2)), random.choice((0, 0, 2))
        limits = SchedulerLimits(random.choice((1, 2, 4)), 16, self.in_flight, num_speculative_tokens=drafts)
        kind = random.choice(list(kinds))
        specs, blocks_per_slab = kind(drafts), random.choice(kinds[kind])
        device = self.smallest(limits, specs, blocks_per_slab)
        host = config_of(random.choice((1, 2, 5)) * device.num_blocks, specs, blocks_per_slab)
        self.device, self.host, self.limits = device, host, limits
        self.bounds = TierLimits(
            random.choice((1, 2, 3)),
            least_tokens=random.choice((1, 4, 9)),
            max_fetches=random.choice((1, 3)),
            max_spills=random.choice((1, 3)),
            patience_s=random.choice((2.0, 100.0)),
        )
        self.store = MemoryStore(random.choice((2_000, 20_000, 200_000))) if stored else None
        self.executor = Later() if stored and random.random() < 0.5 else None
        self.faults = TierFaults(lost=0.1, late=random.choice((0.0, 0.4)), most_steps=2, seed=seed)
        self.identity, self.hinted = 0, hinted
        self.shares, self.timed = shares, timed
        self.failing = 0.03  # probability that a step fails
        self.start()
        self.chats = [self.some_tokens(12) for _ in range(CHATS)]
        self.seen = Counter[str]()
        self.added = 0

    def start(self) -> None:
        """Start a process: the device and the host are empty, and the store is what it was."""
        self.cache = KVCacheManager(self.device, MAX_LEN, options=self.options(logs=True))
        upstairs = KVCacheManager(self.host, MAX_LEN, hasher=self.cache.hasher, options=self.options())
        lookups, hash_block = None, 1
        if self.store is not None and self.cache.hasher is not None:
            hash_block = self.cache.hasher.block_size
            self.prefixes = Prefixes(parts_of(upstairs), b"weights %8d" % self.identity, hash_block)
            lookups = StoreLookups(self.store, self.prefixes, self.executor, patience_s=20.0)
        self.tier = HostTier(self.cache, upstairs, self.bounds, lookups)
        self.is_faster, self.tier.prices.is_faster = self.tier.prices.is_faster, self.priced  # type: ignore[method-assign]  # counted
        self.scheduler = Scheduler(self.cache, self.limits, clock=lambda: self.now, tier=self.tier)
        self.worker = FakeWorker(self.device, digest_model(self.device, VOCABULARY))
        self.worker.tier = FakeTier(
            self.device, self.worker.storage, self.host, self.faults, store=self.store, hash_block=hash_block
        )
        self.flights, self.ended = list[Step](), list[Request]()
        self.excused = set[str]()  # ids of requests that may wait while anything is on its way

    def restart(self) -> None:
        """End the process, and start the next one."""
        self.count()
        self.seen["restarts"] += 1
        self.identity += self.random.random() < 0.3
        self.start()

    def count(self) -> None:
        """Add up what the process did, before it ends."""
        counts = self.tier.statistics()
        assert counts.hit_tokens <= min(counts.loaded_tokens, self.scheduler.prompt_tokens_found[1])
        self.seen += Counter(asdict(counts))
        self.seen["moves"] += 0 if self.worker.tier is None else self.worker.tier.moved
        self.find_what_is_stored()

    def find_what_is_stored(self) -> None:
        """Raise ContentError for a prefix that the store got whole, and does not find."""
        if self.store is None or self.cache.hasher is None:
            return
        counts, hash_block = self.store.statistics(), self.cache.hasher.block_size
        if counts.evicted or counts.dropped:
            return
        points = {(request, tokens) for request in self.ended for tokens in range(hash_block, request.num_tokens)}
        for request, tokens in points:
            mark, buffer = self.prefixes.mark(request, tokens), bytearray(self.prefixes.mark_bytes)
            if not self.store.get([mark.key], [memoryview(buffer)])[0]:
                continue
            if mark.tail in tails_of(buffer, hash_block):
                found = self.prefixes.find(self.store, request.prefix("found", tokens + 1), 0)
                if found != tokens:
                    raise ContentError(f"the store got {tokens} tokens of {request.request_id} and finds {found}")
                self.seen["stored and found"] += 1

    def options(self, *, logs: bool = False) -> CacheOptions:
        return CacheOptions(
            placement=None if self.device.slabs is None else EndsPlacement(),
            eviction=HAZARD,
            shares=self.shares,
            log_resume_points=logs,
            clock=lambda: self.now,
        )

    def smallest(self, limits: SchedulerLimits, specs: Specs, blocks_per_slab: tuple[int, ...]) -> KVCacheConfig:
        """Of the configs that take the longest request, one of the smallest."""
        for slabs in range(4, 80):
            config = config_of(slabs + self.random.randint(0, 3), specs, blocks_per_slab)
            scheduler = Scheduler(KVCacheManager(config, MAX_LEN), limits)
            heard = ENCODED[-1] if scheduler.cache.bounds.reads_encoder else None
            with suppress(CapacityError):
                longest, sampling = [0] * (LONGEST + 6), SamplingParams(max_tokens=6)
                scheduler.add(Request("r", longest, sampling, hasher=scheduler.cache.hasher, encoder=heard))
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
        heard = random.choice((None, *ENCODED)) if self.cache.bounds.reads_encoder else None
        hints, hasher = random.choice(HINTS) if self.hinted else None, self.cache.hasher
        asked = Request(
            f"r{self.added}", self.chats[chat], sampling, hasher=hasher, cache_salt=salt, hints=hints, encoder=heard
        )
        self.worker.heard[asked.request_id] = f"{self.identity} {salt}"
        self.scheduler.add(asked)
        self.chats[chat] = self.chats[chat] + self.some_tokens(6)
        self.added += 1

    def step(self) -> None:
        random, scheduler = self.random, self.scheduler
        if scheduler.num_waiting < 3 and random.random() < 0.5:
            self.add()
        if self.store is not None and random.random() < 0.01:
            self.restart()
            scheduler = self.scheduler
        if self.executor is not None:
            self.executor.work(random)
        if self.added and random.random() < 0.03:
            scheduler.abort(f"r{random.randrange(self.added)}")
        self.now += 3 * random.random()
        for request in scheduler.running_requests() if scheduler.limits.num_speculative_tokens else ():
            scheduler.propose({request.request_id: self.some_tokens(2)})
        if scheduler.num_in_flight < self.in_flight:
            self.schedule()
        if scheduler.num_in_flight == self.in_flight or random.random() < 0.5:
            self.finish()
        scheduler.check()

    def schedule(self) -> None:
        step = self.scheduler.schedule()
        self.flights.append(step)
        waits = self.scheduler.waits()
        if not self.tier.is_awaited:
            self.excused.clear()
        self.excused |= {request.request_id for request, _ in waits if self.awaits_more(request)}
        if waits and not (len(step) or self.scheduler.num_running or len(self.flights) > 1):
            self.require_rest(waits)

    def require_rest(self, waits: list[Wait]) -> None:
        """Raise StallError for a request that waits for nothing, although nothing runs.

        A request may wait for a transfer that brings it more, or for a look-up. It may lack memory that loads hold.
        """
        self.seen["idle"] += 1
        if not self.tier.is_awaited:
            raise StallError(f"{len(waits)} requests wait, nothing runs and nothing is on its way")
        for request, reason in waits:
            if reason not in {WaitReason.TURN, WaitReason.PREFIX_LOADING} and self.tier.rows:
                break  # it lacks memory that loads hold, and others may not pass it for ever
            if request.request_id in self.excused:
                continue
            hit = self.cache.find_hit(request)
            asked = min(request.num_tokens - hit.tokens, self.limits.max_batched_tokens), hit.tokens, hit
            if isinstance(self.cache.plan_slots(request, *asked), SlotPlan):
                raise StallError(f"{request.request_id} fits, nothing runs, and no transfer brings it more")

    def priced(self, tokens: int, num_bytes: int, *ways: Way) -> bool:
        is_faster = self.is_faster(tokens, num_bytes, *ways)
        self.seen["slower"] += not is_faster
        return is_faster

    def awaits_more(self, request: Request) -> bool:
        """Return whether the host or the store has, or may have, more of a request than the device."""
        here, host = (manager.find_hit(request).tokens for manager in (self.cache, self.tier.host))
        if host > here or self.executor is not None:
            return True
        return self.store is not None and self.prefixes.find(self.store, request, here) > 0

    def finish(self) -> None:
        step, *self.flights = self.flights
        if self.random.random() < self.failing:
            self.worker.break_down(step, self.random)
            self.scheduler.fail(step.id, RuntimeError("broken on purpose"))
            self.flights.clear()
            self.seen["failed"] += 1
            return
        result = self.worker.execute(step)
        if self.timed:
            seconds = [self.random.expovariate(0.3) for _ in result.arrived]
            result = replace(result, arrived_s=np.array(seconds, np.float32))
        for done in self.scheduler.update(result).finished:
            self.ended.append(done.request)
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
            if self.executor is not None:
                self.executor.work(self.random)
            self.schedule()
            self.finish()
        else:
            raise StallError("requests wait for ever")
        self.count()
        return self.seen
