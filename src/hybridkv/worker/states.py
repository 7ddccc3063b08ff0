"""Recurrent states in the columns of block tables: the parts of a state, copies of states, and in-place kernels.

page of a block in one layer   [ conv state: shape ][ temporal state: shape ]   (KDA: three conv states, one temporal)
view of a state                [blocks, *shape], see pages.py

RowColumns.before -> StatePlan -> state_copies -> StateCopier.copy -> forward -> RowColumns.after -> ... -> copy

Numpy code plans the copies between columns (docs/contracts.md, 8). Take a row that computes tokens and then verifies
two drafts. S is its state column, R its token count before the drafts:

    column      S            S+1   S+2
    temporal  [ R          | R+1 | R+2 ]     the token count of each state
    conv      [ .. R R+1 R+2 ]               one window over the last inputs, kernel_width - 1 + drafts columns

``a`` counts the last certain token and the accepted drafts, so it is at least 1. The request resumes at R + a - 1: its
temporal state is that of column S + a - 1, and its conv state begins at column a - 1 of the window. ``bias`` is this
offset a - 1.

InPlaceStates does all of this for the groups of a storage:

    before(step)             the state of every row moves to the column of the last token that the step runs
    blocks(step, group)      the blocks that the forward reads and writes
    after(step, accepted)    a state at a block boundary among these ``a`` tokens moves to where it is published

This replaces the parts of a Step about states: ``copies`` of kind "state", ``state_read`` and ``state_writes``. A
forward that reads one block and writes another needs none of it: it follows the Step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.specs import MambaSpec
from hybridkv.step import Step
from hybridkv.worker.block_table import Ids, check_least, require_below
from hybridkv.worker.copies import TORCH, CopyKernels, Shifts, stack_layers
from hybridkv.worker.pages import PagedStorage, parts_of
from hybridkv.worker.tables import MultiGroupBlockTable

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

_NONE: Final = -1
_NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """Copies of states between columns, for all groups of one block size.

    A temporal state goes from column source + bias to column destination. The columns bias .. of a conv state go from
    source to columns 0 .. of destination, and the last bias columns of destination stay unchanged.

    Attributes:
        stage: "before" or "after" the forward.
        row: int64[n], each row at most once.
        source: int64[n], columns.
        destination: int64[n], columns.
        bias: int64[n].
        accepted: int64[R], for every row in the order of the call: the ``a`` that its forward reads with ("before"), or
            that its next step begins with ("after").
    """

    stage: Literal["before", "after"]
    row: Int64
    source: Int64
    destination: Int64
    bias: Int64
    accepted: Int64

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class StateCopies:
    """The copies of a plan in one group, by block, in the order of the plan.

    Attributes:
        conv: int64[n], source blocks of conv states.
        temporal: int64[n], source blocks of temporal states.
        destination: int64[n], destination blocks of both.
        bias: int64[n], as in StatePlan.
    """

    conv: Int64
    temporal: Int64
    destination: Int64
    bias: Int64

    def __len__(self) -> int:
        return len(self.destination)


class RowColumns:
    """Tracks S, the column that holds each row's state after its last step.

    ``before`` and ``after`` take a row at most once a call, and check everything before they change anything. Drop the
    rows of a Step that fails later, because they resume from a checkpoint.

    Args:
        block_size: tokens of a block of states.
        max_num_reqs: rows.
        num_speculative_tokens: most drafts of a row in a step.

    Raises:
        ConfigError: a size is out of range.
    """

    def __init__(self, block_size: int, max_num_reqs: int, num_speculative_tokens: int = 0) -> None:
        check_least(1, block_size=block_size, max_num_reqs=max_num_reqs)
        check_least(0, num_speculative_tokens=num_speculative_tokens)
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.num_speculative_tokens = num_speculative_tokens
        self._column: Int64 = np.full(max_num_reqs, _NONE, np.int64)

    def drop(self, rows: Ids) -> None:
        """Forget the columns of rows with a request that finishes, is preempted or resumes. O(rows).

        Args:
            rows: int[n].
        """
        at = np.asarray(rows, np.int64)
        require_below("rows", at, self.max_num_reqs)
        self._column[at] = _NONE

    def before(self, rows: Ids, computed: Ids, scheduled: Ids, accepted: Ids) -> StatePlan:
        """Plan the copies before a forward, and remember the rows' new columns. O(rows).

        Args:
            rows: int[n].
            computed: int[n], tokens that each row has computed.
            scheduled: int[n], tokens that the forward runs.
            accepted: int[n], ``StatePlan.accepted`` that ``after`` returned for each row, which is not always the ``a``
                of its last step; 1 for a new or dropped row.

        Raises:
            WorkerError: a row or count is out of range.
        """
        at, begin, count, a = self._vectors(rows=rows, computed=computed, scheduled=scheduled, accepted=accepted)
        held = self._column[at]
        most = np.where(held == _NONE, 1, 1 + self.num_speculative_tokens)
        wrong = (a < 1) | (a > most)
        _refuse(at, wrong, "accepted must lie in 1 .. 1 + drafts, and be 1 for a new row", accepted=a, most=most)
        _refuse(at, (held != _NONE) & (begin == 0), "a row that starts anew must be dropped first", column=held)
        previous = np.where(held == _NONE, (begin - 1) // self.block_size, held)  # -1, no column, before any token
        current = (begin + count - 1) // self.block_size
        copied = (previous != _NONE) & (previous != current)
        self._column[at] = current
        return StatePlan(
            "before", at[copied], previous[copied], current[copied], a[copied] - 1, np.where(copied, np.int64(1), a)
        )

    def after(self, rows: Ids, computed: Ids, scheduled: Ids, drafts: Ids, accepted: Ids) -> StatePlan:
        """Plan the copies after a forward: the state at the last block boundary goes to its own column. O(rows).

        There it can be published.

        Args:
            rows: int[n].
            computed: int[n], as in ``before``.
            scheduled: int[n], as in ``before``.
            drafts: int[n], how many of the last scheduled tokens are drafts.
            accepted: int[n], how many of the last ``drafts + 1`` tokens are accepted.

        Raises:
            WorkerError: a row or count is out of range, or ``before`` was not called for this step.
        """
        at, begin, count, drafted, a = self._vectors(
            rows=rows, computed=computed, scheduled=scheduled, drafts=drafts, accepted=accepted
        )
        most = np.minimum(count - 1, self.num_speculative_tokens)
        wrong = (drafted < 0) | (drafted > most)
        _refuse(at, wrong, "drafts must lie in 0 .. most, after a token that is no draft", drafts=drafted, most=most)
        _refuse(at, (a < 1) | (a > drafted + 1), "accepted must lie in 1 .. 1 + drafts", accepted=a, drafts=drafted)
        state = self._column[at]
        last = (begin + count - 1) // self.block_size
        elsewhere = "the state is not in the column where this step leaves it: call before() first"
        _refuse(at, state != last, elsewhere, column=state, wanted=last)
        certain = begin + count - drafted
        boundary = (certain + a - 1) // self.block_size * self.block_size
        bias, target = boundary - certain, boundary // self.block_size - 1
        copied = (bias >= 0) & ((target != state) | (bias > 0))
        # a boundary in column S itself is the step's very last token, so no accepted token follows it
        in_place = (bias >= 0) & (target == state)
        return StatePlan(
            "after", at[copied], state[copied], target[copied], bias[copied], np.where(in_place, np.int64(1), a)
        )

    def _vectors(self, **named: Ids) -> list[Int64]:
        """Return the named values as int64[n] after checking lengths, rows, and computed and scheduled tokens."""
        vectors = [np.array(one, np.int64) for one in named.values()]
        if any(one.shape != (len(vectors[0]),) for one in vectors):
            sizes = ", ".join(f"{name} {one.shape}" for name, one in zip(named, vectors, strict=True))
            raise WorkerError(f"give one number of each for every row, got {sizes}")
        require_below("rows", vectors[0], self.max_num_reqs)
        if len(np.unique(vectors[0])) < len(vectors[0]):
            raise WorkerError(f"a row comes twice in {vectors[0].tolist()}: give every row of a step once")
        at, computed, scheduled = vectors[:3]
        wrong = (computed < 0) | (scheduled < 1)
        _refuse(at, wrong, "computed must be at least 0, scheduled at least 1", computed=computed, scheduled=scheduled)
        return vectors


def state_copies(plan: StatePlan, table: Int32, num_blocks: Int32) -> StateCopies:
    """Return the copies of a plan in one group, by block. O(copies + columns after their destinations).

    A column is gone if it is null, or if its block is also in a later column: drafts pass their blocks on to later
    columns. After the forward, copies to such columns are left out, because the state of that boundary is not kept.
    A copy within one column is rejected at either stage.

    Args:
        plan: the copies by column.
        table: int32[rows, width], the group's block table (``BlockTable.get_numpy_array()``).
        num_blocks: int32[rows], valid columns of each row (``BlockTable.num_blocks_per_row``).

    Raises:
        WorkerError: a row is not in the table, a column is beyond its row, a source is null, or a destination is gone
            before the forward.
    """
    row, column = plan.row, np.stack((plan.source, plan.source + plan.bias, plan.destination))
    if row.size and row.max() >= len(table):
        raise WorkerError(
            f"row {row.max()} is not in a block table of {len(table)} rows: make both with the same max_num_reqs"
        )
    last = column.max(axis=0)
    held = num_blocks[row].astype(np.int64)
    _refuse(row, last >= held, "the row has no such column of states: send its blocks first", column=last, columns=held)
    blocks: Int64 = table[row, column].astype(np.int64)
    conv, temporal, destination = blocks
    empty = (conv == _NULL_BLOCK) | (temporal == _NULL_BLOCK)
    _refuse(row, empty, "a state would be copied from the null block", column=plan.source, bias=plan.bias)
    gone = (destination == _NULL_BLOCK) | _comes_again(table, row, plan.destination, held)
    lost = gone & ((plan.destination == plan.source) | (plan.stage == "before"))
    _refuse(row, lost, "the state's new column is null or went on to a later one", column=plan.destination)
    return StateCopies(conv[~gone], temporal[~gone], destination[~gone], plan.bias[~gone])


def _comes_again(table: Int32, row: Int64, column: Int64, held: Int64) -> Bool:
    """Return whether the block of (row, column) is also in a later one of the row's ``held`` columns."""
    later = column[:, None] + np.arange(1, (held - column).max(initial=1))
    inside = later < held[:, None]
    blocks = table[row[:, None], np.where(inside, later, 0)]
    again: Bool = (inside & (blocks == table[row, column][:, None])).any(axis=1)
    return again


