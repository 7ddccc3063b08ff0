"""Divide the memory of resume points between tenants, and choose the tenant that evicts next (docs/design/0026).

    above its greatest share        evicts first
    above its guaranteed share      evicts next
    within its guaranteed share     evicts last

Among tenants of one line, the tenant with the largest excess evicts first. A tenant may use memory that no other tenant
wants: shares matter only when room is short.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from hybridkv.arguments import check_fields, each, one_of, or_none, real, text
from hybridkv.errors import ConfigError
from hybridkv.eviction.hazard import Ranking, Ring
from hybridkv.eviction.resume_points import ResumePoint
from hybridkv.request import Request
from hybridkv.units import shown

Standing = tuple[bool, float, int]
"""The order of a tenant among all: the smallest one evicts first.

It holds whether the tenant is within its greatest share, the bytes left until the next share, and the tenant's number.
"""

_OTHERS: Final = "*"
_ROUNDING: Final = 1e-9
"""The allowed rounding error of a sum of shares; chosen by hand."""


@dataclass(frozen=True, slots=True)
class Share:
    """Give one tenant a share of the memory.

    Attributes:
        tenant: The tenant label of its requests, or their salt if they have no label; None for all unnamed tenants.
        guaranteed: Fraction of the memory, 0 to 1, up to which the tenant evicts last.
        greatest: Fraction of the memory, ``guaranteed`` to 1, above which the tenant evicts first.

    Raises:
        ConfigError: A fraction is outside its limits.
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
        """The tenant as ``parse`` reads it: ``*`` for all unnamed tenants."""
        return _OTHERS if self.tenant is None else self.tenant


@dataclass(frozen=True, slots=True)
class TenantShares:
    """Hold the shares of all tenants.

    Attributes:
        of: The shares in any order. The constructor moves the share of unnamed tenants to the front, or adds it:
            they count as one tenant, number 0.

    Raises:
        ConfigError: A tenant has two shares, or the guaranteed shares exceed the memory.
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
            raise ConfigError(f"guaranteed shares add up to {total:.0%} of memory: lower them to 100% or less")
        others = [one for one in self.of if one.tenant is None] or [Share(None)]
        object.__setattr__(self, "of", (*others, *(one for one in self.of if one.tenant is not None)))

    def numbers(self) -> dict[str, int]:
        """Return the number of each named tenant. O(tenants)."""
        return {one.tenant: number for number, one in enumerate(self.of) if one.tenant is not None}

    def standing(self, tenant: int, weight: int, memory_bytes: int) -> Standing:
        """Return the order of a tenant among all: the tenant with the smallest value evicts first.

        Args:
            tenant: The number of the tenant.
            weight: Bytes that the tenant is charged.
            memory_bytes: Bytes of the memory that the shares divide.
        """
        share = self.of[tenant]
        above = weight > share.greatest * memory_bytes
        bound = share.greatest if above else share.guaranteed
        return not above, bound * memory_bytes - weight, tenant

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Read shares from the command line.

        Args:
            texts: ``NAME=GUARANTEED`` or ``NAME=GUARANTEED..GREATEST`` each, for example ``team-a=30%..60%``. The name
                ``*`` means all unnamed tenants.

        Raises:
            ConfigError: A text has another form, or the shares contradict each other.
        """
        return cls(tuple(map(_parsed, texts)))


EVERYBODY: Final = TenantShares()
"""No tenant has a share: all requests count as one tenant."""


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
    """Return the fraction of ``30%`` or ``0.3``."""
    return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)


class Weights:
    """Count the bytes that each tenant is charged. With a single tenant the counts stay 0.

    Args:
        tenants: Number of tenants.

    Attributes:
        of: Bytes of each tenant, by its number.
        changed: Tenants with changed bytes. Its only reader clears it.
    """

    __slots__ = ("changed", "of")

    def __init__(self, tenants: int) -> None:
        self.of = [0] * tenants
        self.changed = set[int]()

    def add(self, tenant: int, size: int) -> None:
        """Charge ``tenant`` for ``size`` more bytes; a negative size reduces the charge."""
        self.of[tenant] += size
        self.changed.add(tenant)

    def replace(self, sizes: Sequence[int]) -> None:
        """Set the charge of each tenant to its entry of ``sizes``, in bytes. O(tenants)."""
        self.of[:] = sizes
        self.changed.update(range(len(sizes)))


