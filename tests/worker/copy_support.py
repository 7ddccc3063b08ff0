"""Copies of states and blocks, said once more: byte by byte in loops. What every set of CopyKernels must do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hybridkv.specs import FullAttentionSpec, MambaSpec
from hybridkv.step import Copy, Step
from hybridkv.testing.configs import model_config, natural_model_config
from hybridkv.worker import (
    BlockCopier,
    CopyKernels,
    PagedStorage,
    RowColumns,
    StateCopier,
    StateCopies,
    StatePart,
    StatePlan,
    state_copies,
)
from hybridkv.worker.states import Kind
from small_steps import small_step

Bytes = NDArray[np.uint8]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Row:
    """A row's step. held: the column remembered of its last one, None for a new row."""

    held: int | None
    computed: int
    scheduled: int
    drafts: int
    before: int
    after: int


@dataclass(frozen=True)
class StateCase:
    """Some rows of one recurrent group. gaps: bytes behind the pages of each layer; None for the natural layout."""

    parts: tuple[StatePart, ...]
    gaps: tuple[int, ...] | None
    layers: int
    block_size: int
    drafts: int
    rows: tuple[Row, ...]
    seed: int


# -- the case, built


def spec_of(parts: tuple[StatePart, ...], block_size: int, drafts: int) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=tuple(part.shape for part in parts),
        dtypes=tuple(str(part.dtype).removeprefix("torch.") for part in parts),
        cache_mode="align",
        num_speculative_blocks=drafts,
    )


def reference_config(spec: MambaSpec, num_blocks: int, gaps: tuple[int, ...]) -> KVCacheConfig:
    """A layer a tensor; each has its own gap behind a page, and before its first one."""
    names, tensors, at = tuple(f"layer{i}" for i in range(len(gaps))), [], 0
    for name, gap in zip(names, gaps, strict=True):
        stride = spec.page_size_bytes + gap
        tensors.append(KVCacheTensor(stride * num_blocks, (name,), at + gap, stride))
        at += gap + stride * num_blocks
    return KVCacheConfig(num_blocks, tuple(tensors), (KVCacheGroupSpec(names, spec),))


def storage_of(case: StateCase, num_blocks: int, device: str = "cpu") -> tuple[PagedStorage, StateCopierLayers]:
    spec = spec_of(case.parts, case.block_size, case.drafts)
    if case.gaps is None:
        config = natural_model_config(num_blocks, (spec,), (1,), layers_per_group=case.layers)
    else:
        config = reference_config(spec, num_blocks, case.gaps)
    names = config.groups[0].layer_names
    storage = PagedStorage(config, device=device)
    fill(storage, case.seed)
    return storage, [list(zip(case.parts, storage.views[name], strict=True)) for name in names]


StateCopierLayers = list[list[tuple[StatePart, torch.Tensor]]]


def fill(storage: PagedStorage, seed: int) -> None:
    """Random bytes everywhere."""
    content = np.random.default_rng(seed).integers(0, 256, storage.arena.numel(), np.uint8)
    storage.arena.copy_(torch.from_numpy(content))


def content(storage: PagedStorage) -> Bytes:
    held: Bytes = storage.arena.cpu().numpy().copy()
    return held


