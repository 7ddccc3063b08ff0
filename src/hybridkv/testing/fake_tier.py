"""The host tier of a FakeWorker: bytes of blocks that go down and come up, whole, late or never.

Until a transfer is reported, the blocks that it writes have random bytes. So a row that reads them too early, and a
prefix that is kept although its transfer was lost, read wrong content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random

import numpy as np

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.step import Int32, Step, StoreTransfer, TierCopies
from hybridkv.stores import BlockStore
from hybridkv.stores.marks import put_mark

Span = tuple[int, int]
"""The first byte of a part of a block, and the number of its bytes."""


class ContentError(Exception):
    """A step read other content than the row's history, or does not fit the worker's tables or memory."""


@dataclass(frozen=True, slots=True)
class TierFaults:
    """How often transfers fail, or arrive in the result of a later Step.

    Attributes:
        lost: probability that a transfer is lost. Some of its blocks then have all of their bytes, some a half.
        late: probability that a transfer ends late, lost or not.
        most_steps: most Steps by which it is late.
        seed: seed of what happens.
    """

    lost: float = 0.0
    late: float = 0.0
    most_steps: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Arena:
    """A plan and its bytes."""

    config: KVCacheConfig
    storage: bytearray
    name: str

    def spans(self, group: int, block: int) -> list[Span]:
        """Return all bytes of a block. Raises ContentError if no request may have it."""
        config = self.config
        if not 0 <= group < len(config.groups):
            raise ContentError(f"group {group} does not exist")
        if not config.null_blocks_of(group) <= block < config.blocks_of(group):
            raise ContentError(f"block {block} of group {group} is no block of the {self.name} that requests may use")
        if config.slabs is not None:
            size = config.block_bytes_of(group)
            return [(block * size, size)]
        tensors = {name: tensor for tensor in config.tensors for name in tensor.shared_by}
        of = config.groups[group]
        return [
            (tensors[name].offset_bytes + block * tensors[name].block_stride_bytes, spec.content_bytes)
            for name, spec in zip(of.layer_names, of.layer_specs, strict=True)
        ]

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes there."""
        return [bytes(self.storage[first : first + size]) for first, size in spans]

    def write(self, spans: Sequence[Span], parts: Sequence[bytes]) -> None:
        """Put bytes there."""
        for (first, size), part in zip(spans, parts, strict=True):
            self.storage[first : first + size] = part


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """A transfer that is not reported. ``blocks``: where each block goes, and its bytes when the transfer began."""

    number: int
    target: _Arena
    blocks: list[tuple[list[Span], list[bytes]]]
    whole: bool
    began: int
    due: int

    @property
    def spans(self) -> list[Span]:
        """All bytes that the transfer writes."""
        return [span for spans, _ in self.blocks for span in spans]


@dataclass(frozen=True, slots=True, eq=False)
class _StoreWork:
    """A spill or a fetch that is not reported. Its blocks are read or written when it ends."""

    of: StoreTransfer
    blocks: list[list[Span]]
    fetches: bool
    whole: bool
    due: int

    @property
    def spans(self) -> list[Span]:
        """All bytes that the transfer reads or writes."""
        return [span for spans in self.blocks for span in spans]