def _refuse(row: Int64, wrong: Bool, why: str, **values: Int64) -> None:
    """Raise WorkerError for the first row that is ``wrong``, with its ``values``."""
    if wrong.any():
        i = int(wrong.argmax())
        found = ", ".join(f"{name} {one[i]}" for name, one in values.items())
        raise WorkerError(f"row {row[i]}: {why} ({found})")


Kind = Literal["conv", "temporal"]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One state of a recurrent layer, with the same bytes however many tokens a block covers.

    Attributes:
        shape: of the state.
        dtype: of its elements.
        kind: "conv" for the last inputs of a causal convolution, one column for each token; "temporal" for a state of
            all tokens before.
        columns_axis: the dimension of a conv state's columns: 0 for [columns, channels], 1 for [channels, columns].
            ``None`` for a temporal state.

    Raises:
        ConfigError: the kind is unknown, a size is below 1, or columns_axis does not fit the kind.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    columns_axis: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"unknown kind of state {self.kind!r}: use conv or temporal")
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"a state needs sizes of at least 1, got shape {self.shape}")
        conv = len(self.shape) == 2 and self.columns_axis in {0, 1}
        if not (conv if self.kind == "conv" else self.columns_axis is None):
            raise ConfigError(
                "a conv state needs two dimensions and columns_axis 0 or 1; a temporal state needs columns_axis None: "
                f"got {self}"
            )

    @property
    def columns(self) -> int:
        """Columns of a conv state; 0 for a temporal state."""
        return 0 if self.columns_axis is None else self.shape[self.columns_axis]


