"""Engines with host memory give the tokens of engines without, and compute less."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import count

import pytest
from listening import sound
from runner_support import REPRESENTATIVE, generated, greedy, loaded_model

from hybridkv.cache import CacheOptions
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.planner import Plan
from hybridkv.runner import TINY_ENCODER_DECODERS, Engine, EngineOptions, LoadedModel, Stored, plan_for
from hybridkv.runner.drafters import NgramDrafter
from hybridkv.tiers import HostTierStatistics

OUTPUT, ROUNDS = 6, 3


def chats(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(3, 200) for _ in range(21)]
    return [[*shared, *(draw.randrange(3, 200) for _ in range(draw.randint(25, 40)))] for _ in range(count)]


def small_plan(loaded: LoadedModel, prompts: Sequence[Sequence[int]], stored: Stored) -> Plan:
    """A plan for two of ``prompts`` at once."""
    longest = max(map(len, prompts)) + OUTPUT
    return plan_for(loaded, [longest, longest], stored=stored, max_model_len=longest + 1)


def outputs(
    loaded: LoadedModel, prompts: list[list[int]], host_memory: str | None, stored: Stored, in_flight: int = 1
) -> tuple[list[tuple[int, ...]], int, HostTierStatistics | None]:
    """Return all outputs of some rounds, the hit tokens, and the counts of the tier."""
    plan = small_plan(loaded, prompts, stored)
    made: list[tuple[int, ...]] = []
    chosen = EngineOptions(max_running=2, self_check=False, in_flight=in_flight)
    with Engine(loaded, plan, chosen, host_memory=host_memory) as engine:
        for _ in range(ROUNDS):
            made += [one.token_ids for one in engine.generate(prompts, greedy(OUTPUT))]
        engine.scheduler.check()
        tier = None if engine.tier is None else engine.tier.statistics()
        return made, engine.scheduler.prompt_tokens_found[1], tier


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the cache tick a second at each read, so that loads pay however busy the machine is."""
    ticks = partial(next, count(0.0, 1.0))
    monkeypatch.setattr("hybridkv.runner.engine.CacheOptions", partial(CacheOptions, clock=ticks))


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("in_flight", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_engine_with_host_memory_gives_the_same_tokens(name: str, in_flight: int) -> None:
    loaded, prompts = loaded_model(name), chats(20 if name == "mamba" else 6, 1)  # states alone need little memory
    alone, hits, _ = outputs(loaded, prompts, None, Stored(), in_flight=in_flight)
    made, more_hits, tier = outputs(loaded, prompts, "32MiB", Stored(), in_flight=in_flight)
    assert made == alone
    assert made[: len(prompts)] == [generated(loaded, prompt, OUTPUT) for prompt in prompts]
    assert tier is not None
    assert tier.loads > 0
    assert tier.lost == 0
    assert more_hits > hits


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v4", "qwen3_next", "falcon_h1"])
def test_reference_layout_with_host_memory_gives_the_same_tokens(name: str) -> None:
    loaded, prompts = loaded_model(name), chats(6, 1)
    longest = max(map(len, prompts)) + OUTPUT
    plan = plan_for(loaded, [longest, longest], max_model_len=longest + 1, layout="reference")
    chosen, found = EngineOptions(max_running=2, self_check=False, eviction="hazard"), list[int]()
    made = list[list[tuple[int, ...]]]()
    for host_memory in (None, "32MiB"):
        with Engine(loaded, plan, chosen, host_memory=host_memory) as engine:
            rounds = [engine.generate(prompts, greedy(OUTPUT)) for _ in range(ROUNDS)]
            engine.scheduler.check()
        made.append([one.token_ids for done in rounds for one in done])
        found.append(engine.scheduler.prompt_tokens_found[1])
    assert made[0] == made[1]
    assert engine.tier is not None
    assert engine.tier.statistics().loads > 0
    assert found[1] > found[0]


def test_recurrent_states_come_up_in_an_engine_with_drafts() -> None:
    loaded, prompts = loaded_model("qwen3_next"), chats(6, 1)
    longest = max(map(len, prompts)) + OUTPUT
    plan = plan_for(loaded, [longest, longest], max_model_len=longest + 1, num_speculative_tokens=2)
    chosen = EngineOptions(max_running=2, self_check=False)
    with Engine(loaded, plan, chosen, host_memory="32MiB", speculate=NgramDrafter(2)) as engine:
        for _ in range(ROUNDS):
            made = [one.token_ids for one in engine.generate(prompts, greedy(OUTPUT))]
            assert made == [generated(loaded, prompt, OUTPUT) for prompt in prompts]
    assert engine.tier is not None
    assert engine.tier.statistics().loads > 0


@pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)
def test_encoder_decoder_with_host_memory_gives_the_same_tokens_and_encodes_less(name: str) -> None:
    loaded, prompts = loaded_model(name), chats(24, 1)
    sounds = [sound(name, number % 12) for number in range(len(prompts))]
    plan, chosen = small_plan(loaded, prompts, Stored()), EngineOptions(max_running=2, self_check=False)
    made, encoded = list[list[tuple[int, ...]]](), list[int]()
    for host_memory in (None, "32MiB"):
        with Engine(loaded, plan, chosen, host_memory=host_memory) as engine:
            rounds = [engine.generate(prompts, greedy(OUTPUT), encoders=sounds) for _ in range(ROUNDS)]
            engine.scheduler.check()
            assert engine.runner.cross is not None
            encoded.append(engine.runner.cross.encoded)
        made.append([one.token_ids for done in rounds for one in done])
    assert made[0] == made[1]
    assert engine.tier is not None
    assert engine.tier.statistics().loads > 0
    assert encoded[1] < encoded[0]


