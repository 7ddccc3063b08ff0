"""Tiers: memory behind the device, whose cached prefixes come up before a request begins.

HostTier    a second KVCacheManager for host memory, and the transfers between both
"""

from hybridkv.tiers.host import HostTier, HostTierStatistics, TierLimits, TierWork

__all__ = ["HostTier", "HostTierStatistics", "TierLimits", "TierWork"]
