"""Rankings of ends, one a tenant, and who of the tenants gives way: none learns from another, or pays for it.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from hybridkv.arguments import real, text
from hybridkv.errors import ConfigError
from hybridkv.eviction.blocks import Weights
from hybridkv.eviction.ranking import End, Ranking, Ring
from hybridkv.frozen import check_fields, each, one_of, or_none
from hybridkv.request import Request
from hybridkv.units import shown

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
