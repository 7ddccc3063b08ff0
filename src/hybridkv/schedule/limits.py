"""What bounds a step, and what came of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import check_types, integer, or_none, real
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.specs import BATCHED_TOKENS
from hybridkv.step import Csr
from hybridkv.units import MOST_COUNT, shown

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

SHORT_SHARE: Final = 0.5
"""SchedulerLimits.short_share of the natural layout, unless it is told."""


def short_share(name: str, value: object) -> float:
    """``value``, a share of a step that long prompts leave to short ones. ConfigError for what is none."""
    share = real(name, value)
    if not 0 <= share < 1:
        raise ConfigError(f"{name} (--short-share) is a share of a step, 0 or more and below 1, got {share}")
    return share


def _watermark(name: str, value: object) -> object:
    if not 0 <= real(name, value) < 1:
        raise ConfigError(f"{name} is a share of the pool, 0 or more and below 1, got {value}")
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
    """What bounds a scheduler.

    max_running: rows of the worker. max_batched_tokens: budget of a step. max_in_flight: steps that may be
    scheduled ahead of their results. watermark: share of the pool that an admission must leave free.
    policy: who goes first, see WaitingQueue. max_overtaken, max_overtaken_seconds: how often, and how long, a
    request that does not fit lets others pass. num_speculative_tokens: most drafts of a row in a step, see
    Scheduler.propose. num_lookahead_tokens: room behind a row's tokens, drafts included, for a drafter's own.
    segments: whether the worker can write recurrent states at any token inside a chunk; else chunks end there.
    short_share: of a step's tokens, the share that requests which lack no more of it take before others: those that
    decode, and short prompts, running or waiting. 0: everybody in order. None: see short_share_of. A prompt that waits
    for tokens is late by at most 1 / (1 - short_share); max_overtaken counts prompts that lack memory alone.
    whole_items: whether tokens of a multimodal item attend to each other in both directions: no chunk ends inside one.
    """

    max_running: Annotated[int, partial(integer, least=1, most=1 << 20)] = 256  # every row has its columns at once
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
        """``short_share``, or what suits the cache: SHORT_SHARE, but 0 by priority, which says itself who goes first.

        follows_vllm: steps of the cache are those of vLLM, as in the reference layout; 0 there, too.
        """
        if self.short_share is not None:
            return self.short_share
        return 0.0 if follows_vllm or self.policy == "priority" else SHORT_SHARE


class FinishReason(StrEnum):
    """Why a request ended: a stop token or string, its length, the caller, or an error of its own."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended. Its tokens are all there; its blocks are free or will be. error: what ended it, if one."""

    request: Request
    reason: FinishReason
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What an update did.

    requests: one per row of the Step. appended: tokens really appended, CSR over the same rows (none for
    requests that had ended). finished: who ended since the update before.
    """

    step_id: int
    requests: tuple[Request, ...]
    appended: Csr
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counts since construction, but for waiting and running, which are of now.

    prompt_tokens, hit_tokens: of first admissions. computed_tokens: all that ran, recomputation included.
    peak_usage: of the pool, 0 .. 1. failed_steps: steps that never brought a result. drafted_by_position,
    accepted_by_position: drafts that the model verified, and those that it accepted, the first of each row first; what
    a stop token then cut off included. refusals: by reason, how often a waiting request was looked at and did not come
    in. misses: prompt tokens without hit tokens, by reason, where the cache explains them (remembered_losses).
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
        """Drafts verified."""
        return sum(self.drafted_by_position)

    @property
    def accepted_tokens(self) -> int:
        """Drafts accepted."""
        return sum(self.accepted_by_position)
