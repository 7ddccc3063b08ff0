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
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, Self

from hybridkv.arguments import check_fields, each, one_of, or_none, real, text
from hybridkv.errors import ConfigError
from hybridkv.request import NO_HINTS, Hints, Request
from hybridkv.units import shown

NOTHING: Final = 0
NEVER: Final = 1
BY_ALL: Final = 2
SOMETIME: Final = 3
WITHIN: Final = 4

_SHORTEST_GAP: Final = 1e-3
"""Seconds between two hits: at less they count as this."""


class Kind(IntEnum):
    """See the module."""

    PROMPT = 0
    OUTPUT = 1
    BRANCH = 2
    GRID = 3


class End:
    """An end, kept or remembered (a ghost).

    tokens: of the prefix. serial: in the order in which ends were first made. used: when it was kept or last hit.
    hits: so far. log_gap: of the natural logarithm of the seconds between hits, the mean of which the last counts half;
    0.0 before the first. session_gap: seconds that its session had paused when it was made, None where it was new.
    saved: tokens that it saves a byte, those behind the nearest kept end before it. tenant: by number, whose memory it
    takes. promise: see the module. awaited: a request that waits goes on from it.
    """

    __slots__ = (
        "awaited",
        "hits",
        "kind",
        "log_gap",
        "promise",
        "saved",
        "serial",
        "session_gap",
        "tenant",
        "tokens",
        "used",
    )

    def __init__(  # noqa: PLR0917 - what an end is
        self, serial: int, kind: Kind, tokens: int, used: float, session_gap: float | None, tenant: int = 0
    ) -> None:
        self.serial = serial
        self.kind = kind
        self.tokens = tokens
        self.used = used
        self.session_gap = session_gap
        self.hits = 0
        self.log_gap = 0.0
        self.saved = 0.0
        self.promise = NOTHING
        self.awaited = False
        self.tenant = tenant

    def note_hit(self, now: float) -> None:
        """It is used now."""
        gap = math.log(max(now - self.used, _SHORTEST_GAP))
        self.log_gap = (self.log_gap + gap) / 2 if self.hits else gap
        self.hits += 1
        self.used = now


class Ring:
    """Ends in the order of their last use. O(log n) in Python, and a shift of the list."""

    __slots__ = ("_ends", "_keys")

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._ends: dict[int, End] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, end: End) -> bool:
        return end.serial in self._ends

    def add(self, end: End) -> bool:
        """``end``, which is in no ring. Whether it is the first or the last one now."""
        keys, key = self._keys, (end.used, end.serial)
        self._ends[end.serial] = end
        if not keys or keys[-1] < key:  # as nearly always
            keys.append(key)
            return True
        place = bisect_left(keys, key)
        keys.insert(place, key)
        return not place

    def remove(self, end: End) -> bool:
        """``end``, whose last use has not changed since it was added. Whether it was the first or the last one."""
        keys = self._keys
        place = bisect_left(keys, (end.used, end.serial))
        del keys[place], self._ends[end.serial]
        return not place or place == len(keys)

    def is_outer(self, end: End) -> bool:
        """Whether ``end``, one of them, is the first or the last."""
        return end.serial in {self._keys[0][1], self._keys[-1][1]}

    def ends(self) -> Iterator[End]:
        """All of them, in no order."""
        return iter(self._ends.values())

    def first(self) -> End:
        """Used longest ago."""
        return self._ends[self._keys[0][1]]

    def both_ends(self) -> tuple[End, ...]:
        """The one used longest ago, and the one used last, if that is another."""
        keys, ends = self._keys, self._ends
        if len(keys) == 1:
            return (ends[keys[0][1]],)
        return ends[keys[0][1]], ends[keys[-1][1]]


class Ranking(Protocol):
    """Which kept end goes next. ``now``: seconds, never less than before.

    An end changes between ``remove`` and ``add`` only. Only ``kept`` and ``hit`` change when it was used.
    """

    def note_request(self, now: float) -> None:
        """One more request begins."""
        ...

    def add(self, end: End, now: float) -> None:
        """``end`` is kept, and may be given up."""
        ...

    def remove(self, end: End) -> None:
        """``end``, added before, may not be given up, or is kept no longer."""
        ...

    def kept(self, end: End, now: float) -> None:
        """``end``, a ghost or new and not added now, is kept from now on: it is used now, and a new age begins."""
        ...

    def hit(self, end: End, now: float) -> None:
        """``end``, not added now, was hit, or would have been; its ``used`` is that before."""
        ...

    def promised(self, end: End, promise: int, now: float) -> None:
        """``promise`` is what hints say of ``end``, not added now, from now on."""
        ...

    def given_up(self, end: End, parent: End | None, now: float, *, declined: bool) -> None:
        """``end`` is kept no longer, or was declined. parent: the kept end that serves its requests now."""
        ...

    def forget(self, end: End, now: float) -> None:
        """``end``, a ghost, is remembered no longer."""
        ...

    def lowest(self, now: float) -> End | None:
        """The end to give up next, None where there is none."""
        ...

    def prefers(self, end: End, other: End, now: float) -> bool:
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


