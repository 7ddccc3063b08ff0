"""How the tokens of a step are shared: short work first, within bounds, then everybody in order.

    [ few tokens left: decoding rows, the ends of prompts, short prompts that wait | all others, in order ]
      at most SchedulerLimits.short_share of the step                                the rest

A short prompt does not wait until a long one is done. The bound leaves the oldest long prompt most of every step, so
nobody starves. Tokens that short work does not need go to the others, so no step is smaller.

Rejected: equal parts for all prompts, since prompts of one length would all end late; shortest first without a bound,
since long prompts would starve; tokens set aside for prompts that may not come, since steps would be smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager
from hybridkv.request import Request
from hybridkv.schedule.chunks import Split, share_budget

Int64 = NDArray[np.int64]

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
