"""The prefix cache: which block holds which tokens, which tokens can be reused, and which blocks are evicted."""

from hybridkv.cache.eviction_policy import Below
from hybridkv.cache.groups import CacheGroup
from hybridkv.cache.hashing import BlockHasher, EngineHashes
from hybridkv.cache.holds import BlockLock, Pin
from hybridkv.cache.journal import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsDropped,
    KVCacheEvent,
    Medium,
    ResumePointRemoved,
    ResumePointStored,
)
from hybridkv.cache.keys import WRITTEN
from hybridkv.cache.lookup import BlockView, Hit, KVCacheBlocks
from hybridkv.cache.manager import CacheBounds, KVCacheManager
from hybridkv.cache.options import CacheOptions
from hybridkv.cache.placement import placement_named, placement_of
from hybridkv.cache.plan import Admission, BatchSlots, Reason, Refusal, SlotPlan
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.statistics import (
    CacheStatistics,
    GroupStatistics,
    PrefixCacheStats,
    ResumePointClassStatistics,
    ResumePointStatistics,
    TenantStatistics,
)
from hybridkv.cache.transfers import Checkpoint, RowSpans, StateMoves, Transfer, Transfers, cells_of
from hybridkv.observe.block_times import EDGES_S, BlockTimeStatistics, TimeCounts
from hybridkv.observe.misses import Miss, MissReason

__all__ = [
    "EDGES_S",
    "WRITTEN",
    "Admission",
    "AllBlocksCleared",
    "BatchSlots",
    "Below",
    "BlockHasher",
    "BlockLock",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTimeStatistics",
    "BlockView",
    "CacheBounds",
    "CacheGroup",
    "CacheOptions",
    "CacheStatistics",
    "Checkpoint",
    "EngineHashes",
    "EventsDropped",
    "GroupStatistics",
    "Hit",
    "KVCacheBlocks",
    "KVCacheEvent",
    "KVCacheManager",
    "Medium",
    "Miss",
    "MissReason",
    "Pin",
    "PrefixCacheStats",
    "Reason",
    "Refusal",
    "ResumePointClassStatistics",
    "ResumePointRemoved",
    "ResumePointStatistics",
    "ResumePointStored",
    "RowSpans",
    "SlotPlan",
    "StateMoves",
    "TenantStatistics",
    "TimeCounts",
    "Transfer",
    "Transfers",
    "cells_of",
    "placement_named",
    "placement_of",
]
