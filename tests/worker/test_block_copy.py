"""What a Step does to blocks: order, batches, controls, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from copy_support import CONFIGS, StepCase, check_step, content, fill, step_cases, step_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import WorkerError
from hybridkv.step import Copy
from hybridkv.worker import TORCH, BlockCopier, CopyKernels, PagedStorage
from hybridkv.worker.copies import ArenaBlocks, copy_levels


def move(group: int, source: int, destination: int) -> Copy:
    return Copy("before", group, source, destination, "move")


def copy(group: int, source: int, destination: int, stage: str = "before", kind: str = "block") -> Copy:
    return Copy(stage, group, source, destination, kind)


@settings(max_examples=2 * settings().max_examples)
@given(case=step_cases())
def test_block_copy_by_torch_matches_a_loop(case: StepCase) -> None:
    check_step(case, TORCH)


CHAIN = StepCase(
    "classes",
    copies=(
        copy(0, 6, 3),
        move(0, 2, 3),
        copy(0, 4, 6),  # of what a move brought
        move(0, 4, 2),  # into what a move left
        move(0, 5, 4),
        copy(2, 5, 8),
        copy(1, 3, 2, kind="state"),  # state 2 takes the slab of blocks 6, 7 and 8 of group 2
    ),
    zero=((0, 3), (2, 3)),
)
"""Moves 2 -> 3, 4 -> 2, 5 -> 4; then blocks are zeroed; then copied."""


def test_block_copy_order_is_moves_zeroing_copies() -> None:
    check_step(CHAIN, TORCH)
    check_step(replace(CHAIN, config="gaps", copies=CHAIN.copies[:5], zero=((0, 3), (1, 5))), TORCH)


# -- controls


def test_block_copy_in_one_wrong_batch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.worker.copies.copy_levels", lambda places: np.zeros(places.shape[1], np.int64))
    with pytest.raises(AssertionError):
        check_step(CHAIN, TORCH)


def test_block_copy_in_slab_of_two_classes_keeps_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were only blocks of one class told apart, the state's copy would come before the other class reads its slab."""
    case = StepCase("classes", copies=(copy(2, 6, 3), copy(2, 3, 4), copy(1, 3, 2, kind="state"), copy(2, 8, 5)))
    check_step(case, TORCH)
    monkeypatch.setattr(ArenaBlocks, "_places", lambda _self, of, blocks: blocks.T + 1000 * of)
    with pytest.raises(AssertionError):
        check_step(case, TORCH)


