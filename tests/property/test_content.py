"""Every token that a step reads is the row's own: plans as the planner makes them, Steps alone, one bytearray."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from controls import caught
from hypothesis import given, settings
from hypothesis import strategies as st

from how_much import how_many
from hybridkv.cache.pool import Taken
from hybridkv.errors import ConfigError
from hybridkv.models import read_model
from hybridkv.planner import KVCacheConfig, plan
from hybridkv.planner.config import ALIGNMENT_BYTES, SlabClass
from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Copy, Step
from hybridkv.testing import DigestModel, FakeWorker, attention_config, digest_model
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from hybridkv.testing.fake_worker import WorkerRow
from oracles import Rig, RigOptions, random_natural_options, random_options, random_run
from oracles.random_models import PLACEMENTS
from oracles.strategies import limits, prompts

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 64,
    "vocab_size": 4,
    "dtype": "float32",
}
DEEPSEEK: dict[str, object] = {
    "model_type": "deepseek_v3",
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "q_lora_rank": 4,
    "max_position_embeddings": 64,
    "vocab_size": 4,
    "dtype": "bfloat16",
}


GEMMA: dict[str, object] = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
}
LFM: dict[str, object] = {
    **LLAMA,
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3,
}
WIDE_LFM: dict[str, object] = {
    **LFM,
    "hidden_size": 640,  # a state is ten blocks of attention
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
}
MAX_MODEL_LEN = 40


def planned(facts: dict[str, object], block_size: int, num_blocks: int) -> KVCacheConfig:
    """What the planner makes of a model for ``num_blocks`` blocks."""
    model = read_model(facts, block_size=block_size)
    large = plan(model, 2**20, max_model_len=MAX_MODEL_LEN).config
    return plan(model, num_blocks * (large.arena_bytes // large.num_blocks), max_model_len=MAX_MODEL_LEN).config


def rig_of(config: KVCacheConfig, bounds: SchedulerLimits, worker: FakeWorker | None = None) -> Rig:
    options = RigOptions(config.num_blocks, max_model_len=MAX_MODEL_LEN, limits=bounds)
    return Rig(options, config=config, worker=worker)


@settings(max_examples=(2 if settings().max_examples > 100 else 1) * settings().max_examples)
@given(
    st.sampled_from((LLAMA, DEEPSEEK, GEMMA, LFM)),
    st.sampled_from((4, 8)),
    st.integers(40, 60),
    limits(),
    st.lists(st.tuples(prompts(longest=33), st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_planned_models_read_what_they_wrote(
    facts: dict[str, object],
    block_size: int,
    num_blocks: int,
    bounds: SchedulerLimits,
    arrivals: list[tuple[list[int], int, int]],
) -> None:
    rig = rig_of(planned(facts, block_size, num_blocks), bounds)
    for prompt, max_tokens, steps in arrivals:
        rig.add(prompt, max_tokens)
        for _ in range(steps):
            if rig.num_in_flight == bounds.max_in_flight:
                rig.update()
            rig.schedule()
    rig.drain()
    assert rig.worker.tokens_checked > 0


def naturally_planned(facts: dict[str, object], slabs: int, kernel_block_size: int | None) -> KVCacheConfig:
    """What the planner makes of a model for ``slabs`` slabs."""
    model = read_model(facts, block_size=4)

    def made(memory: int) -> KVCacheConfig:
        return plan(
            model, memory, max_model_len=MAX_MODEL_LEN, layout="natural", kernel_block_size=kernel_block_size
        ).config

    large = made(2**18)
    assert large.slabs is not None
    return made(slabs * large.slabs.slab_bytes)


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    st.sampled_from(((LLAMA, 30), (GEMMA, 60), (WIDE_LFM, 12), (WIDE_LFM, 20))),
    st.sampled_from((None, 4, 2, 1)),
    st.sampled_from(PLACEMENTS),
    limits(),
    st.lists(
        st.tuples(
            prompts(longest=33),
            st.integers(1, 12),
            st.lists(st.integers(1, 30), max_size=1),
            st.integers(1, 2),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=10,
    ),
)
def test_natural_plans_read_what_they_wrote(
    model: tuple[dict[str, object], int],
    kernel_block_size: int | None,
    placement: str,
    bounds: SchedulerLimits,
    arrivals: list[tuple[list[int], int, list[int], int, int]],
) -> None:
    config = naturally_planned(*model, kernel_block_size)
    options = RigOptions(config.num_blocks, max_model_len=MAX_MODEL_LEN, limits=bounds, placement=placement)
    rig = Rig(options, config=config)
    for prompt, max_tokens, marks, n, steps in arrivals:
        rig.add(prompt, max_tokens, marks=marks, n=n)
        for _ in range(steps):
            if rig.num_in_flight == bounds.max_in_flight:
                rig.update()
            rig.schedule()
    rig.drain()
    assert rig.worker.tokens_checked > 0


# -- controls: the oracle must see what is wrong

EXAMPLES = 25
MANY = 200
"""Runs of models with windows and states, or of slabs, of which one at least must see a fault of theirs."""
HYBRID: tuple[KVCacheSpec, ...] = (full_spec(4), state_spec(4), window_spec(2, 5), chunk_spec(4, 8))
IN_SLABS: tuple[KVCacheSpec, ...] = (full_spec(4), state_spec(4), window_spec(2, 5))

OptionsOf = Callable[[Random], RigOptions]


def some_options(random: Random, specs: tuple[KVCacheSpec, ...] | None = None) -> RigOptions:
    """Of a single rank, which reads everything."""
    return replace(random_options(random, specs), dcp=1, pcp=1)


def of_two_layers(random: Random) -> RigOptions:
    return replace(some_options(random), layers_per_group=2)


def hybrid(random: Random) -> RigOptions:
    return some_options(random, HYBRID)


def in_slabs(random: Random) -> RigOptions:
    """Few slabs: three classes, of which two have blocks that move."""
    return replace(
        random_natural_options(random, IN_SLABS),
        dcp=1,
        pcp=1,
        num_blocks=random.randint(8, 14),
        blocks_per_slab=(random.choice((4, 5)), 1, random.choice((2, 3))),
        kernel_blocks=(),
        caching=True,
        placement=random.choice(("ends", "interval:3")),
    )


def worker_of(options: RigOptions, kind: type[FakeWorker], config: KVCacheConfig | None = None) -> FakeWorker:
    return kind(config or options.config, digest_model(options.config, options.vocabulary))


@pytest.mark.parametrize(("options_of", "runs"), [(some_options, EXAMPLES), (hybrid, EXAMPLES), (in_slabs, 4)])
def test_the_controls_without_their_fault_see_nothing(options_of: OptionsOf, runs: int) -> None:
    for seed in range(how_many(runs)):
        random = Random(seed)
        options = options_of(random)
        random_run(Rig(options, worker=worker_of(options, FakeWorker)), random)


class SkipsCells(FakeWorker):
    """Loses every 20th cell."""

    cells = 0

    def _set_cell(self, group: int, row: int, column: int, block: int) -> None:
        self.cells += 1
        if self.cells % 20:
            super()._set_cell(group, row, column, block)


class AliasesBlocks(FakeWorker):
    """Takes block 2 for block 1."""

    def _set_cell(self, group: int, row: int, column: int, block: int) -> None:
        super()._set_cell(group, row, column, 1 if block == 2 else block)


class LabelsOneMore(FakeWorker):
    """Writes the state of one token more than was run."""

    def _write_state(self, row: WorkerRow, group: int, label: int, block: int) -> None:
        super()._write_state(row, group, label + 1, block)


class SkipsCopies(FakeWorker):
    """Copies no state."""

    def _copy_block(self, group: int, source: int, destination: int) -> None:
        pass


class SkipsZeroing(FakeWorker):
    """Begins with the state that its block's former owner left."""

    def _clear(self, group: int, block: int) -> None:
        pass


