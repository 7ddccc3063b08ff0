"""The cache: which block holds which tokens, which tokens are there already, and what goes first."""

from hybridkv.cache.batch import BatchSlots
from hybridkv.cache.blocks import BlockView, KVCacheBlocks
from hybridkv.cache.coordinator import CommonHit
from hybridkv.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventsDropped, KVCacheEvent
from hybridkv.cache.group import CacheGroup
from hybridkv.cache.hashing import BlockHasher
from hybridkv.cache.locks import BlockLock
from hybridkv.cache.manager import KVCacheManager
from hybridkv.cache.pins import Pin
from hybridkv.cache.pool import BlockPool
from hybridkv.cache.slots import Admission, Reason, Refusal, SlotPlan
from hybridkv.cache.statistics import CacheStatistics, GroupStatistics, PrefixCacheStats
from hybridkv.cache.transfers import Checkpoint, Transfer, Transfers

__all__ = [
    "Admission",
    "AllBlocksCleared",
    "BatchSlots",
    "BlockHasher",
    "BlockLock",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockView",
    "CacheGroup",
    "CacheStatistics",
    "Checkpoint",
    "CommonHit",
    "EventsDropped",
    "GroupStatistics",
    "KVCacheBlocks",
    "KVCacheEvent",
    "KVCacheManager",
    "Pin",
    "PrefixCacheStats",
    "Reason",
    "Refusal",
    "SlotPlan",
    "Transfer",
    "Transfers",
]
