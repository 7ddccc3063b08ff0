"""WaitingQueue: the requests that do not run yet, and all requests of a scheduler by id.

    arriving   added or aborted by any thread; the owner of the scheduler has not taken them in yet
    queued     in order: first come, first served, or by priority
    branches   children of a fork, which wait for their parent; the parent is queued or runs

A running parent of a fork waits for its steps in flight, and computes no further than before its last known token. So
each child computes that token itself. Then the children are admitted with the parent's blocks, before queued requests:

    parent   [ computed ..................... c | token c, known ]       c = known - 1, no step in flight
    child    [ shared: full blocks | copied: partial block, state | token c ] ...

If a child does not fit, or the parent was preempted, ended or computed more, its children move to the front of the
queue. From then on they are admitted like other requests and use the prefix cache.
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
"""Sort key of a queued request: priority, arrival time and a unique number. With "fcfs", only the number counts."""

_FEW: Final = 64  # chosen by hand: the heap is not rebuilt for fewer keys of entries that left


class WaitReason(StrEnum):
    """Why a request waits.

    Attributes:
        ARRIVED: no step was scheduled since it was added.
        PARENT: it is a branch of a request that is not ready for it.
        SEATS: max_running requests hold rows.
        IN_FLIGHT: it was preempted while a step in flight ran it, and the result of that step is not there yet.
        PREFIX_LOADING: more of its prefix comes up from a tier, or will after other loads.
        TURN: an earlier request did not let it pass, or the step had no tokens left.
        NO_SPACE: see Reason. This and the following members say why the last step refused it.
        FRAGMENTED: see Reason.
        ADMISSION_LIMIT: see Reason.
        PREFIX_NOT_WRITTEN: see Reason.
    """

    ARRIVED = "arrived"
    PARENT = "parent"
    SEATS = "seats"
    IN_FLIGHT = "in_flight"
    PREFIX_LOADING = "prefix_loading"
    TURN = "turn"
    NO_SPACE = Reason.NO_SPACE.value
    FRAGMENTED = Reason.FRAGMENTED.value
    ADMISSION_LIMIT = Reason.ADMISSION_LIMIT.value
    PREFIX_NOT_WRITTEN = Reason.PREFIX_NOT_WRITTEN.value


class Wait(NamedTuple):
    """A request that waits, and the reason.

    Attributes:
        request: the request.
        reason: why it waits.
    """

    request: Request
    reason: WaitReason


@dataclass(slots=True)
class Waiting:
    """The entry of one queued request.

    Attributes:
        request: the request.
        queue_key: its place in the order.
        in_flight_steps: steps in flight that ran it before it was preempted. It is admitted after their results.
        hit: its longest cached prefix at the last look-up.
        loads: whether the last step found that it waits for more of its prefix from a tier.
        lacked: why the last step refused it. Not set before the first refusal, or if the step only lacked tokens.
        overtaken: how many later requests were admitted by steps that refused it.
        refused_at: time of its first refusal in seconds.
    """

    request: Request
    queue_key: QueueKey = (0.0, 0.0, 0)
    in_flight_steps: int = 0
    hit: Hit | None = field(default=None, repr=False)
    loads: bool = False
    lacked: Reason | None = None
    overtaken: int = 0
    refused_at: float | None = None


class Arrival(NamedTuple):
    """A request to add, or a request to abort.

    An abort holds the request itself, because its id may belong to another request when the abort is taken in.

    Attributes:
        request: the request.
        abort: whether to abort the request; otherwise it is added.
        children: branches of an added request.
    """

    request: Request
    abort: bool
    children: tuple[Request, ...] = ()


@dataclass(slots=True)
class Family:
    """A parent and the children that wait for it.

    Attributes:
        parent: the request that forked.
        order: number of its first fork. A parent forks before its children, so its number is lower than theirs.
        children: the waiting children in order, as the keys of a dict.
    """

    parent: Request
    order: int
    children: dict[Request, None] = field(default_factory=dict)


class WaitingQueue:
    """The requests that do not run yet, and all requests of the scheduler by id.

    A request is known from its arrival until it ends. Its id stays in use until its blocks are freed, too.

    The order is a heap of keys, so adding and removing an entry are O(log waiting), amortised. The key of an entry that
    left stays in the heap until it comes up, or until the heap is rebuilt because it holds more keys of entries that
    left than of queued entries.

    Attributes:
        arrivals: requests and aborts that were not taken in yet, in order.
        num_arriving: number of requests in ``arrivals``, children included.
        families: parents with waiting children, by the parent's id.
    """

    def __init__(
        self,
        policy: Literal["fcfs", "priority"] = "fcfs",
        cache: KVCacheManager | None = None,
        *,
        shares_in_part: bool = False,
    ) -> None:
        """Start an empty queue.

        Args:
            policy: "fcfs" (first come, first served; a preempted request returns to the front), or "priority" (the
                least Request.priority is first, and of equal ones the earliest).
            cache: if its eviction policy ranks resume points, it learns which requests wait.
            shares_in_part: whether a branch can begin inside a block. If not, children are queued at once.
        """
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
        """Return the number of queued requests, without branches and arrivals."""
        return len(self._entries)

    @property
    def num_all(self) -> int:
        """Number of all requests that do not run: arriving, queued, or waiting for their parents."""
        return len(self._entries) + len(self._parent_of) + self.num_arriving

    @property
    def is_idle(self) -> bool:
        """Whether no request or abort arrives, and no request waits."""
        return not (self.arrivals or self._entries or self.families)

    # -- the owner, and arrivals from other threads

    def claim(self) -> None:
        """Make the first thread that calls it the owner; raise OwnershipError for any other thread."""
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        elif self._owner != me:
            raise OwnershipError(
                "another thread owns this scheduler: call only add, abort and statistics from this thread, "
                "and all other methods from the thread that first called one of them"
            )

    @property
    def is_owner(self) -> bool:
        """Whether the calling thread is the owner."""
        return self._owner == threading.get_ident()

    def arrive(self, request: Request, children: tuple[Request, ...] = ()) -> None:
        """Add ``request`` and its branches to ``arrivals``. Raise ConfigError and add no request if an id is in use."""
        with self._lock:
            self._know((request, *children))
            self.arrivals.append(Arrival(request, abort=False, children=children))
            self.num_arriving += 1 + len(children)

    def know(self, requests: Sequence[Request]) -> None:
        """Register ids of ``requests`` without ``arrivals``. Raise ConfigError and register no id if one is in use."""
        with self._lock:
            self._know(requests)

    def _know(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._known or request.request_id in self._ended:
                raise ConfigError(f"request id {request.request_id!r} is in use: give each request an id of its own")
        self._known.update({request.request_id: request for request in requests})

    def abort(self, request_id: str) -> bool:
        """Add an abort to ``arrivals``; return whether the id is known."""
        with self._lock:
            request = self._known.get(request_id)
            if request is not None:
                self.arrivals.append(Arrival(request, abort=True))
            return request is not None

    def take_arrivals(self) -> Generator[Request]:
        """Queue all arrived requests in order, and yield each known request to abort at the place of its abort."""
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
        """Return the request with this id, from its arrival until it ends."""
        return self._known.get(request_id)

    def end(self, request: Request) -> bool:
        """Record that ``request`` ended, and queue its children at the front; return whether it was known."""
        with self._lock:
            if self._known.pop(request.request_id, None) is None:
                return False
            self._ended.add(request.request_id)
        self.queue_children(request)
        return True

    def forget(self, request: Request) -> None:
        """Release the id of a request that ended and holds no blocks."""
        with self._lock:
            self._ended.discard(request.request_id)

    def arriving(self) -> tuple[Request, ...]:
        """Return the arrived requests that were not taken in yet, children included. O(arrivals)."""
        with self._lock:
            return tuple(one for item in self.arrivals if not item.abort for one in (item.request, *item.children))

    # -- in order

    def in_order(self) -> Generator[Waiting]:
        """Yield the entries in order, O(log waiting) each.

        Close the generator when you are done. Until then, any other generator yields only the entries after these.
        Entries may be added and removed meanwhile. An added entry is yielded at its place, or next if that is past.
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
        """Queue a new request."""
        self._insert(self.entry(request))

    def entry(self, request: Request) -> Waiting:
        """Return an entry for ``request``, with the place of a request that arrives now."""
        self._arrived += 1
        key = (request.priority, request.arrival_time) if self._by_priority else (0.0, 0.0)
        return Waiting(request, (*key, self._arrived))

    def return_to_front(self, entries: Sequence[Waiting]) -> None:
        """Queue ``entries`` before all others, in their order. With "priority", each keeps its own place instead."""
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
        """Count one step in flight less for a preempted ``request``; return whether it is queued."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.in_flight_steps -= 1
        return entry is not None

    def remove(self, request: Request) -> None:
        """Remove ``request`` if it is queued or waits for its parent."""
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
        """Return all queued entries in order. O(waiting * log waiting)."""
        return [self._at[key] for key in sorted(self._at)]

    # -- branches

    def add_children(self, parent: Request, children: Sequence[Request]) -> None:
        """Let ``children`` wait for ``parent``. Queue them at once if a branch cannot begin inside a block."""
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
        """Return (Family.order, parent) of each request in ``running`` with waiting children, sorted. O(running)."""
        found = [self.families[one.request_id] for one in running if one.request_id in self.families]
        return sorted((family.order, family.parent) for family in found)

    def branches(self) -> tuple[Request, ...]:
        """Return all children that wait for their parents."""
        return tuple(self._parent_of)

    def take_children(self, parent: Request) -> list[Request]:
        """Remove and return the children that wait for ``parent``."""
        family = self.families.get(parent.request_id)
        if family is None or family.parent is not parent:
            return []
        del self.families[parent.request_id]
        for child in family.children:
            del self._parent_of[child]
        return list(family.children)

    def queue_children(self, parent: Request) -> None:
        """Move the waiting children of ``parent``, which loses its row or ends, to the front of the queue."""
        if self.families:
            self.return_to_front([self.entry(child) for child in self.take_children(parent)])

    # -- invariants

    def check(self, running: Sequence[Request]) -> None:
        """Raise CacheError unless arriving, waiting and running requests are known and only running ones hold rows."""
        queued = (*self._entries, *self._parent_of)
        with self._lock:
            known = set(self._known)
        if {request.request_id for request in (*self.arriving(), *queued, *running)} != known:
            raise CacheError("the known requests differ from the requests that arrive, wait or run")
        if any(request.row >= 0 for request in queued):
            raise CacheError("a request that waits holds a row")
        keys = set(self._queue_keys)
        if untried := [entry.request for key, entry in self._at.items() if key not in keys]:
            raise CacheError(f"request {untried[0].request_id!r} waits, but its key is not in the heap")


def branches_of(parent: Request, n: int) -> tuple[Request, ...]:
    """Return ``n`` new requests PARENT#1, PARENT#2, ... with the parent's tokens.

    Their numbers continue after the parent's earlier branches. SamplingParams.of_branch gives number k its seed.
    """
    first = parent.branches + 1
    parent.branches += n
    return tuple(
        parent.branch(branch_id(parent.request_id, k), parent.sampling.of_branch(k)) for k in range(first, first + n)
    )
