"""Who comes in: waiting requests in order; one that does not fit lets others pass, within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from hybridkv.cache import KVCacheManager, Reason, Refusal
from hybridkv.request import Request
from hybridkv.schedule.admission import limit_tokens, plan_admission
from hybridkv.schedule.chunks import Chunks
from hybridkv.schedule.draft import Draft
from hybridkv.schedule.limits import SchedulerLimits
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import Waiting, WaitingQueue

_MOST_PASSED: Final = 16  # refused requests that a step looks at: each costs a look-up


class Admitter:
    """Moves requests from ``waiting`` to ``running`` and into the draft of a step. refusals: by reason, so far."""

    def __init__(
        self,
        cache: KVCacheManager,
        limits: SchedulerLimits,
        chunks: Chunks,
        waiting: WaitingQueue,
        running: RunningRows,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._chunks = chunks
        self._waiting = waiting
        self._running = running
        self.refusals: Counter[Reason] = Counter()

    def admit(self, draft: Draft, now: float) -> Iterator[tuple[Request, int]]:
        """Admit while budget, rows and blocks last: each request and the tokens it found in the cache.

        now: seconds. A refused request is passed by those behind it until it was overtaken ``max_overtaken``
        times or has waited ``max_overtaken_seconds`` since it was first refused.
        """
        refused: list[Waiting] = []
        while draft.budget and self._running.seats_taken < self._limits.max_running:
            if len(refused) == len(self._waiting):
                return
            entry = self._waiting[len(refused)]
            hit_tokens = None if entry.unsettled else self._admit_one(entry, draft)
            if hit_tokens is not None:
                self._waiting.pop(len(refused))
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

    def _admit_one(self, entry: Waiting, draft: Draft) -> int | None:
        """Its chunk now, room for the rest of its known tokens: the tokens it hit, None when it does not fit."""
        request, cache, running = entry.request, self._cache, self._running
        planned = plan_admission(cache, self._limits, self._chunks, entry, draft.budget, alone=not running.seats_taken)
        if isinstance(planned, Refusal):
            self.refusals[planned.reason] += 1
            return None
        if planned is None:
            return None
        plan, hit_tokens, count = planned
        cache.commit(plan)
        request.num_computed_tokens = hit_tokens
        running.admit(request, limit_tokens(cache, request), entry.turn, last=self._limits.policy == "fcfs")
        draft.add_admitted(request, count, cache.get_blocks(request.request_id), encodes=plan.encodes)
        return hit_tokens
