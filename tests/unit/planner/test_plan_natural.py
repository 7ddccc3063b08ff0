"""The natural layout: views that never meet, and capacity to the slab, on random layers."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache.placement import DEFAULT_PLACEMENT
from hybridkv.errors import CapacityError, ConfigError, SchemaError
from hybridkv.models import Layer, Model, read_model
from hybridkv.planner import KVCacheConfig, Plan, SlabClass, SlabLayout, plan, plan_from_json, plan_to_json
from hybridkv.planner.config import blocks_needed, reserved_blocks
from hybridkv.planner.natural import LayerKind, least_choice, natural_choices, natural_config, packings, worst_padding
from hybridkv.planner.plan import DEFAULT_PLACEMENTS, LAYOUTS, facts_of, padding_of
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RequestLimits,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from hybridkv.units import GiB

FULL = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="float16")
WIDE = replace(FULL, num_kv_heads=3)
WINDOW = SlidingWindowSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="float16", sliding_window=12)
CHUNK = ChunkedLocalAttentionSpec(block_size=8, num_kv_heads=2, head_size=9, dtype="float16", attention_chunk_size=16)
LATENT = MLAAttentionSpec(block_size=8, head_size=37, dtype="float16")
SINK = SinkFullAttentionSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="float16", sink_len=20)
STATE = MambaSpec(block_size=8, shapes=((1000,),), dtypes=("float32",))
ODD = MambaSpec(block_size=8, shapes=((3, 7), (1111,)), dtypes=("float16", "float32"))
APART = replace(FULL, block_stride_alignment=768)

layer_lists = st.lists(
    st.sampled_from([FULL, FULL, WIDE, WINDOW, WINDOW, CHUNK, LATENT, SINK, STATE, STATE, ODD]), min_size=1, max_size=14
)


def model_of(specs: list[KVCacheSpec]) -> Model:
    layers = tuple(Layer(f"l{i}", spec, i) for i, spec in enumerate(specs))
    return replace(read_model("llama-3-8b"), layers=layers, max_model_len=None)


def planned(
    specs: list[KVCacheSpec], memory: int | str = "1MiB", length: int = 20, kernel: int | None = None, dcp: int = 1
) -> Plan:
    model = model_of(specs)
    return plan(model, memory, max_model_len=length, layout="natural", kernel_block_size=kernel, dcp=dcp)


def pages(config: KVCacheConfig, group: int, block: int) -> Iterator[tuple[int, int, str]]:
    """Start, end and layer of every run of bytes that ``block`` has in its layers, from tensors and strides alone."""
    assert config.slabs is not None
    parts = config.slabs.kernel_blocks[group]
    tensors = {tensor.shared_by[0]: tensor for tensor in config.tensors}
    for name, spec in zip(config.groups[group].layer_names, config.groups[group].layer_specs, strict=True):
        tensor = tensors[name]
        for part in range(parts):
            step = tensor.block_stride_bytes // parts
            start = tensor.offset_bytes + block * tensor.block_stride_bytes + part * step
            yield start, start + ceil(spec.page_size_bytes / parts), name
            assert start + ceil(spec.page_size_bytes / parts) <= tensor.offset_bytes + tensor.size <= config.arena_bytes


@given(specs=layer_lists, kernel=st.sampled_from([None, 8, 4, 2, 1]))
def test_natural_views_are_disjoint_and_within_their_slab(specs: list[KVCacheSpec], kernel: int | None) -> None:
    config = planned(specs, kernel=kernel).config
    slabs = config.slabs
    assert slabs is not None
    assert slabs.arena_bytes == config.arena_bytes <= 2**20
    assert config.arena_bytes + slabs.slab_bytes > 2**20
    for one in slabs.classes:
        assert one.blocks_per_slab * one.block_bytes == slabs.slab_bytes
        # a slab belongs to one class, and each of its blocks to one group of it: the runs of one group must not meet
        for group in one.groups:
            assert config.blocks_of(group) == slabs.num_slabs * one.blocks_per_slab
            for slab in (0, 1, slabs.num_slabs - 1):
                blocks = range(slab * one.blocks_per_slab, (slab + 1) * one.blocks_per_slab)
                runs = sorted(run for block in blocks for run in pages(config, group, block))
                assert all(start % 256 == 0 for start, _, _ in runs)
                assert slab * slabs.slab_bytes <= runs[0][0]
                assert max(end for _, end, _ in runs) <= (slab + 1) * slabs.slab_bytes
                assert all(one[1] <= other[0] for one, other in pairwise(runs))
    # blocks of one class and different groups have the same bytes, so only ids keep them apart
    assert len({one.block_bytes for one in slabs.classes}) == len(slabs.classes)


@given(specs=layer_lists)
def test_natural_plan_groups_each_layer_by_its_kind(specs: list[KVCacheSpec]) -> None:
    made = planned(specs)
    names = [name for group in made.config.groups for name in group.layer_names]
    assert sorted(names) == sorted(layer.name for layer in made.model.layers)
    assert sorted(tensor.shared_by for tensor in made.config.tensors) == sorted((name,) for name in names)
    by_name = {layer.name: layer.spec for layer in made.model.layers}
    for group in made.config.groups:
        kept = (replace(s, cache_mode="none") if isinstance(s, MambaSpec) else s for s in group.layer_specs)
        assert list(kept) == [by_name[name] for name in group.layer_names]


@given(specs=layer_lists, memory=st.integers(2**17, 2**21), kernel=st.sampled_from([None, 4]))
def test_natural_plan_document_round_trips(specs: list[KVCacheSpec], memory: int, kernel: int | None) -> None:
    made = planned(specs, memory, 9, kernel=kernel) if fits(specs, memory) else None
    if made is not None:
        text = plan_to_json(made)
        assert plan_from_json(text) == made
        assert plan_to_json(plan_from_json(text)) == text


def test_natural_plan_keeps_the_placement() -> None:
    model = model_of([FULL, STATE, STATE])
    names = ("ends", "align", "align:64", "interval:8")
    by_name = {name: plan(model, "1MiB", max_model_len=20, layout="natural", placement=name) for name in names}
    assert [made.placement for made in by_name.values()] == list(names)
    assert len({made.config for made in by_name.values()}) == 1
    assert by_name["ends"] == planned([FULL, STATE, STATE])
    for name, made in by_name.items():
        text = plan_to_json(made)
        assert json.loads(text)["placement"] == name
        assert plan_from_json(text) == made
    none = plan(model, "1MiB", max_model_len=20, layout="natural", placement="none")
    assert (none.placement, none.states_kept) == ("none", None)
    assert none.config != by_name["ends"].config
    # without recurrent layers there is nothing to place
    plain = plan(model_of([FULL, WINDOW]), "1MiB", max_model_len=20, layout="natural", placement="interval:8")
    assert (plain.placement, plain) == (None, planned([FULL, WINDOW]))


def test_natural_plan_without_placement_uses_the_default() -> None:
    made = planned([FULL, STATE])
    document = json.loads(plan_to_json(made))
    del document["placement"]
    older = plan_from_json(json.dumps(document))
    assert (older.states_kept, older.placement, older.config) == (None, "ends", made.config)
    assert DEFAULT_PLACEMENT.name == DEFAULT_PLACEMENTS["natural"] == "ends"


@pytest.mark.parametrize(
    ("layout", "specs", "placement"),
    [("reference", [FULL, STATE], "align"), ("natural", [FULL, WINDOW], "ends"), ("natural", [FULL, STATE], "none")],
)
def test_placement_in_a_plan_without_states_is_rejected(layout: str, specs: list[KVCacheSpec], placement: str) -> None:
    made = plan(model_of(specs), "1MiB", max_model_len=20, layout=layout, placement=placement)
    document = json.loads(plan_to_json(made))
    assert "placement" not in document
    with pytest.raises(SchemaError, match="contradicts itself: placement 'interval:8' needs the layout"):
        plan_from_json(json.dumps({**document, "placement": "interval:8"}))


def fits(specs: list[KVCacheSpec], memory: int) -> bool:
    try:
        planned(specs, memory, 9, kernel=4)
        planned(specs, memory, 9)
    except CapacityError:
        return False
    return True


class Slabs:
    """A pool that hands out blocks one by one, and a slab whenever a class has none left."""

    def __init__(self, config: KVCacheConfig) -> None:
        assert config.slabs is not None
        self.slabs = config.slabs
        self.free = list(range(1, config.slabs.num_slabs))
        self.holes: dict[SlabClass, list[int]] = {one: [] for one in config.slabs.classes}
        self.taken: set[tuple[int, int]] = set()

    def take(self, blocks: tuple[int, ...]) -> bool:
        """``blocks[i]`` blocks of every group; False where one could not be had."""
        return all(self._one(self.slabs.class_of(group)) for group, count in enumerate(blocks) for _ in range(count))

    def _one(self, one: SlabClass) -> bool:
        if not self.holes[one]:
            if not self.free:
                return False
            slab = self.free.pop()
            self.holes[one] = [slab * one.blocks_per_slab + at for at in range(one.blocks_per_slab)]
        block = self.holes[one].pop()
        assert (one.blocks_per_slab, block) not in self.taken
        self.taken.add((one.blocks_per_slab, block))
        return True


@given(specs=layer_lists, memory=st.integers(2**17, 2**19), length=st.integers(1, 60), ranks=st.sampled_from([1, 2]))
def test_natural_plan_capacity_can_be_allocated_exactly(
    specs: list[KVCacheSpec], memory: int, length: int, ranks: int
) -> None:
    try:
        made = planned(specs, memory, length, dcp=ranks)
    except CapacityError:
        return
    config, holds = made.config, made.capacity
    sinks = reserved_blocks(config.groups, made.limits)

    def needs(tokens: int) -> tuple[int, ...]:
        return blocks_needed(config.groups, replace(made.limits, max_model_len=tokens))

    assert holds.longest_context == length
    if holds.tokens_that_fit is not None:
        for tokens, fit in ((holds.tokens_that_fit, True), (holds.tokens_that_fit + 1, False)):
            pool = Slabs(config)
            assert pool.take(sinks)
            assert pool.take(needs(tokens)) == fit
    pool, requests = Slabs(config), 0
    assert pool.take(sinks)
    while pool.take(needs(length)):
        requests += 1
    assert requests == int(holds.concurrency)
    facts = facts_of(made)
    keep_states = tuple(
        int(isinstance(group.spec.layer_spec(group.layer_names[0]), MambaSpec)) for group in config.groups
    )
    if any(keep_states):
        pool, states = Slabs(config), 0
        assert pool.take(sinks)
        while pool.take(keep_states):
            states += 1
        assert states == facts.states


def needed_bytes(message: str) -> int:
    found = re.search(r"needs .* \((\d+) bytes", message)
    assert found is not None
    return int(found[1])


@given(specs=layer_lists, length=st.integers(1, 60))
def test_natural_plan_memory_need_is_exact_to_the_byte(specs: list[KVCacheSpec], length: int) -> None:
    with pytest.raises(CapacityError) as raised:
        planned(specs, 1, length)
    needed = needed_bytes(str(raised.value))
    assert planned(specs, needed, length).capacity.longest_context == length
    with pytest.raises(CapacityError, match=f"{needed} bytes"):
        planned(specs, needed - 1, length)


def test_natural_plan_with_too_little_memory_names_what_fits() -> None:
    model = read_model("qwen3.5-35b-a3b")
    with pytest.raises(CapacityError) as raised:
        plan(model, GiB, layout="natural")
    message = str(raised.value)
    assert "2545 slabs of 2.06 MiB, one of them always empty" in message
    shorter = int(message.rsplit(" ", 1)[1])
    assert plan(model, GiB, max_model_len=shorter, layout="natural").capacity.longest_context == shorter
    assert plan(model, needed_bytes(message), layout="natural").capacity.longest_context == 262_144


def splits(layers: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to write ``layers`` as a sum, largest first."""
    if not layers:
        yield ()
    for first in range(min(layers, most or layers), 0, -1):
        for rest in splits(layers - first, first):
            yield (first, *rest)


