"""Statistics of prefix look-ups, and of the contents of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.pool import BlockPool
from hybridkv.observe.block_times import BlockTimes, BlockTimeStatistics


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts of look-ups since the last reading.

    Attributes:
        reset: ``reset_prefix_cache`` succeeded.
        requests: Requests that were looked up.
        queries: Tokens of these requests.
        hits: Tokens that were found.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Counts of one group.

    Attributes:
        held_blocks: Distinct blocks in rows of requests at this moment.
        cached_blocks: Blocks with a key at this moment.
        evictable_blocks: Cached blocks that no request holds.
        published: Blocks that got their first key, since the start.
        evictions: Blocks that lost their last key, since the start.
        partial_blocks: Cached blocks that end inside a block: no key covers all their tokens.
    """

    held_blocks: int
    cached_blocks: int
    evictable_blocks: int
    published: int
    evictions: int
    partial_blocks: int


@dataclass(frozen=True, slots=True)
class ResumePointClassStatistics:
    """Counts of resume points that the eviction ``hazard`` treats alike (docs/design/0019).

    Attributes:
        promise: The hint of the client in words, "" for no hint.
        hits_before: Earlier hits of these resume points; 3 stands for 3 or more.
        pause_s: Lower bound of the seconds between hits (before the first hit: of the pause of the session); ``None``
            for new sessions.
        kept: Resume points kept at this moment. All other counts are since the start.
        hits, missed, given_up: As in ResumePointStatistics, of resume points that were in this class just before.
    """

    promise: str
    hits_before: int
    pause_s: float | None
    kept: int
    hits: int
    missed: int
    given_up: int


@dataclass(frozen=True, slots=True)
class ResumePointStatistics:
    """Counts of resume points of one kind (docs/design/0019).

    Attributes:
        kind: Where they lie: for example ``prompt``, ``output`` or ``branch``.
        classes: Counts of each class that occurred.
        kept: Resume points kept at this moment. All other counts are since the start.
        made: Resume points that were kept.
        hits: Hits of kept resume points.
        missed: Prompts whose deepest known resume point was a ghost entry, the record of an evicted one.
        declined: Resume points that were not kept because their value was too low.
        given_up: Resume points that were evicted.
        unused: Evicted resume points that were never hit.
    """

    kind: str
    classes: tuple[ResumePointClassStatistics, ...]
    kept: int
    made: int
    hits: int
    missed: int
    declined: int
    given_up: int
    unused: int


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """Use of the cache by one tenant (docs/design/0026).

    Attributes:
        tenant: Its name; ``*`` for all requests without a named tenant.
        kept_bytes: Bytes of the blocks that its resume points need at this moment.
        requests: Requests that began, since the start.
        prompt_tokens: Prompt tokens of these requests.
        hit_tokens: Prompt tokens that were found in the cache.
    """

    tenant: str
    kept_bytes: int
    requests: int
    prompt_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The contents of the cache at this moment.

    Attributes:
        num_blocks: All blocks except the null block and attention sinks.
        free_blocks: Blocks that no request holds, cached ones included.
        cached_blocks: Blocks with a key.
        unwritten_blocks: Published blocks whose step is still in flight.
        resident_requests: Requests that hold blocks.
        pinned_blocks: Blocks held by pins; a block under two pins counts twice.
        evictions: Blocks that lost their last key, since the start.
        groups: Counts of each group.
        ends: Counts of resume points by kind, if the eviction ranks them.
        missed_tokens: Tokens that evicted resume points would have saved, since the start.
        missed_a_gib_more: Estimate of the part of ``missed_tokens`` that one GiB more would have saved: the resume
            points evicted last.
        tenants: Counts of each tenant, if there are shares.
        moved_blocks: Blocks moved between slabs, since the start.
        times: Lifetimes of blocks; ``None`` unless ``block_times`` is set.
    """

    num_blocks: int
    free_blocks: int
    cached_blocks: int
    unwritten_blocks: int
    resident_requests: int
    pinned_blocks: int
    evictions: int
    groups: tuple[GroupStatistics, ...]
    ends: tuple[ResumePointStatistics, ...] = ()
    missed_tokens: int = 0
    missed_a_gib_more: int = 0
    tenants: tuple[TenantStatistics, ...] = ()
    moved_blocks: int = 0
    times: BlockTimeStatistics | None = None


def cache_statistics(
    pool: BlockPool, groups: Sequence[CacheGroup], resident_requests: int, pinned_blocks: int, times: BlockTimes | None
) -> CacheStatistics:
    """Count blocks and keys of ``pool`` and ``groups``. O(num_blocks)."""
    cached, evictable = pool.keys.per_group(), pool.evictable_per_group()
    return CacheStatistics(
        num_blocks=pool.num_usable,
        free_blocks=pool.get_num_free_blocks(),
        cached_blocks=sum(cached),
        unwritten_blocks=len(pool.keys.every_unwritten()),
        resident_requests=resident_requests,
        pinned_blocks=pinned_blocks,
        evictions=sum(pool.keys.lost),
        groups=tuple(
            GroupStatistics(group.held_blocks(), *counts)
            for group, *counts in zip(
                groups, cached, evictable, pool.keys.given, pool.keys.lost, pool.keys.num_partial(), strict=True
            )
        ),
        moved_blocks=pool.moved,
        times=None if times is None else times.statistics(),
    )
