"""The cache: which block holds which tokens, which tokens are there already, and what goes first."""

from hybridkv.cache.blocks.block_times import EDGES_S, BlockTimeStatistics, TimeCounts
from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.bounds import CacheBounds
from hybridkv.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EndKept,
    EndLost,
    EventsDropped,
    KVCacheEvent,
)
from hybridkv.cache.hashing import BlockHasher, EngineHashes
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.slots.batch import BatchSlots
from hybridkv.cache.slots.holds import BlockLock, Pin
from hybridkv.cache.slots.lookup import CommonHit
from hybridkv.cache.slots.misses import Miss, MissReason
from hybridkv.cache.slots.plan import Admission, Reason, Refusal, SlotPlan
from hybridkv.cache.slots.step_fields import RowSpans, StateMoves, cells_of, cells_of_row
from hybridkv.cache.slots.transfers import Checkpoint, Transfer, Transfers
from hybridkv.cache.statistics import (
    CacheStatistics,
    EndClassStatistics,
    EndStatistics,
    GroupStatistics,
    PrefixCacheStats,
    TenantStatistics,
)
from hybridkv.cache.values import BlockView, KVCacheBlocks

__all__ = [
    "EDGES_S",
    "Admission",
    "AllBlocksCleared",
    "BatchSlots",
    "BlockHasher",
    "BlockLock",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTimeStatistics",
    "BlockView",
    "CacheBounds",
    "CacheGroup",
    "CacheStatistics",
    "Checkpoint",
    "CommonHit",
    "EndClassStatistics",
    "EndKept",
    "EndLost",
    "EndStatistics",
    "EngineHashes",
    "EventsDropped",
    "GroupStatistics",
    "KVCacheBlocks",
    "KVCacheEvent",
    "KVCacheManager",
    "Miss",
    "MissReason",
    "Pin",
    "PrefixCacheStats",
    "Reason",
    "Refusal",
    "RowSpans",
    "SlotPlan",
    "StateMoves",
    "TenantStatistics",
    "TimeCounts",
    "Transfer",
    "Transfers",
    "cells_of",
    "cells_of_row",
]
