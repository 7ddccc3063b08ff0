"""The block tables of all groups, the order in which Steps are applied to them, and a Step as one batch over them.

tables.apply(step) -> step_batch -> in each layer: write_kv(group.slots), then paged_attention(group.reads)

the step's tokens   [ a a a | b | c c ]      positions   5 6 7 | 12 | 0 1      of each in its request
                      ^ starts      ^        lengths     8 | 13 | 2            what each request reads up to
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import Keeps, KVCacheSpec, RequestLimits
from hybridkv.step import SCHEMA_VERSION, Step
from hybridkv.units import ceil_div
from hybridkv.worker.attention import PagedBatch
from hybridkv.worker.block_table import BlockTable, Ids, KernelSize, require_below
from hybridkv.worker.pages import WriteSlots, write_slots

T = TypeVar("T")


class MultiGroupBlockTable:
    """One BlockTable a group; rows are the same in all of them.

    max_num_reqs, max_num_batched_tokens, pin_memory, device, cp_kv_cache_interleave_size, num_speculative_tokens and
    the ranks: as in BlockTable. max_model_len: tokens of the longest request.
    block_sizes: tokens of a memory block, one a group. kernel_block_sizes: how they are split, one entry a group (a
    size, a list of supported sizes, or None), or a single entry for all groups.
    max_num_blocks: columns in memory blocks, one number a group, in place of the widths below.
    num_blocks: block ids must lie below it, one number for all groups or one a group; None for no bound but int32.
    specs: what each group keeps. Without them every group is taken for attention, ``max(ceil(max_model_len /
    (block_size * ranks)), 1 + num_speculative_tokens)`` columns wide. With them widths are ``spec.max_row_blocks``,
    and a group whose blocks hold no tokens of the request itself (recurrent states, an encoder's output) is whole on
    every rank and is passed over by the slot mapping here; blocks of states are never split.
    max_encoder_tokens: what cross attention reads.

    ``[i]`` is group i's table. ``last_step_id``: the Step applied last, -1 before any.
    Raises ConfigError for sizes and numbers of entries that cannot work.
    """

    def __init__(  # noqa: PLR0917  # the positions are those of vLLM's tables, whose users know them
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device | str,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[KernelSize] | None = None,
        num_speculative_tokens: int = 0,
        max_num_blocks: Sequence[int] | None = None,
        cp_kv_cache_interleave_size: int = 1,
        *,
        num_blocks: int | Sequence[int] | None = None,
        specs: Sequence[KVCacheSpec] | None = None,
        max_encoder_tokens: int = 0,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        pcp_world_size: int = 1,
        pcp_rank: int = 0,
    ) -> None:
        limits = RequestLimits(
            max_model_len=max_model_len,
            dcp=dcp_world_size,
            pcp=pcp_world_size,
            max_encoder_tokens=max_encoder_tokens,
            num_speculative_tokens=num_speculative_tokens,
        )
        groups = len(block_sizes)
        if not groups or min(block_sizes) < 1:
            raise ConfigError(
                f"block_sizes must name at least one group, each of at least 1 token, got {list(block_sizes)}"
            )
        kernels = [None] if kernel_block_sizes is None else list(kernel_block_sizes)
        kernels = kernels * groups if len(kernels) == 1 else _one_a_group("kernel_block_sizes", kernels, groups)
        kinds = [None] * groups if specs is None else _one_a_group("specs", specs, groups)
        for number, (size, spec) in enumerate(zip(block_sizes, kinds, strict=True)):
            if spec is not None and spec.block_size != size:
                raise ConfigError(
                    f"group {number}: block size {size}, but its spec has {spec.block_size}: give the same"
                )
        if max_num_blocks is None:
            widths = [_row_blocks(size, spec, limits) for size, spec in zip(block_sizes, kinds, strict=True)]
        else:
            widths = _one_a_group("max_num_blocks", max_num_blocks, groups)
        each = num_blocks if isinstance(num_blocks, Sequence) else [num_blocks] * groups
        bounds = _one_a_group("num_blocks", each, groups)
        self.max_num_reqs = max_num_reqs
        self.num_rows = max_num_reqs * (1 + num_speculative_tokens if limits.cp > 1 else 1)
        self.last_step_id = -1
        ranks = {
            "dcp_world_size": dcp_world_size,
            "dcp_rank": dcp_rank,
            "pcp_world_size": pcp_world_size,
            "pcp_rank": pcp_rank,
        }
        tables, mapped = list[BlockTable](), list[BlockTable]()
        for size, kernel, spec, width, bound in zip(block_sizes, kernels, kinds, widths, bounds, strict=True):
            keeps = Keeps.TOKENS if spec is None else spec.keeps
            holds_tokens = keeps in {Keeps.TOKENS, Keeps.WINDOW}
            table = BlockTable(
                size,
                # what is whole on every rank is kept as by a single one, in as many rows as the others have
                max_num_reqs if holds_tokens else self.num_rows,
                width,
                max_num_batched_tokens,
                pin_memory,
                device,
                None if keeps is Keeps.STATE else kernel,
                cp_kv_cache_interleave_size,
                num_speculative_tokens,
                num_blocks=bound,
                **(ranks if holds_tokens else {}),
            )
            tables.append(table)
            if holds_tokens:
                mapped.append(table)
        self._tables, self._mapped = tuple(tables), tuple(mapped)

    @classmethod
    def of_config(
        cls,
        config: KVCacheConfig,
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device | str = "cpu",
        max_encoder_tokens: int = 0,
        cp_kv_cache_interleave_size: int = 1,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        pcp_world_size: int = 1,
        pcp_rank: int = 0,
    ) -> MultiGroupBlockTable:
        """The tables of ``config``'s groups on one rank; blocks are split as it says. Pinned where a GPU reads them."""
        groups = range(len(config.groups))
        specs = [group.spec for group in config.groups]
        return cls(
            max_num_reqs,
            max_model_len,
            max_num_batched_tokens,
            torch.device(device).type == "cuda",
            device,
            [spec.block_size for spec in specs],
            [specs[group].block_size // config.kernel_blocks_of(group) for group in groups],
            num_blocks=[config.blocks_of(group) for group in groups],
            specs=specs,
            max_encoder_tokens=max_encoder_tokens,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            dcp_world_size=dcp_world_size,
            dcp_rank=dcp_rank,
            pcp_world_size=pcp_world_size,
            pcp_rank=pcp_rank,
        )

    @property
    def token_groups(self) -> tuple[int, ...]:
        """Groups whose blocks hold tokens of the request itself: those that have slots."""
        return tuple(group for group, table in enumerate(self._tables) if table in self._mapped)

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
        new_rows = np.asarray([new.row for new in step.new_rows], np.int64)
        require_below(f"Step {step.id}: rows", step.rows, self.max_num_reqs)
        require_below(f"Step {step.id}: finished_rows", step.finished_rows, self.max_num_reqs)
        require_below(f"Step {step.id}: new_rows", new_rows, self.max_num_reqs)
        require_below(f"Step {step.id}: cells.row", cells.row, self.max_num_reqs)
        require_below(f"Step {step.id}: cells.group", cells.group, len(self._tables))
        if len({len(cells.group), len(cells.row), len(cells.column), len(cells.block)}) != 1:
            raise WorkerError(f"Step {step.id}: the columns of cells differ in length")
        limits = np.asarray([table.id_limit for table in self._tables])
        widths = np.asarray([table.max_num_kv_blocks_per_req for table in self._tables])
        for name, values, ends in (("block", cells.block, limits), ("column", cells.column, widths)):
            outside = np.flatnonzero((values < 0) | (values >= ends[cells.group]))
            if len(outside):
                at = outside[0]
                raise WorkerError(
                    f"Step {step.id}: cells.{name} must lie in 0 .. {ends[cells.group[at]] - 1} in group "
                    f"{cells.group[at]}, got {values[at]} for row {cells.row[at]}"
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
        """Slots of every token in every group that holds tokens, on the host. Raises WorkerError before any is written.

        O(tokens * groups).
        """
        if self._mapped:
            # where the fewest positions have a slot: what fits there fits everywhere
            narrowest = min(self._mapped, key=lambda table: table.layout.row_tokens)
            rows, at = narrowest.check_tokens(req_indices, positions)
            for table in self._mapped:
                table.map_tokens(rows, at)

    def commit_block_table(self, num_reqs: int) -> int:
        """Send the changed cells of the first ``num_reqs`` rows of every group; how many."""
        return sum(table.commit_block_table(num_reqs) for table in self._tables)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Send the first ``num_tokens`` slots of every group that holds tokens."""
        for table in self._mapped:
            table.commit_slot_mapping(num_tokens)

    def _per_group(self, block_ids: Sequence[Ids], row: int, *, replacing: bool) -> list[tuple[BlockTable, Ids]]:
        """Each table with its ids, once all of them have been checked."""
        if len(block_ids) != len(self._tables):
            raise WorkerError(f"{len(block_ids)} lists of block ids for {len(self._tables)} groups: give one a group")
        pairs = list(zip(self._tables, block_ids, strict=True))
        for table, ids in pairs:
            table.check_row(ids, row, replacing=replacing)
        return pairs


def _one_a_group(name: str, values: Sequence[T], groups: int) -> list[T]:
    if len(values) != groups:
        raise ConfigError(f"{len(values)} entries in {name} for {groups} groups: give one a group")
    return list(values)


def _row_blocks(block_size: int, spec: KVCacheSpec | None, limits: RequestLimits) -> int:
    """Columns of a row; without a spec those of attention (docs/contracts.md, 7)."""
    if spec is None:
        return max(ceil_div(limits.max_model_len, block_size * limits.cp), 1 + limits.num_speculative_tokens)
    return spec.max_row_blocks(limits)


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
