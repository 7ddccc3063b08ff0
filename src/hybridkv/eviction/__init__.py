"""Choose which resume points to keep and which one to evict next (docs/design/0019, 0026).

The core (hybridkv.cache) does not import this package: a manager composes the two. This package only names ``lru``: the
space keeps its order (hybridkv.cache.spaces), and hybridkv.cache.eviction_policy supersedes states.
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
