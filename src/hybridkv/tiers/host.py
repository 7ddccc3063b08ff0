"""The host tier: a second cache manager, for host memory, and the transfers between it and the device.

    device   a resume point is kept --store--> host     its blocks are copied down at the start of the next Step
    host     has more of a prompt   --load---> device   its blocks come up while the request waits and others run
    host     a store arrived        --spill--> store    its blocks are written under keys, beside the steps
    store    has more of a prompt   --fetch--> host     then it is loaded

The two managers have the same groups, blocks and keys, so stores, loads and fetches work alike. A *carrier* stands for
the tokens of a resume point. It takes blocks in the target as a request does whose tokens are loaded from elsewhere
(``carriers``). Spills and fetches are those of ``behind``.

Look-ups find a resume point only after all its bytes have arrived. A request that waits for a load is looked up again
then, so it begins after a hit as any other, and no state is applied twice (docs/design/0038).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance
from hybridkv.cache import AllBlocksCleared, Below, EventsDropped, Hit, KVCacheEvent, KVCacheManager
from hybridkv.errors import CacheError, ConfigError, WorkerError
from hybridkv.request import Request
from hybridkv.step import NO_TIER_COPIES, Copy, Step, StepResult, StoreTransfer, TierCopies
from hybridkv.tiers.behind import StoreBehind
from hybridkv.tiers.carriers import Carried, Carriers, Wanted, Way
from hybridkv.tiers.limits import TierLimits
from hybridkv.tiers.lookups import MOST_REMEMBERED, StoreLookups
from hybridkv.tiers.price import Prices
from hybridkv.tiers.times import Direction, TransferTimes

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostTierStatistics:
    """What a host tier has done so far.

    Attributes:
        stores: Resume points that arrived on the host.
        stored_bytes: Bytes of their copies.
        stores_refused: Resume points for which the host had no room.
        loads: Prefixes that arrived on the device.
        loaded_tokens: Tokens of these prefixes that the device did not have.
        loaded_bytes: Bytes of their copies.
        hit_tokens: Prompt tokens that came up for a request, and after which it then began.
        loads_refused: Loads for which the device had no room. The request is asked about again in the next Step.
        lost: Transfers that failed. Their tokens are computed.
        loads_lost: Those of them that were loads.
        in_flight: Transfers that have not arrived, spills among them.
        loading: Those of them that are loads.
        stores_waiting: Resume points that are stored after a transfer of their prefix.
        fetches: Prefixes that arrived on the host from the store.
        fetched_tokens: Tokens of these prefixes that the host did not have.
        fetched_bytes: Bytes of their blocks.
        fetched_hit_tokens: Those of ``hit_tokens`` that came from the store for the request.
        fetches_refused: Fetches for which the host had no room.
        fetches_lost: Fetches that failed.
        spills: Resume points that arrived in the store.
        spilled_bytes: Bytes of their blocks, those that the store had before included.
        spills_dropped: Resume points that were not spilled, because too many spills were in flight.
        spills_lost: Spills that failed.
        late: Requests that no longer waited for a transfer, because it took too long.
        fetching: Fetches that have not arrived.
        spilling: Spills that have not arrived.
    """

    stores: int
    stored_bytes: int
    stores_refused: int
    loads: int
    loaded_tokens: int
    loaded_bytes: int
    hit_tokens: int
    loads_refused: int
    lost: int
    loads_lost: int
    in_flight: int
    loading: int
    stores_waiting: int
    fetches: int
    fetched_tokens: int
    fetched_bytes: int
    fetched_hit_tokens: int
    fetches_refused: int
    fetches_lost: int
    spills: int
    spilled_bytes: int
    spills_dropped: int
    spills_lost: int
    late: int
    fetching: int
    spilling: int

    @property
    def of_host(self) -> HostTierStatistics:
        """The same without what went on between the host and the store."""
        return replace(
            self,
            hit_tokens=self.hit_tokens - self.fetched_hit_tokens,
            lost=self.lost - self.fetches_lost,
            in_flight=self.in_flight - self.fetching - self.spilling,
        )

    @property
    def of_store(self) -> HostTierStatistics:
        """What went on between the host and the store: spills as stores, fetches as loads."""
        nothing = dict.fromkeys(self.__dataclass_fields__, 0)
        return HostTierStatistics(
            **nothing
            | {
                "stores": self.spills,
                "stored_bytes": self.spilled_bytes,
                "stores_refused": self.spills_dropped,
                "loads": self.fetches,
                "loaded_tokens": self.fetched_tokens,
                "loaded_bytes": self.fetched_bytes,
                "hit_tokens": self.fetched_hit_tokens,
                "loads_refused": self.fetches_refused,
                "lost": self.fetches_lost + self.spills_lost,
                "loads_lost": self.fetches_lost,
                "in_flight": self.fetching + self.spilling,
                "loading": self.fetching,
                "late": self.late,
            }
        )


@dataclass(frozen=True, slots=True, eq=False)
class TierWork:
    """The fields of a Step that the tier fills in; see Step. ``rows``: rows that loads hold, unknown to the worker."""

    stores: TierCopies
    copies: tuple[Copy, ...]
    loads: TierCopies
    spills: tuple[StoreTransfer, ...]
    fetches: tuple[StoreTransfer, ...]
    rows: frozenset[int]


class _Loads(NamedTuple):
    """The answer to a request that waits for a load. ``again``: what came up before was evicted."""

    again: bool


class _CameUp(NamedTuple):
    """The answer to a request whose load arrived. Tokens first .. last - 1 came up for it; ``again``: as in _Loads."""

    first: int
    last: int
    again: bool


_Answer = _Loads | _CameUp | Hit | Literal[False]


class HostTier:
    """Keeps the resume points of ``device`` in host memory, and brings them up before a request begins.

    Not thread safe: a Scheduler owns it with the device's manager.

    Args:
        device: The manager of the device's cache, made with ``log_resume_points``.
        host: The manager of host memory, made from ``planner.tier_plan`` with the hasher of ``device``.
        limits: Bounds of transfers; ``TierLimits()`` by default.
        lookups: Finds prefixes in a store behind the host; ``None`` without one.

    Attributes:
        device: The manager of the device's cache.
        host: The manager of host memory.
        limits: Bounds of transfers.
        prices: What is faster to compute than to load.
        times: How long transfers between the device and the host took.
        times_of_store: How long those between the host and the store took.

    Raises:
        ConfigError: The two managers do not fit each other, or caching is off.
    """

    def __init__(
        self,
        device: KVCacheManager,
        host: KVCacheManager,
        limits: TierLimits | None = None,
        lookups: StoreLookups | None = None,
    ) -> None:
        self.device = instance("device", device, KVCacheManager)
        self.host = instance("host", host, KVCacheManager)
        self.limits = TierLimits() if limits is None else instance("limits", limits, TierLimits)
        self.prices = Prices(self.limits)
        self.times, self.times_of_store = TransferTimes(), TransferTimes()
        self._hash_block = _require_alike(device, host)
        sizes = [device.config.block_bytes_of(group) for group in range(len(device.config.groups))]
        self._carriers = Carriers(sizes, self._hash_block, self.limits.patience_s, device.block_pool.journal.clock)
        self._counts = Counter[str]()
        self._behind = None
        if lookups is not None:
            found = instance("lookups", lookups, StoreLookups)
            self._behind = StoreBehind(
                host, found, self._carriers, self.prices, counts=self._counts, times=self.times_of_store
            )
        self._cancelled = set[int]()
        self._moved: dict[int, NDArray[np.int64]] = {}  # by step, the host blocks to which its moves go
        self._begun_s: dict[int, float] = {}  # by step in flight
        self._settled_s = 0.0  # when the result of the last step came
        self._later: list[tuple[Request, int]] = []  # resume points to store after one of their prefixes
        # by id: the load that the request waits for, what came up for it, its hit on the host; False: it need not wait
        self._answers: dict[str, _Answer] = {}
        self._stores, self._loads = list[Int32](), list[Int32]()

    @property
    def num_in_flight(self) -> int:
        """Number of transfers that have not arrived."""
        return len(self._carriers.by_number) + (0 if self._behind is None else self._behind.num_spills)

    @property
    def has_store(self) -> bool:
        """Whether a store lies behind the host."""
        return self._behind is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a transfer, or an answer of the store, is on its way."""
        return self.num_in_flight > 0 or (self._behind is not None and self._behind.lookups.num_pending > 0)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is on its way, and the next ``store`` begins none."""
        return not (self.num_in_flight or self._later or self.device.engine.has_resume_points)

    @property
    def rows(self) -> frozenset[int]:
        """Rows of the device's manager that loads hold. O(transfers)."""
        return frozenset(one.wanted.carrier.row for one in self._carriers.by_number.values() if one.way is Way.LOAD)

    def statistics(self) -> HostTierStatistics:
        """Return what the tier has done so far."""
        counts = {name: self._counts[name] for name in HostTierStatistics.__dataclass_fields__}
        now = {"in_flight": self.num_in_flight, "loading": len(self.rows), "stores_waiting": len(self._later)}
        now["fetching"] = self._carriers.count(Way.FETCH)
        now["spilling"] = 0 if self._behind is None else self._behind.num_spills
        return HostTierStatistics(**counts | now)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of both managers since the last call; those of each are in order.

        A consumer that clears its index forgets both media, so a clearing of either comes first.
        """
        begun, events = list[KVCacheEvent](), list[KVCacheEvent]()
        for manager in (self.device, self.host):
            of = manager.take_events()
            ends = [at for at, one in enumerate(of, 1) if isinstance(one, AllBlocksCleared | EventsDropped)]
            begun += of[ends[-1] - 1 : ends[-1]] if ends else ()
            events += of[ends[-1] :] if ends else of
        return begun[:1] + events

    def reset(self) -> bool:
        """Forget everything on the host and on the device, if no request and no transfer holds blocks.

        The store keeps its blocks, but they are found no longer: the model may have other weights now.

        Returns:
            Whether it was done.
        """
        if self.num_in_flight or not self.device.reset_prefix_cache():
            return False
        if self._behind is not None:
            self._behind.lookups.renew()
        self.device.engine.take_resume_points()
        self._later.clear()
        self._answers.clear()
        return self.host.reset_prefix_cache()

    # -- the step that is being made

    def store(self, step: int) -> None:
        """Begin to store the resume points that the device kept since the last call. O(their hash blocks).

        Call it before any block of the step is taken: the copies read the blocks as they are before the step.

        Args:
            step: The number of the step.
        """
        self._carriers.step, self._begun_s[step] = step, self._carriers.now
        kept, self._later = self._later + self.device.engine.take_resume_points(), []
        for request, tokens in kept:
            if max(self.limits.least_tokens, self._hash_block) <= tokens < request.num_tokens:
                self._store(request, tokens)

    def _store(self, request: Request, tokens: int) -> None:
        place = self._carriers.place(request, tokens)
        if any(one.place == place for one in self._carriers.by_number.values()):
            return
        if self._carriers.on_its_way(request, Way.STORE, 0, tokens) is not None:
            self._later.append((request, tokens))  # its blocks are shared after they have arrived
            return
        carrier = request.prefix(f"store {self._carriers.number()}", tokens + 1)
        carrier.first_hit_tokens = request.first_hit_tokens or 0  # the request itself was counted when it began
        have = self.host.find_hit(carrier)
        if have.tokens == tokens:
            self._note_below(carrier, tokens)
            self._demote(carrier, tokens)
            return
        found = self.device.find_hit(carrier)
        route = _Route.of(carrier, (self.device, found), (self.host, have))
        if found.tokens == tokens and not self._begin(Way.STORE, route, carrier):
            self._counts["stores_refused"] += 1

    def waits(self, request: Request, hit: Hit) -> bool:
        """Return whether a waiting request should wait for more of its prefix, and begin to load that.

        O(1) for a request that was answered before, else O(its hash blocks).

        Args:
            request: The request, which holds no blocks.
            hit: Its longest prefix on the device.
        """
        answer = self._answers.get(request.request_id)
        if isinstance(answer, _Loads):
            return not self._gives_up(request.request_id)
        if isinstance(answer, _CameUp):
            # running requests may evict what came up before this one begins: then it comes up again, but only once
            evicted = not answer.again and hit.tokens < answer.last
            return evicted and self._wants_more(request, hit, self.host.find_hit(request), again=True)
        if answer is False:
            return False
        known = answer is not None and self.host.is_longest_hit(request, answer)
        have = answer if answer is not None and known else self.host.find_hit(request)
        self._remember(request.request_id, have)
        return self._wants_more(request, hit, have, again=False)

    def _wants_more(self, request: Request, hit: Hit, have: Hit, *, again: bool) -> bool:
        """Return whether ``request`` waits for what the store or the host has, and begin to bring that up."""
        longest, may_begin = max(have.tokens, hit.tokens), not self._loads
        if self._behind is not None and self._behind.waits(request, longest, may_begin=may_begin):
            return True
        least = max(self.limits.least_tokens, self._hash_block - hit.tokens)
        if have.tokens - hit.tokens < least or not request.reads_prefix_cache:
            return self._need_not_wait(request.request_id)
        return self._loads_prefix(request, hit, have, again=again)

    def _loads_prefix(self, request: Request, hit: Hit, have: Hit, *, again: bool) -> bool:
        """Return whether ``request`` waits for a load of what the host has, and begin it."""
        name = request.request_id
        coming = self._carriers.on_its_way(request, Way.LOAD, hit.tokens, request.num_tokens)
        if coming is not None:  # with another request's load: look again when it has arrived
            return coming.waits_for_it is not None and not self._carriers.is_late(coming)
        carrier = request.prefix(f"load {self._carriers.number()}", have.tokens + 1)
        carrier.first_hit_tokens = 0  # the request itself is counted when it begins
        route = _Route.of(carrier, (self.host, have), (self.device, self.device.find_hit(carrier)))
        size, spared = self._carriers.bytes_of(route.columns()), have.tokens - route.had.tokens
        spared += request.num_encoder_tokens if route.encoded and not route.had_encoded else 0
        waits = self.prices.is_faster(spared, size, Way.LOAD)
        if not waits and not self.prices.of[Way.LOAD].retries(self._carriers.now):
            return self._need_not_wait(name)
        loading = self._carriers.count(Way.LOAD)
        if loading < self.limits.max_loads and self._begin(Way.LOAD, route, carrier, name if waits else None):
            self._remember(name, _Loads(again) if waits else False)
            return waits
        self._counts["loads_refused"] += 1
        return loading > 0  # loads give their rows and blocks back; without any, the request must not wait

    def rest(self) -> None:
        """Wait for an answer of the store, if one is on its way: at most 10 ms. For steps that run nothing."""
        if self._behind is not None:
            self._behind.lookups.rest()

    def begins(self, request: Request) -> None:
        """Note that ``request`` waits no longer.

        Args:
            request: A request that got a row, with its hit as computed tokens.
        """
        came = self._answers.pop(request.request_id, None)
        if request.first_hit_tokens is None:  # the host learns from each request, wherever its prefix lies
            asked = request.prefix(request.request_id, request.num_prompt_tokens)
            self.host.eviction_policy.begin(asked, self.host.find_hit(asked).tokens)
        if isinstance(came, _CameUp) and request.first_hit_tokens is None:
            last = min(came.last, request.num_computed_tokens, request.num_prompt_tokens)
            hit = max(last - came.first, 0)
            self._counts["hit_tokens"] += hit
            if self._behind is not None:
                self._counts["fetched_hit_tokens"] += min(hit, self._behind.fetched(request, last))
        if self._behind is not None:
            self._behind.forget(request)

    def take(self) -> TierWork:
        """Return the work of the step."""
        spills, fetches = ((), ()) if self._behind is None else self._behind.take()
        made = self.host.fields.take_transfers()
        if len(made.moved):
            self._moved[self._carriers.step] = made.moved
        copies = tuple(Copy("before", one.group, one.source, one.destination, one.kind) for one in made.copies)
        work = TierWork(_joined(self._stores), copies, _joined(self._loads), spills, fetches, self.rows)
        self._stores, self._loads = [], []
        return work

    # -- results

    def check_result(self, result: StepResult) -> None:
        """Raise WorkerError unless all transfers are in flight, each once, and all that arrived were timed, or none.

        Args:
            result: A result.
        """
        numbers: list[int] = [*result.arrived.tolist(), *result.lost.tolist()]
        unknown = [one for one in numbers if not self._is_in_flight(one)]
        if unknown or len({*numbers}) < len(numbers):
            said = f"transfer {unknown[0]} is not in flight" if unknown else "a transfer is reported twice"
            raise WorkerError(f"{said}: report each transfer of a Step once, as arrived or lost")
        if len(result.arrived_s) not in {0, len(result.arrived)}:
            raise WorkerError(
                f"arrived_s has {len(result.arrived_s)} values for {len(result.arrived)} transfers that arrived: give "
                "one for each, or none"
            )

    def settle(self, step: Step, result: StepResult) -> None:
        """Note that a step was executed. Blocks of transfers that arrived can be hit; those of lost ones are freed.

        Args:
            step: The step.
            result: Its result, checked.
        """
        begun_s = self.executed(step.id)
        prompts = int(step.num_scheduled[~step.decodes].sum())
        if prompts and 2 * prompts >= step.num_tokens:
            self.prices.computed(step.num_tokens, self._settled_s - begun_s, self._settled_s)
        seconds = result.arrived_s.tolist() or [None] * len(result.arrived)
        self.end(zip(result.arrived.tolist(), seconds, strict=True), result.lost.tolist())

    def executed(self, step: int) -> float:
        """Note that a step was executed; return when it began to run: once the one before had ended, in seconds.

        Args:
            step: Number of the step.
        """
        now = self._carriers.now
        self._moved.pop(step, None)
        begun_s = max(self._begun_s.pop(step, now), self._settled_s)
        self._settled_s = now
        return begun_s

    def end(self, arrived: Iterable[tuple[int, float | None]], lost: Iterable[int]) -> None:
        """Note transfers that ended.

        Args:
            arrived: Those whose blocks can be hit now, and the seconds that each took, if they are known.
            lost: Those that failed.
        """
        for number, took_s in arrived:
            moved = self._finish(number, is_whole=True)
            if moved is not None and took_s is not None:
                way, size = moved
                self.prices.of[way].add(size, took_s, self._carriers.now)
        for number in lost:
            self._finish(number, is_whole=False)

    def _finish(self, number: int, *, is_whole: bool) -> tuple[Way, int] | None:
        """End a transfer; return its way and bytes, unless it was cancelled."""
        if number in self._cancelled:
            self._cancelled.remove(number)
            return None
        if number not in self._carriers.by_number and self._behind is not None:
            return Way.SPILL, self._behind.end(number, arrived=is_whole)
        one = self._keep(number) if is_whole else self._cancel(number)
        return one.way, one.num_bytes

    def fail(self, first_step: int) -> None:
        """Note that steps were not executed: their transfers are lost, and what moved on the host is forgotten.

        Args:
            first_step: This step and all later ones failed.
        """
        failed = [number for number, one in self._carriers.by_number.items() if one.step >= first_step]
        for number in failed:
            self._cancel(number)
        self._begun_s = {step: at for step, at in self._begun_s.items() if step < first_step}
        self._cancelled.update(failed, [] if self._behind is None else self._behind.fail(first_step))
        for step in [step for step in self._moved if step >= first_step]:
            self.host.block_pool.evict_blocks(np.unique(self._moved.pop(step)).astype(np.int32))
        self.host.eviction_policy.settle()

    def check(self) -> None:
        """Check all invariants of the host's manager: only carriers of stores hold blocks there. O(blocks + keys).

        Raises:
            CacheError: An invariant does not hold.
        """
        self.host.check()
        holding = {one.request_id for one in self.host.engine.resident_requests()}
        carried = self._carriers.by_number.values()
        storing = {one.wanted.carrier.request_id for one in carried if one.wanted.target is self.host}
        if holding != storing:
            raise CacheError(f"{sorted(holding)} hold blocks on the host, but {sorted(storing)} are being stored")

    # -- transfers

    def _begin(self, way: Way, route: _Route, carrier: Request, waits_for_it: str | None = None) -> bool:
        """Begin a transfer between the managers; return whether the target has room for its blocks."""
        columns, tokens = route.columns(), carrier.num_tokens - 1
        begun = self._carriers.begin(way, Wanted(route.target, carrier, tokens, route.had), columns, waits_for_it)
        if begun is None:
            return False
        number, held = begun
        if (copy := route.source.eviction_policy.copy_at(carrier, tokens)) is not None:
            route.target.eviction_policy.resemble(carrier, copy)
        copies = _copies(route, held, columns)
        numbered = np.concatenate((np.full((1, copies.shape[1]), number, np.int32), copies))
        (self._stores if way is Way.STORE else self._loads).append(numbered)
        return True

    def _is_in_flight(self, number: int) -> bool:
        if number in self._carriers.by_number or number in self._cancelled:
            return True
        return self._behind is not None and self._behind.begun(number)

    def _keep(self, number: int) -> Carried:
        one = self._carriers.keep(number, self._before_it_is_kept)
        self._answer(one, arrived=True)
        if one.way is Way.STORE:
            self._counts.update(stores=1, stored_bytes=one.num_bytes)
            self._note_below(one.wanted.carrier, one.wanted.tokens)
            self._demote(one.wanted.carrier, one.wanted.tokens)
        elif one.way is Way.LOAD:
            self._counts.update(loads=1, loaded_bytes=one.num_bytes, loaded_tokens=one.new_tokens)
            self._note_below(one.wanted.carrier, one.wanted.tokens)
        else:
            self._counts.update(fetches=1, fetched_bytes=one.num_bytes, fetched_tokens=one.new_tokens)
            if self._behind is not None:
                self._behind.note_stored(one.wanted.carrier)
        return one

    def _note_below(self, carrier: Request, tokens: int) -> None:
        """Tell the device that the host has a resume point, and at which price it comes back."""
        price, copy = self.prices.tokens_per_byte(Way.LOAD), self.host.eviction_policy.copy_at(carrier, tokens)
        if price is not None and copy is not None:
            self.device.eviction_policy.note_below(carrier, tokens, Below(copy, price))

    def _demote(self, carrier: Request, tokens: int) -> None:
        """Evict a resume point, which the host has, from the device if its hints say so."""
        if carrier.hints.demote:
            self.device.eviction_policy.give_up(carrier, tokens)

    def _before_it_is_kept(self, one: Carried) -> None:
        if one.way is Way.STORE and self._behind is not None and not one.wanted.carrier.hints.in_memory:
            self._behind.spill(one)

    def _cancel(self, number: int) -> Carried:
        one = self._carriers.cancel(number)
        self._answer(one, arrived=False)
        self._counts["lost"] += 1
        self._counts["loads_lost"] += one.way is Way.LOAD
        self._counts["fetches_lost"] += one.way is Way.FETCH
        return one

    # -- answers

    def _answer(self, one: Carried, *, arrived: bool) -> None:
        """Note that a transfer ended: the request that waits for a load begins, that of a fetch is looked up again."""
        if one.way is Way.LOAD and one.waits_for_it in self._answers:
            tokens, waited = one.wanted.tokens, self._answers[one.waits_for_it]
            again = not isinstance(waited, _Loads) or waited.again  # nobody waited for a late one
            came = _CameUp(tokens - one.new_tokens, tokens, again)
            self._answers[one.waits_for_it] = came if arrived else False
        times = self.times_of_store if one.way is Way.FETCH else self.times
        direction = Direction.DOWN if one.way is Way.STORE else Direction.UP
        times.add(direction, self._carriers.now - one.since, arrived=arrived)

    def _gives_up(self, name: str) -> bool:
        """Return whether the load of a waiting request takes too long, so that it waits no longer."""
        mine = next((one for one in self._carriers.by_number.values() if one.waits_for_it == name), None)
        if mine is None or not self._carriers.is_late(mine):
            return False
        self._counts["late"] += 1
        return not self._need_not_wait(name)

    def _need_not_wait(self, name: str) -> bool:
        answer = self._answers.get(name)
        self._remember(name, answer._replace(again=True) if isinstance(answer, _CameUp) else False)
        return False

    def _remember(self, name: str, answer: _Answer) -> None:
        if len(self._answers) >= MOST_REMEMBERED:
            del self._answers[next(iter(self._answers))]
        self._answers[name] = answer


class _Route(NamedTuple):
    """A way between the managers.

    Attributes:
        source: The manager that has the tokens.
        found: The hit there.
        target: The manager that gets them.
        had: What it already has of them.
        encoded: By group, the source's blocks of the encoder's output; empty without it.
        had_encoded: Those of the target.
    """

    source: KVCacheManager
    found: Hit
    target: KVCacheManager
    had: Hit
    encoded: dict[int, Int32]
    had_encoded: dict[int, Int32]

    @classmethod
    def of(cls, carrier: Request, source: tuple[KVCacheManager, Hit], target: tuple[KVCacheManager, Hit]) -> _Route:
        """Return the way of a carrier between two managers, each with its hit."""
        encoded, had_encoded = (manager.engine.encoder_blocks(carrier) for manager, _ in (source, target))
        return cls(*source, *target, encoded, had_encoded)

    def blocks(self) -> list[Int32]:
        """Return the blocks of the source by group and column, 0 for null columns; the last one is copied in part."""
        of = self.source.engine.blocks_of(self.found)
        blocks = [np.append(ids, np.int32(last)) for ids, last in zip(of.ids, of.sources, strict=True)]
        return [self.encoded.get(group, ids) for group, ids in enumerate(blocks)]

    def columns(self) -> list[Int32]:
        """Return the columns to copy of each group: those that the source has, and the target does not share."""
        had = self.target.engine.blocks_of(self.had).ids
        columns = []
        for group, (ids, shared) in enumerate(zip(self.blocks(), had, strict=True)):
            wanted = (ids != 0) & (group not in self.had_encoded)
            wanted[: len(shared)] &= shared == 0
            columns.append(wanted.nonzero()[0].astype(np.int32))
        return columns


def _copies(route: _Route, held: Sequence[Int32], columns: Sequence[Int32]) -> Int32:
    """Return (group, source, destination) of the copies, int32[3, n]. ``held``: blocks of the carrier, by group."""
    source, target = route.source.block_pool, route.target.block_pool
    parts = [np.empty((3, 0), np.int32)]
    for group, (ids, to, at) in enumerate(zip(route.blocks(), held, columns, strict=True)):
        held_at = at[to[at] != 0]  # a window of 1 proves its prefix by a block that no later token reads
        read, write = source.local(group, ids[held_at]), target.local(group, to[held_at])
        parts.append(np.stack((np.full(len(held_at), group, np.int32), read, write)).astype(np.int32))
    return np.concatenate(parts, axis=1)


def _joined(parts: Sequence[Int32]) -> TierCopies:
    return TierCopies(*np.concatenate(parts, axis=1)) if parts else NO_TIER_COPIES


def _require_alike(device: KVCacheManager, host: KVCacheManager) -> int:
    """Return the tokens of a hash block of both managers. Raises as HostTier does."""
    if device.hasher is None or not device.enable_caching:
        raise ConfigError(
            "a host tier needs prefix caching: construct the device's manager with enable_caching=True (drop "
            "--no-prefix-caching)"
        )
    if host.hasher is not device.hasher:
        raise ConfigError("both managers must share block hashes: construct the host's with hasher=device.hasher")
    if not device.engine.logs_resume_points:
        raise ConfigError("the device's manager logs no resume points: construct it with log_resume_points=True")
    if device.checkpoints.idle:
        raise ConfigError(
            f"eviction {device.eviction.name} knows no resume points in the reference layout, or of a model without "
            "recurrent layers, so nothing would go to the host: use hazard (--eviction hazard)"
        )
    mine, theirs = device.config, host.config
    sizes, other = ([one.block_bytes_of(group) for group in range(len(one.groups))] for one in (mine, theirs))
    if mine.groups != theirs.groups or sizes != other or (mine.slabs is None) != (theirs.slabs is None):
        raise ConfigError("the host's blocks differ from the device's: make its plan with planner.tier_plan")
    return device.hasher.block_size
