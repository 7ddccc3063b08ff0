"""SchedulerLimits, and the values that a scheduler returns: Outcome, Finished, SchedulerStatistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Final, Literal

from hybridkv.arguments import check_types, integer, or_none, real
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import BATCHED_TOKENS
from hybridkv.step import Csr
from hybridkv.units import MOST_COUNT, shown

SHORT_SHARE: Final = 0.5
"""Default of SchedulerLimits.short_share in the natural layout (measured in docs/design/0030)."""


def short_share(name: str, value: object) -> float:
    """Return ``value`` as a share of a step.

    Args:
        name: field to name in the error.
        value: a number of 0 or more and below 1.

    Raises:
        ConfigError: it is anything else.
    """
    share = real(name, value)
    if not 0 <= share < 1:
        raise ConfigError(f"{name} (--short-share) must be a share of a step, 0 or more and below 1, got {share}")
    return share


def _watermark(name: str, value: object) -> object:
    if not 0 <= real(name, value) < 1:
        raise ConfigError(f"{name} must be a share of the pool, 0 or more and below 1, got {value}")
    return value


def _policy(name: str, value: object) -> object:
    if not isinstance(value, str) or value not in {"fcfs", "priority"}:
        raise ConfigError(f"{name} must be fcfs or priority, got {shown(value)}")
    return value


def _seconds(name: str, value: object) -> object:
    if real(name, value) < 0:
        raise ConfigError(f"{name} must not be negative, got {value}")
    return value


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a scheduler and of its steps.

    Attributes:
        max_running: rows of the worker, so the most requests that run at once.
        max_batched_tokens: token budget of a step.
        max_in_flight: steps that may be scheduled before the result of the first one arrives.
        watermark: share of the pool that stays free after an admission, 0 or more and below 1.
        policy: order of requests; "fcfs", or "priority" for the least Request.priority first, see WaitingQueue.
        max_overtaken: how many admissions a request that lacks memory lets pass.
        max_overtaken_seconds: how long after its first refusal such a request lets others pass.
        num_lookahead_tokens: slots after a row's tokens, drafts included, for the drafter's own tokens.
        num_speculative_tokens: most drafts of a row in a step, see Scheduler.propose.
        segments: whether the worker can write recurrent states inside a chunk. If not, chunks end at each saved state.
        whole_items: whether tokens of a multimodal item attend to each other in both directions. Then no chunk ends
            inside an item.
        short_share: share of a step's tokens that short requests take before others: decoding requests and short
            prompts, running or waiting. 0 serves all requests in order. By default, see ``short_share_of``. A long
            prompt takes at most 1 / (1 - short_share) times as many steps. max_overtaken does not count these steps.

    Raises:
        ConfigError: a value is out of range or has another type. The error names the field.
    """

    max_running: Annotated[int, partial(integer, least=1, most=1 << 20)] = (
        256  # columns for all rows are allocated at once
    )
    max_batched_tokens: Annotated[int, partial(integer, least=1, most=MOST_COUNT)] = BATCHED_TOKENS
    max_in_flight: Annotated[int, partial(integer, least=1, most=1 << 10)] = 1
    watermark: Annotated[float, _watermark] = 0.0
    policy: Annotated[Literal["fcfs", "priority"], _policy] = "fcfs"
    max_overtaken: Annotated[int, partial(integer, least=0, most=MOST_COUNT)] = 64
    max_overtaken_seconds: Annotated[float, _seconds] = 1.0
    num_lookahead_tokens: Annotated[int, partial(integer, least=0, most=MOST_COUNT)] = 0
    num_speculative_tokens: Annotated[int, partial(integer, least=0, most=1 << 10)] = 0
    segments: bool = True
    whole_items: bool = False
    short_share: Annotated[float | None, or_none(short_share)] = None

    def __post_init__(self) -> None:
        check_types(self)

    def short_share_of(self, *, follows_vllm: bool) -> float:
        """Return ``short_share``, or by default SHORT_SHARE in the natural layout and 0 in the reference layout.

        With policy "priority" the default is 0, because priorities say which request goes first.

        Args:
            follows_vllm: whether the cache's steps are equal to vLLM's, as in the reference layout.
        """
        if self.short_share is not None:
            return self.short_share
        return 0.0 if follows_vllm or self.policy == "priority" else SHORT_SHARE


class FinishReason(StrEnum):
    """Why a request ended: a stop token or string, its length limit, an abort, or an error of its own."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended. Its tokens are complete. Its blocks are freed when no step in flight uses them.

    Attributes:
        request: the request.
        reason: why it ended.
        error: the exception that ended it, if there was one.
    """

    request: Request
    reason: FinishReason
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The effect of one update.

    Attributes:
        step_id: id of the Step; its result was applied.
        requests: one request for each row of the Step.
        appended: tokens that were appended, CSR over the same rows. Empty for a request that had ended.
        finished: requests that ended since the previous update.
    """

    step_id: int
    requests: tuple[Request, ...]
    appended: Csr
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since construction. Only ``waiting`` and ``running`` are current numbers.

    Attributes:
        steps: steps scheduled.
        waiting: requests queued now.
        running: requests that run now.
        requests_finished: requests that ended.
        preemptions: requests sent back to the queue because blocks ran out.
        failed_steps: steps that brought no result.
        prompt_tokens: prompt tokens of requests at their first admission.
        hit_tokens: how many of these the prefix cache had.
        computed_tokens: tokens that ran, recomputed ones included.
        peak_usage: largest share of the pool in use, 0 .. 1.
        drafted_by_position: drafts verified, by their position after the row's last token. Includes drafts that a stop
            token cut off later.
        accepted_by_position: drafts accepted, counted alike.
        refusals: how often a waiting request was looked at and not admitted, by reason.
        misses: prompt tokens that were not hit, by reason, if the cache explains misses (remembered_losses).
    """

    steps: int
    waiting: int
    running: int
    requests_finished: int
    preemptions: int
    failed_steps: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    peak_usage: float
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    refusals: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)

    @property
    def drafted_tokens(self) -> int:
        """Drafts verified, at all positions."""
        return sum(self.drafted_by_position)

    @property
    def accepted_tokens(self) -> int:
        """Drafts accepted, at all positions."""
        return sum(self.accepted_by_position)
