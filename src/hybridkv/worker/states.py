"""Recurrent states in the columns of block tables: what a state is, copies of states, and kernels that go on in place.

page of a block in one layer   [ conv state: shape ][ temporal state: shape ]   (KDA: three conv states, one temporal)
view of a state                [blocks, *shape], see pages.py

RowColumns.before -> StatePlan -> state_copies -> StateCopier.copy -> forward -> RowColumns.after -> ... -> copy

Which column goes where is planned in numpy (docs/contracts.md, 8). Of a row that computes tokens and verifies two
drafts behind them, S is the state column, R the tokens before the drafts:

    column      S            S+1   S+2
    temporal  [ R          | R+1 | R+2 ]     the tokens that each state has seen
    conv      [ .. R R+1 R+2 ]               one window over the last inputs, kernel_width - 1 + drafts columns

With ``a`` of these tokens accepted the request goes on at R + a - 1: temporal from column S + a - 1, conv from its
columns a - 1 on. ``bias`` is how far both begin behind column S.

InPlaceStates does all of this for the groups of a storage:

    before(step)             every row's state comes to the column of the last token that the step runs
    blocks(step, group)      where the forward reads, and writes
    after(step, accepted)    states at edges that accepted drafts crossed come to where they can be published

It replaces what a Step says of states: ``copies`` of kind "state", ``state_read`` and ``state_writes``. A forward
that reads one block and writes another needs none of this: it does what the Step says.
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
    """Copies of states, by column, for all groups of one block size.

    stage: "before" or "after" the forward. row, source, destination, bias: int64[n], a row at most once. A temporal
    state goes from column source + bias to destination; of a conv state the columns bias .. of source go to the
    columns 0 .. of destination, and the last bias columns there keep what they hold.
    accepted: int64[R], for every row asked about, in order: the a with which its forward reads ("before"), or
    with which its next step begins ("after").
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
    """A plan's copies in one group, by block: int64[n] each, in the order of the plan.

    conv, temporal: source blocks of the two kinds of state. destination: of both. bias: as in StatePlan.
    """

    conv: Int64
    temporal: Int64
    destination: Int64
    bias: Int64

    def __len__(self) -> int:
        return len(self.destination)


