"""Rankings of ends from their plain definition: everything is in lists, and worked out by looking at all of it.

NaiveHazard   how soon ends of a class were hit, times what is saved (docs/design/0019)
beside        an Eviction whose every answer is held against it
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from hybridkv.eviction import HAZARD, Eviction
from hybridkv.eviction.hazard import HazardRanking, Ranking
from hybridkv.eviction.resume_points import ResumePoint, class_kind, hinted_rate, is_hinted
from hybridkv.testing.event_follower import DifferenceError

EDGES = [0.0, *(1.5**k for k in range(23))]
"""Of the buckets of age; the last one has no end."""

CLOSE = 1e-9
"""Values that differ by less, of their size, are alike: sums are made in another order."""

Key = tuple[int, ...]


@dataclass(slots=True)
class Record:
    """What is known of an end. counted: seconds of its age that were counted. heir: class, and last use, of one.

    equals: those that were worth as much as it when it was chosen.
    """

    end: ResumePoint
    of: Key
    used: float
    hint: int
    hits: int = 0
    log_gap: float = 0.0
    counted: float = 0.0
    heir: tuple[Key, float] | None = None
    equals: list[tuple[Key, float]] = field(default_factory=list)


def bucket(age: float) -> int:
    """The bucket of an age."""
    return sum(age >= edge for edge in EDGES[1:23])


def class_of(end: ResumePoint, record: Record) -> Key:
    """Kind and hint, hits up to three, and how long it, or its session, paused."""
    if record.hits:
        gap = math.exp(record.log_gap)
        pause = 0 if gap < 1 else min(10, 1 + math.floor(math.log2(gap)))
    elif end.session_gap is None:
        pause = -1
    else:
        pause = 0 if end.session_gap < 1 else min(6, 1 + math.floor(math.log(end.session_gap, 3)))
    return class_kind(end.kind, record.hint), min(record.hits, 3), pause


def chain(of: Key) -> list[Key]:
    """A class and those before it, that of all first."""
    return [of[:length] for length in range(len(of) + 1)]


class NaiveHazard:
    """records: of all ends, kept or remembered. ends: those that may be given up. learned: worth by class and bucket.

    learn_first, learn_every, halved_every: requests.
    """

    learn_first = 16
    learn_every = 100
    halved_every = 1000

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.ends: list[ResumePoint] = []
        self.hits: dict[Key, list[float]] = defaultdict(lambda: [0.0] * 23)
        self.risk: dict[Key, list[float]] = defaultdict(lambda: [0.0] * 23)
        self.classes: set[Key] = set()
        self.learned: dict[Key, list[float]] = {}
        self.requests, self.learns_at, self.last_learned = 0, self.learn_first, 0
        self.learn()

    # -- what was seen

    def waited(self, record: Record, age: float) -> None:
        """It was at risk up to ``age``."""
        for place, (low, high) in enumerate(pairwise([*EDGES[:23], math.inf])):
            spent = max(min(age, high) - low, 0.0) - max(min(record.counted, high) - low, 0.0)
            for of in chain(record.of):
                self.risk[of][place] += spent
        record.counted = age

    def know(self, end: ResumePoint) -> Record:
        """Its record."""
        record = self.records.get(end.serial)
        if record is None:
            record = self.records[end.serial] = Record(end, (), end.used, end.hint, end.hits, end.log_gap)
            self.classify(end, record)
        return record

    def classify(self, end: ResumePoint, record: Record) -> None:
        """Into its class; one that hints make counts from its first end on."""
        record.of = class_of(end, record)
        is_new = record.of[:1] not in self.classes
        self.classes.update(chain(record.of)[: 2 if is_new and is_hinted(record.of[0]) else None])
        if is_new and is_hinted(record.of[0]):
            self.learn()
        self.classes.update(chain(record.of))

    def note_request(self, now: float) -> None:
        """Count all waiting, learn and fade: after 16 requests, 20, 25, 31 and so on, at last evenly."""
        self.requests += 1
        if self.requests == self.learns_at:
            self.learns_at += min(self.learn_every, self.requests // 4)
            for record in self.records.values():
                self.waited(record, now - record.used)
            self.learn()
            new, self.last_learned = self.requests - self.last_learned, self.requests
            for seen in (self.hits, self.risk):
                for of, row in seen.items():
                    seen[of] = [one * 0.5 ** (new / self.halved_every) for one in row]

    # -- what it is worth

    def learn(self) -> None:
        """Rates, each class leaning on the one before it; then the best that one can wait for."""
        rates: dict[Key, list[float]] = {}
        for of in sorted({(), *self.classes}, key=len):
            before = rates[of[:-1]] if of else [1e-6] * 23
            if len(of) == 1 and is_hinted(of[0]):
                before = [hinted_rate(of[0], rate, age) for rate, age in zip(before, EDGES[:23], strict=True)]
            rates[of] = []
            for place, (low, high) in enumerate(pairwise(EDGES)):
                lean = 4 * (high - low)
                hits, risk = self.hits[of][place], self.risk[of][place]
                rates[of].append((hits + before[place] * lean) / (risk + lean))
        self.learned = {of: [best_from(place, row) for place in range(23)] for of, row in rates.items()}

    def worth(self, of: Key, age: float) -> float:
        """Of a class that is new, as much as the one before it."""
        while of not in self.learned:
            of = of[:-1]
        return self.learned[of][bucket(age)]

    def value(self, end: ResumePoint, now: float) -> float:
        """Tokens a second and byte."""
        record = self.know(end)
        heir = 0.0 if record.heir is None else self.worth(record.heir[0], now - record.heir[1])
        return (self.worth(record.of, now - record.used) + heir) * end.saved

    # -- ends

    def add(self, end: ResumePoint, now: float) -> None:  # noqa: ARG002 - the answer of a ranking
        """One more."""
        self.know(end)
        self.ends.append(end)

    def remove(self, end: ResumePoint) -> None:
        """One less."""
        self.ends.remove(end)

    def kept(self, end: ResumePoint, now: float) -> None:
        """A new age begins."""
        record = self.records.get(end.serial)
        if record is not None:
            self.waited(record, now - record.used)
            record.used, record.counted = now, 0.0

    def hit(self, end: ResumePoint, now: float) -> None:
        """Those who would have hit its heir hit it from now on."""
        record = self.know(end)
        age = now - record.used
        self.waited(record, age)
        for of in chain(record.of):
            self.hits[of][bucket(age)] += 1.0
        gap = math.log(max(age, 1e-3))
        record.log_gap = (record.log_gap + gap) / 2 if record.hits else gap
        record.hits += 1
        record.used, record.counted, record.heir = now, 0.0, None
        self.classify(end, record)

    def note_hint(self, end: ResumePoint, hint: int, now: float) -> None:
        """Another class from now on."""
        record = self.know(end)
        if hint != record.hint:
            self.waited(record, now - record.used)
            record.hint = hint
            self.classify(end, record)

    def evicted(self, end: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:
        """The parent inherits, of one declined what nobody had hit; it has one heir, the most valuable."""
        record = self.know(end)
        if parent is None or (declined and record.hits):
            return
        theirs = self.know(parent)
        heirs = [one for one in (theirs.heir, (record.of, record.used), record.heir) if one is not None]
        worths = [self.worth(of, now - used) for of, used in heirs]
        theirs.equals = [heir for heir, worth in zip(heirs, worths, strict=True) if worth * (1 + CLOSE) >= max(worths)]
        theirs.heir = theirs.equals[0]

    def agree(self, parent: ResumePoint, real: Ranking) -> None:
        """Of heirs that are worth the same the one that ``real`` has chosen."""
        record = self.records.get(parent.serial)
        if record is None or not isinstance(real, HazardRanking) or (heir := parent.heir) is None:
            return
        of = next(key for key, number in real._numbers.items() if number == heir.class_number)
        if (of, heir.used) in record.equals:
            record.heir = of, heir.used

    def forget(self, end: ResumePoint, now: float) -> None:
        """It waited till now."""
        record = self.records.pop(end.serial, None)
        if record is not None:
            self.waited(record, now - record.used)

    # -- answers

    def allowed(self, now: float) -> list[ResumePoint | None]:
        """Of each class and power of two of what is saved the ends used first and last; of those the least value."""
        rings: dict[tuple[Key, int], list[ResumePoint]] = {}
        for end in sorted(self.ends, key=lambda end: (end.used, end.serial)):
            rings.setdefault((self.know(end).of, math.floor(math.log2(end.saved))), []).append(end)
        outer = [end for ring in rings.values() for end in (ring[0], ring[-1])]
        if not outer:
            return [None]
        least = min(self.value(end, now) for end in outer)
        return [end for end in outer if self.value(end, now) <= least * (1 + CLOSE)]

    def prefers(self, end: ResumePoint, other: ResumePoint, now: float) -> bool | None:
        """By value."""
        mine, theirs = self.value(end, now), self.value(other, now)
        return None if math.isclose(mine, theirs, rel_tol=CLOSE) else mine > theirs

    def differs(self, other: Ranking) -> str | None:
        """What was seen of each class, and who inherits."""
        if not isinstance(other, HazardRanking):
            return "it is no such ranking"
        for of, number in other._numbers.items():
            for name, mine, theirs in (("hits", self.hits, other.hits), ("seconds at risk", self.risk, other.at_risk)):
                if not all(map(_alike, mine[of], theirs[number].tolist())):
                    return f"{name} of class {of} are {theirs[number].tolist()}, not {mine[of]}"
        numbers = {number: of for of, number in other._numbers.items()}
        for serial, record in self.records.items():
            heir = record.end.heir and (numbers[record.end.heir.class_number], record.end.heir.used)
            if record.end.row >= 0 and heir != record.heir:
                return f"the heir of end {serial} is {heir}, not {record.heir}"
        return None


def best_from(place: int, rates: Iterable[float]) -> float:
    """The greatest, over where to stop, of P(hit by then) / E[seconds waited], from bucket ``place`` on."""
    best, left, waited = 0.0, 1.0, 0.0
    for rate, (low, high) in list(zip(rates, pairwise(EDGES), strict=True))[place:]:
        stays = math.exp(-rate * (high - low))
        waited += left * -math.expm1(-rate * (high - low)) / rate
        left *= stays
        best = max(best, (1 - left) / waited)
    return best


def _alike(mine: float, theirs: float) -> bool:
    return math.isclose(mine, theirs, rel_tol=1e-6, abs_tol=1e-6)


# -- beside the library's


class Beside:
    """``real`` ranks; ``naive`` hears the same, and every answer is compared. DifferenceError where they differ."""

    def __init__(self, real: Ranking, naive: NaiveHazard) -> None:
        self.real = real
        self.naive = naive
        self._heard = 0

    def _compare(self) -> None:
        wrong = self.naive.differs(self.real)
        if wrong is not None:
            raise DifferenceError(f"the ranking has learned otherwise: {wrong}")

    def note_request(self, now: float) -> None:
        """See Ranking."""
        self.naive.note_request(now)
        self.real.note_request(now)
        self._compare()

    def add(self, end: ResumePoint, now: float) -> None:
        """See Ranking."""
        self.naive.add(end, now)
        self.real.add(end, now)

    def remove(self, end: ResumePoint) -> None:
        """See Ranking."""
        self.naive.remove(end)
        self.real.remove(end)

    def kept(self, end: ResumePoint, now: float) -> None:
        """See Ranking."""
        self.naive.kept(end, now)
        self.real.kept(end, now)

    def hit(self, end: ResumePoint, now: float) -> None:
        """See Ranking."""
        self.naive.hit(end, now)
        self.real.hit(end, now)

    def note_hint(self, end: ResumePoint, hint: int, now: float) -> None:
        """See Ranking."""
        self.naive.note_hint(end, hint, now)
        self.real.note_hint(end, hint, now)

    def evicted(self, end: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:
        """See Ranking."""
        self.naive.evicted(end, parent, now, declined=declined)
        self.real.evicted(end, parent, now, declined=declined)
        if parent is not None:
            self.naive.agree(parent, self.real)

    def forget(self, end: ResumePoint, now: float) -> None:
        """See Ranking."""
        self.naive.forget(end, now)
        self.real.forget(end, now)

    def lowest(self, now: float) -> ResumePoint | None:
        """See Ranking."""
        found, allowed = self.real.lowest(now), self.naive.allowed(now)
        if found not in allowed:
            raise DifferenceError(f"{_name(found)} goes next, not {' or '.join(map(_name, allowed))}")
        return found

    def prefers(self, end: ResumePoint, other: ResumePoint, now: float) -> bool:
        """See Ranking."""
        expected = self.naive.prefers(end, other, now)
        found = self.real.prefers(end, other, now)
        if expected not in {None, found}:
            raise DifferenceError(f"{_name(end)} is preferred to {_name(other)}: {found}")
        return found

    def check(self) -> list[str]:
        """See Ranking."""
        return self.real.check()


def _name(end: ResumePoint | None) -> str:
    return "nobody" if end is None else f"end {end.serial} of {end.tokens} tokens"


def beside(naive: Callable[[], NaiveHazard] = NaiveHazard) -> Eviction:
    """The eviction by value, each of its rankings beside a naive one."""
    return Eviction(HAZARD.name, lambda: Beside(HazardRanking(), naive()), HAZARD.prefix_multiple)
