"""Branches of running requests: the prompt once, then each on its own.

    parent   [ computed ............ c | token c, known ]       c = known - 1, no step in flight
    child    [ shared: full blocks | copied: tail, state | token c ] ...

A parent that is forked waits for its steps in flight and stops before its last known token, so that every branch
runs that one itself; then its children are admitted with its blocks, before those that wait. Where that cannot be (no
room, the parent is gone or past), they wait in front like any other request, and find what is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from hybridkv.cache import KVCacheManager, SlotPlan
from hybridkv.request import Request, branch_id
from hybridkv.schedule.admission import admission_of, limit_tokens
from hybridkv.schedule.builder import StepBuilder
from hybridkv.schedule.limits import SchedulerLimits
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import Waiting, WaitingQueue


def branches_of(parent: Request, n: int) -> tuple[Request, ...]:
    """``n`` more requests PARENT#1, #2, ... with the parent's tokens; number k draws with the parent's seed + k."""
    first = parent.branches + 1
    parent.branches += n
    return tuple(
        parent.branch(branch_id(parent.request_id, k), parent.sampling.of_branch(k)) for k in range(first, first + n)
    )


@dataclass(slots=True)
class Family:
    """A parent and its children that wait, in order. order: when it forked; before its children did."""

    parent: Request
    order: int
    children: dict[Request, None] = field(default_factory=dict)


class Forks:
    """Children that wait for their parents. Adding and removing one is O(1)."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}  # by the parent's id
        self._parent_of: dict[Request, str] = {}
        self._forked = 0

    def __contains__(self, request_id: object) -> bool:
        """Whether the request of that id has children that wait for it."""
        return request_id in self._families

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        """Children that wait."""
        return len(self._parent_of)

    def add(self, parent: Request, children: Iterable[Request]) -> None:
        """``children`` branch off ``parent``, which waits or runs."""
        self._forked += 1
        family = self._families.setdefault(parent.request_id, Family(parent, self._forked))
        for child in children:
            family.children[child] = None
            self._parent_of[child] = parent.request_id

    def running(self, running: RunningRows) -> list[tuple[int, Request]]:
        """Requests that run and have children that wait for them, in the order in which they forked. O(running)."""
        if not self._families:
            return []
        found = [self._families[one.request_id] for one in running.requests if one.request_id in self._families]
        return sorted((family.order, family.parent) for family in found)

    def order_of(self, parent: Request) -> int | None:
        """When ``parent`` forked, None when no children wait for it."""
        family = self._families.get(parent.request_id)
        return None if family is None else family.order

    def requests(self) -> tuple[Request, ...]:
        """All children that wait."""
        return tuple(self._parent_of)

    def take(self, parent: Request) -> list[Request]:
        """The children of ``parent``, which wait for it no longer."""
        family = self._families.get(parent.request_id)
        if family is None or family.parent is not parent:
            return []
        del self._families[parent.request_id]
        for child in family.children:
            del self._parent_of[child]
        return list(family.children)

    def remove(self, child: Request) -> None:
        """``child`` ends, if it waits here."""
        parent_id = self._parent_of.pop(child, None)
        if parent_id is None:
            return
        children = self._families[parent_id].children
        del children[child]
        if not children:
            del self._families[parent_id]

    def held_rows(self, running: RunningRows) -> list[int]:
        """Rows of parents that wait for their steps in flight. O(running)."""
        return [parent.row for _, parent in self.running(running) if running.steps[parent.row]]


class Branching:
    """Moves children from ``forks`` to ``running`` and into a step, or to the front of ``waiting``.

    The only one that changes ``forks``.
    """

    def __init__(
        self,
        forks: Forks,
        cache: KVCacheManager,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        running: RunningRows,
    ) -> None:
        self._forks = forks
        self._cache = cache
        self._limits = limits
        self._waiting = waiting
        self._running = running

    def add(self, parent: Request, children: Sequence[Request]) -> None:
        """``children`` wait for ``parent``, or behind it where no blocks can be shared in part."""
        if not children:
            return
        if self._cache.placement is not None:
            self._forks.add(parent, children)
            return
        for child in children:
            self._waiting.append(child)

    def remove(self, child: Request) -> None:
        """``child`` ends, if it waits for its parent."""
        self._forks.remove(child)

    def admit(self, builder: StepBuilder, *, room: bool) -> list[tuple[Request, int]]:
        """Branch off every parent that is ready: each child admitted, and the tokens it shares.

        room: whether anybody may come in; if not, the children wait.
        """
        admitted: list[tuple[Request, int]] = []
        ready = self._forks.running(self._running)  # sorted, so it is a heap
        while ready:
            _, parent = heappop(ready)
            if self._running.steps[parent.row]:
                continue
            computed, known = parent.num_computed_tokens, parent.num_tokens
            if computed < known - 1:
                continue
            children = self._forks.take(parent)
            late: list[Request] = []
            for child in children:
                fits = room and not late and child.num_tokens == known and computed == known - 1
                if fits and self._admit_one(parent, child, builder):
                    admitted.append((child, computed))
                    if (order := self._forks.order_of(child)) is not None:
                        heappush(ready, (order, child))
                else:
                    late.append(child)
            self._wait(late)
        return admitted

    def orphan(self, parent: Request) -> None:
        """``parent`` is gone: its children wait."""
        self._wait(self._forks.take(parent))

    def _wait(self, children: list[Request]) -> None:
        self._waiting.return_to_front([self._waiting.entry(child) for child in children])

    def _admit_one(self, parent: Request, child: Request, builder: StepBuilder) -> bool:
        """Give ``child`` a row that begins as the parent's, and its one token; whether it fits."""
        cache, limits, running = self._cache, self._limits, self._running
        if not builder.budget or running.seats_taken >= limits.max_running:
            return False
        shared, tokens = cache.blocks_to_share(parent)
        plan = cache.plan_slots(
            child,
            1,
            tokens,
            shared,
            num_lookahead_tokens=limits.num_lookahead_tokens,
            num_encoder_tokens=child.num_encoder_tokens,
            admission=admission_of(cache, limits, child, alone=False),
        )
        if not isinstance(plan, SlotPlan):
            return False
        cache.commit(plan)
        child.num_computed_tokens = tokens
        entry: Waiting = self._waiting.entry(child)
        running.admit(child, limit_tokens(cache, child), entry.queue_key, last=limits.policy == "fcfs")
        builder.add_admitted(child, 1, cache.get_blocks(child.request_id), encodes=plan.encodes)
        return True
