"""Requests that wait: first come first served, or by priority."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple

from hybridkv.cache import CommonHit, KVCacheManager, Reason
from hybridkv.request import Request

QueueKey = tuple[float, float, int]
"""What requests are sorted by; unique."""

_FEW: Final = 64  # keys of entries that left: as many are never looked for


class WaitReason(StrEnum):
    """Why a request waits.

    arrived: no step was made since it came. parent: it branches off one that is not so far. seats: as many run as may.
    in_flight: steps that it was preempted in are not done. turn: those before it did not let it pass, or the step's
    tokens were spent. The others: what it lacked when it was last looked at, as Reason has it.
    """

    ARRIVED = "arrived"
    PARENT = "parent"
    SEATS = "seats"
    IN_FLIGHT = "in_flight"
    TURN = "turn"
    NO_SPACE = Reason.NO_SPACE.value
    FRAGMENTED = Reason.FRAGMENTED.value
    ADMISSION_LIMIT = Reason.ADMISSION_LIMIT.value
    PREFIX_NOT_WRITTEN = Reason.PREFIX_NOT_WRITTEN.value


class Wait(NamedTuple):
    """A request that waits, and why."""

    request: Request
    reason: WaitReason


@dataclass(slots=True)
class Waiting:
    """One waiting request.

    queue_key: its place. in_flight_steps: steps in flight that still sample for it (it was preempted meanwhile): it is
    admitted when their results are in. hit, evictions: the look-up remembered, and when it was made.
    lacked: why it did not come in when it was last looked at; None for the budget, or before.
    overtaken: admissions of requests behind it since it was refused, first at ``refused_at`` seconds.
    """

    request: Request
    queue_key: QueueKey = (0.0, 0.0, 0)
    in_flight_steps: int = 0
    hit: CommonHit | None = field(default=None, repr=False)
    evictions: int = 0
    lacked: Reason | None = None
    overtaken: int = 0
    refused_at: float | None = None


class WaitingQueue:
    """Entries in the order in which they are tried. Adding and removing are O(log waiting), amortised; finding is O(1).

    policy: "fcfs", where a preempted request returns to the front, or "priority": least
    Request.priority first, then the earliest arrival. cache: hears who waits, where that changes what it keeps.

    The order is a heap of keys. The key of an entry that leaves stays there until it comes up, or until more keys
    are of entries that left than of those that wait.
    """

    def __init__(self, policy: Literal["fcfs", "priority"] = "fcfs", cache: KVCacheManager | None = None) -> None:
        self._cache = cache if cache is not None and cache.knows_the_queue else None
        self._by_priority = policy == "priority"
        self._entries: dict[Request, Waiting] = {}
        self._at: dict[QueueKey, Waiting] = {}
        self._queue_keys: list[QueueKey] = []
        self._arrived = 0
        self._returned = 0

    def __len__(self) -> int:
        return len(self._entries)

    def in_order(self) -> Generator[Waiting]:
        """Entries in order, O(log waiting) each; to be closed when done: only then are those handed out in order again.

        Entries may leave and come meanwhile; one that comes is handed out before those left that are behind it.
        """
        seen: list[QueueKey] = []
        try:
            while self._queue_keys:
                entry = self._at.get(key := heappop(self._queue_keys))
                if entry is not None:
                    seen.append(key)
                    yield entry
        finally:
            for key in seen:
                if key in self._at:
                    heappush(self._queue_keys, key)

    def append(self, request: Request) -> None:
        """A new request."""
        self._insert(self.entry(request))

    def entry(self, request: Request) -> Waiting:
        """An entry for ``request``, which arrives now."""
        self._arrived += 1
        key = (request.priority, request.arrival_time) if self._by_priority else (0.0, 0.0)
        return Waiting(request, (*key, self._arrived))

    def return_to_front(self, entries: Sequence[Waiting]) -> None:
        """Requests that ran already, in the order they are to be admitted again; by priority, to their places."""
        for entry in reversed(entries):
            if not self._by_priority:
                self._returned -= 1
                entry.queue_key = (0.0, 0.0, self._returned)
            self._insert(entry)

    def _insert(self, entry: Waiting) -> None:
        self._entries[entry.request] = self._at[entry.queue_key] = entry
        heappush(self._queue_keys, entry.queue_key)
        if self._cache is not None:
            self._cache.expect(entry.request)

    def find(self, request: Request) -> Waiting | None:
        """The entry of ``request``, None when it does not wait."""
        return self._entries.get(request)

    def complete(self, request: Request) -> bool:
        """A step in flight has nothing more to say about ``request``; whether it waits."""
        entry = self.find(request)
        if entry is None:
            return False
        entry.in_flight_steps -= 1
        return True

    def remove(self, request: Request) -> None:
        """Take ``request`` out, if it waits."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        del self._at[entry.queue_key]
        if self._cache is not None:
            self._cache.expect_no_longer(request)
        if len(self._queue_keys) > 2 * len(self._at) + _FEW:
            self._queue_keys = [key for key in self._queue_keys if key in self._at]
            heapify(self._queue_keys)

    def untried(self) -> list[Request]:
        """Those that wait but are in no order, so that nobody would ever try them: none. O(waiting)."""
        keys = set(self._queue_keys)
        return [entry.request for key, entry in self._at.items() if key not in keys]

    def entries(self) -> list[Waiting]:
        """All that wait, in order. O(waiting * log waiting)."""
        return [self._at[key] for key in sorted(self._at)]

    def requests(self) -> tuple[Request, ...]:
        """Those requests."""
        return tuple(entry.request for entry in self.entries())
