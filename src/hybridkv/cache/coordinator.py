"""What all groups agree on: the longest hit, and the total of what they need."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridkv.cache.group import CacheGroup
from hybridkv.cache.policies import Hit
from hybridkv.request import Request


def common_alignment(groups: Sequence[CacheGroup]) -> int:
    """Tokens of which every hit is a multiple: the least common multiple of the block sizes."""
    return math.lcm(*(group.policy.block_size for group in groups))


def longest_common_hit(groups: Sequence[CacheGroup], request: Request, limit_tokens: int) -> tuple[Hit, ...]:
    """The longest prefix of at most ``limit_tokens`` tokens that every group has, one Hit a group.

    Each group may lower the candidate; asked in turn until all agree (a fixed point: the candidate only
    falls). O(blocks of the longest hit) for full attention, which is asked anew only to trim.
    """
    if len(groups) == 1:
        (group,) = groups
        return (group.policy.longest_hit(group.index, group.keys(request), limit_tokens),)
    alignment = common_alignment(groups)
    candidate = limit_tokens // alignment * alignment
    hits: list[Hit | None] = [None] * len(groups)
    agreed = False
    while candidate and not agreed:
        agreed = True
        for i, group in enumerate(groups):
            known = hits[i]
            hit = (
                group.policy.longest_hit(group.index, group.keys(request), candidate)
                if known is None
                else group.policy.trim(known, min(known.tokens, candidate))
            )
            hits[i] = hit
            if hit.tokens < candidate:
                candidate = hit.tokens // alignment * alignment
                agreed = False
    if not candidate:
        return tuple(group.policy.longest_hit(group.index, (), 0) for group in groups)
    return tuple(group.policy.trim(hit, candidate) for group, hit in zip(groups, hits, strict=True) if hit is not None)
