"""The store behind the host: resume points go there after the host got them, and come back before a request begins.

    spill    a resume point arrived on the host: its blocks are locked, and written under their keys with the next Step
    fetch    the store has more of a prompt than the host: a carrier takes blocks on the host, and they are read

Neither holds up a step: the worker reads and writes the store beside the forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Below, BlockLock, KVCacheManager
from hybridkv.request import Request
from hybridkv.step import StoreTransfer
from hybridkv.tiers.carriers import NO_COLUMNS, Carried, Carriers, Wanted, Way
from hybridkv.tiers.lookups import MOST_REMEMBERED, StoreLookups
from hybridkv.tiers.price import Prices
from hybridkv.tiers.times import Direction, TransferTimes

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A resume point in the store. The store evicts by itself and reports nothing, so it counts as kept."""

    kept: bool = True
    below: None = None


_STORED: Final = _Stored()


@dataclass(frozen=True, slots=True, eq=False)
class _Spill:
    """A resume point that goes to the store.

    Attributes:
        carrier: A request of its tokens and one more.
        lock: Keeps its blocks on the host in place.
        transfer: Its blocks and their keys.
        num_bytes: Bytes of the blocks.
        step: The Step that began it; ``None`` before.
        since: When that was, in seconds of the clock.
    """

    carrier: Request
    lock: BlockLock
    transfer: StoreTransfer
    num_bytes: int
    step: int | None = None
    since: float = 0.0


class _Fetched(NamedTuple):
    """The fetch of a waiting request. had: tokens on device or host before; gave_up: it took too long."""

    had: int
    gave_up: bool


