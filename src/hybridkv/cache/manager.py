"""KVCacheManager: which blocks hold the tokens of each request, and which tokens are there already.

What can be asked of a cache at all: facts of its groups, its layout and its size, which no step changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import flag, instance, integer, integers
from hybridkv.cache.assembly import CacheParts, assemble, managed
from hybridkv.cache.engine_side import EngineSide
from hybridkv.cache.holds import Pin
from hybridkv.cache.journal import KVCacheEvent
from hybridkv.cache.lookup import Hit, KVCacheBlocks
from hybridkv.cache.options import DEFAULT_OPTIONS, CacheOptions
from hybridkv.cache.plan import Admission, BatchSlots, Refusal, SlotDemand, SlotPlan
from hybridkv.cache.residents import id_of, one_a_row
from hybridkv.cache.statistics import CacheStatistics, PrefixCacheStats, cache_statistics
from hybridkv.errors import BlockError, CacheError, ConfigError
from hybridkv.observe.audit import check_cache
from hybridkv.observe.misses import Miss
from hybridkv.planner import KVCacheConfig, Plan
from hybridkv.request import Hasher, Request, checked_hasher
from hybridkv.specs import Keeps
from hybridkv.units import MOST_COUNT


class CacheBounds:
    """reads_encoder: some layer reads an encoder's output. drops_for_eagle: some group drops the last block of a hit.

    rewrites_states: running states are rewritten in place, so that a step that failed leaves them broken.
    shares_in_part: a branch can begin with blocks that its parent has filled in part.
    follows_vllm: block ids and steps are those of vLLM.
    keeps_resume_points: what a request computed can be hit to its last token, see KVCacheManager.keep_resume_point.
    keeps_checkpoints: states are kept where the placement stops (Checkpoints.stops).
    state_alignment: tokens between the places where all states can be kept, and shared as they are; 0 where none are.
    evicts_in_order: blocks of one size go in the order of their last use, so that ``Miss.more_bytes`` is a bound.
    refuse_stranger: raises ConfigError or CacheError for a request that cannot be served here, see Residents.
    stops: token counts in start + 1 .. end at which states of a request should be kept, see Checkpoints.stops.
    peak_blocks: the most blocks, or slabs, that one request holds at once, see SlotPlanner.peak_blocks.
    usable_blocks: blocks, or slabs, that requests can hold: without the null one and sinks. guaranteed_blocks: without
    those that may be pinned, too.
    """

    def __init__(self, parts: CacheParts) -> None:
        groups, pool, layout = parts.groups, parts.pool, parts.layout
        kept = [one for one in groups if one.states is not None and one.kind.publishes and not one.policy.hits.copies]
        self.reads_encoder = any(group.kind.spec.keeps is Keeps.ENCODER for group in groups)
        self.drops_for_eagle = any(group.kind.drops for group in groups)
        self.rewrites_states = layout.rewrites_states
        self.shares_in_part = layout.shares_in_part
        self.follows_vllm = layout.follows_vllm
        self.keeps_resume_points = layout.keeps_resume_points
        self.keeps_checkpoints = bool(parts.checkpoints.groups)
        self.state_alignment = math.lcm(*(group.policy.block_size for group in kept)) if kept else 0
        self.usable_blocks = pool.num_usable
        self.guaranteed_blocks = pool.num_usable - parts.pins.max_blocks
        self.evicts_in_order = layout.evicts_in_order
        self.checkpoint_positions = parts.checkpoints.positions
        self.refuse_stranger = parts.residents.refuse_stranger
        self.peak_blocks = parts.planner.peak_blocks
        self._groups = tuple(groups)

    def refuse_drafts(self, num_drafts: int) -> None:
        """ConfigError unless every recurrent group can keep the states of ``num_drafts`` drafts of a row."""
        drafts = integer("num_drafts", num_drafts, 0, MOST_COUNT)
        for group in self._groups if drafts else ():
            most = group.kind.num_drafts
            if most is None:
                continue
            if most < drafts:
                raise ConfigError(
                    f"num_speculative_tokens is {drafts}, but group {group.number} has {most} speculative state "
                    "blocks: read the model with num_speculative_tokens="
                )
            if group.kind.publishes and not group.policy.hits.copies and group.policy.block_size <= drafts:
                raise ConfigError(
                    f"num_speculative_tokens is {drafts}: states kept every {group.policy.block_size} tokens (group "
                    f"{group.number}) need fewer drafts than that"
                )


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
    those of all groups. options: everything else.

    Attributes for reading: rows (the columns of resident requests), bounds (facts that no step changes), engine (calls
    of engines with requests and counts of their own), fields (those of a Step that are the cache's), fast_forward (many
    steps as one), kept (hears which requests wait), misses (why tokens are not found; None unless remembered_losses).
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
        options: CacheOptions = DEFAULT_OPTIONS,
    ) -> None:
        config, limits, options = managed(
            kv_cache_config,
            instance("options", options, CacheOptions),
            max_model_len=max_model_len,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
        )
        parts = self._parts = assemble(
            config,
            limits,
            options,
            enable_caching=flag("enable_caching", enable_caching),
            use_eagle=flag("use_eagle", use_eagle),
            enable_events=flag("enable_kv_cache_events", enable_kv_cache_events),
            hasher=None if hasher is None else checked_hasher(hasher),
        )
        self.config, self.max_model_len = config, limits.max_model_len
        self.dcp_world_size, self.pcp_world_size = limits.dcp, limits.pcp
        self.placement, self.eviction, self.hasher = parts.layout.placement, parts.layout.eviction, parts.hasher
        self.enable_caching = parts.hasher is not None
        self.block_pool, self.groups, self.sink_blocks = parts.pool, parts.groups, parts.sink_blocks
        self.pins, self.locks, self._publisher = parts.pins, parts.locks, parts.publisher
        self.fields, self.checkpoints = parts.transfers, parts.checkpoints
        self.eviction_policy, self.misses, self.fast_forward = parts.eviction_policy, parts.misses, parts.fast_forward
        self.rows = parts.residents.request_rows
        self._residents, self._lookup = parts.residents, parts.lookup
        self._planner, self._slots = parts.planner, parts.slots
        self.bounds, self.engine = CacheBounds(parts), EngineSide(parts)
        self._stats = PrefixCacheStats() if flag("log_stats", log_stats) else None

    # -- look-up

    @property
    def usage(self) -> float:
        """Referenced blocks / usable blocks, 0 .. 1."""
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of ``request`` and its tokens, at most all but the last token.

        Nothing is adopted: hand the blocks to allocate_slots. O(blocks of the hit).
        """
        hit = self.look_up(request)
        return self._lookup.blocks_of(hit), hit.tokens

    def look_up(self, request: Request) -> Hit:
        """find_hit, counted in the statistics."""
        hit = self._lookup.find(request)
        if self._stats is not None and self.enable_caching and request.reads_prefix_cache:
            self._stats.requests += 1
            self._stats.queries += request.num_tokens
            self._stats.hits += hit.tokens
        return hit

    def find_hit(self, request: Request) -> Hit:
        """get_computed_blocks without statistics, and why the hit is not longer."""
        return self._lookup.find(request)

    def explain(self, request: Request, hit_tokens: int | None = None) -> tuple[Miss, ...]:
        """Why tokens of its prompt behind ``hit_tokens``, by default what it would hit now, are not found, in order.

        Every token has one reason: with the hit they are the whole prompt. For operators: a reason may tell what other
        tenants hold. O(hash blocks of the prompt). ConfigError without remembered_losses, and for strangers.
        """
        if self.misses is None:
            raise ConfigError("misses are explained from what was lost: construct with remembered_losses, say 1 << 20")
        self._residents.refuse_stranger(request)
        hit = None if hit_tokens is None else integer("hit_tokens", hit_tokens, 0, MOST_COUNT)
        return self.misses.explain(request, hit)

    def is_longest_hit(self, request: Request, hit: Hit) -> bool:
        """Return whether ``hit``, found for ``request`` before, is still the longest.

        It is while none of the blocks it rests on lost its key and none of the keys that bounded it is known.
        O(those keys) look-ups, one a group for full attention, and one array comparison over the blocks.
        """
        self._residents.refuse_stranger(request)
        return self._lookup.is_longest(request, instance("hit", hit, Hit))

    # -- steps

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """What is allocated inside is of ``step``, a number above those in flight, and written once marked so.

        Thus nothing is copied that the same step is still to write, and events speak of what is there. Whoever drives
        the manager without a Scheduler opens one for each forward. Outside of any, what is published counts as written
        at once. CacheError inside another one.
        """
        if type(step) is not int or not 0 <= step <= MOST_COUNT:
            step = integer("step", step, 0, MOST_COUNT)
        self._publisher.begin_step(step)
        try:
            yield
        finally:
            self._publisher.end_step()

    def mark_written(self, step: int) -> None:
        """``step`` was executed. CacheError for one that never began, or was marked or revoked already."""
        if type(step) is not int or not 0 <= step <= MOST_COUNT:
            step = integer("step", step, 0, MOST_COUNT)
        self._publisher.mark_written(step)

    def revoke(self, first_step: int) -> None:
        """Steps from ``first_step`` on were not executed: what they published can be hit no longer."""
        self._publisher.revoke(integer("first_step", first_step, 0, MOST_COUNT))

    # -- slots, one request

    def allocate_slots(  # noqa: PLR0917 - the signature that users of vLLM know
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | Hit | None = None,
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
                self._slots.set_state_position(request.row, end)
                return self._lookup.empty
            if delay_cache_blocks is False:
                grown = self._slots.grow(request, end, total)
                if grown is not None:
                    return KVCacheBlocks(grown, self.block_pool) if grown else self._lookup.empty
        self._residents.refuse_stranger(request)
        new = self._slots.allocate_one(
            request,
            self._demand_of(
                request,
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
        new_computed_blocks: KVCacheBlocks | Hit | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        *,
        num_external_computed_tokens: int = 0,
        admission: Admission | None = None,
    ) -> SlotPlan | Refusal:
        """What ``request`` needs to compute ``num_new_tokens`` behind its computed tokens. Changes nothing.

        num_new_computed_tokens, new_computed_blocks: a hit to adopt, or its blocks, for a request that holds no blocks.
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
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            num_external_computed_tokens,
        )
        if admission is not None and type(admission) is not Admission:
            instance("admission", admission, Admission)
        return self._planner.plan(request, wanted, admission)

    def _demand_of(  # noqa: PLR0917 - as allocate_slots
        self,
        request: Request,
        new_tokens: int,
        hit_tokens: int,
        hit: KVCacheBlocks | Hit | None,
        lookahead_tokens: int,
        delayed: bool,
        encoder_tokens: int,
        external_tokens: int,
    ) -> SlotDemand:
        """The same, checked."""
        counts: tuple[int, ...] = (new_tokens, hit_tokens, external_tokens, lookahead_tokens, encoder_tokens)
        if not (delayed is False and {*map(type, counts)} == {int} and max(counts) <= MOST_COUNT):
            flag("delay_cache_blocks", delayed)
            names = ("new", "new_computed", "external_computed", "lookahead", "encoder")
            counts = tuple(
                integer(f"num_{name}_tokens", count, most=MOST_COUNT) for name, count in zip(names, counts, strict=True)
            )
        if hit is not None and not isinstance(hit, Hit):
            instance("new_computed_blocks", hit, KVCacheBlocks)
        new, found, external, lookahead, encoder = counts
        return SlotDemand(new, self._lookup.handed_over(request, hit, found), external, lookahead, delayed, encoder)

    def commit(self, plan: SlotPlan) -> KVCacheBlocks:
        """Do what ``plan`` says and return the new columns. StalePlanError if anything changed since it was made."""
        if type(plan) is not SlotPlan:
            instance("plan", plan, SlotPlan)
        return KVCacheBlocks(self._slots.commit(plan), self.block_pool)

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
            num_new_tokens = one_a_row("num_new_tokens", num_new_tokens, rows, 1)
        elif type(num_new_tokens) is not int or not 1 <= num_new_tokens <= MOST_COUNT:
            num_new_tokens = integer("num_new_tokens", num_new_tokens, 1, MOST_COUNT)
        if type(num_lookahead_tokens) is not int or not 0 <= num_lookahead_tokens <= MOST_COUNT:
            num_lookahead_tokens = integer("num_lookahead_tokens", num_lookahead_tokens, 0, MOST_COUNT)
        return self._slots.allocate(rows, num_new_tokens, num_lookahead_tokens)

    # -- drafts

    def accept_drafts(self, rows: Int64, drafted: Int64, kept: Int64) -> None:
        """Of the last ``drafted[i]`` tokens that ``rows[i]`` computed only the first ``kept[i]`` are its own.

        int64[R] each; rows distinct, their tokens known, no step in flight. What is kept can be hit, and its state goes
        on; the rest is overwritten. O(R), and a Python call a row that fills a block. Errors as allocate_batch.
        """
        rows = self._residents.rows_held(rows)
        drafted, kept = one_a_row("drafted", drafted, rows, 0), one_a_row("kept", kept, rows, 0)
        if (kept > drafted).any() or (drafted > self.rows.num_computed[rows]).any():
            raise ConfigError("a row keeps at most the drafts that it computed: accept those of the step that has run")
        self._slots.accept_drafts(rows, drafted, kept)

    # -- publishing and freeing

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the full blocks of the first ``num_computed_tokens`` tokens, for transfers that were delayed.

        CacheError, and nothing published, for a request that holds no blocks for them.
        """
        self._slots.publish_computed(request, integer("num_computed_tokens", num_computed_tokens, 0))

    def keep_resume_point(self, request: Request) -> None:
        """``request`` ends or is preempted, and no step in flight holds it: its computed tokens can be hit to the last.

        In the natural layout; nothing in the reference layout. CacheError for a request that holds no blocks.
        """
        if self.bounds.keeps_resume_points:
            self._slots.keep_resume_point(request)
        else:
            self._residents.row_of(request)

    keep_end = keep_resume_point  # the name in version 0.1

    # -- the natural layout

    def store_checkpoints(self, rows: Int64, computed: Int64, end: Int64) -> None:
        """Blocks for the states that ``rows`` pass between ``computed`` and ``end`` tokens, with what room is left."""
        if not self.checkpoints.awaits_checkpoints:
            return
        rows = self._residents.rows_held(rows)
        computed, end = one_a_row("computed", computed, rows, 0), one_a_row("end", end, rows, 0)
        self.checkpoints.store(self.rows.requests, rows, computed, end)

    def free(self, request: Request | str) -> None:
        """Give back what a request holds, last block first; what is published stays findable.

        A request that holds nothing, or an unknown id, is a no-op.
        """
        self._slots.free(id_of(request))

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
        self.eviction_policy.settle()

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, if no block is in use. Returns whether it was done."""
        self.eviction_policy.settle()  # what was given up goes first into the free order
        done = self.block_pool.reset_prefix_cache()
        if done:
            if self._stats is not None:
                self._stats.reset = True
            self._residents.names.forget()
            if self.misses is not None:
                self.misses.forget()
        return done

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
        self.eviction_policy.settle()

    # -- answers

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds; none for an unknown id."""
        if type(request_id) is not str:
            instance("request_id", request_id, str)
        request = self._residents.get(request_id)
        if request is None:
            return self._lookup.empty
        return KVCacheBlocks(tuple([group.rows.ids(request.row) for group in self.groups]), self.block_pool)

    def create_empty_block_list(self) -> KVCacheBlocks:
        """No block in every group."""
        return self._lookup.empty

    def get_num_common_prefix_blocks(self, request: Request | str, num_running_requests: int) -> list[int]:
        """Per group, how many leading blocks of ``request`` are held by all running requests.

        CacheError for a request that holds no blocks.
        """
        request_id = id_of(request)
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

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """get_blocks as lists of ids."""
        return self.get_blocks(request_id).blocks

    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call; empty when they are off."""
        return self.block_pool.journal.events.take()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Statistics since the last call; None when they are off."""
        if self._stats is None:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def statistics(self) -> CacheStatistics:
        """What the cache holds now. O(num_blocks)."""
        self.block_pool.journal.settle()
        counts = cache_statistics(
            self.block_pool, self.groups, len(self._residents), self.pins.num_blocks, self._parts.times
        )
        return self.eviction_policy.add_statistics(counts)

    def check(self) -> None:
        """Rebuild ownership, counts, free order and keys from rows and index alone; CacheError if they differ.

        O(blocks + keys).
        """
        check_cache(self._parts)
