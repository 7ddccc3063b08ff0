"""WaitingByPrefix: vLLM's waiting requests, first come, first served until memory is full.

order of arrival    a   b   c   d    a fits only if a resume point is evicted, and c has the longest cached prefix
admitted            c   a   b   d    c goes first: a and b are overtaken once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from hybridkv.vllm.requests import EngineRequest

LOOKED_AT: Final = 16
"""Waiting requests that compete to be next, because each costs a look-up. With 64, hits were the same (0054)."""


class WaitingByPrefix:
    """The methods of vLLM's RequestQueue. While memory is full, the request with the longest cached prefix is next.

    Of equal prefixes, the earliest is next. Nobody overtakes requests that vLLM preempted, or could not admit in their
    turn for another reason than memory.

    Args:
        waiting: requests that wait already, in order.
        max_overtaken: how many later requests may overtake a request, at least 1.
        evicts: whether a request fits only if a resume point is evicted.
        cached_tokens: tokens of the longest cached prefix of a request.
    """

    def __init__(
        self,
        waiting: Iterable[EngineRequest],
        max_overtaken: int,
        evicts: Callable[[EngineRequest], bool],
        cached_tokens: Callable[[EngineRequest], int],
    ) -> None:
        self._order = deque(waiting)
        self._max_overtaken, self._evicts, self._cached_tokens = max_overtaken, evicts, cached_tokens
        self._overtaken = dict[str, int]()  # by request id; requests that nobody overtook have no entry
        self._next: EngineRequest | None = None  # the last choice, until others come or go

    def __bool__(self) -> bool:
        """Return whether a request waits."""
        return bool(self._order)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._order)

    def __getitem__(self, place: int) -> EngineRequest:
        """Return the request at a place in the order of arrival. O(requests)."""
        return self._order[place]

    def __iter__(self) -> Iterator[EngineRequest]:
        """Iterate over the requests in order of arrival."""
        return iter(self._order)

    def add_request(self, request: EngineRequest) -> None:
        """Add a request behind the others."""
        if len(self._order) < LOOKED_AT:
            self._next = None
        self._order.append(request)

    def prepend_request(self, request: EngineRequest) -> None:
        """Return a request to the front."""
        self._next = None
        self._order.appendleft(request)

    def prepend_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Return requests that vLLM skipped to the front, the last one first, as vLLM does."""
        self._next = None
        for request in requests:
            self._order.appendleft(request)
            self._overtaken[request.request_id] = self._max_overtaken

    def peek_request(self) -> EngineRequest:
        """Return the next request. While memory is full, O(LOOKED_AT) look-ups when others come or go, else O(1)."""
        if self._next is None:
            self._next = self._choose(self._order[0])
        return self._next

    def pop_request(self) -> EngineRequest:
        """Remove the request that ``peek_request`` returned last, and return it. O(requests).

        It may have been admitted since, so memory and cached prefixes do not count again.
        """
        request = self._next or self.peek_request()
        for earlier in self._order:
            if earlier is request:
                break
            self._overtaken[earlier.request_id] = self._overtaken.get(earlier.request_id, 0) + 1
        self.remove_request(request)
        return request

    def remove_request(self, request: EngineRequest) -> None:
        """Remove a request. O(requests)."""
        self._next = None
        self._order.remove(request)
        self._overtaken.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Remove those of ``requests`` that wait here. O(requests)."""
        self._next, gone = None, set(requests)
        self._order = deque(one for one in self._order if one not in gone)
        for request in gone:
            self._overtaken.pop(request.request_id, None)

    def _choose(self, first: EngineRequest) -> EngineRequest:
        if len(self._order) == 1 or not self._may_be_overtaken(first) or not self._evicts(first):
            return first
        chosen, most = first, self._cached_tokens(first)
        for request in islice(self._order, 1, LOOKED_AT):
            tokens = self._cached_tokens(request)
            if tokens > most:
                chosen, most = request, tokens
            if not self._may_be_overtaken(request):
                break
        return chosen

    def _may_be_overtaken(self, request: EngineRequest) -> bool:
        return not request.num_preemptions and self._overtaken.get(request.request_id, 0) < self._max_overtaken
