"""Copies on a GPU: the loops of the CPU tests, and what the kernels reach of a plain device copy (shown with -s)."""

from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest
import torch
from block_copy_support import StepCase, check_step, step_cases
from copy_support import StateCase, check_states, state_cases
from hypothesis import given

from hybridkv.worker import TORCH, CopyKernels, StateCopier, StateCopies, StatePart, triton_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]

KERNELS: dict[str, Callable[[], CopyKernels]] = {"torch": lambda: TORCH, "triton": triton_kernels}


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=state_cases())
def test_states(kernels: str, case: StateCase) -> None:
    check_states(case, KERNELS[kernels](), device="cuda")


@pytest.mark.parametrize("kernels", KERNELS)
@given(case=step_cases())
def test_blocks(kernels: str, case: StepCase) -> None:
    check_step(case, KERNELS[kernels](), device="cuda")


def seconds(work: Callable[[], object], times: int = 20) -> float:
    """Of one call, launches included."""
    work()
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (perf_counter() - start) / times


@pytest.mark.parametrize("bias", [0, 2])
@pytest.mark.parametrize("kernels", KERNELS)
def test_bandwidth_of_states(kernels: str, bias: int) -> None:
    """64 rows of 12 layers, a conv state of 6 x 8192 in bfloat16 and a temporal one of 2 MiB in float32 each."""
    rows, layers = 64, 12
    conv = StatePart((6, 8192), torch.bfloat16, "conv", 0)
    temporal = StatePart((32, 128, 128), torch.float32, "temporal")

    def view(part: StatePart) -> torch.Tensor:
        return torch.zeros((2 * rows + 1, *part.shape), dtype=part.dtype, device="cuda")

    made = [[(part, view(part)) for part in (conv, temporal)] for _ in range(layers)]
    ids = np.random.default_rng(1).permutation(2 * rows) + 1
    copies = StateCopies(ids[:rows], ids[:rows], ids[rows:], np.full(rows, bias))
    copier = StateCopier(made, kernels=KERNELS[kernels]())
    moved = 2 * rows * layers * ((6 - bias) * 8192 * 2 + 32 * 128 * 128 * 4)
    taken = seconds(lambda: copier.copy(copies))
    source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    plain = seconds(lambda: target.copy_(source))
    reached, copied = moved / taken / 1e9, moved / plain / 1e9
    print(f"\n{kernels}, bias {bias}: {reached:.0f} GB/s, plain copy {copied:.0f} GB/s")  # noqa: T201 - what it is for
    assert taken < 20 * plain
