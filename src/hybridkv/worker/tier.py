"""The host tier: blocks in host memory, and the transfers between them and the device (docs/contracts.md, 10).

    begin     reads the blocks to store, runs the copies within the tier, and writes the stores there
    load      after a Step's clearing and copies, before its forward: writes device blocks, then begins the transfers to
              and from a store (``hybridkv.worker.store``)
    finish    names the transfers that arrived, and those that failed

On a CPU every transfer ends where it begins. On a GPU one side stream runs all transfers in order, beside the forward:

    compute stream   [gather stores][moves, zeroing, copies][ forward .......... ][ next Step ..
                            |                |                                    ^ finish: which events are over?
    side stream             +-> stores ----- +-> loads ------------->

A store is gathered first, because the Step may overwrite its blocks at once. A load writes its blocks directly: no row
reads them, and no Step writes them, before the load is reported.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.arguments import instance, integer
from hybridkv.errors import ConfigError, WorkerError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.step import Float32, Int32, Step, TierCopies
from hybridkv.stores import BlockStore
from hybridkv.units import format_bytes
from hybridkv.worker.copies import ArenaBlocks, copies_before
from hybridkv.worker.pages import PagedStorage
from hybridkv.worker.store import Ended, StoreCopier, StoreForm

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]

_MOST_IN_FLIGHT: Final = 1 << 10
"""Steps after which a result has arrived or never will: more than a scheduler has in flight."""
_STORE_WAIT_S: Final = 0.01
"""Seconds that an empty Step waits for transfers of the store."""
_STAGING_BYTES: Final = 256 << 20
"""Device memory for gathered stores, chosen by hand: some blocks of states, and little beside a model."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The copies of a transfer in one class, destinations ascending. int64[n] each."""

    of: int
    source: Int64
    destination: Int64


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One transfer, in one direction."""

    number: int
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Report:
    """Transfers that ended, as the result of Step ``id`` named them; those that arrived with their seconds."""

    id: int
    arrived: dict[int, float]
    lost: list[int]


class _Lane(Protocol):
    """How transfers run on one kind of device."""

    def begin(self, stores: Sequence[_Transfer], copies: Int64) -> None:
        """Read ``stores``, run ``copies`` within the tier (int64[n, 3]: group, source, destination), write stores."""

    def load(self, loads: Sequence[_Transfer]) -> None:
        """Write device blocks."""

    def ended(self, *, wait: bool) -> list[Ended]:
        """Return each transfer that ended; once.

        With ``wait``, at least one of those that are outstanding ends first.
        """

    def settle(self) -> None:
        """Wait until no transfer reads or writes any more."""

    def barrier(self) -> Callable[[], None]:
        """Return a call that waits until the transfers issued so far no longer read or write the tier."""


class DeviceMemory(Protocol):
    """The memory of a device: a PagedStorage, or an engine's own.

    Attributes:
        config: the plan of its blocks.
        arena: uint8[config.arena_bytes] or longer.
    """

    config: KVCacheConfig
    arena: torch.Tensor


class HostTierCopier:
    """Owns the arena of the host tier, and executes the transfers of Steps.

    Call ``check``, ``begin``, ``load`` and ``finish`` once for each Step, in this order.

    Attributes:
        arena: uint8[config.arena_bytes] in host memory, zeros at first; page-locked if the device is a GPU.

    Args:
        storage: the memory of the device.
        config: the plan of the tier: the plan of ``storage`` with another number of blocks or slabs.
        store: a store behind the tier; ``None`` without one. It stays open.
        hash_block: tokens of a hash block, for marks in the store.
        form: how blocks lie in the store, if ``storage`` has views of layers; None: as they lie in the tier.
        staging_bytes: device memory for stores that are on their way. The Step waits for a transfer that finds too
            little. Not used on a CPU.

    Raises:
        ConfigError: the tier has blocks of another form than the device, the host has too little memory, or there is a
            store in the reference layout.
    """

    def __init__(
        self,
        storage: DeviceMemory,
        config: KVCacheConfig,
        *,
        store: BlockStore | None = None,
        hash_block: int = 1,
        form: StoreForm | None = None,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        instance("config", config, KVCacheConfig)
        staging_bytes = integer("staging_bytes", staging_bytes, 0)
        try:
            self.arena = torch.zeros(config.arena_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot allocate {format_bytes(config.arena_bytes)} of host memory: give the host tier less ({error})"
            ) from error
        self._config = config
        self._device, self._host = ArenaBlocks(storage.config, storage.arena), ArenaBlocks(config, self.arena)
        if config.groups != storage.config.groups or _form(self._host) != _form(self._device):
            raise ConfigError(
                "the host tier has other groups or blocks than the device: make its config from the same plan, with "
                "another number of blocks or slabs only"
            )
        self._lane: _Lane = (
            _SideStream(self._device, self._host, self.arena, staging_bytes)
            if storage.arena.device.type == "cuda"
            else _InPlace(self._device, self._host)
        )
        self._store = None
        if store is not None:
            pages = None if form is None else self._pages(instance("storage", storage, PagedStorage))
            self._store = StoreCopier(self._host, store, integer("hash_block", hash_block, 1), form=form, pages=pages)
        self._outstanding = set[int]()
        self._loads, self._unissued = list[_Transfer](), list[int]()  # of the Step between begin and load
        self._arrived, self._lost = dict[int, float](), list[int]()  # to be reported
        self._last_id, self._reports = -1, deque[_Report]()

    def check(self, step: Step) -> None:
        """Check the transfers of a Step. O(n log n) for n copies.

        Args:
            step: the Step.

        Raises:
            WorkerError: a group, block or kind is unknown; a block is null; two copies of ``stores`` or of ``loads``
                write the same bytes; the copies of a transfer are not together; or the number of a transfer is in use.
        """
        if not step.has_transfers:
            return
        if self._store is not None:
            self._store.check(step)
        elif step.spills or step.fetches:
            raise WorkerError(f"Step {step.id} has transfers of a store, and this tier has none: make it with store=")
        stores, _, loads = self._checked(step)
        begun = [one.number for one in (*stores, *loads)] + _numbers_of_store(step)
        if len({*begun}) < len(begun):
            twice = next(one for at, one in enumerate(begun) if one in begun[:at])
            raise WorkerError(f"Step {step.id}: transfer {twice} has two directions: give each direction a number")
        used = self._outstanding.intersection(begun)
        if used:
            raise WorkerError(
                f"Step {step.id}: transfer {min(used)} has begun in an earlier Step and not ended: give a new number"
            )

    def begin(self, step: Step) -> None:
        """Run the stores of a Step and its copies within the tier, before the Step changes any block of the device.

        O(bytes copied). If Steps that ran here count as failed, this waits first until no transfer reads or writes any
        more, because their blocks may have another use by now. Results of such Steps never arrived, so what they
        reported is reported again.

        Args:
            step: the Step, checked.
        """
        if step.after < self._last_id:
            self._lane.settle()
            if self._store is not None:
                self._store.settle()
        while self._reports and self._reports[-1].id > step.after:
            report = self._reports.pop()
            self._arrived, self._lost = report.arrived | self._arrived, [*report.lost, *self._lost]
        self._lost += self._unissued
        self._last_id, self._unissued, self._loads = step.id, [], []
        if not step.has_transfers:
            return
        stores, copies, loads = self._checked(step)
        later = [one.number for one in loads] + _numbers_of_store(step)
        self._loads, self._unissued = loads, [*(one.number for one in stores), *later]
        self._outstanding.update(self._unissued)
        self._lane.begin(stores, copies)
        self._unissued = later

    def load(self, step: Step) -> None:
        """Run the loads of a Step, and begin its transfers of the store. O(bytes copied).

        Call it after the Step's clearing and copies and before its forward.

        Args:
            step: the Step that ``begin`` got.
        """
        if len(step.loads):
            self._lane.load(self._loads)
        if self._store is not None and (step.spills or step.fetches):
            self._store.begin(step, self._lane.barrier())
        self._loads, self._unissued = [], []

    def settled(self, device: PagedStorage) -> PagedStorage:
        """Return the memory of the tier with the views of its layers, once no transfer writes it.

        Between Steps only: those of the store write blocks without keys, and go on.

        Args:
            device: the memory of the device.
        """
        self._lane.settle()
        return self._pages(device)

    def _pages(self, device: PagedStorage) -> PagedStorage:
        return PagedStorage(self._config, device.parts, order=device.order, arena=self.arena)

    def close(self) -> None:
        """Wait for all transfers to and from the store."""
        if self._store is not None:
            self._store.close()

    def finish(self, step: Step) -> tuple[Int32, Int32, Float32]:
        """Return the transfers that arrived, those that are lost, and the seconds of the first, since the call before.

        If the Step has no tokens and a transfer is outstanding, this waits until one ends; for those of the store at
        most 10 ms, because other requests may arrive.

        Args:
            step: the Step that ``begin`` got.

        Returns:
            Numbers as int32, in the order in which they ended, and float32.
        """
        waits = not (step.num_tokens or self._arrived or self._lost)
        ended = [] if self._store is None else self._store.ended()
        ended += self._lane.ended(wait=waits and not ended)
        if waits and not ended and self._store is not None:
            ended += self._store.ended(wait_s=_STORE_WAIT_S)
        self._arrived |= {one.number: one.seconds for one in ended if one.is_whole}
        self._lost += [one.number for one in ended if not one.is_whole]
        report = _Report(step.id, self._arrived, self._lost)
        self._arrived, self._lost = {}, []
        if report.arrived or report.lost:
            self._outstanding.difference_update(report.arrived, report.lost)
            self._reports.append(report)
        while self._reports and self._reports[0].id <= step.id - _MOST_IN_FLIGHT:
            self._reports.popleft()
        seconds = np.array([*report.arrived.values()], np.float32)
        return np.array([*report.arrived], np.int32), np.array(report.lost, np.int32), seconds

    def _checked(self, step: Step) -> tuple[list[_Transfer], Int64, list[_Transfer]]:
        """Return the stores, the copies within the tier as int64[n, 3], and the loads."""
        what = f"Step {step.id}, tier_copies"
        copies = copies_before(what, step.tier_copies)
        self._host.require(what, *copies[:, :2].T)
        self._host.require(what, *copies[:, ::2].T)
        stores = _transfers(f"Step {step.id}, stores", step.stores, self._device, self._host)
        return stores, copies, _transfers(f"Step {step.id}, loads", step.loads, self._host, self._device)


def _numbers_of_store(step: Step) -> list[int]:
    """Return the transfers to and from the store."""
    return [one.number for one in (*step.spills, *step.fetches)]


def _form(blocks: ArenaBlocks) -> tuple[object, ...]:
    """Return what the blocks of two arenas must have in common."""
    stacks = [
        (of, len(stack), stack.shape[2], stack.dtype) for of, all_of in enumerate(blocks.stacks) for stack in all_of
    ]
    return blocks.class_of.tolist(), stacks


def _transfers(what: str, copies: TierCopies, source: ArenaBlocks, destination: ArenaBlocks) -> list[_Transfer]:
    """Return the transfers of a field of a Step, in their order. Raises WorkerError for any that cannot run."""
    fields = (copies.transfer, copies.group, copies.source, copies.destination)
    if len({len(one) for one in fields}) != 1:
        raise WorkerError(
            f"{what}: transfer, group, source and destination have {', '.join(str(len(one)) for one in fields)} "
            "values: give one of each for every copy"
        )
    if not len(copies):
        return []
    number, group, read, written = (one.astype(np.int64) for one in fields)
    source.require(f"{what}, source", group, read)
    destination.require(f"{what}, destination", group, written)
    of = destination.class_of[group]
    twice = destination.overlap(group, written)
    if twice is not None:
        raise WorkerError(
            f"{what}: block {written[twice]} of group {group[twice]} has bytes that an earlier copy writes too: give "
            "each copy a destination of its own"
        )
    begins = np.flatnonzero(np.diff(number, prepend=number[0] - 1))
    numbers = number[begins].tolist()
    if len(set(numbers)) != len(numbers):
        again = next(one for i, one in enumerate(numbers) if one in numbers[:i])
        raise WorkerError(f"{what}: the copies of transfer {again} are not next to each other: put them together")
    ends = (*begins[1:].tolist(), len(number))
    return [
        _Transfer(one, tuple(_parts(of[first:end], read[first:end], written[first:end])))
        for one, first, end in zip(numbers, begins.tolist(), ends, strict=True)
    ]


def _parts(of: Int64, source: Int64, destination: Int64) -> Iterator[_Part]:
    """Yield the part of each class."""
    for number in np.unique(of).tolist():
        mine = np.flatnonzero(of == number)
        mine = mine[np.argsort(destination[mine])]
        yield _Part(number, source[mine], destination[mine])


def _pieces(
    sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], part: _Part
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (destination, source) of contiguous memory: as many blocks together as lie side by side in both."""
    read, written = part.source, part.destination
    for source, destination in zip(sources, destinations, strict=True):
        apart = (np.diff(read) != 1) | (np.diff(written) != 1)
        if any(stack.stride(1) != stack.shape[2] for stack in (source, destination)):
            apart[:] = True
        begins = (0, *(np.flatnonzero(apart) + 1).tolist())
        for begin, end in zip(begins, (*begins[1:], len(read)), strict=True):
            first, to, count = int(read[begin]), int(written[begin]), end - begin
            for layer in range(len(source)):
                yield destination[layer, to : to + count], source[layer, first : first + count]


