"""Tenants, salts and hints of a request pass through the engine to the cache."""

import random
from typing import Any

import pytest
from runner_support import generated, greedy, loaded_model

from hybridkv.errors import ConfigError
from hybridkv.eviction import EVERYBODY, Share, TenantShares
from hybridkv.request import NO_HINTS, Hints, Request, SamplingParams
from hybridkv.runner import Completion, Engine, EngineOptions, plan_for

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


_DRAW = random.Random(11)
TURN, *OTHERS = ([_DRAW.randrange(3, 200) for _ in range(tokens)] for tokens in (40, *[60] * 24))
"""The first turn of a session, and prompts that fill the device several times."""
RESULT = [7] * 10
"""The answer of a tool."""
ANSWER = 4


def asked(engine: Engine, prompt: list[int], **options: Any) -> Completion:  # noqa: ANN401 - of Engine.add
    """Its answer, which is that of plain generation."""
    engine.add(prompt, greedy(ANSWER), **options)
    done: list[Completion] = []
    while not done:
        done = engine.step()
    assert done[0].token_ids == generated(engine.loaded, prompt, ANSWER)
    return done[0]


def paused(kind: str, hints: Hints, others: Hints, shares: TenantShares = EVERYBODY) -> tuple[int, list[int]]:
    """Hit tokens after a pause for a tool in which others filled the device, then what is kept of the others."""
    loaded, options = loaded_model(kind), EngineOptions(shares=shares, self_check=False)
    plan = plan_for(loaded, [64] * 4, max_model_len=65)
    with Engine(loaded, plan, options) as engine:
        answer = asked(engine, TURN, hints=hints, tenant="a").token_ids
        went = [[*prompt, *asked(engine, prompt, hints=others, tenant="b").token_ids] for prompt in OTHERS]
        engine.scheduler.check()
        found = asked(engine, [*TURN, *answer, *RESULT], tenant="a").hit_tokens
        hasher = engine.cache.hasher
        return found, [engine.cache.find_hit(Request("asked", [*one, 7], hasher=hasher)).tokens for one in went]


KINDS = pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
END = len(TURN) + ANSWER - 1


@KINDS
def test_session_that_pauses_for_a_tool_resumes_at_its_end_if_its_hint_says_so(kind: str) -> None:
    hits = [paused(kind, hints, NO_HINTS)[0] for hints in (Hints(within_s=1000), NO_HINTS, Hints(over=True))]
    assert hits[0] == END
    assert max(hits[1:]) < END


@KINDS
def test_tenant_above_its_share_loses_its_own_paused_sessions(kind: str) -> None:
    """It promises to return within a day, with every prompt; the other tenant's session promises nothing."""
    day = Hints(within_s=86400)
    found, others = paused(kind, NO_HINTS, day, TenantShares((Share("a", 0.4), Share("b", 0.4))))
    assert found == END
    assert min(others) < len(OTHERS[0]) - 1 <= max(others)
    assert paused(kind, NO_HINTS, day)[0] < END
