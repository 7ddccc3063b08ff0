"""Branches of running requests: the prompt once, then each on its own.

    parent   [ computed ............ c | token c, known ]       c = known - 1, no step in flight
    child    [ shared: full blocks | copied: tail, state | token c ] ...

A parent that is forked waits for its steps in flight and stops before its last known token, so that every branch
runs that one itself; then its children are admitted with its blocks, before those that wait. Where that cannot be (no
room, the parent is gone or past), they wait in front like any other request, and find what is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hybridkv.cache import KVCacheManager, SlotPlan
from hybridkv.request import Request, branch_id
from hybridkv.schedule.admission import admission_of, limit_tokens
from hybridkv.schedule.draft import Draft
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


class Forks:
    """Children that wait for their parents, by the parent's id, in order."""

    def __init__(self) -> None:
        self._children: dict[str, list[Request]] = {}
        self._parents: dict[str, Request] = {}

    def __contains__(self, request_id: object) -> bool:
        """Whether the request of that id has children that wait for it."""
        return request_id in self._children

    def __iter__(self) -> Iterator[str]:
        return iter(self._children)

    def __len__(self) -> int:
        """Children that wait."""
        return sum(map(len, self._children.values()))

    def add(self, parent: Request, children: Iterable[Request]) -> None:
        """``children`` branch off ``parent``, which waits or runs."""
        self._children.setdefault(parent.request_id, []).extend(children)
        self._parents[parent.request_id] = parent

    def parents(self) -> tuple[Request, ...]:
        """Requests with children that wait for them."""
        return tuple(self._parents.values())

    def requests(self) -> tuple[Request, ...]:
        """All children that wait."""
        return tuple(child for children in self._children.values() for child in children)

    def take(self, parent: Request) -> list[Request]:
        """The children of ``parent``, which wait for it no longer."""
        if self._parents.get(parent.request_id) is not parent:
            return []
        del self._parents[parent.request_id]
        return self._children.pop(parent.request_id)

    def remove(self, child: Request) -> None:
        """``child`` ends, if it waits here."""
        for request_id, children in tuple(self._children.items()):
            if child in children:
                children.remove(child)
                if not children:
                    del self._children[request_id], self._parents[request_id]

    def held_rows(self, running: RunningRows) -> list[int]:
        """Rows of parents that wait for their steps in flight."""
        return [parent.row for parent in self._parents.values() if parent.row >= 0 and running.steps[parent.row]]


class Branching:
    """Moves children from ``forks`` to ``running`` and into the draft of a step, or to the front of ``waiting``.

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

    def admit(self, draft: Draft, *, room: bool) -> list[tuple[Request, int]]:
        """Branch off every parent that is ready: each child admitted, and the tokens it shares.

        room: whether anybody may come in; if not, the children wait.
        """
        admitted: list[tuple[Request, int]] = []
        for parent in self._forks.parents():
            if parent.row < 0 or self._running.steps[parent.row]:
                continue
            computed, known = parent.num_computed_tokens, parent.num_tokens
            if computed < known - 1:
                continue
            children = self._forks.take(parent)
            late: list[Request] = []
            for child in children:
                fits = room and not late and child.num_tokens == known and computed == known - 1
                if fits and self._admit_one(parent, child, draft):
                    admitted.append((child, computed))
                else:
                    late.append(child)
            self._wait(late)
        return admitted

    def orphan(self, parent: Request) -> None:
        """``parent`` is gone: its children wait."""
        self._wait(self._forks.take(parent))

    def _wait(self, children: list[Request]) -> None:
        self._waiting.return_to_front([self._waiting.entry(child) for child in children])

    def _admit_one(self, parent: Request, child: Request, draft: Draft) -> bool:
        """Give ``child`` a row that begins as the parent's, and its one token; whether it fits."""
        cache, limits, running = self._cache, self._limits, self._running
        if not draft.budget or running.seats_taken >= limits.max_running:
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
        running.admit(child, limit_tokens(cache, child), entry.turn, last=limits.policy == "fcfs")
        draft.add_admitted(child, 1, cache.get_blocks(child.request_id), encodes=plan.encodes)
        return True
