"""Statistics of prefix look-ups and of what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.pool import BlockPool
from hybridkv.observe.block_times import BlockTimes, BlockTimeStatistics


@dataclass(slots=True)
class PrefixCacheStats:
    """Look-ups since the last reading.

    reset: reset_prefix_cache succeeded. requests: looked up. queries: tokens asked for. hits: tokens hit.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """One group. held_blocks: distinct blocks in rows of requests, now. cached_blocks: with a key, now.

    evictable_blocks: those of them that nobody holds. published, evictions: keys given and lost so far.
    """

    held_blocks: int
    cached_blocks: int
    evictable_blocks: int
    published: int
    evictions: int


@dataclass(frozen=True, slots=True)
class ResumePointClassStatistics:
    """Ends of one kind that are alike for ``hazard`` (docs/design/0019). kept: now; the others so far.

    promise: what hints say of them, in words, "" for nothing. hits_before: so often were they hit, 3 for more, too.
    pause_s: the least of the seconds between their hits, or, before the first, that their session had paused; None for
    new sessions. hits, missed, given_up: as of ResumePointStatistics, of ends that were in this class just before.
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
    """Ends of one kind (docs/design/0019). kept: now; the others so far.

    made: ends that were kept. hits: of kept ones. missed: of ghosts, the deepest of each prompt. declined: not kept for
    want of worth. given_up: kept no longer; unused: those of them that were never hit. classes: those that were met.
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
    """What a tenant has of the cache (docs/design/0026). tenant: ``*`` for all that are not named.

    kept_bytes: of blocks that its kept ends need, now. requests, prompt_tokens, hit_tokens: of those that began so far.
    """

    tenant: str
    kept_bytes: int
    requests: int
    prompt_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What the cache holds now.

    num_blocks: all but the null block and sinks. free_blocks: those nobody holds, cached ones among them.
    cached_blocks: with a key. unwritten_blocks: published, their step still in flight.
    pinned_blocks: held by pins, counted for each. evictions: keys lost so far. groups: the same per group.
    ends: by kind, where an eviction ranks them. missed_tokens: what ends given up would have been hit for, so far;
    missed_a_gib_more: what of it a GiB more would have found, roughly: what was given up last. tenants: where there are
    shares. moved_blocks: from slab to slab, so far. times: None unless asked for (block_times).
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
    """Counts of now. O(num_blocks)."""
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
            for group, *counts in zip(groups, cached, evictable, pool.keys.given, pool.keys.lost, strict=True)
        ),
        moved_blocks=pool.moved,
        times=None if times is None else times.statistics(),
    )
