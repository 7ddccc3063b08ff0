"""Two schedulers that are told the same, their workers checking what they read: for what no oracle foretells."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import placement_named
from hybridkv.errors import ConfigError
from hybridkv.eviction import EVERYBODY, Eviction, TenantShares
from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Request
from hybridkv.schedule import FinishReason, Scheduler
from hybridkv.schedule.limits import Outcome
from hybridkv.specs import Keeps
from hybridkv.step import Step
from hybridkv.testing.event_follower import same
from hybridkv.testing.fake_worker import FakeWorker, digest_model
from hybridkv.wire import encode_step
from oracles.rig import Rig, RigOptions, RigRequest


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two. requests: by name."""

    cache: KVCacheManager
    scheduler: Scheduler
    worker: FakeWorker
    requests: dict[str, Request]


class Twins(Rig):
    """What a Rig does, compared with nothing but another scheduler that is told the same.

    evictions: of the two; they must decide alike. shares: of both. Every method raises DifferenceError where the two
    differ, ContentError where a step reads wrong content, CacheError where check() fails.
    """

    def __init__(
        self, options: RigOptions, evictions: tuple[Eviction, Eviction], shares: TenantShares = EVERYBODY
    ) -> None:
        config = options.config
        self.options = options
        self.shares = shares
        self.now = 0.0
        self.model = digest_model(config, options.vocabulary)
        self.is_natural = bool(options.blocks_per_slab)
        self.has_cross = any(group.spec.keeps is Keeps.ENCODER for group in config.groups)
        self.sides = [self._side(eviction) for eviction in evictions]
        self.cache = self.sides[0].cache
        self.requests = {}
        self.tokens_hit = 0
        self._steps: deque[list[Step]] = deque()
        self._live: dict[str, None] = {}

    def _side(self, eviction: Eviction) -> _Side:
        options, config = self.options, self.options.config
        cache = KVCacheManager(
            config,
            options.max_model_len,
            options.caching,
            use_eagle=options.eagle,
            dcp_world_size=options.dcp,
            pcp_world_size=options.pcp,
            options=CacheOptions(
                placement=placement_named(options.placement, 1) if self.is_natural else None,
                eviction=eviction,
                shares=self.shares,
                clock=lambda: self.now,
            ),
        )
        scheduler = Scheduler(cache, options.limits, clock=lambda: self.now)
        return _Side(cache, scheduler, FakeWorker(config, self.model, sharded=options.ranks > 1), {})

    # -- actions

    def _add_to_both(self, asked: RigRequest, name: str) -> bool:
        taken = []
        for side in self.sides:
            request = asked.request(name, side.cache.hasher)
            try:
                side.scheduler.add(request)
            except ConfigError:
                taken.append(False)
            else:
                taken.append(True)
                arriving = [one for one in side.scheduler._waiting.arriving() if one.request_id not in side.requests]
                side.requests.update({one.request_id: one for one in arriving})
        same("taken in", *taken)
        if taken[0]:
            self._know(asked.expected(name, self.options.max_model_len).tokens)
        return taken[0]

    def _know(self, tokens: Sequence[int]) -> None:
        """Requests that are new on both sides begin with ``tokens``."""
        for name, request in self.sides[0].requests.items():
            if name not in self.requests:
                asked = RigRequest(tuple(tokens), 1).expected(name, self.options.max_model_len)
                self.requests[name] = request, asked
                self._live[name] = None

    def fork(self, request_id: str, n: int) -> list[str]:
        """See Rig."""
        names: list[list[str]] = []
        for side in self.sides:
            try:
                children = side.scheduler.fork(request_id, n)
            except ConfigError:
                children = ()
            side.requests.update({child.request_id: child for child in children})
            names.append([child.request_id for child in children])
        same("branches", *names)
        if names[0]:
            self._know(self.requests[request_id][1].tokens)
        self.check()
        return names[0]

    def propose(self, request_id: str, right: int, wrong: int) -> list[int]:
        """See Rig."""
        request, known = self.requests[request_id]
        tokens, drafts = list(known.tokens), list[int]()
        heard = "" if request.encoder is None else str(request.encoder.digest)
        for place in range(right + wrong):
            token = self.model.next_token(tokens, heard)
            drafts.append(token if place < right else (token + 1) % self.options.vocabulary)
            tokens.append(drafts[-1])
        for side in self.sides:
            side.scheduler.propose({request_id: drafts})
        return drafts

    def schedule(self) -> Step:
        """See Rig."""
        steps = [side.scheduler.schedule() for side in self.sides]
        same("step", *(encode_step(step) for step in steps))
        self._steps.append(steps)
        self.check()
        return steps[0]

    def update(self) -> None:
        """See Rig."""
        steps = self._steps.popleft()
        outcomes = [
            side.scheduler.update(side.worker.execute(step)) for side, step in zip(self.sides, steps, strict=True)
        ]
        told = [_told(outcome) for outcome in outcomes]
        same("outcome", *told)
        for name, tokens in told[0][0]:
            self.requests[name][1].tokens.extend(tokens)
        for name, _ in told[0][1]:
            self._live.pop(name, None)
        self.check()

    def fail(self, place: int, random: Random) -> None:
        """See Rig."""
        seed = random.getrandbits(32)
        flights = list(self._steps)
        for number, side in enumerate(self.sides):
            for steps in flights[:place]:
                side.scheduler.update(side.worker.execute(steps[number]))
            failed = flights[place][number]
            side.worker.break_down(failed, Random(seed))
            side.scheduler.fail(failed.id, RuntimeError("broken on purpose"))
        self._steps.clear()
        for request, known in self.requests.values():
            known.tokens[:] = request.token_ids().tolist()
        self.check()

    def abort(self, request_id: str) -> bool:
        """See Rig."""
        found = [side.scheduler.abort(request_id) for side in self.sides]
        same("aborted", *found)
        self._live.pop(request_id, None)
        self.check()
        return found[0]

    def finish(self, request_id: str) -> None:
        """See Rig."""
        same("finished", *(side.scheduler.finish(request_id, FinishReason.STOP) for side in self.sides))
        self._live.pop(request_id, None)
        self.check()

    def reset_prefix_cache(self) -> None:
        """See Rig."""
        same("reset", *(side.cache.reset_prefix_cache() for side in self.sides))
        self.check()

    def probe(
        self, prompt: Sequence[int], salt: str | None = None, *, reads: bool = True, encoder: EncoderInput | None = None
    ) -> int:
        """See Rig."""
        asked = RigRequest(tuple(prompt), 1, salt=salt, reads=reads, encoder=encoder if self.has_cross else None)
        found = [side.cache.get_computed_blocks(asked.request("probe", side.cache.hasher))[1] for side in self.sides]
        same("hit", *found)
        return found[0]

    def drain(self, most_steps: int = 10_000) -> None:
        """See Rig."""
        for _ in range(most_steps):
            if self.sides[0].scheduler.drained and not self._steps:
                break
            while len(self._steps) < self.options.limits.max_in_flight and not self.sides[0].scheduler.drained:
                self.schedule()
            self.update()
        for side in self.sides:
            same("drained, nothing held", (side.scheduler.drained, side.cache.usage), (True, 0.0))
            self.tokens_hit += sum(request.first_hit_tokens or 0 for request in side.requests.values())

    # -- answers

    @property
    def num_in_flight(self) -> int:
        """See Rig."""
        return len(self._steps)

    @property
    def live_ids(self) -> list[str]:
        """See Rig."""
        return list(self._live)

    def check(self) -> None:
        """The first side checks itself, the other what it keeps, and both have the same free blocks."""
        self.sides[0].scheduler.check()
        same("what is wrong with what is kept", list(self.sides[1].cache._parts.eviction_policy.check()), [])
        same("blocks to evict", *(side.cache.block_pool.space.order().tolist() for side in self.sides))


def _told(outcome: Outcome) -> tuple[list[tuple[str, list[int]]], list[tuple[str, str]]]:
    """Tokens of each request, and who ended, in an order that tells nothing."""
    tokens = [(r.request_id, outcome.appended[i].tolist()) for i, r in enumerate(outcome.requests)]
    return tokens, sorted((ended.request.request_id, ended.reason.value) for ended in outcome.finished)