def state_parts(spec: MambaSpec, columns_axis: int) -> tuple[StatePart, ...]:
    """Return the states of a recurrent layer in the order of its page.

    The last state is temporal and the others are conv states. A short convolution has conv states only, linear
    attention temporal states only.

    Args:
        spec: the spec of the layer.
        columns_axis: 0 for conv states as vLLM stores them, 1 as transformers does.
    """
    states = parts_of(spec)
    temporal = {"short_conv": 0, "linear_attention": len(states)}.get(spec.mamba_type, 1)
    conv = len(states) - temporal
    return (
        *(StatePart(part.shape, part.dtype, "conv", columns_axis) for part in states[:conv]),
        *(StatePart(part.shape, part.dtype, "temporal") for part in states[conv:]),
    )


State = tuple[StatePart, torch.Tensor]
"""A state of one layer and its view, [blocks, *shape]."""


class StateCopier:
    """Copies the states of one group.

    Args:
        layers: for every layer its states in order, any number of conv and temporal ones; layers may differ.
        null_blocks: lower block ids belong to no request: 1, or the blocks of the null slab.
        kernels: TORCH or ``triton_kernels()``.

    Raises:
        ConfigError: a view does not have its part's shape and dtype or is not contiguous, or layers differ in their
            number of blocks or their device.
    """

    def __init__(
        self, layers: Sequence[Sequence[State]], *, null_blocks: int = 1, kernels: CopyKernels = TORCH
    ) -> None:
        states = list(chain.from_iterable(layers))
        if not states:
            raise ConfigError("a group of recurrent layers needs at least one state")
        for part, view in states:
            if view.shape[1:] != part.shape or view.dtype != part.dtype:
                raise ConfigError(
                    f"a view {tuple(view.shape)} of {view.dtype} does not fit {part}: give [blocks, *shape]"
                )
        if len({(view.shape[0], view.device) for _, view in states}) > 1:
            found = sorted({f"{view.shape[0]} on {view.device}" for _, view in states})
            raise ConfigError(f"layers have {', '.join(found)}: give all the same number of blocks, on one device")
        self.num_blocks = states[0][1].shape[0]
        self.device = states[0][1].device
        self._null_blocks = null_blocks
        self._kernels = kernels
        self._columns = min((part.columns for part, _ in states if part.kind == "conv"), default=None)
        self._conv = _stacks(layers, "conv")
        self._temporal = _stacks(layers, "temporal")

    @classmethod
    def of_group(
        cls, storage: PagedStorage, group: int, *, columns_axis: int = 0, kernels: CopyKernels = TORCH
    ) -> StateCopier:
        """Make the copier of a group of recurrent layers, with pages as their specs say.

        Args:
            storage: the memory of all groups.
            group: the group's number.
            columns_axis: as in ``state_parts``.
            kernels: TORCH or ``triton_kernels()``.

        Raises:
            ConfigError: the group has other layers.
        """
        planned = storage.config.groups[group]
        layers = []
        for name, spec in zip(planned.layer_names, planned.layer_specs, strict=True):
            if not isinstance(spec, MambaSpec):
                raise ConfigError(f"layer {name!r} of group {group} keeps no recurrent states: name a group of states")
            layers.append(list(zip(state_parts(spec, columns_axis), storage.views[name], strict=True)))
        return cls(layers, null_blocks=storage.config.null_blocks_of(group), kernels=kernels)

    def copy(self, copies: StateCopies) -> None:
        """Copy states in every layer. O(bytes copied); the number of launches does not grow with rows or layers.

        Args:
            copies: by block.

        Raises:
            WorkerError: a block does not exist or is null, a bias leaves no column of a conv state, or one copy writes
                a block that another reads or writes. Nothing has been written then.
        """
        self._check(copies)
        shifted = (copies.conv != copies.destination) | (copies.bias > 0)
        if self._conv and shifted.any():
            source, destination, bias = copies.conv[shifted], copies.destination[shifted], copies.bias[shifted]
            shifts = Shifts.of(source, destination, bias, self.device)
            for stack in self._conv:
                self._kernels.shift_columns(stack, shifts)
        moved = copies.temporal != copies.destination
        if self._temporal and moved.any():
            blocks = torch.from_numpy(np.stack((copies.temporal[moved], copies.destination[moved]))).to(self.device)
            for stack in self._temporal:
                self._kernels.copy_blocks(stack, blocks[0], blocks[1])

    def _check(self, copies: StateCopies) -> None:
        vectors = (copies.conv, copies.temporal, copies.destination, copies.bias)
        if len({one.shape for one in vectors}) > 1:
            raise WorkerError(f"copies need one block of each kind and one bias, got {[one.shape for one in vectors]}")
        if not len(copies):
            return
        blocks = np.stack(vectors[:3])
        low, high = blocks.min(), blocks.max()
        if low < self._null_blocks or high >= self.num_blocks:
            raise WorkerError(
                f"blocks of states must lie in {self._null_blocks} .. {self.num_blocks - 1} (lower ones are null), "
                f"got {low} .. {high}"
            )
        low, high = copies.bias.min(), copies.bias.max()
        if low < 0 or (self._columns is not None and high >= self._columns):
            raise WorkerError(
                f"a bias must lie in 0 .. {(self._columns or 1) - 1}, got {low} .. {high}: conv states need "
                "kernel_width - 1 + drafts columns"
            )
        for source in (copies.conv, copies.temporal):
            _refuse_collisions(source, copies.destination)