class _Tenant:
    """What is kept of a tenant that has had a request. ends: how many may be given up. standing: its place in order."""

    __slots__ = ("awaited", "ends", "ranking", "standing")

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.awaited = Ring()
        self.ends = 0
        self.standing: Standing | None = None

    def lowest(self, now: float) -> End | None:
        """The end of this tenant to give up next."""
        found = self.ranking.lowest(now)
        return self.awaited.first() if found is None and len(self.awaited) else found


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
        """Its number."""
        return self._numbers.get(request.tenant, 0) if request.tenant is not None else 0

    def _tenant(self, number: int) -> _Tenant:
        found = self._tenants.get(number)
        if found is None:
            found = self._tenants[number] = _Tenant(self._ranking())
        return found

    def of(self, end: End) -> Ranking:
        """That of its tenant."""
        return self._tenant(end.tenant).ranking

    def add(self, end: End, now: float) -> None:
        """See Ranking; an end that somebody waits for goes after all others of its tenant."""
        tenant = self._tenant(end.tenant)
        if end.awaited:
            tenant.awaited.add(end)
        else:
            tenant.ranking.add(end, now)
        tenant.ends += 1
        if tenant.ends == 1:
            self._moved.add(end.tenant)

    def remove(self, end: End) -> None:
        """See Ranking."""
        tenant = self._tenants[end.tenant]
        if end.awaited:
            tenant.awaited.remove(end)
        else:
            tenant.ranking.remove(end)
        tenant.ends -= 1
        if not tenant.ends:
            self._moved.add(end.tenant)

    def note_request(self, tenant: int, now: float) -> None:
        """One more request of ``tenant`` begins."""
        self._tenant(tenant).ranking.note_request(now)

    def lowest(self, now: float) -> End | None:
        """Return the end to give up next: of the tenants that have one, the first that gives way.

        O(log tenants) and a shift of a list, for each tenant whose bytes have changed since the last call.
        """
        if len(self.shares.of) == 1:
            return self._tenants[0].lowest(now)
        self._place()
        return self._tenants[self._order[0][-1]].lowest(now) if self._order else None

    def _place(self) -> None:
        """Bring tenants whose bytes changed, or whose first or last end came or went, to their places."""
        for number in self._moved | self._weights.changed:
            tenant = self._tenants.get(number)
            if tenant is None:
                continue
            if tenant.standing is not None:
                del self._order[bisect_left(self._order, tenant.standing)]
            tenant.standing = self._standing(number) if tenant.ends else None
            if tenant.standing is not None:
                insort(self._order, tenant.standing)
        self._moved.clear()
        self._weights.changed.clear()

    def _standing(self, tenant: int) -> Standing:
        return self.shares.standing(tenant, self._weights.of[tenant], self._memory_bytes)

    def prefers(self, end: End, other: End, now: float) -> bool:
        """Whether ``other``, which is kept, goes for ``end``; one of another tenant, if that one gives way first."""
        if end.tenant == other.tenant:
            return not other.awaited and self.of(end).prefers(end, other, now)
        return self._standing(other.tenant) < self._standing(end.tenant)

    def given_up(self, end: End, parent: End | None, now: float, *, declined: bool) -> None:
        """See Ranking; a parent of another tenant inherits nothing."""
        own = None if parent is None or parent.tenant != end.tenant else parent
        self.of(end).given_up(end, own, now, declined=declined)

    def check(self, ranked: Mapping[int, int]) -> Iterator[str]:
        """See Ranking. ranked: how many ends of each tenant may be given up."""
        for number, tenant in self._tenants.items():
            yield from tenant.ranking.check()
            yield from (
                f"an end of {end.tokens} tokens is awaited by nobody"
                for end in tenant.awaited.ends()
                if not end.awaited
            )
            if tenant.ends != ranked.get(number, 0):
                yield f"tenant {number} has {tenant.ends} ends that may go by count, not {ranked.get(number, 0)}"
        self._place()
        if len(self.shares.of) > 1 and self._order != sorted(map(self._standing, ranked)):
            yield f"tenants give way as {self._order}, not by what they have too much"
