"""Drafts in random runs, of all models and with EAGLE; every acceptance pattern over edges of blocks and states."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from small_models import DECODERS, ENCODER_DECODERS

from how_much import how_many, too_rare
from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Step
from hybridkv.testing.configs import full_spec, window_spec
from oracles import Rig, RigOptions, random_natural_options, random_options, random_run
from oracles.random_run import random_drafts

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

RANDOM = {"natural": random_natural_options, "reference": random_options}


class Drafting(Rig):
    """Drafts before every step, while it is drained, too. aborts: how often a row of a step is aborted behind it."""

    def __init__(self, options: RigOptions, random: Random, aborts: float) -> None:
        super().__init__(options)
        self.random = random
        self.aborts = aborts

    def schedule(self) -> Step:
        random_drafts(self, self.random)
        step = super().schedule()
        entries = self.oracle.in_flight[-1].entries
        if self.aborts and entries and self.random.random() < self.aborts:
            self.abort(self.random.choice(entries).request.request_id)
        return step


def unchanged(options: RigOptions) -> RigOptions:
    return options


def single_rank(options: RigOptions) -> RigOptions:
    """Which reads everything."""
    return replace(options, dcp=1, pcp=1)


def with_eagle(options: RigOptions) -> RigOptions:
    return replace(single_rank(options), eagle=True, caching=True)


class Runs(NamedTuple):
    """Random runs of ``models``, several of each. fixed: what is not random of their options. aborts: see Drafting."""

    models: Mapping[str, tuple[KVCacheSpec, ...]]
    fixed: Callable[[RigOptions], RigOptions]
    aborts: float


RUNS = {
    "drafts": Runs(DECODERS, unchanged, aborts=0.0),
    "encoder-decoders": Runs(ENCODER_DECODERS, single_rank, aborts=0.05),
    "eagle": Runs(
        # without groups that drop nothing for EAGLE
        {name: specs for name, specs in DECODERS.items() if name != "states"}
        | {f"{name} and cross": ENCODER_DECODERS[name] for name in ("full and window", "full and states")},
        with_eagle,
        aborts=0.05,
    ),
}
RARE: dict[str, dict[str, dict[str, int]]] = {
    "drafts": {
        "natural": {
            "drafted 0": 176,
            "drafted 2": 38,
            "accepted 0": 140,
            "accepted 2": 23,
            "cut drafts": 1,
            "kept late": 15,
            "late at ends": 3,
            "drafts given up": 1,
            "preempted": 3,
            "branched": 13,
            "late": 3,
            "failed": 11,
            "dead": 17,
            "moved": 128,
            "hit state": 78,
            "hit window": 33,
        },
        "reference": {
            "drafted 0": 73,
            "drafted 2": 17,
            "accepted 0": 58,
            "accepted 2": 6,
            "cut drafts": 2,
            "drafts given up": 3,
            "preempted": 3,
            "late": 1,
            "failed": 13,
            "dead": 15,
            "hit state": 14,
            "hit window": 5,
        },
    },
    "encoder-decoders": {
        "natural": {
            "drafted 0": 95,
            "drafted 2": 8,
            "accepted 0": 73,
            "accepted 2": 3,
            "accepted and hit": 8,
            "hit cross": 160,
            "hit full": 103,
            "hit state": 16,
            "hit window": 21,
            "cut drafts": 2,
            "branched": 14,
            "late": 14,
            "preempted": 9,
            "preempted with encoder": 1,
            "failed with drafts": 3,
            "failed with encoder": 6,
            "abort with drafts": 2,
            "abort with encoder": 5,
            "moved": 60,
        },
        "reference": {
            "drafted 0": 122,
            "drafted 2": 22,
            "accepted 0": 95,
            "accepted 2": 13,
            "cut drafts": 3,
            "drafts given up": 14,
            "late": 2,
            "preempted": 6,
            "failed with drafts": 3,
            "failed with encoder": 3,
            "abort with drafts": 3,
            "abort with encoder": 3,
        },
    },
    "eagle": {
        "natural": {
            "drafted 0": 217,
            "drafted 2": 28,
            "accepted 0": 175,
            "accepted 2": 13,
            "accepted and hit": 8,
            "hit full": 38,
            "hit window": 41,
            "hit state": 31,
            "hit cross": 45,
            "cut drafts": 5,
            "kept late": 21,
            "late at ends": 4,
            "drafts given up": 7,
            "branched": 15,
            "late": 3,
            "preempted": 4,
            "failed with drafts": 4,
            "abort with drafts": 5,
            "abort with encoder": 1,
            "moved": 176,
        },
        "reference": {
            "drafted 0": 100,
            "drafted 2": 14,
            "accepted 0": 77,
            "accepted 2": 3,
            "accepted and hit": 2,
            "hit full": 6,
            "hit window": 3,
            "hit state": 3,
            "drafts given up": 2,
            "late": 1,
            "preempted": 5,
            "failed with drafts": 2,
            "abort with drafts": 6,
        },
    },
}


@pytest.mark.parametrize("layout", RANDOM)
@pytest.mark.parametrize("kind", RUNS)
def test_draft_random_runs_match_the_oracle(kind: str, layout: str) -> None:
    """Together with all else that the scheduler does; the bounds are about half of what these seeds give."""
    met: Counter[str] = Counter()
    runs = RUNS[kind]
    for model, specs in runs.models.items():
        for seed in range(how_many(8)):
            random = Random(f"{kind} {model} {seed}")
            options = RANDOM[layout](random, specs).with_drafts(random.choice((2, 3)))
            rig = Drafting(runs.fixed(options), random, runs.aborts)
            random_run(rig, random)
            met.update(rig.oracle.counts)
            met["accepted and hit"] += bool(rig.oracle.counts["accepted 0"] and rig.oracle.counts["hit"])
    assert too_rare(met, RARE[kind][layout]) == {}


def draft_rig(layout: str, drafts: int, specs: tuple[KVCacheSpec, ...], **other: object) -> Rig:
    """With room to spare, and a state kept every five tokens."""
    options = RigOptions(
        num_blocks=120,
        specs=specs,
        max_model_len=64,
        limits=SchedulerLimits(max_batched_tokens=40),
        placement="interval:5",
        blocks_per_slab=tuple(2 for _ in specs) if layout == "natural" else (),
    )
    return Rig(replace(options.with_drafts(drafts), **other))  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize("layout", RANDOM)
def test_draft_in_flight_of_preempted_request_is_accepted(layout: str) -> None:
    """Those that are accepted come late, all at once, and the row starts anew behind them: random runs miss this."""
    met: Counter[str] = Counter()
    limits = SchedulerLimits(max_batched_tokens=40, max_in_flight=2, num_speculative_tokens=3)
    for num_blocks in range(9, 12) if layout == "natural" else range(17, 23):  # room for one of them, but not for both
        rig = draft_rig(layout, 3, (full_spec(2), window_spec(2, 5)), num_blocks=num_blocks, limits=limits)
        rig.add([0, 1, 2, 3], 12)
        rig.add([3, 2, 1, 0], 12)
        while len(rig.live_ids) == 2:
            rig.propose("r1", 3, 0)
            rig.schedule()
            rig.schedule()
            rig.update()
            rig.update()
        rig.drain()
        met.update(rig.oracle.counts)
    assert met["preempted with drafts"]
    assert met["late"]