def _stacks(layers: Sequence[Sequence[State]], kind: str) -> list[torch.Tensor]:
    """Stack the states of one kind that have the same place in their layers."""
    stacks: list[torch.Tensor] = []
    for place in range(max(len(layer) for layer in layers)):
        states = [layer[place] for layer in layers if place < len(layer) and layer[place][0].kind == kind]
        stacks += stack_layers([_flat(part, view) for part, view in states])
    return stacks


def _flat(part: StatePart, view: torch.Tensor) -> torch.Tensor:
    """Return [blocks, columns, channels] for a conv state, [blocks, elements] for a temporal one."""
    if part.columns_axis is not None:
        return view.movedim(1 + part.columns_axis, 1)
    try:
        return view.view(view.shape[0], -1)
    except RuntimeError as error:
        raise ConfigError(f"a temporal state {part.shape} must be in one piece ({error})") from error


def _refuse_collisions(source: Int64, destination: Int64) -> None:
    """Raise WorkerError if two copies write one block, or one copy reads a block that another writes. O(n log n)."""
    order = np.argsort(destination, kind="stable")
    written = destination[order]
    twice = np.flatnonzero(written[1:] == written[:-1])
    if len(twice):
        raise WorkerError(f"block {written[twice[0]]} would get the states of two rows: check the block tables")
    place = np.minimum(np.searchsorted(written, source), len(written) - 1)
    crossed = np.flatnonzero((written[place] == source) & (order[place] != np.arange(len(source))))
    if len(crossed):
        raise WorkerError(
            f"one row reads the state in block {source[crossed[0]]} and another overwrites it: check the block tables"
        )


