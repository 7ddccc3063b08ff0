"""Many steps taken as one while every running request decodes and nothing else happens (docs/design/0027).

    steps   [ arrival, prefill | 1 token each | 1 token each | ... | 1 token each, the first request ends | ... ]
                               ^ stride                                                                   ^

What a step of one token a row does, and the result behind it, is done for all of them at once: as many steps are
counted, tokens appended and hashed, blocks taken, dropped, published, and whoever is done ends. There is no Step: for
those who know the tokens beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Transfer
from hybridkv.errors import ConfigError
from hybridkv.schedule.admission import AdmissionControl, Standstill
from hybridkv.schedule.builder import StepBuilder
from hybridkv.schedule.limits import Finished, FinishReason

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_MOST_STEPS: Final = 512  # of one stride: what a stride makes of each step and row is held at once


@dataclass(frozen=True, slots=True, eq=False)
class FastForward:
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


NO_STEPS: Final = FastForward(0, 0, (), 0.0, ())


@dataclass(frozen=True, slots=True, eq=False)
class UniformSteps:
    """Steps from now on that are all alike but for the last, in which requests may end.

    rows: int64[running], those that run, in order. computed: int64[running], tokens that each has computed. steps: how
    many at most. since_s, patience_s: of them, those that begin less than ``patience_s`` behind ``since_s``, on the
    scheduler's clock, since then somebody who waits lets nobody pass any longer; None: whenever they begin.
    """

    rows: Int64
    computed: Int64
    steps: int
    since_s: float | None
    patience_s: float


Choose = Callable[[UniformSteps], Int32]
"""What each row samples in as many of the steps as shall be taken, int32[running, steps]."""


class FastForwardClock(Protocol):
    """When the steps of a stride are: what the clock of a scheduler and its cache says while one is taken."""

    def begin(self, step: int) -> None:
        """Step ``step`` of those chosen begins: what is done from now on is done then. Not told of every one."""

    def end(self, steps: int, copies: Sequence[Transfer]) -> None:
        """The last of ``steps`` steps, which made ``copies``, is complete: what ends now ends then."""


def advance_uniform(
    admission: AdmissionControl, choose: Choose, times: FastForwardClock | None, builder: StepBuilder, now: float
) -> FastForward:
    """Take one stride, none where the next step is not uniform; see Scheduler.stride. No step is in flight.

    builder: of a step, its tokens without those of running rows. now: seconds. O(running * steps) in array
    operations, some Python calls a block.
    """
    cache, rows, requests = admission.cache, admission.running.order, admission.running.requests
    if builder.left < 0 or not _all_decode(admission, rows) or (still := admission.standstill(builder, now)) is None:
        return NO_STEPS
    most = _most_steps(admission, rows, still)
    if not most:
        return NO_STEPS
    patience_s = admission.limits.max_overtaken_seconds
    tokens = choose(UniformSteps(rows, cache.rows.num_computed[rows], most, still.since_s, patience_s))
    if tokens.dtype != np.int32 or tokens.ndim != 2 or len(tokens) != len(rows) or tokens.shape[1] > most:
        raise ConfigError(
            f"{tokens.dtype} tokens {tokens.shape}: choose int32, a row for each of the {len(rows)} "
            f"requests that run and at most {most} steps"
        )
    steps, peak_usage = cache.fast_forward.advance(rows, tokens, None if times is None else times.begin)
    if not steps:
        return NO_STEPS
    for reason, count in still.refused.items():
        admission.refusals[reason] += count * steps
    copies = cache.fields.take_transfers().copies
    if times is not None:
        times.end(steps, copies)
    done = np.flatnonzero(cache.rows.num_tokens[rows] >= admission.running.limit[rows])
    admission.running.end(Finished(requests[place], FinishReason.LENGTH) for place in done.tolist())
    return FastForward(steps, len(rows), copies, peak_usage, admission.running.take_finished())


def _all_decode(admission: AdmissionControl, rows: Int64) -> bool:
    """Return whether all that run compute their last token next, and go on until their limit. O(running)."""
    running, columns, limits = admission.running, admission.cache.rows, admission.limits
    if limits.num_speculative_tokens or limits.num_lookahead_tokens:
        return False
    if not rows.size or running.num_dead or admission.waiting.families:
        return False
    return bool((columns.num_tokens[rows] - columns.num_computed[rows] == 1).all()) and not running.may_stop(rows)


def _most_steps(admission: AdmissionControl, rows: Int64, still: Standstill) -> int:
    """Return how many of the next steps are uniform. O(running)."""
    cache = admission.cache
    left = int((admission.running.limit[rows] - cache.rows.num_tokens[rows]).min())
    steps = cache.fast_forward.most_steps(rows, min(left, _MOST_STEPS))
    if still.hits:
        while steps and not cache.fast_forward.refuses(rows, steps, still.takes, still.hits):
            steps //= 2
    return steps
