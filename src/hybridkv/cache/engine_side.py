"""Calls for engines that keep requests, counts and steps of their own, in addition to the manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, instances, integer
from hybridkv.cache.assembly import CacheParts
from hybridkv.cache.holds import BlockLock
from hybridkv.cache.lookup import Hit, KVCacheBlocks
from hybridkv.cache.plan import Refusal, SlotDemand
from hybridkv.cache.policies import BlockHits, PositionHits, StateHits, TokenHits, UnitStateHits
from hybridkv.cache.residents import id_of, one_a_row
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import Request
from hybridkv.specs import RequestLimits
from hybridkv.units import MOST_COUNT

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class ResumeRule(NamedTuple):
    """What a request needs of one group to resume.

    Attributes:
        group: Number of the group.
        block_size: Tokens of a column.
        first_needed: Returns the first token whose block is needed after so many tokens; that many for none.
        reads_all: It is always token 0.
        is_state: The state after the last token is needed, and no block of tokens.
        in_column: It lies in the column that ends there, as in the reference layout, not in column 0.
        empty: A ring is empty, and not needed, after multiples of so many tokens; 0: it is no ring.
        of_encoder: The output of the request's encoder is needed whole, and no block of tokens.
    """

    group: int
    block_size: int
    first_needed: Callable[[int], int]
    reads_all: bool
    is_state: bool
    empty: int = 0
    in_column: bool = False
    of_encoder: bool = False


class EngineSide:
    """Calls for such engines. Names that vLLM also has mean the same there."""

    def __init__(self, parts: CacheParts) -> None:
        self._pool, self._groups, self._times = parts.pool, parts.groups, parts.times
        self._residents, self._rows, self._lookup = parts.residents, parts.residents.request_rows, parts.lookup
        self._planner, self._slots, self._publisher = parts.planner, parts.slots, parts.publisher
        self._checkpoints, self._loads, self._locks = parts.checkpoints, parts.loads, parts.locks
        self._transfers = parts.transfers

    @property
    def resume_rules(self) -> tuple[ResumeRule, ...]:
        """What a request needs to resume, by group; groups whose blocks no hit needs are left out."""
        return tuple(
            ResumeRule(
                group.number,
                group.policy.block_size,
                group.policy.hits.first_needed,
                reads_all=group.policy.hits.downward_closed,
                is_state=isinstance(group.policy.hits, PositionHits | StateHits | UnitStateHits),
                empty=group.kind.pools,
                in_column=isinstance(group.policy.hits, StateHits | UnitStateHits),
                of_encoder=group.kind.by_digest,
            )
            for group in self._groups
            if group.kind.by_digest
            or isinstance(group.policy.hits, TokenHits | BlockHits | PositionHits | StateHits | UnitStateHits)
        )

    def blocks_of(self, hit: Hit) -> KVCacheBlocks:
        """Return the blocks of a hit, 0 for null columns.

        Args:
            hit: A Hit of the manager.
        """
        return self._lookup.blocks_of(instance("hit", hit, Hit))

    def find_hit_without_states(self, request: Request, common: Hit) -> Hit:
        """Find the longest cached prefix of attention, for an engine that loads recurrent states from elsewhere.

        Args:
            request: A request that was made with the hasher of the manager.
            common: The result of ``find_hit``.

        Returns:
            A longer Hit whose columns of states are null, or ``common``.
        """
        self._residents.refuse_stranger(request)
        return self._lookup.find_without_states(request, instance("common", common, Hit))

    def begin_step(self, step: int) -> None:
        """Open a step without a ``with`` block, until ``end_step``.

        Args:
            step: A number above those of all steps in flight.
        """
        self._publisher.begin_step(integer("step", step, 0, MOST_COUNT))

    def end_step(self) -> None:
        """Close the open step, if there is one."""
        self._publisher.end_step()

    def settle(self, step: int) -> None:
        """Mark all steps in flight up to a number as written.

        Args:
            step: The last step that has run.
        """
        last = integer("step", step, 0, MOST_COUNT)
        for one in self._publisher.in_flight:
            if one <= last:
                self._publisher.mark_written(one)

    def drop_skipped(self, request: Request) -> None:
        """Give back the windows and states that a request no longer reads: those before its processed tokens.

        Args:
            request: The request.
        """
        self._residents.refuse_stranger(request)
        self._slots.drop_skipped(request)

    def blocks_to_come(self, request: Request, limits: RequestLimits) -> int:
        """Return the most blocks, or slabs, that a request may still take, for engines that reserve them. O(columns).

        Args:
            request: The request. If it holds no blocks, it may take all of them.
            limits: Its bounds.
        """
        self._residents.refuse_stranger(request)
        return self._planner.blocks_to_come(request, instance("limits", limits, RequestLimits))

    def synchronise(
        self,
        rows: Int64,
        *,
        num_tokens: Int64 | None = None,
        num_computed: Int64 | None = None,
        in_flight: Int64 | None = None,
    ) -> None:
        """Set the counts of rows to those of the engine. O(R), and one Python call for each row that fills a block.

        Args:
            rows: int64[R], rows of requests.
            num_tokens: int64[R], known tokens of lent requests; ``None``: unchanged. New full blocks are hashed, unless
                the engine hashes them.
            num_computed: int64[R], tokens whose KV is computed or scheduled; ``None``: unchanged. It may exceed the
                known tokens, because a token is computed before the next one is sampled. Unknown tokens are not
                published.
            in_flight: int64[R], computed tokens of steps that have not settled; ``None``: unchanged.

        Raises:
            ConfigError: As ``allocate_batch``, or a row would have fewer tokens than before.
            CacheError: As ``allocate_batch``.
            HashError: As ``Request.append``.
        """
        rows, columns = self._residents.rows_held(rows), self._rows
        columns.synchronise(
            rows,
            columns.num_tokens[rows] if num_tokens is None else one_a_row("num_tokens", num_tokens, rows, 1),
            columns.num_computed[rows] if num_computed is None else one_a_row("num_computed", num_computed, rows, 0),
            columns.in_flight[rows] if in_flight is None else one_a_row("in_flight", in_flight, rows, 0),
        )

    def synchronise_one(self, request: Request, num_computed_tokens: int, num_in_flight_tokens: int = 0) -> None:
        """Set the counts of one lent request; its known tokens are those of its lender.

        Args:
            request: The request; it need not hold blocks yet.
            num_computed_tokens: Tokens whose KV is computed or scheduled.
            num_in_flight_tokens: Those of steps that have not settled.
        """
        computed, in_flight = num_computed_tokens, num_in_flight_tokens
        if not (type(computed) is type(in_flight) is int and 0 <= in_flight <= computed <= MOST_COUNT):
            computed = integer("num_computed_tokens", computed, 0, MOST_COUNT)
            in_flight = integer("num_in_flight_tokens", in_flight, 0, computed)
        lent = instance("request", request, Request).lender
        if lent is None:
            raise ConfigError(f"tokens of {request.request_id!r} are its own: set num_computed_tokens, append tokens")
        if request.row < 0:
            request.num_computed_tokens = computed
            return
        self._rows.synchronise_one(self._residents.row_of(request), lent.num_tokens, computed, in_flight)

    def next_events(self, rows: Int64) -> Int64:
        """Return the token count at which each row next needs a call, int64[R]. Below it, the row needs no call.

        Args:
            rows: int64[R]. Errors as ``allocate_batch``.
        """
        return self._residents.next_events(self._residents.rows_held(rows))

    def publish_boundaries(self, rows: Int64) -> Int64:
        """Return the known and computed tokens at which ``cache_blocks`` next publishes a block, int64[R].

        A number that no request reaches, if nothing is published.

        Args:
            rows: int64[R]. Errors as ``allocate_batch``.
        """
        return self._publisher.next_boundaries(self._residents.rows_held(rows))

    def withdraw(self, request: Request) -> None:
        """Take a request out of the open step, although it got its slots.

        Free it next. O(blocks of the step and of the request).

        Blocks that it would have filled can no longer be hit. Without an open step nothing is done. This is for engines
        that preempt requests of the step being made.

        Args:
            request: The request.

        Raises:
            CacheError: It holds no blocks.
        """
        self._slots.withdraw(instance("request", request, Request))

    def store_checkpoints_of(self, request: Request, computed: int, end: int) -> None:
        """Take blocks for the states that one request passes; see ``KVCacheManager.store_checkpoints``.

        Args:
            request: The request.
            computed: Tokens computed before the step.
            end: Tokens computed after it.

        Raises:
            CacheError: It holds no blocks.
        """
        if not self._checkpoints.idle:
            self._residents.row_of(request)
            self._checkpoints.store_of(request, integer("computed", computed, 0), integer("end", end, 0))

    def free_many(self, requests: Sequence[Request]) -> None:
        """Free requests, in this order, in one call if they share no block.

        Args:
            requests: The requests.
        """
        self._slots.free_many([one.request_id for one in instances("requests", requests, Request)])

    def lock(self, request: Request | str) -> BlockLock:
        """Keep the blocks of a request held and in place until ``unlock``, for a transfer to elsewhere.

        They stay if the request ends meanwhile: lock, then free. In the natural layout they do not move between slabs.

        Args:
            request: The request, or its id.

        Raises:
            CacheError: It holds no blocks.
        """
        request_id = id_of(request)
        resident = self._residents.get(request_id)
        if resident is None:
            raise CacheError(f"request {request_id!r} holds no blocks: lock those of a running one")
        return self._locks.add([group.rows.held(resident.row) for group in self._groups])

    def unlock(self, lock: BlockLock) -> None:
        """Release a lock.

        Args:
            lock: A lock of this cache.

        Raises:
            CacheError: The lock is not held.
        """
        self._locks.release(instance("lock", lock, BlockLock))

    def resident_requests(self) -> tuple[Request, ...]:
        """Return the requests that hold blocks."""
        return tuple(self._residents)

    def encoder_blocks(self, request: Request) -> dict[int, Int32]:
        """Return the cached blocks of the output of a request's encoder, by group. O(blocks).

        It is empty unless every group of cross attention has all of them, and if the request reads no cache.

        Args:
            request: The request.
        """
        if request.encoder is None or request.skip_reading_prefix_cache:
            return {}
        found = {one.number: one.encoded(request) for one in self._groups if one.kind.by_digest}
        return found if all(map(len, found.values())) else {}

    def begin_load(self, request: Request, hit: Hit, tokens: int, encoder_tokens: int = 0) -> KVCacheBlocks | None:
        """Take blocks for a prefix that a transfer brings whole: with rings, and with the output of the encoder.

        The request computes nothing, and its blocks neither move nor can be hit, until ``finish_load``.

        Args:
            request: A request that holds no blocks.
            hit: What the cache has of the prefix.
            tokens: Tokens of the prefix, above those of the hit.
            encoder_tokens: Tokens of the encoder's output, if it is in this cache or the transfer brings it.

        Returns:
            The new columns of each group, or ``None`` if they do not fit.

        Raises:
            ConfigError: As ``plan_slots``.
            CacheError: As ``plan_slots``.
        """
        self._residents.refuse_stranger(instance("request", request, Request))
        end = integer("tokens", tokens, 1, MOST_COUNT)
        encoded = integer("encoder_tokens", encoder_tokens, 0, MOST_COUNT)
        known = self._lookup.handed_over(request, instance("hit", hit, Hit), hit.tokens)
        wanted = SlotDemand(0, known, end - hit.tokens, 0, delayed=True, encoder_tokens=encoded, brings_all=True)
        new = self._slots.allocate_one(request, wanted)
        return None if isinstance(new, Refusal) else KVCacheBlocks(new, self._pool)

    def finish_load(self, request: Request, num_computed_tokens: int | None = None) -> int:
        """Note that the transfer for a request is over.

        Args:
            request: A request that is being loaded.
            num_computed_tokens: How many leading tokens arrived; ``None`` for all.

        Returns:
            The token count at which it resumes, at least its hit; these tokens can be hit. 0: it holds nothing any
                longer, because a group lacks the window or the state that it needs. Look it up again; the missing
                tokens are computed.

        Raises:
            ConfigError: More tokens arrived than were requested.
            CacheError: The request is not being loaded.
        """
        tokens = num_computed_tokens
        came = None if tokens is None else integer("num_computed_tokens", tokens, 0, MOST_COUNT)
        return self._slots.finish_load(instance("request", request, Request), came)

    def blocks_to_share(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Return the blocks with which a branch of a request begins, and its computed tokens. Natural layout.

        Args:
            request: A request without steps in flight.

        Raises:
            CacheError: It holds no blocks, or is being loaded.
        """
        self._loads.refuse(instance("request", request, Request))
        return self._lookup.blocks_to_share(request)

    @property
    def logs_resume_points(self) -> bool:
        """Whether ``take_resume_points`` has anything to return; see ``CacheOptions.log_resume_points``."""
        return self._transfers.kept is not None

    @property
    def has_resume_points(self) -> bool:
        """Whether ``take_resume_points`` has something to return now."""
        return bool(self._transfers.kept)

    def take_resume_points(self) -> list[tuple[Request, int]]:
        """Return the resume points kept since the last call, in order: the request and its tokens up to there.

        Those of failed steps are among them. Call it in every step, because the log has no bound.
        """
        taken = self._transfers.kept or []
        if taken:
            self._transfers.kept = []
        return taken

    def idle_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Return how many cached blocks were unused for how long, by group and by bucket of EDGES_S and above.

        O(num_blocks).

        Raises:
            ConfigError: The manager was made without ``block_times``.
        """
        if self._times is None:
            raise ConfigError("idle times of blocks are not measured: construct the manager with block_times=True")
        self._pool.journal.settle()
        return tuple(self._times.idle(self._pool.keys.in_group(number)) for number in range(len(self._groups)))
