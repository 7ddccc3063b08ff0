"""Copies of blocks, and the moves, zeroing and copies of a Step before its forward (docs/contracts.md, 10).

A copy takes all bytes of a block, in every layer of its group:

    reference   a block of a group is its page in every layer of the group; pages are in the layers' tensors
    natural     a block of a class is block_bytes of the arena in one piece, shared by all groups of the class

Copies keep their order if one depends on another. Independent copies run together:

    A -> B    level 0
    C -> D    level 0
    B -> C    level 1: reads a block that the first copy wrote, and writes a block that the second reads

Kernels work on stacked views of blocks. Torch copies them on any device, Triton in one launch:

    stack of blocks     [layers, blocks, elements]             one array of every block of every layer
    stack of columns    [layers, blocks, columns, channels]    the conv states of the same

Elements are integers of the stored width, so every bit is kept. One call is one batch. Callers make sure that no copy
of a batch writes a block that another copy reads or writes, so copies may run in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.step import Copy, Step
from hybridkv.worker.pages import PagedStorage, load_kernels

Int64 = NDArray[np.int64]

# bytes between reading and writing, chosen by hand: little of a GPU's memory, and a copy far longer than its launch
_SCRATCH_BYTES: Final = 64 << 20

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Shifts:
    """Conv states to copy, ordered by bias: columns bias .. of a source block go to columns 0 .. of a destination.

    Attributes:
        source: int64[n], blocks, on the device of the stack.
        destination: int64[n], blocks; a block may be its own destination.
        bias: int64[n], columns that are skipped.
        runs: (bias, first, end) of the copies that share a bias.
    """

    source: torch.Tensor
    destination: torch.Tensor
    bias: torch.Tensor
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, source: Int64, destination: Int64, bias: Int64, device: torch.device) -> Shifts:
        """Make the shifts of int64[n] arrays on the host. O(n log n)."""
        order = np.argsort(bias, kind="stable")
        values, first, count = np.unique(bias[order], return_index=True, return_counts=True)
        runs = zip(values.tolist(), first.tolist(), (first + count).tolist(), strict=True)
        moved = torch.from_numpy(np.stack((source[order], destination[order], bias[order]))).to(device)
        return cls(moved[0], moved[1], moved[2], tuple(runs))


@dataclass(frozen=True, slots=True)
class CopyKernels:
    """The three operations on blocks, on any stack of one device. Block numbers are int64 tensors on that device.

    Attributes:
        copy_blocks: (stack, source, destination): copy block source[i] to block destination[i], in every layer.
        shift_columns: (stack, shifts): copy conv states; the last bias columns of a destination stay unchanged.
        zero_blocks: (stack, blocks): set all bits of these blocks to 0.
    """

    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    shift_columns: Callable[[torch.Tensor, Shifts], None]
    zero_blocks: Callable[[torch.Tensor, torch.Tensor], None]


def stack_layers(views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return views [blocks, ...] as few stacks [layers, blocks, ...] over the same memory. O(layers log layers).

    Layers share a stack if shapes, strides and storage are the same and their addresses are equally far apart, in
    order. Elements become integers of the same width. Raises ConfigError for two views of one address, and for elements
    that are not 1, 2, 4 or 8 bytes wide.
    """
    alike: dict[object, list[torch.Tensor]] = {}
    for view in views:
        if view.element_size() not in _BITS:
            raise ConfigError(f"{view.dtype} has {view.element_size()} bytes: use a dtype of 1, 2, 4 or 8")
        bits = view.view(_BITS[view.element_size()])
        key = (bits.untyped_storage().data_ptr(), bits.dtype, bits.shape, bits.stride())
        alike.setdefault(key, []).append(bits)
    return tuple(stack for members in alike.values() for stack in _runs(members))


