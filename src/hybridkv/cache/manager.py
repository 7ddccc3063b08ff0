"""KVCacheManager: which blocks hold the tokens of each request, and which tokens are there already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import flag, instance, instances, integer, integers
from hybridkv.cache.assembly import CacheOptions, assemble, layout_of, managed
from hybridkv.cache.audit import check_cache
from hybridkv.cache.bounds import CacheBounds
from hybridkv.cache.events import MAX_EVENT_BLOCKS, KVCacheEvent
from hybridkv.cache.fast_forward import Advance
from hybridkv.cache.holds import BlockLock, Pin
from hybridkv.cache.lookup import CommonHit, KVCacheBlocks
from hybridkv.cache.misses import Miss
from hybridkv.cache.placement import Placement
from hybridkv.cache.plan import Admission, BatchSlots, Refusal, SlotDemand, SlotPlan
from hybridkv.cache.spaces.space import ClassedSpace
from hybridkv.cache.statistics import CacheStatistics, PrefixCacheStats, cache_statistics
from hybridkv.cache.transfers import (
    RowSpans,
    StateMoves,
    Transfers,
    join_cells,
    named_cells,
    rotated_cells,
    state_moves,
    with_transfers,
)
from hybridkv.errors import BlockError, CacheError, ConfigError
from hybridkv.eviction.named import Eviction
from hybridkv.eviction.tenants import EVERYBODY, TenantShares
from hybridkv.planner import KVCacheConfig, Plan
from hybridkv.request import Hasher, Request, checked_hasher
from hybridkv.specs import RequestLimits
from hybridkv.step import Cells
from hybridkv.units import MOST_COUNT

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class KVCacheManager:
    """Blocks for requests, prefix caching included. Not thread safe; Scheduler adds the guard.

    kv_cache_config: a Plan, whose max_model_len, ranks and placement hold; or its groups and number of blocks alone,
    and max_model_len, most tokens of a request, beside it.
    enable_caching: look up and publish prefixes; off where some layer cannot be resumed (a state that is
    not kept, cross attention). use_eagle: every attention group whose config flags none drops the last
    block of a hit. log_stats: keep PrefixCacheStats. enable_kv_cache_events: collect events for take_events.
    dcp_world_size, pcp_world_size: context parallel ranks, over which attention is spread.
    hasher: what hashes requests, by default SHA-256 over canonical CBOR with the greatest block that divides
    those of all groups. retention: which windows and states are kept for reuse: None all, n those before
    every n-th token, 0 only those where each request itself is likely to be resumed.
    max_pinned_blocks: what ``pin`` may hold, and requests are not promised (slabs, in the natural layout).
    placement: in the natural layout, where recurrent states are kept; by default ``ends``.
    eviction: in the natural layout, what is given up next; by default what the plan says (``eviction_of``), ``lru``
    for a config alone.
    shares: of tenants of what is kept, with an eviction that ranks ends (not ``lru``); by default all are one tenant.
    max_moved_bytes: in the natural layout, once so much was moved between slabs in a step, what needs more moves
    waits for the next; at least 1, which lets one request have its moves in each step; None: no bound.
    space: in the natural layout, where free blocks come from instead of slabs, for measurements.
    published_ends: in the natural layout, whether hits may end inside a block, which is copied then.
    end_events: events tell of states and of tokens that end inside a block, too (EndKept, EndLost): what an exact
    KVEventPublisher needs in the natural layout.
    max_event_blocks: blocks that events waiting for ``take_events`` tell of; beyond it the oldest events are dropped,
    and EventsDropped says so in front of those taken next.
    remembered_losses: keys of evicted blocks that are remembered, for ``explain``; 0: nothing is explained.
    block_times: whether statistics tell how long blocks keep their keys and wait for hits.
    clock: seconds, by which evictions that learn tell how long nobody came; they ask for the time alone.
    Raises ConfigError for limits that cannot work and for what contradicts the plan, UnsupportedModelError for a group
    without policy.
    """

    def __init__(  # noqa: PLR0917 - the signature that users of vLLM know
        self,
        kv_cache_config: Plan | KVCacheConfig,
        max_model_len: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int | None = None,
        pcp_world_size: int | None = None,
        *,
        hasher: Hasher | None = None,
        retention: int | None = None,
        max_pinned_blocks: int = 0,
        placement: Placement | None = None,
        eviction: Eviction | None = None,
        shares: TenantShares = EVERYBODY,
        max_moved_bytes: int | None = None,
        space: ClassedSpace | None = None,
        published_ends: bool = True,
        end_events: bool = False,
        max_event_blocks: int = MAX_EVENT_BLOCKS,
        remembered_losses: int = 0,
        block_times: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, limits, placement, eviction = managed(
            kv_cache_config,
            max_model_len=max_model_len,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            placement=placement,
            eviction=eviction,
        )
        retention = None if retention is None else integer("retention", retention, most=MOST_COUNT)
        layout = layout_of(
            config,
            placement=placement,
            eviction=eviction,
            shares=instance("shares", shares, TenantShares),
            retention=retention,
            max_moved_bytes=None if max_moved_bytes is None else integer("max_moved_bytes", max_moved_bytes, 1),
            space=space,
            published_ends=flag("published_ends", published_ends),
        )
        options = CacheOptions(
            limits.max_model_len,
            enable_caching=flag("enable_caching", enable_caching),
            use_eagle=flag("use_eagle", use_eagle),
            enable_events=flag("enable_kv_cache_events", enable_kv_cache_events),
            end_events=flag("enable_kv_cache_events", enable_kv_cache_events) and flag("end_events", end_events),
            max_event_blocks=integer("max_event_blocks", max_event_blocks, 1),
            ranks=limits.cp,
            hasher=None if hasher is None else checked_hasher(hasher),
            max_pinned_blocks=integer("max_pinned_blocks", max_pinned_blocks, 0, MOST_COUNT),
            remembered_losses=integer("remembered_losses", remembered_losses, 0, MOST_COUNT),
            block_times=flag("block_times", block_times),
            clock=clock,
        )
        parts = self._parts = assemble(config, layout, options)
        self.config, self.max_model_len = config, limits.max_model_len
        self.dcp_world_size, self.pcp_world_size = limits.dcp, limits.pcp
        self.placement, self.eviction, self.hasher = layout.placement, layout.eviction, parts.hasher
        self.enable_caching = parts.hasher is not None
        self.block_pool, self.groups, self.sink_blocks = parts.pool, parts.groups, parts.sink_blocks
        self.pins, self.locks, self.write_log = parts.pins, parts.locks, parts.log
        self.transfers, self.checkpoints = parts.transfers, parts.checkpoints
        self.rows = parts.residents.request_rows
        self._layout, self._residents, self._lookup = layout, parts.residents, parts.lookup
        self._planner, self._slots, self._strides = parts.planner, parts.slots, parts.strides
        self.bounds = CacheBounds(parts)
        self._clock = clock
        self._stats = PrefixCacheStats() if flag("log_stats", log_stats) else None

    # -- look-up

    def refuse_stranger(self, request: Request) -> None:
        """ConfigError, CacheError for a request that cannot be served here.

        One that is hashed by another hasher, holds blocks of another manager, or names content that had another number
        of tokens before (hybridkv.cache.residents).
        """
        self._residents.refuse_stranger(request)

    @property
    def usage(self) -> float:
        """Referenced blocks / usable blocks, 0 .. 1."""
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of ``request`` and its tokens, at most all but the last token.

        Nothing is adopted: hand the blocks to allocate_slots. O(blocks of the hit).
        """
        hit = self.look_up(request)
        return self.blocks_of(hit), hit.tokens

    def get_computed_blocks_per_group(self, request: Request) -> tuple[KVCacheBlocks, tuple[int, ...]]:
        """What each group has of ``request``, whatever the others have: its blocks, and how many tokens that is.

        For connectors, which fetch what is missing. Each ends where its own blocks do, or at any token in the natural
        layout, whose blocks that are used in part, and kept states, are left out. Nothing is adopted or counted.
        O(blocks of the request).
        """
        hits = self._lookup.of_each(request)
        return KVCacheBlocks(tuple(hit.blocks for hit in hits), self.block_pool), tuple(hit.tokens for hit in hits)

    def look_up(self, request: Request) -> CommonHit:
        """find_hit, counted in the statistics."""
        hit = self._lookup.find(request)
        if self._stats is not None and self.enable_caching and request.reads_prefix_cache:
            self._stats.requests += 1
            self._stats.queries += request.num_tokens
            self._stats.hits += hit.tokens
        return hit

    def find_hit(self, request: Request) -> CommonHit:
        """get_computed_blocks without statistics, and why the hit is not longer."""
        return self._lookup.find(request)

    @property
    def explains(self) -> bool:
        """Whether ``explain`` can be asked."""
        return self._parts.misses is not None

    def explain(self, request: Request, hit_tokens: int | None = None) -> tuple[Miss, ...]:
        """Why tokens of its prompt behind ``hit_tokens``, by default what it would hit now, are not found, in order.

        Every token has one reason: with the hit they are the whole prompt. For operators: a reason may tell what other
        tenants hold. O(hash blocks of the prompt). ConfigError without remembered_losses, and for strangers.
        """
        if self._parts.misses is None:
            raise ConfigError("misses are explained from what was lost: construct with remembered_losses, say 1 << 20")
        self._residents.refuse_stranger(request)
        hit = None if hit_tokens is None else integer("hit_tokens", hit_tokens, 0, MOST_COUNT)
        return self._parts.misses.explain(request, hit, self._clock())

    @property
    def evicts_in_order(self) -> bool:
        """Whether blocks of one size go in the order of their last use, so that ``Miss.more_bytes`` is a bound."""
        return self._layout.evicts_in_order

    def evicting_for(self, request: Request) -> AbstractContextManager[None]:
        """What is evicted inside makes room for ``request``, says ``explain`` later. Nothing without it."""
        return nullcontext() if self._parts.misses is None else self._parts.misses.evicting_for(request)

    def blocks_of(self, hit: CommonHit) -> KVCacheBlocks:
        """The blocks of a hit, 0 for null columns."""
        return self._lookup.blocks_of(instance("hit", hit, CommonHit))

    def blocks_to_share(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """What a branch of ``request``, which no step in flight holds, begins with, and its tokens: those computed.

        Natural layout. CacheError for a request that holds no blocks, or is being loaded.
        """
        self._parts.loads.refuse(instance("request", request, Request))
        return self._lookup.blocks_to_share(request)

    @property
    def knows_the_queue(self) -> bool:
        """Whether anything comes of ``expect``."""
        return self._parts.kept.judges

    def expect(self, request: Request) -> None:
        """``request`` waits: with an eviction that ranks ends, the longest one that it begins with is among the last.

        Until ``expect_no_longer``, or as long as there is another of its tenant. O(its hash blocks).
        """
        self._residents.refuse_stranger(request)
        self._parts.kept.expect(request)

    def expect_no_longer(self, request: Request) -> None:
        """``request`` begins, or never will; nothing for one that nobody expects. O(requests expected)."""
        self._parts.kept.expect_no_longer(instance("request", request, Request))

    def is_longest_hit(self, request: Request, hit: CommonHit, evictions: int) -> bool:
        """Whether a hit found when ``evictions`` were ``evictions`` is still the longest.

        It is while none of the blocks it rests on lost its key and none of the keys that bounded it is known.
        O(those keys) look-ups, one a group for full attention, and one array comparison over the blocks.
        """
        self._residents.refuse_stranger(request)
        instance("hit", hit, CommonHit)
        return self._lookup.is_longest(request, hit, integer("evictions", evictions))

    # -- steps

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """What is allocated inside is of ``step``, a number above those in flight, and written once marked so.

        Thus nothing is copied that the same step is still to write, and events speak of what is there. Whoever drives
        the manager without a Scheduler opens one for each forward. Outside of any, what is published counts as written
        at once. CacheError inside another one.
        """
        self.begin_step(step)
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self, step: int) -> None:
        """``step`` for loops that are no ``with`` block: until ``end_step``."""
        self.write_log.begin(integer("step", step, 0, MOST_COUNT))

    def end_step(self) -> None:
        """All that the open step allocates is allocated; nothing where none is open."""
        self.write_log.end()

    def settle(self, step: int) -> None:
        """Steps up to ``step`` have run: all of them that are neither written nor revoked count as written."""
        last = integer("step", step, 0, MOST_COUNT)
        for one in self.write_log.in_flight:
            if one <= last:
                self.write_log.mark_written(one)

    def mark_written(self, step: int) -> None:
        """``step`` was executed. CacheError for one that never began, or was marked or revoked already."""
        self.write_log.mark_written(integer("step", step, 0, MOST_COUNT))

    def revoke(self, first_step: int) -> None:
        """Steps from ``first_step`` on were not executed: what they published can be hit no longer."""
        self.write_log.revoke(integer("first_step", first_step, 0, MOST_COUNT))

    # -- slots, one request

    def allocate_slots(  # noqa: PLR0917 - the signature that users of vLLM know
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        *,
        num_external_computed_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """plan_slots and commit: the new columns (those of the hit not among them), None when they do not fit.

        When they do not, columns that are read no longer are given back all the same.
        """
        if (
            isinstance(request, Request)
            and request._rows is self.rows
            and new_computed_blocks is None
            and type(num_new_tokens) is type(num_lookahead_tokens) is int
            # what is no count, plan_slots refuses
            and type(num_new_computed_tokens) is type(num_encoder_tokens) is type(num_external_computed_tokens) is int
            and not (num_new_computed_tokens or num_encoder_tokens or num_external_computed_tokens)
            and num_new_tokens > 0
            and num_lookahead_tokens >= 0
        ):
            end = self.rows.each_num_computed[request.row] + num_new_tokens
            total = end + num_lookahead_tokens
            if total < self._residents.next_event(request.row):
                self._slots.label(request.row, end)
                return self._lookup.empty
            if delay_cache_blocks is False:
                grown = self._slots.grow(request, end, total)
                if grown is not None:
                    return KVCacheBlocks(grown, self.block_pool) if grown else self._lookup.empty
        self._residents.refuse_stranger(request)
        new = self._slots.allocate_one(
            request,
            self._demand_of(
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                num_lookahead_tokens,
                delay_cache_blocks,
                num_encoder_tokens,
                num_external_computed_tokens,
            ),
        )
        return None if isinstance(new, Refusal) else KVCacheBlocks(new, self.block_pool)

    def plan_slots(  # noqa: PLR0917 - as allocate_slots
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        *,
        num_external_computed_tokens: int = 0,
        admission: Admission | None = None,
    ) -> SlotPlan | Refusal:
        """What ``request`` needs to compute ``num_new_tokens`` behind its computed tokens. Changes nothing.

        num_new_computed_tokens, new_computed_blocks: a hit to adopt, for a request that holds no blocks.
        num_external_computed_tokens: tokens behind the hit whose KV and state are loaded from elsewhere: by this step's
        worker before its forward, or, with 0 new tokens and delay_cache_blocks, by a transfer beside the steps, which
        begins behind this one's copies: until ``finish_load`` the request computes nothing and its blocks stay put.
        num_lookahead_tokens: room for draft tokens, never published. delay_cache_blocks: publish nothing.
        num_encoder_tokens: of the encoder's input, for cross attention.
        Raises ConfigError when there is nothing to allocate or the hit cannot be adopted, and for a request
        of another hasher; CacheError for one that holds blocks of another manager, or is being loaded.
        """
        self._residents.refuse_stranger(request)
        wanted = self._demand_of(
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            num_external_computed_tokens,
        )
        if admission is not None:
            instance("admission", admission, Admission)
        return self._planner.plan(request, wanted, admission)

    def _demand_of(  # noqa: PLR0917 - as allocate_slots
        self,
        new_tokens: int,
        hit_tokens: int,
        hit: KVCacheBlocks | None,
        lookahead_tokens: int,
        delayed: bool,
        encoder_tokens: int,
        external_tokens: int,
    ) -> SlotDemand:
        """The same, checked."""
        return SlotDemand(
            integer("num_new_tokens", new_tokens, most=MOST_COUNT),
            self._lookup.empty if hit is None else instance("new_computed_blocks", hit, KVCacheBlocks),
            integer("num_new_computed_tokens", hit_tokens, most=MOST_COUNT),
            integer("num_external_computed_tokens", external_tokens, most=MOST_COUNT),
            integer("num_lookahead_tokens", lookahead_tokens, most=MOST_COUNT),
            flag("delay_cache_blocks", delayed),
            integer("num_encoder_tokens", encoder_tokens, most=MOST_COUNT),
        )

    def commit(self, plan: SlotPlan) -> KVCacheBlocks:
        """Do what ``plan`` says and return the new columns. StalePlanError if anything changed since it was made."""
        return KVCacheBlocks(self._slots.commit(instance("plan", plan, SlotPlan)), self.block_pool)

    def drop_skipped(self, request: Request) -> None:
        """Give back what ``request`` reads no longer: windows and states before its processed tokens."""
        self._residents.refuse_stranger(request)
        self._slots.drop_skipped(request)

    def blocks_to_come(self, request: Request, limits: RequestLimits) -> int:
        """Most blocks, or slabs, that ``request`` may take yet within ``limits``: for who reserves them.

        A request that holds nothing may take all of them. O(columns of the request).
        """
        self._residents.refuse_stranger(request)
        return self._planner.blocks_to_come(request, instance("limits", limits, RequestLimits))

    # -- slots, all rows of a step

    def allocate_batch(self, rows: Int64, num_new_tokens: Int64 | int, num_lookahead_tokens: int = 0) -> BatchSlots:
        """allocate_slots for resident requests by their rows, in this order. int64[R], distinct.

        num_new_tokens: at least 1, for all rows or one by one. From the first row that does not fit on, all
        are refused. Computed tokens are not advanced: that is the caller's fact. O(R) in array operations,
        O(1) Python operations a new or published block. ConfigError, and nothing done, for what are no row numbers or
        token counts, CacheError for a row that nobody holds.
        """
        rows = self._residents.rows_held(rows)
        if not isinstance(num_new_tokens, int):
            num_new_tokens = _one_a_row("num_new_tokens", num_new_tokens, rows, 1)
        else:
            num_new_tokens = integer("num_new_tokens", num_new_tokens, 1, MOST_COUNT)
        num_lookahead_tokens = integer("num_lookahead_tokens", num_lookahead_tokens, 0, MOST_COUNT)
        return self._slots.allocate(rows, num_new_tokens, num_lookahead_tokens)

    # -- many steps as one

    def uniform_steps(self, rows: Int64, most: int) -> int:
        """How many steps, at most ``most``, ``rows`` can each compute one token, and need nothing but blocks for it.

        Rows distinct and resident, each with its last token to compute and no step in flight. O(rows) in array
        operations.
        """
        return self._strides.most_steps(self._residents.rows_held(rows), most)

    def refuses_alike(self, rows: Int64, steps: int, takes: Sequence[Sequence[int]], hits: Sequence[CommonHit]) -> bool:
        """Whether what is refused now stays refused for the same reason in ``steps`` uniform steps of ``rows``.

        Rows take blocks and give none back; there is room all the time for each of ``takes``, blocks by group, which
        are refused for what comes later; each of ``hits`` stays the longest. False where that is not sure.
        """
        return self._strides.refuses(self._residents.rows_held(rows), steps, takes, hits)

    def advance(self, rows: Int64, tokens: Int32, begin: Callable[[int], None] | None = None) -> Advance:
        """Steps of ``rows`` in each of which they compute their last token and ``tokens[:, k]`` comes behind it.

        int32[rows, steps], as many steps as ``uniform_steps`` allowed at most. Slots are allocated, blocks written and
        computed tokens advanced as if step by step, outside of any open step; see Advance for where that ends early.
        begin: told that step k is carried out from now on, of each in which that depends on the time: an eviction that
        judges reads the manager's clock.
        """
        return self._strides.advance(self._residents.rows_held(rows), tokens, begin)

    # -- rows whose counts a loop keeps itself

    def synchronise(
        self,
        rows: Int64,
        *,
        num_tokens: Int64 | None = None,
        num_computed: Int64 | None = None,
        in_flight: Int64 | None = None,
    ) -> None:
        """What the engine's own counts of ``rows`` are by now, int64[R] each; None: as they were.

        num_tokens: known ones, of requests that are lent: blocks that they fill are hashed, or were by the engine.
        num_computed: whose KV is there or scheduled; it may be ahead of those known, for a token is computed before
        the one behind it is drawn, and what is not known is not published. in_flight: of those computed, of steps that
        did not settle. O(R) in array operations, and a Python call a row that fills a block. Errors as allocate_batch,
        and ConfigError for fewer tokens than before, HashError as ``Request.append``.
        """
        rows, columns = self._residents.rows_held(rows), self.rows
        columns.synchronise(
            rows,
            columns.num_tokens[rows] if num_tokens is None else _one_a_row("num_tokens", num_tokens, rows, 1),
            columns.num_computed[rows] if num_computed is None else _one_a_row("num_computed", num_computed, rows, 0),
            columns.in_flight[rows] if in_flight is None else _one_a_row("in_flight", in_flight, rows, 0),
        )

    def synchronise_one(self, request: Request, num_computed_tokens: int, num_in_flight_tokens: int = 0) -> None:
        """The counts of one request that is lent, as many tokens as its lender has. Before it holds blocks, too."""
        lent = instance("request", request, Request).lender
        computed = integer("num_computed_tokens", num_computed_tokens, 0, MOST_COUNT)
        in_flight = integer("num_in_flight_tokens", num_in_flight_tokens, 0, computed)
        if lent is None:
            raise ConfigError(f"tokens of {request.request_id!r} are its own: set num_computed_tokens, append tokens")
        if request.row < 0:
            request.num_computed_tokens = computed
            return
        self.rows.synchronise_one(self._residents.row_of(request), lent.num_tokens, computed, in_flight)

    def next_events(self, rows: Int64) -> Int64:
        """next_event of many rows, int64[R]: who stays below with all tokens needs no call. CacheError as there."""
        return self._residents.next_events(self._residents.rows_held(rows))

    def publish_edges(self, rows: Int64) -> Int64:
        """Known and computed tokens at which ``cache_blocks`` next has something to publish, int64[R].

        A number that no request reaches where nothing is published. CacheError as allocate_batch.
        """
        return self._parts.publisher.next_edges(self._residents.rows_held(rows))

    # -- drafts

    def accept_drafts(self, rows: Int64, drafted: Int64, kept: Int64) -> None:
        """Of the last ``drafted[i]`` tokens that ``rows[i]`` computed only the first ``kept[i]`` are its own.

        int64[R] each; rows distinct, their tokens known, no step in flight. What is kept can be hit, and its state goes
        on; the rest is overwritten. O(R), and a Python call a row that fills a block. Errors as allocate_batch.
        """
        rows = self._residents.rows_held(rows)
        drafted, kept = _one_a_row("drafted", drafted, rows, 0), _one_a_row("kept", kept, rows, 0)
        if (kept > drafted).any() or (drafted > self.rows.num_computed[rows]).any():
            raise ConfigError("a row keeps at most the drafts that it computed: accept those of the step that has run")
        self._slots.accept_drafts(rows, drafted, kept)

    # -- publishing and freeing

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the full blocks of the first ``num_computed_tokens`` tokens, for transfers that were delayed.

        CacheError, and nothing published, for a request that holds no blocks for them.
        """
        self._slots.publish_computed(request, integer("num_computed_tokens", num_computed_tokens, 0))

    def finish_load(self, request: Request, num_computed_tokens: int | None = None) -> int:
        """The transfer for ``request`` is over: its first ``num_computed_tokens`` tokens came, None for all.

        Returns behind how many of them it goes on, its hit at least: those are computed, and can be hit. 0: it holds
        nothing any longer,
        for nothing came, or not what some group goes on from (the end of a window, a state); look it up anew, what is
        not here is computed. ConfigError for more than were to come, CacheError for a request that is not loaded.
        """
        tokens = num_computed_tokens
        came = None if tokens is None else integer("num_computed_tokens", tokens, 0, MOST_COUNT)
        return self._slots.finish_load(instance("request", request, Request), came)

    def withdraw(self, request: Request) -> None:
        """The open step does not run ``request`` after all, whose slots it has been given: it is freed next.

        What it would have filled can be hit no longer; nothing where no step is open. For engines that preempt requests
        which the step being made holds already. O(blocks of the step, and of the request). CacheError for a request
        that holds no blocks.
        """
        self._slots.withdraw(instance("request", request, Request))

    def keep_end(self, request: Request) -> None:
        """``request`` ends or is preempted, and no step in flight holds it: its computed tokens can be hit to the last.

        In the natural layout; nothing in the reference layout. CacheError for a request that holds no blocks.
        """
        if self._layout.keeps_ends:
            self._slots.keep_end(request)
        else:
            self._residents.row_of(request)

    # -- the natural layout: what a step must do besides its rows

    def store_checkpoints(self, rows: Int64, computed: Int64, end: Int64) -> None:
        """Blocks for the states that ``rows`` pass between ``computed`` and ``end`` tokens, with what room is left."""
        if not self.checkpoints.awaits_stops:
            return
        rows = self._residents.rows_held(rows)
        computed, end = _one_a_row("computed", computed, rows, 0), _one_a_row("end", end, rows, 0)
        self.checkpoints.store(self.rows.requests, rows, computed, end)

    def store_checkpoints_of(self, request: Request, computed: int, end: int) -> None:
        """store_checkpoints of one request. CacheError for one that holds no blocks."""
        if not self.checkpoints.idle:
            self._residents.row_of(request)
            self.checkpoints.store_of(request, integer("computed", computed, 0), integer("end", end, 0))

    def take_transfers(self) -> Transfers:
        """Moves, copies and checkpoints since the last call, for the worker; their blocks are held no longer.

        Whoever drives the manager without a Scheduler calls it before every forward.
        """
        return self.transfers.take_transfers()

    # -- the fields of a Step that are the cache's

    def step_cells(self, rows: Int64, new: Sequence[Cells], moved: Int64) -> Cells:
        """``new`` cells of a step of ``rows`` as the worker names them, with all others that have changed.

        moved: see Transfers. Ids are those within each group's class, behind the step's moves.
        """
        cells = join_cells(rotated_cells(self.groups, rows) + list(new))
        return named_cells(self.groups, self.block_pool, self.transfers, cells, moved)

    def step_states(self, spans: RowSpans, transfers: Transfers) -> StateMoves:
        """What a step does to states: of its rows, and what ``transfers`` ask for."""
        return with_transfers(state_moves(self.groups, self.block_pool, spans), transfers, spans.rows)

    def forget_moved(self, moved: Int64) -> set[int]:
        """A step that failed moved to the blocks ``moved``: nothing of them can be hit; the rows that hold one."""
        moved = integers("moved", moved, 0)
        if not moved.size:
            return set()
        self.block_pool.evict_blocks(np.unique(moved).astype(np.int32))
        return set(self.transfers.cells_of(moved)[1].tolist())

    def forget_accepted(self, rows: Int64) -> None:
        """``rows`` run again: where accepted drafts left their states is known from the tables from now on."""
        for group in self.groups:
            group.forget_accepted(rows)

    @property
    def evictions(self) -> int:
        """Keys lost so far: with it a hit is remembered, see is_longest_hit."""
        return self.block_pool.evictions

    def stops(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        """Natural layout: token counts in start + 1 .. end at which states of ``request`` should be kept, ascending."""
        return self.checkpoints.stops(request, start, end)

    def free(self, request: Request | str) -> None:
        """Give back what a request holds, last block first; what is published stays findable.

        A request that holds nothing, or an unknown id, is a no-op.
        """
        self._slots.free(_id_of(request))

    def free_many(self, requests: Sequence[Request]) -> None:
        """Free each of ``requests``, in this order, in one go where they share no block."""
        self._slots.free_many([one.request_id for one in instances("requests", requests, Request)])

    def evict_blocks(self, group: int, block_ids: Sequence[int] | Int32) -> None:
        """Blocks of ``group``, by ids as get_block_ids has them, can be hit no longer; who holds them keeps them.

        For those whose load failed. In the reference layout all groups share their ids. BlockError for others.
        """
        of = self.block_pool.classes[integer("group", group, 0, len(self.groups) - 1)]
        ids = np.unique(integers("block_ids", block_ids, 0))
        last = [*self.block_pool.bases, self.block_pool.num_blocks][of + 1]
        found = ids[ids > 0] + self.block_pool.bases[of]
        if found.size and found[-1] >= last:
            raise BlockError(f"group {group} has no block {int(ids[-1])}: evict those of get_block_ids")
        self.block_pool.evict_blocks(found.astype(np.int32))

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, if no block is in use. Returns whether it was done."""
        done = self.block_pool.reset_prefix_cache()
        if done:
            if self._stats is not None:
                self._stats.reset = True
            self._residents.names.forget()
            if self._parts.misses is not None:
                self._parts.misses.forget()
        return done

    # -- locks

    def lock(self, request: Request | str) -> BlockLock:
        """What a request holds now stays where it is, and held, until ``unlock``: for a transfer to elsewhere.

        Also when the request ends meanwhile: lock, then free. In the natural layout those blocks are not moved between
        slabs either. CacheError for a request that holds no blocks.
        """
        request_id = _id_of(request)
        resident = self._residents.get(request_id)
        if resident is None:
            raise CacheError(f"request {request_id!r} holds no blocks: lock those of a running one")
        return self.locks.add([group.rows.held(resident.row) for group in self.groups])

    def unlock(self, lock: BlockLock) -> None:
        """Those blocks may move, and go. CacheError for a lock that is not held."""
        self.locks.release(instance("lock", lock, BlockLock))

    # -- pins

    def pin(self, tokens: Sequence[int], salt: str | None = None) -> Pin:
        """Keep what is cached of ``tokens``, and written, until ``unpin``; the Pin says how many tokens that is.

        Its blocks count in ``usage``. CapacityError beyond ``max_pinned_blocks``. O(blocks of the prefix).
        """
        hit = self._lookup.find_written(Request("pin", tokens, hasher=self.hasher, cache_salt=salt))
        return self.pins.add(hit, [group.kind.drops for group in self.groups])

    def unpin(self, pin: Pin) -> None:
        """``pin`` may be evicted again. CacheError for a pin that is not held."""
        self.pins.release(instance("pin", pin, Pin))

    # -- answers

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds; none for an unknown id."""
        request = self._residents.get(instance("request_id", request_id, str))
        if request is None:
            return self._lookup.empty
        return KVCacheBlocks(tuple(group.rows.ids(request.row) for group in self.groups), self.block_pool)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """get_blocks as lists of ids."""
        return self.get_blocks(request_id).blocks

    def create_empty_block_list(self) -> KVCacheBlocks:
        """No block in every group."""
        return self._lookup.empty

    def get_num_common_prefix_blocks(self, request: Request | str, num_running_requests: int) -> list[int]:
        """Per group, how many leading blocks of ``request`` are held by all running requests.

        CacheError for a request that holds no blocks.
        """
        request_id = _id_of(request)
        if self._residents.get(request_id) is None:
            raise CacheError(f"request {request_id!r} holds no blocks: ask for a running one")
        running = integer("num_running_requests", num_running_requests, 0, MOST_COUNT)
        holders_wanted = max(running, len(self._residents))  # those that ended may still hold blocks
        common = []
        for group, ids in enumerate(self.get_blocks(request_id).ids):
            holders = self.block_pool.ref_counts(ids) - self.pins.holds(group, ids)
            shared = (holders == holders_wanted) & (ids != 0)
            common.append(len(ids) if shared.all() else int(shared.argmin()))
        return common

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call; empty when they are off."""
        return self.block_pool.take_events()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Statistics since the last call; None when they are off."""
        if self._stats is None:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def statistics(self) -> CacheStatistics:
        """What the cache holds now. O(num_blocks)."""
        counts = cache_statistics(self.block_pool, self.groups, len(self._residents), self.pins.num_blocks)
        return self._parts.kept.add_statistics(counts)

    def idle_blocks(self) -> tuple[tuple[int, ...], ...]:
        """By group, how many cached blocks nobody came for how long, by bucket of EDGES_S and above. O(num_blocks).

        ConfigError without block_times.
        """
        keys = self.block_pool.keys
        if keys.times is None:
            raise ConfigError("nobody counts how long blocks are idle: construct with block_times")
        return tuple(keys.times.idle(keys.in_group(number)) for number in range(len(self.groups)))

    def resident_requests(self) -> tuple[Request, ...]:
        """Requests that hold blocks."""
        return tuple(self._residents)

    def next_event(self, row: int) -> int:
        """Tokens that ``row`` may hold before anything must be done for it. CacheError for one that nobody holds."""
        return self._residents.next_event(self._residents.rows_held((row,)).item())

    def check(self) -> None:
        """Rebuild ownership, counts, free order and keys from rows and index alone; CacheError if they differ.

        O(blocks + keys).
        """
        check_cache(self._parts)


def _id_of(request: Request | str) -> str:
    return request if isinstance(request, str) else instance("request", request, Request).request_id


def _one_a_row(name: str, counts: object, rows: Int64, least: int) -> Int64:
    """``counts``, token counts of at least ``least``, int64[len(rows)]. ConfigError for others."""
    found = integers(name, counts, least)
    if len(found) != len(rows):
        raise ConfigError(f"{name} has {len(found)} entries for {len(rows)} rows: give one to each row")
    return found
