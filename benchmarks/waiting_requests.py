"""Measure the cost of one waiting request among 1,000 or 100,000: microseconds of the scheduler's thread.

python waiting_requests.py
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Literal

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, StepResult
from hybridkv.testing import attention_config

OPERATIONS = 200
QUEUED = 16_000

Policy = Literal["fcfs", "priority"]


class Crowd:
    """A scheduler with one seat and ``waiting`` requests. What is timed is its owner's own calls."""

    def __init__(self, waiting: int, policy: Policy) -> None:
        self._random = random.Random(waiting)  # noqa: S311 - what it draws is no secret
        self.cache = KVCacheManager(attention_config(64), 200)
        self.scheduler = Scheduler(self.cache, SchedulerLimits(max_running=1, policy=policy))
        self.names = [f"r{number}" for number in range(waiting)]
        for name in self.names:
            self.scheduler.add(self.new(name))
        self.scheduler.finish("nobody")  # takes in what arrived
        self._random.shuffle(self.names)

    def new(self, name: str) -> Request:
        """Return a request with its own priority."""
        sampling = SamplingParams(max_tokens=20)
        priority = self._random.randrange(1_000_000)
        return Request(name, [1, 2, 3], sampling, hasher=self.cache.hasher, priority=priority)

    def add(self) -> list[float]:
        """One arrives."""
        late = [self.new(f"late{number}") for number in range(OPERATIONS)]
        return [_seconds(lambda one=one: (self.scheduler.add(one), self.scheduler.finish("nobody"))) for one in late]  # type: ignore[misc]  # of this turn

    def abort(self) -> list[float]:
        """One of those in the middle goes."""
        return [_seconds(lambda: self.scheduler.abort(self.names.pop())) for _ in range(OPERATIONS)]

    def come_and_return(self) -> list[float]:
        """Admit the first request, fail its step, and let it wait in front again; the step's cost is included."""
        return [_seconds(lambda: self.scheduler.fail(self.scheduler.schedule().id, "")) for _ in range(OPERATIONS)]

    def abort_queued(self) -> float:
        """Seconds of the update that finds ``QUEUED`` aborts of other threads, or as many as there are requests."""
        step = self.scheduler.schedule()
        for name in self.names[:QUEUED]:
            self.scheduler._waiting.abort(name)
        result = StepResult(step.id, Csr.from_lists([[7] if samples else [] for samples in step.samples.tolist()]))
        return _seconds(lambda: self.scheduler.update(result))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print the table: medians of single calls."""
    logging.disable()  # each failed step would say so
    print("| policy | waiting | add | abort | come in and return | aborts queued, one update |")
    print("|---|--:|--:|--:|--:|--:|")
    policies: tuple[Policy, ...] = ("fcfs", "priority")
    for policy in policies:
        for waiting in (1_000, 100_000):
            crowd = Crowd(waiting, policy)
            median = [
                sorted(costs)[OPERATIONS // 2] * 1e6 for costs in (crowd.add(), crowd.abort(), crowd.come_and_return())
            ]
            del crowd
            whole = Crowd(min(waiting, QUEUED), policy).abort_queued()
            cells = " | ".join(f"{one:,.1f} us" for one in median)
            print(f"| {policy} | {waiting:,} | {cells} | {min(waiting, QUEUED):,}: {whole:.3f} s |")


if __name__ == "__main__":
    main()
