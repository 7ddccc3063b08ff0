"""What became of ends so far, by kind and class; what tenants found, and what more memory would have found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from hybridkv.cache.placement.ends import End, Kind
from hybridkv.cache.placement.hazard import class_of, least_gap_s
from hybridkv.cache.placement.promises import in_words, parts_of
from hybridkv.cache.placement.shares import TenantShares
from hybridkv.cache.statistics import EndClassStatistics, EndStatistics, TenantStatistics

_MORE_BYTES: Final = 1 << 30


class EndCounts:
    """For reading: missed_tokens, which the deepest ghosts would have been hit for, and missed_a_gib_more.

    The latter are those of ghosts since whom no more than a GiB was given up.
    """

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares.of
        self._asked = defaultdict[int, list[int]](lambda: [0] * 3)
        self.missed_tokens = self.missed_a_gib_more = 0
        self._of = {kind: [0] * 6 for kind in Kind}
        self._of_class: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0] * 3)
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
        """``end``, kept, is hit."""
        self._of[end.kind][1] += 1
        self._of_class[class_of(end)][0] += 1

    def note_missed(self, end: End, tokens: int) -> None:
        """``end``, a ghost, would be hit for ``tokens`` more tokens."""
        self._of[end.kind][2] += 1
        self._of_class[class_of(end)][1] += 1
        self.missed_tokens += tokens
        if self._given_up_bytes - self._gone_at.get(end.serial, 0) <= _MORE_BYTES:
            self.missed_a_gib_more += tokens

    def note_gone(self, end: End, size: int, *, declined: bool) -> None:
        """``end``, which needed ``size`` bytes alone, is a ghost from now on."""
        counts = self._of[end.kind]
        counts[3 if declined else 4] += 1
        counts[5] += not (declined or end.hits)
        if not declined:
            self._of_class[class_of(end)][2] += 1
        self._given_up_bytes += size
        self._gone_at[end.serial] = self._given_up_bytes

    def forget(self, end: End) -> None:
        """``end`` is no ghost any longer, and not kept."""
        self._gone_at.pop(end.serial, None)

    def statistics(self, kept: Iterable[End]) -> tuple[EndStatistics, ...]:
        """One a kind. kept: those that are, now. O(kept)."""
        of_class = Counter(map(class_of, kept))
        classes: dict[Kind, list[EndClassStatistics]] = {kind: [] for kind in Kind}
        kept_of: Counter[Kind] = Counter()
        for key in sorted({*of_class, *self._of_class}):
            (kind, promise), hits, gap = parts_of(key[0]), key[1], key[2]
            kept_of[kind] += of_class[key]
            counts = self._of_class.get(key, [0] * 3)
            found = EndClassStatistics(in_words(promise), hits, least_gap_s(hits, gap), of_class[key], *counts)
            classes[kind].append(found)
        return tuple(
            EndStatistics(kind.name.lower(), tuple(classes[kind]), kept_of[kind], *counts)
            for kind, counts in self._of.items()
        )

    def tenants(self, weights: Sequence[int]) -> tuple[TenantStatistics, ...]:
        """One a tenant, none where there is a single one. weights: bytes that are kept of each."""
        if len(self._shares) == 1:
            return ()
        asked = [self._asked.get(number, [0] * 3) for number in range(len(self._shares))]
        parts = zip(self._shares, weights, asked, strict=True)
        return tuple(TenantStatistics(share.name, weight, *counts) for share, weight, counts in parts)
