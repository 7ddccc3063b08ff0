"""Manager, scheduler and a worker against the naive oracle of each layout: all is compared after every action."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from how_much import how_many, too_rare
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from oracles import Rig, RigOptions, random_natural_options, random_options, random_run
from oracles.machines import CacheMachine, NaturalMachine
from oracles.strategies import natural_rig_options, rig_options

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

LONG = settings().max_examples > 100
HISTORIES = (8 if LONG else 2) * settings().max_examples
KINDS = ("full", "window", "state", "chunk")


class HybridMachine(CacheMachine):
    """Full attention, windows, chunks and states only: hits are frequent."""

    @initialize(options=rig_options(KINDS))
    def build(self, options: RigOptions) -> None:
        self.rig = Rig(options)


class NaturalHybridMachine(NaturalMachine):
    """The same in slabs."""

    @initialize(options=natural_rig_options(KINDS))
    def build(self, options: RigOptions) -> None:
        self.rig = Rig(options)


TestCacheMachine, TestHybridMachine = CacheMachine.TestCase, HybridMachine.TestCase
TestNaturalMachine, TestNaturalHybridMachine = NaturalMachine.TestCase, NaturalHybridMachine.TestCase
for machine in (TestCacheMachine, TestHybridMachine):
    machine.settings = settings(max_examples=HISTORIES, stateful_step_count=40)
for machine in (TestNaturalMachine, TestNaturalHybridMachine):
    machine.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)


# -- seeded runs

RANDOM = {"reference": random_options, "natural": random_natural_options}
RUNS = {"reference": (2 if LONG else 1) * settings().max_examples, "natural": how_many(6)}
MODELS = {
    "full and states": (full_spec(4), state_spec(4)),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8)),
    "windows": (window_spec(4, 8), window_spec(4, 13), full_spec(4)),
    "chunks and drafts": (chunk_spec(4, 6), full_spec(4), state_spec(4, drafts=2)),
    "states alone": (state_spec(4), state_spec(4)),
}


@pytest.mark.parametrize("layout", RANDOM)
@pytest.mark.parametrize("model", MODELS)
def test_scheduler_random_runs_match_the_oracle(model: str, layout: str) -> None:
    for seed in range(RUNS[layout]):
        random = Random(f"{model} {seed}")
        random_run(Rig(RANDOM[layout](random, MODELS[model])), random)


RARE = {
    "reference": {
        "preempted": 70,
        "late": 40,
        "dead": 140,
        "failed": 140,
        "finished": 1100,
        "evicted": 3600,
        "hit full": 130,
        "hit window": 120,
        "hit state": 140,
        "hit chunk": 20,
        "hit sink": 6,
        "dropped window": 900,
        "dropped chunk": 400,
        "dropped state": 1700,
        "relocated": 60,
        "split": 1400,
        "unreadable": 20,
        "drafted 0": 180,
        "accepted 0": 130,
        "accepted 1": 29,
        "accepted 2": 8,
        "cut drafts": 3,
        "drafts given up": 7,
        "overtaken": 120,
        "bound": 600,
        "tokens checked": 70_000,
        "states checked": 5_000,
    },
    "natural": {
        "preempted": 19,
        "late": 10,
        "dead": 16,
        "failed": 31,
        "finished": 430,
        "evicted": 1400,
        "moved": 80,
        "hit full": 130,
        "hit window": 80,
        "hit state": 100,
        "hit chunk": 22,
        "hit sink": 9,
        "hit cross": 30,
        "copied full": 60,
        "copied window": 50,
        "copied state": 100,
        "copied chunk": 17,
        "kept": 380,
        "declined": 31,
        "states at ends": 140,
        "superseded": 6,
        "superseded later": 12,
        "branched": 29,
        "branches that wait": 150,
        "split": 120,
        "unreadable": 11,
        "drafted 0": 38,
        "accepted 0": 26,
        "accepted 1": 7,
        "drafts given up": 1,
        "overtaken": 8,
        "bound": 200,
        "tokens checked": 32_000,
        "states checked": 2_800,
    },
}


@pytest.mark.parametrize(("layout", "seeds"), [("reference", 300), ("natural", 60)])
def test_scheduler_random_runs_reach_rare_events(layout: str, seeds: int) -> None:
    """Such runs are no empty ones: each bound is about half of what so many seeds give."""
    met: Counter[str] = Counter()
    for seed in range(how_many(seeds)):
        random = Random(seed)
        rig = Rig(RANDOM[layout](random))
        random_run(rig, random)
        met.update(rig.oracle.counts)
        met["evicted"] += rig.cache.block_pool.keys.evictions
        met["tokens checked"] += rig.worker.tokens_checked
        met["states checked"] += rig.worker.states_checked
    assert too_rare(met, RARE[layout]) == {}
