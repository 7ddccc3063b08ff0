"""An eviction policy that knows the rest of the stream: an estimate of the best hits possible in a given memory.

As in Belady's algorithm, it evicts the least valuable entry, and knows the future use. A *resume point* is a prefix
with its states, windows' tails and keys, which is the unit of the library's evictions (docs/design/0019). The memory
is the library's, to the byte, in slabs. One request runs at a time, and time is counted in requests.

    value of a resume point   tokens that it saves per byte (as for hazard) / requests until one resumes at it
    resumes at it             a prompt begins with it, and with no later stored resume point; if no prompt will: value 0

A state is not stored where it is worth less than the entries that it would evict. The policy also knows where to store
states: after prompts and outputs, and wherever a later prompt leaves its longest prefix shared with an earlier
request. The result is not optimal: choosing among resume points of different sizes is a knapsack over time. With memory
for everything, it finds all hits of an endless cache (tests/unit/project/test_belady.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from foreseen import Future

from hybridkv.eviction.choice import Eviction
from hybridkv.eviction.resume_points import ResumePoint, note_hit
from hybridkv.request_rows import grown
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.trace import RequestSource, TraceSummary


class Belady:
    """A ranking (hybridkv.eviction.resume_points) whose clock says which request of ``future`` runs."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._ends: dict[int, tuple[int, ResumePoint]] = {}
        self._rows = list[ResumePoint | None]()
        self._free = list[int]()
        self._saved = np.zeros(64)
        self._next = np.zeros(64)
        self._ranked = np.zeros(64, np.bool_)

    def note_request(self, now: float) -> None:
        """Nothing: the clock says it."""

    def note_hint(self, end: ResumePoint, hint: int, now: float) -> None:  # noqa: ARG002 - the answer of a ranking
        """Nothing to learn."""
        end.hint = hint

    def hit(self, end: ResumePoint, now: float) -> None:
        """Note that the point was used."""
        note_hit(end, now)

    def add(self, end: ResumePoint, now: float) -> None:  # noqa: ARG002 - as above
        """Keep the point, unless it is kept already."""
        if end.serial not in self._ends:
            row = self._free.pop() if self._free else len(self._rows)
            if row == len(self._rows):
                self._rows.append(None)
                self._saved, self._ranked = grown(self._saved, row + 1), grown(self._ranked, row + 1)
                self._next = grown(self._next, row + 1)
            self._ends[end.serial], self._rows[row] = (row, end), end
            self._next[row] = -np.inf
            self._future.keep(*_prefix(end), end.serial)
            self._disturb(end)
        row, _ = self._ends[end.serial]
        self._saved[row], self._ranked[row] = end.saved, True

    def remove(self, end: ResumePoint) -> None:
        """Take the point out of the ranking, so that it stays."""
        self._ranked[self._ends[end.serial][0]] = False

    def kept(self, end: ResumePoint, now: float) -> None:
        """Note that the request of ``now`` keeps ``end``."""
        end.used = now

    def evicted(self, end: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:  # noqa: ARG002 - as above
        """Whoever would go on from it goes on from the one before."""
        if end.serial in self._ends:
            row, _ = self._ends.pop(end.serial)
            self._rows[row], self._ranked[row] = None, False
            self._free.append(row)
            self._future.give_up(*_prefix(end), end.serial)
            self._disturb(end)

    def forget(self, end: ResumePoint, now: float) -> None:
        """Nothing is known of those that are not kept."""
        self.evicted(end, None, now, declined=False)

    def _disturb(self, end: ResumePoint) -> None:
        """Note that the nearest kept point before ``end`` now serves other requests, so its next use is unknown."""
        before = self._future.before(*_prefix(end))
        if before is not None:
            self._next[self._ends[before][0]] = -np.inf

    def lowest(self, now: float) -> ResumePoint | None:
        """O(kept ends) in array operations, and what changed since."""
        rows = np.flatnonzero(self._ranked)
        if not rows.size:
            return None
        for row in rows[self._next[rows] <= now].tolist():
            end = self._rows[row]
            if end is not None:
                self._next[row] = self._future.next_use(*_prefix(end), int(now))
        values = self._saved[rows] / (self._next[rows] - now)
        return self._rows[rows.item(values.argmin())]

    def prefers(self, end: ResumePoint, other: ResumePoint, now: float) -> bool:
        """Whether ``end``, not kept yet, is worth more."""
        return self._value(end, now) > self._value(other, now)

    def _value(self, end: ResumePoint, now: float) -> float:
        wanted = self._future.next_use(*_prefix(end), int(now))
        return end.saved / (wanted - now)

    def check(self) -> list[str]:
        """Return a line for each resume point whose row holds another one."""
        return [
            f"an end of {end.tokens} tokens stands in row {row}"
            for row, end in self._ends.values()
            if self._rows[row] is not end
        ]


def _prefix(end: ResumePoint) -> tuple[int, int]:
    """Return the number of the last request that used the point, and the tokens of the point."""
    return int(end.used), end.tokens


class Foreseen:
    """``source`` with marks where it pays to keep, each request at the time that is its number."""

    def __init__(self, source: RequestSource) -> None:
        self.name = source.name
        self._source = source
        self._requests = list(source)
        self._future = Future(self._requests)

    def summary(self) -> TraceSummary:
        """Return the summary of the source."""
        return self._source.summary()

    def __iter__(self) -> Iterator[TraceRequest]:
        """Its requests."""
        for number, (asked, marks) in enumerate(zip(self._requests, self._future.marks, strict=True)):
            yield replace(asked, marks=marks, timestamp_s=float(number))

    def eviction(self) -> Eviction:
        """Of one cache that serves them all, once."""
        return Eviction("belady", lambda: Belady(self._future))
