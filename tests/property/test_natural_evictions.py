"""Evictions that rank ends, in random runs: every step reads its own, everything is checked, equal calls decide alike.

What a ranking says is held against one that keeps no order and looks at all ends each time.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from how_much import how_many
from hybridkv.errors import CacheError
from hybridkv.eviction import HAZARD, hazard
from hybridkv.eviction.blocks import PointBlocks
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.eviction.resume_points import BY_ALL, NEVER, NOTHING, SOMETIME, WITHIN, ResumePoint, hint_of
from hybridkv.request import NO_HINTS, Hints, Request
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from hybridkv.testing.event_follower import DifferenceError
from oracles import RigOptions, random_natural_options, random_run
from oracles.ends import PlainEnds, watched
from oracles.machines import NaturalMachine
from oracles.rankings import NaiveHazard, beside
from oracles.strategies import natural_rig_options
from oracles.twins import Twins

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")


class Backwards(NaiveHazard):
    """The end used last."""

    def allowed(self, now: float) -> list[ResumePoint | None]:  # noqa: ARG002 - the answer of a ranking
        """O(ends)."""
        return [max(self.ends, key=lambda end: (end.used, end.serial), default=None)]


PAIR = HAZARD, beside()
MODELS = {
    "full": (full_spec(4),),
    "full and states": (full_spec(4), state_spec(4)),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8)),
    "windows": (window_spec(4, 8), window_spec(4, 13), full_spec(4)),
    "chunks and drafts": (chunk_spec(4, 6), full_spec(4), state_spec(4, drafts=2)),
}


@pytest.mark.parametrize("model", MODELS)
def test_natural_eviction_random_runs_are_consistent(model: str) -> None:
    for seed in range(how_many(4)):
        random = Random(f"{model} {seed}")
        random_run(Twins(random_natural_options(random, MODELS[model]), PAIR), random)


def test_natural_eviction_random_runs_hit_and_evict() -> None:
    hit = evicted = 0
    for seed in range(how_many(10)):
        random = Random(seed)
        twins = Twins(random_natural_options(random), PAIR)
        random_run(twins, random)
        hit, evicted = hit + twins.tokens_hit, evicted + twins.cache.block_pool.keys.evictions
    assert hit > 0
    assert evicted > 0


def test_natural_eviction_different_rankings_are_detected() -> None:
    """Of two that do not rank alike, runs say so."""
    random = Random(7)
    twins = Twins(random_natural_options(random, MODELS["full and states"]), (HAZARD, beside(Backwards)))
    with pytest.raises(DifferenceError):
        random_run(twins, random)


class WatchedTwins(Twins):
    """And what each end goes on from and saves is what it is by its tokens."""

    def __init__(self, options: RigOptions, plain: PlainEnds) -> None:
        super().__init__(options, PAIR)
        self.plain = plain

    def check(self) -> None:
        """See Twins."""
        super().check()
        kept = self.cache._parts.eviction_policy
        if isinstance(kept, RankedResumePoints):
            self.plain.check(kept)


def watched_runs(model: str, runs: int, actions: int = 60) -> PlainEnds:
    """Random runs; states are kept at ends."""
    with watched() as plain:
        for seed in range(runs):
            random = Random(f"{model} {seed}")
            options = random_natural_options(random, MODELS[model])
            random_run(WatchedTwins(replace(options, placement="ends"), plain), random, actions)
            plain.prefixes.clear()
    return plain


@pytest.mark.parametrize("model", ["full", "full and states"])
def test_resume_points_follow_their_prefix_and_count_each_hit_once(model: str) -> None:
    plain = watched_runs(model, how_many(8))
    assert plain.compared > 100
    assert plain.hits[True] > 0


@pytest.mark.parametrize("seed", [14, 17, 44, 70])
def test_natural_eviction_past_failures_pass(seed: int) -> None:
    """70: of two blocks with one key the first was lost, and the other one, given up before, is needed in its place."""
    with watched() as plain:
        random = Random(f"full and states {seed}")
        options = replace(random_natural_options(random, MODELS["full and states"]), placement="ends")
        random_run(WatchedTwins(options, plain), random, 120)
    assert plain.compared > 0


@pytest.mark.thorough
def test_natural_eviction_many_watched_runs_match() -> None:
    plain = watched_runs("full and states", how_many(80), 120)
    assert plain.hits[False] > 0
    assert plain.unknown > 0


# -- hints

HINTS = (
    NO_HINTS,
    Hints(over=True),
    Hints(goes_on=True),
    Hints(within_s=2),
    Hints(within_s=900),
    Hints(secret=True),
    Hints(shared_tokens=6),
    Hints(scratch=True, shared_tokens=3),
    Hints(within_s=3, shared_tokens=5),
    Hints(ttl_s=3, goes_on=True),
    Hints(ttl_s=40, within_s=2),
)


def test_natural_eviction_random_runs_with_hints_match(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_hints = set[int]()

    def hinted(name: str, *asked: object, **others: object) -> Request:
        hints = HINTS[zlib.crc32(name.encode()) % len(HINTS)]
        request = Request(name, *asked, hints=hints, **others)  # type: ignore[arg-type]
        seen_hints.update(hint_of(request, tokens) for tokens in range(1, request.num_tokens))
        return request

    monkeypatch.setattr(sys.modules["oracles.rig"], "Request", hinted)
    for seed in range(how_many(4)):
        random = Random(f"hints {seed}")
        random_run(Twins(random_natural_options(random, MODELS["full and states"]), PAIR), random)
    assert seen_hints >= {NOTHING, NEVER, BY_ALL, SOMETIME, WITHIN}


# -- faults


def learns_soon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hazard, "_LEARN_AT", 4)
    patch.setattr(hazard, "_LEARN_EVERY", 4)
    patch.setattr(hazard, "_HALVED_EVERY", 8)
    patch.setattr(NaiveHazard, "learn_first", 4)
    patch.setattr(NaiveHazard, "learn_every", 4)
    patch.setattr(NaiveHazard, "halved_every", 8)


def loses_heirs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hazard.HazardRanking, "evicted", lambda *_, **__: None)


def leaves_decay_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hazard.HazardRanking, "decay", lambda *_: None)


def keeps_what_was_saved(patch: pytest.MonkeyPatch) -> None:
    """D is worked out once."""
    saved = PointBlocks.saved
    patch.setattr(PointBlocks, "saved", lambda self, point: point.saved or saved(self, point))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    loses_heirs: "the heir of end",
    leaves_decay_out: "hits of class",
    keeps_what_was_saved: "(a|per) byte, not",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_natural_eviction_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    learns_soon(monkeypatch)
    fault(monkeypatch)
    with pytest.raises((DifferenceError, CacheError), match=FAULTS[fault]):
        watched_runs("full and states", 40)


@pytest.mark.parametrize("model", ["full", "full and states"])
def test_natural_eviction_fast_learning_runs_match(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learns_soon(monkeypatch)
    assert watched_runs(model, how_many(8)).compared > 0


@pytest.mark.thorough
def test_natural_eviction_many_random_runs_are_consistent() -> None:
    for seed in range(10_000, 10_000 + how_many(100)):
        random = Random(seed)
        random_run(Twins(random_natural_options(random), PAIR), random, 120)


class HazardMachine(NaturalMachine):
    """Any order of actions."""

    @initialize(options=natural_rig_options())
    def build(self, options: RigOptions) -> None:
        self.rig = Twins(options, PAIR)


TestHazardMachine = HazardMachine.TestCase
TestHazardMachine.settings = settings(max_examples=max(1, settings().max_examples // 8), stateful_step_count=30)
