"""Copies within stacked views of blocks: what a device must be able to do, and how torch does it.

    stack of blocks     [layers, blocks, elements]             one array of every block of every layer
    stack of columns    [layers, blocks, columns, channels]    the conv states of the same

Elements are integers of the width of what is stored, so that every bit is kept. One call is one batch: it writes no
block that another copy of the batch reads or writes (its callers see to that), so copies may run in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError

Int64 = NDArray[np.int64]

# what torch may hold between reading and writing: a fraction of what a GPU has, far above the cost of a launch
_SCRATCH_BYTES: Final = 64 << 20

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Shifts:
    """Conv states to copy, ordered by bias.

    source, destination, bias: int64[n] on the device of the stack: columns bias .. of block source go to columns 0 ..
    of block destination, which may be the same block. runs: (bias, first, end) of the copies of one bias.
    """

    source: torch.Tensor
    destination: torch.Tensor
    bias: torch.Tensor
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, source: Int64, destination: Int64, bias: Int64, device: torch.device) -> Shifts:
        """int64[n] each, on the host. O(n log n)."""
        order = np.argsort(bias, kind="stable")
        values, first, count = np.unique(bias[order], return_index=True, return_counts=True)
        runs = zip(values.tolist(), first.tolist(), (first + count).tolist(), strict=True)
        moved = torch.from_numpy(np.stack((source[order], destination[order], bias[order]))).to(device)
        return cls(moved[0], moved[1], moved[2], tuple(runs))


@dataclass(frozen=True, slots=True)
class CopyKernels:
    """The three things done to blocks. Indices are int64 tensors on the device of the stack.

    copy_blocks(stack, source, destination): block source[i] to block destination[i], in every layer.
    shift_columns(stack, shifts): as Shifts says; the last bias columns of a destination keep what they hold.
    zero_blocks(stack, blocks): all bits of these blocks.
    """

    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    shift_columns: Callable[[torch.Tensor, Shifts], None]
    zero_blocks: Callable[[torch.Tensor, torch.Tensor], None]


def stack_layers(views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``views``, [blocks, ...] each, as few stacks [layers, blocks, ...] over the same memory. O(layers log layers).

    Layers share a stack where shapes, strides and storage are the same and they lie equally far apart; their order is
    that of their addresses. Elements become integers of the same width.
    Raises ConfigError for two views of one address, and for elements of another width than 1, 2, 4 or 8 bytes.
    """
    alike: dict[object, list[torch.Tensor]] = {}
    for view in views:
        if view.element_size() not in _BITS:
            raise ConfigError(f"{view.dtype} has {view.element_size()} bytes: use a dtype of 1, 2, 4 or 8")
        bits = view.view(_BITS[view.element_size()])
        key = (bits.untyped_storage().data_ptr(), bits.dtype, bits.shape, bits.stride())
        alike.setdefault(key, []).append(bits)
    return tuple(stack for members in alike.values() for stack in _runs(members))


def _runs(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views that differ in their address only, as stacks of one step each."""
    ordered = sorted(views, key=torch.Tensor.storage_offset)
    starts = [int(view.storage_offset()) for view in ordered]
    stacks, first = [], 0
    while first < len(starts):
        end, step = first + 1, 0
        while end < len(starts) and (end == first + 1 or starts[end] - starts[end - 1] == step):
            step = starts[end] - starts[end - 1]
            if not step:
                raise ConfigError("two layers have the same memory for a state: give each its own")
            end += 1
        base = ordered[first]
        stacks.append(base.as_strided((end - first, *base.shape), (step, *base.stride()), starts[first]))
        first = end
    return stacks


def _copy_blocks(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Two launches for every 64 MiB."""
    at_once = _at_once(stack)
    for first in range(0, len(source), at_once):
        part = slice(first, first + at_once)
        stack.index_copy_(1, destination[part], stack.index_select(1, source[part]))


def _shift_columns(stack: torch.Tensor, shifts: Shifts) -> None:
    """Two launches for each bias and every 64 MiB. What is read is held apart, so a block may shift into itself."""
    for bias, first, end in shifts.runs:
        kept = stack[:, :, : stack.shape[2] - bias]
        shifted = stack[:, :, bias:]
        at_once = _at_once(kept)
        for begin in range(first, end, at_once):
            part = slice(begin, min(begin + at_once, end))
            kept.index_copy_(1, shifts.destination[part], shifted.index_select(1, shifts.source[part]))


def _zero_blocks(stack: torch.Tensor, blocks: torch.Tensor) -> None:
    """One launch."""
    stack.index_fill_(1, blocks, 0)


def _at_once(stack: torch.Tensor) -> int:
    """Blocks whose bytes fit the scratch memory, at least one."""
    block_bytes = stack[:, 0].numel() * stack.element_size()
    return max(1, _SCRATCH_BYTES // max(1, block_bytes))


TORCH: Final = CopyKernels(_copy_blocks, _shift_columns, _zero_blocks)
"""On any device."""


def triton_kernels() -> CopyKernels:
    """The same on a GPU, one launch a call. ConfigError where Triton is not installed."""
    try:
        from hybridkv.worker.kernels.copies import TRITON  # noqa: PLC0415 - Triton is optional, so asked for here only
    except ImportError as error:
        raise ConfigError("Triton is not installed: pip install 'hybridkv[gpu]', or use TORCH") from error
    return TRITON


def copy_kernels(device: torch.device) -> CopyKernels:
    """What copies on ``device``: one launch a call on a GPU with Triton, else TORCH."""
    try:
        return triton_kernels() if device.type == "cuda" else TORCH
    except ConfigError:
        return TORCH