def _pieces_of(
    transfer: _Transfer, source: ArenaBlocks, destination: ArenaBlocks
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the pieces of a transfer between two arenas."""
    for part in transfer.parts:
        yield from _pieces(source.stacks[part.of], destination.stacks[part.of], part)


class _InPlace:
    """Transfers in the memory of one host: they end where they begin."""

    def __init__(self, device: ArenaBlocks, host: ArenaBlocks) -> None:
        self._device, self._host = device, host
        self._ended = list[Ended]()

    def begin(self, stores: Sequence[_Transfer], copies: Int64) -> None:
        self._host.copy(copies)  # no copy within the tier changes a block that a store reads
        for one in stores:
            self._run(one, self._device, self._host)

    def load(self, loads: Sequence[_Transfer]) -> None:
        for one in loads:
            self._run(one, self._host, self._device)

    def ended(self, *, wait: bool) -> list[Ended]:
        del wait
        ended, self._ended = self._ended, []
        return ended

    def settle(self) -> None:
        pass

    def barrier(self) -> Callable[[], None]:
        return self.settle

    def _run(self, transfer: _Transfer, source: ArenaBlocks, destination: ArenaBlocks) -> None:
        """Copy the parts of a transfer."""
        begun, is_whole = time.perf_counter(), True
        try:
            for to, read in _pieces_of(transfer, source, destination):
                to.copy_(read)
        except RuntimeError as error:
            logger.warning("transfer %d is lost: %s", transfer.number, error)
            is_whole = False
        self._ended.append(Ended(transfer.number, is_whole, time.perf_counter() - begun))


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """Blocks of a store, gathered on the device: for each part its stacks, [layers, blocks, words] each."""

    parts: tuple[tuple[torch.Tensor, ...], ...]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class _Issued:
    """A transfer on the side stream, between two events; ``staged`` must live until the second."""

    number: int
    begin: torch.cuda.Event
    event: torch.cuda.Event
    whole: bool
    staged: _Staged | None = None


class _SideStream:
    """Transfers between a GPU and page-locked memory, on a stream of their own.

    The stream is one queue. So a store never overwrites a block of the tier that an earlier load still reads, and a
    load sees earlier stores.
    """

    def __init__(self, device: ArenaBlocks, host: ArenaBlocks, arena: torch.Tensor, staging_bytes: int) -> None:
        self._device, self._host, self._gpu = device, host, device.stacks[0][0].device
        self._stream = torch.cuda.Stream(self._gpu)  # type: ignore[no-untyped-call]  # torch's
        self._issued = deque[_Issued]()
        self._room = staging_bytes
        _lock(arena)
        # the stacks keep both arenas until then, so no copy outlives its memory
        weakref.finalize(self, _unlock, self._stream, arena.data_ptr()).atexit = False

    def begin(self, stores: Sequence[_Transfer], copies: Int64) -> None:
        staged = [self._gathered(one) for one in stores]
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        for of, (_, source, destination) in zip(self._host.class_of[copies[:, 0]], copies.tolist(), strict=True):
            self._copy_within(self._host.stacks[of], source, destination)
        for store, blocks in zip(stores, staged, strict=True):
            pieces = _pieces_of(store, self._device, self._host) if blocks is None else self._written(store, blocks)
            self._issue(store, blocks, pieces)
        if None in staged:  # read in place: the Step must not change these blocks before
            torch.cuda.current_stream(self._gpu).wait_stream(self._stream)

    def load(self, loads: Sequence[_Transfer]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        for one in loads:
            self._issue(one, None, _pieces_of(one, self._host, self._device))

    def ended(self, *, wait: bool) -> list[Ended]:
        if wait and self._issued:
            self._issued[0].event.synchronize()
        ended = list[Ended]()
        while self._issued and self._issued[0].event.query():  # type: ignore[no-untyped-call]  # torch's
            one = self._issued.popleft()
            self._room += 0 if one.staged is None else one.staged.size
            took_ms = one.begin.elapsed_time(one.event)
            ended.append(Ended(one.number, one.whole, took_ms / 1e3))
        return ended

    def settle(self) -> None:
        self._stream.synchronize()

    def barrier(self) -> Callable[[], None]:
        after: Callable[[], None] = self._stream.record_event().synchronize
        return after

    def _gathered(self, store: _Transfer) -> _Staged | None:
        """Read the blocks of a store on the compute stream; None without enough memory for them."""
        of_part = [(self._device.stacks[part.of], part.source) for part in store.parts]
        size = sum(
            stack[:, 0].numel() * stack.element_size() * len(blocks) for stacks, blocks in of_part for stack in stacks
        )
        if size > self._room:
            return None
        try:
            staged = _Staged(tuple(self._selected(*one) for one in of_part), size)
        except RuntimeError:  # out of memory
            return None
        self._room -= size
        return staged

    def _selected(self, stacks: Sequence[torch.Tensor], blocks: Int64) -> tuple[torch.Tensor, ...]:
        at = torch.from_numpy(blocks).to(self._gpu)
        return tuple(stack.index_select(1, at) for stack in stacks)

    def _written(self, store: _Transfer, staged: _Staged) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the pieces of a gathered store."""
        for part, blocks in zip(store.parts, staged.parts, strict=True):
            gathered = _Part(part.of, np.arange(len(part.source)), part.destination)
            yield from _pieces(blocks, self._host.stacks[part.of], gathered)

    def _copy_within(self, stacks: Sequence[torch.Tensor], source: int, destination: int) -> None:
        """Copy a block within the tier, through the device: only so it waits its turn in the stream."""
        read, written = (np.array([block], np.int64) for block in (source, destination))
        first = np.zeros(1, np.int64)
        with torch.cuda.stream(self._stream):
            through = [torch.empty_like(stack[:, :1], device=self._gpu) for stack in stacks]
            for to, held in _pieces(stacks, through, _Part(0, read, first)):
                to.copy_(held, non_blocking=True)
            for to, held in _pieces(through, stacks, _Part(0, first, written)):
                to.copy_(held, non_blocking=True)

    def _issue(
        self, transfer: _Transfer, staged: _Staged | None, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Append copies to the side stream."""
        whole = True
        with torch.cuda.stream(self._stream):
            begin = self._timed()
            try:
                for to, read in pieces:
                    to.copy_(read, non_blocking=True)
            except RuntimeError as error:
                logger.warning("transfer %d is lost: %s", transfer.number, error)
                whole = False
            self._issued.append(_Issued(transfer.number, begin, self._timed(), whole, staged))

    def _timed(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(self._stream)
        return event


def _lock(arena: torch.Tensor) -> None:
    """Lock the pages of host memory, so that a GPU can copy them beside its other work.

    torch's own page-locked memory is rounded up to a power of two. Raises ConfigError if the host refuses.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
    status = cudart.cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
    if int(status):
        raise ConfigError(
            f"the host cannot lock {format_bytes(arena.numel())} of memory for the GPU ({status}): give the host tier "
            "less, or raise the limit of locked memory (ulimit -l)"
        )


def _unlock(stream: torch.cuda.Stream, address: int) -> None:
    """Wait for all copies, and unlock the pages at ``address``."""
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch's
