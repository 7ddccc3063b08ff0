"""Recurrent states in columns: where they go by the contract (8), copies byte by byte, and whole runs.

The loop at the end lets requests prefill, decode with drafts, fail, finish and be hit. The scheduler decides blocks,
tables and hits; InPlaceStates copies. A temporal state holds the number of tokens it has seen, a conv state the numbers
of its last tokens. A forward must find the row's own count; then it overwrites the row's columns. What is hit is read
by the request that hits it. In a model: test_bare_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from bare_engine import DRAFTS, Hybrid
from copy_support import Row, StateCase, check_states, content, reference_config, state_cases, storage_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerLimits, StepResult, plan
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.models import Layer, Model
from hybridkv.planner import KVCacheConfig
from hybridkv.specs import FullAttentionSpec, MambaSpec
from hybridkv.step import Csr, Step
from hybridkv.worker import (
    TORCH,
    BlockCopier,
    CopyKernels,
    InPlaceStates,
    MultiGroupBlockTable,
    PagedStorage,
    RowColumns,
    StateCopier,
    StateCopies,
    StatePart,
    StatePlan,
    state_copies,
    state_parts,
)
from hybridkv.worker.copies import Shifts, stack_layers
from small_steps import small_step

Triple = tuple[int, int, int]


def triples(plan: StatePlan) -> list[Triple]:
    return list(zip(plan.source.tolist(), plan.destination.tolist(), plan.bias.tolist(), strict=True))


def filled(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A table whose cell (row, column) is block 100 * row + column + 1, and full rows."""
    table = 100 * np.arange(rows)[:, None] + np.arange(width) + 1
    return table.astype(np.int32), np.full(rows, width, np.int32)


# -- measured lines


def test_state_copies_before_the_forward_match_measurements() -> None:
    columns = RowColumns(16, 1, 2)
    assert triples(columns.before([0], [0], [32], [1])) == []
    asked = [(32, 28, 1), (60, 3, 1), (63, 3, 2), (64, 3, 1), (66, 3, 3)]
    plans = [columns.before([0], [computed], [count], [a]) for computed, count, a in asked]
    assert [triples(plan) for plan in plans] == [[(1, 3, 0)], [], [(3, 4, 1)], [], []]
    assert [plan.accepted.tolist() for plan in plans] == [[1], [1], [1], [1], [3]]
    assert {plan.stage for plan in plans} == {"before"}


@pytest.mark.parametrize(
    ("computed", "scheduled", "expected"), [(16, 40, (0, 3, 0)), (48, 1, (2, 3, 0)), (32, 20, (1, 3, 0))]
)
def test_state_copies_of_first_steps_match_measurements(computed: int, scheduled: int, expected: Triple) -> None:
    columns = RowColumns(16, 2, 2)
    columns.before([1], [0], [300], [1])  # another request had the row
    columns.drop([1])
    assert triples(columns.before([1], [computed], [scheduled], [1])) == [expected]


@pytest.mark.parametrize(
    ("computed", "a", "copy", "blocks", "goes_on"),
    [
        (3, 1, (1, 0, 0), (2, 2, 1), 1),
        (3, 2, (1, 0, 0), (2, 2, 1), 2),
        (3, 3, (1, 0, 0), (2, 2, 1), 3),
        (2, 2, (1, 0, 1), (3, 2, 1), 2),
        (5, 3, (1, 1, 2), (4, 2, 2), 1),
        (5, 2, None, None, 2),
    ],
)
def test_state_copies_after_the_forward_match_measurements(
    computed: int, a: int, copy: Triple | None, blocks: Triple | None, goes_on: int
) -> None:
    """Blocks of 4 tokens, columns 0 .. 4 are blocks 1 .. 5, two drafts a step, S = 1. blocks: temporal, conv, to."""
    columns = RowColumns(4, 1, 2)
    columns.before([0], [computed], [3], [1])
    plan = columns.after([0], [computed], [3], [2], [a])
    assert triples(plan) == ([copy] if copy else [])
    assert plan.accepted.tolist() == [goes_on]
    copies = state_copies(plan, *filled(1, 5))
    found = zip(copies.temporal.tolist(), copies.conv.tolist(), copies.destination.tolist(), strict=True)
    assert list(found) == ([blocks] if blocks else [])


