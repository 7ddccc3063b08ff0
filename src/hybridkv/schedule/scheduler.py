"""Scheduler: what runs next. One Step a call, and one update for each Step.

    add -> waiting --admission--> running --stop, length--> finished
              ^                      |
              +---- preempted <------+          a failed step sends its requests back to waiting, too

A step's budget goes to running requests first, in order of admission, then to waiting ones. When blocks
run out, the request admitted last gives all of its back and waits at the front; a step that preempted
admits nobody.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Admission, KVCacheManager, Refusal
from hybridkv.errors import CacheError, CapacityError, ConfigError, OwnershipError
from hybridkv.request import Request
from hybridkv.schedule.in_flight import InFlight, check_result
from hybridkv.schedule.limits import Finished, FinishReason, Outcome, SchedulerLimits, SchedulerStatistics
from hybridkv.schedule.running import RunningRows
from hybridkv.schedule.tokens import cells_of, cells_of_row, gather_tokens, join_cells, share_budget
from hybridkv.schedule.waiting import Waiting, WaitingQueue
from hybridkv.step import Cells, Csr, NewRow, Step, StepResult
from hybridkv.units import format_bytes

logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]


class _Draft:
    """The step being scheduled: rows, computed tokens and shares so far, and what the worker must know."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Int64] = []
        self.counts: list[Int64] = []
        self.cells: list[Cells] = []
        self.admitted: list[Request] = []

    def add(self, rows: Int64, counts: Int64, cells: list[Cells]) -> None:
        self.rows.append(rows)
        self.counts.append(counts)
        self.cells += [part for part in cells if len(part)]
        self.budget -= int(counts.sum())


