"""The host tier: a second cache manager, for host memory, and the transfers between it and the device.

    device   a resume point is kept --store--> host     its blocks are copied down at the start of the next Step
    host     has more of a prompt   --load---> device   its blocks come up while the request waits and others run

The two managers have the same groups, blocks and keys, so both directions work alike. A *carrier* stands for the tokens
of a resume point. It takes blocks in the target as a request does whose tokens are loaded from elsewhere:

    tokens   [ hit in the target: blocks shared | loaded: blocks copied ]        |
                                                                   resume point -'
    begun --arrived--> finish_load, keep_resume_point, free: the target has the resume point
       '----lost-----> finish_load(0), free: the target has nothing of it

Look-ups find a resume point only after all its bytes have arrived. A request that waits for a load is looked up again
then, so it begins after a hit as any other, and no state is applied twice (docs/design/0038).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import check_types, instance, integer, or_none, real
from hybridkv.cache import Hit, KVCacheManager
from hybridkv.errors import CacheError, ConfigError, UnsupportedModelError, WorkerError
from hybridkv.request import Request
from hybridkv.specs import Keeps
from hybridkv.step import NO_TIER_COPIES, Copy, TierCopies
from hybridkv.units import MOST_COUNT

Int32 = NDArray[np.int32]
_Place = tuple[int, bytes, bytes]
"""A resume point: its tokens, the key of its last whole hash block, and the bytes of the tokens after that."""

_MOST_ANSWERED: Final = 1 << 14
"""Most waiting requests whose answer is remembered; the oldest is forgotten first."""


def _rate(name: str, value: object) -> object:
    if real(name, value) <= 0:
        raise ConfigError(f"{name} must be above 0, got {value}: leave it out if it is unknown")
    return value


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds of a host tier.

    Attributes:
        max_loads: Loads at once. Each holds a row of the device's manager, beside those of running requests.
        least_tokens: Fewest tokens that are worth a load.
        load_bytes_per_s: Bytes per second from the host to the device; ``None`` if unknown.
        tokens_per_s: Tokens per second that the device computes of a prompt; ``None`` if unknown. If both rates are
            known, a prefix is loaded only where that is faster than computing it.

    Raises:
        ConfigError: A value is out of range or has another type. The error names the field.
    """

    max_loads: Annotated[int, partial(integer, least=1, most=1 << 10)] = 8
    least_tokens: Annotated[int, partial(integer, least=1, most=MOST_COUNT)] = 16
    load_bytes_per_s: Annotated[float | None, or_none(_rate)] = None
    tokens_per_s: Annotated[float | None, or_none(_rate)] = None

    def __post_init__(self) -> None:
        check_types(self)

    def is_faster(self, tokens: int, num_bytes: int) -> bool:
        """Return whether a load takes no longer than computing its tokens.

        Args:
            tokens: Tokens of the load.
            num_bytes: Bytes of its copies.
        """
        if self.load_bytes_per_s is None or self.tokens_per_s is None:
            return True
        return num_bytes / self.load_bytes_per_s <= tokens / self.tokens_per_s


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
        loads_refused: Loads for which the device had no room. The request is asked about again in the next Step.
        lost: Transfers that failed. Their tokens are computed.
        loads_lost: Those of them that were loads.
        in_flight: Transfers that have not arrived.
        loading: Those of them that are loads.
    """

    stores: int
    stored_bytes: int
    stores_refused: int
    loads: int
    loaded_tokens: int
    loaded_bytes: int
    loads_refused: int
    lost: int
    loads_lost: int
    in_flight: int
    loading: int


@dataclass(frozen=True, slots=True, eq=False)
class TierWork:
    """The fields of a Step that the tier fills in; see Step. ``rows``: rows that loads hold, unknown to the worker."""

    stores: TierCopies
    copies: tuple[Copy, ...]
    loads: TierCopies
    rows: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """A transfer that has not arrived.

    Attributes:
        target: The manager that gets the blocks.
        carrier: The request that holds them there.
        place: The resume point.
        tokens: Tokens that the target did not have.
        num_bytes: Bytes of the copies.
        step: The Step that began it.
        waits_for_it: Id of the request that waits for a load; ``None`` for a store.
    """

    target: KVCacheManager
    carrier: Request
    place: _Place
    tokens: int
    num_bytes: int
    step: int
    waits_for_it: str | None


class HostTier:
    """Keeps the resume points of ``device`` in host memory, and brings them up before a request begins.

    Not thread safe: a Scheduler owns it with the device's manager.

    Args:
        device: The manager of the device's cache, made with ``log_resume_points``.
        host: The manager of host memory, made from ``planner.tier_plan`` with the hasher of ``device``.
        limits: Bounds of loads; ``TierLimits()`` by default.

    Attributes:
        device: The manager of the device's cache.
        host: The manager of host memory.
        limits: Bounds of loads.

    Raises:
        ConfigError: The two managers do not fit each other, or caching is off.
        UnsupportedModelError: A group keeps raw keys of compressors, or the output of an encoder.
    """

    def __init__(self, device: KVCacheManager, host: KVCacheManager, limits: TierLimits | None = None) -> None:
        self.device = instance("device", device, KVCacheManager)
        self.host = instance("host", host, KVCacheManager)
        self.limits = TierLimits() if limits is None else instance("limits", limits, TierLimits)
        self._hash_block = _require_alike(device, host)
        self._sizes = [device.config.block_bytes_of(group) for group in range(len(device.config.groups))]
        self._next = 0
        self._transfers: dict[int, _Transfer] = {}
        self._cancelled = set[int]()
        self._moved: dict[int, NDArray[np.int64]] = {}  # by step, the host blocks to which its moves go
        self._later: list[tuple[Request, int]] = []  # resume points to store after one of their prefixes
        self._answers: dict[str, bool | Hit] = {}  # by id: does the request wait for a load? Else its hit on the host
        self._stores, self._loads = list[Int32](), list[Int32]()
        self._copies: tuple[Copy, ...] = ()
        self._counts = Counter[str]()

    @property
    def num_in_flight(self) -> int:
        """Number of transfers that have not arrived."""
        return len(self._transfers)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is on its way, and the next ``store`` begins none."""
        return not (self._transfers or self._later or self.device.engine.has_resume_points)

    @property
    def rows(self) -> frozenset[int]:
        """Rows of the device's manager that loads hold. O(transfers)."""
        return frozenset(one.carrier.row for one in self._transfers.values() if one.target is self.device)

    def statistics(self) -> HostTierStatistics:
        """Return what the tier has done so far."""
        counts = {name: self._counts[name] for name in HostTierStatistics.__dataclass_fields__}
        return HostTierStatistics(**counts | {"in_flight": self.num_in_flight, "loading": len(self.rows)})

    def reset(self) -> bool:
        """Forget everything on the host and on the device, if no request and no transfer holds blocks.

        Returns:
            Whether it was done.
        """
        if self._transfers or not self.device.reset_prefix_cache():
            return False
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
        kept, self._later = self._later + self.device.engine.take_resume_points(), []
        for request, tokens in kept:
            if max(self.limits.least_tokens, self._hash_block) <= tokens < request.num_tokens:
                self._store(request, tokens, step)
        transfers = self.host.fields.take_transfers()
        if len(transfers.moved):
            self._moved[step] = transfers.moved
        self._copies = tuple(
            Copy("before", one.group, one.source, one.destination, one.kind) for one in transfers.copies
        )

    def _store(self, request: Request, tokens: int, step: int) -> None:
        place = self._place(request, tokens)
        if any(one.place == place for one in self._transfers.values()):
            return
        if self._is_on_its_way(request, self.host, 0, tokens):
            self._later.append((request, tokens))  # its blocks are shared after they have arrived
            return
        carrier = request.prefix(f"store {self._next}", tokens + 1)
        ends_prompt = tokens + 1 == request.num_prompt_tokens
        if not ends_prompt:
            carrier.first_hit_tokens = 0  # the end of its prompt counts the request
        have = self.host.find_hit(carrier)
        if have.tokens == tokens:
            if ends_prompt:  # nothing is copied, but the host learns that its resume point was hit
                self.host.eviction_policy.begin(carrier, tokens)
            return
        found = self.device.find_hit(carrier)
        if found.tokens == tokens:
            route = _Route(self.device, found, self.host, have)
            if not self._begin(route, carrier, place, step):
                self._counts["stores_refused"] += 1

    def waits(self, request: Request, hit: Hit, step: int) -> bool:
        """Return whether a waiting request should wait for more of its prefix, and begin to load that.

        O(1) for a request that was answered before, else O(its hash blocks).

        Args:
            request: The request, which holds no blocks.
            hit: Its longest prefix on the device.
            step: The number of the step that is being made.
        """
        name = request.request_id
        answer = self._answers.get(name)
        if isinstance(answer, bool):
            return answer
        known = answer is not None and self.host.is_longest_hit(request, answer)
        have = answer if answer is not None and known else self.host.find_hit(request)
        self._remember(name, have)
        least = max(self.limits.least_tokens, self._hash_block - hit.tokens)
        if have.tokens - hit.tokens < least or not request.reads_prefix_cache:
            return self._decided(name, waits=False)
        if self._is_on_its_way(request, self.device, hit.tokens, request.num_tokens):
            return True  # with another request's load: look again when it has arrived
        carrier = request.prefix(f"load {self._next}", have.tokens + 1)
        carrier.first_hit_tokens = 0  # the request itself is counted when it begins
        route = _Route(self.host, have, self.device, self.device.find_hit(carrier))
        if not self.limits.is_faster(have.tokens - route.had.tokens, self._bytes_of(route.columns())):
            return self._decided(name, waits=False)
        loading, place = len(self.rows), self._place(carrier, have.tokens)
        if loading < self.limits.max_loads and self._begin(route, carrier, place, step, name):
            return self._decided(name, waits=True)
        self._counts["loads_refused"] += 1
        return loading > 0  # loads give their rows and blocks back; without any, the request must not wait

    def begins(self, request: Request) -> None:
        """Note that ``request`` waits no longer.

        Args:
            request: A request that got a row.
        """
        self._answers.pop(request.request_id, None)

    def take(self) -> TierWork:
        """Return the work of the step."""
        work = TierWork(_joined(self._stores), self._copies, _joined(self._loads), self.rows)
        self._stores, self._loads, self._copies = [], [], ()
        return work

    # -- results

    def check_result(self, arrived: Int32, lost: Int32) -> None:
        """Raise WorkerError unless all transfers are in flight, each once.

        Args:
            arrived: int[n], transfers that arrived.
            lost: int[n], transfers that failed.
        """
        numbers: list[int] = [*arrived.tolist(), *lost.tolist()]
        unknown = [one for one in numbers if one not in self._transfers and one not in self._cancelled]
        if unknown or len({*numbers}) < len(numbers):
            said = f"transfer {unknown[0]} is not in flight" if unknown else "a transfer is reported twice"
            raise WorkerError(f"{said}: report each transfer of a Step once, as arrived or lost")

    def settle(self, step: int, arrived: Int32, lost: Int32) -> None:
        """Note that a step was executed. Blocks of transfers that arrived can be hit; those of lost ones are freed.

        Args:
            step: The number of the step.
            arrived: int[n], transfers that arrived.
            lost: int[n], transfers that failed.
        """
        self._moved.pop(step, None)
        for numbers, finish in ((arrived, self._keep), (lost, self._cancel)):
            for number in numbers.tolist():
                if number in self._cancelled:
                    self._cancelled.remove(number)
                else:
                    finish(number)

    def fail(self, first_step: int) -> None:
        """Note that steps were not executed: their transfers are lost, and what moved on the host is forgotten.

        Args:
            first_step: This step and all later ones failed.
        """
        for number in [number for number, one in self._transfers.items() if one.step >= first_step]:
            self._cancel(number)
            self._cancelled.add(number)
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
        storing = {one.carrier.request_id for one in self._transfers.values() if one.target is self.host}
        if holding != storing:
            raise CacheError(f"{sorted(holding)} hold blocks on the host, but {sorted(storing)} are being stored")

    # -- transfers

    def _begin(
        self, route: _Route, carrier: Request, place: _Place, step: int, waits_for_it: str | None = None
    ) -> bool:
        """Begin a transfer; return whether the target has room for its blocks."""
        target, had, columns = route.target, route.had, route.columns()
        tokens = place[0] - had.tokens
        new = target.allocate_slots(
            carrier, 0, had.tokens, had, delay_cache_blocks=True, num_external_computed_tokens=tokens
        )
        if new is None:
            return False
        copies = _copies(route, target.get_blocks(carrier.request_id).ids, columns)
        if copies is None:
            if target.engine.finish_load(carrier, 0):
                target.free(carrier)
            return False
        numbered = np.concatenate((np.full((1, copies.shape[1]), self._next, np.int32), copies))
        (self._stores if target is self.host else self._loads).append(numbered)
        num_bytes = self._bytes_of(columns)
        self._transfers[self._next] = _Transfer(target, carrier, place, tokens, num_bytes, step, waits_for_it)
        self._next += 1
        return True

    def _end(self, number: int) -> _Transfer:
        one = self._transfers.pop(number)
        if one.waits_for_it is not None and one.waits_for_it in self._answers:
            self._answers[one.waits_for_it] = False
        return one

    def _keep(self, number: int) -> None:
        one = self._end(number)
        target, carrier = one.target, one.carrier
        target.engine.finish_load(carrier)
        target.keep_resume_point(carrier, ended=one.place[0] >= carrier.num_prompt_tokens)
        target.free(carrier)
        if target is self.host:
            self._counts.update(stores=1, stored_bytes=one.num_bytes)
        else:
            self._counts.update(loads=1, loaded_bytes=one.num_bytes, loaded_tokens=one.tokens)

    def _cancel(self, number: int) -> None:
        one = self._end(number)
        self._counts["lost"] += 1
        self._counts["loads_lost"] += one.target is self.device
        if one.target.engine.finish_load(one.carrier, 0):  # else it holds nothing any longer
            one.target.free(one.carrier)

    def _decided(self, name: str, *, waits: bool) -> bool:
        self._remember(name, waits)
        return waits

    def _remember(self, name: str, answer: bool | Hit) -> None:
        if len(self._answers) >= _MOST_ANSWERED:
            del self._answers[next(iter(self._answers))]
        self._answers[name] = answer

    def _is_on_its_way(self, request: Request, target: KVCacheManager, least: int, most: int) -> bool:
        """Return whether a transfer brings ``least`` + 1 .. ``most`` first tokens of ``request``. O(transfers)."""
        for one in self._transfers.values():
            tokens, key, _ = one.place
            depth = tokens // self._hash_block
            known = one.target is target and least < tokens <= most and depth <= len(request.hashes)
            if known and request.hashes[depth - 1] == key:
                return True
        return False

    def _place(self, request: Request, tokens: int) -> _Place:
        whole = tokens // self._hash_block
        return tokens, request.hashes[whole - 1], request.token_bytes(whole * self._hash_block, tokens)

    def _bytes_of(self, columns: Sequence[Int32]) -> int:
        return sum(size * len(of) for size, of in zip(self._sizes, columns, strict=True))