def test_state_columns_match_the_measured_tables() -> None:
    """Two speculative blocks, chunks of 32 and 28: the worker's row only grows, its stale columns are not read."""
    columns, row = RowColumns(16, 1, 2), [0, 4, 5, 6]
    assert len(columns.before([0], [0], [32], [1])) == 0
    found = []
    for new, computed, count, a in (([5, 8], 32, 28, 1), ([], 60, 3, 1), ([10], 63, 3, 3), ([], 66, 3, 1)):
        row += new
        plan = columns.before([0], [computed], [count], [a])
        copies = state_copies(plan, np.array([row], np.int32), np.array([len(row)], np.int32))
        found.append(
            (copies.conv.tolist(), copies.temporal.tolist(), copies.destination.tolist(), copies.bias.tolist())
        )
    assert found == [([4], [4], [6], [0]), ([],) * 4, ([6], [8], [5], [2]), ([],) * 4]


# -- against single rows


def last_column(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) - 1


def before_one(held: int | None, computed: int, scheduled: int, a: int, size: int) -> tuple[Triple | None, int]:
    """Section 8, before the forward, for one row: the copy and the a that is left."""
    previous = held if held is not None else (computed - 1) // size if computed else None
    current = last_column(computed + scheduled, size)
    if previous is None or previous == current:
        return None, a
    return (previous, current, a - 1), 1


def after_one(
    state: int, computed: int, scheduled: int, drafts: int, a: int, *, size: int
) -> tuple[Triple | None, int]:
    """Section 8, after the forward, for one row."""
    first = computed + scheduled - drafts
    edge = (first + a - 1) // size * size
    if edge < first:
        return None, a
    bias, target = edge - first, edge // size - 1
    return (None if target == state and not bias else (state, target, bias)), 1 if target == state else a


@settings(max_examples=2 * settings().max_examples)
@given(data=st.data(), size=st.integers(1, 64), drafts=st.integers(0, 8), rows=st.integers(1, 12))
def test_state_copies_of_batches_match_single_rows(data: st.DataObject, size: int, drafts: int, rows: int) -> None:
    """Steps of random rows; a remembered column is where the row's last step ended."""
    columns = RowColumns(size, rows, drafts)
    held: dict[int, int] = {}
    count = st.integers(1, max(2 * size, drafts + 2))
    for _ in range(data.draw(st.integers(1, 4))):
        gone = data.draw(st.lists(st.integers(0, rows - 1), max_size=3, unique=True))
        columns.drop(gone)
        held = {row: column for row, column in held.items() if row not in gone}
        at = data.draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True))
        computed = [data.draw(st.integers(row in held, 4 * size)) for row in at]
        scheduled = [data.draw(count) for _ in at]
        a = [data.draw(st.integers(1, 1 + drafts if row in held else 1)) for row in at]
        plan = columns.before(at, computed, scheduled, a)
        single = [
            before_one(held.get(row), c, s, b, size) for row, c, s, b in zip(at, computed, scheduled, a, strict=True)
        ]
        assert plan.row.tolist() == [row for row, (copy, _) in zip(at, single, strict=True) if copy]
        assert triples(plan) == [copy for copy, _ in single if copy]
        assert plan.accepted.tolist() == [left for _, left in single]
        held |= {row: last_column(c + s, size) for row, c, s in zip(at, computed, scheduled, strict=True)}
        drafted = [data.draw(st.integers(0, min(drafts, s - 1))) for s in scheduled]
        a = [data.draw(st.integers(1, 1 + d)) for d in drafted]
        plan = columns.after(at, computed, scheduled, drafted, a)
        after = [
            after_one(held[row], c, s, d, b, size=size)
            for row, c, s, d, b in zip(at, computed, scheduled, drafted, a, strict=True)
        ]
        assert triples(plan) == [copy for copy, _ in after if copy]
        assert plan.row.tolist() == [row for row, (copy, _) in zip(at, after, strict=True) if copy]
        assert plan.accepted.tolist() == [left for _, left in after]


