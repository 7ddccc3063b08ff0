"""One random history: requests come, are forked, aborted and ended, steps fail; all of it checked."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from content import DifferenceError, Story, demand
from executor import Arena, Executor
from host_memory import HostMemory
from worlds import VOCAB, Writer, random_world

from hybridkv.eviction import LRU
from hybridkv.request import Request
from hybridkv.schedule import Finished, FinishReason
from hybridkv.step import Step, StepResult, TierCopies

Tamper = Callable[[Step, random.Random], Step]
"""Returns the Step that the worker gets in place of the scheduler's."""


class History:
    """One world, and what happens in it. counts: what happened, and how often."""

    def __init__(
        self,
        seed: int,
        tamper: Tamper | None = None,
        eviction: str = LRU.name,
        family: str | None = None,
        *,
        layout: str | None = None,
        tiered: bool = False,
        stored: bool = False,
    ) -> None:
        self._rng = random.Random(seed)
        self.world = random_world(self._rng, eviction, family, layout=layout, tiered=tiered, stored=stored)
        self._tamper = tamper
        self._chance = np.random.default_rng(seed)
        self._stories: dict[str, Story] = {}
        self._ended: set[str] = set()
        self.counts = Counter[str]()
        self._writer = Writer(self._rng, self.world)
        self._start()
        self._failing = self._rng.choice((0.0, 0.0, 0.03, 0.1))
        self._early = self._rng.random() < 0.5
        self._quiet = 0

    def _start(self) -> None:
        """Begin a process: memory is rubbish, and nobody runs. The shelf is as the last one left it."""
        world = self.world
        self._cache, self._scheduler, self._tier = world.start()
        arena = Arena(world.plan.config, world.plan.limits.cp, world.interleave, self._chance)
        host = None
        if self._tier is not None:
            hash_block = 1 if self._cache.hasher is None else self._cache.hasher.block_size
            host = HostMemory(arena, self._tier.host.config, self._chance, world.shelf, hash_block)
        self._executor = Executor(
            arena, self._cache, world.plan.limits, self._stories, segments=self._scheduler.limits.segments, host=host
        )
        self._flights: deque[tuple[Step, StepResult | None, bytes]] = deque()
        self._writer.begin(self._cache.hasher)

    def _end(self) -> None:
        """End the process: whoever had not ended never will."""
        self._count()
        for name in self._stories.keys() - self._ended:
            del self._stories[name]
        self._quiet = 0

    def _count(self) -> None:
        """Add up what the process did."""
        self.counts += self._executor.counts
        statistics = self._scheduler.statistics()
        self.counts["preemptions"] += statistics.preemptions
        self.counts["tokens hit"] += statistics.hit_tokens
        if self._tier is not None:
            self.counts["tokens loaded"] += self._tier.statistics().loaded_tokens
            self.counts["tokens fetched"] += self._tier.statistics().fetched_tokens

    def play(self, steps: int) -> None:
        """``steps`` steps with everything, then no more requests until all have ended. DifferenceError."""
        rate, crowd = self._rng.choice((0.1, 0.2, 0.4)), self._rng.choice((3, 8, 16))
        for _ in range(steps):
            while self._rng.random() < rate and len(self._stories) - len(self._ended) < crowd:
                self._add(self._writer.write())
            self._disturb()
            if self.world.shelf is not None and self._rng.random() < 0.04:
                self._end()
                self._start()
                self.counts["processes that ended"] += 1
            self._advance()
        while not self._scheduler.drained or self._flights:
            self._advance()
        self._take(self._scheduler.take_finished())
        demand(self._ended == set(self._stories), f"never ended: {sorted(set(self._stories) - self._ended)[:5]}")
        self._scheduler.check()
        self._count()
        counts = self.counts
        counts["requests"] += len(self._stories)
        counts["prompts of several tenants"] += sum(
            len(tenants) > 1 for tenants in self._writer.tenants_of_prompts.values()
        )
        counts[f"layout {self.world.plan.layout}"] += 1
        counts["layout packed"] += self.world.plan.config.packed_block_bytes is not None
        counts["blocks forgotten"] += 0 if self.world.shelf is None else self.world.shelf.forgotten
        counts["context parallel worlds"] += self.world.plan.limits.cp > 1

    # -- what callers do

    def _add(self, story: Story) -> None:
        self._know(story, self._scheduler.add(story.request))

    def _know(self, story: Story, branches: tuple[Request, ...]) -> None:
        self._stories[story.request.request_id] = story
        for request in branches:
            self._stories[request.request_id] = Story(request, VOCAB, story.embeds)
            self.counts["branches"] += 1

    def _disturb(self) -> None:
        rng, living = self._rng, sorted(set(self._stories) - self._ended)
        if not living:
            self._quiet = 0
            if rng.random() < 0.02 and self._scheduler.drained:
                self.counts["caches reset"] += self._cache.reset_prefix_cache()
            return
        name = rng.choice(living)
        what = rng.random()
        ending = self._stories[name].cut_short  # an abort ends a request before schedule() or finish(), unseen yet
        if what < 0.02:
            self._stories[name].cut_short = True
            demand(self._scheduler.abort(name) or ending, f"abort does not know {name}")
            self.counts["aborts"] += 1
        elif what < 0.03:
            self._stories[name].cut_short = True
            demand(self._scheduler.finish(name) or ending, f"finish does not know {name}")
            self.counts["ended by the caller"] += 1
        elif what < 0.06 and not ending:
            self._know(self._stories[name], self._scheduler.fork(name, rng.randint(1, 2)))
            self.counts["forks"] += 1
        self._take(self._scheduler.take_finished())

    def _propose(self) -> None:
        most = self._scheduler.limits.num_speculative_tokens
        drafts = {}
        for row in self._executor.rows.values():
            story = row.story
            if self._rng.random() < 0.7 and story.request.request_id not in self._ended:
                start = story.request.num_tokens
                right = [story.token(start + i) for i in range(self._rng.randint(0, most + 1))]
                drafts[story.request.request_id] = [
                    token if self._rng.random() < 0.8 else self._rng.randrange(VOCAB) for token in right
                ]
        self._scheduler.propose(drafts)

    # -- steps

    def _advance(self) -> None:
        scheduler, rng = self._scheduler, self._rng
        if self.world.slow is not None:
            self.world.slow.work()
        if len(self._flights) < scheduler.limits.max_in_flight and not (self._flights and rng.random() < 0.3):
            if scheduler.limits.num_speculative_tokens:
                self._propose()
            self._issue(scheduler.schedule())
        else:
            self._settle()
        if rng.random() < 0.05:
            scheduler.check()

    def _issue(self, step: Step) -> None:
        self._quiet += 1
        demand(self._quiet < 2000, "2,000 steps, and nobody ended")
        if self._tamper is not None:
            step = self._tamper(step, self._rng)
        result = self._executor.execute(step) if self._early else None
        self._flights.append((step, result, _fingerprint(step)))

    def _settle(self) -> None:
        step, result, fingerprint = self._flights[0]
        demand(_fingerprint(step) == fingerprint, f"step {step.id} was changed while it was in flight")
        if self._rng.random() < self._failing:
            self._fail()
            return
        if result is None:
            result = self._executor.execute(step)
        if not self._scheduler.limits.num_speculative_tokens:
            result = replace(result, num_accepted=None)
        self._flights.popleft()
        outcome = self._scheduler.update(result)
        self._take(outcome.finished)
        if self._rng.random() < 0.2:
            self._executor.audit()

    def _fail(self) -> None:
        """The oldest step, or a later one, fails: it was not executed, or left rubbish wherever it wrote."""
        first = self._rng.randrange(len(self._flights))
        for step, result, _ in list(self._flights)[:first]:
            self._flights.popleft()
            self._take(self._scheduler.update(result or self._executor.execute(step)).finished)
        step, result, _ = self._flights[0]
        if result is None and self._rng.random() < 0.5:
            self._executor.execute(step)
        for step, _, _ in self._flights:
            if step.id <= self._executor.last:
                self._executor.spoil(step.id)
            else:
                self._executor.lose(step)
        self.counts["failures"] += 1
        self._scheduler.fail(self._flights[0][0].id, "on purpose")
        self._flights.clear()
        self._take(self._scheduler.take_finished())

    def _take(self, finished: tuple[Finished, ...]) -> None:
        """Whoever ended must have said what a plain run says."""
        for one in finished:
            name, said = one.request.request_id, one.request.output_token_ids
            demand(name not in self._ended, f"{name} ended twice")
            self._ended.add(name)
            self._quiet = 0
            story = self._stories[name]
            plain = story.output(self.world.plan.max_model_len)
            if story.cut_short:
                demand(said == plain[: len(said)], f"{name} said {said}, not the beginning of {plain}")
            else:
                demand(one.reason is not FinishReason.ABORT, f"{name} was aborted by nobody")
                demand(said == plain, f"{name} said {said}, not {plain}")
            self._writer.remember(story)