def test_reset_forgets_prefixes_on_the_host_too() -> None:
    """After new weights, say: what the old ones computed must not come up."""
    loaded, prompts = loaded_model("llama"), chats(6, 3)
    plan = small_plan(loaded, prompts, Stored())
    with Engine(loaded, plan, EngineOptions(max_running=2, self_check=False), host_memory="32MiB") as engine:
        engine.generate(prompts, greedy(OUTPUT))
        engine.add(prompts[0], greedy(OUTPUT))
        engine.step()  # its prefix comes up
        engine.step()
        assert not engine.reset_prefix_cache()  # a request runs
        while not engine.idle:
            engine.step()
        assert engine.reset_prefix_cache()
        before = engine.scheduler.prompt_tokens_found[1]
        engine.generate(prompts[:1], greedy(1))
        assert engine.scheduler.prompt_tokens_found[1] == before
        engine.scheduler.check()


def test_quantized_pages_come_up_as_they_went_down() -> None:
    loaded, prompts, stored = loaded_model("gemma3"), chats(6, 2), Stored("int8_per_token_head")
    alone, _, _ = outputs(loaded, prompts, None, stored)
    made, _, tier = outputs(loaded, prompts, "32MiB", stored)
    assert made == alone
    assert tier is not None
    assert tier.loads > 0


def test_host_memory_that_cannot_work_is_rejected_by_name() -> None:
    llama = loaded_model("llama")
    with pytest.raises(CapacityError, match="too small for a tier"):
        Engine(llama, memory="1MiB", max_model_len=64, host_memory=1)
    with pytest.raises(ConfigError, match="a host tier needs prefix caching"):
        Engine(llama, memory="1MiB", max_model_len=64, host_memory="1MiB", options=EngineOptions(prefix_caching=False))
    whole = plan_for(llama, [64], layout="reference")
    with pytest.raises(ConfigError, match="eviction lru knows no resume points in the reference layout"):
        Engine(llama, whole, host_memory="1MiB")
    with Engine(llama, memory="1MiB", max_model_len=64) as engine:  # the model is free again
        assert engine.generate([[5, 6, 7]], greedy(2))[0].token_ids