class InPlaceStates:
    """Manages the states of all recurrent groups for kernels that update them in place.

    Args:
        storage: the memory of all groups, in the reference layout with placement "align".
        tables: the block tables; they have applied every Step that is given to the methods.
        num_speculative_tokens: most drafts of a row in a step; conv states have as many extra columns.
        columns_axis: of conv states, as in ``state_parts``.
        kernels: TORCH or ``triton_kernels()``.

    Raises:
        ConfigError: the plan keeps no states in columns: it has the natural layout, another placement, or no states.
    """

    def __init__(
        self,
        storage: PagedStorage,
        tables: MultiGroupBlockTable,
        num_speculative_tokens: int = 0,
        *,
        columns_axis: int = 0,
        kernels: CopyKernels = TORCH,
    ) -> None:
        config = storage.config
        planned = {number: group.layer_specs[0] for number, group in enumerate(config.groups)}
        specs = {number: spec for number, spec in planned.items() if isinstance(spec, MambaSpec)}
        if config.slabs is not None or {spec.cache_mode for spec in specs.values()} != {"align"}:
            raise ConfigError(
                "this plan keeps no states in columns: plan with layout='reference' and placement='align', or read and "
                "write states where the Step says"
            )
        self._tables = tables
        self._copiers = {
            group: StateCopier.of_group(storage, group, columns_axis=columns_axis, kernels=kernels) for group in specs
        }
        self._block_size = next(iter(specs.values())).block_size  # the same for all states of a plan
        self._columns = RowColumns(self._block_size, tables.max_num_reqs, num_speculative_tokens)
        self._accepted: Int64 = np.ones(tables.max_num_reqs, np.int64)

    def before(self, step: Step) -> Step:
        """Copy states to where the forward continues. O(rows * groups + bytes copied).

        Args:
            step: the Step, before its forward.

        Returns:
            The Step without its copies of states.

        Raises:
            WorkerError: as RowColumns, ``state_copies`` and StateCopier.
        """
        fresh = np.concatenate((step.finished_rows, [new.row for new in step.new_rows])).astype(np.int64)
        self._columns.drop(fresh)
        self._accepted[fresh] = 1
        rows = step.rows
        self._follow(step, self._columns.before(rows, step.num_computed, step.num_scheduled, self._accepted[rows]))
        return replace(step, copies=tuple(copy for copy in step.copies if copy.kind != "state"))

    def blocks(self, step: Step, group: int) -> tuple[Int32, Int64]:
        """Return the blocks of each row, int32[R, 1 + drafts], and the ``bias`` of each row, int64[R].

        Row i reads its temporal state from block [i, bias[i]], and its conv state from the columns bias[i] .. of block
        [i, 0]. It writes a temporal state to each block: the first after its last token that is not a draft, the others
        after each draft. It writes the shared conv inputs to block [i, 0]. Entries after the row's own columns are null
        (0).

        Args:
            step: the Step, after ``before``.
            group: a group of recurrent layers.
        """
        ends = step.num_computed.astype(np.int64) + step.num_scheduled
        columns = (ends - 1) // self._block_size
        read = columns[:, None] + np.arange(1 + self._columns.num_speculative_tokens)
        table = self._tables[group].get_numpy_array()
        inside = read < self._tables[group].num_blocks_per_row[step.rows][:, None]
        blocks = table[step.rows[:, None], np.where(inside, read, 0)]
        return np.where(inside, blocks, 0).astype(np.int32), self._accepted[step.rows] - 1

    def after(self, step: Step, accepted: Ids) -> None:
        """Copy boundary states once the accepted drafts are known. O(rows * groups + bytes copied).

        Args:
            step: the Step, after its forward.
            accepted: int[R], how many of each row's last 1 + drafts tokens are accepted; 1 for a row without drafts.

        Raises:
            WorkerError: as ``before``.
        """
        drafts = np.diff(step.drafts.indptr)
        self._follow(step, self._columns.after(step.rows, step.num_computed, step.num_scheduled, drafts, accepted))

    def _follow(self, step: Step, plan: StatePlan) -> None:
        for group, copier in self._copiers.items():
            table = self._tables[group]
            copier.copy(state_copies(plan, table.get_numpy_array(), table.num_blocks_per_row))
        self._accepted[step.rows] = plan.accepted
