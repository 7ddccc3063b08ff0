"""The modelled time of transfers between device, host memory and a disk.

    step begins ---- the copies of its transfers join the queue of their way, each transfer as one
    four ways        stores, loads, spills, fetches: first in first out, each at the full rate of its link
    step ends ------ its result names every transfer that has ended by then

Copies within host memory take no time. A step reads and writes device memory as fast with transfers as without. A spill
writes the blocks that the disk lacks when it begins. A fetch whose blocks were evicted meanwhile is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.step import Step, StoreTransfer
from hybridkv.stores.marks import put_mark
from hybridkv.stores.memory import Recency
from hybridkv.tiers import HostTier


class DiskModel:
    """A BlockStore of lengths: the least recently used blocks make room. Marks keep their bytes.

    Args:
        max_bytes: most bytes of all blocks.
    """

    def __init__(self, max_bytes: int) -> None:
        self._kept = Recency(max_bytes)
        self._marks: dict[bytes, bytes] = {}

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its block is kept.

        Args:
            keys: the keys.
        """
        return [key in self._kept for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read marks.

        Args:
            keys: keys of marks.
            into: a buffer for each.
        """
        for key, buffer in zip(keys, into, strict=True):
            if key in self._kept:
                buffer[:] = self._marks[key]
        return self.touch(keys)

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Write marks.

        Args:
            keys: keys of marks.
            blocks: the bytes of each.
        """
        self._marks |= {key: bytes(block) for key, block in zip(keys, blocks, strict=True)}
        return self.admit(keys, [*map(len, blocks)])

    def close(self) -> None:
        """Do nothing."""

    def admit(self, keys: Sequence[bytes], lengths: Sequence[int]) -> list[bool]:
        """Keep blocks; return which are kept. O(blocks), amortised.

        Args:
            keys: the keys.
            lengths: the bytes of each.
        """
        kept, gone = self._kept.admit(keys, lengths)
        for key in gone:
            self._marks.pop(key, None)
        return kept

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Use blocks; return which are kept.

        Args:
            keys: the keys.
        """
        kept = self.exists(keys)
        for key, is_kept in zip(keys, kept, strict=True):
            if is_kept:
                self._kept.touch(key)
        return kept


class StoreRates(NamedTuple):
    """A modelled store.

    Attributes:
        store: what it keeps.
        hash_block: tokens of a hash block.
        bytes_per_s: bytes per second of simulated time, for reads and for writes.
    """

    store: DiskModel
    hash_block: int
    bytes_per_s: float


class _Queue:
    """Transfers of one way, first in first out."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._ends = deque[tuple[float, int]]()  # (end in seconds, transfer)
        self._free_s = 0.0  # when it has moved everything

    @property
    def next_end_s(self) -> float:
        return self._ends[0][0] if self._ends else float("inf")

    def add(self, number: int, size: float, now_s: float) -> None:
        self._free_s = max(self._free_s, now_s) + size / self._bytes_per_s
        self._ends.append((self._free_s, number))

    def ended(self, now_s: float) -> list[int]:
        found = list[int]()
        while self._ends and self._ends[0][0] <= now_s:
            found.append(self._ends.popleft()[1])
        return found


class TierTransfers:
    """The transfers that have not ended, and when they end.

    Args:
        tier: the host tier whose transfers these are.
        bytes_per_s: bytes per second of simulated time in each direction; infinite if transfers take no time.
        behind: the store behind the host; ``None`` without one.

    Attributes:
        tier: the host tier.
    """

    def __init__(self, tier: HostTier, bytes_per_s: float, behind: StoreRates | None = None) -> None:
        self.tier = tier
        config = tier.device.config
        self._block_bytes = np.array([config.block_bytes_of(group) for group in range(len(config.groups))], np.int64)
        self._copies = _Queue(bytes_per_s), _Queue(bytes_per_s)
        self._behind = behind
        rate = bytes_per_s if behind is None else behind.bytes_per_s
        self._spills, self._fetches = _Queue(rate), _Queue(rate)
        self._at_store: dict[int, StoreTransfer] = {}

    def begin(self, step: Step, now_s: float) -> None:
        """Put the transfers of ``step`` at the end of their queues. O(its copies).

        Args:
            step: the step.
            now_s: when it begins, in seconds of the trace.
        """
        for queue, copies in zip(self._copies, (step.stores, step.loads), strict=True):
            if not len(copies):
                continue
            first = np.concatenate(([0], np.flatnonzero(np.diff(copies.transfer)) + 1))
            sizes = np.add.reduceat(self._block_bytes[copies.group], first)
            for number, size in zip(copies.transfer[first].tolist(), sizes.tolist(), strict=True):
                queue.add(number, size, now_s)
        if self._behind is None:
            return
        for one in step.spills:
            lacks = ~np.array(self._behind.store.touch(one.keys), np.bool_)
            self._spills.add(one.number, int(self._block_bytes[one.group[lacks]].sum()), now_s)
        for one in step.fetches:
            self._fetches.add(one.number, int(self._block_bytes[one.group].sum()), now_s)
        self._at_store |= {one.number: one for one in (*step.spills, *step.fetches)}

    @property
    def next_end_s(self) -> float | None:
        """When the next transfer ends, in seconds of the trace; ``None`` without one."""
        ends_s = min(queue.next_end_s for queue in (*self._copies, self._spills, self._fetches))
        return None if ends_s == float("inf") else ends_s

    def ended(self, now_s: float) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the transfers that arrived by ``now_s`` since the last call, and those that are lost. O(n log n).

        Args:
            now_s: when a step ends, in seconds of the trace.

        Returns:
            int32 each, in order.
        """
        arrived = [number for queue in self._copies for number in queue.ended(now_s)]
        lost = list[int]()
        for number in self._spills.ended(now_s):
            (arrived if self._spill(self._at_store.pop(number)) else lost).append(number)
        for number in self._fetches.ended(now_s):
            (arrived if self._fetch(self._at_store.pop(number)) else lost).append(number)
        return np.array(sorted(arrived), np.int32), np.array(sorted(lost), np.int32)

    def _spill(self, one: StoreTransfer) -> bool:
        if self._behind is None:
            return False
        store, hash_block, _ = self._behind
        if not all(store.admit(one.keys, self._block_bytes[one.group].tolist())):
            return False
        return put_mark(store, one.mark, one.tail, hash_block)

    def _fetch(self, one: StoreTransfer) -> bool:
        return self._behind is not None and all(self._behind.store.touch(one.keys))