class StoreBehind:
    """Spills and fetches.

    Args:
        host: The manager of host memory.
        lookups: Finds prefixes in the store.
        carriers: Carries prefixes to the host.
        prices: Says what is faster to compute than to fetch, and has the bounds of transfers.
        counts: Gets what happened.
        times: Gets how long spills took.

    Attributes:
        lookups: Finds prefixes in the store.
    """

    def __init__(
        self,
        host: KVCacheManager,
        lookups: StoreLookups,
        carriers: Carriers,
        prices: Prices,
        *,
        counts: Counter[str],
        times: TransferTimes,
    ) -> None:
        self._host = host
        self.lookups = lookups
        self._carriers = carriers
        self._limits, self._prices = prices.limits, prices
        self._counts = counts
        self._times = times
        self._num_groups = len(host.config.groups)
        self._spills: dict[int, _Spill] = {}
        self._fetches = list[StoreTransfer]()
        self._fetched: dict[str, _Fetched] = {}  # by id of a waiting request whose fetch was decided

    @property
    def num_spills(self) -> int:
        """Spills that have not ended."""
        return len(self._spills)

    def forget(self, request: Request) -> None:
        """Note that a request waits no longer.

        Args:
            request: The request.
        """
        self.lookups.forget(request.request_id)
        self._fetched.pop(request.request_id, None)

    def fetched(self, request: Request, tokens: int) -> int:
        """Return how many of the first ``tokens`` tokens of a request came from the store for it; 0 once forgotten.

        Args:
            request: A request that begins with them.
            tokens: Tokens of its prefix, which are on the device now.
        """
        fetch = self._fetched.get(request.request_id)
        return 0 if fetch is None else max(tokens - fetch.had, 0)

    # -- fetches

    def waits(self, request: Request, least: int, *, may_begin: bool) -> bool:
        """Return whether a request waits for a look-up or a fetch, and begin a fetch that is worth it.

        Args:
            request: A waiting request.
            least: Tokens of its longest prefix on the device or the host.
            may_begin: The step may begin a fetch. One that has begun loads may not: a fetch takes blocks on the host,
                perhaps those that the loads have yet to read.
        """
        fewest = 1 if request.hints.prefetch else self._limits.least_tokens  # a prefetch wants all, whatever it costs
        if not request.reads_prefix_cache or request.num_tokens - 1 - least < fewest:
            return False
        tokens = self._found(request, least)
        if tokens is None:
            return True
        if tokens - least < fewest:
            return False
        coming = self._carriers.on_its_way(request, Way.FETCH, least, request.num_tokens)
        if coming is None:
            return self._waits_for_new(request, least, tokens, may_begin=may_begin)
        if coming.waits_for_it is None:
            return False
        late = self._carriers.is_late(coming)
        if late:
            self._remember(request, _Fetched(least, gave_up=True))
            self._counts["late"] += 1
        return not late

    def _found(self, request: Request, least: int) -> int | None:
        """Return the tokens of a request that the store has, ``None`` while that is unknown; 0 if asking takes long."""
        name, now = request.request_id, self._carriers.now
        for seconds, late in self.lookups.take_times():
            self._prices.looked_up(seconds, now, late=late)
        asks = request.hints.prefetch or self.lookups.knows(name)
        fetch = self._fetched.get(name)
        if fetch is not None and fetch.gave_up:
            return 0
        if not asks and not self._prices.may_look_up(request.num_tokens - 1 - least, now):
            return 0
        return self.lookups.ask(request, least, now)

    def _waits_for_new(self, request: Request, least: int, tokens: int, *, may_begin: bool) -> bool:
        """Return whether a request waits for a fetch that begins now or soon."""
        if request.request_id in self._fetched:  # its fetch is over, and brought too little
            return False
        if not may_begin or self._carriers.count(Way.FETCH) == self._limits.max_fetches:
            return True  # the next step may; one of the fetches ends, and gives its place
        self._remember(request, _Fetched(least, gave_up=False))
        return self._fetch(request, tokens)

    def _remember(self, request: Request, fetch: _Fetched) -> None:
        if len(self._fetched) >= MOST_REMEMBERED:
            del self._fetched[next(iter(self._fetched))]
        self._fetched[request.request_id] = fetch

    def _fetch(self, request: Request, tokens: int) -> bool:
        """Begin to fetch a prefix; return whether the request waits for it.

        It does not if the host has no room, or if computing the tokens is faster. Then the fetch may begin
        nevertheless, to measure the store again.
        """
        carrier = request.prefix(f"fetch {self._carriers.number()}", tokens + 1)
        carrier.first_hit_tokens = 0  # the request itself is counted when it begins
        had = self._host.find_hit(carrier)
        if had.tokens >= tokens:
            return False
        columns, encoded = self._needed(carrier, tokens), self._host.engine.encoder_blocks(carrier)
        for group, ids in enumerate(self._host.engine.blocks_of(had).ids):
            known = np.flatnonzero(encoded.get(group, ids)).astype(np.int32)
            columns[group] = np.setdiff1d(columns[group], known)
        size, spared = self._carriers.bytes_of(columns), tokens - had.tokens
        spared += 0 if encoded else carrier.num_encoder_tokens
        waits = request.hints.prefetch or self._prices.is_faster(spared, size, Way.FETCH, Way.LOAD)
        if not waits and not self._prices.of[Way.FETCH].retries(self._carriers.now):
            return False
        waiting = request.request_id if waits else None
        begun = self._carriers.begin(Way.FETCH, Wanted(self._host, carrier, tokens, had), columns, waiting)
        if begun is None:
            self._counts["fetches_refused"] += 1
            return False
        number, held = begun
        self._fetches.append(StoreTransfer(number, *self._named(carrier, tokens, held, columns)))
        return waits

    # -- spills

    def spill(self, one: Carried) -> None:
        """Queue the blocks of a prefix that arrived on the host.

        Args:
            one: The prefix; its carrier holds the blocks.
        """
        if len(self._spills) >= self._limits.max_spills:
            self._counts["spills_dropped"] += 1
            return
        _, carrier, tokens, _ = one.wanted
        columns, held = self._needed(carrier, tokens), self._host.get_blocks(carrier.request_id).ids
        number, mark = self._carriers.number(), self.lookups.prefixes.mark(carrier, tokens)
        transfer = StoreTransfer(number, *self._named(carrier, tokens, held, columns), *mark)
        lock = self._host.engine.lock(carrier)
        self._spills[number] = _Spill(carrier, lock, transfer, self._carriers.bytes_of(columns))

    def begun(self, number: int) -> bool:
        """Return whether a number is that of a spill that a Step began.

        Args:
            number: The number of a transfer.
        """
        return number in self._spills and self._spills[number].step is not None

    def end(self, number: int, *, arrived: bool) -> int:
        """Unlock the blocks of a spill, and return their bytes.

        Args:
            number: Its number.
            arrived: Its blocks are in the store.
        """
        one = self._spills.pop(number)
        self._host.engine.unlock(one.lock)
        self._times.add(Direction.DOWN, self._carriers.now - one.since, arrived=arrived)
        if arrived:
            self._counts.update(spills=1, spilled_bytes=one.num_bytes)
            self.note_stored(one.carrier)
        else:
            self._counts["spills_lost"] += 1
        return one.num_bytes

    def note_stored(self, carrier: Request) -> None:
        """Tell the host that the store has a resume point, and at which price it comes back.

        Args:
            carrier: A request of its tokens and one more.
        """
        price = self._prices.tokens_per_byte(Way.FETCH)
        if price is not None:
            self._host.eviction_policy.note_below(carrier, carrier.num_tokens - 1, Below(_STORED, price))

    def fail(self, first_step: int) -> list[int]:
        """End the spills of steps that failed, and return their numbers.

        Args:
            first_step: This step and all later ones failed.
        """
        failed = [n for n, one in self._spills.items() if one.step is not None and one.step >= first_step]
        for number in failed:
            self.end(number, arrived=False)
        return failed

    def take(self) -> tuple[tuple[StoreTransfer, ...], tuple[StoreTransfer, ...]]:
        """Return the spills and fetches of the step that is being made."""
        spills = [number for number, one in self._spills.items() if one.step is None]
        for number in spills:
            self._spills[number] = replace(self._spills[number], step=self._carriers.step, since=self._carriers.now)
        fetches, self._fetches = tuple(self._fetches), []
        return tuple(self._spills[number].transfer for number in spills), fetches

    # -- blocks and keys

    def _needed(self, carrier: Request, tokens: int) -> list[Int32]:
        """Return the columns that ``carrier`` needs to resume after ``tokens`` tokens, by group."""
        columns = [NO_COLUMNS] * self._num_groups
        for part in self.lookups.prefixes.parts:
            columns[part.group] = np.array(self.lookups.prefixes.columns(carrier, tokens, part), np.int32)
        return columns

    def _named(
        self, carrier: Request, tokens: int, held: Sequence[Int32], columns: Sequence[Int32]
    ) -> tuple[Int32, Int32, tuple[bytes, ...]]:
        """Return group, block and key of ``columns`` of ``held``. Null columns are left out."""
        groups, blocks, keys = [NO_COLUMNS], [NO_COLUMNS], list[bytes]()
        for part in self.lookups.prefixes.parts:
            ids, at = held[part.group], columns[part.group]
            at = at[at < len(ids)]  # the host may lack the output of an encoder
            at = at[ids[at] != 0]
            blocks.append(self._host.block_pool.local(part.group, ids[at]).astype(np.int32))
            groups.append(np.full(len(at), part.group, np.int32))
            keys += self.lookups.prefixes.keys(carrier, tokens, part, at.tolist())
        return np.concatenate(groups), np.concatenate(blocks), tuple(keys)
