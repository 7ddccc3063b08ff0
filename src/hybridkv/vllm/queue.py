"""WaitingByPrefix: vLLM's waiting requests, first come, first served until memory is full.

order of arrival    a   b   c   d    a fits only if a resume point is evicted, and c has the longest cached prefix
admitted            c   a   b   d    c goes first: a and b are overtaken once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import Final, Protocol

from hybridkv.vllm.requests import EngineRequest

LOOKED_AT: Final = 16
"""Waiting requests that compete to be next, because each costs a look-up. With 64, hits were the same (0054)."""


class Queued(EngineRequest, Protocol):
    """vLLM's request, with its status."""

    status: Enum


class WaitingByPrefix:
    """The methods of vLLM's RequestQueue. While memory is full, the request with the longest cached prefix is next.

    Of equal prefixes, the earliest is next. Requests that vLLM preempted, or that are not ready, are not overtaken, and
    overtake nobody.

    Args:
        waiting: requests that wait already, in order.
        max_overtaken: how many later requests may overtake a request, at least 1.
        evicts: whether a request fits only if a resume point is evicted.
        cached_tokens: tokens of the longest cached prefix of a request.
    """

    def __init__(
        self,
        waiting: Iterable[Queued],
        max_overtaken: int,
        evicts: Callable[[Queued], bool],
        cached_tokens: Callable[[Queued], int],
    ) -> None:
        self._order = deque(waiting)
        self._max_overtaken, self._evicts, self._cached_tokens = max_overtaken, evicts, cached_tokens
        self._overtaken = dict[str, int]()  # by request id; requests that nobody overtook have no entry
        self._next: Queued | None = None  # until the first LOOKED_AT requests change

    def __bool__(self) -> bool:
        """Return whether a request waits."""
        return bool(self._order)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._order)

    def __iter__(self) -> Iterator[Queued]:
        """Iterate over the requests in order of arrival."""
        return iter(self._order)

    def add_request(self, request: Queued) -> None:
        """Add a request behind the others."""
        if len(self._order) < LOOKED_AT:
            self._next = None
        self._order.append(request)

    def prepend_request(self, request: Queued) -> None:
        """Return a request to the front."""
        self._next = None
        self._order.appendleft(request)

    def prepend_requests(self, requests: Iterable[Queued]) -> None:
        """Return requests to the front, the last one first, as vLLM does."""
        self._next = None
        self._order.extendleft(requests)

    def peek_request(self) -> Queued:
        """Return the next request. While memory is full, O(LOOKED_AT) look-ups whenever others come or go."""
        if self._next is not None:
            return self._next
        self._next = first = self._order[0]
        if len(self._order) > 1 and self._may_be_overtaken(first) and self._evicts(first):
            most = self._cached_tokens(first)
            for request in islice(self._order, 1, LOOKED_AT):
                if request.status.name == "WAITING":
                    tokens = self._cached_tokens(request)
                    if tokens > most:
                        self._next, most = request, tokens
                if not self._may_be_overtaken(request):
                    break
        return self._next

    def pop_request(self) -> Queued:
        """Remove the next request, and return it. O(requests)."""
        request = self.peek_request()
        for earlier in self._order:
            if earlier is request:
                break
            self._overtaken[earlier.request_id] = self._overtaken.get(earlier.request_id, 0) + 1
        self.remove_request(request)
        return request

    def remove_request(self, request: Queued) -> None:
        """Remove a request. O(requests)."""
        self._next = None
        self._order.remove(request)
        self._overtaken.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[Queued]) -> None:
        """Remove those of ``requests`` that wait here. O(requests)."""
        self._next, gone = None, set(requests)
        self._order = deque(one for one in self._order if one not in gone)
        for request in gone:
            self._overtaken.pop(request.request_id, None)

    def _may_be_overtaken(self, request: Queued) -> bool:
        return request.status.name == "WAITING" and self._overtaken.get(request.request_id, 0) < self._max_overtaken
