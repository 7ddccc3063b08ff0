"""Evictions that rank ends, in random runs: every step reads its own, everything is checked, equal calls decide alike.

What a ranking says is held against one that keeps no order and looks at all ends each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from how_much import how_many
from hybridkv.cache.placement import EVICTIONS, LRU, Eviction, eviction_named
from hybridkv.cache.placement.ends import End, PassedThenLosing, Ranking
from hybridkv.cache.placement.hazard import HazardRanking
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from hybridkv.testing.difference import DifferenceError
from oracles import RigOptions, random_natural_options, random_run
from oracles.machines import NaturalMachine
from oracles.strategies import natural_rig_options
from oracles.twins import Twins

pytestmark = pytest.mark.usefixtures("quiet")


class NaiveCoverage(PassedThenLosing):
    """Passed ends, then those of the losing kind, each by last use: the least of a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[End] = []

    def add(self, end: End, now: float) -> None:  # noqa: ARG002 - the answer of a ranking
        """One more."""
        self.ends.append(end)

    def remove(self, end: End) -> None:
        """One less."""
        self.ends.remove(end)

    def lowest(self, now: float) -> End | None:  # noqa: ARG002 - as above
        """O(ends)."""
        losing = self.losing()
        return min(
            self.ends, key=lambda end: (not end.passed, end.kind is not losing, end.used, end.serial), default=None
        )


class NaiveHazard(HazardRanking):
    """Of each class and power of two of what is saved the ends used first and last; of those the least value."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[End] = []

    def add(self, end: End, now: float) -> None:
        """One more."""
        super().add(end, now)
        self.ends.append(end)

    def remove(self, end: End) -> None:
        """One less."""
        super().remove(end)
        self.ends.remove(end)

    def lowest(self, now: float) -> End | None:
        """O(ends)."""
        rings: dict[tuple[int, int], list[End]] = {}
        for end in sorted(self.ends, key=lambda end: (end.used, end.serial)):
            rings.setdefault((self._class_of(end), math.frexp(end.saved)[1]), []).append(end)
        outer = [end for ring in rings.values() for end in (ring[0], ring[-1])]
        return min(outer, key=lambda end: (self.value(end, now), end.serial), default=None)


class Backwards(NaiveCoverage):
    """The end used last."""

    def lowest(self, now: float) -> End | None:  # noqa: ARG002 - as above
        """O(ends)."""
        return max(self.ends, key=lambda end: (end.used, end.serial), default=None)


NAIVE: dict[str, Callable[[], Ranking]] = {"coverage": NaiveCoverage, "hazard": NaiveHazard}
PAIRS = {
    name: (eviction_named(name), Eviction(name, naive, eviction_named(name).corner)) for name, naive in NAIVE.items()
}
MODELS = {
    "full": (full_spec(4),),
    "full and states": (full_spec(4), state_spec(4)),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8)),
    "windows": (window_spec(4, 8), window_spec(4, 13), full_spec(4)),
    "chunks and drafts": (chunk_spec(4, 6), full_spec(4), state_spec(4, drafts=2)),
}


def test_all_that_rank_ends_are_here() -> None:
    assert {*PAIRS, LRU.name} == {*EVICTIONS}


@pytest.mark.parametrize("eviction", PAIRS)
@pytest.mark.parametrize("model", MODELS)
def test_random_runs(model: str, eviction: str) -> None:
    for seed in range(how_many(4)):
        random = Random(f"{model} {seed}")
        random_run(Twins(random_natural_options(random, MODELS[model]), PAIRS[eviction]), random)


@pytest.mark.parametrize("eviction", PAIRS)
def test_random_runs_of_any_model_hit_and_evict(eviction: str) -> None:
    hit = evicted = 0
    for seed in range(how_many(10)):
        random = Random(seed)
        twins = Twins(random_natural_options(random), PAIRS[eviction])
        random_run(twins, random)
        hit, evicted = hit + twins.tokens_hit, evicted + twins.cache.block_pool.evictions
    assert hit > 0
    assert evicted > 0


def test_rankings_that_differ_are_seen() -> None:
    """Of two that do not rank alike, runs say so."""
    random = Random(7)
    pair = PAIRS["coverage"][0], Eviction("backwards", Backwards)
    twins = Twins(random_natural_options(random, MODELS["full and states"]), pair)
    with pytest.raises(DifferenceError):
        random_run(twins, random)


@pytest.mark.thorough
@pytest.mark.parametrize("eviction", PAIRS)
def test_many_random_runs(eviction: str) -> None:
    for seed in range(10_000, 10_000 + how_many(100)):
        random = Random(seed)
        random_run(Twins(random_natural_options(random), PAIRS[eviction]), random, 120)


class CoverageMachine(NaturalMachine):
    """Any order of actions."""

    @initialize(options=natural_rig_options())
    def build(self, options: RigOptions) -> None:
        self.rig = Twins(options, PAIRS["coverage"])


class HazardMachine(NaturalMachine):
    """Any order of actions."""

    @initialize(options=natural_rig_options())
    def build(self, options: RigOptions) -> None:
        self.rig = Twins(options, PAIRS["hazard"])


TestCoverageMachine = CoverageMachine.TestCase
TestCoverageMachine.settings = settings(max_examples=max(1, settings().max_examples // 8), stateful_step_count=30)
TestHazardMachine = HazardMachine.TestCase
TestHazardMachine.settings = settings(max_examples=max(1, settings().max_examples // 8), stateful_step_count=30)