class ReadsOneTokenMore(FakeWorker):
    """Reads one token before each window: blocks are dropped as soon as nobody reads them."""

    def __init__(self, config: KVCacheConfig, model: DigestModel) -> None:
        super().__init__(config, model)
        self._layers = tuple(replace(one, window=one.window + 1) if one.window else one for one in self._layers)


class SkipsAMove(FakeWorker):
    """Loses the first move of every step."""

    def _move(self, step: Step) -> None:
        moves = [copy for copy in step.copies if copy.kind == "move"]
        super()._move(replace(step, copies=tuple(moves[1:])))


class MovesLate(FakeWorker):
    """Moves blocks when the states that begin are zero already and what is hit is copied."""

    def _move(self, step: Step) -> None:
        pass

    def _copy(self, step: Step, stage: str) -> None:
        super()._copy(step, stage)
        if stage == "before":
            super()._move(step)


class SkipsBlockCopies(FakeWorker):
    """Begins with an empty block where a hit ends inside one."""

    def _copy_one(self, copy: Copy) -> None:
        if copy.kind != "block":
            super()._copy_one(copy)


@pytest.mark.parametrize(
    ("kind", "options_of", "most"),
    [
        *((kind, of_two_layers, EXAMPLES) for kind in (SkipsCells, AliasesBlocks)),
        *((kind, hybrid, MANY) for kind in (LabelsOneMore, SkipsCopies, SkipsZeroing, ReadsOneTokenMore)),
        *((kind, in_slabs, MANY) for kind in (SkipsAMove, MovesLate, SkipsBlockCopies)),
    ],
)
def test_a_faulty_worker_is_caught(kind: type[FakeWorker], options_of: OptionsOf, most: int) -> None:
    def make(random: Random) -> Rig:
        options = options_of(random)
        return Rig(options, worker=worker_of(options, kind))

    assert caught(make, most) <= most


