"""Every token that a step reads is the row's own: plans as the planner makes them, Steps alone, one bytearray."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from controls import caught

from how_much import how_many
from hybridkv.errors import ConfigError
from hybridkv.planner import KVCacheConfig
from hybridkv.planner.config import ALIGNMENT_BYTES, SlabClass
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Copy, Step
from hybridkv.testing import DigestModel, FakeWorker, attention_config, digest_model
from hybridkv.testing.configs import chunk_spec, full_spec, state_spec, window_spec
from hybridkv.testing.fake_worker import WorkerRow
from oracles import Rig, RigOptions, random_natural_options, random_options, random_run

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
def test_content_runs_without_a_fault_pass(options_of: OptionsOf, runs: int) -> None:
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

    def _write_state(self, row: WorkerRow, group: int, position: int, block: int) -> None:
        super()._write_state(row, group, position + 1, block)


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
def test_content_runs_detect_a_faulty_worker(kind: type[FakeWorker], options_of: OptionsOf, most: int) -> None:
    def make(random: Random) -> Rig:
        options = options_of(random)
        return Rig(options, worker=worker_of(options, kind))

    assert caught(make, most) <= most


def overlapping(config: KVCacheConfig) -> KVCacheConfig:
    """The second tensor begins inside the first."""
    first, second = config.tensors
    shifted = replace(second, offset_bytes=first.offset_bytes + first.block_stride_bytes)
    return replace(config, tensors=(first, shifted))


def narrower(config: KVCacheConfig) -> KVCacheConfig:
    """Layers of attention step by less than a block, so that one block's last layer lies in the next block."""
    return with_strides(config, lambda of: of.block_bytes - ALIGNMENT_BYTES)


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
    ("wrong", "options_of", "most"), [(overlapping, of_two_layers, EXAMPLES), (narrower, in_slabs_of_two_layers, MANY)]
)
def test_content_runs_detect_a_wrong_layout(
    wrong: Callable[[KVCacheConfig], KVCacheConfig], options_of: OptionsOf, most: int
) -> None:
    def make(random: Random) -> Rig:
        options = options_of(random)
        return Rig(options, worker=worker_of(options, FakeWorker, wrong(options.config)))

    assert caught(make, most) <= most


def test_content_page_too_small_for_a_digest_is_rejected() -> None:
    config = attention_config(4, (4,))
    group = config.groups[0]
    small = replace(config, groups=(replace(group, spec=replace(group.spec, dtype="float16")),))  # type: ignore[call-arg]  # it has a dtype
    with pytest.raises(ConfigError, match="has 4 bytes for a digest; give it 8 or more"):
        FakeWorker(small, DigestModel(group.layer_names))