# -- blocks of a plan


def plan_at(stage: str, source: int, destination: int, bias: int, row: int = 0) -> StatePlan:
    one = [np.array([value], np.int64) for value in (row, source, destination, bias, 1)]
    return StatePlan(stage, *one)  # type: ignore[arg-type]  # one of the two stages


def test_state_at_boundary_with_null_column_is_not_copied() -> None:
    """A prompt's last chunk with drafts passes an edge whose column is null: there is no block to publish."""
    columns = RowColumns(4, 1, 2)
    columns.before([0], [0], [9], [1])
    after = columns.after([0], [0], [9], [2], [2])
    assert triples(after) == [(2, 1, 1)]
    table = np.array([[0, 0, 5, 6, 7]], np.int32)
    assert len(state_copies(after, table, np.array([5], np.int32))) == 0
    table[0, 1] = 9
    copies = state_copies(after, table, np.array([5], np.int32))
    assert (copies.conv.tolist(), copies.temporal.tolist(), copies.destination.tolist()) == ([5], [6], [9])


def test_state_at_boundary_with_relocated_block_is_not_copied() -> None:
    """Column 1 was a draft's; its block is that of column 4 now, where the accepted state may lie."""
    columns = RowColumns(2, 1, 5)
    columns.before([0], [0], [2], [1])
    columns.before([0], [2], [6], [1])
    after = columns.after([0], [2], [6], [5], [2])
    assert triples(after) == [(3, 1, 1)]
    table = np.array([[1, 2, 3, 4, 2, 3, 7, 8, 2]], np.int32)
    assert len(state_copies(after, table, np.array([8], np.int32))) == 0
    table[0, 4] = 9  # what lies behind the row's columns does not count
    assert state_copies(after, table, np.array([8], np.int32)).destination.tolist() == [2]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (plan_at("before", 1, 3, 0), "copied from the null block"),  # conv and temporal
        (plan_at("before", 0, 3, 1), "copied from the null block"),  # temporal alone: column 1
        (plan_at("after", 0, 3, 1), "copied from the null block"),
        (plan_at("before", 0, 1, 0), "is null or went on to a later one"),
        (plan_at("before", 0, 2, 0, row=1), "is null or went on to a later one"),
        (plan_at("after", 2, 2, 1, row=1), "is null or went on to a later one"),
        (plan_at("before", 0, 4, 0), "no such column"),
        (plan_at("before", 3, 0, 1), "no such column"),  # column 4 is what a former row left behind
        (plan_at("after", 2, 0, 2), "no such column"),
        (plan_at("before", 0, 2, 0, row=2), "not in a block table of 2 rows"),
    ],
)
def test_state_column_without_block_is_rejected(wanted: StatePlan, message: str) -> None:
    table, held = filled(2, 6)
    table[0, 1] = 0
    table[1, 5] = table[1, 2]  # went on to column 5
    held[0] = 4
    with pytest.raises(WorkerError, match=message):
        state_copies(wanted, table, held)


