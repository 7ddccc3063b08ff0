"""Scheduler: decides which requests run in the next Step, and applies the result of each Step.

A request, and the Steps that run it:

    add() -> queued --admitted--> running -------- stop token, length, abort, finish() --------> finished
               ^                     |
               '---- preempted, or a Step of it failed: keeps its tokens, 0 of them computed

    schedule()   running requests get tokens and blocks, then queued ones are admitted
       |         StepBuilder.freeze() -> Step; its tokens count as computed from here on
    in flight    at most max_in_flight Steps; the worker executes them in order
       |
       +-- update(result)   its blocks are written and can be hit; sampled tokens are appended
       |                      running   -> continues, or finishes and frees its row
       |                      preempted -> the token is appended while the request waits
       |                      aborted   -> the token is dropped; the last Step in flight frees the row
       |
       '-- fail(step_id)    this Step and all later ones: their blocks cannot be hit any longer, and
                            their requests return to the front of the queue

A Step's token budget goes to running requests first, in order of admission or of priority, then to waiting ones. Within
a share of the budget, short requests go before long prompts (StepBuilder). When blocks run out, the last running
request in that order is preempted: it frees all its blocks and waits at the front of the queue, or at the place of its
priority. A Step that preempted a request admits no other. A waiting request that does not fit lets others pass, within
the limits max_overtaken and max_overtaken_seconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import instance, integer
from hybridkv.cache import KVCacheManager, Reason, RowSpans
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import MOST_OUTPUTS, Request
from hybridkv.schedule.admission import AdmissionControl, ExplainedRequest
from hybridkv.schedule.builder import Speculation, StepBuilder, check_drafts, split_of
from hybridkv.schedule.fast_forward import NO_STEPS, Choose, FastForward, FastForwardClock, advance_uniform
from hybridkv.schedule.limits import Finished, FinishReason, Outcome, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.queue import Wait, WaitingQueue, WaitReason, branches_of
from hybridkv.schedule.running import InFlight, RunningRows, check_result
from hybridkv.spec_fields import Feature, require_supported
from hybridkv.step import Step, StepResult
from hybridkv.tiers import HostTier
from hybridkv.units import MOST_COUNT, shown

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]


class Scheduler:
    """Schedules requests over one KVCacheManager. No other code may change that cache.

    The first thread that schedules owns the scheduler; another thread that schedules gets OwnershipError. ``add``,
    ``abort`` and ``statistics`` may come from any thread. A request to add or abort takes effect at the owner's next
    call.

    Args:
        cache: the cache to schedule over.
        limits: bounds of a step; ``SchedulerLimits()`` by default.
        clock: returns seconds; it measures how long a waiting request lets others pass.
        tier: the host tier of ``cache``; ``None`` without one.

    Raises:
        ConfigError: an argument has another type, the tier belongs to another cache, or the cache cannot keep states of
            num_speculative_tokens drafts.
        UnsupportedModelError: a window is computed again after a hit (``bounded_replay``).
    """

    def __init__(
        self,
        cache: KVCacheManager,
        limits: SchedulerLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        tier: HostTier | None = None,
    ) -> None:
        self.cache = instance("cache", cache, KVCacheManager)
        specs = (group.spec for group in cache.config.groups)
        require_supported(specs, "the scheduler", set(Feature) - {Feature.REPLAY})
        self.limits = SchedulerLimits() if limits is None else instance("limits", limits, SchedulerLimits)
        self._clock = clock
        if tier is not None and instance("tier", tier, HostTier).device is not cache:
            raise ConfigError("the tier belongs to another cache: construct the HostTier with this one")
        self._tier = tier
        self._waiting = WaitingQueue(self.limits.policy, cache, shares_in_part=cache.bounds.shares_in_part)
        self._running = RunningRows(cache, self.limits, self._waiting, max_rows=self.max_rows)
        self._admission = AdmissionControl(cache, self.limits, self._waiting, self._running, tier)
        self._split = split_of(cache, self.limits, None)
        self._split_with_branches = split_of(cache, self.limits, self._waiting.families)
        share = self.limits.short_share_of(follows_vllm=cache.bounds.follows_vllm)
        self._short_tokens = int(share * self.limits.max_batched_tokens)
        self._speculation = (
            Speculation(cache, self._running, self.limits) if self.limits.num_speculative_tokens else None
        )
        self._in_flight: deque[InFlight] = deque()
        self._next_id = 0
        self._after = -1
        self._computed_tokens = 0
        self._peak_usage = 0.0

    # -- from any thread

    def add(self, request: Request) -> tuple[Request, ...]:
        """Queue ``request`` from the owner's next call on. Any thread may call it.

        Args:
            request: a new request, with the hasher of this cache. ``sampling.n`` above 1 adds branches of it, which
                share its prompt.

        Returns:
            The branches, ``sampling.n - 1`` of them.

        Raises:
            ConfigError: the request can never run: it has another hasher, an id in use, or max_model_len tokens or
                more.
            CapacityError: the pool is too small for this request even alone.
        """
        if type(request) is not Request:
            instance("request", request, Request)
        self._admission.refuse_impossible(request)
        branches = branches_of(request, request.sampling.n - 1)
        self._waiting.arrive(request, branches)
        return branches

    def fork(self, parent_id: str, n: int) -> tuple[Request, ...]:
        """Add ``n`` requests that continue from the tokens of a queued or running request, each with its own seed.

        Their ids are PARENT#1, PARENT#2, ... In the natural layout, children of a running parent share its full blocks,
        and get copies of its partial block and its state. Otherwise they use the prefix cache like other requests. Only
        the owner's thread may call it.

        Args:
            parent_id: id of the request to continue from.
            n: number of children, 1 or more.

        Returns:
            The children, in order of their ids.

        Raises:
            ConfigError: no request has this id, ``n`` is below 1, or a child's id is in use.
        """
        self._waiting.claim()
        integer("n", n, 1, MOST_OUTPUTS)
        self._empty_inbox()
        parent = self._waiting.find(instance("parent_id", parent_id, str))
        if parent is None:
            raise ConfigError(f"cannot fork {parent_id!r}, which does not wait or run: name a request that does")
        children = branches_of(parent, n)
        self._waiting.know(children)
        self._waiting.add_children(parent, children)
        return children

    def abort(self, request_id: str) -> bool:
        """End a request at any moment. Any thread may call it; the tokens that it computed stay cached.

        Its blocks are freed at once, or after the update of the last Step in flight that uses them.

        Args:
            request_id: id of the request.

        Returns:
            Whether a request with this id is queued or running.
        """
        if not self._waiting.abort(instance("request_id", request_id, str)):
            logger.info("abort of %r: no such request", request_id)
            return False
        if self._waiting.is_owner:
            self._empty_inbox()
        return True

    def statistics(self) -> SchedulerStatistics:
        """Return the counts since construction. Any thread may call it."""
        speculation, admission, running = self._speculation, self._admission, self._running
        return SchedulerStatistics(
            steps=self._next_id,
            waiting=self.num_waiting,
            running=self.num_running,
            requests_finished=running.num_finished,
            preemptions=running.num_preempted,
            failed_steps=running.failed_steps,
            prompt_tokens=admission.prompt_tokens,
            hit_tokens=admission.hit_tokens,
            computed_tokens=self._computed_tokens,
            peak_usage=self._peak_usage,
            drafted_by_position=() if speculation is None else tuple(speculation.drafted.tolist()),
            accepted_by_position=() if speculation is None else tuple(speculation.accepted.tolist()),
            refusals={str(reason): count for reason, count in admission.refusals.items()},
            misses={str(reason): count for reason, count in sorted(admission.misses.items())},
        )

    # -- answers

    @property
    def explained(self) -> tuple[ExplainedRequest, ...]:
        """Requests that the last ``schedule()`` admitted for the first time, with the reasons for their misses.

        Empty unless the cache was constructed with ``remembered_losses``. Show the reasons only to operators, because
        they may reveal which prompts other tenants cached.
        """
        return tuple(self._admission.explained)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, the ones just added included."""
        return self._waiting.num_all

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running.requests)

    def running_requests(self) -> tuple[Request, ...]:
        """Return the running requests in order. Only the owner's thread may call it."""
        self._waiting.claim()
        return self._running.requests

    def waits(self) -> list[Wait]:
        """Return the queued requests in order, branches last, each with the reason why it waits.

        Only the owner's thread may call it. O(waiting * log waiting).
        """
        self._waiting.claim()
        arriving = [Wait(request, WaitReason.ARRIVED) for request in self._waiting.arriving()]
        return self._admission.waits() + arriving

    @property
    def prompt_tokens_found(self) -> tuple[int, int]:
        """Prompt tokens of all requests admitted so far, and the number of them that were hit."""
        return self._admission.prompt_tokens, self._admission.hit_tokens

    @property
    def max_rows(self) -> int:
        """Rows that the worker's tables need: those of running requests, and those that loads of a tier hold."""
        return self.limits.max_running + (0 if self._tier is None else self._tier.limits.max_loads)

    @property
    def num_in_flight(self) -> int:
        """Number of Steps that wait for their results."""
        return len(self._in_flight)

    @property
    def drained(self) -> bool:
        """Whether no request is queued, runs or holds blocks.

        Steps may still be in flight then. Pass their results to ``update`` before you schedule more.
        """
        return self._waiting.is_idle and not self._running.seats_taken

    @property
    def waits_for_drafts(self) -> bool:
        """Whether the next Step is empty until a result arrives, as all running requests have drafts in flight.

        O(running).
        """
        running = self._running
        return bool(running.requests) and not self.num_waiting and bool(running.num_drafts[running.order].all())

    # -- schedule

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Propose draft tokens for running requests; the Step of the next ``schedule()`` verifies them. O(drafts).

        Drafts are ignored for a request that does not run, has more than its last token to compute, or waits for a
        result. Drafts are cut to the first of these limits: num_speculative_tokens, the tokens that the request may
        still have (one token is sampled after the drafts), the budget of the Step, and free blocks. No request is
        preempted for drafts. Only the owner's thread may call it.

        Args:
            drafts: draft tokens in order, by request id.

        Raises:
            ConfigError: a value is not a list of token ids. No draft is proposed then.
        """
        self._waiting.claim()
        check_drafts(drafts)
        if self._speculation is not None:
            self._speculation.propose(drafts, self._waiting.find)

    def schedule(self) -> Step:
        """Return the next Step, which is empty if no request can run.

        Pass its result to ``update``, or its error to ``fail``.

        Raises:
            CacheError: max_in_flight Steps wait for their results.
            OwnershipError: another thread owns this scheduler.
        """
        self._waiting.claim()
        if len(self._in_flight) >= self.limits.max_in_flight:
            raise CacheError(
                f"{len(self._in_flight)} steps are in flight, the most that max_in_flight allows: "
                "update or fail the oldest first"
            )
        now = self._clock()
        self._empty_inbox()
        self._admission.explained.clear()
        builder = self._builder(now)
        try:
            with self.cache.step(self._next_id):
                if self._tier is not None:
                    self._tier.store(self._next_id)
                preempted = self._schedule_running(builder)
                if not self._waiting.is_idle:
                    self._admission.admit(builder, now, room=not preempted)
                # Only now does every row have its blocks, including those for the states that it passes.
                spans = builder.spans()
                self.cache.store_checkpoints(spans.rows, spans.computed, spans.computed + spans.certain)
        finally:
            if self._speculation is not None:
                self._speculation.forget()
        self._peak_usage = max(self._peak_usage, self.cache.usage)
        return self._issue(builder, spans)

    def _builder(self, now: float, taken: int = 0) -> StepBuilder:
        """Return a builder for a Step that begins at ``now`` seconds. taken: tokens of its budget that others have."""
        return StepBuilder(
            self.limits.max_batched_tokens - taken,
            self.cache,
            self._split_with_branches if self._waiting.families else self._split,
            short_tokens=self._short_tokens,
            count_short=lambda builder: self._admission.count_short(builder, now),
        )

    def _schedule_running(self, builder: StepBuilder) -> bool:
        """Give running requests their tokens and blocks; return whether one had to be preempted."""
        if not self._running.requests:
            return False
        preempted, start = False, 0
        parents = self._waiting.parents(self._running.requests) if self._waiting.families else []
        held = [parent.row for _, parent in parents if self._running.steps[parent.row]]  # a fork waits for its steps
        speculation = self._speculation
        while True:
            rows = self._running.order[start:]
            shares = builder.shares(rows, self._wanted(rows, held))
            if np.count_nonzero(shares) < len(shares):
                some = shares.nonzero()[0]
                places, rows, shares = some + start, rows[some], shares[some]
            else:
                places = None
            num_drafts = None if speculation is None else speculation.room(rows, shares, builder)
            counts = shares if num_drafts is None else shares + num_drafts
            slots = self.cache.allocate_batch(rows, counts, self.limits.num_lookahead_tokens)
            done = slots.accepted
            if done:
                drafts = None
                if speculation is not None and num_drafts is not None:
                    drafts = speculation.tokens_of(rows[:done], num_drafts[:done])
                builder.add_running(rows[:done], counts[:done], slots, drafts)
            if done == len(rows):
                return preempted
            start = start + done if places is None else int(places[done])
            if speculation is not None and num_drafts is not None and num_drafts[done]:
                speculation.drop(rows.item(done))  # no request is preempted for drafts
                continue
            if slots.reason is Reason.FRAGMENTED:
                start += 1  # its blocks need moves that this step may not make: the row waits for the next one
                continue
            self._running.preempt_last(self._in_flight)
            builder.reserve_nothing()
            preempted = True

    def _wanted(self, rows: Int64, held: list[int]) -> Int64:
        """Return how many tokens each of ``rows`` has left to run, without drafts. held: rows that must wait."""
        running, columns = self._running, self.cache.rows
        known = columns.num_tokens[rows] + running.pending[rows]
        wanted: Int64 = np.minimum(known, running.limit[rows] - 1) - columns.num_computed[rows]
        if self.limits.num_speculative_tokens:
            wanted[running.num_drafts[rows] > 0] = 0
        if held:
            wanted[np.isin(rows, held)] = 0
        return wanted

    def _issue(self, builder: StepBuilder, spans: RowSpans) -> Step:
        """Freeze the builder's rows into a Step, and record that it is in flight."""
        rows, transfers = spans.rows, self.cache.fields.take_transfers()
        if self._tier is not None and not len(rows):
            self._tier.rest()
        step = builder.freeze(
            self._next_id,
            self._after,
            spans,
            pending=self._running.pending,
            ended_rows=self._running.take_ended_rows(),
            transfers=transfers,
            tier=None if self._tier is None else self._tier.take(),
        )
        self.cache.rows.num_computed[rows] += step.num_scheduled
        self.cache.rows.in_flight[rows] += step.num_scheduled
        drafts = step.drafts
        flight = InFlight(
            step,
            rows,
            self._requests_of(rows),
            transfers.moved,
            np.diff(drafts.indptr) if len(drafts.values) else None,
            np.ones(len(rows), np.bool_),
        )
        self._running.schedule(flight)
        if self._speculation is not None:
            self.cache.fields.forget_accepted(rows)
        self._in_flight.append(flight)
        self._after = self._next_id
        self._next_id += 1
        return step

    def _requests_of(self, rows: Int64) -> tuple[Request, ...]:
        order = self._running.order
        if len(rows) == len(order) and not np.count_nonzero(rows != order):
            return self._running.requests
        owners = self.cache.rows.requests
        return tuple(request for request in map(owners.__getitem__, rows.tolist()) if request is not None)

    # -- update

    def update(self, result: StepResult) -> Outcome:
        """Apply the result of the oldest Step in flight: mark its blocks as written and append the sampled tokens.

        Args:
            result: the tokens that the worker sampled, with the id of that Step.

        Returns:
            The tokens appended to each request, and the requests that ended since the previous update.

        Raises:
            WorkerError: the result does not fit that Step. The scheduler is unchanged.
            CacheError: no Step is in flight.
        """
        self._waiting.claim()
        if type(result) is not StepResult:
            instance("result", result, StepResult)
        if not self._in_flight:
            raise CacheError(f"got the result of step {result.id}, but no step is in flight: schedule a step first")
        flight = self._in_flight[0]
        check_result(flight.step, result)
        if self._tier is not None:
            self._tier.check_result(result)
        self._in_flight.popleft()
        self.cache.mark_written(flight.step.id)
        if self._tier is not None:
            self._tier.settle(flight.step, result)
        self._computed_tokens += len(flight.step.token_ids.values)
        if self._speculation is not None:
            self._speculation.verify(flight.num_drafts, result.num_accepted)
        appended = self._running.append(flight, result.sampled)
        if self._running.num_dead:
            self._running.free_dead(flight)
        self._empty_inbox()
        return Outcome(flight.step.id, flight.requests, appended, self._running.take_finished())

    def take_finished(self) -> tuple[Finished, ...]:
        """Return the requests that ended since the last update or call: by ``abort``, or by ``finish``.

        Only the owner's thread may call it, because each ended request is returned once.
        """
        self._waiting.claim()
        return self._running.take_finished()

    def finish(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> bool:
        """End a request for a reason that only the caller sees, for example a stop string.

        Args:
            request_id: id of the request.
            reason: the reason to report in ``Finished``.

        Returns:
            Whether a request with this id was queued or running.

        Raises:
            ConfigError: an argument has another type.
        """
        self._waiting.claim()
        instance("reason", reason, FinishReason)
        self._empty_inbox()
        request = self._waiting.find(instance("request_id", request_id, str))
        if request is None:
            return False
        self._running.end([Finished(request, reason)])
        return True

    # -- fast-forward

    def fast_forward(self, choose: Choose, times: FastForwardClock | None = None) -> FastForward:
        """Take uniform steps at once, for callers that know the sampled tokens beforehand. No Step is made.

        A step is uniform if every running request computes one token and samples one, no request is admitted or
        preempted, and each waiting request is refused for the same reason. Requests may end in the last step. The
        effect is that of schedule() and update() for each step.

        Args:
            choose: returns the sampled tokens; called once, if the next step is uniform. It must not call the
                scheduler.
            times: called as steps begin and when the last one ends, so that your clock shows their times. The cache
                dates resume points by that clock.

        Returns:
            The steps taken: zero if the next step is not uniform or ``choose`` returned no column. A step that moves or
            copies blocks is the last one, so fewer steps than chosen may be taken.

        Raises:
            ConfigError: the chosen tokens have another shape or dtype.
        """
        self._waiting.claim()
        self._empty_inbox()
        if self._in_flight or (self._tier is not None and not (self._tier.is_idle and self._waiting.is_idle)):
            return NO_STEPS
        now = self._clock()
        builder = self._builder(now, taken=len(self._running.requests))
        taken = advance_uniform(self._admission, choose, times, builder, now)
        if taken.steps:
            self._next_id += taken.steps
            self._after = self._next_id - 1
            self._computed_tokens += taken.steps * taken.rows
            self._peak_usage = max(self._peak_usage, taken.peak_usage)
        return taken

    # -- failure

    def fail(self, step_id: int, error: BaseException | str) -> None:
        """Give up Step ``step_id`` and every later one in flight, because they brought no result.

        Blocks that these Steps should have written can no longer be hit. Their requests return to the front of the
        queue in order, with 0 computed tokens.

        Args:
            step_id: the first Step that failed.
            error: the cause, which is logged.

        Raises:
            CacheError: this Step is not in flight.
            ConfigError: an argument has another type.
        """
        self._waiting.claim()
        integer("step_id", step_id, most=MOST_COUNT)
        if not isinstance(error, BaseException | str):
            raise ConfigError(f"error must be an exception or a message, got {shown(error)}")
        failed = [flight for flight in self._in_flight if flight.step.id >= step_id]
        if not failed or failed[0].step.id != step_id:
            raise CacheError(f"step {step_id} is not in flight: fail only a step that waits for its result")
        logger.warning("step %d and %d after it failed: %r", step_id, len(failed) - 1, error)
        for _ in failed:
            self._in_flight.pop()
        self._after = failed[0].step.after
        if self._tier is not None:
            self._tier.fail(step_id)
        self._running.take_back(failed, self._in_flight)
        self._empty_inbox()

    # -- invariants

    def check(self) -> None:
        """Check all invariants: those of the cache, of running rows and of the queue. O(blocks + keys).

        Raises:
            CacheError: an invariant does not hold.
        """
        self.cache.check()
        if self._tier is not None:
            self._tier.check()
        self._running.check(self._in_flight, others=frozenset() if self._tier is None else self._tier.rows)
        self._waiting.check(self._running.requests)

    # -- arrivals

    def _empty_inbox(self) -> None:
        """Queue the requests that arrived, and end the requests to abort."""
        if self._waiting.arrivals:
            self._running.end(Finished(request, FinishReason.ABORT) for request in self._waiting.take_arrivals())
