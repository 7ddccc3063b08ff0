"""Controls: what is wrong in moves, partial hits or strides of the natural layout must be seen."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from controls import caught

from how_much import how_many
from hybridkv.planner.config import ALIGNMENT_BYTES, KVCacheConfig, SlabClass
from hybridkv.specs import KVCacheSpec
from hybridkv.step import Copy, Step
from hybridkv.testing import FakeWorker, digest_model
from hybridkv.testing.configs import full_spec, state_spec, window_spec
from oracles import Rig, RigOptions, random_natural_options, random_run

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

EXAMPLES = 200
WITHOUT_FAULT = 4
HYBRID: tuple[KVCacheSpec, ...] = (full_spec(4), state_spec(4), window_spec(2, 5))


def some_options(random: Random) -> RigOptions:
    """Of a single rank, which reads everything, in few slabs: three classes, of which two have blocks that move."""
    options = random_natural_options(random, HYBRID)
    return replace(
        options,
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


def test_the_controls_without_their_fault_see_nothing() -> None:
    for seed in range(how_many(WITHOUT_FAULT)):
        random = Random(seed)
        options = some_options(random)
        random_run(Rig(options, worker=worker_of(options, FakeWorker)), random)


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


@pytest.mark.parametrize("kind", [SkipsAMove, MovesLate, SkipsBlockCopies])
def test_a_faulty_worker_is_caught(kind: type[FakeWorker]) -> None:
    def make(random: Random) -> Rig:
        options = some_options(random)
        return Rig(options, worker=worker_of(options, kind))

    assert caught(make, EXAMPLES) <= EXAMPLES


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


@pytest.mark.parametrize("wrong", [narrower, denser])
def test_a_wrong_layout_is_caught(wrong: Callable[[KVCacheConfig], KVCacheConfig]) -> None:
    def make(random: Random) -> Rig:
        options = replace(some_options(random), layers_per_group=2)
        return Rig(options, worker=worker_of(options, FakeWorker, wrong(options.config)))

    assert caught(make, EXAMPLES) <= EXAMPLES
