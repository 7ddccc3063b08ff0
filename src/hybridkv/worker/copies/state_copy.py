"""Executes copies of recurrent states: all layers of a group and all rows of a step at once.

RowColumns.before -> StatePlan -> state_copies -> StateCopier.copy -> forward -> RowColumns.after -> ... -> copy
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.specs import MambaSpec
from hybridkv.worker.copies.copy_kernels import TORCH, CopyKernels, Shifts, stack_layers
from hybridkv.worker.copies.state_parts import StatePart, state_parts
from hybridkv.worker.copies.state_plan import StateCopies
from hybridkv.worker.pages.storage import PagedStorage

Int64 = NDArray[np.int64]
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
