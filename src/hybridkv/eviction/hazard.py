"""Rank resume points by value: how soon similar ones were hit, times the tokens saved per byte (docs/design/0019).

value    (index of its class at its age + index of its heir) * tokens saved per byte; with a copy on the tier below, at
         most the tokens computed in the time in which a byte comes back (docs/design/0053)
class    kind and hint, hits so far (3 or more count as one), gap between its own hits; without hits, the gap of its
         session
heir     the most valuable evicted resume point that this one serves instead; a hit of this one clears it
rings    one for each class and power of two of the tokens saved per byte, in the order of last use. Value rises or
         falls with age, so only the first and the last resume point of a ring are compared. The result holds until
         the age of one of them enters another bucket, or another resume point becomes first or last.

The ranking learns rates of hits by age while resume points wait, and computes an index from them:

class    any > kind > kind, hits > kind, hits, gap       a class with few observations leans on the one before it; a
                                                        kind with a hint leans on the rate of that hint
age      [0, 1) s, then each bucket ends at 1.5 times its start
rate     (hits + 4 w * rate of the class before) / (seconds at risk + 4 w); w is the width of the bucket
index    the greatest P(hit by then) / E[seconds waited] over all times to stop waiting: a Gittins index
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.eviction.resume_points import KINDS, Heir, ResumePoint, hinted_rate, is_hinted, note_hit
from hybridkv.request_rows import grown

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]

BUCKETS: Final = 23
_STARTS: Final = [0.0, *(1.5**k for k in range(BUCKETS - 1))]
_LOWER: Final = np.array(_STARTS)
_WIDTH: Final = np.diff([*_STARTS, 1.5 ** (BUCKETS - 1)])
_AT_RISK: Final = np.array([*_WIDTH[:-1], np.inf])
"""Seconds that a resume point can wait in each bucket. The last bucket has no limit."""

_PRIOR: Final = 1e-6
"""Hits per second of all classes together before the first observation; chosen by hand."""

_LEAN: Final = 4.0
"""Weight of the class before, in widths of the bucket. Hit rates did not depend on it between 1 and 16."""


NEXT: Final = [*_STARTS[1:], math.inf]
"""The age at which a resume point leaves each bucket."""


def bucket_of(age: float) -> int:
    """Return the bucket of ``age`` seconds, 0 or more."""
    return bisect_right(_STARTS, age) - 1


def _between(start: Float, end: Float) -> Float:
    """Return the seconds in each bucket between two ages, float64[resume points, BUCKETS]."""
    before, after = (np.clip(age[:, None] - _LOWER, 0.0, _AT_RISK) for age in (start, end))
    spent: Float = after - before
    return spent


_LEARN_EVERY: Final = 100
"""Most requests between two updates. Hit rates did not depend on it between 25 and 100."""

_LEARN_AT: Final = 16
"""Requests before the first update; each later one follows after a quarter more, up to ``_LEARN_EVERY``. Of questions
on documents, a first update after 100 requests found 3.5 points less, and updates from the first request on 4.9 points
less (docs/design/0019)."""

_HALVED_EVERY: Final = 1000
"""Requests after which a hit counts half. Without decay, a change of workload cost 15 points (.618 against .764)."""

_MOST_LOOKED_AT: Final = 8192
"""Resume points that one update counts; if there are more, they take turns. Chosen by hand."""

_FREE: Final = -1

_ROUNDING: Final = 1e-6
"""Allowed rounding error of sums of times, in seconds; chosen by hand."""


class Ring:
    """Hold resume points in the order of their last use. O(log n) in Python, and a shift of the list.

    Attributes:
        points: (used, serial, resume point), ascending.
        least, value, until: The less valuable of the first and the last resume point, its value, and the time until
            which both hold. The ranking that owns the ring sets them.
    """

    __slots__ = ("least", "points", "until", "value")

    def __init__(self) -> None:
        self.points: list[tuple[float, int, ResumePoint]] = []
        self.least: ResumePoint | None = None
        self.value, self.until = math.inf, -math.inf

    def add(self, point: ResumePoint) -> bool:
        """Add ``point``, which is in no ring. Return whether it is the first or the last one now."""
        points, entry = self.points, (point.used, point.serial, point)
        if not points or points[-1] < entry:  # nearly always
            points.append(entry)
            return True
        place = bisect_left(points, entry)
        points.insert(place, entry)
        return not place

    def remove(self, point: ResumePoint) -> bool:
        """Remove ``point``, not used since it was added. Return whether it was the first or the last one."""
        place = bisect_left(self.points, (point.used, point.serial))
        del self.points[place]
        return not place or place == len(self.points)

    def outer(self) -> tuple[ResumePoint, ...]:
        """Return the resume point used longest ago and the one used last, once if they are the same."""
        points = self.points
        return (points[0][2],) if len(points) == 1 else (points[0][2], points[-1][2])


class Ranking(Protocol):
    """Choose which kept resume point is evicted next. ``now`` is in seconds and never decreases.

    A resume point changes only between ``remove`` and ``add``. Only ``kept`` and ``hit`` change its last use.
    """

    def note_request(self, now: float) -> None:
        """Count a request that begins."""
        ...

    def add(self, point: ResumePoint, now: float) -> None:
        """Add ``point``, a kept resume point that may be evicted."""
        ...

    def remove(self, point: ResumePoint) -> None:
        """Remove ``point``, which was added: it may not be evicted, or is no longer kept."""
        ...

    def kept(self, point: ResumePoint, now: float) -> None:
        """Note that ``point``, new or a ghost entry and not added, is kept. Its age starts again at 0."""
        ...

    def hit(self, point: ResumePoint, now: float) -> None:
        """Note that ``point``, not added, was hit, or would have been hit. Its ``used`` is still the last use."""
        ...

    def note_hint(self, point: ResumePoint, hint: int, now: float) -> None:
        """Set the hint of ``point``, which is not added."""
        ...

    def evicted(self, point: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:
        """Note that ``point`` was evicted or declined. parent: the kept one that serves its requests instead."""
        ...

    def forget(self, point: ResumePoint, now: float) -> None:
        """Forget ``point``, a ghost entry."""
        ...

    def lowest(self, now: float) -> ResumePoint | None:
        """Return the resume point to evict next; None if the ranking is empty."""
        ...

    def prefers(self, point: ResumePoint, other: ResumePoint, now: float) -> bool:
        """Return whether ``other``, which is kept, is evicted to keep ``point``."""
        ...

    def check(self) -> list[str]:
        """Return a line for each violated invariant. O(resume points)."""
        ...


class HazardRanking:
    """Rank resume points by value, learned from hits.

    A resume point that the ranking knows has a ``row`` in its columns: class, last use, and the age up to which its
    waiting was counted. Its ``value`` holds before ``until``, while it stays in its ring, inherits nothing, and its
    ``learned`` is current.

    A class is a number. Class 0 contains all resume points; the others are made at their first use.

    Attributes:
        hits: Hits of each class in each bucket, float64[classes or more, BUCKETS].
        gittins: For each class, the index of each bucket in hits per second, as of the last ``learn``.
        learned: Number of calls of ``learn``.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._chains = [np.array([0])]
        self._levels: list[list[int]] = [[0], [], [], []]
        self._parents = [0]
        self._kinds: list[int] = []
        self.hits: Float = np.zeros((16, BUCKETS))
        self._at_risk: Float = np.zeros((16, BUCKETS))
        self._waited: list[tuple[int, float, float]] = []
        self.gittins: list[list[float]] = [[]]
        self.learned = 0
        self.learn()
        self._rings: dict[tuple[int, int], Ring] = {}
        self._looked = self.learned
        self._class = np.full(64, _FREE)
        self._used = np.zeros(64)
        self._counted = np.zeros(64)
        self._free: list[int] = []
        self._rows = 0
        self._requests = self._updated_at = 0
        self._update_at = _LEARN_AT
        self._turn = 0

    # -- learning

    def note_request(self, now: float) -> None:
        """Count a request. From time to time, update the indices and let past observations fade."""
        self._requests += 1
        if self._requests == self._update_at:
            self._count_waiting(now)
            self.learn()
            self.decay(0.5 ** ((self._requests - self._updated_at) / _HALVED_EVERY))
            self._updated_at = self._requests
            self._update_at += min(_LEARN_EVERY, self._requests // 4)

    def _count_waiting(self, now: float) -> None:
        """Count the seconds that resume points waited; at most ``_MOST_LOOKED_AT`` of them, in turns."""
        count = min(self._rows, _MOST_LOOKED_AT)
        if not count:
            return
        rows = (self._turn + np.arange(count)) % self._rows
        self._turn = (self._turn + count) % self._rows
        rows = rows[self._class[rows] != _FREE]
        ages = now - self._used[rows]
        self.wait_all(self._class[rows], self._counted[rows], ages)
        self._counted[rows] = ages

    def kept(self, point: ResumePoint, now: float) -> None:
        """Count how long a ghost entry waited, before its new age begins."""
        row = point.row
        if row >= 0 and point.used != now:
            self._wait(point, now - point.used)
            self._used[row], self._counted[row] = now, 0.0
        point.used = now

    def hit(self, point: ResumePoint, now: float) -> None:
        """Count a hit of the class of ``point`` at its age. Clear its heir and give it the class of its own hits."""
        row, age = self._row(point), now - point.used
        self._wait(point, age)
        self._count_hit(point.class_number, age)
        note_hit(point, now)
        point.heir = None
        point.class_number = self._class[row] = self._number_of(*class_of(point))
        self._used[row], self._counted[row] = now, 0.0

    def _wait(self, point: ResumePoint, age: float) -> None:
        self._waited.append((point.class_number, self._counted.item(point.row), age))
        self._counted[point.row] = age

    def _row(self, point: ResumePoint) -> int:
        """Return the row of ``point``, and give it a new row first if it has no row."""
        row = point.row
        if row < 0:
            row = point.row = self._free.pop() if self._free else self._rows
            if row == self._rows:
                self._rows += 1
                if row == len(self._class):
                    self._class = grown(self._class, self._rows, _FREE)
                    self._used, self._counted = grown(self._used, self._rows), grown(self._counted, self._rows)
            point.class_number = self._class[row] = self._number_of(*class_of(point))
            self._used[row], self._counted[row] = point.used, 0.0
        return row

    # -- rates and indices of classes

    def _number_of(self, *key: int) -> int:
        """Return the number of the class (kind, hits, gap), or of a class with the first few of them. O(1)."""
        number = self._numbers.get(key)
        if number is not None:
            return number
        parent = self._number_of(*key[:-1])
        number = self._numbers[key] = len(self._parents)
        self._parents.append(parent)
        self._chains.append(np.append(self._chains[parent], number))
        self._levels[len(key)].append(number)
        self.gittins.append(self.gittins[parent])
        if len(key) == 1:
            self._kinds += key
        if number == len(self.hits):
            more = np.zeros_like(self.hits)
            self.hits, self._at_risk = np.concatenate((self.hits, more)), np.concatenate((self._at_risk, more))
        if len(key) == 1 and is_hinted(key[0]):
            self.learn()  # its hint counts from the first resume point on
        return number

    def _count_hit(self, of: int, age: float) -> None:
        """Count a hit of class ``of`` at ``age`` seconds, and of all classes before it in its chain."""
        self.hits[self._chains[of], bucket_of(age)] += 1.0

    @property
    def at_risk(self) -> Float:
        """The seconds that resume points of each class waited in each bucket, float64[classes or more, BUCKETS]."""
        if self._waited:
            of, start, end = zip(*self._waited, strict=True)
            self._waited = []
            self.wait_all(np.array(of), np.array(start), np.array(end))
        return self._at_risk

    def wait_all(self, of: Int64, start: Float, end: Float) -> None:
        """Count the seconds that resume points of classes ``of`` waited from ages ``start`` to ages ``end``.

        O(resume points), times the buckets for the few that pass into another bucket, in array operations.
        """
        size, added = len(self._parents), np.zeros((len(self._parents), BUCKETS))
        first, last = (_LOWER.searchsorted(age, "right") - 1 for age in (start, end))
        stay = first == last  # nearly all
        places = of[stay] * BUCKETS + first[stay]
        added += np.bincount(places, (end - start)[stay], size * BUCKETS).reshape(size, BUCKETS)
        if not stay.all():
            of, times = of[~stay], _between(start[~stay], end[~stay])
            added += np.stack([np.bincount(of, times[:, b], size) for b in range(BUCKETS)], axis=1)
        for level in (3, 2, 1):
            for number in self._levels[level]:
                added[self._parents[number]] += added[number]
        self._at_risk[:size] += added

    def decay(self, factor: float) -> None:
        """Multiply the weight of all observations by ``factor``."""
        self.hits *= factor
        self.at_risk[:] *= factor

    def rates(self) -> Float:
        """Return the hits per second of each class and bucket, float64[classes, BUCKETS]."""
        size, at_risk = len(self._parents), self.at_risk
        rates = np.empty((size, BUCKETS))
        lean = _LEAN * _WIDTH
        rates[0] = (self.hits[0] + _PRIOR * lean) / (at_risk[0] + lean)
        for level in self._levels[1:]:
            before = rates[[self._parents[number] for number in level]]
            if level is self._levels[1]:
                self._lean_on_hints(before)
            rates[level] = (self.hits[level] + before * lean) / (at_risk[level] + lean)
        return rates

    def _lean_on_hints(self, usual: Float) -> None:
        """Replace rows of ``usual``, one for each class of a kind, by the rates of their hints."""
        for place, kind in enumerate(self._kinds):
            if is_hinted(kind):
                usual[place] = [hinted_rate(kind, *one) for one in zip(usual[place], _STARTS, strict=True)]

    def learn(self) -> None:
        """Compute the index of each class at each age. O(classes * buckets squared) in array operations."""
        rates = self.rates()
        risk = rates * _WIDTH
        waits = -np.expm1(-risk) / rates  # expected seconds in a bucket after its start
        best, waited, passed = (np.zeros_like(rates) for _ in range(3))
        for further in range(BUCKETS):
            upto = BUCKETS - further
            waited[:, :upto] += np.exp(-passed[:, :upto]) * waits[:, further:]
            passed[:, :upto] += risk[:, further:]
            np.maximum(best[:, :upto], -np.expm1(-passed[:, :upto]) / waited[:, :upto], out=best[:, :upto])
        self.gittins = best.tolist()
        self.learned += 1

    # -- rings

    def add(self, point: ResumePoint, now: float) -> None:  # noqa: ARG002 - the signature of a ranking
        """Add ``point`` to the ring of its class and of the tokens that it saves per byte."""
        self._row(point)
        key = point.ring = point.class_number, math.frexp(point.worth)[1]
        point.until = -math.inf
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = Ring()
        if ring.add(point):
            ring.until = -math.inf

    def remove(self, point: ResumePoint) -> None:
        """Remove ``point`` from its ring."""
        if point.ring is not None:
            ring = self._rings[point.ring]
            if ring.remove(point):
                ring.until = -math.inf
            if not ring.points:
                del self._rings[point.ring]
            point.ring = None

    def lowest(self, now: float) -> ResumePoint | None:
        """Return the least valuable first or last resume point of all rings. O(rings)."""
        if self._looked != self.learned:
            self._looked = self.learned
            for ring in self._rings.values():
                ring.until = -math.inf
        lowest: ResumePoint | None = None
        least = math.inf
        for ring in self._rings.values():
            if now >= ring.until:
                self._value_ring(ring, now)
            if ring.value <= least:  # true for few rings
                point = ring.least
                if point and (ring.value < least or lowest is None or point.serial < lowest.serial):
                    least, lowest = ring.value, point
        return lowest

    def _value_ring(self, ring: Ring, now: float) -> None:
        """Find the less valuable of the first and the last resume point of ``ring``, and how long that holds."""
        ring.least, ring.value, ring.until = None, math.inf, math.inf
        for point in ring.outer():
            if now >= point.until or point.learned != self._looked:
                self._value_point(point, now)
            ring.until = min(ring.until, point.until)
            if (
                ring.least is None
                or point.value < ring.value
                or (point.value == ring.value and point.serial < ring.least.serial)
            ):
                ring.least, ring.value = point, point.value

    def _value_point(self, point: ResumePoint, now: float) -> None:
        """Compute the value of ``point``, and how long it holds."""
        indices, heir = self.gittins, point.heir
        bucket = bucket_of(now - point.used)
        index, until = indices[point.class_number][bucket], point.used + NEXT[bucket]
        if heir is not None:
            bucket = bucket_of(now - heir.used)
            index, until = index + indices[heir.class_number][bucket], min(until, heir.used + NEXT[bucket])
        point.value, point.until, point.learned = index * point.worth, until - _ROUNDING, self._looked

    def value(self, point: ResumePoint, now: float) -> float:
        """Return the tokens per second and byte that ``point`` is expected to save."""
        self._row(point)
        index = self.gittins[point.class_number][bucket_of(now - point.used)]
        if point.heir is not None:
            index += self._index_of(point.heir, now)
        return index * point.worth

    def _index_of(self, heir: Heir, now: float) -> float:
        return self.gittins[heir.class_number][bucket_of(now - heir.used)]

    def prefers(self, point: ResumePoint, other: ResumePoint, now: float) -> bool:
        """Return whether the value of ``point`` is above the value of ``other``."""
        return self.value(point, now) > self.value(other, now)

    # -- inheritance

    def note_hint(self, point: ResumePoint, hint: int, now: float) -> None:
        """Give ``point`` the class of ``hint``; its age continues."""
        row = self._row(point)
        if hint != point.hint:
            self._wait(point, now - point.used)
            point.hint = hint
            point.class_number = self._class[row] = self._number_of(*class_of(point))

    def evicted(self, point: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:
        """Let ``parent`` inherit the value of ``point``. A declined one that was hit before passes nothing on."""
        self._row(point)
        if parent is None or (declined and point.hits):
            return
        self._row(parent)
        heirs = [one for one in (parent.heir, Heir(point.class_number, point.used), point.heir) if one is not None]
        parent.heir = max(heirs, key=lambda heir: self._index_of(heir, now)) if len(heirs) > 1 else heirs[0]
        parent.until = -math.inf
        if parent.ring is not None and parent in (ring := self._rings[parent.ring]).outer():
            ring.until = -math.inf

    def forget(self, point: ResumePoint, now: float) -> None:
        """Count how long ``point`` waited, and free its row."""
        if point.row >= 0:
            self._wait(point, now - point.used)
            self._class[point.row] = _FREE
            self._free.append(point.row)
            point.row, point.class_number, point.heir, point.until = -1, -1, None, -math.inf

    # -- invariants

    def check(self) -> list[str]:
        """Return a line for each violated invariant: rings hold one class, columns agree with their resume points."""
        wrong = []
        for key, ring in self._rings.items():
            for used, _, point in ring.points:
                if point.ring != key or (self._number_of(*class_of(point)), math.frexp(point.worth)[1]) != key:
                    wrong.append(f"a resume point of {point.tokens} tokens is in the wrong ring {key}")
                elif self._used.item(point.row) != used or self._class.item(point.row) != point.class_number:
                    wrong.append(f"the columns of the resume point of {point.tokens} tokens belong to another")
        if int(np.count_nonzero(self._class[: self._rows] != _FREE)) + len(self._free) != self._rows:
            wrong.append("a row is neither in use nor free")
        if self.hits.shape[1] != BUCKETS or (self.at_risk < 0).any():
            wrong.append("resume points were at risk for a negative time")
        return wrong


def class_of(point: ResumePoint) -> tuple[int, int, int]:
    """Return the class key: kind and hint, hits so far up to 3, and the gap (see ``least_gap_s``)."""
    if point.hits:
        gap_s = math.exp(point.log_gap)
        gap = 0 if gap_s < 1.0 else min(10, 1 + int(math.log2(gap_s)))
    elif point.session_gap is None:
        gap = -1
    else:
        gap = 0 if point.session_gap < 1.0 else min(6, 1 + int(math.log(point.session_gap, 3)))
    return int(point.kind) + KINDS * point.hint, min(point.hits, 3), gap


def least_gap_s(hits: int, gap: int) -> float | None:
    """Return the smallest gap in seconds of classes with ``hits`` and ``gap``; None for new sessions."""
    if gap < 0:
        return None
    return float((2 if hits else 3) ** (gap - 1)) if gap else 0.0
