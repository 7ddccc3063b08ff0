"""The block tables of all groups: applying Steps to them, and turning a Step into one batch over them.

tables.apply(step) -> step_batch -> in each layer: write_kv(group.slots), then paged_attention(group.reads)

the step's tokens   [ a a a | b | c c ]      positions   5 6 7 | 12 | 0 1      in the token's own request
                      ^ starts      ^        lengths     8 | 13 | 2            tokens that each request reads
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.spec_fields import Feature, require_supported
from hybridkv.specs import CircularBufferSpec, Keeps, KVCacheSpec, RequestLimits, UniformTypeKVCacheSpecs
from hybridkv.step import SCHEMA_VERSION, Step, ranges
from hybridkv.units import ceil_div
from hybridkv.worker.attention import PagedBatch
from hybridkv.worker.block_table import BlockTable, Ids, KernelSize, require_below
from hybridkv.worker.compressed import CompressedBatch, RingBatch, compressed_batch, ring_batch
from hybridkv.worker.pages import WriteSlots, write_slots
from hybridkv.worker.slots import RingSlots, StateSlots

T = TypeVar("T")
_SUPPORTED: Final = frozenset({Feature.INDEXER, Feature.PACKED, Feature.QUANTIZED, Feature.RETAINED})
"""Features of specs that change neither the block nor the offset of a token."""
_SUPPORTED_WHOLE: Final = _SUPPORTED | {Feature.RATE, Feature.RING, Feature.REPLICATED}
"""Those where one rank keeps all tokens. Where ranks share them, the tokens of a state lie on several ranks."""
_OF_TOKENS: Final = frozenset({Keeps.TOKENS, Keeps.WINDOW})
"""Groups whose blocks hold tokens of the request."""


class MultiGroupBlockTable:
    """One BlockTable for each group; a request has the same row in all of them. ``tables[i]`` is the table of group i.

    With ``specs``, a row of a group has ``spec.max_row_blocks`` columns. A group of recurrent states or encoder outputs
    is whole on every rank and has no slots, because its blocks do not hold tokens of the request. Blocks of states are
    never split. Without ``specs`` every group counts as attention, with ``max(ceil(max_model_len / (block_size *
    ranks)``, 1 + num_speculative_tokens)`` columns.

    Compressed states and rings have slots of their own (slots.py). They need all tokens on one rank.

    Args:
        max_num_reqs: rows of requests.
        max_model_len: tokens of the longest request.
        max_num_batched_tokens: tokens of the largest step.
        pin_memory: keep host tables in pinned memory, and send from pinned memory (for a GPU).
        device: device of the committed tables and slots.
        block_sizes: tokens of a memory block, one number for each group.
        kernel_block_sizes: tokens of a kernel block, the sizes that the kernel supports, or None to keep blocks whole.
            One entry for each group, or a single entry for all.
        num_speculative_tokens: most drafts of a request in a step.
        max_num_blocks: columns of a row in memory blocks, one number for each group, instead of the widths above.
        cp_kv_cache_interleave_size: neighbouring tokens that one rank holds.
        num_blocks: block ids must be below it: one number for all groups, or one for each; by default, only int32
            limits them.
        specs: the spec of each group.
        max_encoder_tokens: encoder tokens that cross attention reads.
        dcp_world_size: ranks of decode context parallelism.
        dcp_rank: this rank among them.
        pcp_world_size: ranks of prefill context parallelism.
        pcp_rank: this rank among them.

    Attributes:
        last_step_id: the id of the Step applied last; -1 before the first.
        state_slots: slots of compressed states, by group and ``tokens_per_state``, which may differ in a group.
        ring_slots: slots of the groups of rings.
        num_rows: rows of each table, as in BlockTable.

    Raises:
        ConfigError: a size is out of range, or a list has another length than ``block_sizes``.
        UnsupportedModelError: context parallel ranks share the tokens of a compressed state or ring.
    """

    def __init__(  # noqa: PLR0917  # the same positions as in vLLM's tables, which users know
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
                f"block_sizes must have an entry for at least one group, each at least 1 token, got {list(block_sizes)}"
            )
        kernels = [None] if kernel_block_sizes is None else list(kernel_block_sizes)
        kernels = kernels * groups if len(kernels) == 1 else _one_a_group("kernel_block_sizes", kernels, groups)
        kinds = [None] * groups if specs is None else _one_a_group("specs", specs, groups)
        _check_features(kinds, limits)
        for number, (size, spec) in enumerate(zip(block_sizes, kinds, strict=True)):
            if spec is not None and spec.block_size != size:
                raise ConfigError(
                    f"group {number}: block size {size}, but its spec has {spec.block_size}: give the same"
                )
        if max_num_blocks is None:
            widths = [_row_blocks(size, spec, limits) for size, spec in zip(block_sizes, kinds, strict=True)]
        else:
            widths = _one_a_group("max_num_blocks", max_num_blocks, groups)
        bounds = _one_a_group(
            "num_blocks", num_blocks if isinstance(num_blocks, Sequence) else [num_blocks] * groups, groups
        )
        self.max_num_reqs = max_num_reqs
        self.num_rows = max_num_reqs * (1 + num_speculative_tokens if limits.cp > 1 else 1)
        self.last_step_id = -1
        ranks = {
            "dcp_world_size": dcp_world_size,
            "dcp_rank": dcp_rank,
            "pcp_world_size": pcp_world_size,
            "pcp_rank": pcp_rank,
        }
        tables = list[BlockTable]()
        for size, kernel, spec, width, bound in zip(block_sizes, kernels, kinds, widths, bounds, strict=True):
            keeps = Keeps.TOKENS if spec is None else spec.keeps
            holds_tokens = keeps in _OF_TOKENS
            table = BlockTable(
                size,
                # a group that is whole on every rank is made for a single rank, with the rows of the other groups
                max_num_reqs if holds_tokens else self.num_rows,
                width,
                max_num_batched_tokens,
                pin_memory,
                device,
                None if keeps in {Keeps.STATE, Keeps.RING} else kernel,
                cp_kv_cache_interleave_size,
                num_speculative_tokens,
                num_blocks=bound,
                **(ranks if holds_tokens else {}),
            )
            tables.append(table)
        self._tables = tuple(tables)
        rates = [_rates_of(spec) for spec in kinds]
        self._mapped = tuple(table for table, of in zip(tables, rates, strict=True) if 1 in of)
        self._holding = tuple(table for table, of in zip(tables, rates, strict=True) if of)
        sent: dict[str, Any] = {"pin_memory": pin_memory, "device": torch.device(device)}
        self.state_slots = {
            (group, rate): StateSlots(
                rate, table.block_size, table.max_num_blocks_per_req, max_num_batched_tokens, **sent
            )
            for group, table in enumerate(tables)
            for rate in sorted(rates[group] - {1})
        }
        self.ring_slots = {
            group: RingSlots(spec.block_size, _pools_of(spec), self.num_rows, max_num_batched_tokens, **sent)
            for group, spec in enumerate(kinds)
            if spec is not None and spec.keeps is Keeps.RING
        }
        if self.ring_slots and not self._holding:
            raise ConfigError("rings hold no tokens of their own: give the specs of the layers that compress them, too")

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
        """Make the tables of a plan's groups on one rank, split as in the plan. Pinned if a GPU reads them.

        Args:
            config: the KV cache of the plan.
            max_num_reqs: rows of requests.
            max_model_len: tokens of the longest request.
            max_num_batched_tokens: tokens of the largest step.
            device: device of the committed tables and slots.
            max_encoder_tokens: encoder tokens that cross attention reads.
            cp_kv_cache_interleave_size: neighbouring tokens that one rank holds.
            dcp_world_size: ranks of decode context parallelism.
            dcp_rank: this rank among them.
            pcp_world_size: ranks of prefill context parallelism.
            pcp_rank: this rank among them.
        """
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
        """The numbers of the groups with layers that hold each token of the request; its tokens have slots there."""
        return tuple(group for group, table in enumerate(self._tables) if table in self._mapped)

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, group: int) -> BlockTable:
        return self._tables[group]

    def __iter__(self) -> Iterator[BlockTable]:
        return iter(self._tables)

    # -- Steps

    def apply(self, step: Step) -> None:
        """Apply the changes of a Step: clear finished and new rows, then write its cells in order. O(rows + cells).

        Args:
            step: a Step with a new id, after the Step ``step.after`` has been applied.

        Raises:
            WorkerError: the Step comes out of order, has a newer schema, or has a row, group, column or id out of
                range. Nothing has changed then.
        """
        if step.schema_version > SCHEMA_VERSION:
            raise WorkerError(
                f"Step {step.id} has schema version {step.schema_version}, this worker reads up to {SCHEMA_VERSION}: "
                "update the worker, or send older Steps"
            )
        if not step.after <= self.last_step_id < step.id:
            raise WorkerError(
                f"Step {step.id} follows Step {step.after}, but the last Step applied here is {self.last_step_id}: "
                "send each Step once and in order; fail this Step and restart the worker"
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
        """Raise WorkerError for numbers out of range, before anything is written. O(rows + cells)."""
        cells = step.cells
        new_rows = np.asarray([new.row for new in step.new_rows], np.int64)
        require_below(f"Step {step.id}: rows", step.rows, self.max_num_reqs)
        require_below(f"Step {step.id}: finished_rows", step.finished_rows, self.max_num_reqs)
        require_below(f"Step {step.id}: new_rows", new_rows, self.max_num_reqs)
        require_below(f"Step {step.id}: cells.row", cells.row, self.max_num_reqs)
        require_below(f"Step {step.id}: cells.group", cells.group, len(self._tables))
        if len({len(cells.group), len(cells.row), len(cells.column), len(cells.block)}) != 1:
            raise WorkerError(
                f"Step {step.id}: cells.group, row, column and block have {len(cells.group)}, {len(cells.row)}, "
                f"{len(cells.column)} and {len(cells.block)} values: give one of each for every cell"
            )
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

    # -- the methods of BlockTable, with one list of ids for each group

    def append_row(self, block_ids: Sequence[Ids], row_idx: int) -> None:
        """Append blocks to a row of every group. O(ids).

        Args:
            block_ids: ids of memory blocks, int[n] for each group.
            row_idx: the row.
        """
        for table, ids in self._per_group(block_ids, row_idx, replacing=False):
            table.append_row(ids, row_idx)

    def add_row(self, block_ids: Sequence[Ids], row_idx: int) -> None:
        """Replace the blocks of a row of every group. O(ids).

        Args:
            block_ids: ids of memory blocks, int[n] for each group.
            row_idx: the row.
        """
        for table, ids in self._per_group(block_ids, row_idx, replacing=True):
            table.add_row(ids, row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Move the blocks of row ``src`` to row ``tgt`` in every group; ``src`` becomes empty. O(blocks).

        Args:
            src: a row.
            tgt: another row; its own blocks are dropped.
        """
        for table in self._tables:
            table.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange the blocks of two rows in every group. O(blocks).

        Args:
            src: a row.
            tgt: the other row.
        """
        for table in self._tables:
            table.swap_row(src, tgt)

    def clear(self) -> None:
        """Remove the blocks of every row in every group, and set all tables to zeros."""
        for table in self._tables:
            table.clear()

    def compute_slot_mapping(self, req_indices: Ids, positions: Ids) -> None:
        """Compute the slots of a step's tokens, states and rings on the host, in every group. O(tokens * groups).

        Args:
            req_indices: int[n], the row of each token.
            positions: int[n], the position of each token in its request.

        Raises:
            WorkerError: a row or position is out of range. No slot has been written then.
        """
        if self._holding:
            # positions that fit the table with the shortest rows fit all tables
            narrowest = min(self._holding, key=lambda table: table.row_tokens)
            rows, at = narrowest.check_tokens(req_indices, positions)
            for table in self._mapped:
                table.map_tokens(rows, at)
            for (group, _), states in self.state_slots.items():
                states.compute(self._tables[group].get_numpy_array().reshape(-1), rows, at)
            for group, ring in self.ring_slots.items():
                ring.compute(self._tables[group].get_numpy_array().reshape(-1), rows, at)

    def commit_block_table(self, num_reqs: int) -> int:
        """Send the changed cells of the first rows of every group to the device. O(changed cells).

        Args:
            num_reqs: how many rows, from row 0.

        Returns:
            The number of cells sent.
        """
        return sum(table.commit_block_table(num_reqs) for table in self._tables)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Send the slots of the first tokens to the device, in every group. O(num_tokens * groups).

        Args:
            num_tokens: how many tokens.
        """
        for table in self._mapped:
            table.commit_slot_mapping(num_tokens)
        for states in self.state_slots.values():
            states.slots.commit(num_tokens * states.most)
        for ring in self.ring_slots.values():
            ring.slots.commit(num_tokens)

    def _per_group(self, block_ids: Sequence[Ids], row: int, *, replacing: bool) -> list[tuple[BlockTable, Ids]]:
        """Return each table with its ids, after checking all of them."""
        if len(block_ids) != len(self._tables):
            raise WorkerError(f"{len(block_ids)} lists of block ids for {len(self._tables)} groups: give one for each")
        pairs = list(zip(self._tables, block_ids, strict=True))
        for table, ids in pairs:
            table.check_row(ids, row, replacing=replacing)
        return pairs


def _one_a_group(name: str, values: Sequence[T], groups: int) -> list[T]:
    if len(values) != groups:
        raise ConfigError(f"{len(values)} entries in {name} for {groups} groups: give one for each group")
    return list(values)


def _check_features(kinds: Sequence[KVCacheSpec | None], limits: RequestLimits) -> None:
    """Raise UnsupportedModelError for a spec whose slots are not known."""
    supported = _SUPPORTED_WHOLE if limits.cp == 1 else _SUPPORTED
    for spec in filter(None, kinds):
        # encoder outputs have no slots
        known = supported - {Feature.RATE} if spec.keeps is Keeps.ENCODER else supported
        require_supported([spec], "the worker's block tables", known)


def _rates_of(spec: KVCacheSpec | None) -> frozenset[int | Fraction]:
    """Return the rates of the layers of a group, if its blocks hold tokens of the request."""
    if spec is None:
        return frozenset({1})
    return spec.rates if spec.keeps in _OF_TOKENS else frozenset()


def _pools_of(spec: KVCacheSpec) -> int:
    """Return the tokens at whose multiples all rings of a group are empty; 0 where that is unknown."""
    own = [one for _, one in spec.layers] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return math.lcm(*(one.pools for one in own if isinstance(one, CircularBufferSpec)))


def _row_blocks(block_size: int, spec: KVCacheSpec | None, limits: RequestLimits) -> int:
    """Return the columns of a row; without a spec, as for attention (docs/contracts.md, 7)."""
    if spec is None:
        return max(ceil_div(limits.max_model_len, block_size * limits.cp), 1 + limits.num_speculative_tokens)
    return spec.max_row_blocks(limits)


Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """A Step in one group.

    Attributes:
        slots: where the keys and values of its tokens are written.
        reads: the blocks that its requests read.
    """

    slots: WriteSlots
    reads: PagedBatch


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A Step over all tables.

    Attributes:
        positions: int64[tokens], the position of each token in its request, on the device of the tables.
        groups: the groups with layers that hold each token of the request, by number; no recurrent states, no encoder
            outputs.
        compressed: layers that hold compressed states, by number of their group and ``tokens_per_state``.
        rings: the groups of rings, by number.
    """

    positions: torch.Tensor
    groups: Mapping[int, GroupBatch]
    compressed: Mapping[tuple[int, int | Fraction], CompressedBatch]
    rings: Mapping[int, RingBatch]


def step_batch(step: Step, tables: MultiGroupBlockTable) -> StepBatch:
    """Make the batch of a Step, and commit the tables and the slots of its tokens. O(tokens + cells read).

    Row i of the Step becomes request i of ``reads``. Its queries are the last tokens of the ``num_computed +
    num_scheduled`` tokens that it reads. Waits for the device.

    Args:
        step: the Step that ``tables`` applied last.
        tables: the tables of all groups.

    Raises:
        WorkerError: a row has too few blocks for its tokens, or two tokens have one slot.
    """
    scheduled = step.num_scheduled.astype(np.int64)
    owners = np.repeat(step.rows.astype(np.int64), scheduled)
    positions = ranges(step.num_computed.astype(np.int64), scheduled)
    tables.commit_block_table(tables.num_rows)
    tables.compute_slot_mapping(owners, positions)
    tables.commit_slot_mapping(step.num_tokens)
    held = {*tables.token_groups, *(group for group, _ in tables.state_slots)}
    # before the slots: rows without blocks would all have one slot
    reads = {group: group_reads(step, group, tables[group]) for group in sorted(held)}
    groups = dict[int, GroupBatch]()
    for group in tables.token_groups:
        of = reads[group]
        slots = write_slots(tables[group].slot_mapping[: step.num_tokens], of.num_blocks, of.block_size)
        groups[group] = GroupBatch(slots, of)
    compressed = {
        (group, rate): compressed_batch(step, positions, states, reads[group])
        for (group, rate), states in tables.state_slots.items()
    }
    rings = {group: ring_batch(step, group, ring, tables[group]) for group, ring in tables.ring_slots.items()}
    return StepBatch(torch.from_numpy(positions).to(tables[0].device), groups, compressed, rings)


def group_reads(step: Step, group: int, table: BlockTable) -> PagedBatch:
    """Return the PagedBatch of ``step`` in ``group`` after its ``table`` has committed the cells. O(cells read).

    Never waits for the device, because the table has checked every id that it holds. Raises WorkerError for rows that
    have too few blocks for their tokens.
    """
    lengths = step.num_computed.astype(np.int64) + step.num_scheduled
    share, num_blocks = table.share, table.id_limit * table.blocks_per_kv_block
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
