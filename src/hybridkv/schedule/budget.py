"""How the tokens of a step are shared, and where chunks must end.

    [ few tokens left: decoding rows, the ends of prompts, short prompts that wait | all others, in order ]
      at most SchedulerLimits.short_share of the step                                the rest

A short prompt does not wait until a long one is done. The bound leaves the oldest long prompt most of every step, so
no request starves. Tokens that short work does not need go to the others, so no step is smaller.

Rejected: equal parts for all prompts, since prompts of one length would all end late; shortest first without a bound,
since long prompts would starve; tokens set aside for prompts that may not come, since steps would be smaller.

Chunks end where recurrent states are kept. Reference layout (AlignSplit): at multiples of the block of states.

    tokens  [ ... | block B | ... | block B | rest ]          a chunk ends at a multiple of B;
                                            ^ last boundary   none jumps the last one before the last prompt token

Natural layout (StopSplit): at stops, if the worker cannot write a state inside a chunk. In both layouts (ItemSplit):
never inside an image with tokens that attend to each other in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request
from hybridkv.schedule.limits import SchedulerLimits

Int64 = NDArray[np.int64]


class Split(Protocol):
    """Where chunks end."""

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is cut now."""
        ...

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now; 0: wait for a larger budget."""
        ...


@dataclass(frozen=True, slots=True)
class AlignSplit:
    """Chunk ends. block_size: of the states, tokens. largest_chunk: the budget of a step. drops: EAGLE does."""

    block_size: int
    largest_chunk: int
    drops: bool = False
    is_idle: bool = False

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now; 0: wait for a larger budget."""
        size, total = self.block_size, request.num_tokens
        prefill_end = max(request.num_prompt_tokens, total - 1)
        if computed >= prefill_end:
            return asked
        end = computed + asked
        if end < prefill_end:
            floor = end // size * size
            if floor > computed:
                end = floor
            elif size <= self.largest_chunk:
                return 0
        last = max(0, total // size * size - size) if self.drops else (total - 1) // size * size
        stops = [last, request.branch_tokens // size * size]
        if computed % size:
            stops.append(computed // size * size + size)
        return min([end, *(stop for stop in stops if computed < stop < end)]) - computed


@dataclass(frozen=True, slots=True)
class StopSplit:
    """Natural layout: chunks end at stops, where the worker cannot write a state inside a chunk.

    stops: of a request, in start + 1 .. end. segments: the worker can. forking: ids of requests that branch before the
    last of their known tokens, so that each branch runs that one itself.
    """

    stops: Callable[[Request, int, int], tuple[int, ...]]
    segments: bool
    forking: Collection[str]

    @property
    def is_idle(self) -> bool:
        """Whether nobody branches and states are written anywhere."""
        return self.segments and not self.forking

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now."""
        known, end = request.num_tokens, computed + asked
        if request.request_id in self.forking and computed < known - 1:
            end = min(end, known - 1)
        while not self.segments:
            first = next(iter(self.stops(request, computed, min(end, known))), end)
            if first >= end:
                break
            end = first  # and what a shorter chunk reaches: placements may keep the last edge of one
        return end - computed


@dataclass(frozen=True, slots=True)
class ItemSplit:
    """No chunk ends inside a multimodal item: before it, or behind all of it. other: where else chunks end.

    What was cached of an item was computed with all of it, so that a hit may end inside: the next chunk has the rest.
    """

    other: Split | None
    is_idle: bool = False

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now; 0: wait for a larger budget. O(items)."""
        end = computed + (asked if self.other is None else self.other.share(request, computed, asked))
        for item in request.multimodal:
            if item.offset < end < item.offset + item.length:
                return max(item.offset - computed, 0)
        return end - computed


def split_of(cache: KVCacheManager, limits: SchedulerLimits, forking: Collection[str]) -> Split | None:
    """How chunks are cut for states that are kept, and items; None where they end anywhere. forking: see StopSplit."""
    states = _split_of_states(cache, limits, forking)
    return ItemSplit(states) if limits.whole_items else states


def _split_of_states(cache: KVCacheManager, limits: SchedulerLimits, forking: Collection[str]) -> Split | None:
    if cache.bounds.keeps_checkpoints or cache.bounds.shares_in_part:  # branches cut chunks, too
        return StopSplit(cache.bounds.stops, limits.segments, forking)
    if not cache.bounds.state_alignment:
        return None
    return AlignSplit(cache.bounds.state_alignment, limits.max_batched_tokens, cache.bounds.drops_for_eagle)


def share_budget(wanted: Int64, budget: int) -> Int64:
    """What each row gets of ``budget`` tokens, first come first served, int64[rows]."""
    ends = np.cumsum(wanted)
    if not ends.size or ends[-1] <= budget:
        return wanted
    shares: Int64 = np.clip(budget - (ends - wanted), 0, wanted)
    return shares


_NONE: Final = np.empty(0, np.int64)


class StepBudget:
    """The tokens of one step that no row has yet.

    left: how many. split: where chunks must end, None where they may anywhere. short_tokens: most that requests with
    few tokens left take before others. count_short: given this budget, the tokens of waiting requests that may go
    ahead, ``ahead`` at most; called only where others could take those tokens.
    """

    def __init__(
        self,
        tokens: int,
        cache: KVCacheManager,
        split: Split | None,
        *,
        short_tokens: int = 0,
        count_short: Callable[[StepBudget], int] = lambda _: 0,
    ) -> None:
        self.left = tokens
        self._cache = cache
        self._split = split
        self._short_tokens = short_tokens
        self._count_short = count_short
        self._goes_ahead = True
        self._running = _NONE  # tokens that running rows want
        self._most_ahead = short_tokens
        self._ahead: int | None = None
        self._kept: int | None = None

    # -- running requests

    def shares(self, rows: Int64, wanted: Int64) -> Int64:
        """Tokens of each of ``rows``, which want ``wanted``, int64[rows]. A Python call a row while chunks are cut."""
        left, most = self.left, self._short_tokens
        self._running, self._most_ahead = wanted, min(left, most)
        self._ahead = self._kept = None
        total = wanted.sum()
        if total <= left - most and not self._cuts(wanted):
            return wanted
        if not most or total <= left - most or total <= left - self.kept:
            return self._in_turn(rows, wanted, None, left)
        short = _shortest(wanted, self._most_ahead)
        first, others = short.nonzero()[0], (~short).nonzero()[0]
        shares = self._in_turn(rows, wanted, np.concatenate((first, others)), self.left - self.kept)
        if not shares[others[:1]].all():  # the oldest always advances, also where it needs most of a step at once
            return self._in_turn(rows, wanted, None, self.left)
        return shares

    def _in_turn(self, rows: Int64, wanted: Int64, turns: Int64 | None, tokens: int) -> Int64:
        """Shares of ``tokens`` tokens, first come first served in the order of ``turns``, of the rows without."""
        split, cuts = self._split, self._cuts(wanted)
        if turns is None:
            if not cuts:
                return share_budget(wanted, tokens)
            turns = np.arange(len(rows))
        shares = np.zeros_like(wanted)
        if split is None or not cuts:
            shares[turns] = share_budget(wanted[turns], tokens)
            return shares
        requests = self._cache.rows.owners(rows)
        for place in turns.tolist():
            asked = min(wanted.item(place), tokens)
            if asked:
                request = requests[place]
                shares[place] = split.share(request, request.num_computed_tokens, asked)
                tokens -= shares.item(place)
        return shares

    def _cuts(self, wanted: Int64) -> bool:
        """Whether chunks of so many tokens may have to end early."""
        return self._split is not None and not self._split.is_idle and not (wanted <= 1).all()

    @property
    def for_running(self) -> int:
        """Tokens that running requests may have, without those that their shares left to waiting ones."""
        return self.left - (self._kept or 0)

    def spend(self, tokens: int) -> None:
        """Running requests take ``tokens``."""
        self.left -= tokens

    # -- waiting requests

    @property
    def ahead(self) -> int:
        """Tokens with which a waiting request goes ahead, if it needs no more."""
        if self._ahead is None:
            self._ahead = self._most_ahead - int(self._running[_shortest(self._running, self._most_ahead)].sum())
        return self._ahead

    @property
    def kept(self) -> int:
        """Tokens of ``ahead`` that are kept for waiting requests."""
        if self._kept is None:
            self._kept = self._count_short(self) if self._goes_ahead and self.ahead else 0
        return self._kept

    @property
    def keeps(self) -> bool:
        """Whether short requests may go ahead at all."""
        return self._short_tokens > 0

    def keep_nothing(self) -> None:
        """Keep no tokens for waiting requests from now on: none may go ahead."""
        self._goes_ahead, self._kept = False, 0

    def room_for(self, tokens: int) -> int:
        """How many of the ``tokens`` tokens that a waiting request lacks it may run; kept ones are for shorter ones."""
        if tokens <= self.left - self._most_ahead or tokens <= self.ahead:
            return min(tokens, self.left)
        return max(min(tokens, self.left - self.kept), 0)

    def first_chunk(self, request: Request, computed: int) -> int:
        """Tokens of the first chunk of ``request`` behind ``computed`` ones; 0: wait for a larger budget."""
        asked = self.room_for(request.num_tokens - computed)
        return asked if self._split is None or not asked else self._split.share(request, computed, asked)

    def spend_admitted(self, tokens: int, lacked: int) -> None:
        """A request that waited, and lacked ``lacked`` tokens, runs ``tokens`` of them."""
        if lacked <= self.ahead:
            self._ahead = self.ahead - tokens
            self._kept = None if self._kept is None else max(self._kept - tokens, 0)
        self.left -= tokens


def _shortest(wanted: Int64, most: int) -> NDArray[np.bool_]:
    """Rows that want least, as many as ``most`` tokens are enough for, of equal ones the first; bool[rows]."""
    order = np.argsort(wanted, kind="stable")
    short = np.zeros(len(wanted), np.bool_)
    short[order[np.cumsum(wanted[order]) <= most]] = True
    return short
