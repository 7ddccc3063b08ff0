"""Tiers: memory behind the device, whose cached prefixes come up before a request begins.

HostTier       a second KVCacheManager for host memory, and the transfers between both
StoreLookups   look-ups in a store behind the host; Prefixes names the blocks there
Prices         what is faster to compute than to load or fetch, from measured rates
"""

from hybridkv.tiers.carriers import Way
from hybridkv.tiers.host import HostTier, HostTierStatistics, TierWork
from hybridkv.tiers.limits import TierLimits
from hybridkv.tiers.lookups import StoreLookups
from hybridkv.tiers.prefixes import Prefixes, parts_of
from hybridkv.tiers.price import Prices
from hybridkv.tiers.times import TRANSFER_EDGES_S, Direction, TransferTimes

__all__ = [
    "TRANSFER_EDGES_S",
    "Direction",
    "HostTier",
    "HostTierStatistics",
    "Prefixes",
    "Prices",
    "StoreLookups",
    "TierLimits",
    "TierWork",
    "TransferTimes",
    "Way",
    "parts_of",
]
