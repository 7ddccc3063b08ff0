"""Many steps taken at once while every running request only decodes (docs/design/0027).

    steps   [ arrival, prefill | 1 token each | 1 token each | ... | 1 token each, the first request ends | ... ]
                               ^ fast-forward                                                             ^

The effect is that of ordinary steps with one token for each row, and of their results. Steps are counted, and tokens
are appended and hashed. Blocks are taken, dropped and published, and requests that reached their limit end. No Step is
made, so this is for callers that know the sampled tokens beforehand, as a replay of a trace does.
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

_MOST_STEPS: Final = 512  # of one fast-forward, chosen by hand: bounds the arrays of rows and steps


@dataclass(frozen=True, slots=True, eq=False)
class FastForward:
    """The effect of one fast-forward.

    Attributes:
        steps: number of steps taken; 0 if the next step is not uniform.
        rows: number of requests in each of these steps.
        copies: block moves and copies before the forward of the last step. All other steps had no copies.
        peak_usage: largest share of the pool in use after any of these steps, 0 .. 1.
        finished: requests that ended with the last step.
    """

    steps: int
    rows: int
    copies: Sequence[Transfer]
    peak_usage: float
    finished: tuple[Finished, ...]


NO_STEPS: Final = FastForward(0, 0, (), 0.0, ())


@dataclass(frozen=True, slots=True, eq=False)
class UniformSteps:
    """Upcoming steps that are all alike; in the last one, requests may end.

    Attributes:
        rows: int64[running], rows of the running requests, in order.
        computed: int64[running], computed tokens of each row.
        steps: most steps that are uniform.
        since_s: scheduler time in seconds when the first waiting request was first refused. Omitted if no request waits
            for memory.
        patience_s: only steps that begin less than this after ``since_s`` are uniform, because from then on that
            request lets no other pass.
    """

    rows: Int64
    computed: Int64
    steps: int
    since_s: float | None
    patience_s: float


Choose = Callable[[UniformSteps], Int32]
"""Returns the tokens that each row samples in the steps to take, int32[running, steps]."""


class FastForwardClock(Protocol):
    """Receives the times of steps during a fast-forward, so that the clock of the scheduler and cache shows them."""

    def begin(self, step: int) -> None:
        """Set the clock to the time when a step begins. Not called for every step.

        Args:
            step: number of the step, from 0.
        """

    def end(self, steps: int, copies: Sequence[Transfer]) -> None:
        """Set the clock to the time when the last step is complete. Requests end at this time.

        Args:
            steps: number of steps taken.
            copies: block moves and copies of the last step.
        """


def advance_uniform(
    admission: AdmissionControl, choose: Choose, times: FastForwardClock | None, builder: StepBuilder, now: float
) -> FastForward:
    """Take one fast-forward; see Scheduler.fast_forward. No step may be in flight.

    builder: holds the tokens of a step that running rows leave to waiting requests. now: seconds. O(running * steps) in
    array operations, and a few Python calls for each block.
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
            f"the chosen {tokens.dtype} tokens {tokens.shape} must be int32, with a row for each of the {len(rows)} "
            f"running requests and at most {most} steps"
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
    """Return whether all running requests compute their last token next and end only at their limit.

    O(running).
    """
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
