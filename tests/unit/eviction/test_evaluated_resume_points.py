"""Ends that are kept by their worth: what they need, what is given up, what is remembered of them; faults are seen."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.index import KnownTokens, add_known, leading_known
from hybridkv.cache.placement import EndsPlacement
from hybridkv.eviction import HAZARD, ranked
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.eviction.resume_points import Kind, ResumePoint
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Csr, StepResult
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec, window_spec

HYBRID = (full_spec(4), state_spec(4))


START, ON = [1, 2, 3, 4], [5, 6, 7, 8]


class Cache:
    """A scheduler over slabs; requests run one after the other, seconds pass as asked."""

    def __init__(self, slabs: int = 9, specs: tuple[KVCacheSpec, ...] = HYBRID) -> None:
        self.now = 0.0
        per_slab = tuple(1 if "Mamba" in type(spec).__name__ else 4 for spec in specs)
        self.cache = KVCacheManager(
            natural_model_config(slabs, specs, per_slab),
            200,
            options=CacheOptions(placement=EndsPlacement(), eviction=HAZARD, clock=lambda: self.now),
        )
        limits = SchedulerLimits(max_running=4, max_batched_tokens=64)
        self.scheduler = Scheduler(self.cache, limits, clock=lambda: self.now)
        self._names = count()

    @property
    def eviction_policy(self) -> RankedResumePoints:
        found = self.cache._parts.eviction_policy
        assert isinstance(found, RankedResumePoints)
        return found

    def ends(self, kind: Kind | None = None) -> list[ResumePoint]:
        self.eviction_policy._renew_stale(self.now)
        return [node for node in self.eviction_policy._tree.kept() if kind is None or node.kind is kind]

    def node(self, tokens: int) -> ResumePoint:
        self.eviction_policy._renew_stale(self.now)
        return next(node for node in self.eviction_policy._tree.kept() if node.tokens == tokens)

    def run(self, prompt: list[int], outputs: int = 3, seconds: float = 10.0) -> int:
        """Tokens hit."""
        self.now += seconds
        request = Request(
            str(next(self._names)),
            prompt,
            SamplingParams(max_tokens=outputs, ignore_eos=True),
            hasher=self.cache.hasher,
        )
        self.scheduler.add(request)
        said = iter(range(1000, 2000))
        while not self.scheduler.drained:
            step = self.scheduler.schedule()
            indptr = np.concatenate(([0], np.cumsum(step.samples)))
            tokens = np.array([next(said) for _ in range(int(indptr[-1]))], np.int32)
            self.scheduler.update(StepResult(step.id, Csr(indptr, tokens)))
            self.scheduler.check()
        assert request.first_hit_tokens is not None
        return request.first_hit_tokens


def chat(person: int, turns: int = 1) -> list[int]:
    """A prompt of 11 tokens, and what was said since."""
    prompt = [person, *range(100, 110)]
    for turn in range(1, turns):
        prompt += [1000, 1001, 1002, *(10 * turn + one for one in range(5))]
    return prompt


# -- what is kept


@pytest.mark.parametrize("specs", [(full_spec(4),), (full_spec(4), window_spec(4, 9))])
def test_branch_from_a_cached_prefix_becomes_a_resume_point(specs: tuple[KVCacheSpec, ...]) -> None:
    """Though nothing is missing there: else nobody would know that a template is hit."""
    cache = Cache(slabs=14, specs=specs)
    template = list(range(100, 113))
    cache.run([*template, 1, 1, 1])
    assert cache.run([*template, 2, 2, 2]) == 12
    assert [end.tokens for end in cache.ends(Kind.BRANCH)] == [12]
    cache.run([*template, 3, 3, 3])
    assert [end.hits for end in cache.ends(Kind.BRANCH)] == [1]


# -- what is remembered


def test_branch_point_is_known_after_all_blocks_are_evicted() -> None:
    cache = Cache(slabs=7)
    shared = list(range(100, 120))
    cache.run([*shared, 1, 1, 1])
    for person in range(200, 206):
        cache.run([person] * 24)
    other = Request("other", [*shared, 2, 2, 2], hasher=cache.cache.hasher)
    hit = cache.cache.find_hit(other)
    assert (hit.tokens, hit.branch_tokens) == (0, 20)


def test_known_prefixes_are_forgotten_by_generation() -> None:
    known = KnownTokens(8)
    keys = [bytes([i]) for i in range(40)]
    add_known(known, keys[:4])
    assert leading_known(known, keys) == 4
    add_known(known, keys[10:13])
    assert leading_known(known, keys[:4]) == 4
    add_known(known, keys[20:23])
    add_known(known, keys[30:33])
    assert leading_known(known, keys[:4]) == 0
    assert leading_known(known, keys[30:]) == 3


def test_ghost_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(slabs=7)
    monkeypatch.setattr(ranked, "_MOST_GHOST_ENTRIES", 3)
    for person in range(12):
        cache.run(chat(person))
    assert sum(map(len, cache.eviction_policy._ghost_entries.values())) <= 3
    assert len(cache.eviction_policy._tree.points) <= 3 + len(cache.ends())


def test_resume_point_outcomes_are_counted_by_kind() -> None:
    cache = Cache(slabs=16)
    for prompt in (chat(1), chat(1, 2), chat(1)):  # new; on from the end of the output; the same prompt again
        cache.run(prompt)
    cache.eviction_policy._release(cache.node(10), cache.now)
    cache.run(chat(1))  # found all the same: nobody has taken its blocks
    for node in (cache.node(10), cache.node(13)):
        cache.eviction_policy._release(node, cache.now)
    for person in range(5, 9):
        cache.run(chat(person))
    cache.run(chat(1))
    found = {one.kind: one for one in cache.cache.statistics().ends}
    assert (found["prompt"].made, found["prompt"].hits, found["output"].hits) == (8, 2, 1)
    assert found["prompt"].missed == 1
    assert found["prompt"].kept == sum(end.kind is Kind.PROMPT for end in cache.ends())
    assert sum(one.given_up for one in found.values()) >= 3
    statistics = cache.cache.statistics()
    assert statistics.missed_tokens == statistics.missed_a_gib_more == 10


def test_resume_point_outcomes_are_counted_by_hazard_class() -> None:
    """A class says what an end was when it was hit or given up, not what became of it."""
    cache = Cache(slabs=24)
    cache.run(chat(1))
    for _ in range(4):
        cache.run(chat(1))  # ten seconds apart
    cache.eviction_policy._release(cache.node(10), cache.now)
    cache.run(chat(2))
    cache.eviction_policy._release(
        next(node for node in cache.eviction_policy._tree.kept() if node.tokens == 13), cache.now
    )
    prompt, output = cache.cache.statistics().ends[:2]
    assert [(one.hits_before, one.pause_s, one.kept, one.hits, one.missed, one.given_up) for one in prompt.classes] == [
        (0, None, 1, 1, 0, 0),
        (1, 8.0, 0, 1, 0, 0),
        (2, 8.0, 0, 1, 0, 0),
        (3, 8.0, 0, 1, 0, 1),
    ]
    assert [one.given_up for one in output.classes] == [1]
    for kind in (prompt, output):
        assert (kind.kept, kind.hits) == (sum(o.kept for o in kind.classes), sum(o.hits for o in kind.classes))
    assert {one.promise for one in prompt.classes} == {""}


# -- what was lost otherwise


def test_resume_point_evicted_by_a_caller_is_dropped() -> None:
    cache = Cache()
    cache.run(chat(1))
    cache.run(chat(1, 2))
    first = cache.cache.groups[0].index.get(Request("r", chat(1), hasher=cache.cache.hasher).hashes[0])
    assert first is not None
    cache.cache.block_pool.evict_blocks(np.array([first], np.int32))
    cache.cache.check()
    assert cache.ends() == []
    assert cache.run(chat(1)) == 0
