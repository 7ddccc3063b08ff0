"""Requests that wait: first come first served, or by priority."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridkv.cache import CommonHit
from hybridkv.request import Request

Turn = tuple[float, float, int]
"""What requests are sorted by; unique."""


@dataclass(slots=True)
class Waiting:
    """One waiting request.

    turn: its place. unsettled: steps in flight that still sample for it (it was preempted meanwhile): it is
    admitted when their results are in. hit, evictions: the look-up remembered, and when it was made.
    overtaken: admissions of requests behind it since it was refused, first at ``refused_at`` seconds.
    """

    request: Request
    turn: Turn = (0.0, 0.0, 0)
    unsettled: int = 0
    hit: CommonHit | None = field(default=None, repr=False)
    evictions: int = 0
    overtaken: int = 0
    refused_at: float | None = None


class WaitingQueue:
    """Entries in the order in which they are tried. Adding, removing and finding are O(waiting).

    policy: "fcfs", where a preempted request returns to the front, or "priority": least
    Request.priority first, then the earliest arrival.
    """

    def __init__(self, policy: Literal["fcfs", "priority"] = "fcfs") -> None:
        self._by_priority = policy == "priority"
        self._entries: list[Waiting] = []
        self._arrived = 0
        self._returned = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place: int) -> Waiting:
        return self._entries[place]

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
                entry.turn = (0.0, 0.0, self._returned)
            self._insert(entry)

    def _insert(self, entry: Waiting) -> None:
        insort(self._entries, entry, key=lambda one: one.turn)

    def pop(self, place: int) -> Waiting:
        """Take an entry out."""
        return self._entries.pop(place)

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
