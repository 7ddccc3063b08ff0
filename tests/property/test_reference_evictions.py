"""Ranked eviction in the reference layout: random runs read what was written, and equal calls decide alike."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from how_much import how_many
from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.spaces.ranked_order import RankedOrder
from hybridkv.errors import CacheError, ConfigError
from hybridkv.eviction import HAZARD
from hybridkv.testing.configs import chunk_spec, full_spec, model_config, state_spec, window_spec
from oracles import RigOptions, random_run
from oracles.random_models import random_options
from oracles.rankings import beside
from oracles.twins import Twins

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

PAIR = HAZARD, beside()
STATES = state_spec(4, mode="align")
MODELS = {
    "full": (full_spec(4),),
    "full and states": (full_spec(4), STATES),
    "full, window and states": (full_spec(2), window_spec(4, 9), state_spec(8, mode="align")),
    "windows": (window_spec(4, 8), window_spec(4, 13), full_spec(4)),
    "chunks and drafts": (chunk_spec(4, 6), full_spec(4), state_spec(4, mode="align", drafts=2)),
}


def options_of(random: Random, model: str) -> RigOptions:
    """Random options; without EAGLE, which ranked eviction rejects for states."""
    return replace(random_options(random, MODELS[model]), caching=True, eagle=model == "full" and random.random() < 0.2)


@pytest.mark.parametrize("model", MODELS)
def test_reference_eviction_random_runs_are_consistent(model: str) -> None:
    for seed in range(how_many(20)):
        random = Random(f"{model} {seed}")
        random_run(Twins(options_of(random, model), PAIR), random)


def test_reference_eviction_random_runs_hit_and_evict() -> None:
    hit = evicted = 0
    for seed in range(how_many(60)):
        random = Random(seed)
        twins = Twins(options_of(random, random.choice(["full", "full and states"])), PAIR)
        random_run(twins, random)
        hit, evicted = hit + twins.tokens_hit, evicted + twins.cache.block_pool.keys.evictions
    assert hit > 0
    assert evicted > 0


def runs(model: str, count: int = 10) -> None:
    for seed in range(count):
        random = Random(seed)
        random_run(Twins(options_of(random, model), PAIR), random)


def test_reference_eviction_unneeded_blocks_not_marked_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(space: RankedOrder, ids: object) -> None:
        """Mark no block."""

    monkeypatch.setattr(RankedOrder, "mark_unneeded", nothing)
    with pytest.raises(CacheError, match="is unneeded: False"):
        runs("full and states")


def test_ranked_eviction_of_states_with_eagle_is_rejected() -> None:
    config = model_config(12, (full_spec(4), STATES))
    with pytest.raises(ConfigError, match="use eviction lru, or leave use_eagle out"):
        KVCacheManager(config, 64, use_eagle=True, options=CacheOptions(eviction=HAZARD))
