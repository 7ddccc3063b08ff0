"""Scheduler: what runs next. One Step a call, and one update for each Step.

    add -> waiting --admission--> running --stop, length--> finished
              ^                      |
              +---- preempted <------+          a failed step sends its requests back to waiting, too

A step's budget goes to running requests first, in order of admission (or of priority), then to waiting
ones; within a share of it, short work goes ahead of long prompts (StepBuilder). When blocks run out, the last
in that order gives all of its back and waits at the front (or at its place); a step that preempted admits
nobody. One that does not fit lets others pass for a while.
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
from hybridkv.step import Step, StepResult
from hybridkv.units import MOST_COUNT, shown

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]


class Scheduler:
    """Decides over one KVCacheManager, which it alone may drive.

    One thread owns it: the first that schedules. ``add``, ``abort`` and ``statistics`` may come from any
    thread; what they ask for takes effect at the owner's next call. Another thread that schedules gets
    OwnershipError. clock: seconds, for how long a request may be overtaken.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        limits: SchedulerLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = instance("cache", cache, KVCacheManager)
        self.limits = SchedulerLimits() if limits is None else instance("limits", limits, SchedulerLimits)
        self._clock = clock
        self._waiting = WaitingQueue(self.limits.policy, cache, shares_in_part=cache.bounds.shares_in_part)
        self._running = RunningRows(cache, self.limits, self._waiting)
        self._admission = AdmissionControl(cache, self.limits, self._waiting, self._running)
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
        """``request`` joins the queue at the owner's next call; its branches, one less than ``sampling.n``.

        ConfigError if it can never run: hashed by another hasher, an id in use, a prompt as long as
        max_model_len; CapacityError if the pool is too small for it alone.
        """
        if type(request) is not Request:
            instance("request", request, Request)
        self._admission.refuse_impossible(request)
        branches = branches_of(request, request.sampling.n - 1)
        self._waiting.arrive(request, branches)
        return branches

    def fork(self, parent_id: str, n: int) -> tuple[Request, ...]:
        """``n`` new requests that go on from the tokens of a request which waits or runs, by seeds of their own.

        Their ids are PARENT#1, PARENT#2, ... In the natural layout a running parent's blocks are shared: full ones
        as they are, its last one and its state copied; else they find what is cached. By the owner's thread only.
        ConfigError for an unknown parent, n below 1 or an id in use.
        """
        self._waiting.claim()
        integer("n", n, 1, MOST_OUTPUTS)
        self._empty_inbox()
        parent = self._waiting.find(instance("parent_id", parent_id, str))
        if parent is None:
            raise ConfigError(f"cannot fork {parent_id!r}: name a request that waits or runs")
        children = branches_of(parent, n)
        self._waiting.know(children)
        self._waiting.add_children(parent, children)
        return children

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; what it wrote stays cached. False for an id that is not here.

        Its blocks return at once, or after the update of the last step in flight that holds them.
        """
        if not self._waiting.abort(instance("request_id", request_id, str)):
            logger.info("abort of %r: no such request", request_id)
            return False
        if self._waiting.is_owner:
            self._empty_inbox()
        return True

    def statistics(self) -> SchedulerStatistics:
        """Counts so far."""
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

        Empty unless the cache was constructed with ``remembered_losses``. A reason may tell what other tenants hold,
        so show it to operators alone.
        """
        return tuple(self._admission.explained)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those just added among them."""
        return self._waiting.num_all

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running.requests)

    def running_requests(self) -> tuple[Request, ...]:
        """Who runs, in order. By the owner's thread only."""
        self._waiting.claim()
        return self._running.requests

    def waits(self) -> list[Wait]:
        """Who waits, in order, branches last, and why. By the owner's thread only. O(waiting * log waiting)."""
        self._waiting.claim()
        arriving = [Wait(request, WaitReason.ARRIVED) for request in self._waiting.arriving()]
        return self._admission.waits() + arriving

    @property
    def prompt_tokens_found(self) -> tuple[int, int]:
        """Prompt tokens of requests that began, and how many of them were hit."""
        return self._admission.prompt_tokens, self._admission.hit_tokens

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are not in."""
        return len(self._in_flight)

    @property
    def drained(self) -> bool:
        """Nothing waits, runs or holds blocks.

        Steps still in flight then hold nobody's rows; hand their results in before more is scheduled.
        """
        return self._waiting.is_idle and not self._running.seats_taken

    @property
    def waits_for_drafts(self) -> bool:
        """Whether the next Step would be empty until a result is in: all that run have drafts in flight, nobody waits.

        O(running).
        """
        running = self._running
        return bool(running.requests) and not self.num_waiting and bool(running.num_drafts[running.order].all())

    # -- schedule

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Draft tokens for running requests, by id: the next ``schedule()`` lets the model verify them.

        Those of a request that does not run, has more than its last token to compute, or waits for a result do
        nothing, and so do those behind what fits: ``num_speculative_tokens``, the tokens that the request may still
        have (one is sampled behind the drafts), the step's budget, blocks that nobody has to give up. By the owner's
        thread only. ConfigError, and nothing proposed, for what is no token id. O(drafts).
        """
        self._waiting.claim()
        check_drafts(drafts)
        if self._speculation is not None:
            self._speculation.propose(drafts, self._waiting.find)

    def schedule(self) -> Step:
        """The next Step, empty when nothing can run now. Every Step wants its update (or fail).

        CacheError when max_in_flight steps wait for their results already.
        """
        self._waiting.claim()
        if len(self._in_flight) >= self.limits.max_in_flight:
            raise CacheError(f"{len(self._in_flight)} steps are in flight: update or fail the oldest before the next")
        now = self._clock()
        self._empty_inbox()
        self._admission.explained.clear()
        builder = self._builder(now)
        try:
            with self.cache.step(self._next_id):
                preempted = self._schedule_running(builder)
                if not self._waiting.is_idle:
                    self._admission.admit(builder, now, room=not preempted)
                spans = builder.spans()  # now that every row has its own blocks, some for the states that they pass
                self.cache.store_checkpoints(spans.rows, spans.computed, spans.computed + spans.certain)
        finally:
            if self._speculation is not None:
                self._speculation.forget()
        self._peak_usage = max(self._peak_usage, self.cache.usage)
        return self._issue(builder, spans)

    def _builder(self, now: float, taken: int = 0) -> StepBuilder:
        """A step that begins ``now``. taken: tokens that are not its own."""
        return StepBuilder(
            self.limits.max_batched_tokens - taken,
            self.cache,
            self._split_with_branches if self._waiting.families else self._split,
            short_tokens=self._short_tokens,
            count_short=lambda builder: self._admission.count_short(builder, now),
        )

    def _schedule_running(self, builder: StepBuilder) -> bool:
        """Give running requests their tokens; whether somebody had to be preempted."""
        preempted, start = False, 0
        parents = self._waiting.parents(self._running.requests) if self._waiting.families else []
        held = [parent.row for _, parent in parents if self._running.steps[parent.row]]  # they wait for those steps
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
                speculation.drop(rows.item(done))  # nobody gives way to drafts
                continue
            if slots.reason is Reason.FRAGMENTED:
                start += 1  # its blocks are there, but not in this step
                continue
            self._running.preempt_last(self._in_flight)
            builder.keep_nothing()
            preempted = True

    def _wanted(self, rows: Int64, held: list[int]) -> Int64:
        """Tokens that each of ``rows`` has left to run, drafts left out. held: rows that must wait."""
        running, columns = self._running, self.cache.rows
        known = columns.num_tokens[rows] + running.pending[rows]
        wanted: Int64 = np.minimum(known, running.limit[rows] - 1) - columns.num_computed[rows]
        if self.limits.num_speculative_tokens:
            wanted[running.num_drafts[rows] > 0] = 0
        if held:
            wanted[np.isin(rows, held)] = 0
        return wanted

    def _issue(self, builder: StepBuilder, spans: RowSpans) -> Step:
        """Freeze what was built: the Step, and the record of it in flight."""
        rows, transfers = spans.rows, self.cache.fields.take_transfers()
        step = builder.freeze(
            self._next_id,
            self._after,
            spans,
            pending=self._running.pending,
            ended_rows=self._running.take_ended_rows(),
            transfers=transfers,
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
        """Take in the result of the oldest Step in flight: its blocks are written, its tokens known.

        WorkerError, and nothing changed, for a result that does not fit that Step.
        """
        self._waiting.claim()
        if type(result) is not StepResult:
            instance("result", result, StepResult)
        if not self._in_flight:
            raise CacheError(f"result of step {result.id}, but no step is in flight")
        flight = self._in_flight[0]
        check_result(flight.step, result)
        self._in_flight.popleft()
        self.cache.mark_written(flight.step.id)
        self._computed_tokens += len(flight.step.token_ids.values)
        if self._speculation is not None:
            self._speculation.verify(flight.num_drafts, result.num_accepted)
        appended = self._running.append(flight, result.sampled)
        if self._running.num_dead:
            self._running.free_dead(flight)
        self._empty_inbox()
        return Outcome(flight.step.id, flight.requests, appended, self._running.take_finished())

    def take_finished(self) -> tuple[Finished, ...]:
        """Who ended since the last update or call: aborts, and whom the caller finished, in between.

        By the owner's thread only: what another one took, its owner would never hear of.
        """
        self._waiting.claim()
        return self._running.take_finished()

    def finish(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> bool:
        """End a request for a reason that only the caller can see, such as a stop string. False if it is not here."""
        self._waiting.claim()
        instance("reason", reason, FinishReason)
        self._empty_inbox()
        request = self._waiting.find(instance("request_id", request_id, str))
        if request is None:
            return False
        self._running.end([Finished(request, reason)])
        return True

    # -- many steps as one

    def fast_forward(self, choose: Choose, times: FastForwardClock | None = None) -> FastForward:
        """Take uniform steps as one, for those who know beforehand what is sampled: there is no Step and no result.

        A step is uniform if every running request computes one token and samples one, nobody comes in or gives way, and
        who waits is refused as in the others; in the last one requests may end. What is done is what schedule() and
        update() would have done.
        choose: what to take, asked once if the next step is uniform; it must not touch the scheduler. None is taken
        where that step is not, or choose gives no column; fewer than chosen where one must move or copy blocks, which
        is the last one then. times: told when steps begin and the last one ends, so that the clock can say so: ends
        are kept, and judged, by it. ConfigError for chosen tokens of another shape.
        """
        self._waiting.claim()
        self._empty_inbox()
        if self._in_flight:
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

    stride = fast_forward  # its name in 0.1

    # -- failure

    def fail(self, step_id: int, error: BaseException | str) -> None:
        """Step ``step_id`` and every later one in flight brought no result.

        What they should have written can be hit no longer; their requests return to the front of the queue
        with 0 computed, in order. CacheError for a step that is not in flight.
        """
        self._waiting.claim()
        integer("step_id", step_id, most=MOST_COUNT)
        if not isinstance(error, BaseException | str):
            raise ConfigError(f"error must be an exception or a message, got {shown(error)}")
        failed = [flight for flight in self._in_flight if flight.step.id >= step_id]
        if not failed or failed[0].step.id != step_id:
            raise CacheError(f"step {step_id} is not in flight: there is nothing to fail")
        logger.warning("step %d and %d after it failed: %r", step_id, len(failed) - 1, error)
        for _ in failed:
            self._in_flight.pop()
        self._after = failed[0].step.after
        self._running.take_back(failed, self._in_flight)
        self._empty_inbox()

    # -- invariants

    def check(self) -> None:
        """The cache's own check, and: rows that hold blocks are those that run or are dead. O(blocks + keys)."""
        self.cache.check()
        self._running.check(self._in_flight)
        self._waiting.check(self._running.requests)

    # -- inside

    def _empty_inbox(self) -> None:
        """Requests that arrived wait from now on; those to abort end."""
        if self._waiting.arrivals:
            self._running.end(Finished(request, FinishReason.ABORT) for request in self._waiting.take_arrivals())
