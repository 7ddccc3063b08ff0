"""Scheduler: what runs next. One Step a call, and one update for each Step.

    add -> waiting --admission--> running --stop, length--> finished
              ^                      |
              +---- preempted <------+          a failed step sends its requests back to waiting, too

A step's budget goes to running requests first, in order of admission (or of priority), then to waiting
ones. When blocks run out, the last in that order gives all of its back and waits at the front (or at its
place); a step that preempted admits nobody. One that does not fit lets others pass for a while.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import KVCacheManager, Reason
from hybridkv.errors import CacheError, ConfigError
from hybridkv.request import Request
from hybridkv.schedule import audit
from hybridkv.schedule.admission import limit_tokens, refuse_impossible, split_of
from hybridkv.schedule.admitter import Admitter
from hybridkv.schedule.chunks import Chunks
from hybridkv.schedule.draft import Draft
from hybridkv.schedule.forks import Branching, Forks, branches_of
from hybridkv.schedule.in_flight import InFlight, check_result
from hybridkv.schedule.inbox import Inbox
from hybridkv.schedule.limits import Finished, FinishReason, Outcome, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.waiting import Waiting, WaitingQueue
from hybridkv.step import Csr, Step, StepResult

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
        self.cache = cache
        self.limits = limits if limits is not None else SchedulerLimits()
        self._clock = clock
        self._forks = Forks()
        self._chunks = Chunks(split_of(cache, self.limits, self._forks))
        self._waiting = WaitingQueue(self.limits.policy)
        self._running = RunningRows(self.limits.max_running)
        self._branching = Branching(self._forks, cache, self.limits, self._waiting, self._running)
        self._admitter = Admitter(cache, self.limits, self._chunks, self._waiting, self._running)
        self._in_flight: deque[InFlight] = deque()
        self._next_id = 0
        self._after = -1
        self._ended_rows: list[int] = []
        self._finished: list[Finished] = []
        self._inbox = Inbox()
        self._counts = dict.fromkeys(("finished", "preempted", "failed", "prompt", "hit", "computed"), 0)
        self._peak_usage = 0.0
        self._distrusted: set[int] = set()

    # -- from any thread

    def add(self, request: Request) -> tuple[Request, ...]:
        """``request`` joins the queue at the owner's next call; its branches, one less than ``sampling.n``.

        ConfigError if it can never run: hashed by another hasher, an id in use, a prompt as long as
        max_model_len; CapacityError if the pool is too small for it alone.
        """
        refuse_impossible(self.cache, self.limits, request)
        branches = branches_of(request, request.sampling.n - 1)
        self._inbox.add(request, branches)
        return branches

    def fork(self, parent_id: str, n: int) -> tuple[Request, ...]:
        """``n`` new requests that go on from the tokens of a request which waits or runs, by seeds of their own.

        Their ids are PARENT#1, PARENT#2, ... In the natural layout a running parent's blocks are shared: full ones
        as they are, its last one and its state copied; else they find what is cached. By the owner's thread only.
        ConfigError for an unknown parent, n below 1 or an id in use.
        """
        self._inbox.claim()
        self._empty_inbox()
        parent = self._inbox.find(parent_id)
        if parent is None or n < 1:
            raise ConfigError(f"cannot fork {parent_id!r} by {n}: name one that waits or runs, and n >= 1")
        children = branches_of(parent, n)
        self._inbox.know(children)
        self._branch(parent, children)
        return children

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; what it wrote stays cached. False for an id that is not here.

        Its blocks return at once, or after the update of the last step in flight that holds them.
        """
        if not self._inbox.abort(request_id):
            logger.info("abort of %r: no such request", request_id)
            return False
        if self._inbox.is_owner:
            self._empty_inbox()
        return True

    def statistics(self) -> SchedulerStatistics:
        """Counts so far."""
        counts = self._counts
        return SchedulerStatistics(
            steps=self._next_id,
            waiting=len(self._waiting) + len(self._forks) + len(self._inbox.arriving()),
            running=len(self._running),
            requests_finished=counts["finished"],
            preemptions=counts["preempted"],
            failed_steps=counts["failed"],
            prompt_tokens=counts["prompt"],
            hit_tokens=counts["hit"],
            computed_tokens=counts["computed"],
            peak_usage=self._peak_usage,
            refusals={str(reason): count for reason, count in self._admitter.refusals.items()},
        )

    # -- answers

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those just added among them."""
        return self.statistics().waiting

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are not in."""
        return len(self._in_flight)

    @property
    def drained(self) -> bool:
        """Nothing waits, runs or holds blocks.

        Steps still in flight then hold nobody's rows; hand their results in before more is scheduled.
        """
        return not (self._inbox or self._waiting or self._forks or self._running.seats_taken)

    # -- schedule

    def schedule(self) -> Step:
        """The next Step, empty when nothing can run now. Every Step wants its update (or fail).

        CacheError when max_in_flight steps wait for their results already.
        """
        self._inbox.claim()
        if len(self._in_flight) >= self.limits.max_in_flight:
            raise CacheError(f"{len(self._in_flight)} steps are in flight: update or fail the oldest before the next")
        now = self._clock()
        self._empty_inbox()
        draft = Draft(self.limits.max_batched_tokens)
        log = self.cache.publisher.log
        log.begin(self._next_id)
        try:
            preempted = self._schedule_running(draft)
            self._count_admitted(self._branching.admit(draft, room=not preempted))
            if not preempted:
                self._count_admitted(self._admitter.admit(draft, now))
            self._keep_states(draft)
        finally:
            log.end()
        self._peak_usage = max(self._peak_usage, self.cache.usage)
        return self._issue(draft)

    def _schedule_running(self, draft: Draft) -> bool:
        """Give running requests their tokens; whether somebody had to be preempted."""
        running, columns = self._running, self.cache.rows
        preempted, start, held = False, 0, self._forks.held_rows(running)
        while True:
            rows = running.order[start:]
            known = columns.num_tokens[rows] + running.pending[rows]
            wanted = np.minimum(known, running.limit[rows] - 1) - columns.num_computed[rows]
            if held:
                wanted[np.isin(rows, held)] = 0
            shares = self._chunks.shares(columns, rows, wanted, draft.budget)
            if not shares.all():
                some = np.flatnonzero(shares)
                places, rows, shares = some + start, rows[some], shares[some]
            else:
                places = None
            slots = self.cache.allocate_batch(rows, shares, self.limits.num_lookahead_tokens)
            done = slots.accepted
            if done:
                draft.add_running(rows[:done], shares[:done], slots)
            if done == len(rows):
                return preempted
            start = start + done if places is None else int(places[done])
            if slots.reason is Reason.FRAGMENTED:
                start += 1  # its blocks are there, but not in this step
                continue
            self._preempt_last()
            preempted = True

    def _preempt_last(self) -> None:
        """The last in order gives its blocks back and waits."""
        request = self._running.requests[-1]
        logger.debug("request %s is preempted", request.request_id)
        self._counts["preempted"] += 1
        request.num_preemptions += 1
        self._send_back([request], written=True)

    def _send_back(self, requests: list[Request], *, written: bool) -> None:
        """Running ``requests`` give up their rows and wait at the front, in this order, with 0 computed.

        written: what they have computed is there, but for steps in flight.
        """
        rows = [request.row for request in requests]
        entries = []
        for request, row in zip(requests, rows, strict=True):
            self._branching.orphan(request)
            unsettled = sum(flight.detach(request, row) for flight in self._in_flight)
            if written and not unsettled:
                self.cache.keep_end(request)
            self.cache.free(request)
            request.num_computed_tokens = 0
            entries.append(Waiting(request, self._running.turn_of(request), unsettled))
        self._running.remove(rows)
        self._ended_rows += rows
        self._waiting.return_to_front(entries)

    def _count_admitted(self, admitted: Iterable[tuple[Request, int]]) -> None:
        """Requests come in; what their first admissions found there already."""
        for request, hit_tokens in admitted:
            if request.first_hit_tokens is None:
                request.first_hit_tokens = hit_tokens
                self._counts["prompt"] += request.num_prompt_tokens
                self._counts["hit"] += min(hit_tokens, request.num_prompt_tokens)

    def _keep_states(self, draft: Draft) -> None:
        """Blocks for the states that the step passes, now that every row has its own."""
        rows = draft.rows
        computed = self.cache.rows.num_computed[rows]
        self.cache.store_checkpoints(rows, computed, computed + draft.counts)

    def _issue(self, draft: Draft) -> Step:
        """Freeze the draft: the Step, and the record of it in flight."""
        running, columns = self._running, self.cache.rows
        rows, transfers = draft.rows, self.cache.take_transfers()
        step = draft.freeze(
            self._next_id,
            self._after,
            columns=columns,
            pending=running.pending,
            ended_rows=self._ended_rows,
            cache=self.cache,
            transfers=transfers,
        )
        columns.schedule(rows, step.num_scheduled.astype(np.int64))
        running.pending[rows] += step.samples
        running.steps[rows] += 1
        self._in_flight.append(InFlight(step, rows, self._requests_of(rows), transfers.moved))
        self._ended_rows = []
        self._after = self._next_id
        self._next_id += 1
        return step

    def _requests_of(self, rows: Int64) -> tuple[Request, ...]:
        if np.array_equal(rows, self._running.order):
            return self._running.requests
        owners = self.cache.rows.requests
        return tuple(request for request in map(owners.__getitem__, rows.tolist()) if request is not None)

    # -- update

    def update(self, result: StepResult) -> Outcome:
        """Take in the result of the oldest Step in flight: its blocks are written, its tokens known.

        WorkerError, and nothing changed, for a result that does not fit that Step.
        """
        self._inbox.claim()
        if not self._in_flight:
            raise CacheError(f"result of step {result.id}, but no step is in flight")
        flight = self._in_flight[0]
        check_result(flight.step, result)
        self._in_flight.popleft()
        self.cache.publisher.log.settle(flight.step.id)
        self._counts["computed"] += flight.step.num_tokens
        appended = self._append(flight, result.sampled)
        self._settle_dead(flight)
        self._empty_inbox()
        return Outcome(flight.step.id, flight.requests, appended, self.take_finished())

    def take_finished(self) -> tuple[Finished, ...]:
        """Who ended since the last update or call: aborts, and whom the caller finished, in between."""
        finished, self._finished = tuple(self._finished), []
        return finished

    def _append(self, flight: InFlight, sampled: Csr) -> Csr:
        """Append the sampled tokens and end who is done; what was really appended, CSR."""
        running, rows, samples = self._running, flight.rows, flight.step.samples
        step_counts = flight.step.num_scheduled
        alive = running.settle(flight)
        self.cache.rows.settle(rows[alive], step_counts[alive])
        if running.num_dead:
            alive &= ~running.dead[rows]
        taking = samples & alive
        tokens = sampled.values if taking.sum() == len(sampled.values) else sampled.values[taking[samples]]
        owners = np.flatnonzero(taking)
        self._append_rows(flight, owners, tokens)
        late = [
            position
            for position, request in flight.detached.items()
            if self._append_waiting(request, sampled[position].tolist())
        ]
        if len(tokens) == len(sampled.values) and not late:
            return sampled
        taking[late] = True
        indptr = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(taking, out=indptr[1:])
        return Csr(indptr, sampled.values[taking[samples]])

    def _append_rows(self, flight: InFlight, owners: Int64, tokens: NDArray[np.int32]) -> None:
        running, rows = self._running, flight.rows[owners]
        self.cache.rows.append(rows, tokens)
        stopped = running.stops(rows, tokens)
        ended = stopped | (self.cache.rows.num_tokens[rows] >= running.limit[rows])
        if ended.any():
            self._end(
                (flight.requests[owners[i]], FinishReason.STOP if stopped[i] else FinishReason.LENGTH)
                for i in np.flatnonzero(ended).tolist()
            )

    def _append_waiting(self, request: Request, sampled: list[int]) -> bool:
        """A result for a request that was preempted after its step was scheduled; whether a token was appended."""
        if not self._waiting.settle(request) or not sampled:
            return False  # it was aborted since, or is not done with its prompt
        token = sampled[0]
        request.append(token)
        stopped = token in request.stop_ids
        if stopped or request.num_tokens >= limit_tokens(self.cache, request):
            self._end([(request, FinishReason.STOP if stopped else FinishReason.LENGTH)])
        return True

    def finish(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> bool:
        """End a request for a reason that only the caller can see, such as a stop string. False if it is not here."""
        self._inbox.claim()
        self._empty_inbox()
        request = self._inbox.find(request_id)
        if request is None:
            return False
        self._end([(request, reason)])
        return True

    def _end(self, ended: Iterable[tuple[Request, FinishReason]]) -> None:
        """Requests leave: from the queue at once, from their rows when no step in flight holds them."""
        rows = []
        for request, reason in ended:
            if not self._inbox.end(request):
                continue
            self._finished.append(Finished(request, reason))
            self._counts["finished"] += 1
            self._branching.orphan(request)
            if request.row < 0:
                self._waiting.remove(request)
                self._forks.remove(request)
                self._inbox.forget(request)
                continue
            rows.append(request.row)
            if self._running.steps[request.row]:
                self._running.bury(request.row)
            else:
                self._release(request)
        if rows:
            self._running.remove(rows)

    def _settle_dead(self, flight: InFlight) -> None:
        """Dead rows of ``flight`` that no other step holds give their blocks back."""
        running = self._running
        if not running.num_dead:
            return
        mask = flight.attached() & running.dead[flight.rows] & (running.steps[flight.rows] == 0)
        for i in np.flatnonzero(mask).tolist():
            running.exhume(int(flight.rows[i]))
            self._release(flight.requests[i])

    def _release(self, request: Request) -> None:
        """Publish what is written, and free the row."""
        self._ended_rows.append(request.row)
        if request.row in self._distrusted:
            self._distrusted.discard(request.row)
        else:
            self.cache.cache_blocks(request, request.num_computed_tokens)
            self.cache.keep_end(request)
        self.cache.free(request)
        self._inbox.forget(request)

    # -- failure

    def fail(self, step_id: int, error: BaseException | str) -> None:
        """Step ``step_id`` and every later one in flight brought no result.

        What they should have written can be hit no longer; their requests return to the front of the queue
        with 0 computed, in order. CacheError for a step that is not in flight.
        """
        self._inbox.claim()
        failed = [flight for flight in self._in_flight if flight.step.id >= step_id]
        if not failed or failed[0].step.id != step_id:
            raise CacheError(f"step {step_id} is not in flight: there is nothing to fail")
        logger.warning("step %d and %d after it failed: %s", step_id, len(failed) - 1, error)
        self._counts["failed"] += len(failed)
        for _ in failed:
            self._in_flight.pop()
        self.cache.publisher.log.revoke(step_id)
        self._after = failed[0].step.after
        touched: set[int] = set()
        for flight in failed:
            self._ended_rows += flight.step.finished_rows.tolist()
            attached = self._running.settle(flight)
            if self.cache.placement is not None:  # running states are rewritten in place
                self._distrusted.update(row for row in flight.rows[attached].tolist() if self._running.dead[row])
            self.cache.rows.retract(flight.rows[attached], flight.step.num_scheduled[attached])
            touched.update(flight.rows[attached].tolist())
            for request in flight.detached.values():
                self._waiting.settle(request)
        touched.update(self._distrust(failed))
        self._send_back([request for request in self._running.requests if request.row in touched], written=False)
        self._bury_failed(failed)
        self._empty_inbox()

    def _distrust(self, failed: list[InFlight]) -> set[int]:
        """Where the moves of ``failed`` ended may be anything: those blocks lose their keys. Rows that hold one."""
        moved = np.concatenate([flight.moved for flight in failed])
        if not moved.size:
            return set()
        self.cache.block_pool.evict_blocks(np.unique(moved).astype(np.int32))
        rows = set(self.cache.cells_of(moved)[1].tolist())
        self._distrusted.update(row for row in rows if self._running.dead[row])
        return rows

    def _bury_failed(self, failed: list[InFlight]) -> None:
        """Dead rows that only failed steps held give their blocks back, unpublished."""
        running = self._running
        for flight in failed:
            attached = flight.attached()
            for i, row in enumerate(flight.rows.tolist()):
                if attached[i] and running.dead[row] and not running.steps[row]:
                    running.exhume(row)
                    self._distrusted.discard(row)
                    self._ended_rows.append(row)
                    self.cache.free(flight.requests[i])
                    self._inbox.forget(flight.requests[i])

    # -- invariants

    def check(self) -> None:
        """The cache's own check, and: rows that hold blocks are those that run or are dead. O(blocks + keys)."""
        self.cache.check()
        audit.check_rows(self.cache, self._running)
        audit.check_in_flight(self.cache, self._running, self._in_flight)
        audit.check_known(self._inbox, self._waiting, self._running, self._forks)

    # -- inside

    def _branch(self, parent: Request, children: tuple[Request, ...]) -> None:
        """``children`` wait for ``parent``, or behind it where no blocks can be shared in part."""
        if not children:
            return
        if self.cache.placement is not None:
            self._forks.add(parent, list(children))
            return
        for child in children:
            self._waiting.append(child)

    def _empty_inbox(self) -> None:
        """Requests that arrived wait from now on; those to abort end."""
        while (item := self._inbox.take()) is not None:
            request = item.request
            if not item.abort:
                self._waiting.append(request)
                self._branch(request, item.children)
            elif self._inbox.find(request.request_id) is request:
                self._end([(request, FinishReason.ABORT)])
