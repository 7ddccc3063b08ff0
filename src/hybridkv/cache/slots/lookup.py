"""Look-ups: what a request can begin with, which is there already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.residents import Residents
from hybridkv.cache.slots.coordinator import CommonHit, Coordinator
from hybridkv.cache.statistics import PrefixCacheStats
from hybridkv.cache.values import KVCacheBlocks
from hybridkv.request import Hasher, Request

_NONE = np.empty(0, np.int32)


class PrefixLookup:
    """Finds, never adopts. hasher: of the requests, None without prefix caching. log_stats: count look-ups.

    empty: no block in every group.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        coordinator: Coordinator,
        residents: Residents,
        *,
        hasher: Hasher | None,
        log_stats: bool,
    ) -> None:
        self.empty = KVCacheBlocks((_NONE,) * len(groups), pool)
        self._groups = tuple(groups)
        self._pool = pool
        self._coordinator = coordinator
        self._residents = residents
        self._hasher = hasher
        self._stats = PrefixCacheStats() if log_stats else None

    # -- cached prefixes

    def look_up(self, request: Request) -> CommonHit:
        """``find``, counted in the statistics."""
        hit = self.find(request)
        if self._stats is not None and self._hasher is not None and request.reads_prefix_cache:
            self._stats.requests += 1
            self._stats.queries += request.num_tokens
            self._stats.hits += hit.tokens
        return hit

    def find(self, request: Request) -> CommonHit:
        """The longest cached prefix of all but the last token of ``request``. O(blocks of the hit).

        ConfigError, CacheError for a request that was made for another manager.
        """
        self._residents.refuse_stranger(request)
        reads = self._hasher is not None and request.reads_prefix_cache
        return self._coordinator.longest_common_hit(request, request.num_tokens - 1 if reads else 0)

    def find_written(self, request: Request) -> CommonHit:
        """The longest prefix of all tokens of ``request`` that is cached and written. O(blocks of the prefix)."""
        hit = self._coordinator.longest_common_hit(request, 0 if self._hasher is None else request.num_tokens)
        while not all(self._pool.keys.all_written(part.blocks) for part in hit.groups):
            hit = self._coordinator.longest_common_hit(request, hit.tokens - 1)
        return hit

    def is_longest(self, request: Request, hit: CommonHit, evictions: int) -> bool:
        """Whether ``hit``, found when the pool's ``evictions`` was ``evictions``, is still the longest.

        It is while none of the blocks it rests on lost its key and none of the keys that bounded it is known.
        O(those keys) look-ups, one a group for full attention, and one array comparison over the blocks.
        """
        if any(-1 < then != group.index.additions for group, then in zip(self._groups, hit.additions, strict=True)):
            return False
        if any(group.knows_any(request, columns) for group, columns in zip(self._groups, hit.missing, strict=True)):
            return False
        return all(self._pool.keys.kept_since(ids, evictions) for ids in hit.seen)

    # -- blocks to begin with

    def blocks_of(self, hit: CommonHit) -> KVCacheBlocks:
        """The blocks of a hit, 0 for null columns."""
        if not hit.tokens:
            return self.empty
        blocks = tuple(group.blocks for group in hit.groups)
        return KVCacheBlocks(blocks, self._pool, self._pool.evictions, hit.sources)

    def blocks_to_share(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """What a branch of ``request``, which no step in flight holds, begins with, and its tokens: those computed.

        Natural layout. CacheError for a request that holds no blocks.
        """
        row, tokens = self._residents.row_of(request), request.num_computed_tokens
        ids, sources = [], []
        for group in self._groups:
            held = group.rows.ids(row)
            full = len(held) if group.policy.by_digest else group.policy.hit_columns(tokens)
            ids.append(held[:full])
            partial = len(held) > full and (group.policy.keeps_state or tokens % group.policy.block_size)
            sources.append(int(held[full]) if partial and tokens else 0)
        return KVCacheBlocks(tuple(ids), self._pool, sources=tuple(sources), parent=request), tokens

    # -- statistics

    def count_reset(self) -> None:
        """All keys were forgotten."""
        if self._stats is not None:
            self._stats.reset = True

    def take_stats(self) -> PrefixCacheStats | None:
        """Statistics since the last call; None when they are off."""
        if self._stats is None:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats
