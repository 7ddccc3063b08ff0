"""Ends as a ranking knows them, and what a ranking answers.

PROMPT    before the last token of a prompt          BRANCH    where requests went different ways, or a mark
OUTPUT    where a request ended                      GRID      any other place that a placement asks for

and what hints promise of them:

NOTHING   no hint, or none that concerns it          NEVER     its session is over, or goes on elsewhere
BY_ALL    it is within what many begin with          SOMETIME  its session goes on from here
WITHIN    and those above: within 4, 16, 64 ... seconds

What an end is made as: its kind, and what hints promise of it (docs/design/0026).

A promise is a class of its own for what learns, with a rate to begin with; what its like have done outweighs that.

Rankings of ends, one a tenant, and who of the tenants gives way: none learns from another, or pays for it.

A ranking compares the ends of one tenant. Between tenants shares decide, whatever their ends are worth: what a tenant
says or does to make its ends look better costs none but itself.

Shares of memory that tenants have of what is kept, and who gives way: frozen values that only say it.

    within its guaranteed share     gives way last
    above it                        before those
    above its greatest share        first of all; of each of the three, who has the most too much

Nobody is kept from memory that no other wants: shares only say whose ends go when room is short (docs/design/0026).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, Protocol, Self

from hybridkv.arguments import check_fields, each, one_of, or_none, real, text
from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints, Request
from hybridkv.units import shown

NOTHING: Final = 0
NEVER: Final = 1
BY_ALL: Final = 2
SOMETIME: Final = 3
WITHIN: Final = 4

WHOLE: Final = (b"", b"")
"""``ResumePoint.inside`` at the edge of a hash block."""

_SHORTEST_GAP: Final = 1e-3
"""Seconds between two hits: at less they count as this."""


class Kind(IntEnum):
    """See the module."""

    PROMPT = 0
    OUTPUT = 1
    BRANCH = 2
    GRID = 3


@dataclass(slots=True, eq=False)
class ResumePoint:
    """A token count of a prefix at which a later request can resume: kept, or remembered (a ghost).

    Attributes
        serial: number in the order in which resume points were first made.
        kind, promise: what it was made as, and what hints promise of it; see the module.
        tokens: of the prefix.
        used: seconds, when it was kept or last hit.
        session_gap: seconds that its session had paused when it was made; None for a new session.
        tenant: number of the tenant that is charged for its blocks.
        depth, chain, inside, parent, children, segment: its place in the tree (hybridkv.eviction.resume_points).
        own: blocks that no other kind of resume point shares: its states, and those that hold its last tokens.
        kept: whether it is no ghost.
        ranked: whether it may be given up.
        hits: so far.
        log_gap: mean of the natural logarithm of the seconds between hits, in which the last counts half; 0.0 before
            the first.
        saved: tokens behind its parent for each byte that it needs.
        awaited: whether a waiting request will resume here.
        class_number, row, ring, heir, value, until, learned: kept by its ranking (hybridkv.eviction.hazard).
    """

    serial: int
    kind: Kind
    tokens: int
    used: float
    session_gap: float | None
    tenant: int = 0
    depth: int = 0
    chain: bytes = b""
    inside: tuple[bytes, bytes] = WHOLE
    parent: ResumePoint | None = field(default=None, repr=False)
    children: dict[bytes, list[ResumePoint]] = field(default_factory=dict, repr=False)
    segment: list[bytes] = field(default_factory=list, repr=False)
    own: list[int] = field(default_factory=list)
    kept: bool = False
    ranked: bool = False
    hits: int = 0
    log_gap: float = 0.0
    saved: float = 0.0
    promise: int = NOTHING
    awaited: bool = False
    class_number: int = -1
    row: int = -1
    ring: tuple[int, int] | None = None
    heir: Heir | None = None
    value: float = math.inf
    until: float = -math.inf
    learned: int = 0


class Heir(NamedTuple):
    """A resume point that was given up: its class, and when it was last used."""

    class_number: int
    used: float


def note_hit(point: ResumePoint, now: float) -> None:
    """Count a hit of ``point``, which is used ``now``."""
    gap = math.log(max(now - point.used, _SHORTEST_GAP))
    point.log_gap = (point.log_gap + gap) / 2 if point.hits else gap
    point.hits += 1
    point.used = now


class Ring:
    """Hold resume points in the order of their last use. O(log n) in Python, and a shift of the list.

    Attributes
        points: (used, serial, resume point), ascending.
        least, value, until: the end of the ring of less value, as of ``until``; kept by the ranking that owns the ring.
    """

    __slots__ = ("least", "points", "until", "value")

    def __init__(self) -> None:
        self.points: list[tuple[float, int, ResumePoint]] = []
        self.least: ResumePoint | None = None
        self.value, self.until = math.inf, -math.inf

    def add(self, point: ResumePoint) -> bool:
        """Add ``point``, which is in no ring. Return whether it is the first or the last one now."""
        points, entry = self.points, (point.used, point.serial, point)
        if not points or points[-1] < entry:  # as nearly always
            points.append(entry)
            return True
        place = bisect_left(points, entry)
        points.insert(place, entry)
        return not place

    def remove(self, point: ResumePoint) -> bool:
        """Remove ``point``, whose last use is as it was when added. Return whether it was the first or the last one."""
        place = bisect_left(self.points, (point.used, point.serial))
        del self.points[place]
        return not place or place == len(self.points)

    def outer(self) -> tuple[ResumePoint, ...]:
        """Return the one used longest ago, and the one used last where that is another."""
        points = self.points
        return (points[0][2],) if len(points) == 1 else (points[0][2], points[-1][2])


class Ranking(Protocol):
    """Which kept end goes next. ``now``: seconds, never less than before.

    An end changes between ``remove`` and ``add`` only. Only ``kept`` and ``hit`` change when it was used.
    """

    def note_request(self, now: float) -> None:
        """One more request begins."""
        ...

    def add(self, end: ResumePoint, now: float) -> None:
        """``end`` is kept, and may be given up."""
        ...

    def remove(self, end: ResumePoint) -> None:
        """``end``, added before, may not be given up, or is kept no longer."""
        ...

    def kept(self, end: ResumePoint, now: float) -> None:
        """``end``, a ghost or new and not added now, is kept from now on: it is used now, and a new age begins."""
        ...

    def hit(self, end: ResumePoint, now: float) -> None:
        """``end``, not added now, was hit, or would have been; its ``used`` is that before."""
        ...

    def promised(self, end: ResumePoint, promise: int, now: float) -> None:
        """``promise`` is what hints say of ``end``, not added now, from now on."""
        ...

    def given_up(self, end: ResumePoint, parent: ResumePoint | None, now: float, *, declined: bool) -> None:
        """``end`` is kept no longer, or was declined. parent: the kept end that serves its requests now."""
        ...

    def forget(self, end: ResumePoint, now: float) -> None:
        """``end``, a ghost, is remembered no longer."""
        ...

    def lowest(self, now: float) -> ResumePoint | None:
        """The end to give up next, None where there is none."""
        ...

    def prefers(self, end: ResumePoint, other: ResumePoint, now: float) -> bool:
        """Whether ``other``, which is kept, is to be given up for ``end``."""
        ...

    def check(self) -> list[str]:
        """A line for each thing kept that is not what it would be when made anew. O(ends)."""
        ...


_BASE: Final = 4.0
_MOST: Final = 11
_KINDS: Final = len(Kind)


def kind_of(request: Request, tokens: int, *, ended: bool) -> Kind:
    """Of the end at ``tokens`` of ``request``. ended: it ends there."""
    if ended:
        return Kind.OUTPUT
    if tokens == request.branch_tokens or tokens in request.marks:
        return Kind.BRANCH
    return Kind.PROMPT if tokens == request.num_prompt_tokens - 1 else Kind.GRID


def promise_of(request: Request, tokens: int) -> int:
    """What is promised of the end at ``tokens`` of ``request``. O(marks)."""
    hints = request.hints
    if hints is NO_HINTS:
        return NOTHING
    if tokens <= hints.shared_tokens:
        return BY_ALL
    if tokens in request.marks:
        return of_session(hints)
    if tokens == request.branch_tokens:
        return NOTHING
    elsewhere = hints.goes_on and any(mark > hints.shared_tokens for mark in request.marks)
    return NEVER if elsewhere else of_session(hints)


def of_session(hints: Hints) -> int:
    """What is promised of where a session goes on."""
    if hints.over or hints.scratch:
        return NEVER
    if hints.within_s is not None:
        return WITHIN + _step_of(hints.within_s)
    return SOMETIME if hints.goes_on else NOTHING


def _step_of(seconds: float) -> int:
    step, bound = 0, _BASE
    while seconds > bound and step < _MOST:
        step, bound = step + 1, bound * _BASE
    return step


def is_of_session(promise: int) -> bool:
    """Whether it holds for one session, which keeps it by going on."""
    return promise not in {NOTHING, BY_ALL}


def in_words(promise: int) -> str:
    """What hints said, as they are named."""
    if promise >= WITHIN:
        return f"within {_BASE ** (1 + promise - WITHIN):.0f} s"
    return {NOTHING: "", NEVER: "never", BY_ALL: "by all", SOMETIME: "some time"}[promise]


# -- as part of a class


def class_kind(kind: Kind, promise: int) -> int:
    """One number for both."""
    return int(kind) + _KINDS * promise


def parts_of(number: int) -> tuple[Kind, int]:
    """Kind and promise of a ``class_kind``."""
    return Kind(number % _KINDS), number // _KINDS


def is_promised(number: int) -> bool:
    """Whether anything is promised of ends of ``class_kind`` ``number``."""
    return number >= _KINDS


def promised_rate(number: int, usual: float, age: float) -> float:
    """Hits a second to begin with, of ends of ``class_kind`` ``number`` at ``age`` seconds; of all together: usual."""
    promise = number // _KINDS
    if promise >= WITHIN:
        bound = _BASE ** (1 + promise - WITHIN)
        return max(usual, 2 / bound) if age < bound else usual
    return usual * {NOTHING: 1.0, NEVER: 1e-3, BY_ALL: 100.0, SOMETIME: 10.0}[promise]


Standing = tuple[bool, float, int]
"""Whether a tenant is within its greatest share, its bytes that are left of the share, and its number."""

_OTHERS: Final = "*"
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Share:
    """tenant: the label of its requests, or their salt where they have none; None for all that are not named.

    guaranteed, greatest: of memory, 0 .. 1. ConfigError for others, and for a greatest below the guaranteed.
    """

    tenant: str | None
    guaranteed: float = 0.0
    greatest: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, or_none(text), "tenant")
        check_fields(self, real, "guaranteed", "greatest")
        if not 0 <= self.guaranteed <= self.greatest <= 1:
            raise ConfigError(
                f"the share of {self.name} must be guaranteed and greatest with 0 <= guaranteed <= greatest <= 1, "
                f"got {self.guaranteed:g} and {self.greatest:g}"
            )

    @property
    def name(self) -> str:
        """For messages, and as ``parse`` reads it."""
        return _OTHERS if self.tenant is None else self.tenant


@dataclass(frozen=True, slots=True)
class TenantShares:
    """of: in any order; made to begin with that of all who are not named, who are one tenant, number 0.

    ConfigError for a tenant named twice, and for guaranteed shares of more than all memory.
    """

    of: tuple[Share, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, each(one_of(Share)), "of")
        times = Counter(one.tenant for one in self.of)
        twice = next((one for one in self.of if times[one.tenant] > 1), None)
        if twice is not None:
            raise ConfigError(f"{shown(twice.name)} has more than one share: name it once")
        total = math.fsum(one.guaranteed for one in self.of)
        if total > 1 + _ROUNDING:
            raise ConfigError(f"guaranteed shares are {total:.0%} of memory together: lower them to 100% or less")
        others = [one for one in self.of if one.tenant is None] or [Share(None)]
        object.__setattr__(self, "of", (*others, *(one for one in self.of if one.tenant is not None)))

    def numbers(self) -> dict[str, int]:
        """Of the tenants that are named."""
        return {one.tenant: number for number, one in enumerate(self.of) if one.tenant is not None}

    def standing(self, tenant: int, weight: int, memory_bytes: int) -> Standing:
        """Return where a tenant stands among all: of two, the one that stands lower gives way first.

        tenant: its number. weight: bytes that are kept of it. memory_bytes: of which the shares are.
        """
        share = self.of[tenant]
        above = weight > share.greatest * memory_bytes
        bound = share.greatest if above else share.guaranteed
        return not above, bound * memory_bytes - weight, tenant

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Of ``NAME=GUARANTEED`` or ``NAME=GUARANTEED..GREATEST`` each, * for all not named: ``team-a=30%..60%``.

        ConfigError for anything else.
        """
        return cls(tuple(map(_parsed, texts)))