# -- what is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.before([4], [0], [1], [1]), "rows must lie in 0 .. 3, got 4"),
        (lambda c: c.before([-1], [0], [1], [1]), "got -1"),
        (lambda c: c.before([1, 2, 1], [0] * 3, [1] * 3, [1] * 3), "comes twice"),
        (lambda c: c.before([1, 2], [0], [1, 1], [1, 1]), r"computed \(1,\)"),
        (lambda c: c.before([0], [5], [0], [1]), "row 0: .* at least 1 .*scheduled 0"),
        (lambda c: c.before([1], [-1], [1], [1]), "computed must be at least 0, .*computed -1"),
        (lambda c: c.before([0], [9], [1], [0]), "accepted must lie in"),
        (lambda c: c.before([0], [9], [1], [4]), "accepted must lie in"),
        (lambda c: c.before([1], [9], [1], [2]), "1 for a new row"),
        (lambda c: c.before([1, 0], [9, 0], [1, 1], [1, 1]), "row 0: .* dropped first"),
        (lambda c: c.after([0], [6], [3], [2], [0]), "accepted must lie in"),
        (lambda c: c.after([0], [6], [3], [1], [3]), "accepted must lie in"),
        (lambda c: c.after([0], [6], [3], [-1], [1]), "drafts must lie in 0"),
        (lambda c: c.after([0], [6], [3], [3], [1]), "drafts must lie in 0"),
        (lambda c: c.after([0], [2], [7], [3], [1]), "drafts must lie in 0"),
        (lambda c: c.after([0], [10], [3], [2], [1]), "call before.. first"),
        (lambda c: c.after([1], [6], [3], [2], [1]), "call before.. first"),
        (lambda c: c.after([0], [6], [0], [0], [1]), "scheduled at least 1"),
        (lambda c: c.drop([1, 4]), "rows must lie in"),
    ],
)
def test_state_columns_with_bad_input_remember_nothing(call: Callable[[RowColumns], object], message: str) -> None:
    def columns() -> RowColumns:
        one = RowColumns(4, 4, 2)
        one.before([0], [6], [3], [1])  # S = 2
        return one

    refused = columns()
    with pytest.raises(WorkerError, match=message):
        call(refused)
    later = [3, 1, 0], [5, 5, 9], [4, 1, 9], [1, 1, 3]
    found, expected = refused.before(*later), columns().before(*later)
    assert (found.row.tolist(), triples(found)) == (expected.row.tolist(), triples(expected))


@pytest.mark.parametrize("sizes", [(0, 1, 0), (4, 0, 0), (4, 1, -1)])
def test_state_columns_with_invalid_size_are_rejected(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"must be at least 1|must not be negative"):
        RowColumns(*sizes)


CONV = StatePart((5, 2), torch.bfloat16, "conv", 0)
PLAIN = StatePart((4, 5), torch.bfloat16, "conv", 1)
TEMPORAL = StatePart((2, 3), torch.float32, "temporal")


def case(*parts: StatePart, row: Row, block_size: int = 4, drafts: int = 2) -> StateCase:
    return StateCase(parts, (8, 8), 2, block_size, drafts, (row,), 3)


IN_PLACE = Row(held=1, computed=5, scheduled=3, drafts=2, before=1, after=3)
"""After the forward column 1 shifts into itself by 2."""
MOVED = Row(held=1, computed=7, scheduled=3, drafts=2, before=2, after=1)
"""Before the forward conv columns 1 .. go from column 1 to column 2, where the temporal state is already."""


@settings(max_examples=2 * settings().max_examples)
@given(case=state_cases())
def test_state_copy_by_torch_matches_a_loop(case: StateCase) -> None:
    check_states(case, TORCH)


def test_state_shift_within_its_block_is_right() -> None:
    for part in (CONV, PLAIN):
        assert check_states(case(part, TEMPORAL, row=IN_PLACE), TORCH) == 1


def test_state_copy_larger_than_scratch_memory_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (IN_PLACE, MOVED, IN_PLACE, MOVED, IN_PLACE)
    whole = replace(case(CONV, TEMPORAL, row=IN_PLACE), rows=rows)
    for room in (1, 120, 200):
        monkeypatch.setattr("hybridkv.worker.copies._SCRATCH_BYTES", room)
        assert check_states(whole, TORCH) == 7


# -- controls: what the comparison must notice


def last_column_first(stack: torch.Tensor, shifts: Shifts) -> None:
    """In place, from the last column on: it reads what it has overwritten."""
    for bias, first, end in shifts.runs:
        for source, to in zip(shifts.source[first:end].tolist(), shifts.destination[first:end].tolist(), strict=True):
            for column in reversed(range(stack.shape[2] - bias)):
                stack[:, to, column] = stack[:, source, column + bias]


def one_bias_less(stack: torch.Tensor, shifts: Shifts) -> None:
    runs = tuple((max(0, bias - 1), first, end) for bias, first, end in shifts.runs)
    TORCH.shift_columns(stack, replace(shifts, runs=runs))


def whole_state(stack: torch.Tensor, shifts: Shifts) -> None:
    """The columns behind a shifted window too, which are not its own."""
    for bias, first, end in shifts.runs:
        shifted = stack.index_select(1, shifts.source[first:end]).roll(-bias, 2)
        stack.index_copy_(1, shifts.destination[first:end], shifted)


