"""What a manager can be asked for besides what every caller says: one value, handed on whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hybridkv.arguments import check_fields, flag, instance, integer, or_none
from hybridkv.cache.journal import MAX_EVENT_BLOCKS
from hybridkv.cache.placement import Placement
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.errors import ConfigError
from hybridkv.eviction.choice import Eviction
from hybridkv.eviction.tenants import EVERYBODY, TenantShares
from hybridkv.units import MOST_COUNT, shown


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of a KVCacheManager. Raises ConfigError for values of another kind.

    retention: windows and states that are kept for reuse: None all, n those before every n-th token, 0 only those
    where each request itself is likely to be resumed.
    max_pinned_blocks: blocks that ``pin`` may hold, and requests are not promised (slabs, in the natural layout).
    placement: in the natural layout, where recurrent states are kept; by default ``ends``.
    eviction: in the natural layout, what is given up next; by default that of the plan (``eviction_of``), ``lru`` for a
    config alone.
    shares: memory of tenants, with an eviction that ranks resume points (not ``lru``); by default all are one tenant.
    max_moved_bytes: in the natural layout, after so many bytes were moved between slabs in a step, a request that
    needs more moves waits for the next; at least 1, which lets one request have its moves in each step; None: no bound.
    space: in the natural layout, where free blocks come from instead of slabs, for measurements: a SlabSpace, or what
    has its methods.
    partial_block_hits: in the natural layout, whether hits may end inside a block, which is copied then.
    resume_point_events: events report resume points that are no whole block too (ResumePointStored,
    ResumePointRemoved); an exact KVEventPublisher needs them in the natural layout.
    max_event_blocks: blocks in events that wait for ``take_events``; beyond it the oldest events are dropped, and
    EventsDropped says so before those taken next.
    remembered_losses: keys of evicted blocks that are remembered, for ``explain``; 0: nothing is explained.
    block_times: whether statistics tell how long blocks keep their keys and wait for hits.
    clock: seconds, for evictions that learn the time between hits; only they read it.
    """

    retention: int | None = None
    max_pinned_blocks: int = 0
    placement: Placement | None = None
    eviction: Eviction | None = None
    shares: TenantShares = EVERYBODY
    max_moved_bytes: int | None = None
    space: SlabSpace | None = None
    partial_block_hits: bool = True
    resume_point_events: bool = False
    max_event_blocks: int = MAX_EVENT_BLOCKS
    remembered_losses: int = 0
    block_times: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check_fields(self, or_none(partial(integer, most=MOST_COUNT)), "retention")
        check_fields(self, partial(integer, least=0, most=MOST_COUNT), "max_pinned_blocks", "remembered_losses")
        check_fields(self, or_none(partial(integer, least=1)), "max_moved_bytes")
        check_fields(self, partial(integer, least=1), "max_event_blocks")
        check_fields(self, flag, "partial_block_hits", "resume_point_events", "block_times")
        instance("shares", self.shares, TenantShares)
        if self.eviction is not None:
            instance("eviction", self.eviction, Eviction)
        if not isinstance(self.placement, Placement | None):
            raise ConfigError(f"placement must be one of hybridkv.cache.placement, got {shown(self.placement)}")


DEFAULT_OPTIONS = CacheOptions()