def _fingerprint(step: Step) -> bytes:
    """Every array of a Step: it owns them, so nobody changes them."""
    arrays = (step.rows, step.num_computed, step.num_scheduled, step.samples, step.token_ids.values, step.drafts.values)
    away = [getattr(copies, name) for copies in (step.stores, step.loads) for name in TierCopies.__slots__]
    away += [ids for one in (*step.spills, *step.fetches) for ids in (one.group, one.block)]
    more = (step.cells.row, step.cells.column, step.cells.block, step.zero, step.state_read, step.state_writes)
    return b"|".join(array.tobytes() for array in (*arrays, *more, *away))


def play(
    seed: int,
    tamper: Tamper | None = None,
    steps: int = 120,
    eviction: str = LRU.name,
    family: str | None = None,
    *,
    layout: str | None = None,
    tiered: bool = False,
    stored: bool = False,
) -> Counter[str]:
    """One history from ``seed``; what happened in it. DifferenceError names the seed and the world.

    eviction: what is given up next. family: of the model, None for any. layout: None for either. tiered: with host
    memory below the device's. stored: with a store behind that, and processes that end.
    """
    history = History(seed, tamper, eviction, family, layout=layout, tiered=tiered or stored, stored=stored)
    try:
        history.play(steps)
    except Exception as error:
        raise DifferenceError(f"seed {seed}: {type(error).__name__}: {error}\n  in {history.world.options}") from error
    return history.counts
