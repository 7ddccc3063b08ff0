"""Many steps taken as one, while every running request decodes and nothing else happens (docs/design/0027).

    steps   [ arrival, prefill | 1 token each | 1 token each | ... | 1 token each, the first request ends | ... ]
                               ^ stride                                                                   ^

What a step of one token a row does, and the result behind it, is done for all of them at once: as many steps are
counted, tokens appended and hashed, blocks taken, dropped, published, and whoever is done ends. There is no Step: for
those who know the tokens beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager, Transfer
from hybridkv.errors import ConfigError
from hybridkv.schedule.forks import Forks
from hybridkv.schedule.limits import Finished, FinishReason, SchedulerLimits
from hybridkv.schedule.row_releaser import RowReleaser
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import WaitingQueue

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MOST_STEPS: Final = 512
"""Of one stride: what a stride makes of each step and row is held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Stride:
    """What a stride did.

    steps: how many it was, 0 for none, of ``rows`` requests each. copies: what the last of them had to move and copy
    before its forward; all others nothing. peak_usage: the largest share of the pool in use at any of them.
    finished: who ended with the last one.
    """

    steps: int
    rows: int
    copies: Sequence[Transfer]
    peak_usage: float
    finished: tuple[Finished, ...]


NO_STRIDE: Final = Stride(0, 0, (), 0.0, ())

Choose = Callable[[Int64, Int64, int], Int32]
"""Rows, the tokens that each has computed, the most steps -> what each samples in each step, int32[rows, steps]."""


class Strides:
    """Whether the next steps are all alike, and how they are taken."""

    def __init__(
        self,
        cache: KVCacheManager,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        running: RunningRows,
        *,
        forks: Forks,
        releaser: RowReleaser,
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._forks = forks
        self._releaser = releaser
        self._most_rows = limits.max_batched_tokens
        self._never = bool(limits.num_speculative_tokens or limits.num_lookahead_tokens)

    def take(self, choose: Choose) -> Stride:
        """One stride, none where the next step is not uniform; see Scheduler.stride. No step is in flight.

        O(running * steps) in array operations, some Python calls a block.
        """
        most, rows = self._most_steps(), self._running.order
        if not most:
            return NO_STRIDE
        cache, requests = self._cache, self._running.requests
        tokens = choose(rows, cache.rows.num_computed[rows], most)
        if tokens.dtype != np.int32 or tokens.ndim != 2 or len(tokens) != len(rows) or tokens.shape[1] > most:
            raise ConfigError(
                f"a stride of {tokens.dtype} tokens {tokens.shape}: choose int32, a row for each of the {len(rows)} "
                f"requests that run and at most {most} steps"
            )
        advance = cache.advance(rows, tokens)
        if not advance.steps:
            return NO_STRIDE
        copies = cache.take_transfers().copies
        done = np.flatnonzero(cache.rows.num_tokens[rows] >= self._running.limit[rows])
        self._releaser.end(Finished(requests[place], FinishReason.LENGTH) for place in done.tolist())
        return Stride(advance.steps, len(rows), copies, advance.peak_usage, self._releaser.take_finished())

    def _most_steps(self) -> int:
        """How many of the next steps are uniform. O(running)."""
        running, cache = self._running, self._cache
        rows = running.order
        if self._never or not rows.size or rows.size > self._most_rows or running.num_dead or self._forks:
            return 0
        if len(self._waiting) and running.has_seat and rows.size < self._most_rows:
            return 0  # somebody comes in, or is refused
        known = cache.rows.num_tokens[rows]
        if (known - cache.rows.num_computed[rows] != 1).any() or running.may_stop(rows):
            return 0
        left = int((running.limit[rows] - known).min())
        return cache.uniform_steps(rows, min(left, MOST_STEPS))