class FakeTier:
    """Executes the transfers of Steps on bytes. Call ``begin``, ``load`` and ``finish`` once for each Step.

    Args:
        config: the config of the device's plan.
        device: the bytes of the device's arena.
        tier: the config of the host tier.
        faults: which transfers fail or are late; none by default.
        store: the store behind the host; ``None`` without one.
        hash_block: tokens of a hash block, for marks in the store.

    Attributes:
        storage: the bytes of the host's arena, random at the start.
        stored: blocks that were copied to the host.
        loaded: blocks that were copied to the device.
        moved: blocks that were copied within the host.
        spilled: blocks that went to the store.
        fetched: blocks that came from the store.

    Raises:
        ConfigError: the tier has other groups than the device.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        device: bytearray,
        tier: KVCacheConfig,
        faults: TierFaults | None = None,
        *,
        store: BlockStore | None = None,
        hash_block: int = 1,
    ) -> None:
        if config.groups != tier.groups or (config.slabs is None) != (tier.slabs is None):
            raise ConfigError("the host tier has other groups than the device: make its config from the same plan")
        self._faults = TierFaults() if faults is None else faults
        self._random = Random(self._faults.seed)  # noqa: S311 - of a test
        self.storage = bytearray(self._random.randbytes(tier.arena_bytes))
        self._device, self._host = _Arena(config, device, "device"), _Arena(tier, self.storage, "host tier")
        self.stored = self.loaded = self.moved = self.spilled = self.fetched = 0
        self._store, self._hash_block = store, hash_block
        self._outstanding, self._store_work = list[_Transfer](), list[_StoreWork]()
        self._ended, self._reports = list[tuple[int, bool]](), list[tuple[int, list[tuple[int, bool]]]]()
        self._last_id, self._steps = -1, 0

    def begin(self, step: Step) -> None:
        """Read the stores, run the copies within the tier, and write the stores. O(bytes).

        If Steps that ran here count as failed, all outstanding transfers end first, and what results of these Steps
        named is named again.

        Args:
            step: the Step; it has changed no block yet.

        Raises:
            ContentError: a block does not exist or is written twice, or an outstanding transfer writes it.
        """
        if step.after < self._last_id:
            for one in self._outstanding:
                self._end(one)
            for work in self._store_work:
                self._end_store_work(work)
            self._outstanding, self._store_work = [], []
            again = [ended for number, report in self._reports if number > step.after for ended in report]
            self._reports = [report for report in self._reports if report[0] <= step.after]
            self._ended = again + self._ended
        self._last_id = step.id
        self._refuse_changes(step)
        stores = list(self._read(step.stores, self._device, self._host))
        for copy in step.tier_copies:
            source, destination = (self._host.spans(copy.group, block) for block in (copy.source, copy.destination))
            self._refuse(self._host, source + destination)
            self._refuse_writes(destination)
            self._host.write(destination, self._host.read(source))
        self._issue(stores)
        self.stored += len(step.stores)
        self.moved += len(step.tier_copies)

    def load(self, step: Step) -> None:
        """Run the loads, after the clearing and copies of a Step and before its forward. O(bytes).

        Args:
            step: the Step that ``begin`` got.

        Raises:
            ContentError: as ``begin``.
        """
        self._issue(list(self._read(step.loads, self._host, self._device)))
        self.loaded += len(step.loads)
        read = zip(step.loads.group.tolist(), step.loads.source.tolist(), strict=True)
        loaded = [span for one in read for span in self._host.spans(*one)]
        for of, fetches in (*((one, False) for one in step.spills), *((one, True) for one in step.fetches)):
            work = self._begin_store_work(of, fetches=fetches)
            if fetches and _touch(loaded, work.spans):
                raise ContentError(f"fetch {of.number} gets blocks that a load of step {step.id} reads")

    def finish(self) -> tuple[Int32, Int32]:
        """Return the transfers that arrived and those that are lost, after the forward of a Step. O(bytes)."""
        self._steps += 1
        ended = [one for one in self._outstanding if one.due <= self._steps]
        self._outstanding = [one for one in self._outstanding if one.due > self._steps]
        for one in ended:
            self._end(one)
        over = [work for work in self._store_work if work.due <= self._steps]
        self._store_work = [work for work in self._store_work if work.due > self._steps]
        for work in over:
            self._end_store_work(work)
        report, self._ended = self._ended, []
        self._reports.append((self._last_id, report))
        arrived, lost = ([number for number, is_whole in report if is_whole is whole] for whole in (True, False))
        return np.array(arrived, np.int32), np.array(lost, np.int32)

    def _read(self, copies: TierCopies, source: _Arena, target: _Arena) -> Iterator[_Transfer]:
        """Yield the transfers of ``copies`` with the bytes that they copy."""
        columns = (copies.transfer.tolist(), copies.group.tolist(), copies.source.tolist(), copies.destination.tolist())
        written = list[Span]()
        seen = {one.number for one in self._outstanding}
        for number, all_of in groupby(zip(*columns, strict=True), key=lambda copy: copy[0]):
            if number in seen:
                raise ContentError(f"transfer {number} is outstanding, or its copies are not next to each other")
            seen.add(number)
            blocks = []
            for _, group, read, to in all_of:
                spans, held = target.spans(group, to), source.spans(group, read)
                if _touch(spans, written):
                    raise ContentError(f"block {to} of group {group} on the {target.name} is written twice")
                self._refuse(source, held)
                self._refuse(target, spans)
                if target is self._host:
                    self._refuse_writes(spans)
                written += spans
                blocks.append((spans, source.read(held)))
            yield _Transfer(number, target, blocks, self._is_whole(), self._last_id, self._due())

    def _is_whole(self) -> bool:
        """Return whether a transfer that begins now will arrive."""
        return self._random.random() >= self._faults.lost

    def _due(self) -> int:
        """Return the step in which a transfer that begins now ends."""
        late = self._random.random() < self._faults.late
        return self._steps + 1 + (self._random.randint(1, self._faults.most_steps) if late else 0)

    def _begin_store_work(self, of: StoreTransfer, *, fetches: bool) -> _StoreWork:
        """Begin a spill, or a fetch, which leaves random bytes until it ends."""
        if self._store is None:
            raise ContentError(f"transfer {of.number} is one of a store, and the tier has none")
        if of.number in {one.number for one in self._outstanding} | {work.of.number for work in self._store_work}:
            raise ContentError(f"transfer {of.number} is outstanding")
        blocks = [self._host.spans(*one) for one in zip(of.group.tolist(), of.block.tolist(), strict=True)]
        work = _StoreWork(of, blocks, fetches, self._is_whole(), self._due())
        self._refuse(self._host, work.spans)
        if fetches:
            self._refuse_writes(work.spans)
            self._host.write(work.spans, [self._random.randbytes(size) for _, size in work.spans])
        self._store_work.append(work)
        return work

    def _end_store_work(self, work: _StoreWork) -> None:
        """Move the bytes of a spill or a fetch: all, or some if it is lost."""
        if self._store is None:
            return
        arrived = self._get(self._store, work) if work.fetches else self._put_under_keys(self._store, work)
        self._ended.append((work.of.number, arrived))

    def _get(self, store: BlockStore, work: _StoreWork) -> bool:
        whole = work.whole
        for key, spans in zip(work.of.keys, work.blocks, strict=True):
            for first, size in spans:
                block = bytearray(size)
                if self._random.random() < 0.5 and not work.whole:
                    continue
                if store.get([key], [memoryview(block)])[0]:
                    self._host.write([(first, size)], [bytes(block)])
                else:
                    whole = False
        self.fetched += len(work.blocks) if whole else 0
        return whole

    def _put_under_keys(self, store: BlockStore, work: _StoreWork) -> bool:
        for key, spans in zip(work.of.keys, work.blocks, strict=True):
            if not work.whole and self._random.random() < 0.5:
                return False
            if not store.exists([key])[0] and not store.put([key], [memoryview(b"".join(self._host.read(spans)))])[0]:
                return False
        self.spilled += len(work.blocks)
        return work.whole and put_mark(store, work.of.mark, work.of.tail, self._hash_block)

    def _issue(self, transfers: Sequence[_Transfer]) -> None:
        """Begin transfers; those that end in this Step write their bytes at once, others leave random bytes."""
        self._outstanding += transfers
        for one in transfers:
            if self._is_in_place(one):
                self._put(one)
            else:
                one.target.write(one.spans, [self._random.randbytes(size) for _, size in one.spans])

    def _is_in_place(self, one: _Transfer) -> bool:
        """Return whether an outstanding transfer began in this Step and ends in it, whole."""
        return one.whole and one.due == self._steps + 1 and one.began == self._last_id

    def _end(self, one: _Transfer) -> None:
        """Write what a transfer leaves."""
        self._put(one)
        self._ended.append((one.number, one.whole))

    def _put(self, one: _Transfer) -> None:
        for spans, parts in one.blocks:
            left = 1.0 if one.whole else self._random.choice((0.0, 0.5, 1.0))
            for (first, size), part in zip(spans, parts, strict=True):
                right = int(size * left)
                one.target.write([(first, size)], [part[:right] + self._random.randbytes(size - right)])

    def _refuse_changes(self, step: Step) -> None:
        """Raise ContentError if the Step clears, reads or writes a block that a load is writing."""
        if not self._outstanding:
            return
        blocks = [tuple(pair) for pair in step.zero.tolist()]
        blocks += [(copy.group, block) for copy in step.copies for block in (copy.source, copy.destination)]
        for group, block in blocks:
            self._refuse(self._device, self._device.spans(group, block))

    def _refuse(self, arena: _Arena, spans: Sequence[Span]) -> None:
        """Raise ContentError if an outstanding transfer has yet to write any of the bytes."""
        for one in self._outstanding:
            if one.target is arena and not self._is_in_place(one) and _touch(spans, one.spans):
                raise ContentError(f"bytes {spans[0]} of the {arena.name} are used while transfer {one.number} runs")
        for work in self._store_work:
            if arena is self._host and work.fetches and _touch(spans, work.spans):
                raise ContentError(f"bytes {spans[0]} of the {arena.name} are used while fetch {work.of.number} runs")

    def _refuse_writes(self, spans: Sequence[Span]) -> None:
        """Raise ContentError if an outstanding spill has yet to read any of the bytes."""
        for work in self._store_work:
            if not work.fetches and _touch(spans, work.spans):
                raise ContentError(f"bytes {spans[0]} of the host tier are written while spill {work.of.number} runs")


def _touch(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Return whether any byte is in both."""
    return any(a < b + other and b < a + size for a, size in some for b, other in others)
