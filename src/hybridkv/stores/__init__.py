"""Stores: blocks by key outside of an engine's memory.

BlockStore    the protocol: exists, get and put of many keys
DiskStore     in one file on a disk, which survives its process; others read it as a DiskView
DiskFolders   one folder that is written, and those of other processes
MemoryStore   in the memory of the process
SharedStore   on Redis, Valkey, Mooncake, or a file system of fsspec; ``open_store`` takes its URL
StoreStack    several stores as one, the fastest first
Prefetcher    finds and holds the longest stored prefix of a request on threads, and stores blocks, for other engines
StoreChoice   a store to open: a DiskFolder or a StoreUrl
"""

from hybridkv.stores.choices import DiskFolder, StoreChoice, StoreUrl
from hybridkv.stores.disk import DiskStore, DiskStoreStatistics
from hybridkv.stores.memory import MemoryStore, MemoryStoreStatistics
from hybridkv.stores.prefetch import GroupNeeds, Prefetcher, PrefetchLimits, PrefixRules
from hybridkv.stores.shared import SharedStore, SharedStoreStatistics
from hybridkv.stores.stack import StoreStack
from hybridkv.stores.store import BlockStore
from hybridkv.stores.url import open_store

__all__ = [
    "BlockStore",
    "DiskFolder",
    "DiskStore",
    "DiskStoreStatistics",
    "GroupNeeds",
    "MemoryStore",
    "MemoryStoreStatistics",
    "PrefetchLimits",
    "Prefetcher",
    "PrefixRules",
    "SharedStore",
    "SharedStoreStatistics",
    "StoreChoice",
    "StoreStack",
    "StoreUrl",
    "open_store",
]
