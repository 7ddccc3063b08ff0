"""AdmissionControl: decides which waiting requests fit into a step, and begins them.

Branches of running requests come first, then waiting requests in order. A request that does not fit lets others pass,
within limits (docs/design/0007).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import islice
from typing import Final, NamedTuple

from hybridkv.cache import Admission, Hit, KVCacheBlocks, KVCacheManager, Miss, MissReason, Reason, Refusal, SlotPlan
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.request import Request
from hybridkv.schedule.builder import StepBuilder
from hybridkv.schedule.limits import Finished, FinishReason, SchedulerLimits
from hybridkv.schedule.queue import QueueKey, Wait, Waiting, WaitingQueue, WaitReason
from hybridkv.schedule.running import RunningRows
from hybridkv.specs import RequestLimits
from hybridkv.tiers import HostTier
from hybridkv.units import format_bytes

logger = logging.getLogger(__name__)

_MOST_PASSED: Final = 16  # refused requests that a step looks at, each costs a look-up (docs/design/0007)


class _Passed(Enum):
    """Why a step passes over a waiting request: it ended, a tier loads its prefix, or it waits for tokens."""

    ENDED = auto()
    WAITS = auto()
    LOADS = auto()


class ExplainedRequest(NamedTuple):
    """The reasons why a request's prompt was not all in the prefix cache when the request was first admitted.

    Attributes:
        request: the request.
        hit_tokens: tokens of its longest cached prefix.
        misses: spans of the other prompt tokens in order, each with the reason.
    """

    request: Request
    hit_tokens: int
    misses: tuple[Miss, ...]


class Standstill(NamedTuple):
    """The outcome of some equal steps for waiting requests: each step admits no request.

    Attributes:
        refused: number of refusals in each step, by reason.
        takes: blocks by group that would fit now, one tuple for each request that is refused for later needs.
        hits: the remembered hits of all requests that a step looks at.
        since_s: time in seconds of the earliest first refusal among the requests that still let others pass.
    """

    refused: Counter[Reason]
    takes: tuple[tuple[int, ...], ...] = ()
    hits: tuple[Hit, ...] = ()
    since_s: float | None = None


class AdmissionControl:
    """Moves requests from the queue to the running rows, and into a step.

    Attributes:
        prompt_tokens: prompt tokens of all requests, each counted at its first admission.
        hit_tokens: tokens hit of them.
        misses: tokens missed of them by reason, if the cache explains misses.
        refusals: how often a request was refused, by reason.
        explained: requests that the step first admitted, if the cache explains misses. The scheduler clears it.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        running: RunningRows,
        tier: HostTier | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting = waiting
        self.running = running
        self._tier = tier
        self.prompt_tokens = self.hit_tokens = 0
        self.refusals: Counter[Reason] = Counter()
        self.misses: Counter[MissReason] = Counter()
        self.explained: list[ExplainedRequest] = []
        self._bounds = RequestLimits(
            max_model_len=cache.max_model_len,
            max_in_flight_tokens=(limits.max_batched_tokens + limits.num_lookahead_tokens) * limits.max_in_flight,
            dcp=cache.dcp_world_size,
            pcp=cache.pcp_world_size,
        )
        most = self._bounds.max_encoder_tokens
        longest = cache.bounds.peak_blocks(self._bounds, limits.max_in_flight, cache.max_model_len, most)
        self._any_fits = not cache.bounds.reads_encoder and longest <= cache.bounds.guaranteed_blocks
        self._num_passed = 0  # requests that this step passed over
        self._peaks: dict[Request, int] = {}  # the most blocks of each running request

    # -- requests that can never run

    def refuse_impossible(self, request: Request) -> None:
        """Raise ConfigError or CapacityError for a request that could not run even alone."""
        cache = self.cache
        if request.is_lent:
            raise ConfigError(
                f"request {request.request_id!r} uses the token array of another engine: "
                "make a Request with tokens of its own"
            )
        cache.bounds.refuse_stranger(request)
        if request.num_encoder_tokens and not cache.bounds.reads_encoder:
            raise ConfigError(
                f"request {request.request_id!r} has an encoder input, but the model has no cross attention: "
                "remove the input"
            )
        if request.hints.prefetch and request.sampling.n > 1:
            raise ConfigError(
                f"request {request.request_id!r} only brings up its prefix (prefetch), but has {request.sampling.n} "
                "outputs: leave n out"
            )
        if request.row >= 0 or request.num_computed_tokens:
            raise ConfigError(
                f"request {request.request_id!r} runs or has run before: make a new Request of its tokens"
            )
        if request.num_tokens >= cache.max_model_len:
            raise ConfigError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, but the limit is max_model_len - 1, "
                f"{cache.max_model_len - 1}: shorten the prompt or raise max_model_len"
            )
        if self.limits.whole_items:
            self._refuse_items(request)
        if not self._any_fits:
            self._refuse_too_long(request)

    def _refuse_too_long(self, request: Request) -> None:
        """Raise CapacityError for a request that may need more blocks than there are."""
        cache = self.cache
        tokens = self.running.limit_tokens(request) - 1  # the last sampled token is never computed
        needed = self._peak_blocks(request, tokens)
        usable = cache.bounds.guaranteed_blocks
        if needed <= usable:
            return
        unit = cache.config.unit
        unit_bytes = cache.config.unit_bytes
        size = f", {format_bytes((needed + 1) * unit_bytes)} with the null {unit}" if unit_bytes else ""
        raise CapacityError(
            f"request {request.request_id!r} may reach {tokens} tokens, which need {needed} {unit}s{size}, "
            f"but the pool has {usable}: give it more memory, or lower max_tokens"
        )

    def _refuse_items(self, request: Request) -> None:
        """Raise ConfigError for an item that no step runs in one piece: too long, or cut by the last token."""
        most = self.limits.max_batched_tokens
        for item in request.multimodal:
            if item.length > most:
                raise ConfigError(
                    f"request {request.request_id!r}: item {item.id!r} has {item.length} tokens, which must run in one "
                    f"step, but a step has at most {most}: raise max_batched_tokens"
                )
            if item.offset + item.length >= request.num_prompt_tokens:
                raise ConfigError(
                    f"request {request.request_id!r} ends with item {item.id!r}, which must run in one step, but the "
                    "last token of a prompt may run alone: add text after the item"
                )

    def _room_for(self, tokens: int) -> int:
        """Return how many tokens a request needs room for while it computes ``tokens``, drafts included."""
        return max(min(tokens + self.limits.num_lookahead_tokens, self.cache.max_model_len), 1)

    # -- admission to one step

    def admit(self, builder: StepBuilder, now: float, *, room: bool) -> None:
        """Admit requests while budget, rows and blocks last.

        Others may pass a refused request until ``max_overtaken`` of them did, or until ``max_overtaken_seconds`` after
        its first refusal. Branches that do not fit although their parent is ready wait in the queue from now on.

        Args:
            builder: the step.
            now: seconds.
            room: whether the step may admit any request; a step that preempted one may not.
        """
        if self.waiting.families:
            self._admit_branches(builder, room=room)
        if room:
            self._admit_waiting(builder, now)

    def _admit_branches(self, builder: StepBuilder, *, room: bool) -> None:
        """Admit the children of every parent that is ready."""
        ready = self.waiting.parents(self.running.requests)  # sorted, so it is a heap
        while ready:
            _, parent = heappop(ready)
            computed, known = parent.num_computed_tokens, parent.num_tokens
            if self.running.steps[parent.row] or computed < known - 1:
                continue
            late: list[Waiting] = []
            for child in self.waiting.take_children(parent):
                entry = self.waiting.entry(child)
                fits = room and not late and child.num_tokens == known and computed == known - 1
                if not (fits and self._admit_branch(parent, entry, builder)):
                    late.append(entry)
                elif (family := self.waiting.families.get(child.request_id)) is not None:
                    heappush(ready, (family.order, child))
            self.waiting.return_to_front(late)

    def _admit_branch(self, parent: Request, entry: Waiting, builder: StepBuilder) -> bool:
        """Give a child a row that shares its parent's blocks, and its one token; return whether it fits."""
        if not builder.left or not self.running.seats_free:
            return False
        plan = self._plan(entry.request, *self.cache.engine.blocks_to_share(parent), builder, alone=False)
        if not isinstance(plan, SlotPlan):
            return False
        self._begin(plan, entry.queue_key, builder)
        return True

    def _admit_waiting(self, builder: StepBuilder, now: float) -> None:
        refused, ahead = list[Waiting](), list[Request]()  # ahead: those that the step passes over
        with closing(self.waiting.in_order()) as entries:
            while builder.left and self.running.seats_free:
                entry = next(entries, None)
                if entry is None:
                    break
                plan = self._look(entry, builder, now)
                if plan is _Passed.ENDED:
                    continue
                if plan is _Passed.WAITS or plan is _Passed.LOADS:
                    ahead.append(entry.request)
                    if not self._passes(entry, now, loads=plan is _Passed.LOADS):
                        break
                    continue
                if plan is not None:
                    self._begin(plan, entry.queue_key, builder)
                    self.waiting.remove(entry.request)
                    for other in refused:
                        other.overtaken += 1
                    if not all(self._may_be_overtaken(other, now) for other in refused):
                        break
                    continue
                refused.append(entry)
                ahead.append(entry.request)
                if not self._passes(entry, now, lacks_memory=True):
                    break
            else:
                self._look_ahead(entries, ahead)
        self._num_passed = 0

    def _look_ahead(self, entries: Iterator[Waiting], ahead: list[Request]) -> None:
        """Begin transfers for the next requests of a step that has no tokens or rows left for them.

        ahead: requests before them that have not begun. All must fit, so that no transfer evicts what another one
        brought.
        """
        if self._tier is None:
            return
        left = self._left_by_running() - sum(self._peak_blocks(one, one.num_tokens) for one in ahead)
        for entry in islice(entries, self._tier.limits.max_ahead):
            left -= self._peak_blocks(entry.request, entry.request.num_tokens)
            if left < 0:
                break
            if not entry.in_flight_steps:
                with suppress(Exception):  # the request ends with the error when it is its turn
                    self._ask_tier(entry, self._hit(entry))

    def _left_by_running(self) -> int:
        """Return the blocks that are left if each running request reaches its last token. O(running).

        Memory that a load holds would otherwise preempt a request, perhaps the last one that runs.
        """
        running, known = self.running, self._peaks
        self._peaks = {
            one: known.get(one) or self._peak_blocks(one, running.limit_tokens(one) - 1) for one in running.requests
        }
        return self.cache.bounds.guaranteed_blocks - sum(self._peaks.values())

    def _peak_blocks(self, request: Request, tokens: int) -> int:
        """Return the most blocks that a request holds while it computes so many tokens."""
        most, room = self.limits.max_in_flight, self._room_for(tokens)
        return self.cache.bounds.peak_blocks(self._bounds, most, room, request.num_encoder_tokens)

    def _look(self, entry: Waiting, builder: StepBuilder, now: float) -> SlotPlan | _Passed | None:
        """Return the plan of a waiting request's first chunk; ``None`` while it does not fit; or why it is passed."""
        request = entry.request
        try:
            if entry.in_flight_steps:
                return None
            hit = self._hit(entry)
            if self._ask_tier(entry, hit):
                return _Passed.LOADS
            if request.hints.prefetch:
                self._end_prefetch(request, hit)
                return _Passed.ENDED
            if builder.short_tokens:  # some of the tokens left may be reserved for shorter requests
                if not self._may_be_overtaken(entry, now):
                    builder.reserve_nothing()
                if not builder.room_for(request.num_tokens - hit.tokens):
                    return _Passed.WAITS
            return self._plan_after_hit(entry, hit, builder)
        except Exception as error:  # noqa: BLE001 - planning changes nothing, so only this request must end
            self.running.end([Finished(request, FinishReason.ERROR, error)])
            return _Passed.ENDED

    def _ask_tier(self, entry: Waiting, hit: Hit) -> bool:
        """Return whether a waiting request waits for more of its prefix, and begin to bring that up."""
        if self._tier is None:
            return False
        entry.loads = self._tier.waits(entry.request, hit)
        if entry.loads:
            entry.lacked = None  # it is not refused now
        return entry.loads

    def _end_prefetch(self, request: Request, hit: Hit) -> None:
        """End a request that only brings up its prefix: nothing more of it comes up."""
        request.first_hit_tokens = min(hit.tokens, request.num_prompt_tokens)
        if self._tier is not None:
            self._tier.begins(request)
        self.running.end([Finished(request, FinishReason.LENGTH)])

    def _passes(self, entry: Waiting, now: float, *, lacks_memory: bool = False, loads: bool = False) -> bool:
        """Pass over ``entry``; return whether the step looks at the entries after it.

        If ``entry`` lacks memory, its patience is measured from ``now``, the time of its first refusal. While a tier
        ``loads`` its prefix, others begin, whatever passed it before: nothing else would run.
        """
        self._num_passed += 1
        if self._num_passed == _MOST_PASSED:  # the step ends at the last one
            return False
        if lacks_memory and entry.refused_at is None:
            entry.refused_at = now
        return loads or self._may_be_overtaken(entry, now)

    def _may_be_overtaken(self, entry: Waiting, now: float) -> bool:
        waited = 0 if entry.refused_at is None else now - entry.refused_at
        return entry.overtaken < self.limits.max_overtaken and waited < self.limits.max_overtaken_seconds

    def count_short(self, builder: StepBuilder, now: float) -> int:
        """Return the tokens of short waiting requests that fit and may go first, at most ``builder.short_left``.

        Looks at entries in order, after the one that the step looks at. The only side effect is that hits are
        remembered.
        """
        kept, seats, passed = 0, self.running.seats_free, self._num_passed
        if not seats:
            return 0
        with closing(self.waiting.in_order()) as entries:
            for entry in entries:
                tokens = self._short_tokens(entry, builder, builder.short_left - kept)
                if tokens:
                    kept, seats = kept + tokens, seats - 1
                    if kept == builder.short_left or not seats:
                        break
                    continue
                passed += 1
                if passed == _MOST_PASSED or not self._may_be_overtaken(entry, now):
                    break
        return kept

    def _short_tokens(self, entry: Waiting, builder: StepBuilder, most: int) -> int:
        """Return the tokens with which ``entry`` begins if it fits and computes at most ``most``; else 0."""
        if entry.in_flight_steps or entry.request.hints.prefetch:
            return 0
        try:
            hit, request = self._hit(entry), entry.request
            if request.num_tokens - hit.tokens > most:
                return 0
            alone = not self.running.seats_taken
            plan = self._plan(request, hit, hit.tokens, builder, alone=alone)
        except Exception:  # noqa: BLE001 - the request ends with this error when it is its turn
            return 0
        return plan.certain_tokens - plan.hit_tokens if isinstance(plan, SlotPlan) else 0

    # -- admission to a fast-forward

    def standstill(self, builder: StepBuilder, now: float) -> Standstill | None:
        """Return the outcome of the next step for waiting requests; ``None`` if it may admit one.

        It holds for later steps, too, while the cache's ``fast_forward.refuses`` confirms it. It is unknown, so
        ``None``, if the step must look a request up. Changes nothing. builder: has the tokens that are left to waiting
        requests.
        """
        refused, takes, hits, since = Counter[Reason](), list[tuple[int, ...]](), list[Hit](), list[float]()
        if not (builder.left and len(self.waiting) and self.running.seats_free):
            return Standstill(refused)
        with closing(self.waiting.in_order()) as entries:
            for looked, entry in enumerate(entries, 1):
                hit, request = entry.hit, entry.request
                if hit is None or entry.refused_at is None or entry.in_flight_steps:
                    return None
                if not self.cache.is_longest_hit(request, hit):
                    return None
                hits.append(hit)
                if not self._may_be_overtaken(entry, now):
                    builder.reserve_nothing()
                self._num_passed = looked - 1  # as in the step itself, because count_short depends on it
                try:
                    plan = self._plan(request, hit, hit.tokens, builder, alone=False)
                finally:
                    self._num_passed = 0
                if plan is not None:
                    if isinstance(plan, SlotPlan) or plan.reason not in {Reason.NO_SPACE, Reason.ADMISSION_LIMIT}:
                        return None
                    refused[plan.reason] += 1
                    takes += [plan.takes] if plan.takes else []
                if looked == _MOST_PASSED or not self._may_be_overtaken(entry, now):
                    break
                since.append(entry.refused_at)
        return Standstill(refused, tuple(takes), tuple(hits), min(since, default=None))

    # -- answers

    def waits(self) -> list[Wait]:
        """Return queued requests in order, then branches that wait for their parents, with reasons. O(n log n)."""
        seat = self.running.seats_free > 0
        queued = [Wait(entry.request, _why(entry, seat=seat)) for entry in self.waiting.entries()]
        return queued + [Wait(child, WaitReason.PARENT) for child in self.waiting.branches()]

    # -- one request

    def _hit(self, entry: Waiting) -> Hit:
        """Return the longest cached prefix of a waiting request; ``entry`` remembers it until it may have changed."""
        cache, request = self.cache, entry.request
        if entry.hit is None or not cache.is_longest_hit(request, entry.hit):
            entry.hit = cache.look_up(request)
            request.branch_tokens = entry.hit.branch_tokens
        return entry.hit

    def _plan_after_hit(self, entry: Waiting, hit: Hit, builder: StepBuilder) -> SlotPlan | None:
        """Plan the first chunk of a waiting request after ``hit``; ``None`` while it does not fit."""
        request, alone = entry.request, not self.running.seats_taken
        plan = self._plan(request, hit, hit.tokens, builder, alone=alone)
        if isinstance(plan, Refusal) and alone and any(hit.sources):  # blocks to copy from may take the copies' room
            plan = self._plan(request, None, 0, builder, alone=alone)
        if isinstance(plan, Refusal):
            entry.lacked = plan.reason
            self.refusals[plan.reason] += 1
            return None
        entry.lacked = None
        return plan

    def _plan(
        self, request: Request, hit: KVCacheBlocks | Hit | None, hit_tokens: int, builder: StepBuilder, *, alone: bool
    ) -> SlotPlan | Refusal | None:
        """Plan slots for the first chunk of ``request`` after ``hit``; ``None`` if the step has too few tokens left.

        All its known tokens must fit, so that it is not preempted at once. Unless it is ``alone``, the watermark must
        stay free, too.
        """
        cache, limits = self.cache, self.limits
        count = builder.first_chunk(request, hit_tokens)
        if not count:
            return None
        plan = cache.plan_slots(
            request,
            count,
            hit_tokens,
            hit,
            num_lookahead_tokens=limits.num_lookahead_tokens,
            num_encoder_tokens=request.num_encoder_tokens,
            admission=Admission(
                self._bounds,
                limits.max_in_flight,
                0 if alone else int(limits.watermark * cache.bounds.usable_blocks),
                tokens=self._room_for(request.num_tokens),
                encoder_tokens=request.num_encoder_tokens,
            ),
        )
        if isinstance(plan, Refusal):
            logger.debug("request %r is not admitted: %s", request.request_id, plan)
        return plan

    def _begin(self, plan: SlotPlan, queue_key: QueueKey, builder: StepBuilder) -> None:
        """Commit ``plan``: its request runs from now on."""
        request = plan.request
        if self.cache.misses is None:
            self.cache.commit(plan)
        else:
            self._explain(plan)
            with self.cache.misses.evicting_for(request):
                self.cache.commit(plan)
        request.num_computed_tokens = plan.hit_tokens
        if self._tier is not None:
            self._tier.begins(request)
        self.running.admit(request, queue_key)
        builder.add_admitted(plan)
        if request.first_hit_tokens is None:
            request.first_hit_tokens = plan.hit_tokens
            self.prompt_tokens += request.num_prompt_tokens
            self.hit_tokens += min(plan.hit_tokens, request.num_prompt_tokens)

    def _explain(self, plan: SlotPlan) -> None:
        """Record the reasons for misses, before blocks are evicted for the request of ``plan``."""
        cache, request = self.cache, plan.request
        if request.first_hit_tokens is None:
            misses = cache.explain(request, plan.hit_tokens)
            for miss in misses:
                self.misses[miss.reason] += miss.tokens
            self.explained.append(ExplainedRequest(request, plan.hit_tokens, misses))


def _why(entry: Waiting, *, seat: bool) -> WaitReason:
    """Return why ``entry`` waits. seat: whether a row is free."""
    if entry.in_flight_steps:
        return WaitReason.IN_FLIGHT
    if not seat:
        return WaitReason.SEATS
    if entry.loads:
        return WaitReason.PREFIX_LOADING
    return WaitReason.TURN if entry.lacked is None else WaitReason(entry.lacked)
