"""Ends by value: how soon their like were hit, times the tokens that they save a byte (docs/design/0019).

value    (worth of its class at its age + that of its heir) * tokens saved a byte
class    kind and what hints promise, hits so far (3 and more are one), gap: of its own hits, or of its session when
         it has none
heir     the most valuable of the ends given up that this one serves instead, until it is hit itself
rings    one for each class and power of two of what is saved, in the order of last use: only its two ends are
         compared, for value falls with age or rises; which is less is known until one's age is in another bucket, or
         another end stands there
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from hybridkv.cache.placement.ends import End, Ring
from hybridkv.cache.placement.hazard_table import BUCKETS, NEXT, HazardTable, bucket_of
from hybridkv.cache.placement.promises import class_kind
from hybridkv.columns import grown

_LEARN_EVERY: Final = 100
"""Requests."""

_HALVED_EVERY: Final = 1000
"""Requests after which a hit counts half."""

_MOST_LOOKED_AT: Final = 8192
"""Ends whose waiting is counted at once; more take turns."""

_NOBODY: Final = -1

_ROUNDING: Final = 1e-6
"""Seconds: what sums of times may be wrong by."""


class Heir(NamedTuple):
    """An end that was given up: its class, and when it was last used."""

    of: int
    used: float


class _Memo:
    """What is known of an end besides. row: in the columns. of: its class. ring: where it stands, None for nowhere.

    value: holds before ``until``, while it stands there and inherits nothing, as of what was ``learned``.
    """

    __slots__ = ("heir", "learned", "of", "ring", "row", "until", "value")

    def __init__(self, row: int, of: int) -> None:
        self.row = row
        self.of = of
        self.heir: Heir | None = None
        self.ring: tuple[int, int] | None = None
        self.value, self.until, self.learned = math.inf, -math.inf, 0


class _ValuedRing(Ring):
    """least: of its two ends that of less value; both hold before ``until``, while what was learned stands."""

    __slots__ = ("least", "until", "value")

    def __init__(self, first: End) -> None:
        super().__init__()
        self.least = first
        self.value, self.until = math.inf, -math.inf


class HazardRanking:
    """For reading: table, and heirs by ``heir_of``."""

    def __init__(self) -> None:
        self.table = HazardTable()
        self._memos: dict[int, _Memo] = {}
        self._rings: dict[tuple[int, int], _ValuedRing] = {}
        self._looked = self.table.learned
        self._class = np.full(64, _NOBODY)
        self._used = np.zeros(64)
        self._counted = np.zeros(64)  # the age up to which waiting was counted
        self._free: list[int] = []
        self._rows = 0
        self._requests = 0
        self._turn = 0

    # -- learning

    def note_request(self, now: float) -> None:
        """Every hundredth one, what was seen since is learned and all that was seen before fades."""
        self._requests += 1
        if self._requests % _LEARN_EVERY == 0:
            self._count_waiting(now)
            self.table.learn()
            self.table.decay(0.5 ** (_LEARN_EVERY / _HALVED_EVERY))

    def _count_waiting(self, now: float) -> None:
        """Of all ends, or of the next of many, in turns."""
        count = min(self._rows, _MOST_LOOKED_AT)
        if not count:
            return
        rows = (self._turn + np.arange(count)) % self._rows
        self._turn = (self._turn + count) % self._rows
        rows = rows[self._class[rows] != _NOBODY]
        ages = now - self._used[rows]
        self.table.wait_all(self._class[rows], self._counted[rows], ages)
        self._counted[rows] = ages

    def kept(self, end: End, now: float) -> None:
        """Count how long a ghost waited, now: what is counted later belongs to its new age."""
        memo = self._memos.get(end.serial)
        if memo is not None and end.used != now:
            self._wait(memo, now - end.used)
            self._used[memo.row], self._counted[memo.row] = now, 0.0
        end.used = now

    def hit(self, end: End, now: float) -> None:
        """Its class was hit at its age; it has no heir, and a class of its own hits."""
        memo = self._memo(end)
        age = now - end.used
        self._wait(memo, age)
        self.table.note_hit(memo.of, age)
        end.note_hit(now)
        memo.heir = None
        memo.of = self._class[memo.row] = self._class_of(end)
        self._used[memo.row], self._counted[memo.row] = now, 0.0

    def _wait(self, memo: _Memo, age: float) -> None:
        self.table.wait(memo.of, self._counted.item(memo.row), age)
        self._counted[memo.row] = age

    def _memo(self, end: End) -> _Memo:
        memo = self._memos.get(end.serial)
        if memo is None:
            row = self._free.pop() if self._free else self._rows
            self._rows = max(self._rows, row + 1)
            self._class = grown(self._class, self._rows, _NOBODY)
            self._used, self._counted = grown(self._used, self._rows), grown(self._counted, self._rows)
            memo = self._memos[end.serial] = _Memo(row, self._class_of(end))
            self._class[row], self._used[row], self._counted[row] = memo.of, end.used, 0.0
        return memo

    def _class_of(self, end: End) -> int:
        return self.table.class_of(*class_of(end))

    # -- rings

    def add(self, end: End, now: float) -> None:  # noqa: ARG002 - the answer of a ranking
        """Into the ring of its class and what it saves."""
        memo = self._memo(end)
        memo.ring = memo.of, math.frexp(end.saved)[1]
        memo.until = -math.inf
        ring = self._rings.get(memo.ring)
        if ring is None:
            ring = self._rings[memo.ring] = _ValuedRing(end)
        if ring.add(end):
            ring.until = -math.inf

    def remove(self, end: End) -> None:
        """Out of it."""
        memo = self._memos[end.serial]
        if memo.ring is not None:
            ring = self._rings[memo.ring]
            if ring.remove(end):
                ring.until = -math.inf
            if not len(ring):
                del self._rings[memo.ring]
            memo.ring = None

    def lowest(self, now: float) -> End | None:
        """The least of the two ends of every ring. O(rings)."""
        if self._looked != self.table.learned:
            self._looked = self.table.learned
            for ring in self._rings.values():
                ring.until = -math.inf
        least, lowest = math.inf, None
        for ring in self._rings.values():
            if now >= ring.until:
                self._look_at(ring, now)
            if ring.value < least or (ring.value == least and (lowest is None or ring.least.serial < lowest.serial)):
                least, lowest = ring.value, ring.least
        return lowest

    def _look_at(self, ring: _ValuedRing, now: float) -> None:
        """Value ``ring`` anew."""
        ring.value, ring.until = math.inf, math.inf
        for end in ring.both_ends():
            memo = self._memos[end.serial]
            if now >= memo.until or memo.learned != self._looked:
                self._look_at_end(end, memo, now)
            ring.until, value = min(ring.until, memo.until), memo.value
            if value < ring.value or (value == ring.value and end.serial < ring.least.serial):
                ring.least, ring.value = end, value

    def _look_at_end(self, end: End, memo: _Memo, now: float) -> None:
        """Value ``end`` anew."""
        worths, used, heir = self.table.worth, end.used, memo.heir
        bucket = bucket_of(now - used)
        worth, until = worths[memo.of][bucket], used + NEXT[bucket]
        if heir is not None:
            bucket = bucket_of(now - heir.used)
            worth, until = worth + worths[heir.of][bucket], min(until, heir.used + NEXT[bucket])
        memo.value, memo.until, memo.learned = worth * end.saved, until - _ROUNDING, self._looked

    def value(self, end: End, now: float) -> float:
        """Tokens a second and byte that ``end`` is expected to save."""
        memo = self._memo(end)
        worth = self.table.worth[memo.of][bucket_of(now - end.used)]
        if memo.heir is not None:
            worth += self._worth(memo.heir, now)
        return worth * end.saved

    def _worth(self, heir: Heir, now: float) -> float:
        return self.table.worth[heir.of][bucket_of(now - heir.used)]

    def prefers(self, end: End, other: End, now: float) -> bool:
        """Whether ``end`` is of more value."""
        return self.value(end, now) > self.value(other, now)

    # -- inheritance

    def heir_of(self, end: End) -> Heir | None:
        """Whom ``end`` serves besides."""
        return self._memo(end).heir

    def promised(self, end: End, promise: int, now: float) -> None:
        """A class of its own, from its age on."""
        memo = self._memo(end)
        if promise != end.promise:
            self._wait(memo, now - end.used)
            end.promise = promise
            memo.of = self._class[memo.row] = self._class_of(end)

    def given_up(self, end: End, parent: End | None, now: float, *, declined: bool) -> None:
        """``parent`` serves those who would have hit ``end``; of one declined only if nobody ever did."""
        memo = self._memo(end)
        if parent is None or (declined and end.hits):
            return
        theirs = self._memo(parent)
        heirs = [heir for heir in (theirs.heir, Heir(memo.of, end.used), memo.heir) if heir is not None]
        theirs.heir = max(heirs, key=lambda heir: self._worth(heir, now))
        theirs.until = -math.inf
        if theirs.ring is not None and (ring := self._rings[theirs.ring]).is_outer(parent):
            ring.until = -math.inf

    def forget(self, end: End, now: float) -> None:
        """How long it waited counts; its row is free."""
        memo = self._memos.pop(end.serial, None)
        if memo is not None:
            self._wait(memo, now - end.used)
            self._class[memo.row] = _NOBODY
            self._free.append(memo.row)

    # -- what must hold

    def check(self) -> list[str]:
        """Each end stands in the ring of its class and what it saves; columns say what ends say."""
        wrong = []
        for key, ring in self._rings.items():
            for end in ring.ends():
                memo = self._memos.get(end.serial)
                if memo is None or memo.ring != key or (self._class_of(end), math.frexp(end.saved)[1]) != key:
                    wrong.append(f"an end of {end.tokens} tokens stands in the ring {key}")
                elif self._used.item(memo.row) != end.used or self._class.item(memo.row) != memo.of:
                    wrong.append(f"the columns of the end of {end.tokens} tokens are another's")
        known = sum(memo.ring is not None for memo in self._memos.values())
        if known != sum(map(len, self._rings.values())):
            wrong.append(f"{known} ends say that they stand in rings")
        rows = np.flatnonzero(self._class[: self._rows] != _NOBODY).tolist()
        if sorted(memo.row for memo in self._memos.values()) != rows:
            wrong.append("rows of ends that are known no longer are in use")
        if self.table.hits.shape[1] != BUCKETS or (self.table.at_risk < 0).any():
            wrong.append("ends were at risk for less than no time")
        return wrong


def class_of(end: End) -> tuple[int, int, int]:
    """Kind and what hints promise of it, hits so far up to 3, and gap; see ``least_gap_s``."""
    return class_kind(end.kind, end.promise), min(end.hits, 3), _gap_of(end)


def least_gap_s(hits: int, gap: int) -> float | None:
    """The seconds from which on an end of so many hits has ``gap``, None for that of new sessions."""
    if gap < 0:
        return None
    return float((2 if hits else 3) ** (gap - 1)) if gap else 0.0


def _gap_of(end: End) -> int:
    """-1 for an end of a new session that was never hit, else how long it, or its session, paused, by powers."""
    if end.hits:
        gap = math.exp(end.log_gap)
        return 0 if gap < 1.0 else min(10, 1 + int(math.log2(gap)))
    if end.session_gap is None:
        return -1
    return 0 if end.session_gap < 1.0 else min(6, 1 + int(math.log(end.session_gap, 3)))
