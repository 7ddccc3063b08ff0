"""Bytes and concurrency of over 100 layer specs, equal to those of vLLM 0.33's own functions.

``tests/vllm/spec_table.py`` wrote the table: it describes a case, and runs vLLM. Nothing of vLLM is needed here.
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from hybridkv import specs as classes
from hybridkv.planner.config import ALIGNMENT_BYTES, NamedSpec, blocks_needed
from hybridkv.planner.natural import least_choice, natural_choices
from hybridkv.planner.reference import group_layers, reference_choice
from hybridkv.spec_fields import KernelBlocks, Quantization
from hybridkv.specs import AttentionSpec, KVCacheSpec, RequestLimits, UniformTypeKVCacheSpecs
from hybridkv.units import round_up

TABLE = json.loads(Path(__file__).with_name("vllm_specs.json").read_text("utf-8"))
MEMORY = TABLE["memory_bytes"]
CASES = {case["name"]: case for case in TABLE["cases"]}


def value(given: Any) -> Any:  # noqa: ANN401 - a field of any type
    match given:
        case ["fraction", above, below]:
            return Fraction(above, below)
        case ["kernel_blocks", tokens]:
            return KernelBlocks(tokens)
        case _:
            return given


def ours(kind: str, fields: dict[str, Any]) -> KVCacheSpec:
    named = {"mode": "cache_mode"}
    made: KVCacheSpec = getattr(classes, kind)(**{named.get(name, name): value(one) for name, one in fields.items()})
    return made


def limits_of(case: dict[str, Any]) -> RequestLimits:
    given = {name: one for name, one in case["limits"].items() if name != "tp"}
    drafts = max(fields.get("num_speculative_blocks", 0) for _, _, fields in case["parts"])
    return RequestLimits(**given, num_speculative_tokens=drafts)


def layers_of(case: dict[str, Any]) -> list[NamedSpec]:
    return [
        (f"{at}.{layer}", ours(kind, fields))
        for at, (layers, kind, fields) in enumerate(case["parts"])
        for layer in range(layers)
    ]


@pytest.mark.parametrize("name", CASES)
def test_spec_bytes_equal_those_of_vllm(name: str) -> None:
    case = CASES[name]
    limits = limits_of(case)
    for (_, kind, fields), wanted in zip(case["parts"], case["specs"], strict=True):
        spec = ours(kind, fields)
        found = {
            "page_bytes": spec.page_size_bytes,
            "states": spec.num_states if isinstance(spec, AttentionSpec) else 1,
            "stride_multiple": spec.stride_multiple,
            "request_bytes": spec.max_memory_usage_bytes(limits),
            "row_blocks": spec.max_row_blocks(limits),
            "is_cached": spec.is_cached,
        }
        assert found == wanted


@pytest.mark.parametrize("name", CASES)
def test_reference_layout_has_the_blocks_and_concurrency_of_vllm(name: str) -> None:
    case = CASES[name]
    limits, layers = limits_of(case), layers_of(case)
    assert sorted(len(group.layer_names) for group in group_layers(layers).groups) == case["group_layers"]
    choice = reference_choice(layers, limits)
    assert choice.unit_bytes == case["block_bytes"]
    config = choice.config(MEMORY // choice.unit_bytes)
    assert (config.num_blocks, config.unit_bytes) == (case["num_blocks"], case["block_bytes"])
    assert config.arena_bytes <= MEMORY
    each = sum(blocks_needed(config.groups, limits))
    # vLLM divides all blocks, the null block included
    assert config.num_blocks / each == pytest.approx(case["concurrency"], rel=1e-12)
    whole = UniformTypeKVCacheSpecs(block_size=layers[0][1].block_size, layers=tuple(layers[:2]))
    if len(case["parts"]) == 1:
        assert whole.tp_replicas(case["limits"]["tp"], limits) == case["tp_replicas"]


@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name]["parts"]) == 1])
def test_natural_layout_of_one_spec_adds_only_aligned_starts(name: str) -> None:
    """Each page starts at a multiple of 256 bytes, and blocks keep the spec's own alignment."""
    case = CASES[name]
    limits = limits_of(case)
    choice = least_choice(layers_of(case), limits)
    page, multiple = case["specs"][0]["page_bytes"], case["specs"][0]["stride_multiple"]
    wanted = 2 * round_up(page, ALIGNMENT_BYTES)
    while wanted % multiple:
        wanted += ALIGNMENT_BYTES
    assert choice.unit_bytes == wanted
    config = choice.config(MEMORY // choice.unit_bytes)
    assert config.num_blocks == MEMORY // wanted
    (blocks,) = blocks_needed(config.groups, limits)
    assert blocks * page == case["specs"][0]["request_bytes"]


@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name]["parts"]) > 1])
def test_natural_layout_of_compressed_caches_keeps_each_page(name: str) -> None:
    """A request needs as many blocks of each spec as in vLLM, in pages of that spec's own bytes."""
    case = CASES[name]
    limits, layers = limits_of(case), dict(layers_of(case))
    choice = next(natural_choices(list(layers.items()), MEMORY, limits), least_choice(list(layers.items()), limits))
    config = choice.config(MEMORY // choice.unit_bytes)
    at = {layer: number for number, group in enumerate(config.groups) for layer in group.layer_names}
    needed = blocks_needed(config.groups, limits)
    for part, wanted in enumerate(case["specs"]):
        group = config.groups[at[f"{part}.0"]]
        assert group.spec.layer_spec(f"{part}.0").page_size_bytes == wanted["page_bytes"]
        assert needed[at[f"{part}.0"]] * wanted["page_bytes"] == wanted["request_bytes"]
        assert config.block_bytes_of(at[f"{part}.0"]) % wanted["stride_multiple"] == 0


def test_table_covers_every_field_and_at_least_sixty_specs() -> None:
    parts = [(kind, fields) for case in CASES.values() for _, kind, fields in case["parts"]]
    assert len({json.dumps(part, sort_keys=True) for part in parts}) >= 60
    fields = {name for _, given in parts for name in given}
    wanted = {"tokens_per_state", "cache_role", "is_index_group_leader", "extra_retained_tokens", "dcp_sharded"}
    wanted |= {"max_tp_shards", "alignment", "block_stride_alignment", "state_content_bytes", "num_head_slots"}
    wanted |= {"quantization"}
    assert {given["quantization"] for _, given in parts if "quantization" in given} == set(Quantization)
    assert wanted <= fields
