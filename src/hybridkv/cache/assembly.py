"""The parts of a manager, made in the order in which they need each other.

config -> Storage    pool and groups: where blocks are
|
Records    who holds rows, and what else names blocks: pins, locks, transfers, keys of steps in flight
|
Parts      what decides (lookup, planner) and what acts (committer, batches, releaser)
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.cache.blocks.pool import BlockPool, Int32
from hybridkv.cache.blocks.space import ClassedSpace
from hybridkv.cache.build import (
    build_groups,
    can_resume,
    ends_inside,
    hash_block_size,
    kinds_of,
    placement_for,
    pool_of,
)
from hybridkv.cache.hashing import BlockHasher
from hybridkv.cache.names import ContentNames
from hybridkv.cache.placement import Placement
from hybridkv.cache.policies import alignment_of
from hybridkv.cache.rows.ends import PublishedEnds
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.residents import Residents
from hybridkv.cache.slots.batch_allocator import BatchAllocator
from hybridkv.cache.slots.checkpoints import Checkpoints
from hybridkv.cache.slots.committer import Committer
from hybridkv.cache.slots.coordinator import Coordinator
from hybridkv.cache.slots.locks import Locks
from hybridkv.cache.slots.lookup import PrefixLookup
from hybridkv.cache.slots.pins import Pins
from hybridkv.cache.slots.planner import SlotPlanner
from hybridkv.cache.slots.publisher import Publisher
from hybridkv.cache.slots.release import Releaser
from hybridkv.cache.slots.relocator import Relocator
from hybridkv.cache.slots.transfers import TransferLog
from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a manager is asked for besides its config; see KVCacheManager."""

    max_model_len: int
    enable_caching: bool
    use_eagle: bool
    log_stats: bool
    enable_events: bool
    max_event_blocks: int
    ranks: int
    hasher: BlockHasher | None
    retention: int | None
    max_pinned_blocks: int
    placement: Placement | None
    max_moved_bytes: int | None
    space: ClassedSpace | None
    published_ends: bool


@dataclass(frozen=True, slots=True)
class Storage:
    """What there is to hold and to find. placement: None in the reference layout. hasher: None without caching.

    hash_block: tokens between two keys. alignment: tokens of which every hit is a multiple. sink_blocks: int32 ids
    that belong to the layers, by group.
    """

    placement: Placement | None
    hasher: BlockHasher | None
    hash_block: int
    alignment: int
    pool: BlockPool
    groups: tuple[CacheGroup, ...]
    sink_blocks: tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class Records:
    """What names blocks: rows of requests, pins, locks, the step that is being made, and those in flight."""

    pins: Pins
    locks: Locks
    publisher: Publisher
    transfers: TransferLog
    relocator: Relocator
    ends: PublishedEnds
    checkpoints: Checkpoints
    names: ContentNames
    residents: Residents


@dataclass(frozen=True, slots=True)
class CacheParts:
    """All parts of a manager."""

    storage: Storage
    records: Records
    lookup: PrefixLookup
    planner: SlotPlanner
    committer: Committer
    batches: BatchAllocator
    releaser: Releaser


def assemble(config: KVCacheConfig, options: CacheOptions) -> CacheParts:
    """The parts for ``config``. ConfigError for options that cannot work, UnsupportedModelError as policies."""
    storage = _storage_of(config, options)
    records = _records_of(storage, options)
    groups, pool, residents = storage.groups, storage.pool, records.residents
    coordinator = Coordinator(groups, storage.alignment)
    planner = SlotPlanner(
        groups,
        pool,
        log=records.publisher.log,
        rows=residents.columns,
        coordinator=coordinator,
        max_model_len=options.max_model_len,
        caching=storage.hasher is not None,
        retention=options.retention,
    )
    committer = _committer_of(storage, records)
    return CacheParts(
        storage,
        records,
        PrefixLookup(groups, pool, coordinator, residents, hasher=storage.hasher, log_stats=options.log_stats),
        planner,
        committer,
        BatchAllocator(
            groups,
            pool,
            publisher=records.publisher,
            residents=residents,
            planner=planner,
            committer=committer,
            max_model_len=options.max_model_len,
        ),
        _releaser_of(storage, records, planner),
    )


def _storage_of(config: KVCacheConfig, options: CacheOptions) -> Storage:
    placement = placement_for(config, options.placement)
    kinds = kinds_of(config, options.ranks, use_eagle=options.use_eagle, placement=placement)
    hash_block, hasher = hash_block_size(kinds), None
    if options.enable_caching and can_resume(kinds):
        hasher = options.hasher or BlockHasher(hash_block)
        hash_block = hasher.block_size
    pool = pool_of(
        config,
        options.space,
        options.max_moved_bytes,
        enable_events=options.enable_events,
        max_event_blocks=options.max_event_blocks,
    )
    exact = ends_inside(kinds, published_ends=options.published_ends)
    groups = build_groups(kinds, pool.indexes, hash_block, options.retention, exact=exact)
    return Storage(
        placement,
        hasher,
        hash_block,
        alignment_of(kinds, exact=exact),
        pool,
        groups,
        tuple(pool.reserve(kind.sink_blocks, number) for number, kind in enumerate(kinds)),
    )


def _records_of(storage: Storage, options: CacheOptions) -> Records:
    groups, pool, caching = storage.groups, storage.pool, storage.hasher is not None
    if options.max_pinned_blocks > pool.num_usable:
        raise ConfigError(
            f"max_pinned_blocks is {options.max_pinned_blocks}, the pool has {pool.num_usable} blocks: lower it"
        )
    pins, publisher, transfers = Pins(pool, options.max_pinned_blocks), Publisher(pool), TransferLog(groups, pool)
    relocator = Relocator(groups, pool, publisher.log, pins, transfers)
    pool.on_move = relocator.follow
    used_in_part = groups if storage.placement is not None and caching and options.published_ends else ()
    ends = PublishedEnds(
        [group for group in used_in_part if group.policy.publishes and not group.policy.keeps_state],
        pool,
        publisher.log,
    )
    checkpoints = Checkpoints(
        [group for group in groups if group.policy.keeps_state and caching],
        len(groups),
        pool,
        log=publisher.log,
        transfers=transfers,
        placement=storage.placement,
    )
    names = ContentNames()
    residents = Residents(groups, ends, names, hasher=storage.hasher, tail_tokens=storage.hash_block)
    return Records(pins, Locks(pool), publisher, transfers, relocator, ends, checkpoints, names, residents)


def _committer_of(storage: Storage, records: Records) -> Committer:
    return Committer(
        storage.groups,
        storage.pool,
        publisher=records.publisher,
        residents=records.residents,
        transfers=records.transfers,
        ends=records.ends,
        checkpoints=records.checkpoints,
    )


def _releaser_of(storage: Storage, records: Records, planner: SlotPlanner) -> Releaser:
    return Releaser(
        storage.groups,
        storage.pool,
        residents=records.residents,
        planner=planner,
        publisher=records.publisher,
        ends=records.ends,
        checkpoints=records.checkpoints,
        transfers=records.transfers,
        keeps_ends=storage.placement is not None,
    )
