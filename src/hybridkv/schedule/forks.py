"""Branches of running requests: the prompt once, then each on its own.

    parent   [ computed ............ c | token c, known ]       c = known - 1, no step in flight
    child    [ shared: full blocks | copied: tail, state | token c ] ...

A parent that is forked waits for its steps in flight and stops before its last known token, so that every branch
runs that one itself; then its children are admitted with its blocks, before those that wait. Where that cannot be (no
room, the parent is gone or past), they wait in front like any other request, and find what is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybridkv.request import Request, branch_id
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import WaitingQueue


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
    """Children that wait for their parents, which wait or run. Adding and removing one is O(1).

    shares_in_part: whether a branch can begin inside a block; else no child waits for its parent.
    """

    def __init__(self, waiting: WaitingQueue, running: RunningRows, *, shares_in_part: bool) -> None:
        self._waiting = waiting
        self._running = running
        self._shares_in_part = shares_in_part
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

    def add(self, parent: Request, children: Sequence[Request]) -> None:
        """``children`` wait for ``parent``, or in the queue where no blocks can be shared in part."""
        if not self._shares_in_part:
            for child in children:
                self._waiting.append(child)
        elif children:
            self._forked += 1
            family = self._families.setdefault(parent.request_id, Family(parent, self._forked))
            for child in children:
                family.children[child] = None
                self._parent_of[child] = parent.request_id

    def running(self) -> list[tuple[int, Request]]:
        """Requests that run and have children that wait for them, in the order in which they forked. O(running)."""
        if not self._families:
            return []
        found = [self._families[one.request_id] for one in self._running.requests if one.request_id in self._families]
        return sorted((family.order, family.parent) for family in found)

    def held_rows(self) -> list[int]:
        """Rows of parents that wait for their steps in flight. O(running)."""
        return [parent.row for _, parent in self.running() if self._running.steps[parent.row]]

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

    def queue_children(self, parent: Request) -> None:
        """``parent`` gives up its row, or ends: its children wait in front of the queue."""
        self._waiting.return_to_front([self._waiting.entry(child) for child in self.take(parent)])

    def remove(self, child: Request) -> None:
        """``child`` ends, if it waits here."""
        parent_id = self._parent_of.pop(child, None)
        if parent_id is None:
            return
        children = self._families[parent_id].children
        del children[child]
        if not children:
            del self._families[parent_id]
