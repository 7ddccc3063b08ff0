"""Evictions: the names they go by, and where they can be asked for."""

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.cache.placement import DEFAULT_EVICTION, EVICTIONS, LRU, eviction_named
from hybridkv.errors import ConfigError
from hybridkv.testing import attention_config


def test_names_are_read() -> None:
    assert [eviction_named(name).name for name in EVICTIONS] == list(EVICTIONS)
    assert DEFAULT_EVICTION == eviction_named(EVICTIONS[0]) == LRU


@pytest.mark.parametrize(("name", "hint"), [("LRU", " (did you mean lru?)"), ("", ""), ("belady", "")])
def test_an_unknown_name_says_which_there_are(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        eviction_named(name)
    assert str(caught.value) == f"unknown eviction '{name}': use {', '.join(EVICTIONS)}{hint}"


def test_what_is_no_eviction_is_refused() -> None:
    with pytest.raises(ConfigError, match="eviction must be"):
        KVCacheManager(attention_config(8), 100, eviction="lru")  # type: ignore[arg-type]
