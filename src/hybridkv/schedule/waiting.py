"""Requests that wait, first come first served; a preempted one returns to the front."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hybridkv.cache import KVCacheBlocks
from hybridkv.request import Request


@dataclass(slots=True)
class Waiting:
    """One waiting request.

    unsettled: steps in flight that still sample for it (it was preempted meanwhile): it is admitted when
    their results are in. hit, hit_tokens, evictions: the look-up remembered, and when it was made.
    """

    request: Request
    unsettled: int = 0
    hit: KVCacheBlocks | None = field(default=None, repr=False)
    hit_tokens: int = 0
    evictions: int = 0


class WaitingQueue:
    """FCFS. Removal by id is O(waiting)."""

    def __init__(self) -> None:
        self._entries: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, request: Request) -> None:
        """A new request, last in line."""
        self._entries.append(Waiting(request))

    def return_to_front(self, entries: Iterable[Waiting]) -> None:
        """Requests that ran already, in the order they are to be admitted again."""
        self._entries.extendleft(reversed(list(entries)))

    def head(self) -> Waiting | None:
        """Who is next."""
        return self._entries[0] if self._entries else None

    def pop(self) -> Waiting:
        """Take the head out."""
        return self._entries.popleft()

    def find(self, request: Request) -> Waiting | None:
        """The entry of ``request``, None when it does not wait."""
        return next((entry for entry in self._entries if entry.request is request), None)

    def settle(self, request: Request) -> bool:
        """A step in flight has nothing more to say about ``request``; whether it waits."""
        entry = self.find(request)
        if entry is None:
            return False
        entry.unsettled -= 1
        return True

    def remove(self, request: Request) -> None:
        """Take ``request`` out, if it waits."""
        entry = self.find(request)
        if entry is not None:
            self._entries.remove(entry)

    def requests(self) -> tuple[Request, ...]:
        """All that wait, in order."""
        return tuple(entry.request for entry in self._entries)