EVERYBODY: Final = TenantShares()
"""All requests are of one tenant."""


def _parsed(asked: str) -> Share:
    name, _, bounds = asked.rpartition("=")
    low, dots, high = bounds.partition("..")
    try:
        guaranteed, greatest = _fraction(low), _fraction(high) if dots else 1.0
    except ValueError:
        name = ""
    if not name:
        raise ConfigError(f"not a share: {shown(asked)}; write it like team-a=30% or team-a=30%..60%")
    return Share(None if name == _OTHERS else name, guaranteed, greatest)


def _fraction(number: str) -> float:
    """``30%`` or ``0.3``."""
    return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)


@dataclass(slots=True)
class _Tenant:
    """What is kept of a tenant that has had a request. points: how many may be given up. standing: its place in order.

    awaited: those that a request waits for, which go after all that ``ranking`` ranks.
    """

    ranking: Ranking
    awaited: Ring = field(default_factory=Ring)
    points: int = 0
    standing: Standing | None = None


class Weights:
    """Bytes that each tenant is charged, not followed for a single one.

    For reading: of, by number; changed, the tenants whose bytes were changed, until the one reader clears it.
    """

    __slots__ = ("changed", "of")

    def __init__(self, tenants: int) -> None:
        self.of = [0] * tenants
        self.changed = set[int]()

    def add(self, tenant: int, size: int) -> None:
        """Charge ``tenant`` for ``size`` bytes more, or less where it is negative."""
        self.of[tenant] += size
        self.changed.add(tenant)

    def replace(self, sizes: Sequence[int]) -> None:
        """Charge each tenant for so many bytes. O(tenants)."""
        self.of[:] = sizes
        self.changed.update(range(len(sizes)))


