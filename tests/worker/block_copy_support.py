"""What a Step does to blocks, said once more: one copy after the other, byte by byte of the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from copy_support import Bytes, content, fill
from hypothesis import strategies as st

from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import FullAttentionSpec, MambaSpec
from hybridkv.step import Cells, Copy, Csr, Step
from hybridkv.testing.configs import model_config, natural_model_config
from hybridkv.worker import BlockCopier, CopyKernels, PagedStorage

ATTENTION = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=3, dtype="bfloat16")
STATE = MambaSpec(block_size=4, shapes=((3, 2), (2, 3)), dtypes=("bfloat16", "float32"), cache_mode="align")

CONFIGS = {
    "one size": model_config(7, (ATTENTION, STATE), layers_per_group=2),
    "gaps": model_config(7, (STATE, ATTENTION, ATTENTION), layers_per_group=2, gap_bytes=4),
    "one class": natural_model_config(4, (ATTENTION, ATTENTION), (2, 2), layers_per_group=2),
    "classes": natural_model_config(4, (ATTENTION, STATE, ATTENTION), (2, 1, 3), layers_per_group=2),
}


@dataclass(frozen=True)
class StepCase:
    """What a Step says of blocks, under one of CONFIGS."""

    config: str
    copies: tuple[Copy, ...] = ()
    zero: tuple[tuple[int, int], ...] = ()
    seed: int = field(default=7, compare=False)


def step_of(case: StepCase) -> Step:
    none = np.empty(0, np.int32)
    return Step(
        id=3,
        after=2,
        rows=none,
        num_computed=none,
        num_scheduled=none,
        samples=np.empty(0, np.bool_),
        token_ids=Csr.empty(0),
        drafts=Csr.empty(0),
        cells=Cells.empty(),
        finished_rows=none,
        copies=case.copies,
        zero=np.array(case.zero, np.int32).reshape(-1, 2),
    )


def ids_of(config: KVCacheConfig, group: int) -> range:
    """Blocks that requests may have."""
    first = 1 if config.slabs is None else config.slabs.class_of(group).blocks_per_slab
    return range(first, config.blocks_of(group))


def spans(config: KVCacheConfig, group: int, block: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of everything that a block holds."""
    if config.slabs is not None:
        size = config.slabs.class_of(group).block_bytes
        return [(block * size, size)]
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    of = config.groups[group]
    return [
        (tensors[name].offset_bytes + block * tensors[name].block_stride_bytes, spec.content_bytes)
        for name, spec in zip(of.layer_names, of.layer_specs, strict=True)
    ]


def copy_one(arena: Bytes, config: KVCacheConfig, copy: Copy) -> None:
    for (source, size), (to, _) in zip(
        spans(config, copy.group, copy.source), spans(config, copy.group, copy.destination), strict=True
    ):
        held = arena[source : source + size].copy()
        arena[to : to + size] = held


def check_step(case: StepCase, kernels: CopyKernels, *, device: str = "cpu") -> None:
    """Both stages leave every byte as the plain order does: moves, zeroing, copies before; copies after."""
    config = CONFIGS[case.config]
    storage = PagedStorage(config, device=device)
    fill(storage, case.seed)
    copier, step, expected = BlockCopier(storage, kernels=kernels), step_of(case), content(storage)
    for copy in case.copies:
        if copy.kind == "move":
            copy_one(expected, config, copy)
    for group, block in case.zero:
        for first, size in spans(config, group, block):
            expected[first : first + size] = 0
    for copy in case.copies:
        if copy.kind != "move":
            copy_one(expected, config, copy)
    copier.execute_before(step)
    np.testing.assert_array_equal(content(storage), expected)


@st.composite
def step_cases(draw: st.DrawFn, *, most: int = 12) -> StepCase:
    """Few blocks, so that chains, cycles and blocks of several classes in one slab are common."""
    name = draw(st.sampled_from(list(CONFIGS)))
    config = CONFIGS[name]
    group = st.integers(0, len(config.groups) - 1)

    def copies(kinds: list[str]) -> list[Copy]:
        made = []
        for _ in range(draw(st.integers(0, most))):
            of = draw(group)
            block = st.sampled_from(ids_of(config, of))
            made.append(Copy("before", of, draw(block), draw(block), draw(st.sampled_from(kinds))))
        return made

    both = copies(["move"]) + copies(["block", "state"])
    cleared = [draw(group) for _ in range(draw(st.integers(0, 3)))]
    zero = tuple((of, draw(st.sampled_from(ids_of(config, of)))) for of in cleared)
    return StepCase(name, tuple(draw(st.permutations(both))), zero, draw(st.integers(0, 2**32 - 1)))
