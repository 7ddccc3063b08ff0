"""The modelled time of transfers between device and host memory.

    step begins ---- the copies of its transfers join the queue of their direction, each transfer as one
    stores, loads    two queues, first in first out; each moves bytes at the full rate of the link, beside the steps
    step ends ------ its result names every transfer that has ended by then

Copies within host memory take no time. A step reads and writes device memory as fast with transfers as without.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.step import Step
from hybridkv.tiers import HostTier

_EACH_WAY: Final = 2


class HostTransfers:
    """The transfers that have not ended, and when they end.

    Args:
        tier: the host tier whose transfers these are.
        bytes_per_s: bytes per second of simulated time in each direction; infinite if transfers take no time.

    Attributes:
        tier: the host tier.
    """

    def __init__(self, tier: HostTier, bytes_per_s: float) -> None:
        self.tier = tier
        self._bytes_per_s = bytes_per_s
        config = tier.device.config
        self._block_bytes = np.array([config.block_bytes_of(group) for group in range(len(config.groups))], np.int64)
        self._queues = tuple(deque[tuple[float, int]]() for _ in range(_EACH_WAY))  # (end in seconds, transfer)
        self._free_s = [0.0] * _EACH_WAY  # when each direction has moved everything

    def begin(self, step: Step, now_s: float) -> None:
        """Put the transfers of ``step`` at the end of their queues. O(its copies).

        Args:
            step: the step.
            now_s: when it begins, in seconds of the trace.
        """
        for way, copies in enumerate((step.stores, step.loads)):
            if not len(copies):
                continue
            first = np.concatenate(([0], np.flatnonzero(np.diff(copies.transfer)) + 1))
            sizes = np.add.reduceat(self._block_bytes[copies.group], first)
            for number, size in zip(copies.transfer[first].tolist(), sizes.tolist(), strict=True):
                self._free_s[way] = max(self._free_s[way], now_s) + size / self._bytes_per_s
                self._queues[way].append((self._free_s[way], number))

    @property
    def next_end_s(self) -> float | None:
        """When the next transfer ends, in seconds of the trace; ``None`` without one."""
        return min((queue[0][0] for queue in self._queues if queue), default=None)

    def ended(self, now_s: float) -> NDArray[np.int32]:
        """Return the transfers that ended by ``now_s`` since the last call, int32[n], in order. O(n log n).

        Args:
            now_s: when a step ends, in seconds of the trace.
        """
        found = list[int]()
        for queue in self._queues:
            while queue and queue[0][0] <= now_s:
                found.append(queue.popleft()[1])
        return np.array(sorted(found), np.int32)
