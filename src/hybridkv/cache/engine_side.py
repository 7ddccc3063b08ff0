"""What an engine with requests, counts and steps of its own asks of a cache, besides the manager."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, instances, integer
from hybridkv.cache.assembly import CacheParts
from hybridkv.cache.holds import BlockLock
from hybridkv.cache.lookup import Hit, KVCacheBlocks
from hybridkv.cache.residents import id_of, one_a_row
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import Request
from hybridkv.specs import RequestLimits
from hybridkv.units import MOST_COUNT

Int64 = NDArray[np.int64]


class EngineSide:
    """The calls of such an engine. One of vLLM's names means what it means there."""

    def __init__(self, parts: CacheParts) -> None:
        self._pool, self._groups, self._times = parts.pool, parts.groups, parts.times
        self._residents, self._rows, self._lookup = parts.residents, parts.residents.request_rows, parts.lookup
        self._planner, self._slots, self._publisher = parts.planner, parts.slots, parts.publisher
        self._checkpoints, self._loads, self._locks = parts.checkpoints, parts.loads, parts.locks

    def blocks_of(self, hit: Hit) -> KVCacheBlocks:
        """The blocks of a hit, 0 for null columns."""
        return self._lookup.blocks_of(instance("hit", hit, Hit))

    def begin_step(self, step: int) -> None:
        """``step`` for loops that are no ``with`` block: until ``end_step``."""
        self._publisher.begin_step(integer("step", step, 0, MOST_COUNT))

    def end_step(self) -> None:
        """All that the open step allocates is allocated; nothing where none is open."""
        self._publisher.end_step()

    def settle(self, step: int) -> None:
        """Steps up to ``step`` have run: all of them that are neither written nor revoked count as written."""
        last = integer("step", step, 0, MOST_COUNT)
        for one in self._publisher.in_flight:
            if one <= last:
                self._publisher.mark_written(one)

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
        rows, columns = self._residents.rows_held(rows), self._rows
        columns.synchronise(
            rows,
            columns.num_tokens[rows] if num_tokens is None else one_a_row("num_tokens", num_tokens, rows, 1),
            columns.num_computed[rows] if num_computed is None else one_a_row("num_computed", num_computed, rows, 0),
            columns.in_flight[rows] if in_flight is None else one_a_row("in_flight", in_flight, rows, 0),
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
        self._rows.synchronise_one(self._residents.row_of(request), lent.num_tokens, computed, in_flight)

    def next_events(self, rows: Int64) -> Int64:
        """Return the tokens that each of ``rows`` may hold before anything must be done for it, int64[R].

        A row that stays below with all its tokens needs no call. CacheError as allocate_batch.
        """
        return self._residents.next_events(self._residents.rows_held(rows))

    def publish_boundaries(self, rows: Int64) -> Int64:
        """Known and computed tokens at which ``cache_blocks`` next has something to publish, int64[R].

        A number that no request reaches where nothing is published. CacheError as allocate_batch.
        """
        return self._publisher.next_boundaries(self._residents.rows_held(rows))

    def withdraw(self, request: Request) -> None:
        """The open step does not run ``request`` after all, whose slots it has been given: it is freed next.

        What it would have filled can be hit no longer; nothing where no step is open. For engines that preempt requests
        which the step being made holds already. O(blocks of the step, and of the request). CacheError for a request
        that holds no blocks.
        """
        self._slots.withdraw(instance("request", request, Request))

    def store_checkpoints_of(self, request: Request, computed: int, end: int) -> None:
        """store_checkpoints of one request. CacheError for one that holds no blocks."""
        if not self._checkpoints.idle:
            self._residents.row_of(request)
            self._checkpoints.store_of(request, integer("computed", computed, 0), integer("end", end, 0))

    def free_many(self, requests: Sequence[Request]) -> None:
        """Free each of ``requests``, in this order, in one go where they share no block."""
        self._slots.free_many([one.request_id for one in instances("requests", requests, Request)])

    def lock(self, request: Request | str) -> BlockLock:
        """What a request holds now stays where it is, and held, until ``unlock``: for a transfer to elsewhere.

        Also when the request ends meanwhile: lock, then free. In the natural layout those blocks are not moved between
        slabs either. CacheError for a request that holds no blocks.
        """
        request_id = id_of(request)
        resident = self._residents.get(request_id)
        if resident is None:
            raise CacheError(f"request {request_id!r} holds no blocks: lock those of a running one")
        return self._locks.add([group.rows.held(resident.row) for group in self._groups])

    def unlock(self, lock: BlockLock) -> None:
        """Those blocks may move, and go. CacheError for a lock that is not held."""
        self._locks.release(instance("lock", lock, BlockLock))

    def resident_requests(self) -> tuple[Request, ...]:
        """Requests that hold blocks."""
        return tuple(self._residents)

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

    def blocks_to_share(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """What a branch of ``request``, which no step in flight holds, begins with, and its tokens: those computed.

        Natural layout. CacheError for a request that holds no blocks, or is being loaded.
        """
        self._loads.refuse(instance("request", request, Request))
        return self._lookup.blocks_to_share(request)

    def idle_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Return how many cached blocks were not used for how long, by group and by bucket of EDGES_S and above.

        O(num_blocks). Raises ConfigError without block_times.
        """
        if self._times is None:
            raise ConfigError("nobody counts how long blocks are idle: construct with block_times")
        self._pool.journal.settle()
        return tuple(self._times.idle(self._pool.keys.in_group(number)) for number in range(len(self._groups)))
