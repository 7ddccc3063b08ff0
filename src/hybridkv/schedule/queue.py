"""Requests that have not begun: they arrive, wait in order, or wait for the parent that they branch off.

    arriving   asked for by any thread, until the owner of the scheduler looks
    waiting    first come first served, or by priority
    branches   wait for their parent, which waits or runs

A forked parent that runs waits for its steps in flight and stops before its last known token, so that every branch
computes that token itself. Then its children are admitted with its blocks, before requests that wait:

    parent   [ computed ............ c | token c, known ]       c = known - 1, no step in flight
    child    [ shared: full blocks | copied: tail, state | token c ] ...

Where that is impossible (no room, or the parent has ended or gone further), children wait in front like any other
request, and find what is cached.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple

from hybridkv.cache import Hit, KVCacheManager, Reason
from hybridkv.errors import CacheError, ConfigError, OwnershipError
from hybridkv.request import Request, branch_id

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
    admitted when their results are in. hit: the look-up remembered.
    lacked: why it did not come in when it was last looked at; None for the budget, or before.
    overtaken: admissions of requests behind it since it was refused, first at ``refused_at`` seconds.
    """

    request: Request
    queue_key: QueueKey = (0.0, 0.0, 0)
    in_flight_steps: int = 0
    hit: Hit | None = field(default=None, repr=False)
    lacked: Reason | None = None
    overtaken: int = 0
    refused_at: float | None = None


class Arrival(NamedTuple):
    """A request that arrived, or the abort of one: of that very one, since its id may be used again by then.

    children: that branch off it.
    """

    request: Request
    abort: bool
    children: tuple[Request, ...] = ()


@dataclass(slots=True)
class Family:
    """A parent and its children that wait, in order. order: when it forked; before its children did."""

    parent: Request
    order: int
    children: dict[Request, None] = field(default_factory=dict)