@dataclass(slots=True)
class _Tenant:
    """Hold the ranking of a tenant.

    Attributes:
        ranking: The resume points that may be evicted and are not protected.
        protected: The protected ones. They are evicted after all points of ``ranking``, the least recently used first.
        points: Number of both.
        standing: Its place in the order of tenants, while it has points.
    """

    ranking: Ranking
    protected: Ring = field(default_factory=Ring)
    points: int = 0
    standing: Standing | None = None


class TenantRankings:
    """Rank the resume points of each tenant, and choose the next one to evict over all tenants.

    Args:
        ranking: Makes the ranking of a tenant at its first request.
        shares: The shares of the tenants.
        memory_bytes: The memory that ``shares`` divide.
        weights: Bytes that each tenant is charged, read at each choice.

    Attributes:
        shares: The shares of the tenants.
        tenants: The ranking and points of each tenant, by its number.
    """

    def __init__(
        self, ranking: Callable[[], Ranking], shares: TenantShares, memory_bytes: int, weights: Weights
    ) -> None:
        self.shares = shares
        self._memory_bytes = memory_bytes
        self._weights = weights
        self.tenants = defaultdict[int, _Tenant](lambda: _Tenant(ranking()), {0: _Tenant(ranking())})
        self._numbers = shares.numbers()
        self._order: list[Standing] = []
        self._moved = set[int]()

    def tenant_of(self, request: Request) -> int:
        """Return the number of the tenant of ``request``."""
        return 0 if request.tenant is None else self._numbers.get(request.tenant, 0)

    def add(self, point: ResumePoint, now: float) -> None:
        """Rank ``point``; a protected one goes after all others of its tenant."""
        tenant = self.tenants[point.tenant]
        if point.protected:
            tenant.protected.add(point)
        else:
            tenant.ranking.add(point, now)
        tenant.points += 1
        if tenant.points == 1:
            self._moved.add(point.tenant)

    def remove(self, point: ResumePoint) -> None:
        """Rank ``point`` no longer."""
        tenant = self.tenants[point.tenant]
        if point.protected:
            tenant.protected.remove(point)
        else:
            tenant.ranking.remove(point)
        tenant.points -= 1
        if not tenant.points:
            self._moved.add(point.tenant)

    def lowest(self, now: float) -> ResumePoint | None:
        """Return the resume point to evict next: from the first tenant in order that has one.

        O(log tenants) and a shift of a list, for each tenant whose bytes have changed since the last call.
        """
        if len(self.shares.of) == 1:
            tenant = self.tenants[0]
        else:
            self._place()
            if not self._order:
                return None
            tenant = self.tenants[self._order[0][-1]]
        found = tenant.ranking.lowest(now)
        return tenant.protected.outer()[0] if found is None and tenant.protected.points else found

    def _place(self) -> None:
        """Move tenants to their places if their bytes changed, or their first or last resume point came or went."""
        for number in self._moved | self._weights.changed:
            tenant = self.tenants.get(number)
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
        """Return whether ``other``, which is kept, is evicted to keep ``point``.

        If they belong to different tenants, the order of the tenants decides.
        """
        if point.tenant == other.tenant:
            if point.protected or other.protected:
                return point.protected and not other.awaited
            return self.tenants[point.tenant].ranking.prefers(point, other, now)
        return self._standing(other.tenant) < self._standing(point.tenant)

    def check(self, ranked: Mapping[int, int]) -> Iterator[str]:
        """Yield a line for each violated invariant. ranked: how many resume points of each tenant may be evicted."""
        for number, tenant in self.tenants.items():
            yield from tenant.ranking.check()
            yield from (
                f"nothing protects the resume point of {point.tokens} tokens, which is evicted late"
                for _, _, point in tenant.protected.points
                if not point.protected
            )
            if tenant.points != ranked.get(number, 0):
                yield f"tenant {number} counts {tenant.points} ranked resume points, not {ranked.get(number, 0)}"
        self._place()
        if len(self.shares.of) > 1 and self._order != sorted(map(self._standing, ranked)):
            yield f"tenants evict in the order {self._order}, which does not follow their shares"
