"""Where recurrent states are kept, and what is given up next: frozen values that only say it (docs/design/0009, 0019).

eviction (and what ranks: ends, hazard, hazard_table) beside stops (named, planned); shares of tenants (tenants).
"""

from hybridkv.cache.placement.eviction import EVICTIONS, HAZARD, LRU, Eviction, eviction_named
from hybridkv.cache.placement.named import DEFAULT_PLACEMENT, placement_named
from hybridkv.cache.placement.planned import DEFAULT_EVICTIONS, eviction_of, placement_of
from hybridkv.cache.placement.shares import EVERYBODY, Share, TenantShares
from hybridkv.cache.placement.stops import (
    AlignPlacement,
    CornerPlacement,
    EndsPlacement,
    IntervalPlacement,
    NoStates,
    Placement,
)

__all__ = [
    "DEFAULT_EVICTIONS",
    "DEFAULT_PLACEMENT",
    "EVERYBODY",
    "EVICTIONS",
    "HAZARD",
    "LRU",
    "AlignPlacement",
    "CornerPlacement",
    "EndsPlacement",
    "Eviction",
    "IntervalPlacement",
    "NoStates",
    "Placement",
    "Share",
    "TenantShares",
    "eviction_named",
    "eviction_of",
    "placement_named",
    "placement_of",
]
