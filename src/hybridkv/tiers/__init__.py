"""Tiers: memory behind the device, whose cached prefixes come up before a request begins.

HostTier       a second KVCacheManager for host memory, and the transfers between both
StoreLookups   look-ups in a store behind the host; Prefixes names the blocks there
"""

from hybridkv.tiers.host import HostTier, HostTierStatistics, TierWork
from hybridkv.tiers.limits import TierLimits
from hybridkv.tiers.lookups import StoreLookups
from hybridkv.tiers.prefixes import Prefixes, parts_of
from hybridkv.tiers.times import TRANSFER_EDGES_S, Direction, TransferTimes

__all__ = [
    "TRANSFER_EDGES_S",
    "Direction",
    "HostTier",
    "HostTierStatistics",
    "Prefixes",
    "StoreLookups",
    "TierLimits",
    "TierWork",
    "TransferTimes",
    "parts_of",
]
