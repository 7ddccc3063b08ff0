"""Who comes in: waiting requests in order; one that does not fit lets others pass, within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Final

from hybridkv.cache import KVCacheManager, Reason, Refusal, SlotPlan
from hybridkv.request import Request
from hybridkv.schedule.admission import limit_tokens, plan_admission
from hybridkv.schedule.builder import StepBuilder
from hybridkv.schedule.chunks import Chunks
from hybridkv.schedule.limits import Finished, FinishReason, SchedulerLimits
from hybridkv.schedule.row_releaser import RowReleaser
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import Waiting, WaitingQueue

_MOST_PASSED: Final = 16  # refused requests that a step looks at: each costs a look-up


class Admitter:
    """Moves requests from ``waiting`` to ``running`` and into a step. refusals: by reason, so far."""

    def __init__(
        self,
        cache: KVCacheManager,
        limits: SchedulerLimits,
        chunks: Chunks,
        waiting: WaitingQueue,
        running: RunningRows,
        *,
        releaser: RowReleaser,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._chunks = chunks
        self._waiting = waiting
        self._running = running
        self._releaser = releaser
        self.refusals: Counter[Reason] = Counter()

    def admit(self, builder: StepBuilder, now: float) -> Iterator[tuple[Request, int]]:
        """Admit while budget, rows and blocks last: each request and the tokens it found in the cache.

        now: seconds. A refused request is passed by those behind it until it was overtaken ``max_overtaken``
        times or has waited ``max_overtaken_seconds`` since it was first refused.
        """
        refused: list[Waiting] = []
        with closing(self._waiting.in_order()) as entries:
            while builder.budget and self._running.seats_taken < self._limits.max_running:
                entry = next(entries, None)
                if entry is None:
                    return
                try:
                    planned = None if entry.in_flight_steps else self._plan(entry, builder.budget)
                except Exception as error:  # noqa: BLE001 - a plan changes nothing: what it raises is its request's alone
                    self._releaser.end([Finished(entry.request, FinishReason.ERROR, error)])
                    continue
                if planned is not None:
                    hit_tokens = self._carry_out(entry, *planned, builder)
                    self._waiting.remove(entry.request)
                    for passed in refused:
                        passed.overtaken += 1
                    yield entry.request, hit_tokens
                    if not all(self._may_be_overtaken(passed, now) for passed in refused):
                        return
                    continue
                refused.append(entry)
                if len(refused) == _MOST_PASSED or not self._may_be_overtaken(entry, now):
                    return

    def _may_be_overtaken(self, entry: Waiting, now: float) -> bool:
        if entry.refused_at is None:
            entry.refused_at = now
        waited = now - entry.refused_at
        return entry.overtaken < self._limits.max_overtaken and waited < self._limits.max_overtaken_seconds

    def _plan(self, entry: Waiting, budget_tokens: int) -> tuple[SlotPlan, int, int] | None:
        """Its chunk now, room for the rest of its known tokens: slots, hit, new tokens; None if it does not fit."""
        alone = not self._running.seats_taken
        planned = plan_admission(self._cache, self._limits, self._chunks, entry, budget_tokens, alone=alone)
        if isinstance(planned, Refusal):
            self.refusals[planned.reason] += 1
            return None
        return planned

    def _carry_out(self, entry: Waiting, plan: SlotPlan, hit_tokens: int, count: int, builder: StepBuilder) -> int:
        """The request runs from now on; the tokens it hit."""
        request, cache = entry.request, self._cache
        cache.commit(plan)
        request.num_computed_tokens = hit_tokens
        self._running.admit(request, limit_tokens(cache, request), entry.queue_key, last=self._limits.policy == "fcfs")
        builder.add_admitted(request, count, cache.get_blocks(request.request_id), encodes=plan.encodes)
        return hit_tokens