class RowColumns:
    """Remembers S, the column that holds each row's state after its last step.

    block_size: tokens of a block of states. max_num_reqs: rows. num_speculative_tokens: most drafts of a step.
    ``before`` and ``after`` take a row at most once a call, and check everything before they remember anything. What
    they remember follows the Step: rows of a Step that fails later must be dropped, as they resume from a checkpoint.
    Raises ConfigError for sizes that cannot work, WorkerError for rows and counts that cannot be.
    """

    def __init__(self, block_size: int, max_num_reqs: int, num_speculative_tokens: int = 0) -> None:
        check_least(1, block_size=block_size, max_num_reqs=max_num_reqs)
        check_least(0, num_speculative_tokens=num_speculative_tokens)
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.num_speculative_tokens = num_speculative_tokens
        self._column: Int64 = np.full(max_num_reqs, _NONE, np.int64)

    def drop(self, rows: Ids) -> None:
        """Forget the columns of rows whose request finishes, is preempted or resumes. O(rows)."""
        at = np.asarray(rows, np.int64)
        require_below("rows", at, self.max_num_reqs)
        self._column[at] = _NONE

    def before(self, rows: Ids, computed: Ids, scheduled: Ids, accepted: Ids) -> StatePlan:
        """What ``rows`` copy before the forward that runs ``scheduled`` tokens behind ``computed`` ones. O(rows).

        accepted: a of each row's last step, 1 for a row that is new or was dropped. Remembers the rows' new columns.
        """
        at, begin, count, a = self._vectors(rows=rows, computed=computed, scheduled=scheduled, accepted=accepted)
        held = self._column[at]
        most = np.where(held == _NONE, 1, 1 + self.num_speculative_tokens)
        wrong = (a < 1) | (a > most)
        _refuse(at, wrong, "accepted must lie in 1 .. 1 + drafts, and be 1 for a new row", accepted=a, most=most)
        _refuse(at, (held != _NONE) & (begin == 0), "a row that starts anew must be dropped first", column=held)
        previous = np.where(held == _NONE, (begin - 1) // self.block_size, held)  # of no token: column -1, none
        current = (begin + count - 1) // self.block_size
        copied = (previous != _NONE) & (previous != current)
        self._column[at] = current
        return StatePlan(
            "before", at[copied], previous[copied], current[copied], a[copied] - 1, np.where(copied, np.int64(1), a)
        )

    def after(self, rows: Ids, computed: Ids, scheduled: Ids, drafts: Ids, accepted: Ids) -> StatePlan:
        """What ``rows`` copy once ``accepted`` tokens of the step's ``drafts`` + 1 last ones are accepted. O(rows).

        The state at the last block edge that was reached goes to the edge's own column, where it can be published.
        computed, scheduled: as in ``before``; the last ``drafts`` of the scheduled tokens are drafts.
        """
        at, begin, count, drafted, a = self._vectors(
            rows=rows, computed=computed, scheduled=scheduled, drafts=drafts, accepted=accepted
        )
        most = np.minimum(count - 1, self.num_speculative_tokens)
        wrong = (drafted < 0) | (drafted > most)
        _refuse(at, wrong, "drafts must be behind a token that is none, as many as planned", drafts=drafted, most=most)
        _refuse(at, (a < 1) | (a > drafted + 1), "accepted must lie in 1 .. 1 + drafts", accepted=a, drafts=drafted)
        state = self._column[at]
        last = (begin + count - 1) // self.block_size
        elsewhere = "the state is not where this step leaves it: call before first"
        _refuse(at, state != last, elsewhere, column=state, wanted=last)
        certain = begin + count - drafted
        edge = (certain + a - 1) // self.block_size * self.block_size
        bias, target = edge - certain, edge // self.block_size - 1
        copied = (bias >= 0) & ((target != state) | (bias > 0))
        # an edge in column S itself is the step's very last token, so nothing accepted lies behind it
        in_place = (bias >= 0) & (target == state)
        return StatePlan(
            "after", at[copied], state[copied], target[copied], bias[copied], np.where(in_place, np.int64(1), a)
        )

    def _vectors(self, **named: Ids) -> list[Int64]:
        """int64 vectors of one length: distinct rows in range, their computed and scheduled tokens, and more."""
        vectors = [np.array(one, np.int64) for one in named.values()]
        if any(one.shape != (len(vectors[0]),) for one in vectors):
            sizes = ", ".join(f"{name} {one.shape}" for name, one in zip(named, vectors, strict=True))
            raise WorkerError(f"one number of each is needed for every row, got {sizes}")
        require_below("rows", vectors[0], self.max_num_reqs)
        if len(np.unique(vectors[0])) < len(vectors[0]):
            raise WorkerError("a row comes twice in one step: give every row once")
        at, computed, scheduled = vectors[:3]
        wrong = (computed < 0) | (scheduled < 1)
        _refuse(at, wrong, "a step needs tokens and no negative count", computed=computed, scheduled=scheduled)
        return vectors


def state_copies(plan: StatePlan, table: Int32, num_blocks: Int32) -> StateCopies:
    """The blocks of ``plan`` in one group. O(copies, and the columns behind their destinations).

    table: int32[rows, width], the group's block table; num_blocks: int32[rows], how many columns of each row mean
    anything (``BlockTable.get_numpy_array()``, ``num_blocks_per_row``). A column is gone when it is null, or when its
    block is that of a later column, too: drafts' blocks go on to later columns, and a row is only appended to.
    After the forward nothing is copied to a column that is gone: nobody keeps the state of that edge. Else it raises
    WorkerError, as for a row that is not in the table, a column beyond its row, and a null source.
    """
    row, column = plan.row, np.stack((plan.source, plan.source + plan.bias, plan.destination))
    if row.size and row.max() >= len(table):
        raise WorkerError(f"row {row.max()} is not in a block table of {len(table)} rows: size both alike")
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
    """Whether the block of (row, column) is in a later one of the row's ``held`` columns."""
    behind = np.arange(1, (held - column).max(initial=1))
    later = column[:, None] + behind
    inside = later < held[:, None]
    blocks = table[row[:, None], np.where(inside, later, 0)]
    again: Bool = (inside & (blocks == table[row, column][:, None])).any(axis=1)
    return again


def _refuse(row: Int64, wrong: Bool, why: str, **values: Int64) -> None:
    """Raise WorkerError naming the first row that is ``wrong`` and its ``values``."""
    if wrong.any():
        i = int(wrong.argmax())
        found = ", ".join(f"{name} {one[i]}" for name, one in values.items())
        raise WorkerError(f"row {row[i]}: {why} ({found})")


Kind = Literal["conv", "temporal"]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One state of a recurrent layer: ``shape`` in ``dtype``, the same bytes whatever the block's tokens.

    kind: "conv", the last inputs of a causal convolution, one column a token; "temporal", all that came before.
    columns_axis: of a conv state, which of its two dimensions are the columns: 0 for [columns, channels], 1 for
    [channels, columns]; None of a temporal state. Raises ConfigError for anything else.
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
                "a conv state has two dimensions, and columns_axis 0 or 1 says which are its columns; a temporal state "
                f"has no columns: got {self}"
            )

    @property
    def columns(self) -> int:
        """Columns of a conv state; 0 of a temporal one."""
        return 0 if self.columns_axis is None else self.shape[self.columns_axis]


