"""Observers of the core: events, explained misses, times of blocks, where blocks lie, and what must hold.

The core (hybridkv.cache) imports none of them: a manager composes the two.
"""

import hybridkv.cache  # noqa: F401 - the manager composes this package: its modules come first