class WaitingQueue:
    """Requests that have not begun, and all that are known by id.

    A request is known from its arrival until it ends; its id is in use until its blocks are back, too.

    policy: "fcfs", where a preempted request returns to the front, or "priority": least Request.priority first, then
    the earliest arrival. cache: hears who waits, where that changes what it keeps. shares_in_part: whether a branch can
    begin inside a block; else no child waits for its parent.

    For reading: arrivals (requests and aborts that were not taken in yet, in order), num_arriving (of requests, their
    children among them), families (parents with children that wait for them, by the parent's id).

    The order is a heap of keys: adding and removing are O(log waiting), amortised. The key of an entry that leaves
    stays there until it comes up, or until more keys are of entries that left than of those that wait.
    """

    def __init__(
        self,
        policy: Literal["fcfs", "priority"] = "fcfs",
        cache: KVCacheManager | None = None,
        *,
        shares_in_part: bool = False,
    ) -> None:
        self._cache = cache if cache is not None and cache.eviction_policy.ranks else None
        self._by_priority = policy == "priority"
        self._shares_in_part = shares_in_part
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.arrivals: deque[Arrival] = deque()
        self.num_arriving = 0
        self._known: dict[str, Request] = {}
        self._ended: set[str] = set()
        self._entries: dict[Request, Waiting] = {}
        self._at: dict[QueueKey, Waiting] = {}
        self._queue_keys: list[QueueKey] = []
        self._arrived = self._returned = self._forked = 0
        self.families: dict[str, Family] = {}
        self._parent_of: dict[Request, str] = {}

    def __len__(self) -> int:
        """Requests that wait in order."""
        return len(self._entries)

    @property
    def num_all(self) -> int:
        """All that have not begun: those that arrive, wait in order, or wait for their parents."""
        return len(self._entries) + len(self._parent_of) + self.num_arriving

    @property
    def is_idle(self) -> bool:
        """Whether nothing arrives, aborts among it, and nobody waits."""
        return not (self.arrivals or self._entries or self.families)

    # -- the owner, and what other threads ask for

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

    def arrive(self, request: Request, children: tuple[Request, ...] = ()) -> None:
        """A request arrives, and those that branch off it. ConfigError, and none of them known, if an id is in use."""
        with self._lock:
            self._know((request, *children))
            self.arrivals.append(Arrival(request, abort=False, children=children))
            self.num_arriving += 1 + len(children)

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
            if request is not None:
                self.arrivals.append(Arrival(request, abort=True))
            return request is not None

    def take_arrivals(self) -> Generator[Request]:
        """Take in what arrived, in order: requests wait from now on. Those to abort, each once it is its turn."""
        while self.arrivals:
            with self._lock:
                request, abort, children = self.arrivals.popleft()
                if not abort:
                    self.num_arriving -= 1 + len(children)
            if not abort:
                self.append(request)
                self.add_children(request, children)
            elif self.find(request.request_id) is request:
                yield request

    def find(self, request_id: str) -> Request | None:
        """The request known by ``request_id``."""
        return self._known.get(request_id)

    def end(self, request: Request) -> bool:
        """``request`` ends but may still hold blocks; whether it was known. Its children wait in front of the queue."""
        with self._lock:
            if self._known.pop(request.request_id, None) is None:
                return False
            self._ended.add(request.request_id)
        self.queue_children(request)
        return True

    def forget(self, request: Request) -> None:
        """A request that ended holds nothing any longer: its id is free."""
        with self._lock:
            self._ended.discard(request.request_id)

    def arriving(self) -> tuple[Request, ...]:
        """Requests that arrived and were not taken in yet, their children among them. O(arrivals)."""
        with self._lock:
            return tuple(one for item in self.arrivals if not item.abort for one in (item.request, *item.children))

    # -- in order

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
            self._cache.eviction_policy.expect(entry.request)

    def complete(self, request: Request) -> bool:
        """A step in flight has nothing more to say about ``request``; whether it waits in order."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.in_flight_steps -= 1
        return entry is not None

    def remove(self, request: Request) -> None:
        """Take ``request`` out, if it waits, in order or for its parent."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            del self._at[entry.queue_key]
            if self._cache is not None:
                self._cache.eviction_policy.expect_no_longer(request)
            if len(self._queue_keys) > 2 * len(self._at) + _FEW:
                self._queue_keys = [key for key in self._queue_keys if key in self._at]
                heapify(self._queue_keys)
        elif (parent_id := self._parent_of.pop(request, None)) is not None:
            children = self.families[parent_id].children
            del children[request]
            if not children:
                del self.families[parent_id]

    def entries(self) -> list[Waiting]:
        """All that wait in order. O(waiting * log waiting)."""
        return [self._at[key] for key in sorted(self._at)]

    # -- branches

    def add_children(self, parent: Request, children: Sequence[Request]) -> None:
        """``children`` wait for ``parent``, or in the queue where no blocks can be shared in part."""
        if not self._shares_in_part:
            for child in children:
                self.append(child)
        elif children:
            self._forked += 1
            family = self.families.setdefault(parent.request_id, Family(parent, self._forked))
            for child in children:
                family.children[child] = None
                self._parent_of[child] = parent.request_id

    def parents(self, running: Sequence[Request]) -> list[tuple[int, Request]]:
        """Return the requests of ``running`` with children that wait for them, in the order of their forks. O(running).

        Each comes with its place in that order.
        """
        found = [self.families[one.request_id] for one in running if one.request_id in self.families]
        return sorted((family.order, family.parent) for family in found)

    def branches(self) -> tuple[Request, ...]:
        """All children that wait for their parents."""
        return tuple(self._parent_of)

    def take_children(self, parent: Request) -> list[Request]:
        """The children of ``parent``, which wait for it no longer."""
        family = self.families.get(parent.request_id)
        if family is None or family.parent is not parent:
            return []
        del self.families[parent.request_id]
        for child in family.children:
            del self._parent_of[child]
        return list(family.children)

    def queue_children(self, parent: Request) -> None:
        """``parent`` gives up its row, or ends: its children wait in front of the queue."""
        if self.families:
            self.return_to_front([self.entry(child) for child in self.take_children(parent)])

    # -- invariants

    def check(self, running: Sequence[Request]) -> None:
        """Known are exactly the requests that arrive, wait, run or are to branch off; who waits holds no row."""
        queued = (*self._entries, *self._parent_of)
        with self._lock:
            known = set(self._known)
        if {request.request_id for request in (*self.arriving(), *queued, *running)} != known:
            raise CacheError("the requests known are not those that arrive, wait or run")
        if any(request.row >= 0 for request in queued):
            raise CacheError("a request waits and holds a row")
        keys = set(self._queue_keys)
        if untried := [entry.request for key, entry in self._at.items() if key not in keys]:
            raise CacheError(f"request {untried[0].request_id!r} waits, and nobody would try it")


def branches_of(parent: Request, n: int) -> tuple[Request, ...]:
    """``n`` more requests PARENT#1, #2, ... with the parent's tokens; number k draws with the parent's seed + k."""
    first = parent.branches + 1
    parent.branches += n
    return tuple(
        parent.branch(branch_id(parent.request_id, k), parent.sampling.of_branch(k)) for k in range(first, first + n)
    )
