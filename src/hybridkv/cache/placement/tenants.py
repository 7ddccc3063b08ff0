"""Rankings of ends, one a tenant, and who of the tenants gives way: none learns from another, or pays for it.

A ranking compares the ends of one tenant. Between tenants shares decide, whatever their ends are worth: what a tenant
says or does to make its ends look better costs none but itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from hybridkv.cache.needs import Weights
from hybridkv.cache.placement.ends import End, Ranking, Ring
from hybridkv.cache.placement.shares import Standing, TenantShares
from hybridkv.request import Request


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
