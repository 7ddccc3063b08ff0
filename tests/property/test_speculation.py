"""Drafts: every acceptance pattern over edges of blocks and states, random runs full of them, and controls."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import settings

from hybridkv.cache.block_rows import BlockRows
from hybridkv.cache.checkpoints import Checkpoints
from hybridkv.cache.committer import Committer
from hybridkv.cache.group import CacheGroup
from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.testing import (
    ContentError,
    OracleError,
    Rig,
    RigOptions,
    random_natural_options,
    random_options,
    random_run,
)
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec

pytestmark = pytest.mark.usefixtures("quiet")

LAYOUTS = ("natural", "reference")


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


def run_with(rig: Rig, name: str, right: int, wrong: int) -> None:
    """``name`` to its end, with the same drafts in every step."""
    while name in rig.live_ids:
        rig.propose(name, right, wrong)
        rig.schedule()
        rig.update()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafts", [1, 2, 3, 8])
def test_every_acceptance_pattern_at_every_place(layout: str, drafts: int) -> None:
    """Each step, cell, state and cached block is foretold, and what is read and cached is compared in bytes."""
    for right in range(drafts + 1):
        for length in range(5, 5 + 12 // (right + 1) + 1):  # from there on the steps begin at the same places again
            rig = draft_rig(layout, drafts, (full_spec(4), state_spec(12), window_spec(2, 5)))
            name = rig.add([1] * (length - 1) + [2], 26, marks=(12, 17, 18, 19))
            assert name is not None
            run_with(rig, name, right, drafts - right)
            accepted = [rig.oracle.counts[f"accepted {place}"] for place in range(drafts)]
            assert all(accepted[:right]) and not any(accepted[right:])
            again = rig.add([*rig.requests[name][1].tokens, 0], 3)
            rig.drain()
            assert again is not None
            hit = rig.requests[again][0].first_hit_tokens
            assert hit is not None and hit >= (24 if layout == "reference" else 25 + length - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_stop_token_among_accepted_drafts(layout: str, stop: int) -> None:
    """Whatever token it is, and wherever among the drafts it comes."""
    cut = 0
    for length in range(2, 14):
        rig = draft_rig(layout, 3, (full_spec(4), state_spec(5)))
        name = rig.add([length % 4, *[3] * (length - 1)], 20, stop_token_ids=(stop,))
        assert name is not None
        run_with(rig, name, 3, 0)
        cut += rig.oracle.counts["cut drafts"]
        rig.add([*rig.requests[name][1].tokens, 1], 4)
        rig.drain()
    assert cut


# -- seeded runs

MODELS: dict[str, tuple[KVCacheSpec, ...]] = {
    "attention": (full_spec(2), window_spec(4, 9), chunk_spec(4, 6)),
    "full and states": (full_spec(4), state_spec(4)),
    "states": (state_spec(8), state_spec(4)),
    "window and scratch": (window_spec(2, 5), state_spec(4, mode="none")),
}
RANDOM = {"natural": random_natural_options, "reference": random_options}
RARE = {
    "natural": {},
    "reference": {},
}


def drafting(layout: str, random: Random, specs: tuple[KVCacheSpec, ...]) -> RigOptions:
    return RANDOM[layout](random, specs).with_drafts(random.choice((1, 2, 3)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_runs(layout: str) -> None:
    """Together with all else that the scheduler does; the bounds are about half of what these seeds give."""
    met: Counter[str] = Counter()
    for model, specs in MODELS.items():
        for seed in range(settings().max_examples // 5):
            random = Random(f"{model} {seed}")
            rig = Rig(drafting(layout, random, specs))
            random_run(rig, random)
            met.update(rig.oracle.counts)
    print(met)
    assert {name: met[name] for name, least in RARE[layout].items() if met[name] < least} == {}