def _runs(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Stack views that differ in their address only; each stack has one distance between layers."""
    ordered = sorted(views, key=torch.Tensor.storage_offset)
    starts = [int(view.storage_offset()) for view in ordered]
    stacks, first = [], 0
    while first < len(starts):
        end, step = first + 1, 0
        while end < len(starts) and (end == first + 1 or starts[end] - starts[end - 1] == step):
            step = starts[end] - starts[end - 1]
            if not step:
                raise ConfigError("two layers have the same memory for a state: give each its own")
            end += 1
        base = ordered[first]
        stacks.append(base.as_strided((end - first, *base.shape), (step, *base.stride()), starts[first]))
        first = end
    return stacks


def _copy_blocks(stack: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy blocks, in two launches for every 64 MiB."""
    at_once = _at_once(stack)
    for first in range(0, len(source), at_once):
        part = slice(first, first + at_once)
        stack.index_copy_(1, destination[part], stack.index_select(1, source[part]))


def _shift_columns(stack: torch.Tensor, shifts: Shifts) -> None:
    """Copy conv states, in two launches for each bias and every 64 MiB.

    Reads come before writes, so a block may shift into itself.
    """
    for bias, first, end in shifts.runs:
        kept = stack[:, :, : stack.shape[2] - bias]
        shifted = stack[:, :, bias:]
        at_once = _at_once(kept)
        for begin in range(first, end, at_once):
            part = slice(begin, min(begin + at_once, end))
            kept.index_copy_(1, shifts.destination[part], shifted.index_select(1, shifts.source[part]))


def _zero_blocks(stack: torch.Tensor, blocks: torch.Tensor) -> None:
    """Zero blocks, in one launch."""
    stack.index_fill_(1, blocks, 0)


def _at_once(stack: torch.Tensor) -> int:
    """Return how many blocks fit the scratch memory, at least one."""
    block_bytes = stack[:, 0].numel() * stack.element_size()
    return max(1, _SCRATCH_BYTES // max(1, block_bytes))


TORCH: Final = CopyKernels(_copy_blocks, _shift_columns, _zero_blocks)
"""The operations in torch, for any device."""


def triton_kernels() -> CopyKernels:
    """Return the operations in Triton, one launch a call. ConfigError if Triton is not installed."""
    made: CopyKernels = load_kernels("TORCH").TRITON
    return made


def copy_kernels(device: torch.device) -> CopyKernels:
    """Return the fastest operations of a device: Triton's on a GPU if it is installed, else TORCH.

    Args:
        device: device of the blocks.
    """
    try:
        return triton_kernels() if device.type == "cuda" else TORCH
    except ConfigError:
        return TORCH


_KINDS: Final = ("move", "block", "state")
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class ArenaBlocks:
    """The blocks of an arena: which ids exist, which of them share bytes, and ordered copies between them.

    A class is a set of groups with the same blocks. In the reference layout each group counts as a class.

    Attributes:
        class_of: int64[groups], the class of each group.
        stacks: the stacks of each class, [layers, blocks, words] each.

    Args:
        config: the plan of the arena.
        arena: uint8[config.arena_bytes].
        kernels: TORCH or ``triton_kernels()``.
    """

    def __init__(self, config: KVCacheConfig, arena: torch.Tensor, kernels: CopyKernels = TORCH) -> None:
        slabs, groups = config.slabs, range(len(config.groups))
        self._kernels = kernels
        self._device = arena.device
        # requests get block ids null_blocks .. num_blocks - 1 of a group
        self._null_blocks = np.array([config.null_blocks_of(group) for group in groups])
        self._num_blocks = np.array([config.blocks_of(group) for group in groups])
        # two blocks can share bytes only if id * spacing is equal, or is in one slab for two classes (natural)
        self.class_of = np.arange(len(groups))
        if slabs is None:
            self.stacks = [_layers_of(config, arena, group) for group in groups]
            self._spacing, self._shared_bytes = np.ones(len(groups), np.int64), 1
            return
        for number, of in enumerate(slabs.classes):
            self.class_of[list(of.groups)] = number
        sizes = [(of.block_bytes, config.blocks_of(of.groups[0])) for of in slabs.classes]
        self.stacks = [stack_layers([_pages(arena, 0, size, size, blocks)]) for size, blocks in sizes]
        self._spacing, self._shared_bytes = np.array([size for size, _ in sizes]), slabs.slab_bytes

    def require(self, what: str, group: Int64, block: Int64) -> None:
        """Raise WorkerError for a group that does not exist, and for a block that is null or does not exist. O(n).

        Args:
            what: the place of the blocks, as the error begins.
            group: int64[n].
            block: int64[n].
        """
        unknown = np.flatnonzero((group < 0) | (group >= len(self.class_of)))
        if len(unknown):
            raise WorkerError(
                f"{what}: group {group[unknown[0]]} does not exist: groups are 0 .. {len(self.class_of) - 1}"
            )
        null_blocks, num_blocks = self._null_blocks[group], self._num_blocks[group]
        wrong = np.flatnonzero((block < null_blocks) | (block >= num_blocks))
        if len(wrong):
            i = wrong[0]
            raise WorkerError(
                f"{what}: block {block[i]} of group {group[i]} cannot be copied or zeroed: blocks are "
                f"{null_blocks[i]} .. {num_blocks[i] - 1}, lower ones are null"
            )

    def copy(self, copies: Int64) -> None:
        """Run copies in their order and in few batches: level by level, one class at a time. O(bytes copied).

        Args:
            copies: int64[n, 3], the group, source and destination of each.
        """
        copies = copies[copies[:, 1] != copies[:, 2]]
        if not len(copies):
            return
        of = self.class_of[copies[:, 0]]
        level = copy_levels(self._places(of, copies[:, 1:]))
        order = np.lexsort((of, level))
        of, level = of[order], level[order]
        bounds = (np.flatnonzero((np.diff(level) != 0) | (np.diff(of) != 0)) + 1).tolist()
        blocks = torch.from_numpy(copies[order, 1:].T.copy()).to(self._device)
        for first, end in zip((0, *bounds), (*bounds, len(copies)), strict=True):
            for stack in self.stacks[of[first]]:
                self._kernels.copy_blocks(stack, blocks[0, first:end], blocks[1, first:end])

    def overlap(self, group: Int64, block: Int64) -> int | None:
        """Return the index of a block that has bytes of an earlier one, or None. O(n log n).

        Args:
            group: int64[n].
            block: int64[n], blocks of these groups.
        """
        size = self._spacing[self.class_of[group]]
        first = block * size
        order = np.argsort(first, kind="stable")
        twice = np.flatnonzero(first[order[1:]] < (first + size)[order[:-1]])
        return max(order[twice[0]], order[twice[0] + 1]).item() if len(twice) else None

    def _places(self, of: Int64, blocks: Int64) -> Int64:
        """Return int64[2, n], equal if two blocks share bytes. ``of``: int64[n], classes; ``blocks``: int64[n, 2].

        If a slab passes from one class to another within a Step, blocks of both classes share its bytes. Then the whole
        slab counts as one place, so that copies within it keep their order.
        """
        place: Int64 = blocks.T * self._spacing[of]
        slab = place // self._shared_bytes
        slabs, users = np.unique(np.unique(np.stack((slab.ravel(), np.tile(of, 2))), axis=1)[0], return_counts=True)
        return np.where(np.isin(slab, slabs[users > 1]), -1 - slab, place)

    def zero(self, zero: Int64) -> None:
        """Zero blocks, in any order. O(bytes).

        Args:
            zero: int64[n, 2], the group and number of each.
        """
        of = self.class_of[zero[:, 0]]
        for number in np.unique(of).tolist():
            blocks = torch.from_numpy(np.unique(zero[of == number, 1])).to(self._device)
            for stack in self.stacks[number]:
                self._kernels.zero_blocks(stack, blocks)


class BlockCopier:
    """Moves, copies and zeroes blocks as Steps say.

    Every call checks the whole Step before it writes. The copies of one level and one class of the natural layout are
    one batch, because a block is one piece. In the reference layout each group counts as a class, with stacked
    layers.

    Args:
        storage: the memory of all groups.
        kernels: TORCH or ``triton_kernels()``.
    """

    def __init__(self, storage: PagedStorage, *, kernels: CopyKernels = TORCH) -> None:
        self._blocks = ArenaBlocks(storage.config, storage.arena, kernels)

    def check(self, step: Step) -> None:
        """Check the copies and zeroed blocks of a Step. O(copies).

        Args:
            step: the Step.

        Raises:
            WorkerError: a group, block or kind is unknown, a block is null, or the stage of a copy is not "before".
        """
        self._checked(step)

    def execute_before(self, step: Step) -> None:
        """Run the moves, the zeroing, and then the other copies of a Step before its forward. O(bytes copied).

        Args:
            step: the Step.

        Raises:
            WorkerError: as ``check``. Nothing has been written then.
        """
        copies, moved = self._checked(step)
        self._blocks.copy(copies[moved])
        self._blocks.zero(step.zero.astype(np.int64))
        self._blocks.copy(copies[~moved])

    def _checked(self, step: Step) -> tuple[Int64, NDArray[np.bool_]]:
        """Return (group, source, destination) of every copy, int64[n, 3], and which copies are moves."""
        copies = copies_before(f"Step {step.id}", step.copies)
        group, block = np.concatenate((copies[:, :2], copies[:, ::2], step.zero.astype(np.int64))).T
        self._blocks.require(f"Step {step.id}", group, block)
        return copies, np.array([one.kind == "move" for one in step.copies], np.bool_)


def copies_before(what: str, copies: Sequence[Copy]) -> Int64:
    """Return copies as int64[n, 3], the group, source and destination of each. O(n).

    Args:
        what: their place, as the error begins.
        copies: the copies.

    Raises:
        WorkerError: a kind is unknown, or a stage is not "before".
    """
    for copy in copies:
        if copy.stage != "before" or copy.kind not in _KINDS:
            raise WorkerError(
                f"{what}: {copy} must have the stage 'before', because nothing is copied after a forward, "
                f"and the kind {' or '.join(_KINDS)}"
            )
    return np.array([(one.group, one.source, one.destination) for one in copies], np.int64).reshape(-1, 3)


def copy_levels(places: Int64) -> Int64:
    """Return a level for each copy, int64[n]. Running levels one after another equals running all copies in order.

    Within a level no copy writes a place that another reads or writes; levels are as low as that allows. ``places`` is
    int64[2, n], the place that each copy reads and the place that it writes. O(n log n) if one level is enough,
    otherwise O(n) in Python.
    """
    source, destination = places
    written = np.unique(destination)
    if len(written) == len(destination) and not np.isin(source, written).any():
        return np.zeros(len(source), np.int64)
    levels = np.empty(len(source), np.int64)
    free_to_read: dict[int, int] = {}
    free_to_write: dict[int, int] = {}
    for i, (read, write) in enumerate(zip(source.tolist(), destination.tolist(), strict=True)):
        level = max(free_to_read.get(read, 0), free_to_write.get(write, 0))
        levels[i] = level
        free_to_write[read] = max(free_to_write.get(read, 0), level + 1)
        free_to_write[write] = free_to_read[write] = level + 1
    return levels


def _layers_of(config: KVCacheConfig, arena: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
    """Return the blocks of a group in all its layers as stacks, without copies. O(layers)."""
    group = config.groups[number]
    tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
    layers = [(tensors[name], spec) for name, spec in zip(group.layer_names, group.layer_specs, strict=True)]
    return stack_layers(
        [
            _pages(arena, of.offset_bytes, of.block_stride_bytes, spec.content_bytes, config.num_blocks)
            for of, spec in layers
        ]
    )


def _pages(arena: torch.Tensor, offset: int, stride: int, size: int, blocks: int) -> torch.Tensor:
    """Return [blocks, words] from byte ``offset``: blocks of ``size`` bytes, ``stride`` apart, in the widest words."""
    width, dtype = next(word for word in _WORDS if not (offset % word[0] or stride % word[0] or size % word[0]))
    words = arena[: arena.numel() // width * width].view(dtype)
    return words.as_strided((blocks, size // width), (stride // width, 1), offset // width)
