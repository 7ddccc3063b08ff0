"""Observe the cache: explained misses, times of blocks, a map of memory, and a check of all invariants.

A manager composes these observers with the core. In hybridkv.cache, only the manager and its parts import them.
"""

import hybridkv.cache  # noqa: F401 - the manager imports this package, so its modules must load first
