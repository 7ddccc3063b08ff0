"""Manager, scheduler and a worker against the naive oracle: everything is compared after every action."""

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis.stateful import initialize

from how_much import how_many, too_rare
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from oracles import Rig, RigOptions, random_options, random_run
from oracles.machines import CacheMachine
from oracles.strategies import rig_options

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

LONG = settings().max_examples > 100
HISTORIES = (8 if LONG else 2) * settings().max_examples
RUNS = (2 if LONG else 1) * settings().max_examples


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=HISTORIES, stateful_step_count=40)


class HybridMachine(CacheMachine):
    """Full attention, windows, chunks and states only: hits are frequent."""

    @initialize(options=rig_options(("full", "window", "state", "chunk")))
    def build(self, options: RigOptions) -> None:
        self.rig = Rig(options)


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=HISTORIES, stateful_step_count=40)


# -- seeded runs

MODELS = {
    "full and states": (full_spec(4), state_spec(4)),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8)),
    "windows": (window_spec(4, 8), window_spec(4, 13), full_spec(4)),
    "chunks and drafts": (chunk_spec(2, 8), full_spec(4), state_spec(4, drafts=2)),
}


@pytest.mark.parametrize("model", MODELS)
def test_random_runs(model: str) -> None:
    for seed in range(RUNS):
        random = Random(f"{model} {seed}")
        random_run(Rig(random_options(random, MODELS[model])), random)


def test_random_runs_meet_what_is_rare() -> None:
    """Such runs are no empty ones: each bound is about half of what 300 seeds give."""
    met: Counter[str] = Counter()
    for seed in range(how_many(300)):
        random = Random(seed)
        rig = Rig(random_options(random))
        random_run(rig, random)
        met.update(rig.oracle.counts)
        met["evicted"] += rig.cache.block_pool.evictions
        met["tokens checked"] += rig.worker.tokens_checked
        met["states checked"] += rig.worker.states_checked
    bounds = {
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
    }
    assert too_rare(met, bounds) == {}