class Scheduler:
    """Decides over one KVCacheManager, which it alone may drive.

    One thread owns it: the first that schedules. ``add``, ``abort`` and ``statistics`` may come from any
    thread; what they ask for takes effect at the owner's next call. Another thread that schedules gets
    OwnershipError.
    """

    def __init__(self, cache: KVCacheManager, limits: SchedulerLimits | None = None) -> None:
        self.cache = cache
        self.limits = limits if limits is not None else SchedulerLimits()
        self._waiting = WaitingQueue()
        self._running = RunningRows(self.limits.max_running)
        self._in_flight: deque[InFlight] = deque()
        self._next_id = 0
        self._after = -1
        self._ended_rows: list[int] = []
        self._finished: list[Finished] = []
        self._lock = threading.Lock()
        self._inbox: deque[Request | str] = deque()
        self._known: dict[str, Request] = {}
        self._owner: int | None = None
        self._counts = dict.fromkeys(("finished", "preempted", "failed", "prompt", "hit", "computed"), 0)
        self._peak_usage = 0.0

    # -- from any thread

    def add(self, request: Request) -> None:
        """``request`` joins the queue at the owner's next call.

        ConfigError if it can never run: hashed by another hasher, an id in use, a prompt as long as
        max_model_len; CapacityError if the pool is too small for it alone.
        """
        if request.hasher is not self.cache.hasher:
            raise ConfigError(f"request {request.request_id!r}: construct it with hasher=cache.hasher")
        if request.num_tokens >= self.cache.max_model_len:
            raise ConfigError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, max_model_len is "
                f"{self.cache.max_model_len}: shorten the prompt or raise max_model_len"
            )
        self._refuse_too_large(request)
        with self._lock:
            if request.request_id in self._known:
                raise ConfigError(f"a request {request.request_id!r} is already here: request ids must be unique")
            self._known[request.request_id] = request
            self._inbox.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; what it wrote stays cached. False for an id that is not here.

        Its blocks return at once, or after the update of the last step in flight that holds them.
        """
        with self._lock:
            if request_id not in self._known:
                logger.info("abort of %r: no such request", request_id)
                return False
            self._inbox.append(request_id)
        if self._owner == threading.get_ident():
            self._empty_inbox()
        return True

    def statistics(self) -> SchedulerStatistics:
        """Counts so far."""
        counts = self._counts
        with self._lock:
            arriving = sum(isinstance(item, Request) for item in self._inbox)
        return SchedulerStatistics(
            steps=self._next_id,
            waiting=len(self._waiting) + arriving,
            running=len(self._running),
            requests_finished=counts["finished"],
            preemptions=counts["preempted"],
            failed_steps=counts["failed"],
            prompt_tokens=counts["prompt"],
            hit_tokens=counts["hit"],
            computed_tokens=counts["computed"],
            peak_usage=self._peak_usage,
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
        """Nothing waits, runs or holds blocks; steps still in flight then hold nobody's rows and need no update."""
        return not (self._inbox or self._waiting or self._running.seats_taken)

    # -- schedule

    def schedule(self) -> Step:
        """The next Step, empty when nothing can run now. Every Step wants its update (or fail).

        CacheError when max_in_flight steps wait for their results already.
        """
        self._claim()
        if len(self._in_flight) >= self.limits.max_in_flight:
            raise CacheError(f"{len(self._in_flight)} steps are in flight: update or fail the oldest before the next")
        self._empty_inbox()
        draft = _Draft(self.limits.max_batched_tokens)
        log = self.cache.publisher.log
        log.begin(self._next_id)
        try:
            preempted = self._schedule_running(draft)
            if not preempted:
                self._admit(draft)
        finally:
            log.end()
        self._peak_usage = max(self._peak_usage, self.cache.usage)
        return self._issue(draft)

    def _schedule_running(self, draft: _Draft) -> bool:
        """Give running requests their tokens; whether somebody had to be preempted."""
        running, columns = self._running, self.cache.rows
        preempted, start = False, 0
        while True:
            rows = running.order[start:]
            known = columns.num_tokens[rows] + running.pending[rows]
            wanted = np.minimum(known, running.limit[rows] - 1) - columns.num_computed[rows]
            shares = share_budget(wanted, draft.budget)
            if not shares.all():
                some = np.flatnonzero(shares)
                places, rows, shares = some + start, rows[some], shares[some]
            else:
                places = None
            slots = self.cache.allocate_batch(rows, shares)
            done = slots.accepted
            if done:
                draft.add(rows[:done], shares[:done], [cells_of(rows, slots)])
            if done == len(rows):
                return preempted
            start = start + done if places is None else int(places[done])
            self._preempt_last()
            preempted = True

    def _preempt_last(self) -> None:
        """The request admitted last gives its blocks back and waits at the front."""
        request = self._running.requests[-1]
        logger.debug("request %s is preempted", request.request_id)
        self._counts["preempted"] += 1
        request.num_preemptions += 1
        self._send_back([request])

    def _send_back(self, requests: list[Request]) -> None:
        """Running ``requests`` give up their rows and wait at the front, in this order, with 0 computed."""
        rows = [request.row for request in requests]
        entries = []
        for request, row in zip(requests, rows, strict=True):
            unsettled = sum(flight.detach(request, row) for flight in self._in_flight)
            self.cache.free(request)
            request.num_computed_tokens = 0
            entries.append(Waiting(request, unsettled))
        self._running.remove(rows)
        self._ended_rows += rows
        self._waiting.return_to_front(entries)

    def _admit(self, draft: _Draft) -> None:
        """Admit from the head of the queue while budget, rows and blocks last."""
        while draft.budget and self._running.seats_taken < self.limits.max_running:
            entry = self._waiting.head()
            if entry is None or entry.unsettled or not self._admit_one(entry, draft):
                return
            self._waiting.pop()

    def _admit_one(self, entry: Waiting, draft: _Draft) -> bool:
        """Admit one request whole: its chunk now, room for the rest of its known tokens."""
        request, cache = entry.request, self.cache
        self._look_up(entry)
        count = min(request.num_tokens - entry.hit_tokens, draft.budget)
        reserve = int(self.limits.watermark * (cache.block_pool.num_blocks - 1)) if self._running.seats_taken else 0
        plan = cache.plan_slots(
            request,
            count,
            entry.hit_tokens,
            entry.hit,
            admission=Admission(request.num_tokens, reserve),
        )
        if isinstance(plan, Refusal):
            logger.debug("request %s is not admitted: %s", request.request_id, plan)
            return False
        cache.commit(plan)
        request.num_computed_tokens = entry.hit_tokens
        if request.first_hit_tokens is None:
            request.first_hit_tokens = entry.hit_tokens
            self._counts["prompt"] += request.num_prompt_tokens
            self._counts["hit"] += entry.hit_tokens
        self._running.admit(request, self._limit_tokens(request))
        draft.admitted.append(request)
        cells = cells_of_row(request.row, cache.get_blocks(request.request_id).ids)
        draft.add(np.array([request.row]), np.array([count]), cells)
        return True

    def _look_up(self, entry: Waiting) -> None:
        """Find the longest hit, or keep the one remembered while it is still the longest."""
        cache, evictions = self.cache, self.cache.block_pool.evictions
        if entry.hit is None or not cache.is_longest_hit(entry.request, entry.hit, entry.evictions):
            entry.hit, entry.hit_tokens = cache.get_computed_blocks(entry.request)
            entry.evictions = evictions

    def _issue(self, draft: _Draft) -> Step:
        """Freeze the draft: the Step, and the record of it in flight."""
        columns, running = self.cache.rows, self._running
        rows = _joined(draft.rows)
        counts = _joined(draft.counts)
        computed = columns.num_computed[rows]
        samples = computed + counts == columns.num_tokens[rows] + running.pending[rows]
        step = Step(
            id=self._next_id,
            after=self._after,
            rows=rows.astype(np.int32),
            num_computed=computed.astype(np.int32),
            num_scheduled=counts.astype(np.int32),
            samples=samples,
            token_ids=gather_tokens(columns, rows, computed, counts),
            drafts=Csr.empty(len(rows)),
            cells=join_cells(draft.cells),
            finished_rows=np.array(self._ended_rows, np.int32),
            new_rows=tuple(_new_row(request) for request in draft.admitted),
        )
        columns.advance(rows, counts)
        running.pending[rows] += samples
        running.steps[rows] += 1
        self._in_flight.append(InFlight(step, rows, self._requests_of(rows)))
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
        self._claim()
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
        finished, self._finished = tuple(self._finished), []
        return Outcome(flight.step.id, flight.requests, appended, finished)

    def _append(self, flight: InFlight, sampled: Csr) -> Csr:
        """Append the sampled tokens and end who is done; what was really appended, CSR."""
        running, rows, samples = self._running, flight.rows, flight.step.samples
        if flight.detached or running.num_dead:
            attached = flight.attached()
            alive = attached & ~running.dead[rows]
        else:
            attached = alive = np.ones(len(rows), np.bool_)
        running.steps[rows[attached]] -= 1
        running.pending[rows[samples & attached]] -= 1
        taking = samples & alive
        tokens = sampled.values if taking.sum() == len(sampled.values) else sampled.values[taking[samples]]
        owners = np.flatnonzero(taking)
        self._append_rows(flight, owners, tokens)
        late = [position for position in flight.detached if samples[position]]
        for position in flight.detached:
            self._append_waiting(flight.detached[position], sampled[position] if samples[position] else None)
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

    def _append_waiting(self, request: Request, sampled: NDArray[np.int32] | None) -> None:
        """A result for a request that was preempted after its step was scheduled."""
        entry = self._waiting.find(request)
        if entry is None:
            return  # it was aborted since
        entry.unsettled -= 1
        if sampled is None:
            return
        token = int(sampled[0])
        request.append(token)
        entry.hit = None
        stops = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:
            stops = (*stops, *request.eos_token_ids)
        if token in stops or request.num_tokens >= self._limit_tokens(request):
            reason = FinishReason.STOP if token in stops else FinishReason.LENGTH
            self._end([(request, reason)])

    def finish(self, request_id: str, reason: FinishReason = FinishReason.STOP) -> bool:
        """End a request for a reason that only the caller can see, such as a stop string. False if it is not here."""
        self._claim()
        self._empty_inbox()
        request = self._known.get(request_id)
        if request is None:
            return False
        self._end([(request, reason)])
        return True

    def _end(self, ended: Iterator[tuple[Request, FinishReason]] | list[tuple[Request, FinishReason]]) -> None:
        """Requests leave: from the queue at once, from their rows when no step in flight holds them."""
        rows = []
        for request, reason in ended:
            with self._lock:
                if self._known.pop(request.request_id, None) is None:
                    continue
            self._finished.append(Finished(request, reason))
            self._counts["finished"] += 1
            if self._waiting.remove(request):
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
        self.cache.cache_blocks(request, request.num_computed_tokens)
        self.cache.free(request)

    # -- failure

    def fail(self, step_id: int, error: BaseException | str) -> None:
        """Step ``step_id`` and every later one in flight brought no result.

        What they should have written can be hit no longer; their requests return to the front of the queue
        with 0 computed, in order. CacheError for a step that is not in flight.
        """
        self._claim()
        failed = [flight for flight in self._in_flight if flight.step.id >= step_id]
        if not failed or failed[0].step.id != step_id:
            raise CacheError(f"step {step_id} is not in flight: there is nothing to fail")
        logger.warning("step %d and %d after it failed: %s", step_id, len(failed) - 1, error)
        self._counts["failed"] += len(failed)
        for _ in failed:
            self._in_flight.pop()
        self.cache.publisher.log.revoke(step_id)
        self._after = failed[0].step.after
        touched: dict[int, None] = {}
        for flight in failed:
            self._ended_rows += flight.step.finished_rows.tolist()
            attached = flight.attached()
            rows = flight.rows[attached]
            self._running.steps[rows] -= 1
            self._running.pending[flight.rows[attached & flight.step.samples]] -= 1
            touched.update(dict.fromkeys(rows.tolist()))
            for request in flight.detached.values():
                entry = self._waiting.find(request)
                if entry is not None:
                    entry.unsettled -= 1
        alive = [request for request in self._running.requests if request.row in touched]
        self._send_back(alive)
        self._bury_failed(failed)
        self._empty_inbox()

    def _bury_failed(self, failed: list[InFlight]) -> None:
        """Dead rows that only failed steps held give their blocks back, unpublished."""
        running = self._running
        for flight in failed:
            attached = flight.attached()
            for i, row in enumerate(flight.rows.tolist()):
                if attached[i] and running.dead[row] and not running.steps[row]:
                    running.exhume(row)
                    self._ended_rows.append(row)
                    self.cache.free(flight.requests[i])

    # -- invariants

    def check(self) -> None:
        """The cache's own check, and: rows that hold blocks are those that run or are dead. O(blocks + keys)."""
        self.cache.check()
        running, resident = self._running, {request.row for request in self.cache.resident_requests()}
        dead = set(np.flatnonzero(running.dead).tolist())
        rows = set(running.order.tolist())
        if rows & dead or (rows | dead) != resident:
            raise CacheError(f"rows {sorted(rows)} run and {sorted(dead)} are dead, but {sorted(resident)} hold blocks")
        if len(dead) != running.num_dead or [request.row for request in running.requests] != running.order.tolist():
            raise CacheError("the order of running requests and their rows differ")
        steps = np.zeros_like(running.steps)
        pending = np.zeros_like(running.pending)
        for flight in self._in_flight:
            attached = flight.attached()
            steps[flight.rows[attached]] += 1
            pending[flight.rows[attached & flight.step.samples]] += 1
        live = sorted(resident)
        if not (
            np.array_equal(steps[live], running.steps[live]) and np.array_equal(pending[live], running.pending[live])
        ):
            raise CacheError("the steps in flight differ from what the rows expect of them")
        waiting = self._waiting.requests()
        with self._lock:
            arriving = {item.request_id for item in self._inbox if isinstance(item, Request)}
            known = set(self._known)
        named = arriving | {request.request_id for request in (*waiting, *running.requests)}
        if named != known or any(request.row >= 0 for request in waiting):
            raise CacheError("the requests known are not those that wait or run, or one that waits holds a row")

    # -- inside

    def _claim(self) -> None:
        me = threading.get_ident()
        if self._owner is None:
            self._owner = me
        elif self._owner != me:
            raise OwnershipError(
                "another thread drives this scheduler: only its owner may schedule, update, fail and finish; "
                "add and abort may come from anywhere"
            )

    def _empty_inbox(self) -> None:
        while self._inbox:
            with self._lock:
                item = self._inbox.popleft()
                request = self._known.get(item) if isinstance(item, str) else None
            if isinstance(item, Request):
                self._waiting.append(item)
            elif request is not None:
                self._end([(request, FinishReason.ABORT)])

    def _limit_tokens(self, request: Request) -> int:
        """Most tokens that ``request`` may have, prompt and output."""
        return min(request.num_prompt_tokens + request.sampling.max_tokens, self.cache.max_model_len)

    def _refuse_too_large(self, request: Request) -> None:
        """CapacityError if the pool cannot hold ``request`` alone: all its tokens but the last."""
        tokens = max(self._limit_tokens(request) - 1, request.num_tokens)
        needed = sum(group.policy.columns(tokens) for group in self.cache.groups)
        usable = self.cache.block_pool.num_blocks - 1
        if needed <= usable:
            return
        arena = self.cache.config.arena_bytes // self.cache.config.num_blocks
        size = f", {format_bytes((needed + 1) * arena)} with the null block" if arena else ""
        raise CapacityError(
            f"request {request.request_id!r} may reach {tokens} tokens: {needed} blocks{size}; the pool has {usable}: "
            "give it more memory, or lower max_tokens"
        )


def _joined(parts: list[Int64]) -> Int64:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _new_row(request: Request) -> NewRow:
    return NewRow(
        row=request.row,
        request_id=request.request_id,
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
    )
