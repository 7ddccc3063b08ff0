"""What other threads ask of a scheduler, until its owner looks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.errors import ConfigError, OwnershipError
from hybridkv.request import Request


class Arrival(NamedTuple):
    """A request that arrived, or the abort of one: of that very one, since its id may be used again by then.

    children: that branch off it.
    """

    request: Request
    abort: bool
    children: tuple[Request, ...] = ()


class Inbox:
    """Requests and aborts in order of arrival, and who is known by id.

    A request is known from its arrival until it ends; its id is in use until its blocks are back, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Arrival] = deque()
        self._num_arriving = 0
        self._known: dict[str, Request] = {}
        self._ended: set[str] = set()
        self._owner: int | None = None

    def __len__(self) -> int:
        return len(self._items)

    def claim(self) -> None:
        """The calling thread is the owner from its first call on. OwnershipError for any other one."""
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        elif self._owner != me:
            raise OwnershipError(
                "another thread drives this scheduler: only its owner may schedule, update, fail and finish; "
                "add and abort may come from anywhere"
            )

    @property
    def is_owner(self) -> bool:
        """Whether the calling thread is the owner."""
        return self._owner == threading.get_ident()

    def add(self, request: Request, children: tuple[Request, ...] = ()) -> None:
        """A request arrives, and those that branch off it. ConfigError, and none of them known, if an id is in use."""
        with self._lock:
            self._know((request, *children))
            self._items.append(Arrival(request, abort=False, children=children))
            self._num_arriving += 1 + len(children)

    def know(self, requests: Sequence[Request]) -> None:
        """``requests`` are here without having arrived. ConfigError, and none of them known, if an id is in use."""
        with self._lock:
            self._know(requests)

    def _know(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._known or request.request_id in self._ended:
                raise ConfigError(f"a request {request.request_id!r} is already here: request ids must be unique")
        self._known.update({request.request_id: request for request in requests})

    def abort(self, request_id: str) -> bool:
        """An abort arrives. False, and nothing done, for an unknown id."""
        with self._lock:
            request = self._known.get(request_id)
            if request is None:
                return False
            self._items.append(Arrival(request, abort=True))
            return True

    def take(self) -> Arrival | None:
        """The oldest item."""
        with self._lock:
            if not self._items:
                return None
            item = self._items.popleft()
            if not item.abort:
                self._num_arriving -= 1 + len(item.children)
            return item

    def find(self, request_id: str) -> Request | None:
        """The request known by ``request_id``."""
        with self._lock:
            return self._known.get(request_id)

    def end(self, request: Request) -> bool:
        """``request`` ends but may still hold blocks; whether it was known."""
        with self._lock:
            if self._known.pop(request.request_id, None) is None:
                return False
            self._ended.add(request.request_id)
            return True

    def forget(self, request: Request) -> None:
        """A request that ended holds nothing any longer: its id is free."""
        with self._lock:
            self._ended.discard(request.request_id)

    @property
    def num_arriving(self) -> int:
        """Requests that arrived and were not taken yet, their children among them."""
        return self._num_arriving

    def arriving(self) -> tuple[Request, ...]:
        """Those requests. O(items)."""
        with self._lock:
            return tuple(one for item in self._items if not item.abort for one in (item.request, *item.children))

    def known_ids(self) -> set[str]:
        """Ids of all requests known."""
        with self._lock:
            return set(self._known)
