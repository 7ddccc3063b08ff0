"""Slots of a step's tokens in Triton, one launch. Needs Triton: ``device_slots.triton_slots`` imports this module."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from hybridkv.units import ceil_div
from hybridkv.worker.tables.slot_mapping import SlotLayout

# tokens of a program: a decode step of 1,024 rows still spreads over several
_TILE: Final = 256


@triton.jit  # type: ignore[untyped-decorator]  # Triton is not typed
def slot_kernel(  # noqa: PLR0917 - a kernel has no keywords for its sizes
    table: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    row_tokens: tl.tensor,
    block_size: tl.constexpr,
    ranks: tl.constexpr,
    rank: tl.constexpr,
    interleave: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the slot of every token: slot_mapping.py. Sizes are compiled in, so that powers of two shift."""
    i = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    here = i < tokens
    row = tl.load(rows + i, mask=here, other=0).to(tl.int64)
    at = tl.load(positions + i, mask=here, other=0).to(tl.int64)
    inside = here & (row >= 0) & (row < num_rows) & (at >= 0) & (at < row_tokens)
    if ranks > 1:
        turn = at // interleave
        inside = inside & (turn % ranks == rank)
        at = turn // ranks * interleave + at % interleave
    block = tl.load(table + row * width + at // block_size, mask=inside, other=0).to(tl.int64)
    tl.store(out + i, tl.where(inside, block * block_size + at % block_size, -1), mask=here)


def launch_slots(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, layout: SlotLayout, out: torch.Tensor
) -> None:
    """A SlotKernel (device_slots.py). O(n)."""
    tokens = len(rows)
    if not tokens:
        return
    slot_kernel[ceil_div(tokens, _TILE),](
        table,
        rows.contiguous(),
        positions.contiguous(),
        out,
        tokens,
        len(table),
        layout.width,
        layout.row_tokens,
        layout.block_size,
        layout.share.size,
        layout.share.rank,
        layout.share.interleave,
        _TILE,
    )
