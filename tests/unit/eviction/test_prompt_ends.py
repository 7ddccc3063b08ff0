"""Resume points of ranked eviction in the reference layout: ends of prompts and of requests, branches and marks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.eviction import HAZARD
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.eviction.resume_points import ResumePoint
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Csr, StepResult
from hybridkv.testing.configs import chunk_spec, full_spec, model_config, state_spec, window_spec

FULL = (full_spec(4),)
PROMPT, OUTPUT = range(30), 11
STATES = (full_spec(4), state_spec(4, mode="align"))
WINDOWS = (full_spec(4), window_spec(4, 8))


class Served:
    """A cache whose requests run one after the other, ten seconds apart."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        options, self.now = CacheOptions(eviction=HAZARD, clock=lambda: self.now), 0.0
        self.cache = KVCacheManager(model_config(40, tuple(specs)), 64, options=options)
        self._scheduler = Scheduler(self.cache, SchedulerLimits(max_running=4, max_batched_tokens=64))
        self._served = 0

    def serve(self, prompt: Sequence[int], marks: Sequence[int] = ()) -> int:
        """Return the tokens that ``prompt`` hits; its output is 100, 101, ..."""
        self.now, self._served = self.now + 10, self._served + 1
        asked = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        request = Request(f"{self._served}", list(prompt), asked, hasher=self.cache.hasher, marks=marks)
        self._scheduler.add(request)
        output = iter(range(100, 100 + OUTPUT))
        while self._scheduler.num_running + self._scheduler.num_waiting:
            made = self._scheduler.schedule()
            tokens = [[next(output)] if samples else [] for samples in made.samples.tolist()]
            self._scheduler.update(StepResult(made.id, Csr.from_lists(tokens)))
        assert request.first_hit_tokens is not None
        self.cache.check()
        return request.first_hit_tokens

    def points(self) -> list[ResumePoint]:
        """Return the kept resume points."""
        found = self.cache._parts.eviction_policy
        assert isinstance(found, RankedResumePoints)
        return list(found._tree.kept())

    def kept(self) -> dict[str, int]:
        """Return the kept resume points by kind."""
        return {one.kind: one.kept for one in self.cache.statistics().ends if one.kept}


@pytest.mark.parametrize("specs", [FULL, STATES, WINDOWS, (full_spec(4), chunk_spec(4, 8))])
def test_ends_of_prompts_and_requests_are_kept(specs: Sequence[KVCacheSpec]) -> None:
    served = Served(specs)
    assert served.serve(PROMPT) == 0
    assert served.kept() == {"prompt": 1, "output": 1}
    assert served.serve(PROMPT) == 28


def test_full_attention_hits_its_prompt_again_at_its_end() -> None:
    served = Served(FULL)
    assert [served.serve(PROMPT) for _ in range(3)] == [0, 28, 28]
    assert served.kept() == {"prompt": 1, "output": 1}


def test_full_attention_keeps_marks_of_prompts() -> None:
    served = Served(FULL)
    served.serve(PROMPT, marks=[14, 35])
    assert served.kept() == {"prompt": 1, "output": 1, "branch": 1}
    assert sorted(point.tokens for point in served.points()) == [12, 28, 40]


def test_full_attention_hits_the_longest_common_prefix() -> None:
    served = Served(FULL)
    served.serve(PROMPT)
    turn = [*PROMPT, *range(100, 100 + OUTPUT - 1)]
    assert served.serve([*turn, 7, 8]) == 40
    assert served.serve([*turn[:22], 7, 8]) == 20


def test_prompts_asked_often_outlive_outputs_asked_once() -> None:
    served, once = Served(FULL), [range(200 + 30 * number, 230 + 30 * number) for number in range(30)]
    for prompt in once[:20]:
        served.serve(PROMPT)
        served.serve(prompt)
    for prompt in once[20:]:  # they fill the memory twice
        served.serve(prompt)
    assert served.cache.block_pool.keys.evictions > 0
    assert served.serve(once[20]) == 0
    assert served.serve(PROMPT) == 28