def state_parts(spec: MambaSpec, columns_axis: int) -> tuple[StatePart, ...]:
    """The states of ``spec`` in the order in which they lie in a page.

    The last state is the temporal one and the others conv states; a short convolution has conv states only, linear
    attention temporal ones only. columns_axis: 0 for conv states as vLLM keeps them, 1 as transformers does.
    """
    states = parts_of(spec)
    temporal = {"short_conv": 0, "linear_attention": len(states)}.get(spec.mamba_type, 1)
    conv = len(states) - temporal
    return (
        *(StatePart(part.shape, part.dtype, "conv", columns_axis) for part in states[:conv]),
        *(StatePart(part.shape, part.dtype, "temporal") for part in states[conv:]),
    )


State = tuple[StatePart, torch.Tensor]
"""A state of one layer and the view of it, [blocks, *shape]."""


class StateCopier:
    """Copies the states of one group.

    layers: for every layer its states, in order; any number of conv and temporal ones, the layers may differ.
    null_blocks: ids below it are nobody's: 1, or the blocks of the null slab. kernels: TORCH or ``triton_kernels()``.
    Raises ConfigError for views that are not of their part's shape and dtype or that cut a temporal state into pieces,
    and for layers that have different numbers of blocks or lie on different devices.
    """

    def __init__(
        self, layers: Sequence[Sequence[State]], *, null_blocks: int = 1, kernels: CopyKernels = TORCH
    ) -> None:
        states = list(chain.from_iterable(layers))
        if not states:
            raise ConfigError("a group of recurrent layers needs at least one state")
        for part, view in states:
            if view.shape[1:] != part.shape or view.dtype != part.dtype:
                raise ConfigError(f"a view {tuple(view.shape)} of {view.dtype} is none of {part}: use its layout")
        if len({(view.shape[0], view.device) for _, view in states}) > 1:
            raise ConfigError("the layers of a group must have equally many blocks, on one device")
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
        """Of the recurrent layers of ``group``, whose pages hold what their specs say, in that order.

        columns_axis: of conv states, as ``state_parts`` has it. Raises ConfigError for a group of other layers.
        """
        planned = storage.config.groups[group]
        layers = []
        for name, spec in zip(planned.layer_names, planned.layer_specs, strict=True):
            if not isinstance(spec, MambaSpec):
                raise ConfigError(f"layer {name!r} of group {group} keeps no recurrent states: name a group of states")
            layers.append(list(zip(state_parts(spec, columns_axis), storage.views[name], strict=True)))
        return cls(layers, null_blocks=storage.config.null_blocks_of(group), kernels=kernels)

    def copy(self, copies: StateCopies) -> None:
        """Copy the states of ``copies`` in every layer. O(bytes copied); launches do not grow with rows or layers.

        Raises WorkerError, with nothing written, for blocks that do not exist or are null, for a bias that leaves no
        column of a conv state, and where one copy writes a block that another reads or writes.
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
    """The states of one kind: those in the same place of their layer are stacked together."""
    stacks: list[torch.Tensor] = []
    for place in range(max(len(layer) for layer in layers)):
        states = [layer[place] for layer in layers if place < len(layer) and layer[place][0].kind == kind]
        stacks += stack_layers([_flat(part, view) for part, view in states])
    return stacks


def _flat(part: StatePart, view: torch.Tensor) -> torch.Tensor:
    """[blocks, columns, channels] of a conv state, [blocks, elements] of a temporal one."""
    if part.columns_axis is not None:
        return view.movedim(1 + part.columns_axis, 1)
    try:
        return view.view(view.shape[0], -1)
    except RuntimeError as error:
        raise ConfigError(f"a temporal state {part.shape} does not lie in one piece: {error}") from error


def _refuse_collisions(source: Int64, destination: Int64) -> None:
    """Raise WorkerError unless every block is written once, and read by no copy but its own. O(n log n)."""
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
    """All groups of states of ``storage``; ``tables`` have applied every Step that comes here.

    num_speculative_tokens: most drafts of a row in a step; conv states have so many columns more than their kernel
    needs. columns_axis: of conv states, as ``state_parts`` has it.
    Raises ConfigError where states have no columns: in the natural layout, where they are not kept, without any.
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
                "no states in columns here: plan with layout='reference' and placement='align', or read and write "
                "states where the Step says"
            )
        self._tables = tables
        self._copiers = {
            group: StateCopier.of_group(storage, group, columns_axis=columns_axis, kernels=kernels) for group in specs
        }
        self._block_size = next(iter(specs.values())).block_size  # the layout gives all states the same
        self._columns = RowColumns(self._block_size, tables.max_num_reqs, num_speculative_tokens)
        self._accepted: Int64 = np.ones(tables.max_num_reqs, np.int64)

    def before(self, step: Step) -> Step:
        """Copies states to where the forward goes on. The Step that is left to do: one without copies of states.

        Raises WorkerError as RowColumns, state_copies and StateCopier do. O(rows * groups + bytes copied).
        """
        gone = np.concatenate((step.finished_rows, [new.row for new in step.new_rows])).astype(np.int64)
        self._columns.drop(gone)
        self._accepted[gone] = 1
        rows = step.rows
        self._follow(step, self._columns.before(rows, step.num_computed, step.num_scheduled, self._accepted[rows]))
        return replace(step, copies=tuple(copy for copy in step.copies if copy.kind != "state"))

    def blocks(self, step: Step, group: int) -> tuple[Int32, Int64]:
        """int32[R, 1 + drafts], and int64[R], from which of them the row goes on: its ``bias``.

        A row reads its temporal state from block [i, bias[i]], its conv state from the columns bias[i] .. of block
        [i, 0]. It writes one temporal state to each block, behind the last token that is no draft and behind each
        draft, and to block [i, 0] the inputs that all of them go on from. Null (0) behind the row's own columns.
        """
        ends = step.num_computed.astype(np.int64) + step.num_scheduled
        columns = (ends - 1) // self._block_size
        behind = columns[:, None] + np.arange(1 + self._columns.num_speculative_tokens)
        table = self._tables[group].get_numpy_array()
        inside = behind < self._tables[group].num_blocks_per_row[step.rows][:, None]
        blocks = table[step.rows[:, None], np.where(inside, behind, 0)]
        return np.where(inside, blocks, 0).astype(np.int32), self._accepted[step.rows] - 1

    def after(self, step: Step, accepted: Ids) -> None:
        """Behind the forward, once it is known how many of each row's last 1 + drafts tokens count: ``accepted``.

        1 for a row without drafts. Raises WorkerError as ``before`` does. O(rows * groups + bytes copied).
        """
        drafts = np.diff(step.drafts.indptr)
        self._follow(step, self._columns.after(step.rows, step.num_computed, step.num_scheduled, drafts, accepted))

    def _follow(self, step: Step, plan: StatePlan) -> None:
        for group, copier in self._copiers.items():
            table = self._tables[group]
            copier.copy(state_copies(plan, table.get_numpy_array(), table.num_blocks_per_row))
        self._accepted[step.rows] = plan.accepted
