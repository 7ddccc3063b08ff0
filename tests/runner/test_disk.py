"""Engines with a disk behind their host memory: a second process resumes what the first one computed."""

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from listening import sound
from runner_support import REPRESENTATIVE, generated, greedy, loaded_model

from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.request import Hints
from hybridkv.runner import TINY_ENCODER_DECODERS, Engine, EngineOptions, LoadedModel, Stored, plan_for
from hybridkv.stores import DiskFolder, StoreChoice, StoreUrl
from hybridkv.tiers import Prices
from warm import Warm

OUTPUT = 6
OPTIONS = EngineOptions(max_running=2, self_check=False)


@pytest.fixture(autouse=True)
def _fetches_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine measures a slow store and leaves it alone (tests/unit/tiers/test_prices.py)."""
    monkeypatch.setattr(Prices, "is_faster", lambda *_: True)
    monkeypatch.setattr(Prices, "may_look_up", lambda *_: True)


def chats(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(3, 200) for _ in range(21)]
    return [[*shared, *(draw.randrange(3, 200) for _ in range(draw.randint(25, 40)))] for _ in range(count)]


def small_plan(loaded: LoadedModel, prompts: list[list[int]], requests: int = 2) -> Plan:
    longest = max(map(len, prompts)) + 3 * OUTPUT
    return plan_for(loaded, [longest] * requests, stored=Stored(), max_model_len=longest + 1)


def served(
    loaded: LoadedModel, plan: Plan, prompts: list[list[int]], disk: StoreChoice
) -> tuple[list[list[int]], Engine]:
    """Return the outputs of an engine in a process of its own, as far as its cache goes, and the closed engine."""
    with Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=disk) as engine:
        made = [list(one.token_ids) for one in engine.generate(prompts, greedy(OUTPUT))]
        engine.scheduler.check()
    return made, engine


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_second_engine_resumes_what_the_first_one_left_on_the_disk(name: str, tmp_path: Path) -> None:
    loaded, prompts = loaded_model(name), chats(4, 1)
    # room for all: with less, what came up for one request is evicted for another one, now and then twice
    plan, disk = small_plan(loaded, prompts, len(prompts)), DiskFolder(tmp_path / "disk", "64MiB")
    made, first = served(loaded, plan, prompts, disk)
    assert made == [list(generated(loaded, prompt, OUTPUT)) for prompt in prompts]
    assert first.tier is not None
    spilled = first.tier.statistics()
    assert spilled.spills >= len(prompts)
    longer = [[*prompt, *output, 5, 6, 7] for prompt, output in zip(prompts, made, strict=True)]
    again, second = served(loaded, plan, longer, disk)
    assert again == [list(generated(loaded, prompt, OUTPUT)) for prompt in longer]
    assert second.tier is not None
    counts = second.tier.statistics()
    assert counts.fetches >= len(prompts)
    assert counts.fetches_lost == counts.spills_lost == 0
    # prompt and output come from the disk, but for the last token, which was never computed
    assert second.scheduler.prompt_tokens_found[1] == sum(len(one) for one in longer) - 4 * len(longer)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_engine_with_other_groups_resumes_the_same_prefixes(name: str, tmp_path: Path) -> None:
    """More memory deals the layers to other groups."""
    loaded, prompts = loaded_model(name), chats(2, 1)
    plan, disk = small_plan(loaded, prompts), DiskFolder(tmp_path / "disk", "64MiB")
    made, _ = served(loaded, plan, prompts, disk)
    longer = [[*prompt, *output, 5, 6, 7] for prompt, output in zip(prompts, made, strict=True)]
    larger = plan_for(loaded, [100], memory="64MiB", max_model_len=plan.max_model_len)
    layers, others = ({group.layer_names for group in one.config.groups} for one in (plan, larger))
    assert layers != others
    again, second = served(loaded, larger, longer, disk)
    assert again == [list(generated(loaded, prompt, OUTPUT)) for prompt in longer]
    assert second.scheduler.prompt_tokens_found[1] == sum(len(one) for one in longer) - 4 * len(longer)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1"])
def test_reference_layout_finds_on_the_disk_what_one_engine_finds_in_memory(name: str, tmp_path: Path) -> None:
    loaded, prompts = loaded_model(name), chats(4, 1)
    longest = max(map(len, prompts)) + 2 * OUTPUT + 3
    plan = plan_for(loaded, [longest] * len(prompts), max_model_len=longest + 1, layout="reference")
    options, found = replace(OPTIONS, eviction="hazard"), list[int]()
    longer = [[*one, *generated(loaded, one, OUTPUT), 5, 6, 7] for one in prompts]
    for store, rounds in ((DiskFolder(tmp_path / "disk", "64MiB"), [[prompts], [longer]]), (None, [[prompts, longer]])):
        for several in rounds:
            with Engine(loaded, plan, options, host_memory="32MiB", store=store) as engine:
                for many in several:
                    before = engine.scheduler.prompt_tokens_found[1]
                    made = [list(one.token_ids) for one in engine.generate(many, greedy(OUTPUT))]
                    assert made == [list(generated(loaded, prompt, OUTPUT)) for prompt in many]
                engine.scheduler.check()
        found.append(engine.scheduler.prompt_tokens_found[1] - before)
    assert found[0] == found[1] >= 16 * len(longer)
    with pytest.raises(ConfigError, match="another model"):  # in the natural layout, prefixes end inside blocks
        served(loaded, small_plan(loaded, prompts), prompts, DiskFolder(tmp_path / "disk", "64MiB"))


@pytest.mark.parametrize("name", TINY_ENCODER_DECODERS)
def test_second_engine_runs_no_encoder_for_inputs_in_the_store(name: str, tmp_path: Path) -> None:
    """Keys have the input and the salt. What the store has is not encoded again, whichever prompt asks for it."""
    loaded, (prompt, other) = loaded_model(name), chats(2, 7)
    asked = [(prompt, 0, None), (prompt, 1, None), (other, 1, None), (prompt, 1, "salt")]
    unknown = [(prompt, 2, None), (prompt, 0, "salt")]
    plan, disk = small_plan(loaded, [prompt, other]), DiskFolder(tmp_path / "disk", "64MiB")
    made, encoded = list[list[tuple[int, ...]]](), list[int]()
    for many, store in ((asked, disk), (asked, disk), (unknown, disk), (asked + unknown, None)):
        with Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=store) as engine:
            done = list[tuple[int, ...]]()
            for text, number, salt in many:
                engine.add(text, greedy(OUTPUT), encoder=sound(name, number), cache_salt=salt)
                while not engine.idle:
                    done += [one.token_ids for one in engine.step()]
                engine.settle_tiers()
            engine.scheduler.check()
            assert engine.runner.cross is not None
            encoded.append(engine.runner.cross.encoded)
        made.append(done)
    assert made[0] == made[1]
    assert made[0] + made[2] == made[3]
    assert encoded == [3, 0, 2, 5]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_engines_share_a_store_of_their_own_model_only(name: str, tmp_path: Path) -> None:
    """One engine fills the store while it runs; one of another model finds nothing there."""
    loaded, prompts = loaded_model(name), chats(4, 6)
    plan, shared = small_plan(loaded, prompts), StoreUrl(f"file://{tmp_path}?timeout_s=20")
    with Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=shared) as first:
        made = [list(one.token_ids) for one in first.generate(prompts, greedy(OUTPUT))]
        first.settle_tiers()
        other = loaded_model("gemma3")
        again, stranger = served(other, small_plan(other, prompts), prompts, shared)
        assert again == [list(generated(other, prompt, OUTPUT)) for prompt in prompts]
        assert stranger.tier is not None
        assert stranger.tier.statistics().fetches == 0
    again, second = served(loaded, plan, prompts, shared)
    assert again == made
    assert second.tier is not None
    assert second.tier.statistics().fetches >= len(prompts) // 2
    assert second.scheduler.prompt_tokens_found[1] > sum(map(len, prompts)) // 2  # a late look-up is a miss


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_prompts_that_stay_in_memory_are_in_host_memory_and_not_on_the_disk(name: str, tmp_path: Path) -> None:
    loaded, prompts = loaded_model(name), [one[21:] for one in chats(4, 5)]  # they share nothing
    plan, disk = small_plan(loaded, prompts), DiskFolder(tmp_path / "disk", "64MiB")
    with Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=disk) as engine:
        for prompt in prompts[:3]:
            list(engine.stream(prompt, greedy(OUTPUT), hints=Hints(in_memory=True)))
        list(engine.stream(prompts[3], greedy(OUTPUT)))
        engine.settle_tiers()
        assert engine.tier is not None
        counts = engine.tier.statistics()
    assert counts.stores >= 2 * counts.spills > 0
    made, second = served(loaded, plan, prompts, disk)
    assert made == [list(generated(loaded, prompt, OUTPUT)) for prompt in prompts]
    assert second.tier is not None
    assert second.tier.statistics().fetches == 1


def test_hits_count_for_the_memory_that_had_them(tmp_path: Path) -> None:
    loaded, prompts = loaded_model("llama"), [one[21:] for one in chats(4, 5)]  # they share nothing
    plan, disk = small_plan(loaded, prompts), DiskFolder(tmp_path / "disk", "64MiB")
    served(loaded, plan, prompts, disk)
    with Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=disk) as engine:
        assert engine.tier is not None
        hits = []
        for asked in (prompts, [one[21:] for one in chats(6, 9)], prompts):
            for prompt in asked:
                list(engine.stream(prompt, greedy(OUTPUT)))
            hits.append((engine.tier.statistics().hit_tokens, engine.tier.statistics().fetched_hit_tokens))
    fetched = sum(len(prompt) - 1 for prompt in prompts)
    assert hits[0] == hits[1] == (fetched, fetched)
    assert hits[2][1] == fetched < hits[2][0]  # the device had no room for all, the host had


def test_tokens_that_the_host_had_do_not_count_for_the_disk(tmp_path: Path) -> None:
    loaded, prompts = loaded_model("llama"), chats(1, 5)
    plan, disk = small_plan(loaded, prompts), DiskFolder(tmp_path / "disk", "64MiB")
    served(loaded, plan, prompts, disk)
    with Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=disk) as engine:
        assert engine.tier is not None
        list(engine.stream(prompts[0][:20], greedy(1)))
        engine.settle_tiers()
        before = engine.tier.statistics()
        engine.cache.evict_blocks(0, engine.cache.block_pool.cached().nonzero()[0].tolist())  # the host keeps them
        list(engine.stream(prompts[0], greedy(OUTPUT)))
        counts = engine.tier.statistics()
    assert counts.hit_tokens - before.hit_tokens == len(prompts[0]) - 1
    assert counts.fetched_hit_tokens - before.fetched_hit_tokens == len(prompts[0]) - 1 - 20


def test_engine_without_room_for_the_disk_computes_the_tokens(tmp_path: Path) -> None:
    """The disk holds fewer prefixes than are asked for; what it evicted is computed again."""
    loaded, prompts = loaded_model("llama"), chats(12, 2)
    plan, disk = small_plan(loaded, prompts), DiskFolder(tmp_path / "disk", "1MiB")
    served(loaded, plan, prompts, disk)
    again, _ = served(loaded, plan, prompts, disk)
    assert again == [list(generated(loaded, prompt, OUTPUT)) for prompt in prompts]


def test_reset_makes_the_disk_a_miss(tmp_path: Path) -> None:
    """After new weights, say: what the old ones computed must not come back."""
    loaded, prompts = loaded_model("llama"), chats(3, 3)
    plan, disk = small_plan(loaded, prompts), DiskFolder(tmp_path / "disk", "64MiB")
    with Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=disk) as engine:
        engine.generate(prompts, greedy(OUTPUT))
        assert engine.reset_prefix_cache()
        before = engine.scheduler.prompt_tokens_found[1]
        engine.generate(prompts[:1], greedy(1))
        assert engine.scheduler.prompt_tokens_found[1] == before
        assert engine.tier is not None
        assert engine.tier.statistics().fetches == 0


def test_other_weights_are_rejected(tmp_path: Path) -> None:
    loaded, prompts = loaded_model("llama"), chats(2, 4)
    plan, disk = small_plan(loaded, prompts), DiskFolder(tmp_path / "disk", "64MiB")
    served(loaded, plan, prompts, disk)
    weight = next(iter(loaded.model.parameters()))
    kept = weight.detach().clone()
    try:
        weight.data += 1
        with pytest.raises(ConfigError, match="another"):
            Engine(loaded, plan, OPTIONS, host_memory="32MiB", store=disk)
    finally:
        weight.data.copy_(kept)
    served(loaded, plan, prompts, disk)


def test_a_store_needs_host_memory(tmp_path: Path) -> None:
    loaded, prompts = loaded_model("llama"), chats(2, 4)
    with pytest.raises(ConfigError, match="host_memory"):
        Engine(loaded, small_plan(loaded, prompts), OPTIONS, store=DiskFolder(tmp_path / "disk", "64MiB"))


KILLED = """
import sys
sys.path[:0] = {path!r}
from test_disk import OPTIONS, chats, small_plan
from runner_support import greedy, loaded_model
from hybridkv.runner import Engine
from hybridkv.stores import DiskFolder

loaded, prompts = loaded_model({name!r}), chats(40, 5)
disk = DiskFolder({folder!r}, "64MiB")
engine = Engine(loaded, small_plan(loaded, prompts), OPTIONS, host_memory="32MiB", store=disk)
print("begins", flush=True)
for at in range(0, 40, 4):
    engine.generate(prompts[at : at + 4], greedy(6))
    print(at, flush=True)
"""


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_killed_engine_leaves_whole_prefixes(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    code = KILLED.format(path=sys.path, name=name, folder=str(folder))
    with Warm(["-c", code], stderr=2) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == "8":
                break
        time.sleep(random.Random(name).random() / 4)
        child.kill()
    loaded, prompts = loaded_model(name), chats(40, 5)
    asked = [*prompts[:4], *prompts[8:12]]
    again, engine = served(loaded, small_plan(loaded, prompts), asked, DiskFolder(folder, "64MiB"))
    assert again == [list(generated(loaded, prompt, OUTPUT)) for prompt in asked]
    assert engine.tier is not None
    assert engine.tier.statistics().fetches >= 4
