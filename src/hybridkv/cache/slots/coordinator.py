"""What all groups agree on: the longest hit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.policies import Hit, Search
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.request import Request


class CommonHit(NamedTuple):
    """The longest prefix that every group has.

    groups: one Hit a group, in the order of the groups. uncached_tokens: how much further the first group
    asked would go (full attention, where there is any): a state or window kept there would have helped.
    missing, seen, additions: as in Hit, of the whole search, by group but for the blocks on which it rests.
    sources: by group, the block to copy the end of the hit from: the last column, used in part, or a state; 0: none.
    """

    tokens: int
    groups: tuple[Hit, ...]
    uncached_tokens: int = 0
    missing: tuple[tuple[int, ...], ...] = ()
    seen: tuple[NDArray[np.int32], ...] = ()
    additions: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()

    @property
    def branch_tokens(self) -> int:
        """Where other requests went on with the same tokens, 0 when nowhere."""
        return self.tokens + self.uncached_tokens if self.uncached_tokens else 0


class Coordinator:
    """The order in which groups are asked, and what they must agree on.

    alignment: tokens of which every hit is a multiple. Groups without keys are asked first (they agree to
    all or to nothing), then those of which every prefix of a hit is one, then the others.
    """

    def __init__(self, groups: Sequence[CacheGroup], alignment: int) -> None:
        self.alignment = alignment
        self._groups = tuple(groups)
        self._asked = sorted(groups, key=_turn)
        none = (Hit(0, np.empty(0, np.int32)),) * len(groups)
        self._no_hit = CommonHit(0, none, 0, ((),) * len(groups), (), (-1,) * len(groups), (0,) * len(groups))

    def longest_common_hit(self, request: Request, limit_tokens: int) -> CommonHit:
        """The longest prefix of at most ``limit_tokens`` tokens that every group has.

        Each group may lower the candidate; all are asked in turn until they agree (a fixed point: the
        candidate only falls). A group that drops for EAGLE looks one column past the candidate, once; it
        does so anew after a group that did not drop has lowered the candidate. O(blocks of the longest hit).
        """
        candidate = limit_tokens // self.alignment * self.alignment
        if not candidate:
            return self._no_hit
        hits: dict[int, Hit] = {}
        views = {group.number: group.view(request) for group in self._groups}
        missing: dict[int, list[int]] = {group.number: [] for group in self._groups}
        additions = [-1] * len(self._groups)
        dropped: set[int] = set()
        seen: list[NDArray[np.int32]] = []
        longest, agreed = 0, False
        ahead = limit_tokens if len(self._groups) == 1 else request.num_tokens
        while candidate and not agreed:
            agreed = True
            for group in self._asked:
                before, past = hits.get(group.number), int(group.kind.drops and group.number not in dropped)
                if before is not None and group.policy.downward_closed:
                    hit = group.policy.trim(before, min(before.tokens, candidate))
                else:
                    search = Search(candidate, ahead if past else limit_tokens, self.alignment, past, longest)
                    hit = group.policy.longest_hit(views[group.number], group.keys(request), search)
                    missing[group.number] += hit.missing
                    additions[group.number] = max(additions[group.number], hit.additions)
                    seen.append(hit.seen)
                    dropped.update((group.number,) if past else ())
                hits[group.number] = hit
                if hit.tokens < candidate:
                    candidate, agreed = hit.tokens, False
                    if not past:
                        dropped.clear()
                if group.policy.publishes and not longest:
                    longest = candidate
        found = tuple(tuple(missing[group.number]) for group in self._groups)
        asked = self._no_hit._replace(
            uncached_tokens=longest - candidate, missing=found, seen=tuple(seen), additions=tuple(additions)
        )
        if not candidate:
            return asked
        sources = tuple(group.policy.source(views[group.number], candidate) for group in self._groups)
        asked = asked._replace(tokens=candidate, groups=tuple(hits[group.number] for group in self._groups))
        return asked._replace(sources=sources, seen=(*seen, np.array([s for s in sources if s], np.int32)))

    def resumed_at(self, request: Request) -> tuple[int, ...]:
        """Tokens where ``request`` is likely to be resumed: by the same prompt, and where others branched off.

        The last token is always computed, so the same prompt resumes at the last edge before it; with EAGLE
        one edge earlier, and that depends on whether the prompt goes on.
        """
        prompt, step = request.num_prompt_tokens, self.alignment
        if any(group.kind.drops for group in self._groups):
            edges = [max((tokens // step - 1) * step, 0) for tokens in (prompt - 1, prompt)]
        else:
            edges = [prompt - 1]
        return (*edges, request.branch_tokens) if request.branch_tokens else tuple(edges)


def _turn(group: CacheGroup) -> tuple[bool, bool, int]:
    return group.policy.publishes, not group.policy.downward_closed, group.number