def table_of(case: StateCase) -> NDArray[np.int32]:
    """Distinct blocks, in random order, wide enough for every row."""
    ends = [row.computed + row.scheduled for row in case.rows]
    columns = [row.held or 0 for row in case.rows]
    width = max([-(-end // case.block_size) for end in ends] + [column + 1 for column in columns]) + case.drafts
    ids = np.random.default_rng(case.seed).permutation(len(case.rows) * width) + 1
    return ids.reshape(len(case.rows), width).astype(np.int32)


# -- what must come of it


@dataclass(frozen=True)
class Expected:
    """A copy of one row: source blocks of the two kinds, destination, bias."""

    conv: int
    temporal: int
    destination: int
    bias: int


def expected_before(row: Row, blocks: list[int], block_size: int) -> Expected | None:
    """Section 8, before the forward."""
    previous = row.held
    if previous is None:
        if row.computed == 0:
            return None
        previous = (row.computed - 1) // block_size
    current = math.ceil((row.computed + row.scheduled) / block_size) - 1
    if previous == current:
        return None
    return Expected(blocks[previous], blocks[previous + row.before - 1], blocks[current], row.before - 1)


def expected_after(row: Row, blocks: list[int], block_size: int) -> Expected | None:
    """Section 8, after the forward."""
    state = math.ceil((row.computed + row.scheduled) / block_size) - 1
    first = row.computed + row.scheduled - row.drafts
    reached = first + row.after - 1
    edge = reached - reached % block_size
    if edge < first:
        return None
    bias, target = edge - first, edge // block_size - 1
    if target == state and bias == 0:
        return None
    return Expected(blocks[state], blocks[state + bias], blocks[target], bias)


def copied(old: Bytes, storage: PagedStorage, parts: tuple[StatePart, ...], copies: list[Expected]) -> Bytes:
    """``old`` after ``copies``, element by element."""
    new = old.copy()
    for tensor in storage.config.tensors:
        at = tensor.offset_bytes
        for part in parts:
            for copy in copies:
                for to, source in elements(part, copy):
                    block = copy.conv if part.kind == "conv" else copy.temporal
                    read = at + block * tensor.block_stride_bytes + source * part.dtype.itemsize
                    write = at + copy.destination * tensor.block_stride_bytes + to * part.dtype.itemsize
                    for byte in range(part.dtype.itemsize):
                        new[write + byte] = old[read + byte]
            at += math.prod(part.shape) * part.dtype.itemsize
    return new


def elements(part: StatePart, copy: Expected) -> list[tuple[int, int]]:
    """(to, from), elements of one state."""
    if part.kind == "temporal":
        return [(i, i) for i in range(math.prod(part.shape))]
    pairs = []
    for column in range(part.columns - copy.bias):
        if part.columns_axis == 0:
            channels = part.shape[1]
            pairs += [(column * channels + c, (column + copy.bias) * channels + c) for c in range(channels)]
        else:
            width = part.shape[1]
            pairs += [(c * width + column, c * width + column + copy.bias) for c in range(part.shape[0])]
    return pairs


# -- the comparison

Alter = Callable[[StateCopies], StateCopies]


def check_states(case: StateCase, kernels: CopyKernels, *, device: str = "cpu", alter: Alter = lambda c: c) -> int:
    """Plan, resolve and execute both stages of a step; every byte of the arena is as expected. Copies made.

    alter: what a control changes in the copies.
    """
    table = table_of(case)
    storage, layers = storage_of(case, int(table.max(initial=0)) + 1, device)
    copier = StateCopier(layers, kernels=kernels)
    made = 0
    for plan, expected in zip(plans_of(case), (expected_before, expected_after), strict=True):
        old = content(storage)
        wanted = [
            one
            for row, blocks in zip(case.rows, table.tolist(), strict=True)
            if (one := expected(row, blocks, case.block_size))
        ]
        copier.copy(alter(state_copies(plan, table, np.full(len(table), table.shape[1], np.int32))))
        np.testing.assert_array_equal(content(storage), copied(old, storage, case.parts, wanted))
        made += len(wanted)
    return made


def plans_of(case: StateCase) -> tuple[StatePlan, StatePlan]:
    """Before and after the forward, once the remembered columns are there."""
    columns = RowColumns(case.block_size, len(case.rows), case.drafts)
    held = {i: row.held for i, row in enumerate(case.rows) if row.held is not None}
    ends = [column * case.block_size + 1 for column in held.values()]
    columns.before(list(held), [0] * len(held), ends, [1] * len(held))

    def field(name: str) -> list[int]:
        return [getattr(row, name) for row in case.rows]

    at, computed, scheduled = range(len(case.rows)), field("computed"), field("scheduled")
    before = columns.before(at, computed, scheduled, field("before"))
    return before, columns.after(at, computed, scheduled, field("drafts"), field("after"))


@st.composite
def state_parts_strategy(draw: st.DrawFn, drafts: int, most: int = 4) -> tuple[StatePart, ...]:
    """States whose bytes are multiples of 4, so that dtypes can follow each other in any order."""
    parts = []
    kinds: list[Kind] = ["conv", "temporal"]
    for _ in range(draw(st.integers(1, most))):
        kind, dtype = draw(st.sampled_from(kinds)), draw(st.sampled_from(DTYPES))
        unit = 4 // dtype.itemsize
        sizes = draw(st.integers(1, 3)) * unit
        if kind == "temporal":
            shape = draw(st.sampled_from([(sizes,), (2, sizes), (2, 1, sizes)]))
            parts.append(StatePart(shape, dtype, kind))
            continue
        width, axis = draw(st.integers(2, 6)) - 1 + drafts, draw(st.integers(0, 1))
        parts.append(StatePart((sizes, width) if axis else (width, sizes), dtype, kind, axis))
    return tuple(parts)


@st.composite
def row_strategy(draw: st.DrawFn, block_size: int, drafts: int) -> Row:
    """Often close to a block's edge, where copies are made."""
    held = draw(st.none() | st.integers(0, 2))
    near = st.integers(0, 3).map(lambda edge: edge * block_size) if block_size > 8 else st.just(0)
    computed = max(int(held is not None), draw(near) + draw(st.integers(-3, 3 * min(block_size, 4))))
    drafted = draw(st.integers(0, drafts))
    scheduled = drafted + draw(st.integers(1, 3) | st.integers(1, 2 * block_size))
    before = draw(st.integers(1, 1 + drafts)) if held is not None else 1
    return Row(held, computed, scheduled, drafted, before, draw(st.integers(1, 1 + drafted)))


@st.composite
def state_cases(draw: st.DrawFn, *, most_rows: int = 5, most_parts: int = 4, most_layers: int = 3) -> StateCase:
    drafts = draw(st.integers(0, 8))
    block_size = draw(st.integers(1, 6) | st.integers(1, 64))
    layers = draw(st.integers(1, most_layers))
    gap = st.sampled_from([0, 4, 12, 256])
    gaps = draw(st.none() | st.one_of(gap.map(lambda one: (one,) * layers), st.tuples(*[gap] * layers)))
    rows = draw(st.lists(row_strategy(block_size, drafts), min_size=1, max_size=most_rows))
    parts = draw(state_parts_strategy(drafts, most_parts))
    return StateCase(parts, gaps, layers, block_size, drafts, tuple(rows), draw(st.integers(0, 2**32 - 1)))


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
    return small_step(3, copies=case.copies, zero=np.array(case.zero, np.int32).reshape(-1, 2))


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
