"""What a scheduler has done so far, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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

    def admit(self, admitted: Iterable[tuple[Request, int]]) -> None:
        """Requests come in, each with the tokens that it hit; what their first admissions found there already."""
        for request, hit_tokens in admitted:
            if request.first_hit_tokens is None:
                request.first_hit_tokens = hit_tokens
                self.prompt_tokens += request.num_prompt_tokens
                self.hit_tokens += min(hit_tokens, request.num_prompt_tokens)

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
            refusals={str(reason): count for reason, count in refusals.items()},
        )