def shorter(config: KVCacheConfig) -> KVCacheConfig:
    """Blocks begin before the end of the one before them."""
    tensors = (replace(tensor, block_stride_bytes=tensor.block_stride_bytes - 16) for tensor in config.tensors)
    return replace(config, tensors=tuple(tensors))


def overlapping(config: KVCacheConfig) -> KVCacheConfig:
    """The second tensor begins inside the first."""
    first, second = config.tensors
    shifted = replace(second, offset_bytes=first.offset_bytes + first.block_stride_bytes)
    return replace(config, tensors=(first, shifted))


def narrower(config: KVCacheConfig) -> KVCacheConfig:
    """Layers of attention step by less than a block, so that one block's last layer lies in the next block."""
    return with_strides(config, lambda of: of.block_bytes - ALIGNMENT_BYTES)


def denser(config: KVCacheConfig) -> KVCacheConfig:
    """Layers of attention step as if a slab held a block more."""
    return with_strides(config, lambda of: round_down(of.block_bytes * of.blocks_per_slab // (of.blocks_per_slab + 1)))


def round_down(size: int) -> int:
    return size // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def with_strides(config: KVCacheConfig, stride: Callable[[SlabClass], int]) -> KVCacheConfig:
    """Of classes with more than one block in a slab."""
    assert config.slabs is not None
    strides = {
        name: stride(of)
        for of in config.slabs.classes
        for group in of.groups
        for name in config.groups[group].layer_names
        if of.blocks_per_slab > 1
    }
    tensors = [
        replace(tensor, block_stride_bytes=strides.get(tensor.shared_by[0], tensor.block_stride_bytes))
        for tensor in config.tensors
    ]
    return replace(config, tensors=tuple(tensors))


def in_slabs_of_two_layers(random: Random) -> RigOptions:
    return replace(in_slabs(random), layers_per_group=2)


@pytest.mark.parametrize(
    ("wrong", "options_of", "most"),
    [
        (shorter, some_options, EXAMPLES),
        (overlapping, of_two_layers, EXAMPLES),
        (narrower, in_slabs_of_two_layers, MANY),
        (denser, in_slabs_of_two_layers, MANY),
    ],
)
def test_a_wrong_layout_is_caught(
    wrong: Callable[[KVCacheConfig], KVCacheConfig], options_of: OptionsOf, most: int
) -> None:
    def make(random: Random) -> Rig:
        options = options_of(random)
        return Rig(options, worker=worker_of(options, FakeWorker, wrong(options.config)))

    assert caught(make, most) <= most


def test_a_block_that_two_rows_hold_is_caught() -> None:
    """The manager's own fault: its pool hands a block out a second time."""

    def make(random: Random) -> Rig:
        rig = Rig(replace(some_options(random, (full_spec(4),)), num_blocks=20, caching=False))
        pool = rig.cache.block_pool
        take, take_one, last = pool.take, pool.take_one, [1]

        def one_twice(group: int) -> int:
            block = take_one(group)
            if block and pool.ref_count(last[0]) and random.random() < 0.2:
                return last[0]
            last[0] = block or last[0]
            return block

        def twice(n: int, group: int = 0) -> object:
            ids, moves, held = take(n, group)
            if n and pool.ref_count(last[0]) and random.random() < 0.2:
                ids[0] = last[0]
            last[0] = int(ids[-1]) if n else last[0]
            return Taken(ids, moves, held)

        pool.take, pool.take_one = twice, one_twice  # type: ignore[method-assign,assignment]  # broken on purpose
        rig.check = lambda: None  # type: ignore[method-assign]  # only the content is asked
        rig._compare_step = lambda *_: None  # type: ignore[method-assign]  # same
        rig._check_content = lambda: None  # type: ignore[method-assign]  # same
        return rig

    assert caught(make, EXAMPLES) <= EXAMPLES


def test_pages_must_hold_a_digest() -> None:
    config = attention_config(4, (4,))
    group = config.groups[0]
    small = replace(config, groups=(replace(group, spec=replace(group.spec, dtype="float16")),))  # type: ignore[call-arg]  # it has a dtype
    with pytest.raises(ConfigError, match="4 bytes a token hold no digest"):
        FakeWorker(small, DigestModel(group.layer_names))
