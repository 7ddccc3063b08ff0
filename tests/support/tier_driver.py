"""A scheduler over a device and host memory, and a worker that only says which transfers arrived."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.eviction import EVERYBODY, TenantShares
from hybridkv.eviction.choice import HAZARD, Eviction
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.simulator.transfers import DiskModel
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import full_spec, natural_model_config
from hybridkv.tiers import HostTier, Prefixes, StoreLookups, TierLimits, parts_of

BLOCK = 16


def manager(
    blocks: int,
    specs: tuple[KVCacheSpec, ...],
    like: KVCacheManager | None = None,
    *,
    eviction: Eviction = HAZARD,
    clock: Callable[[], float] = time.monotonic,
    shares: TenantShares = EVERYBODY,
) -> KVCacheManager:
    """A cache of ``blocks`` blocks; of states and tokens, each block is a slab."""
    config = natural_model_config(blocks + 1, specs, (1,) * len(specs))
    options = CacheOptions(
        placement=EndsPlacement(), eviction=eviction, shares=shares, log_resume_points=like is None, clock=clock
    )
    return KVCacheManager(config, 8192, hasher=None if like is None else like.hasher, options=options)


class Driver:
    """A scheduler over a device and a host, and a worker whose transfers arrive ``delay`` steps late.

    With ``took_s``, transfers take so many seconds, and each token of a step ``token_s``. With ``stored``, a store
    behind the host takes every spill, and never finds anything.
    """

    def __init__(
        self,
        device: int,
        host: int,
        *,
        specs: tuple[KVCacheSpec, ...] = (full_spec(BLOCK),),
        limits: TierLimits | None = None,
        delay: int = 0,
        took_s: float | None = None,
        token_s: float = 0.0,
        shares: TenantShares = EVERYBODY,
        stored: bool = False,
        **scheduling: Any,  # noqa: ANN401 - SchedulerLimits
    ) -> None:
        self.now, self.took_s, self.token_s = 0.0, took_s, token_s
        clock = time.monotonic if took_s is None else lambda: self.now
        self.cache = manager(device, specs, clock=clock, shares=shares)
        held = manager(host, specs, self.cache, clock=clock, shares=shares)
        names = Prefixes(parts_of(held), b"one model only..", BLOCK)
        self.tier = HostTier(self.cache, held, limits, StoreLookups(DiskModel(1), names) if stored else None)
        chosen = SchedulerLimits(**{"max_batched_tokens": 8192, **scheduling})
        self.scheduler = Scheduler(self.cache, chosen, tier=self.tier)
        self.delay = delay
        self.late: list[tuple[int, int]] = []
        self.steps: list[Step] = []
        self.hits: dict[str, int] = {}

    def request(self, name: str, tokens: list[int], output: int = 1, **more: Any) -> Request:  # noqa: ANN401 - a request's
        made = Request(
            name, tokens, SamplingParams(max_tokens=output, ignore_eos=True), hasher=self.cache.hasher, **more
        )
        self.scheduler.add(made)
        return made

    def result(self, step: Step) -> StepResult:
        now = len(self.steps)
        begun = {*step.stores.transfer.tolist(), *step.loads.transfer.tolist()}
        begun |= {one.number for one in step.spills}
        self.late += [(number, now + self.delay) for number in sorted(begun)]
        arrived = [number for number, at in self.late if at <= now]
        self.late = [one for one in self.late if one[0] not in arrived]
        sampled = Csr.from_lists([[7] if samples else [] for samples in step.samples.tolist()])
        accepted = np.diff(sampled.indptr).astype(np.int32) if len(step.drafts.values) else None
        self.now += step.num_tokens * self.token_s
        seconds = np.full(0 if self.took_s is None else len(arrived), self.took_s or 0.0, np.float32)
        return StepResult(step.id, sampled, accepted, arrived=np.array(arrived, np.int32), arrived_s=seconds)

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.steps.append(step)
        for new in step.new_rows:
            self.hits.setdefault(new.request_id, step.num_computed[step.rows == new.row].item())
        self.scheduler.update(self.result(step))
        self.scheduler.check()
        return step

    def run(self, most: int = 100) -> int:
        """Run to the end; return the number of steps. An empty step is one that a transfer must end."""
        for done in range(most):
            if self.scheduler.drained:
                return done
            waited = self.tier.num_in_flight
            step = self.step()
            assert len(step) or waited or len(step.loads) or len(step.stores), "nothing runs, and nothing is on its way"
        raise AssertionError(f"{self.scheduler.num_waiting} requests wait after {most} steps")

    def served(self, name: str, tokens: list[int], output: int = 1, **more: Any) -> None:  # noqa: ANN401 - a request's
        self.request(name, tokens, output, **more)
        self.run()
        for _ in range(2 * (self.delay + 1)):  # the end of its output goes down after the end of its prompt
            self.step()
        assert not self.tier.num_in_flight


def tokens(number: int, blocks: int, more: int = 1) -> list[int]:
    return [1000 * number + at % 900 for at in range(BLOCK * blocks + more)]
