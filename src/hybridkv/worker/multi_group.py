"""The block tables of all groups, and the order in which Steps are applied to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.step import SCHEMA_VERSION, Step
from hybridkv.units import ceil_div
from hybridkv.worker.block_table import BlockTable, Ids

Int32 = NDArray[np.int32]


class MultiGroupBlockTable:
    """One BlockTable a group; rows are the same in all of them.

    max_num_reqs: rows. max_model_len: tokens of the longest request, which gives a group
    ``ceil(max_model_len / block_size)`` columns unless ``max_num_blocks`` lists the widths.
    block_sizes: tokens, one a group. num_blocks: block ids must lie below it, None for no bound.
    ``[i]`` is group i's table. ``last_step_id``: the Step applied last, -1 before any.
    """

    def __init__(  # noqa: PLR0917  # the positions are those of vLLM's tables, whose users know them
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device | str,
        block_sizes: Sequence[int],
        *,
        max_num_blocks: Sequence[int] | None = None,
        num_blocks: int | None = None,
    ) -> None:
        if not block_sizes:
            raise ConfigError("a MultiGroupBlockTable needs the block size of at least one group")
        if max_num_blocks is None:
            if max_model_len < 1 or min(block_sizes) < 1:
                raise ConfigError(
                    f"max_model_len {max_model_len} and block sizes {list(block_sizes)} must be at least 1"
                )
            max_num_blocks = [ceil_div(max_model_len, size) for size in block_sizes]
        if len(max_num_blocks) != len(block_sizes):
            raise ConfigError(f"{len(max_num_blocks)} widths in max_num_blocks for {len(block_sizes)} groups")
        self._tables = tuple(
            BlockTable(size, max_num_reqs, width, max_num_batched_tokens, pin_memory, device, num_blocks=num_blocks)
            for size, width in zip(block_sizes, max_num_blocks, strict=True)
        )
        self.max_num_reqs = max_num_reqs
        self.last_step_id = -1

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, group: int) -> BlockTable:
        return self._tables[group]

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self._tables)

    # -- Steps

    def apply(self, step: Step) -> None:
        """Write what ``step`` changes: finished rows are cleared, new rows begin empty, cells are written in order.

        Takes a Step whose ``after`` has been applied and whose id is new. Raises WorkerError, with nothing
        changed, for any other (the worker missed one, or got one twice), for a newer schema, and for rows, groups,
        columns and ids out of range.
        O(rows + cells).
        """
        if step.schema_version > SCHEMA_VERSION:
            raise WorkerError(
                f"Step {step.id} has schema version {step.schema_version}, this worker reads up to {SCHEMA_VERSION}: "
                "update the worker, or send older Steps"
            )
        if not step.after <= self.last_step_id < step.id:
            raise WorkerError(
                f"Step {step.id} follows Step {step.after}, the last one here was {self.last_step_id}: Steps must "
                "arrive once each and in order; fail this one and start the worker anew"
            )
        self._check(step)
        beginning = np.asarray([new.row for new in step.new_rows], np.int64)
        for table in self._tables:
            table.clear_rows(step.finished_rows)
            table.clear_rows(beginning)
        cells = step.cells
        if len(self._tables) == 1:
            self._tables[0].write_cells(cells.row, cells.column, cells.block)
        else:
            for group in np.unique(cells.group).tolist():
                mine = cells.group == group
                self._tables[group].write_cells(cells.row[mine], cells.column[mine], cells.block[mine])
        self.last_step_id = step.id

    def _check(self, step: Step) -> None:
        """Everything that could be out of range, before anything is written. O(rows + cells)."""
        cells = step.cells
        widths = np.asarray([table.max_num_blocks_per_req for table in self._tables])
        new_rows = np.asarray([new.row for new in step.new_rows], np.int64)
        for name, rows in (
            ("rows", step.rows),
            ("finished_rows", step.finished_rows),
            ("new_rows", new_rows),
            ("cells.row", cells.row),
        ):
            _check_range(step, name, rows, self.max_num_reqs)
        _check_range(step, "cells.group", cells.group, len(self._tables))
        _check_range(step, "cells.block", cells.block, self._tables[0].id_limit)
        if len({len(cells.group), len(cells.row), len(cells.column), len(cells.block)}) != 1:
            raise WorkerError(f"Step {step.id}: the columns of cells differ in length")
        over = (cells.column < 0) | (cells.column >= widths[cells.group])
        if over.any():
            at = int(np.flatnonzero(over)[0])
            raise WorkerError(
                f"Step {step.id}: column {cells.column[at]} of row {cells.row[at]} lies outside the "
                f"{widths[cells.group[at]]} columns of group {cells.group[at]}"
            )

    # -- the calls of BlockTable, ids as one list a group

    def append_row(self, block_ids: Sequence[Ids], row_idx: int) -> None:
        """Append ``block_ids[g]`` to row ``row_idx`` of every group g."""
        for table, ids in self._per_group(block_ids, row_idx, replacing=False):
            table.append_row(ids, row_idx)

    def add_row(self, block_ids: Sequence[Ids], row_idx: int) -> None:
        """Replace row ``row_idx`` of every group g by ``block_ids[g]``."""
        for table, ids in self._per_group(block_ids, row_idx, replacing=True):
            table.add_row(ids, row_idx)

    def append_rows(self, rows: Ids, block_ids: Sequence[Ids]) -> None:
        """Append ``block_ids[g][i]`` to row ``rows[i]`` of every group g."""
        columns = [np.asarray(ids, np.int64) for ids in block_ids]
        self._check_groups(len(columns))
        for table, ids in zip(self._tables, columns, strict=True):
            table.check_append_rows(rows, ids)
        for table, ids in zip(self._tables, columns, strict=True):
            table.append_rows(rows, ids)

    def move_row(self, src: int, tgt: int) -> None:
        """Row ``src`` to row ``tgt`` in every group."""
        for table in self._tables:
            table.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows in every group."""
        for table in self._tables:
            table.swap_row(src, tgt)

    def clear(self) -> None:
        """No row of any group has blocks."""
        for table in self._tables:
            table.clear()

    def compute_slot_mapping(self, req_indices: Ids, positions: Ids) -> None:
        """Slots of every token in every group, on the host."""
        for table in self._tables:
            table.compute_slot_mapping(req_indices, positions)

    def commit_block_table(self, num_reqs: int) -> int:
        """Send the changed cells of the first ``num_reqs`` rows; how many."""
        return sum(table.commit_block_table(num_reqs) for table in self._tables)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Send the first ``num_tokens`` slots of every group."""
        for table in self._tables:
            table.commit_slot_mapping(num_tokens)

    def _check_groups(self, lists: int) -> None:
        if lists != len(self._tables):
            raise WorkerError(f"{lists} lists of block ids for {len(self._tables)} groups: give one a group")

    def _per_group(self, block_ids: Sequence[Ids], row: int, *, replacing: bool) -> list[tuple[BlockTable, Ids]]:
        """Each table with its ids, once all of them have been checked."""
        self._check_groups(len(block_ids))
        pairs = list(zip(self._tables, block_ids, strict=True))
        for table, ids in pairs:
            table.check_row(ids, row, replacing=replacing)
        return pairs


def _check_range(step: Step, name: str, values: NDArray[np.integer], end: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= end):
        raise WorkerError(f"Step {step.id}: {name} must lie in 0 .. {end - 1}, got {values.min()} .. {values.max()}")
