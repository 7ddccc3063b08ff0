"""What became of ends so far, by kind; what tenants found, and what more memory would have found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hybridkv.cache.placement.ends import End, Kind
from hybridkv.cache.placement.shares import TenantShares
from hybridkv.cache.statistics import EndStatistics, TenantStatistics

_MORE_BYTES: Final = 1 << 30


class EndCounts:
    """For reading: missed_tokens, which the deepest ghosts would have been hit for, and missed_a_gib_more.

    The latter are those of ghosts since whom no more than a GiB was given up.
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares.of
        self._asked = [[0, 0, 0] for _ in shares.of]
        self.missed_tokens = self.missed_a_gib_more = 0
        self._of = {kind: [0] * 6 for kind in Kind}
        self._given_up_bytes = 0
        self._gone_at: dict[int, int] = {}

    def note_request(self, tenant: int, prompt_tokens: int, hit_tokens: int) -> None:
        """A request of ``tenant`` begins for the first time."""
        counts = self._asked[tenant]
        counts[0] += 1
        counts[1] += prompt_tokens
        counts[2] += hit_tokens

    def note_kept(self, end: End) -> None:
        """``end`` is kept from now on."""
        self._of[end.kind][0] += 1
        self._gone_at.pop(end.serial, None)

    def note_hit(self, end: End) -> None:
        """``end``, kept, was hit."""
        self._of[end.kind][1] += 1

    def note_missed(self, end: End, tokens: int) -> None:
        """``end``, a ghost, would have been hit for ``tokens`` more tokens."""
        self._of[end.kind][2] += 1
        self.missed_tokens += tokens
        if self._given_up_bytes - self._gone_at.get(end.serial, 0) <= _MORE_BYTES:
            self.missed_a_gib_more += tokens

    def note_gone(self, end: End, size: int, *, declined: bool) -> None:
        """``end``, which needed ``size`` bytes alone, is a ghost from now on."""
        counts = self._of[end.kind]
        counts[3 if declined else 4] += 1
        counts[5] += not (declined or end.hits)
        self._given_up_bytes += size
        self._gone_at[end.serial] = self._given_up_bytes

    def forget(self, end: End) -> None:
        """``end`` is no ghost any longer, and not kept."""
        self._gone_at.pop(end.serial, None)

    def statistics(self, kept: dict[Kind, int]) -> tuple[EndStatistics, ...]:
        """One a kind. kept: how many are, now."""
        return tuple(EndStatistics(kind.name.lower(), kept.get(kind, 0), *counts) for kind, counts in self._of.items())

    def tenants(self, weights: Sequence[int]) -> tuple[TenantStatistics, ...]:
        """One a tenant, none where there is a single one. weights: bytes that are kept of each."""
        if len(self._shares) == 1:
            return ()
        parts = zip(self._shares, weights, self._asked, strict=True)
        return tuple(TenantStatistics(share.name, weight, *counts) for share, weight, counts in parts)