@given(
    kinds=st.lists(
        st.builds(LayerKind, st.integers(1, 6), st.sampled_from([256, 512, 768, 1280, 7168])), min_size=2, max_size=2
    )
)
def test_natural_packing_has_the_least_cost(kinds: list[LayerKind]) -> None:
    found = next(packings(kinds, 1 << 30))
    target = Fraction(1, 100)
    if worst_padding(kinds, found) > target:
        return
    for kind, sizes, ks in zip(kinds, found.sizes, found.blocks_per_slab, strict=True):
        cost = sum(1 + (size if k > 1 else 0) for size, k in zip(sizes, ks, strict=True))
        for other in splits(kind.layers):
            fitting = [found.slab_bytes // (size * kind.layer_bytes) for size in other]
            if not all(fitting):
                continue
            worst = max(
                Fraction(found.slab_bytes, k * size * kind.page_bytes) - 1
                for size, k in zip(other, fitting, strict=True)
            )
            aligned = all(found.slab_bytes % (k * 256) == 0 for k in fitting)
            assert (
                worst > target
                or not aligned
                or cost <= sum(1 + (size if k > 1 else 0) for size, k in zip(other, fitting, strict=True))
            )


def test_natural_packings_match_hand_calculation() -> None:
    # Gemma-3-27B: pages of 128 KiB
    page = 128 * 1024
    best = next(packings([LayerKind(10, page), LayerKind(52, page)], 64 * 2**20))
    assert best.slab_bytes == 10 * page
    assert best.sizes == ((10,), (10, 10, 10, 10, 10, 2))
    assert best.blocks_per_slab == ((1,), (1, 1, 1, 1, 1, 5))
    # Qwen3.5: the slab is all states where that is small enough, else a fifth of them
    kinds = [LayerKind(30, 2_146_304), LayerKind(10, 32_768)]
    assert next(packings(kinds, 40 * GiB // 600)).sizes == ((30,), (10,))
    assert next(packings(kinds, 10 * GiB // 600)).sizes == ((6,) * 5, (10,))
    # nothing small enough is left: the smallest slab that pads at most 1 %
    tiny = next(packings(kinds, 1))
    assert worst_padding(kinds, tiny) <= Fraction(1, 100)
    assert tiny.slab_bytes < 3 * 2**20
    assert next(packings(kinds, 1)) == tiny


def test_natural_plan_of_few_slabs_prefers_padding_to_large_slabs() -> None:
    """Two states are 79,872 bytes and five pages 81,920, which pads 2.6 %. Without padding a slab has 638,976 bytes."""
    page = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype="float32")
    state = MambaSpec(block_size=32, shapes=((4992,),), dtypes=("float32",))
    layers = [("a", page), ("b", page), ("c", state), ("d", state)]
    limits = RequestLimits(1024, 256)
    few, many = (next(natural_choices(layers, memory, limits)).unit_bytes for memory in (3 << 20, 1 << 30))
    assert (few, many % 638_976) == (81_920, 0)


@given(
    layers=st.lists(st.sampled_from([FULL, WIDE, WINDOW, SINK, STATE, ODD, APART]), min_size=1, max_size=9),
    tokens=st.sampled_from([1, 40, 1000]),
    kernel=st.sampled_from([None, 4]),
    more=st.integers(-1000, 300_000),
)
def test_natural_choices_that_fit_are_those_of_all_packings(
    layers: list[KVCacheSpec], tokens: int, kernel: int | None, more: int
) -> None:
    named, limits = [(str(at), spec) for at, spec in enumerate(layers)], RequestLimits(tokens, tokens)
    every = list(natural_choices(named, 1 << 50, limits, kernel))
    least = least_choice(named, limits, kernel)
    assert least.needed_bytes == min(one.needed_bytes for one in every)
    memory = least.needed_bytes + more
    fitting = {one.unit_bytes for one in natural_choices(named, memory, limits, kernel) if one.needed_bytes <= memory}
    assert fitting == {one.unit_bytes for one in every if one.needed_bytes <= memory}


def test_natural_kernel_blocks_match_hand_calculation() -> None:
    # 8 tokens of 64 bytes are 512: a kernel block of 4 tokens has 256 of each of 3 layers
    made = planned([FULL, FULL, FULL], kernel=4)
    config = made.config
    assert config.slabs is not None
    assert config.slabs.kernel_blocks == (2,)
    assert [(t.offset_bytes, t.block_stride_bytes) for t in config.tensors] == [(0, 1536), (256, 1536), (512, 1536)]
    assert [run[:2] for run in pages(config, 0, 1)] == [
        *((1536, 1792), (2304, 2560)),
        *((1792, 2048), (2560, 2816)),
        *((2048, 2304), (2816, 3072)),
    ]
    with pytest.raises(ConfigError, match="not a multiple of kernel_block_size 3"):
        planned([FULL], kernel=3)
    with pytest.raises(ConfigError, match="has no meaning in the reference layout"):
        plan(model_of([FULL]), "1MiB", max_model_len=9, layout="reference", kernel_block_size=4)
    with pytest.raises(ConfigError, match="unknown layout 'other': use one of reference, natural"):
        plan(model_of([FULL]), "1MiB", max_model_len=9, layout="other")


def test_natural_layers_of_one_uniform_type_form_one_group() -> None:
    config = planned([FULL, WIDE, LATENT]).config
    assert [group.layer_names for group in config.groups] == [("l0", "l1", "l2")]
    assert [tensor.offset_bytes for tensor in config.tensors] == [0, 512, 2048]
    # 8 tokens of 74 bytes are 592, in 768
    assert padding_of(config) == Fraction(512 + 1536 + 768, 512 + 1536 + 592) - 1


def test_natural_plan_of_a_hybrid_matches_hand_calculation() -> None:
    # a token takes 64 bytes a layer, so a block of 2 layers 1024; a state of 4000 is aligned to 4096
    made = planned([FULL, FULL, STATE], 2**20, 100)
    holds, slabs = made.capacity, made.config.slabs
    assert slabs is not None
    assert [(one.block_bytes, one.blocks_per_slab) for one in slabs.classes] == [(1024, 4), (4096, 1)]
    assert [group.blocks_per_request for group in holds.groups] == [13, 2]
    assert [group.padding_bytes for group in holds.groups] == [0, 96]
    assert (holds.num_blocks, holds.block_bytes, holds.unused_bytes) == (256, 4096, 0)
    # 255 slabs: 2 for states, 4 blocks of 8 tokens in each of the others; r requests take 2 r + ceil(13 r / 4)
    assert holds.tokens_that_fit == 253 * 4 * 8
    assert int(holds.concurrency) == 48
    # 48 take 2 * 48 + 156 = 252 slabs, the 49th takes 6 more, and 3 are free
    assert holds.concurrency == 48.5
    assert padding_of(made.config) == Fraction(96, 4000)
    facts = facts_of(made)
    assert (facts.attention_tokens, facts.states) == (255 * 4 * 8, 255)
    # of a request of 100 tokens: 13 blocks, 4 in a slab that others fill up, or 4 slabs alone
    assert facts.short_request_bytes == 2 * 4096 + 13 * 1024
    assert facts.short_request_alone_bytes == (2 + 4) * 4096


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "gemma-3-27b", "llama-3-8b", "kimi-linear-48b-a3b"])
def test_natural_concurrency_times_request_bytes_fills_the_memory(name: str, layout: str) -> None:
    made = plan(read_model(name), "80GiB", layout=layout)
    facts = facts_of(made)
    taken = facts.short_requests * facts.short_request_bytes
    assert taken <= 80 * 2**30
    # less what is left over, the null unit and sinks, and a part of a slab of each group
    spare = facts.unused_bytes + (2 + facts.groups) * facts.unit_bytes
    assert taken >= 80 * 2**30 - spare - facts.short_request_bytes
    assert facts.short_request_alone_bytes >= facts.short_request_bytes


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_slabs": 0}, "num_slabs must be at least 1"),
        ({"slab_bytes": 1024 + 256}, "2 blocks of 512 bytes do not fill a slab of 1280"),
        ({"kernel_blocks": (1,)}, "exactly one class"),
        ({"classes": (SlabClass(512, 2, (0, 1)), SlabClass(1024, 1, (1,)))}, "exactly one class"),
        ({"kernel_blocks": (4, 1)}, "cannot be cut into 4 kernel blocks"),
        ({"kernel_blocks": (0, 1)}, "cannot be cut into 0 kernel blocks"),
    ],
)
def test_natural_slabs_with_invalid_values_are_rejected(wrong: dict[str, Any], said: str) -> None:
    sound = SlabLayout(1024, 9, (SlabClass(512, 2, (0,)), SlabClass(1024, 1, (1,))), (2, 1))
    with pytest.raises(ConfigError, match=said):
        replace(sound, **wrong)
    with pytest.raises(ConfigError, match="a class of slabs has no group"):
        SlabClass(512, 2, ())
    config = planned([FULL, STATE]).config
    with pytest.raises(ConfigError, match="there are 2 groups, but slabs for 1"):
        natural_config(config.groups, SlabLayout(1024, 9, (SlabClass(512, 2, (0,)),), (1,)))
    with pytest.raises(ConfigError, match="but a part has only 1024 bytes: enlarge block_bytes to 4096"):
        natural_config(config.groups, SlabLayout(1024, 9, (SlabClass(1024, 1, (0, 1)),), (1, 1)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["slabs"].update(num_slabs=3), "tensors do not follow"),
        (lambda c: c.update(num_blocks=3), "tensors do not follow"),
        (lambda c: c["tensors"][1].update(offset_bytes=0), "tensors do not follow"),
        (lambda c: c["slabs"]["classes"][0].update(blocks_per_slab=2), "do not fill a slab"),
        (lambda c: c["slabs"].update(kernel_blocks=[1, -1]), r"kernel_blocks\[1\]: Expected `int` >= 0"),
        (lambda c: c["slabs"].pop("classes"), "plan.config.slabs: Object missing required field `classes`"),
        (lambda c: c.pop("slabs"), "only the layout 'natural' has slabs"),
    ],
)
def test_natural_plan_document_with_contradiction_is_rejected(change: Callable[[Any], object], said: str) -> None:
    found = json.loads(plan_to_json(plan(read_model("qwen3.5-35b-a3b"), "40GiB", layout="natural")))
    change(found["config"])
    with pytest.raises(SchemaError, match=said):
        plan_from_json(json.dumps(found))
