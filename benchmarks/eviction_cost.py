"""Measure the cost of eviction policies in a scheduler step, in a request and in a ranking, by stored resume points.

    python eviction_cost.py [--steps 1000 10000 100000] [--ends 1000 10000] [--ranked 1000 10000 100000] [--bytes 2000]

A step: 256 requests run, each with about 256 output tokens, in a cache that earlier requests with short outputs have
filled. Of new requests, three in ten have a new prompt, three repeat an earlier prompt, and four continue an answer.
``schedule`` and ``update`` are timed. Policies take turns of 50 steps in one process, and the median of their ratios is
reported. A request: 48 tokens, of which a fortieth of all requests share 16, arrive, are computed and leave, with two
resume points each. A ranking alone evicts its lowest resume point, stores a new one and sees a hit. Bytes: Python
objects per stored resume point, compared with ``lru``, with ghost entries and remembered keys. Without options: all
measurements except the longest.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from random import Random

import numpy as np
from eviction_table import serve_alone

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement
from hybridkv.eviction import EVICTIONS, LRU, eviction_named
from hybridkv.eviction.resume_points import Kind, ResumePoint
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec

_TIMED = 400
_OUTPUTS = list(range(5))

_RUNNING = 256
_OUTPUT_TOKENS = (128, 384)
_FILLED_WITH = [7] * 4
"""Tokens of output of those that only fill the cache."""
_LONGEST = 2048
_TURN = 50
"""Steps."""


class Busy:
    """A scheduler for ``_RUNNING`` requests over a cache that is full, of some ``ends`` ends if it knows them.

    At first nobody runs.
    """

    def __init__(self, eviction: str, ends: int) -> None:
        self._now = 0.0
        self._random = Random(1)  # noqa: S311 - seeded
        self._names = count()
        self._prompts: deque[list[int]] = deque(maxlen=ends)
        self._answered: deque[list[int]] = deque(maxlen=ends)
        self.cache = KVCacheManager(
            natural_model_config(8 * _RUNNING + 3 * ends // 2, (full_spec(16), state_spec(16)), (4, 1)),
            _LONGEST,
            options=CacheOptions(placement=EndsPlacement(), eviction=eviction_named(eviction), clock=lambda: self._now),
        )
        while not self.cache.block_pool.keys.evictions:
            self._now += 0.02
            request = self._request()
            serve_alone(self.cache, request, _FILLED_WITH, next(self._names))
            self._answered.append(request.token_ids().tolist())
        limits = SchedulerLimits(max_running=_RUNNING, max_batched_tokens=8 * _LONGEST)
        self._scheduler = Scheduler(self.cache, limits, clock=lambda: self._now)
        self._live: set[str] = set()

    @property
    def kept(self) -> int:
        """Ends."""
        return sum(one.kept for one in self.cache.statistics().ends)

    def _request(self) -> Request:
        """Return a request with a new prompt, an earlier prompt, or a continuation of an earlier one."""
        kind, number = self._random.random(), next(self._names)
        recent = [number % 30_000, number // 30_000] * 16
        prompt = [number % 40] * 16 + recent
        if kind > 0.3 and self._prompts:
            prompt = self._random.choice(self._prompts)
        if kind > 0.6 and self._answered:
            answered = self._random.choice(self._answered)
            prompt = answered + recent if len(answered) < _LONGEST // 2 else prompt
        self._prompts.append(prompt)
        sampling = SamplingParams(max_tokens=self._random.randrange(*_OUTPUT_TOKENS), ignore_eos=True)
        return Request(str(number), prompt, sampling, hasher=self.cache.hasher)

    def steps(self, count: int) -> float:
        """Seconds of CPU a step, of ``count`` ones."""
        spent = 0.0
        for _ in range(count):
            while len(self._live) < _RUNNING:
                request = self._request()
                self._live.add(request.request_id)
                self._scheduler.add(request)
            self._now += 0.02
            begun = time.process_time()
            step = self._scheduler.schedule()
            spent += time.process_time() - begun
            result = _answer(step)
            begun = time.process_time()
            outcome = self._scheduler.update(result)
            spent += time.process_time() - begun
            for ended in outcome.finished:
                self._live.discard(ended.request.request_id)
                self._answered.append(ended.request.token_ids().tolist())
        return spent / count


def _answer(step: Step) -> StepResult:
    """All say the number of the step."""
    indptr = np.concatenate(([0], np.cumsum(step.samples)))
    return StepResult(step.id, Csr(indptr, np.full(int(indptr[-1]), step.id, np.int32)))


def compare_steps(ends: int, rounds: int) -> Iterator[str]:
    """Yield a line for each eviction."""
    sides = {name: Busy(name, ends) for name in EVICTIONS}
    for side in sides.values():
        side.steps(10 * _TURN)
    times: dict[str, list[float]] = {name: [] for name in EVICTIONS}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side.steps(_TURN))
    beside = np.array(times[LRU.name])
    for name, side in sides.items():
        ratio = np.median(np.array(times[name]) / beside)
        median = np.median(times[name]) * 1e6
        yield f"{ends:>7,}, {name}: {median:,.0f} us a step, {ratio:.2f} of lru's, {side.kept:,} ends kept"


def bytes_of_an_end(ends: int) -> Iterator[str]:
    """Yield a line for each eviction that keeps resume points."""
    traced: dict[str, int] = {}
    for name in EVICTIONS:
        tracemalloc.start()
        side = Busy(name, ends)
        traced[name] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        if side.kept:
            more = (traced[name] - traced[LRU.name]) / side.kept
            yield f"{side.kept:>7,} ends kept, {name}: {more:,.0f} bytes an end more than lru"


def a_request(eviction: str, ends: int) -> float:
    """Seconds of CPU a request with ``ends`` ends kept."""
    seconds = [0.0]
    cache = KVCacheManager(
        natural_model_config(ends * 2, (full_spec(16), state_spec(16)), (4, 1)),
        100,
        options=CacheOptions(placement=EndsPlacement(), eviction=eviction_named(eviction), clock=lambda: seconds[0]),
    )
    requests = ends + _TIMED  # twice as many ends as fit, with their blocks
    begun = 0.0
    for number in range(requests):
        if number == ends:
            begun = time.process_time()
        seconds[0] += 0.1
        template = number % 40
        prompt = [template] * 16 + [100 + number % 30_000, number // 30_000] * 16
        serve_alone(cache, Request(str(number), prompt, hasher=cache.hasher), _OUTPUTS, number)
    return (time.process_time() - begun) / _TIMED


def a_turn(eviction: str, ends: int) -> Iterator[float]:
    """Seconds of CPU to give up an end, keep one and see one hit, of ``ends`` ranked; then, to learn, a request."""
    made = eviction_named(eviction).ranking
    if made is None:
        return
    ranking, random, now = made(), Random(1), 0.0  # noqa: S311 - seeded
    kept: dict[int, ResumePoint] = {}
    for serial in range(ends + _TIMED):
        now += 0.1
        end = ResumePoint(serial, random.choice(list(Kind)), 100, now, random.choice([None, 0.5, 20.0, 300.0]))
        end.saved = end.worth = random.lognormvariate(0.0, 2.0)
        if serial == ends:
            begun = time.process_time()
        if serial >= ends and (lowest := ranking.lowest(now)) is not None:
            ranking.remove(lowest)
            ranking.evicted(lowest, None, now, declined=False)
            ranking.forget(lowest, now)
            del kept[lowest.serial]
            hit = next(iter(kept.values()))
            ranking.remove(hit)
            ranking.hit(hit, now)
            ranking.add(hit, now)
        ranking.add(end, now)
        kept[serial] = end
    yield (time.process_time() - begun) / _TIMED
    begun = time.process_time()
    for _ in range(_TIMED):
        ranking.note_request(now)
    yield (time.process_time() - begun) / _TIMED


def compare_turns(ends: int) -> Iterator[str]:
    """Yield a line for each eviction that ranks."""
    for eviction in EVICTIONS:
        times = [f"{seconds * 1e6:.0f} us" for seconds in a_turn(eviction, ends)]
        if times:
            yield f"{ends:>7,} ranked, {eviction}: a turn {times[0]}, to learn {times[1]} a request"


def compare_requests(ends: int) -> Iterator[str]:
    """Yield a line for each eviction."""
    for eviction in EVICTIONS:
        yield f"{ends:>7,} kept, {eviction}: {a_request(eviction, ends) * 1e6:.0f} us a request"


_USUAL = {"steps": [1000, 10_000], "bytes": [2000], "ranked": [1000, 10_000, 100_000], "ends": [1000, 10_000]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in _USUAL:
        parser.add_argument(f"--{name}", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=20, help="turns of steps, each")
    asked = vars(parser.parse_args())
    measures: dict[str, Callable[[int], Iterator[str]]] = {
        "steps": lambda ends: compare_steps(ends, asked["rounds"]),
        "bytes": bytes_of_an_end,
        "ranked": compare_turns,
        "ends": compare_requests,
    }
    wanted = asked if any(asked[name] for name in _USUAL) else _USUAL
    for name, measure in measures.items():
        for ends in wanted[name]:
            for line in measure(ends):
                print(line, flush=True)


if __name__ == "__main__":
    main()
