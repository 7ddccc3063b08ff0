"""Rankings of ends, one a tenant, and who of the tenants gives way: none learns from another, or pays for it.

A ranking compares the ends of one tenant. Between tenants shares decide, whatever their ends are worth: what a tenant
says or does to make its ends look better costs none but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hybridkv.cache.placement.ends import End, Ranking, Ring
from hybridkv.cache.placement.shares import TenantShares
from hybridkv.request import Request


class TenantRankings:
    """ranking: makes one. memory_bytes: of which ``shares`` are. weights: bytes kept of each tenant.

    For reading: shares, and by_saving (see Ranking).
    """

    def __init__(self, ranking: Callable[[], Ranking], shares: TenantShares, memory_bytes: int) -> None:
        self.shares = shares
        self._memory_bytes = memory_bytes
        self._of = [ranking() for _ in shares.of]
        self.by_saving = self._of[0].by_saving
        self._awaited = [Ring() for _ in shares.of]
        self._numbers = shares.numbers()

    def tenant_of(self, request: Request) -> int:
        """Its number."""
        return self._numbers.get(request.tenant, 0) if request.tenant is not None else 0

    def of(self, end: End) -> Ranking:
        """That of its tenant."""
        return self._of[end.tenant]

    def add(self, end: End, now: float) -> None:
        """See Ranking; an end that somebody waits for goes after all others of its tenant."""
        if end.awaited:
            self._awaited[end.tenant].add(end)
        else:
            self._of[end.tenant].add(end, now)

    def remove(self, end: End) -> None:
        """See Ranking."""
        if end.awaited:
            self._awaited[end.tenant].remove(end)
        else:
            self._of[end.tenant].remove(end)

    def note_request(self, tenant: int, now: float) -> None:
        """One more request of ``tenant`` begins."""
        self._of[tenant].note_request(now)

    def lowest(self, now: float, weights: Sequence[int]) -> End | None:
        """The end to give up next, of the first tenant that gives way and has one. O(tenants log tenants) besides."""
        if len(self._of) == 1:
            return self._lowest_of(0, now)
        order = self.shares.giving_way(weights, self._memory_bytes)
        return next((end for of in order if (end := self._lowest_of(of, now)) is not None), None)

    def _lowest_of(self, tenant: int, now: float) -> End | None:
        awaited = self._awaited[tenant]
        found = self._of[tenant].lowest(now)
        return awaited.first() if found is None and len(awaited) else found

    def prefers(self, end: End, other: End, now: float, weights: Sequence[int]) -> bool:
        """Whether ``other``, which is kept, goes for ``end``; one of another tenant, if that one gives way first."""
        if end.tenant == other.tenant:
            return not other.awaited and self.of(end).prefers(end, other, now)
        order = self.shares.giving_way(weights, self._memory_bytes)
        return order.index(other.tenant) < order.index(end.tenant)

    def given_up(self, end: End, parent: End | None, now: float, *, declined: bool) -> None:
        """See Ranking; a parent of another tenant inherits nothing."""
        own = None if parent is None or parent.tenant != end.tenant else parent
        self.of(end).given_up(end, own, now, declined=declined)

    def check(self) -> Iterator[str]:
        """See Ranking."""
        for ranking, awaited in zip(self._of, self._awaited, strict=True):
            yield from ranking.check()
            yield from (
                f"an end of {end.tokens} tokens is awaited by nobody" for end in awaited.ends() if not end.awaited
            )
