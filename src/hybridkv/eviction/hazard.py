"""Ends by value: how soon their like were hit, times the tokens that they save a byte (docs/design/0019).

value    (worth of its class at its age + that of its heir) * tokens saved a byte
class    kind and what hints promise, hits so far (3 and more are one), gap: of its own hits, or of its session when
         it has none
heir     the most valuable of the ends given up that this one serves instead, until it is hit itself
rings    one for each class and power of two of what is saved, in the order of last use: only its two ends are
         compared, for value falls with age or rises; which is less is known until one's age is in another bucket, or
         another end stands there

How soon ends of a class are hit: rates by age, learned while ends wait, and what waiting for one is worth.

class    any > kind > kind, hits > kind, hits, gap       a class with little seen leans on the one before it, one of
                                                        ends of which hints promise something on that promise
age      [0, 1) s, then each bucket 1.5 times as far as the last
rate     (hits + 4 w * rate of the class before) / (seconds at risk + 4 w), w the bucket's seconds
worth    the greatest, over what one might wait for, of P(hit by then) / E[seconds waited] (a Gittins index)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.eviction.ranking import End, Ring, class_kind, is_promised, promised_rate
from hybridkv.request_rows import grown

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]

BUCKETS: Final = 23
_STARTS: Final = [0.0, *(1.5**k for k in range(BUCKETS - 1))]
_LOWER: Final = np.array(_STARTS)
_WIDTH: Final = np.diff([*_STARTS, 1.5 ** (BUCKETS - 1)])
_AT_RISK: Final = np.array([*_WIDTH[:-1], np.inf])
"""Seconds that an end can wait in each bucket: in the last one without end."""

_PRIOR: Final = 1e-6
_LEAN: Final = 4.0


NEXT: Final = [*_STARTS[1:], math.inf]
"""The age at which an end passes from each bucket into another."""


def bucket_of(age: float) -> int:
    """The bucket of ``age`` seconds, 0 or more."""
    return bisect_right(_STARTS, age) - 1


class HazardTable:
    """Classes are numbers, 0 the class of all; those of other keys are made when they are first asked for.

    For reading: worth, a list of BUCKETS numbers, hits a second, for each class; as of the last ``learn``, of
    which there were ``learned``.
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
        self.worth: list[list[float]] = [[]]
        self.learned = 0
        self.learn()

    def __len__(self) -> int:
        return len(self._parents)

    def class_of(self, *key: int) -> int:
        """The number of kind, hits, gap, or of the first few of them. O(1)."""
        number = self._numbers.get(key)
        if number is not None:
            return number
        parent = self.class_of(*key[:-1])
        number = self._numbers[key] = len(self._parents)
        self._parents.append(parent)
        self._chains.append(np.append(self._chains[parent], number))
        self._levels[len(key)].append(number)
        self.worth.append(self.worth[parent])
        if len(key) == 1:
            self._kinds += key
        if number == len(self.hits):
            more = np.zeros_like(self.hits)
            self.hits, self._at_risk = np.concatenate((self.hits, more)), np.concatenate((self._at_risk, more))
        if len(key) == 1 and is_promised(key[0]):
            self.learn()  # it counts from the first end on
        return number

    def note_hit(self, of: int, age: float) -> None:
        """An end of class ``of`` was hit at ``age`` seconds; those before it in the chain, too."""
        self.hits[self._chains[of], bucket_of(age)] += 1.0

    def wait(self, of: int, start: float, end: float) -> None:
        """An end of class ``of`` was at risk between two ages. O(1): it is added up when somebody asks."""
        self._waited.append((of, start, end))

    @property
    def at_risk(self) -> Float:
        """Seconds that ends of each class waited in each bucket, float64[classes or more, BUCKETS]."""
        if self._waited:
            of, start, end = zip(*self._waited, strict=True)
            self._waited = []
            self.wait_all(np.array(of), np.array(start), np.array(end))
        return self._at_risk

    def wait_all(self, of: Int64, start: Float, end: Float) -> None:
        """``wait`` of many ends at once, in array operations. O(ends), x buckets for those that pass into another."""
        size, added = len(self), np.zeros((len(self), BUCKETS))
        first, last = (_LOWER.searchsorted(age, "right") - 1 for age in (start, end))
        stay = first == last  # as nearly all
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
        """All that was seen counts ``factor`` times as much."""
        self.hits *= factor
        self.at_risk[:] *= factor

    def rates(self) -> Float:
        """Hits a second of each class and bucket, float64[classes, BUCKETS]."""
        size, at_risk = len(self), self.at_risk
        rates = np.empty((size, BUCKETS))
        lean = _LEAN * _WIDTH
        rates[0] = (self.hits[0] + _PRIOR * lean) / (at_risk[0] + lean)
        for level in self._levels[1:]:
            before = rates[[self._parents[number] for number in level]]
            if level is self._levels[1]:
                self._lean_on_promises(before)
            rates[level] = (self.hits[level] + before * lean) / (at_risk[level] + lean)
        return rates

    def _lean_on_promises(self, usual: Float) -> None:
        """``usual``, one row a class of kinds, becomes what hints promise of those of which they do."""
        for place, kind in enumerate(self._kinds):
            if is_promised(kind):
                usual[place] = [promised_rate(kind, *one) for one in zip(usual[place], _STARTS, strict=True)]

    def learn(self) -> None:
        """Work out what each class is worth at each age. O(classes x buckets squared) in array operations."""
        rates = self.rates()
        risk = rates * _WIDTH
        waits = -np.expm1(-risk) / rates  # seconds spent in a bucket by who enters it
        best, waited, passed = (np.zeros_like(rates) for _ in range(3))
        for further in range(BUCKETS):
            upto = BUCKETS - further
            waited[:, :upto] += np.exp(-passed[:, :upto]) * waits[:, further:]
            passed[:, :upto] += risk[:, further:]
            np.maximum(best[:, :upto], -np.expm1(-passed[:, :upto]) / waited[:, :upto], out=best[:, :upto])
        self.worth = best.tolist()
        self.learned += 1


def _between(start: Float, end: Float) -> Float:
    """Seconds in each bucket between two ages, float64[ends, BUCKETS]."""
    before, after = (np.clip(age[:, None] - _LOWER, 0.0, _AT_RISK) for age in (start, end))
    spent: Float = after - before
    return spent


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
