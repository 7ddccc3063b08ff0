"""Tiers: memory behind the device, whose cached prefixes come up before a request begins.

HostTier    a second KVCacheManager for host memory, and the transfers between both
BlockStore  the protocol of stores that keep blocks by key outside of the engine's memory
DiskStore   a BlockStore in one file on a disk, which survives its process
"""

from hybridkv.tiers.disk import DiskStore, DiskStoreStatistics
from hybridkv.tiers.host import HostTier, HostTierStatistics, TierLimits, TierWork
from hybridkv.tiers.store import BlockStore

__all__ = ["BlockStore", "DiskStore", "DiskStoreStatistics", "HostTier", "HostTierStatistics", "TierLimits", "TierWork"]
