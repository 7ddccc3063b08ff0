"""Spills and fetches: blocks of the host tier that go to a store of blocks by key, or come from it, on threads.

    spill     [which keys are missing?][write these blocks][write the mark]         reads blocks that are locked
    fetch     (after the loads of its Step) [read the blocks into their places]     writes blocks of a carrier

A block of the natural layout is one piece of the arena, so nothing is copied on the way. A block that is longer than a
store takes is cut into pieces. The first piece has the block's key and is written last.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.step import Step, StoreTransfer
from hybridkv.stores import BlockStore
from hybridkv.stores.marks import put_mark
from hybridkv.stores.store import MOST_PIECE_BYTES, pieces_of
from hybridkv.worker.copies import ArenaBlocks

logger = logging.getLogger(__name__)

_THREADS: Final = 2
_AT_ONCE_BYTES: Final = 64 << 20


class Ended(NamedTuple):
    """A transfer that ended: its number, whether it arrived, and the seconds that it took."""

    number: int
    is_whole: bool
    seconds: float


class StoreCopier:
    """Executes the spills and fetches of Steps.

    Args:
        host: the blocks of the host tier, in the natural layout.
        store: the store. Several threads call it at once.
        hash_block: tokens of a hash block.

    Raises:
        ConfigError: a block is not one piece of the arena, as in the reference layout.
    """

    def __init__(self, host: ArenaBlocks, store: BlockStore, hash_block: int) -> None:
        self._host = host
        self._store = store
        self._hash_block = hash_block
        self._bytes: list[NDArray[np.uint8]] = [_bytes_of(stacks) for stacks in host.stacks]
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

    @property
    def num_running(self) -> int:
        """Transfers that have not been reported."""
        return len(self._running)

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
            known = self._store.exists(one.keys)
            missing = [at for at, is_known in enumerate(known) if not is_known]
            if not all(all(self._store.put(keys, parts)) for keys, parts in self._batches(one, missing)):
                return False
            return not one.mark or put_mark(self._store, one.mark, one.tail, self._hash_block)
        except Exception as error:  # noqa: BLE001 - a store that fails takes nothing, and no step ends by it
            logger.warning("the store failed to take transfer %d: %r", one.number, error)
            return False

    def _fetch(self, one: StoreTransfer, before: Callable[[], None]) -> bool:
        try:
            before()
            return all(all(self._store.get(keys, parts)) for keys, parts in self._batches(one, range(len(one))))
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("the store failed to give transfer %d: %r", one.number, error)
            return False

    def _batches(self, one: StoreTransfer, places: Sequence[int]) -> Iterator[tuple[list[bytes], list[memoryview]]]:
        """Yield keys and pieces of the blocks at some places of a transfer, up to 64 MiB at once."""
        keys, parts, size = list[bytes](), list[memoryview](), 0
        for at in places:
            block = memoryview(self._bytes[self._host.class_of[one.group[at]]][one.block[at]])
            cuts = pieces_of(len(block))
            for number in range(len(cuts) - 1, -1, -1):
                first = number * MOST_PIECE_BYTES
                keys.append(one.keys[at] + (number.to_bytes(2, "little") if number else b""))
                parts.append(block[first : first + cuts[number]])
                size += cuts[number]
                if size >= _AT_ONCE_BYTES:
                    yield keys, parts
                    keys, parts, size = [], [], 0
        if keys:
            yield keys, parts


def _bytes_of(stacks: Sequence[torch.Tensor]) -> NDArray[np.uint8]:
    """Return the blocks of a class as uint8[blocks, bytes], in the memory of the arena. Raises as StoreCopier does."""
    pages = [page for stack in stacks for page in stack]
    if len(pages) != 1:
        raise ConfigError("a store keeps blocks of the natural layout only: leave it out (store=, --disk, --store)")
    blocks: NDArray[np.uint8] = pages[0].view(torch.uint8).numpy()
    return blocks
