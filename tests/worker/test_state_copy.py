"""States copied by torch: every byte against loops, the controls that the comparison must notice, and bad input."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from copy_support import Row, StateCase, check_states, content, state_cases, storage_of
from hypothesis import given, settings

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.specs import MambaSpec
from hybridkv.worker import TORCH, CopyKernels, StateCopier, StateCopies, StatePart, state_parts
from hybridkv.worker.copies import Shifts, stack_layers

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
def test_torch_copies_what_a_loop_copies(case: StateCase) -> None:
    check_states(case, TORCH)


def test_a_shift_into_its_own_block() -> None:
    for part in (CONV, PLAIN):
        assert check_states(case(part, TEMPORAL, row=IN_PLACE), TORCH) == 1


def test_a_batch_larger_than_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_broken_kernels_are_noticed(broken: CopyKernels, row: Row) -> None:
    with pytest.raises(AssertionError):
        check_states(case(CONV, TEMPORAL, row=row), broken)


@pytest.mark.parametrize("row", [IN_PLACE, MOVED])
@pytest.mark.parametrize(
    "alter",
    [
        lambda copies: replace(copies, conv=copies.conv % 4 + 1),
        lambda copies: replace(copies, temporal=copies.temporal % 4 + 1),
        lambda copies: replace(copies, temporal=copies.conv),
        lambda copies: replace(copies, bias=np.maximum(copies.bias - 1, 0)),
        lambda copies: replace(copies, bias=copies.bias + 1),
        lambda copies: replace(copies, destination=copies.destination % 4 + 1),
    ],
)
def test_other_blocks_or_columns_are_noticed(alter: Callable[[StateCopies], StateCopies], row: Row) -> None:
    with pytest.raises(AssertionError):
        check_states(case(CONV, TEMPORAL, row=row), TORCH, alter=alter)


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
def test_bad_copies_are_refused_before_anything_is_written(bad: StateCopies, message: str) -> None:
    storage, layers = storage_of(case(CONV, TEMPORAL, row=IN_PLACE), 8)
    copier = StateCopier(layers)
    before = content(storage)
    with pytest.raises(WorkerError, match=message):
        copier.copy(bad)
    np.testing.assert_array_equal(content(storage), before)


def test_rows_may_begin_from_the_same_state_and_no_copies_are_fine() -> None:
    storage, layers = storage_of(case(CONV, TEMPORAL, row=IN_PLACE), 8)
    copier = StateCopier(layers)
    copier.copy(copies([], [], [], []))
    copier.copy(copies([1, 1, 1], [1, 1, 1], [2, 3, 4], [0, 0, 0]))
    for views in storage.views.values():
        for view in views:
            bits = view.view(torch.int16 if view.dtype == torch.bfloat16 else torch.int32)
            assert all(torch.equal(bits[1], bits[block]) for block in (2, 3, 4))
            assert not torch.equal(bits[1], bits[5])


def test_views_that_are_no_states_of_the_group_are_refused() -> None:
    def view(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    with pytest.raises(ConfigError, match="at least one state"):
        StateCopier([[]])
    with pytest.raises(ConfigError, match="is none of"):
        StateCopier([[(TEMPORAL, view(4, 2, 4))]])
    with pytest.raises(ConfigError, match="is none of"):
        StateCopier([[(TEMPORAL, view(4, 2, 3, dtype=torch.float16))]])
    with pytest.raises(ConfigError, match="equally many blocks"):
        StateCopier([[(TEMPORAL, view(4, 2, 3))], [(TEMPORAL, view(5, 2, 3))]])
    with pytest.raises(ConfigError, match="does not lie in one piece"):
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
        ((4, 2), "temporal", 0, "no columns"),
        ((4, 0), "temporal", None, "at least 1"),
        ((), "temporal", None, "at least 1"),
        ((4, 2), "other", None, "unknown kind"),
    ],
)
def test_parts_that_cannot_be(shape: tuple[int, ...], kind: str, axis: int | None, message: str) -> None:
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
def test_parts_of_a_spec(mamba_type: str, shapes: tuple[tuple[int, ...], ...], kinds: list[str]) -> None:
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


def test_layers_that_lie_equally_far_apart_are_one_stack() -> None:
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
