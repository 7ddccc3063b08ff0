"""Options of a KVCacheManager beyond the arguments that every caller gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hybridkv.arguments import check_fields, flag, instance, integer, or_none
from hybridkv.cache.journal import MAX_EVENT_BLOCKS, Medium
from hybridkv.cache.placement import Placement
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.errors import ConfigError
from hybridkv.eviction.choice import Eviction
from hybridkv.eviction.tenants import EVERYBODY, TenantShares
from hybridkv.units import MOST_COUNT, shown


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of a KVCacheManager. Values of another kind raise ConfigError.

    Attributes:
        retention: Which windows and states are kept for reuse: ``None`` keeps all, n keeps one before every n-th token,
            0 keeps only those where the request itself is likely to be resumed.
        max_pinned_blocks: Most blocks that ``pin`` may hold; requests cannot count on these (slabs in the natural
            layout).
        placement: Natural layout: where recurrent states are kept. By default ``ends``.
        eviction: Natural layout: the eviction policy. By default the one that the plan gets from ``eviction_of``;
            ``lru`` for a config alone.
        shares: Memory shares of tenants; needs an eviction that ranks resume points (not ``lru``). By default all
            requests are one tenant.
        max_moved_bytes: Natural layout: after so many bytes were moved between slabs in a step, a request that needs
            more moves waits for the next step. At least 1, so one request can always move. ``None``: no bound.
        space: Natural layout, for measurements: a replacement of SlabSpace, with its methods.
        partial_block_hits: Natural layout: whether hits may end inside a block, which is then copied.
        hit_unit: Reference layout, for full attention and ``align`` states: hits may also end inside a block, at the
            last multiple of so many tokens before the last token of an earlier prompt, or before its branch point. The
            end is then copied. Chunks must end there (``CacheBounds.resume_points``), and no group may drop blocks for
            EAGLE.
        copied_tokens: With ``hit_unit``: tokens of an attention block that the worker's copy carries, so no hit ends
            after them inside a block. ``None``: all.
        max_event_blocks: Most blocks in events that wait for ``take_events``. Beyond it the oldest events are dropped,
            and EventsDropped reports them.
        medium: Where the blocks are, for events.
        remembered_losses: Keys of evicted blocks to remember for ``explain``; 0 turns ``explain`` off.
        block_times: Whether statistics tell how long blocks keep their keys and wait for hits.
        log_resume_points: Whether kept resume points are logged for ``EngineSide.take_resume_points``, as a tier needs.
        clock: Returns seconds; evictions that learn the time between hits read it.
    """

    retention: int | None = None
    max_pinned_blocks: int = 0
    placement: Placement | None = None
    eviction: Eviction | None = None
    shares: TenantShares = EVERYBODY
    max_moved_bytes: int | None = None
    space: SlabSpace | None = None
    partial_block_hits: bool = True
    hit_unit: int | None = None
    copied_tokens: int | None = None
    max_event_blocks: int = MAX_EVENT_BLOCKS
    medium: Medium = Medium.GPU
    remembered_losses: int = 0
    block_times: bool = False
    log_resume_points: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check_fields(self, or_none(partial(integer, most=MOST_COUNT)), "retention")
        check_fields(self, partial(integer, least=0, most=MOST_COUNT), "max_pinned_blocks", "remembered_losses")
        check_fields(self, or_none(partial(integer, least=1)), "max_moved_bytes", "hit_unit")
        check_fields(self, or_none(partial(integer, least=0)), "copied_tokens")
        check_fields(self, partial(integer, least=1), "max_event_blocks")
        check_fields(self, flag, "partial_block_hits", "block_times", "log_resume_points")
        if self.copied_tokens is not None and self.hit_unit is None:
            raise ConfigError("copied_tokens means nothing without hit_unit: leave it out")
        instance("shares", self.shares, TenantShares)
        instance("medium", self.medium, Medium)
        if self.eviction is not None:
            instance("eviction", self.eviction, Eviction)
        if not isinstance(self.placement, Placement | None):
            raise ConfigError(f"placement must be one of hybridkv.cache.placement, got {shown(self.placement)}")


DEFAULT_OPTIONS = CacheOptions()
