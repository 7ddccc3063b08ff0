"""What a scheduler has done so far, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Reason
from hybridkv.request import Request
from hybridkv.schedule.limits import SchedulerStatistics


@dataclass(slots=True)
class Counts:
    """See SchedulerStatistics for the meaning of each."""

    finished: int = 0
    preempted: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    peak_usage: float = 0.0
    drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def admit(self, admitted: Iterable[tuple[Request, int]]) -> None:
        """Requests come in, each with the tokens that it hit; what their first admissions found there already."""
        for request, hit_tokens in admitted:
            if request.first_hit_tokens is None:
                request.first_hit_tokens = hit_tokens
                self.prompt_tokens += request.num_prompt_tokens
                self.hit_tokens += min(hit_tokens, request.num_prompt_tokens)

    def verify(self, drafted: NDArray[np.int64] | None, accepted: NDArray[np.int32] | None) -> None:
        """A step brought its result: drafts of each row, and tokens accepted with the one sampled behind them."""
        if drafted is None or accepted is None:
            return
        position = np.arange(max(len(self.drafted), drafted.max()))[:, None]
        more = len(position) - len(self.drafted)
        self.drafted = np.pad(self.drafted, (0, more)) + (position < drafted).sum(axis=1)
        self.accepted = np.pad(self.accepted, (0, more)) + (position < accepted - 1).sum(axis=1)

    def statistics(self, *, steps: int, waiting: int, running: int, refusals: Counter[Reason]) -> SchedulerStatistics:
        """The same for others to read, with what others count."""
        return SchedulerStatistics(
            steps=steps,
            waiting=waiting,
            running=running,
            requests_finished=self.finished,
            preemptions=self.preempted,
            failed_steps=self.failed_steps,
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            computed_tokens=self.computed_tokens,
            peak_usage=self.peak_usage,
            drafted_by_position=tuple(self.drafted.tolist()),
            accepted_by_position=tuple(self.accepted.tolist()),
            refusals={str(reason): count for reason, count in refusals.items()},
        )
