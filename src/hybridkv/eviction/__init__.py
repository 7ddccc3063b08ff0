"""Which resume points are kept, and what is given up next (docs/design/0019, 0026).

The core (hybridkv.cache) knows none of it: a manager composes the two. ``lru`` has only its name here: its order is
that of the space (hybridkv.cache.spaces), and hybridkv.cache.eviction_policy supersedes states.
"""

import hybridkv.cache  # noqa: F401 - the manager composes this package: its modules come first
from hybridkv.eviction.choice import DEFAULT_EVICTIONS, EVICTIONS, HAZARD, LRU, Eviction, eviction_named, eviction_of
from hybridkv.eviction.tenants import EVERYBODY, Share, TenantShares

__all__ = [
    "DEFAULT_EVICTIONS",
    "EVERYBODY",
    "EVICTIONS",
    "HAZARD",
    "LRU",
    "Eviction",
    "Share",
    "TenantShares",
    "eviction_named",
    "eviction_of",
]
