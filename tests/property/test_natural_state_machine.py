"""The natural layout against its naive oracle: everything is compared after every action."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from how_much import how_many, too_rare
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from oracles import Rig, RigOptions, random_natural_options, random_run
from oracles.machines import NaturalMachine
from oracles.strategies import natural_rig_options

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

TestNaturalMachine = NaturalMachine.TestCase
TestNaturalMachine.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)


class HybridMachine(NaturalMachine):
    """Full attention, windows, chunks and states only: hits are frequent."""

    @initialize(options=natural_rig_options(("full", "window", "state", "chunk")))
    def build(self, options: RigOptions) -> None:
        self.rig = Rig(options)


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)


# -- seeded runs

MODELS = {
    "full and states": (full_spec(4), state_spec(4)),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8)),
    "windows": (window_spec(4, 8), window_spec(4, 13), full_spec(4)),
    "chunks and drafts": (chunk_spec(4, 6), full_spec(4), state_spec(4, drafts=2)),
    "states alone": (state_spec(4), state_spec(4)),
}


@pytest.mark.parametrize("model", MODELS)
def test_random_runs(model: str) -> None:
    for seed in range(how_many(6)):
        random = Random(f"{model} {seed}")
        random_run(Rig(random_natural_options(random, MODELS[model])), random)


RARE = {
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
}


def test_random_runs_meet_what_is_rare() -> None:
    """Such runs are no empty ones: each bound is about half of what 60 seeds give."""
    met: Counter[str] = Counter()
    for seed in range(how_many(60)):
        random = Random(seed)
        rig = Rig(random_natural_options(random))
        random_run(rig, random)
        met.update(rig.oracle.counts)
        met["evicted"] += rig.cache.block_pool.evictions
        met["tokens checked"] += rig.worker.tokens_checked
        met["states checked"] += rig.worker.states_checked
    assert too_rare(met, RARE) == {}
