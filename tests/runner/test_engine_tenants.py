"""Tenants, salts and hints of a request pass through the engine to the cache."""

import pytest
from runner_support import loaded_model

from hybridkv.errors import ConfigError
from hybridkv.eviction import Share, TenantShares
from hybridkv.request import Hints, SamplingParams
from hybridkv.runner import Engine, EngineOptions

SHARES = TenantShares((Share("a", 0.3), Share("salty", 0.2)))
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def test_tenant_salt_and_hints_of_a_request_reach_the_cache() -> None:
    options = EngineOptions(eviction="hazard", shares=SHARES, self_check=False)
    prompt = list(range(3, 43))
    with Engine(loaded_model("llama"), memory="2MiB", max_model_len=256, options=options) as engine:
        engine.add(prompt, SHORT, tenant="a", hints=Hints(secret=True))
        engine.add(prompt, SHORT, cache_salt="salty")
        engine.generate([prompt], SHORT)
        list(engine.stream(prompt, SHORT, tenant="a", hints=Hints(over=True)))
        by_tenant = {one.tenant: one for one in engine.cache.statistics().tenants}
        assert {name: one.requests for name, one in by_tenant.items()} == {"*": 1, "a": 2, "salty": 1}
        assert (by_tenant["a"].hit_tokens, by_tenant["salty"].hit_tokens) == (39, 0)
        assert by_tenant["salty"].kept_bytes > 0
        with pytest.raises(ConfigError, match="tenant"):
            engine.add(prompt, SHORT, tenant="")


@pytest.mark.parametrize("wrong", [{"eviction": "lruu"}, {"eviction": 5}, {"shares": ["a=30%"]}])
def test_invalid_eviction_or_shares_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"eviction|shares must be"):
        EngineOptions(**wrong)  # type: ignore[arg-type]


def test_shares_with_lru_are_rejected() -> None:
    options = EngineOptions(eviction="lru", shares=SHARES)
    with pytest.raises(ConfigError, match="eviction lru evicts the blocks"):
        Engine(loaded_model("llama"), memory="2MiB", max_model_len=256, options=options)
