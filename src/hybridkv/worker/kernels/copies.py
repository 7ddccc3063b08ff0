"""Copies, shifts and zeroing of blocks in Triton: one launch for all layers and blocks of a stack (copy_kernels.py).

A launch is a line of programs, one for each (copy, layer, tile of a block), the tile running fastest.
Needs Triton: ``copy_kernels.triton_kernels`` imports this module and names what is missing.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hybridkv.units import ceil_div
from hybridkv.worker.copies.copy_kernels import CopyKernels, Shifts

# 8 KiB of 8-byte words a program: 16 loads of 4 bytes or 4 of 16 in flight for each of its 128 threads
_TILE: Final = 1024
# columns x channels a program holds between reading and writing
_SHIFT_TILE: Final = 2048


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _write_kernel(  # noqa: PLR0917 - a kernel has no keywords for its strides
    stack: tl.tensor,
    source: tl.tensor,
    destination: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    layers: tl.tensor,
    tiles: tl.tensor,
    elements: tl.tensor,
    zero: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    copy = program // (layers * tiles)
    base = stack + program // tiles % layers * layer_stride
    at = program % tiles * tile + tl.arange(0, tile)
    inside = at < elements
    to = base + tl.load(destination + copy) * block_stride + at
    if zero:
        tl.store(to, 0, mask=inside)
    else:
        tl.store(to, tl.load(base + tl.load(source + copy) * block_stride + at, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def _shift_kernel(  # noqa: PLR0917 - a kernel has no keywords for its strides
    stack: tl.tensor,
    source: tl.tensor,
    destination: tl.tensor,
    bias: tl.tensor,
    layer_stride: tl.tensor,
    block_stride: tl.tensor,
    column_stride: tl.tensor,
    channel_stride: tl.tensor,
    layers: tl.tensor,
    tiles: tl.tensor,
    columns: tl.tensor,
    channels: tl.tensor,
    all_columns: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    copy = program // (layers * tiles)
    base = stack + program // tiles % layers * layer_stride
    column = tl.arange(0, all_columns)[:, None]
    channel = program % tiles * tile + tl.arange(0, tile)[None, :]
    skipped = tl.load(bias + copy)
    kept = (column < columns - skipped) & (channel < channels)
    cell = column * column_stride + channel * channel_stride
    first = tl.load(source + copy) * block_stride + skipped * column_stride
    values = tl.load(base + first + cell, mask=kept)
    # a block may shift into itself: all threads have read their columns before one of them writes; other programs
    # have other channels
    tl.debug_barrier()
    tl.store(base + tl.load(destination + copy) * block_stride + cell, values, mask=kept)


def _copy_blocks(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """One launch. stack: [layers, blocks, elements], elements side by side."""
    _write_blocks(stack, source, destination, zero=False)


def _zero_blocks(stack: torch.Tensor, blocks: torch.Tensor) -> None:
    """One launch."""
    _write_blocks(stack, blocks, blocks, zero=True)


def _write_blocks(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor, *, zero: bool) -> None:
    layers, _, elements = stack.shape
    if not len(source):
        return
    tiles = ceil_div(elements, _TILE)
    strides = stack.stride(0), stack.stride(1)
    _write_kernel[(len(source) * layers * tiles,)](
        stack, source, destination, *strides, layers, tiles, elements, zero=zero, tile=_TILE
    )


def _shift_columns(stack: torch.Tensor, shifts: Shifts) -> None:
    """One launch, whatever the biases. stack: [layers, blocks, columns, channels], of any strides."""
    layers, _, columns, channels = stack.shape
    if not shifts.runs:
        return
    all_columns = triton.next_power_of_2(columns)
    tile = max(1, _SHIFT_TILE // all_columns)
    tiles = ceil_div(channels, tile)
    _shift_kernel[(len(shifts.source) * layers * tiles,)](
        stack,
        shifts.source,
        shifts.destination,
        shifts.bias,
        *stack.stride(),
        layers,
        tiles,
        columns,
        channels,
        all_columns=all_columns,
        tile=tile,
    )


TRITON: Final = CopyKernels(_copy_blocks, _shift_columns, _zero_blocks)
"""On a GPU, or on the CPU where Triton's interpreter is switched on (TRITON_INTERPRET=1 before it is imported)."""
