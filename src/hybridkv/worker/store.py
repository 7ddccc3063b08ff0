"""Spills and fetches: blocks of the host tier that go to a store of blocks by key, or come from it, on threads.

    spill     [which keys are missing?][write these blocks][write the mark]         reads blocks that are locked
    fetch     (after the loads of its Step) [read the blocks into their places]     writes blocks of a carrier

A store keeps the blocks of a kind of groups together, because they have the same tokens, and cut into shares, so that
they do not depend on the groups of a plan or on the number of ranks (``hybridkv.worker.ranks``, docs/design/0045):

    key            share 0                    key + number of the share       other shares
    .. + 1 byte    pieces after the first, of a share that is longer than a store takes; the first one is written last

A share that is one piece of the tier is not copied on the way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import Keeps
from hybridkv.step import Step, StoreTransfer
from hybridkv.stores import BlockStore
from hybridkv.stores.marks import put_mark
from hybridkv.stores.store import MOST_PIECE_BYTES, pieces_of, share_key
from hybridkv.worker.copies import ArenaBlocks
from hybridkv.worker.pages import PagedStorage
from hybridkv.worker.ranks import Share, Split, shares_of

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

_THREADS: Final = 2
_AT_ONCE_BYTES: Final = 16 << 20
"""Bytes between the tier and the store, of one thread."""


class Ended(NamedTuple):
    """A transfer that ended: its number, whether it arrived, and the seconds that it took."""

    number: int
    is_whole: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreForm:
    """How blocks of the host tier lie in a store.

    Attributes:
        kinds: by group, the number of its kind. Blocks of one kind have one key if they have the same tokens.
        shares: by kind, the shares that this rank holds.
        counts: by kind, the shares of all ranks.
    """

    kinds: tuple[int, ...]
    shares: tuple[tuple[Share, ...], ...]
    counts: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: KVCacheConfig,
        splits: Mapping[str, Sequence[Split]],
        rank: int = 0,
        ranks: int = 1,
        whole: Collection[str] = (),
    ) -> StoreForm:
        """Return the form of the blocks of one rank.

        Kinds are numbered by their first layer, so they do not depend on the groups into which a plan deals layers.

        Args:
            config: the plan of its blocks.
            splits: how ranks share each part of a page, by layer, in the order of the model.
            rank: number of the rank, from 0.
            ranks: how many there are.
            whole: layers that each rank has whole.

        Raises:
            ConfigError: so many ranks cannot share the pages.
        """
        group_of = {name: number for number, group in enumerate(config.groups) for name in group.layer_names}
        rules, kinds, of_kind = list[tuple[object, ...]](), [0] * len(config.groups), list[dict[str, Sequence[Split]]]()
        for name, parts in splits.items():
            spec = config.groups[group_of[name]].spec
            size = 0 if spec.keeps is Keeps.STATE else spec.block_size
            rule = spec.keeps, size, spec.mask if spec.keeps is Keeps.WINDOW else None
            if rule not in rules:
                rules.append(rule)
                of_kind.append({})
            kind = kinds[group_of[name]] = rules.index(rule)
            of_kind[kind][name] = parts
        cut = [shares_of(of, rank, ranks, whole) for of in of_kind]
        return cls(tuple(kinds), tuple(shares for shares, _ in cut), tuple(count for _, count in cut))


class _Place(NamedTuple):
    """Where a share lies in the tier: for each strip its group, and uint8[blocks, ...], a view of the arena."""

    number: int
    is_own: bool
    strips: list[tuple[int, Bytes]]
    num_bytes: int


class _Rows(NamedTuple):
    """Some blocks of a share: their keys, and the block of each in each group, -1 if the transfer has none."""

    place: _Place
    keys: list[bytes]
    blocks: Mapping[int, Int64]

    def take(self, at: Sequence[int]) -> _Rows:
        return _Rows(self.place, [self.keys[i] for i in at], {group: of[at] for group, of in self.blocks.items()})

    @property
    def is_piece(self) -> bool:
        """Whether each share is one piece of the tier, so that the store can read and write it there."""
        group, view = self.place.strips[0]
        return len(self.place.strips) == 1 and view[0].flags.c_contiguous and self.blocks[group].min() >= 0

    def in_place(self) -> list[Bytes]:
        """Return the pieces of the tier, uint8[bytes] each."""
        ((group, view),) = self.place.strips
        return [view[block].reshape(-1) for block in self.blocks[group].tolist()]

    def _strips(self, memory: Sequence[Bytes]) -> Iterator[tuple[Bytes, Bytes | None]]:
        """Yield strips of memory, and the same in the tier: None for a block that the transfer lacks."""
        first = 0
        for group, view in self.place.strips:
            size = view[0].size
            for row, block in zip(memory, self.blocks[group].tolist(), strict=True):
                strip = row[first : first + size].reshape(view.shape[1:])
                yield strip, None if block < 0 else view[block]
            first += size

    def read(self, memory: Sequence[Bytes]) -> None:
        """Copy the blocks to memory, uint8[bytes] each."""
        for strip, held in self._strips(memory):
            if held is None:
                raise WorkerError("a spill lacks a block of one group that other groups of its kind have")
            strip[...] = held

    def write(self, memory: Sequence[Bytes]) -> None:
        """Copy memory to the blocks."""
        for strip, held in self._strips(memory):
            if held is not None:
                held[...] = strip


class StoreCopier:
    """Executes the spills and fetches of Steps.

    Args:
        host: the blocks of the host tier, in the natural layout.
        store: the store. Several threads call it at once.
        hash_block: tokens of a hash block.
        form: how blocks lie in the store; None: as they lie in the tier, by group.
        pages: with a form, the memory of the tier with the views of its layers.

    Raises:
        ConfigError: a block is not one piece of the arena, as in the reference layout.
    """

    def __init__(
        self,
        host: ArenaBlocks,
        store: BlockStore,
        hash_block: int,
        *,
        form: StoreForm | None = None,
        pages: PagedStorage | None = None,
    ) -> None:
        self._host = host
        self._store = store
        self._hash_block = hash_block
        if form is not None and pages is not None:
            self._kinds = np.array(form.kinds)
            self._places = [[_place(pages, share) for share in shares] for shares in form.shares]
        else:
            whole = [_bytes_of(stacks) for stacks in host.stacks]
            self._kinds = np.arange(len(host.class_of))
            self._places = [
                [_Place(0, True, [(group, whole[of])], whole[of].shape[1])]  # noqa: FBT003
                for group, of in enumerate(host.class_of)
            ]
        self._marks = any(place.is_own and not place.number for place in self._places[0])  # on one rank of all
        self._scratch, self._marking = threading.local(), threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hybridkv-store")
        self._running = deque[tuple[int, Future[Ended]]]()

    def check(self, step: Step) -> None:
        """Raise WorkerError for a transfer of blocks that do not exist, or whose number is in use.

        Args:
            step: the Step.
        """
        used = {number for number, _ in self._running}
        for one in (*step.spills, *step.fetches):
            what = f"Step {step.id}, transfer {one.number}"
            if one.number in used:
                raise WorkerError(f"{what} of the store has begun and not ended: give a new number")
            used.add(one.number)
            if not len(one.group) == len(one.block) == len(one.keys):
                raise WorkerError(
                    f"{what}: {len(one.group)} groups, {len(one.block)} blocks and {len(one.keys)} keys: give one of "
                    "each for every block"
                )
            self._host.require(what, one.group.astype(np.int64), one.block.astype(np.int64))

    def begin(self, step: Step, before: Callable[[], None]) -> None:
        """Begin the transfers of a Step, after its loads were issued.

        Args:
            step: the Step, checked.
            before: waits until the transfers of this Step and earlier ones no longer touch the tier. Called on the
                thread of each fetch.
        """
        for one in step.spills:
            self._running.append((one.number, self._threads.submit(self._timed, one.number, partial(self._spill, one))))
        for one in step.fetches:
            fetch = partial(self._fetch, one, before)
            self._running.append((one.number, self._threads.submit(self._timed, one.number, fetch)))

    def ended(self, *, wait_s: float | None = 0.0) -> list[Ended]:
        """Return each transfer that ended; once.

        Args:
            wait_s: seconds to wait for one that is outstanding; ``None``: until one ends.
        """
        if self._running and wait_s != 0:
            wait([future for _, future in self._running], wait_s, FIRST_COMPLETED)
        ended = [(number, future) for number, future in self._running if future.done()]
        if ended:
            self._running = deque(one for one in self._running if not one[1].done() or one not in ended)
        return [future.result() for _, future in ended]

    def settle(self) -> None:
        """Wait until no transfer reads or writes the tier any more."""
        wait([future for _, future in self._running])

    def close(self) -> None:
        """Wait for all transfers, and end the threads. The store stays open."""
        self._threads.shutdown()

    # -- on a thread

    def _timed(self, number: int, work: Callable[[], bool]) -> Ended:
        begun = time.perf_counter()
        return Ended(number, work(), time.perf_counter() - begun)

    def _spill(self, one: StoreTransfer) -> bool:
        try:
            mine = [rows for rows in self._rows(one) if rows.place.is_own]
            known = iter(self._store.exists([share_key(key, of.place.number) for of in mine for key in of.keys]))
            missing = [of.take([at for at, _ in enumerate(of.keys) if not next(known)]) for of in mine]
            if not all(self._write(batch) for batch in _batches(missing)):
                return False
            if not (one.mark and self._marks):
                return True
            with self._marking:  # the prompt and the output of a request often end in one hash block
                return put_mark(self._store, one.mark, one.tail, self._hash_block)
        except Exception as error:  # noqa: BLE001 - a store that fails takes nothing, and no step ends by it
            logger.warning("the store failed to take transfer %d: %r", one.number, error)
            return False

    def _fetch(self, one: StoreTransfer, before: Callable[[], None]) -> bool:
        try:
            before()
            return all(self._read(batch) for batch in _batches(self._rows(one)))
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("the store failed to give transfer %d: %r", one.number, error)
            return False

    def _write(self, batch: Sequence[_Rows]) -> bool:
        memory = self._memory(batch)
        for rows, held in zip(batch, memory, strict=True):
            if not rows.is_piece:
                rows.read(held)
        return all(self._store.put(*_pieces(batch, memory)))

    def _read(self, batch: Sequence[_Rows]) -> bool:
        memory = self._memory(batch)
        if not all(self._store.get(*_pieces(batch, memory))):
            return False
        for rows, held in zip(batch, memory, strict=True):
            if not rows.is_piece:
                rows.write(held)
        return True

    def _memory(self, batch: Sequence[_Rows]) -> list[list[Bytes]]:
        """Return memory for each share of each of some rows: of the tier, or of this thread until its next call."""
        size = sum(len(rows.keys) * rows.place.num_bytes for rows in batch if not rows.is_piece)
        scratch: Bytes | None = getattr(self._scratch, "bytes", None)
        if scratch is None or len(scratch) < size:
            scratch = self._scratch.bytes = np.empty(size, np.uint8)
        memory, first = list[list[Bytes]](), 0
        for rows in batch:
            if rows.is_piece:
                memory.append(rows.in_place())
                continue
            end = first + len(rows.keys) * rows.place.num_bytes
            memory.append(list(scratch[first:end].reshape(len(rows.keys), -1)))
            first = end
        return memory

    def _rows(self, one: StoreTransfer) -> Iterator[_Rows]:
        """Yield the shares of all blocks of a transfer that this rank holds."""
        kinds = self._kinds[one.group]
        for kind in np.unique(kinds).tolist():
            mine = np.flatnonzero(kinds == kind).tolist()
            keys = {key: number for number, key in enumerate(dict.fromkeys(one.keys[at] for at in mine))}
            blocks = {group: np.full(len(keys), -1) for group in np.flatnonzero(self._kinds == kind).tolist()}
            for at in mine:
                blocks[int(one.group[at])][keys[one.keys[at]]] = one.block[at]
            for place in self._places[kind]:
                yield _Rows(place, list(keys), blocks)


def _batches(wanted: Iterable[_Rows]) -> Iterator[list[_Rows]]:
    """Yield rows of up to 32 MiB at once, or one row."""
    batch, size = list[_Rows](), 0
    for rows in wanted:
        most = max(1, _AT_ONCE_BYTES // rows.place.num_bytes)
        for first in range(0, len(rows.keys), most):
            every = range(first, min(first + most, len(rows.keys)))
            batch.append(rows if len(every) == len(rows.keys) else rows.take(every))
            size += len(batch[-1].keys) * rows.place.num_bytes
            if size >= _AT_ONCE_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(batch: Iterable[_Rows], memory: Iterable[Sequence[Bytes]]) -> tuple[list[bytes], list[memoryview]]:
    """Return the keys and the pieces of rows in memory; the first piece of a row comes last."""
    keys, parts = list[bytes](), list[memoryview]()
    for rows, held in zip(batch, memory, strict=True):
        cuts = pieces_of(rows.place.num_bytes)
        for key, row in zip(rows.keys, held, strict=True):
            for number in range(len(cuts) - 1, -1, -1):
                first = number * MOST_PIECE_BYTES
                keys.append(share_key(key, rows.place.number) + (bytes([number]) if number else b""))
                parts.append(row.data[first : first + cuts[number]])
    return keys, parts


def _place(pages: PagedStorage, share: Share) -> _Place:
    """Return where a share lies in the memory of a tier. Strips that are equally far apart are one view."""
    groups = {name: number for number, group in enumerate(pages.config.groups) for name in group.layer_names}
    runs = list[tuple[int, list[torch.Tensor]]]()
    for layer, part, axis, first, length in share.strips:
        group, view = groups[layer], pages.views[layer][part]
        blocks = view.view(-1, pages.config.kernel_blocks_of(group), *view.shape[1:])  # a block's tokens in order
        strip = blocks.narrow(axis, first, length).view(torch.uint8)
        if runs and runs[-1][0] == group and _continues(runs[-1][1], strip):
            runs[-1][1].append(strip)
        else:
            runs.append((group, [strip]))
    stacked = [(group, _stacked(strips)) for group, strips in runs]
    return _Place(share.number, share.is_own, stacked, sum(view[0].size for _, view in stacked))


def _continues(strips: Sequence[torch.Tensor], strip: torch.Tensor) -> bool:
    """Return whether a strip lies as far after the last of some as that one after the one before."""
    last = strips[-1]
    if (last.shape, last.stride()) != (strip.shape, strip.stride()):
        return False
    return len(strips) == 1 or _step(last, strip) == _step(*strips[-2:])


def _stacked(strips: Sequence[torch.Tensor]) -> Bytes:
    """Return strips as uint8[blocks, strips, ...]."""
    first, *others = strips
    strides = first.stride(0), _step(first, others[0]) if others else 0, *first.stride()[1:]
    shape = len(first), len(strips), *first.shape[1:]
    stacked: Bytes = first.as_strided(shape, strides, first.storage_offset()).numpy()
    return stacked


def _step(one: torch.Tensor, other: torch.Tensor) -> int:
    return int(other.storage_offset() - one.storage_offset())


def _bytes_of(stacks: Sequence[torch.Tensor]) -> Bytes:
    """Return the blocks of a class as uint8[blocks, bytes], in the memory of the arena. Raises as StoreCopier does."""
    pages = [page for stack in stacks for page in stack]
    if len(pages) != 1:
        raise ConfigError("a store keeps blocks of the natural layout only: leave it out (store=, --disk, --store)")
    blocks: Bytes = pages[0].view(torch.uint8).numpy()
    return blocks
