"""The tiers of an engine: host memory behind its device, and a store behind the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from hybridkv.cache import CacheOptions, KVCacheManager, Medium
from hybridkv.errors import ConfigError
from hybridkv.planner import Plan, tier_plan
from hybridkv.runner.identity import blocks_identity
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.options import EngineOptions
from hybridkv.stores import BlockStore, StoreChoice
from hybridkv.stores.store import pieces_of
from hybridkv.tiers import HostTier, Prefixes, StoreLookups, parts_of


@dataclass(frozen=True, slots=True)
class Behind:
    """What lies behind the device.

    Attributes:
        host_memory: bytes of host memory that keep resume points, or a size like ``"8GiB"``; None for none.
        store: a store behind the host, which outlives the engine; None for none.

    Raises:
        ConfigError: there is a store without host memory.
    """

    host_memory: int | str | None = None
    store: StoreChoice | None = None

    def __post_init__(self) -> None:
        if self.store is not None and self.host_memory is None:
            raise ConfigError("a store needs host memory in front of it: give host_memory (--host-memory), too")


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of an engine.

    Attributes:
        host: the host tier.
        store: the store behind it; None without one.
        hash_block: tokens of a hash block.
    """

    host: HostTier
    store: BlockStore | None
    hash_block: int


def open_tiers(
    behind: Behind, loaded: LoadedModel, plan: Plan, cache: KVCacheManager, *, options: EngineOptions, undo: ExitStack
) -> Tiers | None:
    """Open the tiers behind a cache; return None if there are none.

    Args:
        behind: what lies behind the device.
        loaded: the model.
        plan: the plan of the device's cache.
        cache: the device's cache.
        options: how the engine runs; shares of tenants also hold on the host.
        undo: closes the store.

    Raises:
        ConfigError: the cache cannot have tiers, or the store cannot be opened.
        CapacityError: the host memory is too small.
        UnsupportedModelError: a layer keeps something that tiers cannot hold.
    """
    if behind.host_memory is None:
        return None
    kept = CacheOptions(eviction=cache.eviction, shares=options.shares, medium=Medium.CPU)
    held = tier_plan(plan, behind.host_memory)
    host = KVCacheManager(held, hasher=cache.hasher, enable_kv_cache_events=options.kv_events, options=kept)
    if behind.store is None or cache.hasher is None:
        return Tiers(HostTier(cache, host), None, 1)
    hash_block = cache.hasher.block_size
    identity = blocks_identity(loaded.model, plan, hash_block)
    prefixes = Prefixes(parts_of(host), identity, hash_block)
    sizes = {plan.config.block_bytes_of(group) for group in range(len(plan.config.groups))}
    cut = {piece for size in sizes for piece in pieces_of(size)}
    store = behind.store.open(identity, sorted({*cut, prefixes.mark_bytes}))
    undo.callback(store.close)
    threads = None
    if not behind.store.looks_up_at_once:
        threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv-lookup")
        undo.callback(threads.shutdown)
    return Tiers(HostTier(cache, host, lookups=StoreLookups(store, prefixes, threads)), store, hash_block)
