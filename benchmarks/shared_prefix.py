"""CPU time of a request that shares its prefix with thousands before it, by layout.

    python shared_prefix.py [--models NAME ...] [--requests 200 2000 20000] [--memory 40GiB]

Each prompt repeats 1,500 to 2,100 tokens of one system prompt and adds three tokens of its own; the answer has four
tokens. Requests come one at a time. The natural layout (with its default eviction) and the reference layout serve the
same requests in turns of 25, in one process. Each figure is the median CPU time of the last 100 requests.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from random import Random
from statistics import median
from typing import Final

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, plan, read_model
from hybridkv.cache import CacheOptions
from hybridkv.step import Csr, StepResult

MODELS: Final = ("qwen3-next-80b-a3b", "llama-3-8b", "nemotron-3-nano-30b-a3b", "gemma-3-27b")
SHARED: Final = (1500, 2100)
_TURN: Final = 25
_LAST: Final = 100


class SharedPrefix:
    """A scheduler that serves one request after the other, all with the same system prompt.

    Args:
        model: Name of a published config.
        layout: ``natural`` or ``reference``.
        memory: Of the cache, as ``plan`` reads it.
    """

    def __init__(self, model: str, layout: str, memory: str = "40GiB") -> None:
        self._now = 0.0
        self._random = Random(1)  # noqa: S311 - seeded
        self._system_prompt = self._random.choices(range(100_000), k=SHARED[1])
        self._names = count()
        planned = plan(read_model(model), memory=memory, max_model_len=8192, layout=layout)
        self.cache = KVCacheManager(planned, options=CacheOptions(clock=lambda: self._now))
        self._scheduler = Scheduler(
            self.cache, SchedulerLimits(max_running=256, max_batched_tokens=8192), clock=lambda: self._now
        )
        self.seconds: deque[float] = deque(maxlen=_LAST)

    def serve(self, requests: int) -> None:
        """Serve ``requests`` more; ``seconds`` has the CPU time of the last hundred."""
        for _ in range(requests):
            begun = time.process_time()
            self._serve_one()
            self.seconds.append(time.process_time() - begun)

    def _serve_one(self) -> None:
        shared = self._random.randint(*SHARED)
        prompt = self._system_prompt[:shared] + self._random.choices(range(100_000), k=3)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        self._scheduler.add(Request(str(next(self._names)), prompt, sampling, hasher=self.cache.hasher))
        finished = False
        while not finished:
            self._now += 0.01
            step = self._scheduler.schedule()
            sampled = [[self._random.randrange(100_000)] if samples else [] for samples in step.samples.tolist()]
            finished = bool(self._scheduler.update(StepResult(step.id, Csr.from_lists(sampled))).finished)


def growth(model: str, marks: list[int], memory: str) -> Iterator[tuple[int, float, float]]:
    """Yield (requests served, milliseconds in the natural layout, in the reference layout) at each of ``marks``."""
    natural, reference = (SharedPrefix(model, layout, memory) for layout in ("natural", "reference"))
    served = 0
    for mark in marks:
        while served < mark:
            turn = min(_TURN, mark - served)
            natural.serve(turn)
            reference.serve(turn)
            served += turn
        yield mark, 1e3 * median(natural.seconds), 1e3 * median(reference.seconds)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--requests", nargs="+", type=int, default=[200, 2000, 20_000])
    parser.add_argument("--memory", default="40GiB")
    args = parser.parse_args()
    print("| model | requests before | natural, ms | reference, ms | natural / reference |")
    print("|---|--:|--:|--:|--:|")
    for model in args.models:
        for mark, natural, reference in growth(model, sorted(args.requests), args.memory):
            print(f"| {model} | {mark:,} | {natural:.2f} | {reference:.2f} | {natural / reference:.2f} |", flush=True)


if __name__ == "__main__":
    main()