def last_copy_lost(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    TORCH.copy_blocks(stack, source[:-1], destination[:-1])


def half_a_block(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    TORCH.copy_blocks(stack[:, :, ::2], source, destination)


@pytest.mark.parametrize(
    "broken",
    [
        replace(TORCH, copy_blocks=last_copy_lost),
        replace(TORCH, copy_blocks=half_a_block),
        replace(TORCH, copy_blocks=lambda stack, source, to: TORCH.copy_blocks(stack, to, source)),
        replace(TORCH, zero_blocks=lambda stack, blocks: TORCH.zero_blocks(stack, blocks - 1)),
        replace(TORCH, zero_blocks=lambda stack, blocks: TORCH.zero_blocks(stack, blocks[1:])),
    ],
)
def test_block_copy_by_broken_kernel_is_detected(broken: CopyKernels) -> None:
    with pytest.raises(AssertionError):
        check_step(CHAIN, broken)


# -- batches


def batches(case: StepCase) -> list[int]:
    """Copies of each call of the kernel."""
    sizes: list[int] = []

    def counted(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        sizes.append(len(source))
        TORCH.copy_blocks(stack, source, destination)

    check_step(case, replace(TORCH, copy_blocks=counted))
    return sizes


def test_block_copy_without_conflicts_is_one_batch_per_class() -> None:
    """Copies of a Step come row by row, in each by group: their order does not cost launches."""
    rows = [(2, 4), (3, 5)]
    by_row = [copy(group, *row) for row in rows for group in (0, 1)]
    assert batches(StepCase("one class", copies=tuple(by_row[:1] + by_row[2:3]))) == [2]
    classes = (copy(0, 2, 3), copy(1, 2, 3))
    assert sorted(batches(StepCase("classes", copies=classes))) == [1, 1]
    assert batches(StepCase("classes", copies=(copy(2, 6, 7), copy(0, 2, 3), copy(2, 6, 8)))) == [1, 2]


def test_block_copy_order_is_kept_only_in_shared_slabs() -> None:
    """Blocks 4 and 5 of group 0, and 6, 7 and 8 of group 2 lie in slab 2; 2 and 3 lie in slab 1."""
    copies = (copy(0, 2, 3), copy(0, 4, 5), copy(2, 6, 7), copy(2, 9, 10), copy(2, 11, 8))
    assert batches(StepCase("classes", copies=copies)) == [2, 1, 1, 1]


def test_block_copy_in_reference_layout_is_one_batch_per_group() -> None:
    assert batches(StepCase("one size", copies=(copy(0, 2, 3), copy(1, 4, 5), copy(0, 2, 6)))) == [2, 1]


def test_block_copy_onto_itself_is_dropped() -> None:
    assert batches(StepCase("classes", copies=(copy(0, 3, 3), move(1, 2, 2)))) == []


@settings(max_examples=2 * settings().max_examples)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda one: one[0] != one[1]), max_size=14)
)
def test_block_copy_levels_are_the_longest_conflict_chain(pairs: list[tuple[int, int]]) -> None:
    expected: list[int] = []
    for i, (source, to) in enumerate(pairs):
        blocking = [expected[j] + 1 for j, (s, d) in enumerate(pairs[:i]) if d in {source, to} or s == to]
        expected.append(max(blocking, default=0))
    places = np.array(pairs, np.int64).reshape(-1, 2).T
    assert copy_levels(places).tolist() == expected


# -- bad input


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (StepCase("classes", copies=(copy(3, 2, 3),)), "group 3 does not exist: groups are 0 .. 2"),
        (StepCase("classes", copies=(copy(-1, 2, 3),)), "group -1"),
        (StepCase("classes", copies=(copy(0, 1, 3),)), "block 1 of group 0 .* 2 .. 7"),  # of the null slab
        (StepCase("classes", copies=(copy(0, 3, 0),)), "block 0 of group 0"),
        (StepCase("classes", copies=(copy(0, 3, 8),)), "block 8 of group 0"),
        (StepCase("classes", copies=(copy(1, 4, 1),)), "block 4 of group 1 .* 1 .. 3"),
        (StepCase("one size", copies=(copy(1, -1, 1),)), "block -1 of group 1 .* 1 .. 6"),
        (StepCase("one size", copies=(copy(1, 1, 0),)), "block 0 of group 1"),
        (StepCase("classes", zero=((0, 0),)), "block 0 of group 0"),
        (StepCase("classes", zero=((2, 12),)), "block 12 of group 2"),
        (StepCase("classes", copies=(copy(0, 2, 3, kind="other"),)), "and the kind move or block"),
        (StepCase("classes", copies=(copy(0, 2, 3, "after"),)), "the stage 'before'"),
    ],
)
def test_block_copy_with_bad_step_writes_nothing(case: StepCase, message: str) -> None:
    """Good moves, zeroing and copies stand before the bad one."""
    storage = PagedStorage(CONFIGS[case.config])
    fill(storage, 1)
    before = content(storage)
    good = (move(0, 2, 3), copy(0, 3, 4), copy(0, 5, 6))
    with pytest.raises(WorkerError, match=message):
        BlockCopier(storage).execute_before(
            step_of(replace(case, copies=good + case.copies, zero=((0, 5), *case.zero)))
        )
    np.testing.assert_array_equal(content(storage), before)