def first_layer(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    TORCH.copy_blocks(stack[:1], source, destination)


@pytest.mark.parametrize(
    ("broken", "row"),
    [
        (replace(TORCH, shift_columns=last_column_first), IN_PLACE),
        (replace(TORCH, shift_columns=one_bias_less), IN_PLACE),
        (replace(TORCH, shift_columns=one_bias_less), MOVED),
        (replace(TORCH, shift_columns=whole_state), IN_PLACE),
        (replace(TORCH, copy_blocks=first_layer), IN_PLACE),
    ],
)
def test_state_copy_by_broken_kernel_is_detected(broken: CopyKernels, row: Row) -> None:
    with pytest.raises(AssertionError):
        check_states(case(CONV, TEMPORAL, row=row), broken)


# -- bad input


def copies(conv: list[int], temporal: list[int], destination: list[int], bias: list[int]) -> StateCopies:
    return StateCopies(*(np.array(one, np.int64) for one in (conv, temporal, destination, bias)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (copies([0], [1], [2], [0]), r"must lie in 1 .. 7 .*got 0"),
        (copies([1], [0], [2], [0]), "must lie in 1 .. 7"),
        (copies([1], [1], [0], [0]), "must lie in 1 .. 7"),
        (copies([1], [1], [8], [0]), "got 1 .. 8"),
        (copies([-1], [1], [2], [0]), "got -1"),
        (copies([1], [1], [2], [-1]), "bias must lie in 0 .. 4, got -1"),
        (copies([1], [1], [2], [5]), "bias must lie in 0 .. 4, got 5"),
        (copies([1, 3], [1, 3], [2, 2], [0, 0]), "states of two rows"),
        (copies([1, 3], [1, 4], [2, 1], [0, 0]), "another overwrites it"),
        (copies([1, 3], [5, 4], [2, 5], [0, 0]), "another overwrites it"),
        (copies([1, 3], [1, 3], [2], [0, 0]), "one block of each kind"),
    ],
)
def test_state_copy_with_bad_input_writes_nothing(bad: StateCopies, message: str) -> None:
    storage, layers = storage_of(case(CONV, TEMPORAL, row=IN_PLACE), 8)
    copier = StateCopier(layers)
    before = content(storage)
    with pytest.raises(WorkerError, match=message):
        copier.copy(bad)
    np.testing.assert_array_equal(content(storage), before)


def test_state_copy_from_shared_source_or_of_none_works() -> None:
    storage, layers = storage_of(case(CONV, TEMPORAL, row=IN_PLACE), 8)
    copier = StateCopier(layers)
    copier.copy(copies([], [], [], []))
    copier.copy(copies([1, 1, 1], [1, 1, 1], [2, 3, 4], [0, 0, 0]))
    for views in storage.views.values():
        for view in views:
            bits = view.view(torch.int16 if view.dtype == torch.bfloat16 else torch.int32)
            assert all(torch.equal(bits[1], bits[block]) for block in (2, 3, 4))
            assert not torch.equal(bits[1], bits[5])


def test_state_views_of_another_group_are_rejected() -> None:
    def view(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    with pytest.raises(ConfigError, match="at least one state"):
        StateCopier([[]])
    with pytest.raises(ConfigError, match="does not fit"):
        StateCopier([[(TEMPORAL, view(4, 2, 4))]])
    with pytest.raises(ConfigError, match="does not fit"):
        StateCopier([[(TEMPORAL, view(4, 2, 3, dtype=torch.float16))]])
    with pytest.raises(ConfigError, match="the same number of blocks"):
        StateCopier([[(TEMPORAL, view(4, 2, 3))], [(TEMPORAL, view(5, 2, 3))]])
    with pytest.raises(ConfigError, match="must be in one piece"):
        StateCopier([[(TEMPORAL, view(4, 3, 2).transpose(1, 2))]])
    shared = view(4, 2, 3)
    with pytest.raises(ConfigError, match="the same memory"):
        StateCopier([[(TEMPORAL, shared)], [(TEMPORAL, shared)]])
    with pytest.raises(ConfigError, match="16 bytes"):
        stack_layers([view(4, 2, dtype=torch.complex128)])


@pytest.mark.parametrize(
    ("shape", "kind", "axis", "message"),
    [
        ((4,), "conv", 0, "columns_axis"),
        ((4, 2), "conv", None, "columns_axis"),
        ((4, 2), "conv", 2, "columns_axis"),
        ((4, 2), "temporal", 0, "needs columns_axis None"),
        ((4, 0), "temporal", None, "at least 1"),
        ((), "temporal", None, "at least 1"),
        ((4, 2), "other", None, "unknown kind"),
    ],
)
def test_state_part_with_invalid_values_is_rejected(
    shape: tuple[int, ...], kind: str, axis: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StatePart(shape, torch.float32, kind, axis)  # type: ignore[arg-type]  # also kinds that are none


@pytest.mark.parametrize(
    ("mamba_type", "shapes", "kinds"),
    [
        ("mamba2", ((5, 8), (2, 3, 4)), ["conv", "temporal"]),
        ("kda_attention", ((5, 8), (5, 8), (5, 4), (2, 3, 4)), ["conv", "conv", "conv", "temporal"]),
        ("short_conv", ((5, 8),), ["conv"]),
        ("linear_attention", ((2, 3, 4),), ["temporal"]),
    ],
)
def test_state_parts_match_their_spec(mamba_type: str, shapes: tuple[tuple[int, ...], ...], kinds: list[str]) -> None:
    dtypes = tuple("bfloat16" if len(shape) == 2 else "float32" for shape in shapes)
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes, mamba_type=mamba_type)
    for axis in (0, 1):
        parts = state_parts(spec, axis)
        assert [part.kind for part in parts] == kinds
        assert tuple(part.shape for part in parts) == shapes
        assert [part.columns_axis for part in parts] == [axis if kind == "conv" else None for kind in kinds]
        assert [part.dtype for part in parts] == [
            torch.bfloat16 if len(shape) == 2 else torch.float32 for shape in shapes
        ]
        assert [part.columns for part in parts] == [part.shape[axis] if part.kind == "conv" else 0 for part in parts]


def test_state_layers_with_equal_stride_form_one_stack() -> None:
    """Few launches: one stack for each state of a layer, where layers are alike; none is left out elsewhere."""
    whole = torch.zeros(200, dtype=torch.int16)

    def at(*starts: int) -> list[torch.Tensor]:
        return [whole.as_strided((3, 4), (50, 1), start) for start in starts]

    def starts_of(views: list[torch.Tensor]) -> list[list[int]]:
        stacks = stack_layers(views)
        return [[int(stack[layer].storage_offset()) for layer in range(len(stack))] for stack in stacks]

    assert starts_of(at(0, 10, 20, 30)) == [[0, 10, 20, 30]]
    assert starts_of(at(30, 0, 20, 10)) == [[0, 10, 20, 30]]
    assert starts_of(at(0, 4, 10, 16, 40)) == [[0, 4], [10, 16], [40]]
    assert starts_of([*at(0), torch.zeros(3, 4, dtype=torch.int16)]) == [[0], [0]]
    assert starts_of([*at(0), whole.as_strided((3, 2), (50, 1), 8)]) == [[0], [8]]


def planned(layout: str = "reference", placement: str | None = None) -> KVCacheConfig:
    return plan(Hybrid().described(), "1MiB", max_model_len=60, layout=layout, placement=placement).config


def states_of(config: KVCacheConfig) -> InPlaceStates:
    tables = MultiGroupBlockTable.of_config(config, max_num_reqs=2, max_model_len=60, max_num_batched_tokens=64)
    return InPlaceStates(PagedStorage(config), tables, DRAFTS)


@pytest.mark.parametrize(("layout", "placement"), [("natural", None), ("reference", "none")])
def test_state_columns_in_natural_layout_are_rejected(layout: str, placement: str | None) -> None:
    with pytest.raises(ConfigError, match="no states in columns: plan with layout='reference'"):
        states_of(planned(layout, placement))


def test_state_columns_of_model_without_states_are_rejected() -> None:
    layer = Layer("0", FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32"), 0)
    config = plan(Model("a", "a", (layer,), 60, 9, "float32", 1, 1, 4), "1MiB", layout="reference").config
    with pytest.raises(ConfigError, match="no states in columns"):
        states_of(config)


def test_state_columns_after_a_row_are_null_blocks() -> None:
    config = planned()
    storage = PagedStorage(config)
    tables = MultiGroupBlockTable.of_config(config, max_num_reqs=2, max_model_len=60, max_num_batched_tokens=64)
    states = InPlaceStates(storage, tables, DRAFTS)
    group = next(g for g, one in enumerate(config.groups) if "0" in one.layer_names)
    tables[group].add_row([5, 6, 7, 8, 9], 1)
    tables[group].add_row([3, 4], 1)  # whose columns behind hold old ids
    rows, computed = np.array([1], np.int32), np.array([16], np.int32)
    step = small_step(scheduled=[2], rows=rows, num_computed=computed)
    blocks, bias = states.blocks(step, group)
    assert (blocks.tolist(), bias.tolist()) == ([[4, 0, 0, 0]], [0])


@pytest.mark.parametrize("layout", ["reference", "natural"])
def test_state_copier_copies_the_states_of_its_layers(layout: str) -> None:
    config = planned(layout)
    storage = PagedStorage(config)
    group, attention = (
        next(g for g, one in enumerate(config.groups) if layer in one.layer_names) for layer in ("0", "3")
    )
    copier, first = StateCopier.of_group(storage, group), config.null_blocks_of(group)
    for view in storage.views["0"]:
        view[first] = torch.arange(view[first].numel()).view_as(view[first])
    source, destination, bias = np.array([first]), np.array([first + 2]), np.array([1])
    copier.copy(StateCopies(source, source, destination, bias))
    windows, states = storage.views["0"]
    assert torch.equal(windows[first + 2, :-1], windows[first, 1:])  # rows are columns: columns_axis 0
    assert torch.equal(states[first + 2], states[first])
    with pytest.raises(WorkerError, match="lower ones are null"):
        copier.copy(StateCopies(source - 1, source, destination, bias))
    with pytest.raises(ConfigError, match="keeps no recurrent states: name a group of states"):
        StateCopier.of_group(storage, attention)


MAX_LEN = 200
ROWS = 4

Alter = Callable[[StatePlan], StatePlan]


class Loop:
    """A scheduler over one group of states, and the worker of its Steps."""

    def __init__(self, block_size: int, drafts: int, kernel: int) -> None:
        self.block_size, self.drafts, self.kernel = block_size, drafts, kernel
        spec = MambaSpec(
            block_size=block_size,
            shapes=((kernel - 1 + drafts, 2), (3,)),
            dtypes=("float32", "float32"),
            cache_mode="align",
            num_speculative_blocks=drafts,
        )
        config = reference_config(spec, 60, (0, 0))
        limits = SchedulerLimits(max_running=ROWS, max_batched_tokens=64, num_speculative_tokens=drafts)
        self.scheduler = Scheduler(KVCacheManager(config, MAX_LEN), limits, clock=lambda: 0.0)
        storage = PagedStorage(config)
        storage.arena.random_()
        self.views = [[view.numpy() for view in views] for views in storage.views.values()]
        self.tables = MultiGroupBlockTable.of_config(
            config, max_num_reqs=ROWS, max_model_len=MAX_LEN + drafts, max_num_batched_tokens=64
        )
        self.states, self.copier = InPlaceStates(storage, self.tables, drafts), BlockCopier(storage)
        self.random = Random(1)
        self.requests: list[Request] = []

    def admit(self) -> None:
        """A new prompt, or one that goes on from an earlier request."""
        random = self.random
        prompt = [random.randrange(10**6) for _ in range(random.randint(1, 40))]
        if self.requests and random.random() < 0.7:
            earlier = random.choice(self.requests[-6:]).token_ids().tolist()
            prompt = (earlier[: random.randint(1, len(earlier))] + prompt)[: MAX_LEN - 60]
        most = min(60, MAX_LEN - 1 - self.drafts - len(prompt))
        sampling = SamplingParams(max_tokens=random.randint(1, most), ignore_eos=True)
        request = Request(str(len(self.requests)), prompt, sampling, hasher=self.scheduler.cache.hasher)
        self.requests.append(request)
        self.scheduler.add(request)

    def step(self) -> None:
        if self.scheduler.statistics().running < ROWS and self.random.random() < 0.5:
            self.admit()
        drafts = [self.random.randrange(10**6) for _ in range(self.random.randint(0, self.drafts))]
        self.scheduler.propose({one.request_id: drafts for one in self.requests[-2 * ROWS :]})
        step = self.scheduler.schedule()
        self.tables.apply(step)
        self.copier.execute_before(self.states.before(step))
        self.forward(step)
        if len(step) and self.random.random() < 0.02:
            self.scheduler.fail(step.id, RuntimeError("the device is gone"))
            return
        sampled = [self.sampled(step, i) for i in range(len(step))]
        counts = np.array([len(tokens) for tokens in sampled], np.int32)
        self.states.after(step, np.maximum(counts, 1))
        accepted = counts if len(step.drafts.values) else None
        self.scheduler.update(StepResult(step.id, Csr.from_lists(sampled), accepted))

    def sampled(self, step: Step, i: int) -> list[int]:
        """Any number of the row's drafts, and a token behind them."""
        drafts = step.drafts[i].tolist()
        return [*drafts[: self.random.randint(0, len(drafts))], self.random.randrange(10**6)] if step.samples[i] else []

    # -- the model

    def forward(self, step: Step) -> None:
        blocks, bias = self.states.blocks(step, 0)
        ends = (step.num_computed + step.num_scheduled).tolist()
        for i, (computed, end) in enumerate(zip(step.num_computed.tolist(), ends, strict=True)):
            drafts = len(step.drafts[i])
            width = self.kernel - 1 + drafts
            for conv, temporal in self.views:
                if computed:
                    seen = conv[blocks[i, 0], bias[i] : bias[i] + self.kernel - 1]
                    assert (temporal[blocks[i, bias[i]]] == computed).all()
                    assert (seen == window(computed, self.kernel - 1)).all()
                conv[blocks[i, 0]] = -1
                conv[blocks[i, 0], :width] = window(end, width)
                for behind in range(drafts + 1):
                    temporal[blocks[i, behind]] = end - drafts + behind


def window(tokens: int, width: int) -> np.ndarray:
    """The numbers of the last ``width`` tokens, a column each; 0 where there were fewer."""
    return np.arange(tokens - width + 1, tokens + 1).clip(0)[:, None]


def run(sizes: tuple[int, int, int], steps: int) -> Loop:
    """sizes: block size, drafts, kernel width."""
    loop = Loop(*sizes)
    for _ in range(steps):
        loop.step()
    return loop


@pytest.mark.parametrize("sizes", [(4, 2, 4), (4, 0, 4), (16, 3, 4), (8, 7, 6), (2, 1, 3)])
def test_state_runs_keep_accepted_states_and_boundaries(sizes: tuple[int, int, int]) -> None:
    counts = run(sizes, 400).scheduler.statistics()
    assert min(counts.hit_tokens, counts.failed_steps, counts.requests_finished) > 3


# -- controls


def one_column_off(plan: StatePlan) -> StatePlan:
    return replace(plan, source=np.maximum(plan.source - 1, 0)) if plan.stage == "after" else plan


def no_bias(plan: StatePlan) -> StatePlan:
    return replace(plan, bias=np.zeros_like(plan.bias))


def nothing(stage: str) -> Alter:
    def alter(plan: StatePlan) -> StatePlan:
        none = np.empty(0, np.int64)
        return replace(plan, row=none, source=none, destination=none, bias=none) if plan.stage == stage else plan

    return alter


@pytest.mark.parametrize("alter", [one_column_off, no_bias, nothing("before"), nothing("after")])
def test_state_run_with_wrong_columns_is_detected(alter: Alter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.worker.states.state_copies", lambda plan, *rest: state_copies(alter(plan), *rest))
    with pytest.raises(AssertionError):
        run((4, 2, 4), 300)