class TenantRankings:
    """Rank the ends of each tenant, and say whose end goes next. What a tenant needs is made for its first request.

    ranking: makes one. memory_bytes: of which ``shares`` are. weights: bytes kept of each tenant, followed from now on.
    For reading: shares.
    """

    def __init__(
        self, ranking: Callable[[], Ranking], shares: TenantShares, memory_bytes: int, weights: Weights
    ) -> None:
        self.shares = shares
        self._ranking = ranking
        self._memory_bytes = memory_bytes
        self._weights = weights
        self._tenants = {0: _Tenant(ranking())}
        self._numbers = shares.numbers()
        self._order: list[Standing] = []
        self._moved = set[int]()

    def tenant_of(self, request: Request) -> int:
        """Return the number of the tenant of ``request``."""
        return self._numbers.get(request.tenant, 0) if request.tenant is not None else 0

    def of(self, tenant: int) -> Ranking:
        """Return the ranking of ``tenant``."""
        return self._of(tenant).ranking

    def _of(self, tenant: int) -> _Tenant:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(self._ranking())
        return found

    def add(self, point: ResumePoint, now: float) -> None:
        """Rank ``point``; one that a request waits for goes after all others of its tenant."""
        tenant = self._of(point.tenant)
        if point.awaited:
            tenant.awaited.add(point)
        else:
            tenant.ranking.add(point, now)
        tenant.points += 1
        if tenant.points == 1:
            self._moved.add(point.tenant)

    def remove(self, point: ResumePoint) -> None:
        """Rank ``point`` no longer."""
        tenant = self._tenants[point.tenant]
        if point.awaited:
            tenant.awaited.remove(point)
        else:
            tenant.ranking.remove(point)
        tenant.points -= 1
        if not tenant.points:
            self._moved.add(point.tenant)

    def lowest(self, now: float) -> ResumePoint | None:
        """Return the resume point to give up next: of the tenants that have one, the first that gives way.

        O(log tenants) and a shift of a list, for each tenant whose bytes have changed since the last call.
        """
        if len(self.shares.of) == 1:
            tenant = self._tenants[0]
        else:
            self._place()
            if not self._order:
                return None
            tenant = self._tenants[self._order[0][-1]]
        found = tenant.ranking.lowest(now)
        return tenant.awaited.outer()[0] if found is None and tenant.awaited.points else found

    def _place(self) -> None:
        """Bring tenants whose bytes changed, or whose first or last resume point came or went, to their places."""
        for number in self._moved | self._weights.changed:
            tenant = self._tenants.get(number)
            if tenant is None:
                continue
            if tenant.standing is not None:
                del self._order[bisect_left(self._order, tenant.standing)]
            tenant.standing = self._standing(number) if tenant.points else None
            if tenant.standing is not None:
                insort(self._order, tenant.standing)
        self._moved.clear()
        self._weights.changed.clear()

    def _standing(self, tenant: int) -> Standing:
        return self.shares.standing(tenant, self._weights.of[tenant], self._memory_bytes)

    def prefers(self, point: ResumePoint, other: ResumePoint, now: float) -> bool:
        """Return whether ``other``, which is kept, goes for ``point``: of another tenant, if that gives way first."""
        if point.tenant == other.tenant:
            return not other.awaited and self.of(point.tenant).prefers(point, other, now)
        return self._standing(other.tenant) < self._standing(point.tenant)

    def check(self, ranked: Mapping[int, int]) -> Iterator[str]:
        """Yield a line for each violated invariant. ranked: resume points of each tenant that may be given up."""
        for number, tenant in self._tenants.items():
            yield from tenant.ranking.check()
            yield from (
                f"no request waits for the awaited resume point of {point.tokens} tokens"
                for _, _, point in tenant.awaited.points
                if not point.awaited
            )
            if tenant.points != ranked.get(number, 0):
                yield f"tenant {number} counts {tenant.points} ranked resume points, not {ranked.get(number, 0)}"
        self._place()
        if len(self.shares.of) > 1 and self._order != sorted(map(self._standing, ranked)):
            yield f"tenants give way as {self._order}, not by what they have too much"
