"""The parts of a manager, made in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.blocks.block_times import BlockTimes
from hybridkv.cache.blocks.lost_keys import LostKeys
from hybridkv.cache.blocks.pool import BlockPool
from hybridkv.cache.hashing import BlockHasher
from hybridkv.cache.layouts import Layout, can_resume, kinds_of
from hybridkv.cache.placement import NoStates
from hybridkv.cache.placement.tenants import TenantRankings
from hybridkv.cache.rows.group import CacheGroup
from hybridkv.cache.rows.publishing import Publisher, ResumePoints
from hybridkv.cache.rows.residents import Residents
from hybridkv.cache.rows.write_log import WriteLog
from hybridkv.cache.slots.checkpoints import Checkpoints
from hybridkv.cache.slots.holds import Locks, Pins
from hybridkv.cache.slots.judged import JudgedEnds
from hybridkv.cache.slots.kept import KeptEnds, LastUsed
from hybridkv.cache.slots.loads import Loads
from hybridkv.cache.slots.lookup import PrefixLookup
from hybridkv.cache.slots.misses import Misses
from hybridkv.cache.slots.plan import SlotPlanner
from hybridkv.cache.slots.slots import Slots
from hybridkv.cache.slots.strides import Strides
from hybridkv.cache.slots.transfers import TransferLog
from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Hasher

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a manager is asked for besides its config and layout; see KVCacheManager."""

    max_model_len: int
    enable_caching: bool
    use_eagle: bool
    enable_events: bool
    end_events: bool
    max_event_blocks: int
    ranks: int
    hasher: Hasher | None
    max_pinned_blocks: int
    remembered_losses: int
    block_times: bool
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class CacheParts:
    """All parts of a manager.

    hasher: None without caching. misses: None where nothing is explained. sink_blocks: int32 ids that belong to the
    layers, by group.
    """

    layout: Layout
    hasher: Hasher | None
    pool: BlockPool
    groups: tuple[CacheGroup, ...]
    sink_blocks: tuple[Int32, ...]
    pins: Pins
    locks: Locks
    log: WriteLog
    publisher: Publisher
    residents: Residents
    kept: KeptEnds
    transfers: TransferLog
    checkpoints: Checkpoints
    lookup: PrefixLookup
    misses: Misses | None
    loads: Loads
    planner: SlotPlanner
    slots: Slots
    strides: Strides


def assemble(config: KVCacheConfig, layout: Layout, options: CacheOptions) -> CacheParts:
    """The parts for ``config``. ConfigError for options that cannot work, UnsupportedModelError as policies."""
    kinds = kinds_of(config, layout, options.ranks, use_eagle=options.use_eagle)
    hash_block, hasher = layout.hash_block(kinds), None
    if options.enable_caching and can_resume(kinds):
        hasher = options.hasher or BlockHasher(hash_block)
        hash_block = hasher.block_size
    alignment = layout.alignment(kinds)

    pool = layout.pool(config, enable_events=options.enable_events, max_event_blocks=options.max_event_blocks)
    pool.keys.tells_ends = options.end_events
    groups = tuple(
        CacheGroup(number, kind, policy, index, hash_block)
        for number, (kind, policy, index) in enumerate(
            zip(kinds, layout.policies(kinds, hash_block), pool.indexes, strict=True)
        )
    )
    sinks = tuple(pool.reserve(kind.sink_blocks, number) for number, kind in enumerate(kinds))
    if options.max_pinned_blocks > pool.num_usable:
        raise ConfigError(
            f"max_pinned_blocks is {options.max_pinned_blocks}, the pool has {pool.num_usable} blocks: lower it"
        )

    caching = hasher is not None
    pins, locks, log = Pins(pool, options.max_pinned_blocks), Locks(pool), WriteLog(pool)
    resume = ResumePoints(alignment, any(kind.drops for kind in kinds), layout.retention) if caching else None
    holding_tokens = [group for group in groups if group.kind.publishes and group.states is None]
    ends_in = holding_tokens if caching and layout.publishes_ends else []
    publisher = Publisher(groups, pool, log, resume, ends_in)
    residents = Residents(groups, publisher, hasher=hasher, tail_tokens=hash_block)
    placement = layout.placement if caching and layout.placement is not None else NoStates()
    stateful = [group for group in groups if group.states is not None] if placement.keeps_states else []
    kept: KeptEnds = LastUsed(stateful, pool, placement)
    if caching and layout.needs is not None and layout.eviction.ranking is not None:
        pool.heed(layout.needs)
        kept = JudgedEnds(
            [group for group in groups if group.kind.publishes],
            pool,
            needs=layout.needs,
            rankings=TenantRankings(layout.eviction.ranking, layout.shares, config.arena_bytes, layout.needs.weights),
            clock=options.clock,
            hash_block=hash_block,
        )
    transfers = TransferLog(groups, pool, log=log, pins=pins, kept=kept)
    checkpoints = Checkpoints(stateful, pool, log=log, transfers=transfers, placement=placement, kept=kept)
    lookup = PrefixLookup(residents, pool, alignment=alignment, hasher=hasher, kept=kept)
    misses = None
    if options.remembered_losses:
        sizes = [config.block_bytes_of(number) for number in range(len(groups))]
        lost = pool.keys.lost_keys = LostKeys(options.remembered_losses, sizes, options.clock)
        misses = Misses(
            residents, lookup, lost=lost, most=options.remembered_losses, alignment=alignment, hash_block=hash_block
        )
        residents.begins = misses.note_begun
    if options.block_times:
        pool.keys.times = BlockTimes(pool.num_blocks, options.clock)
    loads = Loads(groups, locks)
    planner = SlotPlanner(
        pool, residents, publisher=publisher, log=log, loads=loads, max_model_len=options.max_model_len
    )
    slots = Slots(
        pool,
        residents,
        planner=planner,
        publisher=publisher,
        transfers=transfers,
        checkpoints=checkpoints,
    )
    strides = Strides(
        pool,
        residents,
        slots=slots,
        publisher=publisher,
        transfers=transfers,
        checkpoints=checkpoints,
    )
    return CacheParts(
        layout,
        hasher,
        pool,
        groups,
        sinks,
        pins,
        locks,
        log,
        publisher,
        residents,
        kept,
        transfers,
        checkpoints,
        lookup,
        misses,
        loads,
        planner,
        slots,
        strides,
    )
