"""Slots on the device: from device tables and device positions, without a way through the host."""

from __future__ import annotations

from typing import Protocol

import torch

from hybridkv.errors import ConfigError
from hybridkv.worker.tables.slot_mapping import NO_SLOT, SlotLayout


class SlotKernel(Protocol):
    """Computes slots on a device: ``torch_slots`` or ``triton_slots``."""

    def __call__(
        self, table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, layout: SlotLayout, out: torch.Tensor
    ) -> None:
        """Write the slot of every (rows[i], positions[i]) into ``out[i]``; -1 where either is out of range. O(n).

        table: int32[rows, layout.width], contiguous. rows, positions: int32[n] or int64[n]. out: int64[n], contiguous.
        All on one device.
        """
        ...


def torch_slots(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, layout: SlotLayout, out: torch.Tensor
) -> None:
    """A SlotKernel in plain torch, on any device; never waits for it. O(n)."""
    at, row, share = positions.long(), rows.long(), layout.share
    inside = (row >= 0) & (row < len(table)) & (at >= 0) & (at < layout.row_tokens)
    if share.size > 1:
        turn = at // share.interleave
        inside &= turn % share.size == share.rank
        at = turn // share.size * share.interleave + at % share.interleave
    cell = torch.where(inside, row * layout.width + at // layout.block_size, 0)
    slots = table.view(-1)[cell].long() * layout.block_size + at % layout.block_size
    out.copy_(torch.where(inside, slots, NO_SLOT))


def triton_slots(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, layout: SlotLayout, out: torch.Tensor
) -> None:
    """A SlotKernel in Triton, one launch; never waits for the device. O(n).

    Raises ConfigError where Triton is not installed.
    """
    try:
        from hybridkv.worker.kernels.slots import launch_slots  # noqa: PLC0415 - Triton is optional, so asked for here
    except ImportError as error:
        raise ConfigError("Triton is not installed: pip install 'hybridkv[gpu]', or use torch_slots") from error
    launch_slots(table, rows, positions, layout, out)
