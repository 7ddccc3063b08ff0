"""Evictions: the names they go by, and where they can be asked for."""

import pytest

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.eviction import DEFAULT_EVICTIONS, EVICTIONS, HAZARD, LRU, Eviction, eviction_named, eviction_of
from hybridkv.models import read_model
from hybridkv.planner import plan
from hybridkv.testing import attention_config
from hybridkv.testing.configs import full_spec, natural_model_config, state_spec


def test_eviction_name_is_parsed() -> None:
    assert [eviction_named(name).name for name in EVICTIONS] == list(EVICTIONS)
    assert (eviction_named("lru"), eviction_named("hazard")) == (LRU, HAZARD)


def test_eviction_default_is_hazard_in_natural_and_lru_in_reference() -> None:
    assert DEFAULT_EVICTIONS == {"natural": HAZARD, "reference": LRU}


@pytest.mark.parametrize(("layout", "found"), DEFAULT_EVICTIONS.items())
@pytest.mark.parametrize("model", ["qwen3.5-35b-a3b", "gemma-3-27b", "llama-3-70b"])
def test_eviction_of_a_plan_yields_to_the_option(model: str, layout: str, found: Eviction) -> None:
    made = plan(read_model(model), "1GiB", max_model_len=1000, layout=layout)
    assert eviction_of(made) == KVCacheManager(made).eviction == found
    assert eviction_of(made, "lru") == LRU
    assert KVCacheManager(made, options=CacheOptions(eviction=LRU)).eviction == LRU
    with pytest.raises(ConfigError, match="unknown eviction"):
        eviction_of(made, "belady")


def test_eviction_of_a_config_without_plan_is_lru() -> None:
    config = natural_model_config(8, (full_spec(4), state_spec(4)), (4, 1))
    assert KVCacheManager(config, 100).eviction == LRU


@pytest.mark.parametrize(("name", "hint"), [("LRU", " (did you mean lru?)"), ("", ""), ("belady", "")])
def test_eviction_with_unknown_name_lists_known_names(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        eviction_named(name)
    assert str(caught.value) == f"unknown eviction '{name}': use {', '.join(EVICTIONS)}{hint}"


def test_eviction_option_of_wrong_type_is_rejected() -> None:
    with pytest.raises(ConfigError, match="eviction must be"):
        KVCacheManager(attention_config(8), 100, options=CacheOptions(eviction="lru"))  # type: ignore[arg-type]
