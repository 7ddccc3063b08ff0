"""A Step over the block tables: where its tokens go and what they read, made once and used by every layer.

tables.apply(step) -> step_batch -> in each layer: write_kv(group.slots), then paged_attention(group.reads)

the step's tokens   [ a a a | b | c c ]      positions   5 6 7 | 12 | 0 1      of each in its request
                      ^ starts      ^        lengths     8 | 13 | 2            what each request reads up to
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import WorkerError
from hybridkv.step import Step
from hybridkv.units import ceil_div
from hybridkv.worker.attention.paged_attention import PagedBatch
from hybridkv.worker.pages.kv_write import WriteSlots, write_slots
from hybridkv.worker.tables.block_table import BlockTable
from hybridkv.worker.tables.multi_group import MultiGroupBlockTable

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """A Step in one group. slots: where its tokens' keys and values go. reads: which blocks its rows read."""

    slots: WriteSlots
    reads: PagedBatch


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A Step over the tables.

    positions: int64[tokens], of each token in its request, on the device of the tables. groups: by number, those whose
    blocks hold tokens of the request itself: not recurrent states, not an encoder's output.
    """

    positions: torch.Tensor
    groups: Mapping[int, GroupBatch]


def step_batch(step: Step, tables: MultiGroupBlockTable) -> StepBatch:
    """``step``, which ``tables`` have applied. Commits the tables and the slots of its tokens.

    Row i of the Step is request i of ``reads``: its tokens are the last of the ``num_computed + num_scheduled`` that
    it reads. Raises WorkerError for rows without blocks for their tokens, and as the tables and ``write_slots`` do.
    O(tokens + cells read), and a wait for the device.
    """
    scheduled = step.num_scheduled.astype(np.int64)
    owners = np.repeat(step.rows.astype(np.int64), scheduled)
    inside = np.arange(step.num_tokens) - np.repeat(step.token_ids.indptr[:-1], scheduled)
    positions = np.repeat(step.num_computed.astype(np.int64), scheduled) + inside
    tables.commit_block_table(tables.num_rows)
    tables.compute_slot_mapping(owners, positions)
    tables.commit_slot_mapping(step.num_tokens)
    groups = dict[int, GroupBatch]()
    for group in tables.token_groups:
        table = tables[group]
        reads = group_reads(step, group, table)  # refuses rows without blocks, whose slots are all alike
        slots = write_slots(table.slot_mapping[: step.num_tokens], reads.num_blocks, reads.block_size)
        groups[group] = GroupBatch(slots, reads)
    return StepBatch(torch.from_numpy(positions).to(tables[0].device), groups)


def group_reads(step: Step, group: int, table: BlockTable) -> PagedBatch:
    """What ``step`` reads in ``group``, whose ``table`` has committed its cells.

    Raises WorkerError for rows without blocks for their tokens. O(cells read); never waits for the device, as the table
    has looked at every id that it holds.
    """
    lengths = step.num_computed.astype(np.int64) + step.num_scheduled
    share, num_blocks = table.layout.share, table.id_limit * table.blocks_per_kv_block
    room = table.num_blocks_per_row[step.rows].astype(np.int64) * (table.block_size * share.size)
    short = np.flatnonzero(lengths > room)
    if len(short):
        i = short[0]
        raise WorkerError(
            f"Step {step.id}: row {step.rows[i]} has blocks for {room[i]} tokens in group {group} and needs them for "
            f"{lengths[i]}: apply the Step to the tables first"
        )
    columns = ceil_div(int(lengths.max(initial=0)), table.block_size * share.size)
    rows = torch.from_numpy(step.rows.astype(np.int64)).to(table.device, non_blocking=True)
    return PagedBatch(
        tuple(step.token_ids.indptr.tolist()),
        tuple(lengths.tolist()),
        table.get_device_tensor()[rows, :columns].to(torch.int64),
        table.block_size,
        num_blocks,
        share,
    )