class _Route(NamedTuple):
    """A way between the managers.

    Attributes:
        source: The manager that has the tokens.
        found: The hit there.
        target: The manager that gets them.
        had: What it already has of them.
    """

    source: KVCacheManager
    found: Hit
    target: KVCacheManager
    had: Hit

    def blocks(self) -> list[Int32]:
        """Return the blocks of the source by group and column, 0 for null columns; the last one is copied in part."""
        of = self.source.engine.blocks_of(self.found)
        return [np.append(ids, np.int32(last)) for ids, last in zip(of.ids, of.sources, strict=True)]

    def columns(self) -> list[Int32]:
        """Return the columns to copy of each group: those that the source has, and the target does not share."""
        had = self.target.engine.blocks_of(self.had).ids
        columns = []
        for ids, shared in zip(self.blocks(), had, strict=True):
            wanted = ids != 0
            wanted[: len(shared)] &= shared == 0
            columns.append(wanted.nonzero()[0].astype(np.int32))
        return columns


def _copies(route: _Route, held: Sequence[Int32], columns: Sequence[Int32]) -> Int32 | None:
    """Return (group, source, destination) of the copies, int32[3, n]; ``None`` if a block would stay without content.

    ``held``: blocks of the carrier, by group. A window may keep more tokens than a hit brings (``retained``).
    """
    source, target = route.source.block_pool, route.target.block_pool
    shared = route.target.engine.blocks_of(route.had).ids
    parts = [np.empty((3, 0), np.int32)]
    for group, (ids, to, at) in enumerate(zip(route.blocks(), held, columns, strict=True)):
        if len(at) and at[-1] >= len(to):
            raise CacheError(f"group {group} of a transfer has no blocks for columns {at.tolist()} of {to.tolist()}")
        filled = np.zeros(len(to), np.bool_)
        filled[at] = filled[: len(shared[group])] = True
        if to[~filled].any():
            return None
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
            f"eviction {device.eviction.name} knows no resume points of a model without recurrent layers, so nothing "
            "would go to the host: use hazard (--eviction hazard)"
        )
    mine, theirs = device.config, host.config
    sizes, other = ([one.block_bytes_of(group) for group in range(len(one.groups))] for one in (mine, theirs))
    if mine.groups != theirs.groups or sizes != other or (mine.slabs is None) != (theirs.slabs is None):
        raise ConfigError("the host's blocks differ from the device's: make its plan with planner.tier_plan")
    for number, group in enumerate(mine.groups):
        if group.spec.keeps in {Keeps.RING, Keeps.ENCODER}:
            what = "raw keys of a compressor" if group.spec.keeps is Keeps.RING else "the output of an encoder"
            raise UnsupportedModelError(f"a host tier cannot hold group {number}, {what}: leave the host memory out")
    return device.hasher.block_size
