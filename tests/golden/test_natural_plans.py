"""Natural plans of public models in 40 GiB, and the bounds of the layout for each."""

import math
from itertools import groupby

import pytest

from hybridkv.models import read_model
from hybridkv.planner import KVCacheConfig, Plan, plan, plan_from_json, plan_to_json
from hybridkv.planner.plan import facts_of, padding_of
from hybridkv.units import GiB

SHORTER = {"llama-4-scout": 131_072}
"""Of ten million tokens that the config allows, 40 GiB hold less than one."""

# name, slab bytes, layers:k of each group, padding of the worst group in 1/100 % (rounded up), longest context,
# requests of that length, tokens if all were attention, states if all were states
GOLDEN = [
    ("bamba-9b", 62_289_920, "29:1 3:316", 27, 262_144, 12.75, 3_478_528, 688),
    ("deepseek-v3", 1_124_352, "61:1", 0, 163_840, 3.73, 611_168, None),
    ("falcon-h1-7b", 70_175_232, "44:97 44:1", 36, 262_144, 3.57, 948_272, 611),
    ("gemma-3-27b", 1_310_720, "10:1*5 2:5 10:1", 0, 131_072, 2.92, 524_272, None),
    ("gpt-oss-120b", 589_824, "18:1*2", 0, 131_072, 8.35, 1_165_056, None),
    ("jamba-1.5-mini", 8_718_336, "28:1 4:33", 79, 262_144, 9.87, 2_600_400, 4_925),
    ("lfm2-1.2b", 65_536, "8:1 2:4 2:1*3", 0, 128_000, 27.30, 3_495_248, 524_287),
    ("llama-3-70b", 5_242_880, "80:1", 0, 8_192, 15.99, 131_056, None),
    ("llama-3-8b", 2_097_152, "32:1", 0, 8_192, 39.99, 327_664, None),
    ("llama-4-scout", 786_432, "12:1*4", 0, 131_072, 4.84, 873_792, None),
    ("nemotron-3-nano-30b-a3b", 49_181_440, "23:1 6:499", 27, 262_144, 25.02, 6_962_048, 872),
    ("nemotron-3-super-120b-a12b", 42_633_216, "10:1*4 8:324", 40, 262_144, 17.16, 5_215_104, 251),
    ("nemotron-h-8b", 51_844_096, "24:1 4:197", 40, 8_192, 179.75, 2_606_704, 827),
    ("qwen2.5-7b", 917_504, "28:1", 0, 131_072, 5.71, 748_960, None),
    ("qwen3-next-80b-a3b", 39_714_816, "36:1 12:101", 50, 262_144, 6.57, 1_745_280, 1_080),
    ("qwen3.5-35b-a3b", 64_425_984, "30:1 10:196", 32, 262_144, 7.76, 2_085_440, 665),
    ("whisper-large-v3", 2_621_440, "32:1*2", 0, 448, 134.28, 262_128, None),
    ("nemotron-3-super-120b-a12b.fp8", 42_699_008, "10:1*4 8:649", 40, 262_144, 30.18, 10_425_536, 251),
]
NAMES = [row[0] for row in GOLDEN]


def natural(name: str, gibibytes: int = 40) -> Plan:
    model, _, dtype = name.partition(".fp8") if name.endswith(".fp8") else (name, "", None)
    narrow = "fp8" if dtype is not None else None
    return plan(read_model(model, dtype=narrow), gibibytes * GiB, max_model_len=SHORTER.get(name), layout="natural")


def groups_of(config: KVCacheConfig) -> str:
    assert config.slabs is not None
    said = [f"{len(g.layer_names)}:{config.slabs.class_of(i).blocks_per_slab}" for i, g in enumerate(config.groups)]
    runs = [(one, len(list(same))) for one, same in groupby(said)]
    return " ".join(one + (f"*{times}" if times > 1 else "") for one, times in runs)


@pytest.mark.parametrize("golden", GOLDEN, ids=NAMES)
def test_natural_plan_equals_the_golden_facts(golden: tuple[str, int, str, int, int, float, int, int | None]) -> None:
    name, slab_bytes, groups, padding, longest, requests, tokens, states = golden
    made = natural(name)
    facts = facts_of(made)
    assert (facts.unit_bytes, groups_of(made.config)) == (slab_bytes, groups)
    assert math.ceil(facts.padding * 10_000) == padding
    assert (facts.longest_context, math.floor(facts.concurrency * 100)) == (longest, round(requests * 100))
    assert (facts.attention_tokens, facts.states) == (tokens, states)
    assert facts.units == 40 * GiB // slab_bytes
    text = plan_to_json(made)
    assert plan_from_json(text) == made
    assert plan_to_json(plan_from_json(text)) == text


@pytest.mark.parametrize("gibibytes", [20, 40, 80, 640])
@pytest.mark.parametrize("name", NAMES)
def test_natural_plan_has_at_most_1_percent_padding_and_blocks_of_16(name: str, gibibytes: int) -> None:
    made = natural(name, gibibytes)
    config = made.config
    assert config.slabs is not None
    assert padding_of(config) <= 0.01
    assert {group.spec.block_size for group in config.groups} == {16}
    # slabs are small beside the pool, or the smallest that keep padding low
    assert config.slabs.num_slabs >= 600
    names = sorted(name for group in config.groups for name in group.layer_names)
    assert names == sorted(layer.name for layer in made.model.layers)


@pytest.mark.parametrize("name", NAMES)
def test_natural_plan_uses_99_percent_of_the_memory(name: str) -> None:
    facts, model = facts_of(natural(name)), natural(name).model
    # padding, the null slab and what is left over: 1 % beside a quantum of what is counted
    if facts.attention_tokens is not None:
        assert (facts.attention_tokens + 16) * model.kv_bytes_per_token >= 0.99 * 40 * GiB
    if facts.states is not None:
        assert (facts.states + 1) * model.state_bytes >= 0.99 * 40 * GiB


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "gpt-oss-120b", "llama-4-scout", "whisper-large-v3"])
def test_natural_plan_of_one_class_equals_the_reference_plan(name: str) -> None:
    ours = natural(name)
    reference = plan(read_model(name), 40 * GiB, max_model_len=SHORTER.get(name), layout="reference")
    assert ours.config.num_blocks == reference.config.num_blocks
    assert [len(g.layer_names) for g in ours.config.groups] == [len(g.layer_names) for g in reference.config.groups]
    assert [g.spec for g in ours.config.groups] == [g.spec for g in reference.config.groups]
    assert ours.capacity == reference.capacity
