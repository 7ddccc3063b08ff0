"""The cache manager: which blocks hold the tokens of each request, and which cached tokens a request can reuse.

A request passes through these calls:

    look_up          find the longest cached prefix                                (changes nothing)
    plan_slots       decide which blocks the request needs, or why it must wait    (changes nothing)
    commit           take the blocks; the request holds a row from now on
    allocate_batch   take the blocks of one more step, for all running requests at once
    keep_resume_point, free   keep the end of the request for reuse, and give its blocks back

A *resume point* is a token count at which a later request with the same tokens can begin. Attention needs the blocks of
the tokens before it; a recurrent layer needs the state after exactly that many tokens:

    tokens    |pppp|pppp|pppp|pppp|pppp|pppp|pppp|pppp|oooo|oooo|oo..|     p: prompt (32 tokens), o: output (10)
    blocks      b0   b1   b2   b3   b4   b5   b6   b7   b8   b9   b10      attention, 4 tokens a block
    states                ^                         ^             ^        recurrent, one block a state
    position              10                        31            42       10: branch, 31: P-1, 42: end

P-1 comes before the last prompt token, which must be computed for its logits. All three positions lie inside a block:
a hit copies its last block.

``CacheBounds`` holds the facts of a cache that no step changes: its groups, its layout and its size.
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
from hybridkv.cache.policies import ReplayedHits
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
    """Facts of a cache that no step changes, with the checks that need nothing else.

    Args:
        parts: The parts of the manager.

    Attributes:
        reads_encoder: Some layer reads the output of an encoder.
        drops_for_eagle: Some group drops the last block of each hit, as EAGLE needs.
        rewrites_states: Running states are rewritten in place, so a failed step leaves them broken.
        shares_in_part: A branch can begin with blocks that its parent has filled in part.
        follows_vllm: Block ids and steps equal those of vLLM; see ``ReferenceLayout``.
        keeps_resume_points: Everything that a request computed can be reused, to its last token; see
            ``KVCacheManager.keep_resume_point``.
        keeps_checkpoints: Some group keeps states at the checkpoint positions of the placement.
        state_alignment: Tokens between positions where all groups can keep states that are shared without a copy; 0 if
            no group does.
        hits_inside_blocks: Hits may end inside blocks (``CacheOptions.hit_unit``), so chunks end at ``resume_points``.
        evicts_in_order: Blocks of one size are evicted in the order of their last use, so ``Miss.more_bytes`` is a
            bound.
        refuse_stranger: Raises ConfigError or CacheError for a request that this cache cannot serve; see ``Residents``.
        checkpoint_positions: Returns the positions at which states of a request should be kept; see
            ``Checkpoints.positions``.
        resume_points: Returns where hits may end for the sake of a request; see ``Publisher.resume_points_of``.
        peak_blocks: Returns the most blocks, or slabs, that one request holds at once; see ``SlotPlanner.peak_blocks``.
        usable_blocks: Blocks, or slabs, that requests can hold: all except the null block and attention sinks.
        guaranteed_blocks: ``usable_blocks`` without the blocks that pins may take.
    """

    def __init__(self, parts: CacheParts) -> None:
        groups, pool, layout = parts.groups, parts.pool, parts.layout
        kept = [one for one in groups if one.kind.publishes and one.states is not None and not one.states.rotates]
        self.reads_encoder = any(group.kind.spec.keeps is Keeps.ENCODER for group in groups)
        self.drops_for_eagle = any(group.kind.drops for group in groups)
        self.rewrites_states = layout.rewrites_states
        self.shares_in_part = layout.shares_in_part
        self.follows_vllm = layout.follows_vllm
        self.keeps_resume_points = layout.keeps_resume_points
        self.keeps_checkpoints = bool(parts.checkpoints.groups)
        self.state_alignment = math.lcm(*(group.policy.block_size for group in kept)) if kept else 0
        self.hits_inside_blocks = bool(parts.publisher.ends.block_size)
        self.usable_blocks = pool.num_usable
        self.guaranteed_blocks = pool.num_usable - parts.pins.max_blocks
        self.evicts_in_order = layout.evicts_in_order
        self.checkpoint_positions = parts.checkpoints.positions
        self.refuse_stranger = parts.residents.refuse_stranger
        self.resume_points = parts.publisher.resume_points_of
        self.peak_blocks = parts.planner.peak_blocks
        self._groups = tuple(groups)

    def first_replayed(self, tokens: int) -> int:
        """Return the first token that is computed again after a hit of ``tokens`` tokens; ``tokens`` for none.

        The tokens from there to the end of the hit are written to the groups with ``bounded_replay`` only: the blocks
        of other groups hold them already, and may be shared.

        Args:
            tokens: tokens of the hit.
        """
        hits = (group.policy.hits for group in self._groups)
        return min((one.first_replayed(tokens) for one in hits if isinstance(one, ReplayedHits)), default=tokens)

    def refuse_drafts(self, num_drafts: int) -> None:
        """Raise ConfigError unless each group can keep the states, or raw keys, of the drafted tokens.

        Args:
            num_drafts: most drafted tokens of a row in one step.
        """
        drafts = integer("num_drafts", num_drafts, 0, MOST_COUNT)
        for group in self._groups if drafts else ():
            if group.kind.pools and (room := group.kind.block_size - group.kind.pools + 1) < drafts:
                raise ConfigError(
                    f"num_speculative_tokens is {drafts}, but the ring of group {group.number} has room for {room} "
                    "next to the open group: read the model with num_speculative_tokens="
                )
            most = group.kind.num_drafts
            if most is None:
                continue
            if most < drafts:
                raise ConfigError(
                    f"num_speculative_tokens is {drafts}, but group {group.number} has {most} speculative state "
                    "blocks: read the model with num_speculative_tokens="
                )
            in_columns = group.kind.publishes and group.states is not None and not group.states.rotates
            if in_columns and group.policy.block_size <= drafts:
                raise ConfigError(
                    f"num_speculative_tokens is {drafts}: states kept every {group.policy.block_size} tokens (group "
                    f"{group.number}) need fewer drafts than that"
                )


Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class KVCacheManager:
    """Assigns blocks to requests and finds cached prefixes. Not thread safe; ``Scheduler`` adds a guard.

    Args:
        kv_cache_config: A Plan, whose max_model_len, ranks and placement apply; or only its groups and its number of
            blocks.
        max_model_len: Most tokens of a request. Required with a config alone.
        enable_caching: Look up and publish prefixes. Caching stays off if some layer cannot resume: a state that is not
            kept, or cross attention in the reference layout.
        use_eagle: Every attention group drops the last block of a hit, unless the config flags some groups itself.
        log_stats: Collect PrefixCacheStats.
        enable_kv_cache_events: Collect events for ``take_events``.
        dcp_world_size: Ranks of decode context parallelism, over which attention is spread.
        pcp_world_size: Ranks of prefill context parallelism, over which attention is spread.
        hasher: Hashes the blocks of requests. By default SHA-256 over canonical CBOR, in the largest block that divides
            the blocks of all groups.
        options: Everything else.

    Attributes:
        rows: The columns of the resident requests.
        bounds: Facts that no step changes.
        engine: Calls for engines that keep requests and counts of their own.
        fields: The fields of a Step that the cache fills in.
        fast_forward: Takes many decode steps as one.
        eviction_policy: Learns which requests wait to begin.
        misses: Explains why tokens are not found; ``None`` unless ``remembered_losses`` is set.

    Raises:
        ConfigError: A limit cannot work, or contradicts the plan.
        UnsupportedModelError: A group has a kind of layer without a cache policy.
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
        """Held blocks divided by usable blocks, 0 to 1."""
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Find the longest cached prefix of ``request``. O(blocks of the prefix).

        The prefix leaves at least the last token to compute. The request does not hold the blocks yet: pass them to
        ``allocate_slots``.

        Args:
            request: A request that was made with the hasher of this manager.

        Returns:
            The blocks of the prefix, and its number of tokens.
        """
        hit = self.look_up(request)
        return self._lookup.blocks_of(hit), hit.tokens

    def look_up(self, request: Request) -> Hit:
        """Find the longest cached prefix, and count the look-up in the statistics. O(blocks of the prefix).

        Args:
            request: A request that was made with the hasher of this manager.
        """
        hit = self._lookup.find(request)
        if self._stats is not None and self.enable_caching and request.reads_prefix_cache:
            self._stats.requests += 1
            self._stats.queries += request.num_tokens
            self._stats.hits += hit.tokens
        return hit

    def find_hit(self, request: Request) -> Hit:
        """Find the longest cached prefix without counting it; the Hit also says why it is not longer.

        Args:
            request: A request that was made with the hasher of this manager.
        """
        return self._lookup.find(request)

    def explain(self, request: Request, hit_tokens: int | None = None) -> tuple[Miss, ...]:
        """Explain why prompt tokens after the hit are not cached, in order. O(hash blocks of the prompt).

        Every token has one reason: the hit and the misses together cover the prompt. The answer is for operators,
        because a reason may reveal which tokens other tenants hold.

        Args:
            request: The request to explain.
            hit_tokens: Tokens of the hit; by default those that the request would hit at this moment.

        Raises:
            ConfigError: The manager has no ``remembered_losses``, or the request was made for another manager.
        """
        if self.misses is None:
            raise ConfigError("explain needs remembered losses: construct the manager with remembered_losses=1 << 20")
        self._residents.refuse_stranger(request)
        hit = None if hit_tokens is None else integer("hit_tokens", hit_tokens, 0, MOST_COUNT)
        return self.misses.explain(request, hit)

    def is_longest_hit(self, request: Request, hit: Hit) -> bool:
        """Return whether an earlier hit is still the longest.

        It is as long as no block under it lost its key and no key that bounded it became known. O(those keys) look-ups
        (one a group for full attention) and one array comparison over the blocks.

        Args:
            request: The request for which the hit was found.
            hit: A Hit of ``look_up`` or ``find_hit``.
        """
        self._residents.refuse_stranger(request)
        return self._lookup.is_longest(request, instance("hit", hit, Hit))

    # -- steps

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Open a step: blocks that are published inside the context count as written after ``mark_written(step)``.

        No copy then reads a block before its step has written it, and events report only written blocks. Open one step
        for each forward if you drive the manager without a Scheduler. Outside a step, published blocks count as written
        at once.

        Args:
            step: A number above those of all steps in flight.

        Raises:
            CacheError: Another step is open, or the number is not above those in flight.
        """
        if type(step) is not int or not 0 <= step <= MOST_COUNT:
            step = integer("step", step, 0, MOST_COUNT)
        self._publisher.begin_step(step)
        try:
            yield
        finally:
            self._publisher.end_step()

    def mark_written(self, step: int) -> None:
        """Note that a step was executed: everything that it published is written.

        Args:
            step: The number of a step in flight.

        Raises:
            CacheError: The step never began, or was marked or revoked before.
        """
        if type(step) is not int or not 0 <= step <= MOST_COUNT:
            step = integer("step", step, 0, MOST_COUNT)
        self._publisher.mark_written(step)

    def revoke(self, first_step: int) -> None:
        """Unpublish the blocks of steps that were not executed.

        Args:
            first_step: This step and all later ones failed.
        """
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
        """Plan and commit the blocks of one request.

        If they do not fit, columns that the request no longer reads are given back all the same.

        Args:
            request: The request to serve.
            num_new_tokens: Tokens to compute after its computed ones. 0 starts a load; see ``plan_slots``.
            num_new_computed_tokens: Tokens of the hit; 0 for a request that already holds blocks.
            new_computed_blocks: The hit, or its blocks.
            num_lookahead_tokens: Room for drafted tokens, which are never published.
            delay_cache_blocks: Publish nothing in this call.
            num_encoder_tokens: Tokens of the encoder's output, for cross attention.
            num_external_computed_tokens: Tokens after the hit that are loaded from elsewhere; see ``plan_slots``.

        Returns:
            The new columns of each group without those of the hit, or ``None`` if they do not fit.

        Raises:
            ConfigError: As ``plan_slots``.
            CacheError: As ``plan_slots``.
        """
        if (
            isinstance(request, Request)
            and request._rows is self.rows
            and new_computed_blocks is None
            and type(num_new_tokens) is type(num_lookahead_tokens) is int
            # plan_slots raises ConfigError for values that are not counts
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
        """Decide which blocks a request needs for its next tokens. Changes nothing.

            tokens   [ computed before | hit | external | new | lookahead ]

        External tokens arrive in one of two ways. With new tokens, the worker loads them before the forward of this
        step. Without new tokens and with ``delay_cache_blocks``, a transfer runs alongside the steps, after the copies
        of this one. Until ``finish_load`` the request then computes nothing, and its blocks do not move.

        Args:
            request: The request to serve.
            num_new_tokens: Tokens to compute after its computed ones.
            num_new_computed_tokens: Tokens of a hit to adopt; only for a request that holds no blocks.
            new_computed_blocks: That hit, or its blocks.
            num_lookahead_tokens: Room for drafted tokens, which are never published.
            delay_cache_blocks: Publish nothing in this call.
            num_encoder_tokens: Tokens of the encoder's output, for cross attention.
            num_external_computed_tokens: Tokens after the hit whose KV and states are loaded from elsewhere.
            admission: Extra conditions, for a request that is about to start.

        Returns:
            A plan for ``commit``, or the reason for which the blocks are refused.

        Raises:
            ConfigError: There is nothing to allocate, the hit cannot be adopted, or the request has another hasher.
            CacheError: The request holds blocks of another manager, or is being loaded.
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
        """Return the arguments of ``plan_slots``, checked."""
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
        """Carry out a plan.

        Args:
            plan: A plan of ``plan_slots``.

        Returns:
            The new columns of each group.

        Raises:
            StalePlanError: The cache changed since the plan was made. Nothing was done.
        """
        if type(plan) is not SlotPlan:
            instance("plan", plan, SlotPlan)
        return KVCacheBlocks(self._slots.commit(plan), self.block_pool)

    # -- slots, all rows of a step

    def allocate_batch(self, rows: Int64, num_new_tokens: Int64 | int, num_lookahead_tokens: int = 0) -> BatchSlots:
        """Allocate slots for many running requests, in this order.

        From the first row that does not fit, all rows are refused. The caller advances the computed tokens. O(R) in
        array operations, and O(1) Python operations for each new or published block.

        Args:
            rows: int64[R], distinct rows of resident requests.
            num_new_tokens: Tokens to compute, at least 1: one count for all rows, or int64[R].
            num_lookahead_tokens: Room for drafted tokens of each row.

        Raises:
            ConfigError: An argument holds no row numbers or token counts. Nothing was done.
            CacheError: A row belongs to no request. Nothing was done.
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
        """Keep the accepted drafts of rows, and drop the others. O(R), and a Python call a row that fills a block.

        Accepted tokens can be hit from now on, and the row continues from the state of the last one. Rejected tokens
        are overwritten.

        Args:
            rows: int64[R], distinct rows; their tokens are known, and no step of theirs is in flight.
            drafted: int64[R], drafts that the last step of each row computed.
            kept: int64[R], how many leading ones of them were accepted.

        Raises:
            ConfigError: As ``allocate_batch``, or a row keeps more than it computed.
            CacheError: As ``allocate_batch``.
        """
        rows = self._residents.rows_held(rows)
        drafted, kept = one_a_row("drafted", drafted, rows, 0), one_a_row("kept", kept, rows, 0)
        if (kept > drafted).any() or (drafted > self.rows.num_computed[rows]).any():
            raise ConfigError("a row keeps at most the drafts that it computed: pass the counts of its last step")
        self._slots.accept_drafts(rows, drafted, kept)

    # -- publishing and freeing

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish full blocks whose publication was delayed.

        Args:
            request: A resident request.
            num_computed_tokens: Publish the full blocks of this many leading tokens.

        Raises:
            CacheError: The request holds no blocks for them. Nothing was published.
        """
        self._slots.publish_computed(request, integer("num_computed_tokens", num_computed_tokens, 0))

    def keep_resume_point(self, request: Request, *, ended: bool = True) -> None:
        """Keep everything that a request computed, so that a later request can resume after its last token.

        Call it before ``free`` when a request ends or is preempted and no step in flight holds it. In the reference
        layout it resumes at the last block boundary, and only a ranked eviction must know it.

        Args:
            request: A resident request.
            ended: The request ends there. Otherwise its output goes on elsewhere, and its value is that of a prompt.

        Raises:
            CacheError: The request holds no blocks.
        """
        if self.bounds.keeps_resume_points:
            self._slots.keep_resume_point(request, ended=ended)
        else:
            self._slots.keep_boundary(request)

    # -- the natural layout

    def store_checkpoints(self, rows: Int64, computed: Int64, end: Int64) -> None:
        """Take blocks for the states that rows pass at checkpoint positions, as far as there is room.

        Args:
            rows: int64[R], rows of the step that is being made.
            computed: int64[R], tokens computed before the step.
            end: int64[R], tokens computed after it.
        """
        if not self.checkpoints.awaits_checkpoints:
            return
        rows = self._residents.rows_held(rows)
        computed, end = one_a_row("computed", computed, rows, 0), one_a_row("end", end, rows, 0)
        self.checkpoints.store(self.rows.requests, rows, computed, end)

    def free(self, request: Request | str) -> None:
        """Give back the blocks of a request, the last block first. Published blocks stay findable.

        Args:
            request: The request or its id. An unknown id, or a request without blocks, is ignored.
        """
        self._slots.free(id_of(request))

    def evict_blocks(self, group: int, block_ids: Sequence[int] | Int32) -> None:
        """Remove the keys of blocks, for example of those that failed to load. Requests that hold them keep them.

        Args:
            group: The group of the blocks. In the reference layout all groups share their ids.
            block_ids: Ids as ``get_block_ids`` returns them.

        Raises:
            BlockError: The group has no block of that id.
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
        """Remove all keys, if no block is in use.

        Returns:
            Whether it was done.
        """
        self.eviction_policy.settle()  # evicted blocks must reach the free order before the keys go
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
        """Keep the cached and written prefix of some tokens until ``unpin``. O(blocks of the prefix).

        Its blocks count in ``usage``.

        Args:
            tokens: Token ids.
            salt: The cache salt of the requests that use the prefix.

        Returns:
            A Pin, which says how many tokens it keeps.

        Raises:
            CapacityError: The pins would hold more than ``max_pinned_blocks``.
        """
        hit = self._lookup.find_written(Request("pin", tokens, hasher=self.hasher, cache_salt=salt))
        return self.pins.add(hit, [group.kind.drops for group in self.groups])

    def unpin(self, pin: Pin) -> None:
        """Release a pin, so that its blocks may be evicted.

        Args:
            pin: A Pin of this manager.

        Raises:
            CacheError: The pin is not held.
        """
        self.pins.release(instance("pin", pin, Pin))
        self.eviction_policy.settle()

    # -- answers

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return the blocks that a request holds; no blocks for an unknown id.

        Args:
            request_id: The id of the request.
        """
        if type(request_id) is not str:
            instance("request_id", request_id, str)
        request = self._residents.get(request_id)
        if request is None:
            return self._lookup.empty
        return KVCacheBlocks(tuple([group.rows.ids(request.row) for group in self.groups]), self.block_pool)

    def create_empty_block_list(self) -> KVCacheBlocks:
        """Return a list without blocks for every group."""
        return self._lookup.empty

    def get_num_common_prefix_blocks(self, request: Request | str, num_running_requests: int) -> list[int]:
        """Count, for each group, the leading blocks of a request that all running requests hold.

        Args:
            request: A resident request, or its id.
            num_running_requests: How many requests run.

        Raises:
            CacheError: The request holds no blocks.
        """
        request_id = id_of(request)
        if self._residents.get(request_id) is None:
            raise CacheError(f"request {request_id!r} holds no blocks: ask for a running one")
        running = integer("num_running_requests", num_running_requests, 0, MOST_COUNT)
        holders_wanted = max(running, len(self._residents))  # ended requests may still hold blocks
        common = []
        for group, ids in enumerate(self.get_blocks(request_id).ids):
            holders = self.block_pool.ref_counts(ids) - self.pins.holds(group, ids)
            shared = (holders == holders_wanted) & (ids != 0)
            common.append(len(ids) if shared.all() else int(shared.argmin()))
        return common

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the blocks of a request as lists of ids, one list a group.

        Args:
            request_id: The id of the request.
        """
        return self.get_blocks(request_id).blocks

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call; an empty list if events are off."""
        return self.block_pool.journal.events.take()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the look-up statistics since the last call; ``None`` if they are off."""
        if self._stats is None:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def statistics(self) -> CacheStatistics:
        """Count what the cache holds at this moment. O(num_blocks)."""
        self.block_pool.journal.settle()
        counts = cache_statistics(
            self.block_pool, self.groups, len(self._residents), self.pins.num_blocks, self._parts.times
        )
        return self.eviction_policy.add_statistics(counts)

    def check(self) -> None:
        """Check all invariants: ownership, counts, free order and keys are rebuilt from rows and index alone.

        O(blocks + keys).

        Raises:
            CacheError: They differ.
        """
        check_cache(self._parts)
