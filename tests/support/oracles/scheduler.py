"""The scheduler in plain Python, over a cache in plain Python (oracle_cache).

``counts`` has the statistics of the scheduler, and how often something rare happened: requests that ended with steps
in flight ("dead"), tokens for requests that had been preempted meanwhile ("late"), requests that were overtaken
("overtaken"), admissions that stopped behind one ("bound"), steps in which a running request passed an older one
("went ahead"), in which tokens were kept for waiting ones ("kept for short"), and requests that waited for those ("let
shorter ones pass"), chunks that were cut for a state ("split"), hits on a
state that is only being written ("unreadable"), and requests whose drafts, or whose encoder's output, were in flight
when they were aborted ("abort with drafts", "abort with encoder"), stopped by the caller ("stop with ..."), preempted
("preempted with ...") or lost by a failed step ("failed with ...").

It foretells every Step, every block id, every hit, victim, admission, sampled token and reason to finish.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hybridkv.schedule import SchedulerLimits
from hybridkv.testing.model import DigestModel
from oracles.cache import Cell, OracleCache, OracleHit, OracleRequest
from oracles.steps import Entry, OracleStep, keep_drafts, lost_in_flight, split_chunk, tell, verdict

_NOT_YET = 1 << 60
MOST_REFUSALS = 16
"""Of one step; then admission ends."""


class Oracle:
    """cache: manager. model: what samples. clock: seconds."""

    def __init__(
        self, cache: OracleCache, limits: SchedulerLimits, model: DigestModel, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.limits = limits
        self.model = model
        self.clock = clock
        self.waiting: list[OracleRequest] = []
        self.running: list[OracleRequest] = []
        self.dead: list[OracleRequest] = []
        self.in_flight: list[OracleStep] = []
        self.finished: list[tuple[str, str]] = []
        self.counts = cache.counts
        self.peak_usage = 0.0
        self.proposed: dict[str, list[int]] = {}
        self.short_tokens = int(self._short_share() * limits.max_batched_tokens)
        self.most = self.ahead = self.passed = 0
        self.kept: int | None = None
        self.room = True
        self._arrivals = 0
        states = [group.size for group in cache.groups if group.kind == "state"]
        self._state_block = math.lcm(*states) if states else 0

    def _short_share(self) -> float:
        """Of a step, what requests that lack no more may take first; everybody comes in order unless they say so."""
        return self.limits.short_share or 0.0

    # -- requests come and go

    def fits_alone(self, request: OracleRequest) -> bool:
        """Whether ``request`` could ever run."""
        return (
            len(request.tokens) < self.cache.max_model_len
            and self._needed(self._peaks(request, request.limit - 1)) <= self.pool.usable
        )

    def _needed(self, peaks: list[int]) -> int:
        """What so many blocks of every group take of the pool."""
        return sum(peaks)

    def _peaks(self, request: OracleRequest, tokens: int, computed: int = 0) -> list[int]:
        """Most blocks that ``request`` holds in each group on its way from ``computed`` to ``tokens`` tokens."""
        lookahead, steps = self.limits.num_lookahead_tokens, self.limits.max_in_flight
        total = min(tokens + lookahead, self.cache.max_model_len)
        in_flight = (self.limits.max_batched_tokens + lookahead) * steps
        found = []
        for group in self.cache.groups:
            if group.kind == "cross":
                found.append(math.ceil(request.encoder / group.size))
                continue
            peak = group.peak(total, in_flight, steps)
            if group.kind in {"window", "chunk"}:  # what is out of reach after a hit is never held
                peak = min(peak, math.ceil(total / group.size) - group.first_live(computed) // group.size)
            found.append(peak)
        return found

    def add(self, request: OracleRequest, arrival_time: float = 0.0) -> OracleRequest:
        """A request joins the queue, at its end until it is taken in."""
        request.arrival = (arrival_time, _NOT_YET)
        self.waiting.append(request)
        self._sort()
        return request

    def take_in(self) -> None:
        """Whoever was added is here now: number them in the order in which they were added."""
        for request in self.waiting:
            if request.arrival[1] == _NOT_YET:
                self._arrive(request)
        self._sort()

    def _arrive(self, request: OracleRequest) -> None:
        request.arrival = (request.arrival[0], self._arrivals)
        self._arrivals += 1

    @property
    def num_waiting(self) -> int:
        """Requests that were not admitted, or were sent back."""
        return len(self.waiting)

    @property
    def live_ids(self) -> list[str]:
        """Of requests that wait or run."""
        return [request.request_id for request in self.waiting + self.running]

    def known(self, request_id: str) -> OracleRequest | None:
        """A request that waits or runs."""
        return next((one for one in self.waiting + self.running if one.request_id == request_id), None)

    def end(self, request: OracleRequest, reason: str) -> None:
        """A request leaves; its blocks return now or when no step in flight holds them any more."""
        self.finished.append((request.request_id, reason))
        self.counts["finished"] += 1
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        if self._held(request):
            self.dead.append(request)
            self.counts["dead"] += 1
            self.counts.update(lost_in_flight(reason, [request], self.in_flight))
        else:
            self._release(request)

    def _release(self, request: OracleRequest) -> None:
        self.cache.settle(request)
        self.cache.free(request)

    def _held(self, request: OracleRequest) -> bool:
        return any(step.holds(request) for step in self.in_flight)

    def _sort(self) -> None:
        """Under priorities both queues are in order of urgency, then of arrival."""
        if self.limits.policy == "priority":
            for queue in (self.waiting, self.running):
                queue.sort(key=lambda request: (request.priority, *request.arrival))

    # -- schedule

    def propose(self, request_id: str, drafts: list[int]) -> None:
        """Drafts for the next step of a request; nothing for one that does not run, or that waits for a result."""
        request = next((one for one in self.running if one.request_id == request_id), None)
        if request is not None:
            self.proposed[request_id] = drafts if self._verifies(request) else []

    def _verifies(self, request: OracleRequest) -> bool:
        """Whether all but its last token are computed, one of its output, and no result is to come."""
        known = len(request.tokens)
        return request.computed == known - 1 >= request.num_prompt_tokens and not self._held(request)

    def schedule(self) -> OracleStep:
        """The next step."""
        self.take_in()
        step, budget, preempted = OracleStep(self.counts["steps"]), self.limits.max_batched_tokens, False
        self.room, self.passed = True, 0
        shares = self._shares(self.running, budget)
        for request in list(self.running):
            if request not in self.running:
                break  # preempted, and with it all behind it
            while request in self.running and (count := shares[request]):
                drafts = self._drafts(request, shares, budget)
                cells = self._allocate(request, count + len(drafts))
                if cells is not None:
                    step.entries.append(self._entry(request, count, cells, drafts, admitted=False))
                    budget -= count + len(drafts)
                    break
                if drafts:
                    del self.proposed[request.request_id]
                    self.counts["drafts given up"] += 1
                else:
                    self._preempt(self.running[-1])
                    self.room, preempted = False, True
                if request in self.running:
                    shares = self._shares(self.running[self.running.index(request) :], budget)
        budget = self._branch(step, budget, room=not preempted)
        if not preempted:
            self._admit(step, budget)
        self.proposed.clear()
        for entry in step.entries:
            entry.request.computed += entry.count
        self._complete(step)
        self._sort()
        self.in_flight.append(step)
        self.counts["steps"] += 1
        self.peak_usage = max(self.peak_usage, self.pool.usage)
        return step

    def _branch(self, step: OracleStep, budget: int, *, room: bool) -> int:  # noqa: ARG002 - the natural layout's affair
        """Requests that go on from a running one come in, if there is ``room``; what is left of the budget."""
        return budget

    def _complete(self, step: OracleStep) -> None:
        """What is left to say of a step when its rows are known."""
        tell(self.cache.groups, step)
        for entry in step.entries:
            entry.follow_states(self.cache.groups)

    def _drafts(self, request: OracleRequest, shares: dict[OracleRequest, int], budget: int) -> list[int]:
        """What is verified of its drafts, behind its own token: as far as nobody else's tokens need the budget."""
        drafts = self.proposed.get(request.request_id, [])
        known = len(request.tokens)
        if not drafts or not self._verifies(request):
            return []
        behind = self.running[self.running.index(request) :]
        left = budget - (self.kept or 0) - sum(shares[other] for other in behind)
        return drafts[: max(min(self.limits.num_speculative_tokens, request.limit - 1 - known, left), 0)]

    def _shares(self, requests: list[OracleRequest], budget: int) -> dict[OracleRequest, int]:
        """What each of ``requests``, which run, has: those that want least first, within the share, then in order."""
        wanted = {request: self._wanted(request) for request in requests}
        self.most = self.ahead = min(self.short_tokens, budget)
        self.kept = None
        short: list[OracleRequest] = []
        for request in sorted(requests, key=lambda one: wanted[one]):
            if wanted[request] > self.ahead:
                break
            short.append(request)
            self.ahead -= wanted[request]
        total = sum(wanted.values())
        if total > budget - self.most and total > budget - self._kept_tokens(self.waiting):
            others = [request for request in requests if request not in short]
            split = self.counts["split"]
            in_line = [request for request in requests if request in short] + others
            shares = self._in_turn(in_line, wanted, budget - self._kept_tokens(self.waiting))
            if shares[others[0]]:
                self.counts["went ahead"] += requests.index(others[0]) < len(short)
                return shares
            self.counts["split"] = split
        return self._in_turn(requests, wanted, budget)

    def _in_turn(
        self, requests: list[OracleRequest], wanted: dict[OracleRequest, int], budget: int
    ) -> dict[OracleRequest, int]:
        """First come, first served."""
        shares = {}
        for request in requests:
            shares[request] = self._split(request, request.computed, min(wanted[request], budget))
            budget -= shares[request]
        return shares

    def _kept_tokens(self, behind: list[OracleRequest]) -> int:
        """Tokens that nobody else may have, for requests ``behind`` in the queue: all that those lack, and they fit."""
        if self.kept is None:
            self.kept = 0
            seats = self.limits.max_running - len(self.running) - len(self.dead)
            counts, passed = self.counts.copy(), self.passed
            for request in behind if self.room and self.ahead and seats else []:
                count = self._short(request, self.ahead - self.kept)
                if count:
                    self.kept, seats = self.kept + count, seats - 1
                    if self.kept == self.ahead or not seats:
                        break
                    continue
                passed += 1
                if passed == MOST_REFUSALS or not self._lets_pass(request):
                    break
            self.counts.clear()
            self.counts.update(counts)
            self.counts["kept for short"] += self.kept > 0
        return self.kept

    def _short(self, request: OracleRequest, most: int) -> int:
        """Tokens with which ``request`` would begin, if it lacks ``most`` at most; 0 if it would not come in."""
        if self._held_over(request):
            return 0
        hit = self._look_up(request)
        lacked = len(request.tokens) - hit.tokens
        count = self._split(request, hit.tokens, lacked) if lacked <= most else 0
        return count if count and not self._being_written(hit) and self._fits(request, count, hit) else 0

    def _wanted(self, request: OracleRequest) -> int:
        """Tokens that a running request has left."""
        if any(entry.drafts for step in self.in_flight for entry in step.entries if self._runs(entry, request)):
            return 0  # how many tokens it has, nobody knows
        known = len(request.tokens) + self._pending(request)
        return min(known, request.limit - 1) - request.computed

    def _split(self, request: OracleRequest, computed: int, count: int) -> int:
        if not (self._state_block and count):
            return count
        largest = self.limits.max_batched_tokens
        eagle = self.cache.eagle and any(group.peeks for group in self.cache.publishers)
        shorter = split_chunk(request, computed, count, self._state_block, largest, eagle=eagle)
        self.counts["split"] += shorter < count
        return shorter

    def _pending(self, request: OracleRequest) -> int:
        """Tokens that steps in flight sample for it."""
        return sum(entry.samples and self._runs(entry, request) for step in self.in_flight for entry in step.entries)

    @staticmethod
    def _runs(entry: Entry, request: OracleRequest) -> bool:
        return entry.attached and entry.request is request

    def _allocate(self, request: OracleRequest, count: int, hit: OracleHit | None = None) -> list[Cell] | None:
        return self.cache.allocate(
            request,
            count,
            hit,
            lookahead=self.limits.num_lookahead_tokens,
            in_flight=sum(step.tokens_of(request) for step in self.in_flight),
            step=self.counts["steps"],
        )

    def _entry(
        self, request: OracleRequest, count: int, cells: list[Cell], drafts: list[int], *, admitted: bool
    ) -> Entry:
        """A row of the step: ``count`` tokens and ``drafts`` behind them."""
        computed = request.computed
        known = request.tokens[computed : computed + count]
        samples = computed + count == len(request.tokens) + self._pending(request)
        tokens = known + [-1] * (count - len(known)) + drafts
        return Entry(request, computed, len(tokens), samples, tokens, cells, admitted, drafts=drafts)

    # -- admission

    def _admit(self, step: OracleStep, budget: int) -> None:
        """Waiting requests in order; one that is refused is overtaken, but not for ever."""
        now = self.clock()
        refused: list[OracleRequest] = []
        waiting = list(self.waiting)
        for place, request in enumerate(waiting):
            if not budget or len(self.running) + len(self.dead) >= self.limits.max_running:
                return
            behind = waiting[place + 1 :]
            if not self._held_over(request) and not self._lets_pass(request):
                self.room, self.kept = False, 0
            if not self._held_over(request) and not self._room_of(request, budget, behind):
                self.counts["let shorter ones pass"] += 1
                self.passed += 1
                if self.passed == MOST_REFUSALS or not self._lets_pass(request):
                    return
                continue
            entry = self._admit_one(request, budget)
            if entry is not None:
                step.entries.append(entry)
                budget = self._spend(entry, budget)
                for other in refused:
                    other.overtaken += 1
                    self.counts["overtaken"] += 1
                if any(other.overtaken >= self.limits.max_overtaken for other in refused):
                    self.counts["bound"] += 1
                    return
                continue
            refused.append(request)
            self.passed += 1
            noted = request.refused_at is None and self.passed < MOST_REFUSALS
            request.refused_at = now if noted else request.refused_at
            if self.passed == MOST_REFUSALS or not self._lets_pass(request):
                self.counts["bound"] += 1
                return

    def _admit_one(self, request: OracleRequest, budget: int) -> Entry | None:
        """Its first chunk, if all of its tokens fit and the reserve is left; None otherwise."""
        if self._held_over(request):
            return None
        return self._admit_with(request, self._look_up(request), budget)

    def _held_over(self, request: OracleRequest) -> bool:
        """Whether results of an earlier life are still to come."""
        return any(entry.request is request for step in self.in_flight for entry in step.entries)

    def _look_up(self, request: OracleRequest) -> OracleHit:
        hit = self.cache.hit(request.tokens, request.salt, reads=request.reads)
        request.branch = hit.tokens + hit.uncached if hit.uncached else 0
        return hit

    def _lets_pass(self, request: OracleRequest) -> bool:
        """Whether those behind ``request`` may come in before it."""
        waited = 0 if request.refused_at is None else self.clock() - request.refused_at
        return request.overtaken < self.limits.max_overtaken and waited < self.limits.max_overtaken_seconds

    def _room_of(self, request: OracleRequest, budget: int, behind: list[OracleRequest]) -> int:
        """Tokens that a waiting request may have, those ``behind`` it being shorter perhaps."""
        return self._room(len(request.tokens) - self._look_up(request).tokens, budget, behind)

    def _room(self, lacked: int, budget: int, behind: list[OracleRequest]) -> int:
        if lacked <= budget - self.most or lacked <= self.ahead:
            return min(lacked, budget)
        return max(min(lacked, budget - self._kept_tokens(behind)), 0)

    def _spend(self, entry: Entry, budget: int) -> int:
        """A request that waited came in; what is left of the budget."""
        if len(entry.request.tokens) - entry.request.computed <= self.ahead:
            self.ahead -= entry.count
            self.kept = None if self.kept is None else max(self.kept - entry.count, 0)
        return budget - entry.count

    def _admit_with(self, request: OracleRequest, hit: OracleHit, budget: int) -> Entry | None:
        lacked = len(request.tokens) - hit.tokens
        count = self._split(request, hit.tokens, self._room(lacked, budget, self._behind(request)))
        if not count or self._being_written(hit) or not self._fits(request, count, hit):
            return None
        cells = self._allocate(request, count, hit)
        if cells is None:
            return None
        self.waiting.remove(request)
        return self._come_in(request, count, hit.tokens, cells)

    def _behind(self, request: OracleRequest) -> list[OracleRequest]:
        return self.waiting[self.waiting.index(request) + 1 :] if request in self.waiting else []

    def _come_in(self, request: OracleRequest, count: int, hit_tokens: int, cells: list[Cell]) -> Entry:
        """``request`` has its blocks."""
        self.running.append(request)
        request.computed = hit_tokens
        request.overtaken, request.refused_at = 0, None
        if request.first_hit is None:
            request.first_hit = hit_tokens
            self.counts["prompt"] += request.num_prompt_tokens
            self.counts["hit"] += min(hit_tokens, request.num_prompt_tokens)
        return self._entry(request, count, cells, [], admitted=True)

    def _being_written(self, hit: OracleHit) -> bool:
        """Whether the hit ends in a state that the step being scheduled writes."""
        for group, table in zip(self.cache.groups, hit.tables, strict=True):
            if group.kind == "state" and table and self.pool.step.get(table[-1]) == self.counts["steps"]:
                self.counts["unreadable"] += 1
                return True
        return False

    def _fits(self, request: OracleRequest, count: int, hit: OracleHit) -> bool:
        """Whether all known tokens fit, and the reserve besides."""
        layout, needed = self.cache.lay_out(request, count, hit, self.limits.num_lookahead_tokens)
        peaks = self._peaks(request, len(request.tokens), hit.tokens)
        later = sum(
            max(peak - sum(block != 0 for block in table), 0) for peak, table in zip(peaks, layout, strict=True)
        )
        someone = self.running or self.dead
        reserve = int(self.limits.watermark * self.pool.usable) if someone else 0
        return needed + later + reserve <= len(self.pool.free)

    def _preempt(self, request: OracleRequest) -> None:
        self.counts["preempted"] += 1
        self.counts.update(lost_in_flight("preempted", [request], self.in_flight))
        request.preemptions += 1
        self._send_back([request])

    def _send_back(self, requests: list[OracleRequest]) -> None:
        """Running requests lose their blocks and wait at the front, in this order (or at their place by priority)."""
        for request in requests:
            self.cache.free(request)
            request.computed = request.overtaken = 0
            request.refused_at = None
            self.running.remove(request)
            for step in self.in_flight:
                for entry in step.entries:
                    entry.attached &= entry.request is not request
        self.waiting = requests + self.waiting
        self._sort()

    # -- results

    def update(self) -> tuple[list[list[int]], list[tuple[str, str]]]:
        """The oldest step ran: tokens appended to each of its rows, and who ended since the update before."""
        step = self.in_flight.pop(0)
        self.counts["computed"] += sum(entry.count for entry in step.entries)
        self.pool.step = {block: at for block, at in self.pool.step.items() if at != step.step_id}
        appended: dict[int, list[int]] = {}
        sampled = [verdict(self.model, entry, self.counts) for entry in step.entries]
        for late in (False, True):  # rows first, then requests that were preempted meanwhile
            for i, entry in enumerate(step.entries):
                alive = entry.request in (self.waiting if late else self.running)
                if alive and entry.samples and entry.attached != late:
                    appended[i] = self._append(entry, sampled[i])
                    self.counts["late"] += late
        for entry in step.entries:
            if entry.request in self.dead and entry.attached and not self._held(entry.request):
                self._keep_drafts(entry, 0)
                self.dead.remove(entry.request)
                self._release(entry.request)
        self.take_in()
        finished, self.finished = self.finished, []
        return [appended.get(i, []) for i in range(len(step.entries))], finished

    def _append(self, entry: Entry, sampled: list[int]) -> list[int]:
        """Token after token, until the request is done."""
        request, reason, appended = entry.request, "", list[int]()
        sampled = sampled or [self.model.next_token(request.tokens, request.digest)]
        while len(appended) < len(sampled) and not reason:
            appended.append(sampled[len(appended)])
            request.tokens.append(appended[-1])
            if appended[-1] in request.stops:
                reason = "stop"
            elif len(request.tokens) >= request.limit:
                reason = "length"
        self.counts["cut drafts"] += len(appended) < len(sampled)
        if entry.attached:
            self._keep_drafts(entry, min(len(sampled) - 1, len(appended)))
        if reason:
            self.end(request, reason)
        return appended

    def _keep_drafts(self, entry: Entry, kept: int) -> None:
        """Only the first ``kept`` drafts of a row were ever computed; its states go on from the last of them."""
        if not entry.drafts:
            return
        keep_drafts(self.cache.groups, entry, kept)
        if kept:
            self.cache.accept(entry.request)

    def fail(self, step_id: int) -> None:
        """That step and all behind it never happened."""
        failed = [step for step in self.in_flight if step.step_id >= step_id]
        self.in_flight = [step for step in self.in_flight if step.step_id < step_id]
        self.counts["failed"] += len(failed)
        self.counts.update(lost_in_flight("failed", self.running, failed))
        self._forget(failed)
        self._send_back([request for request in self.running if self._lost(request, failed)])
        for step in failed:
            for entry in step.entries:
                if entry.request not in self.dead or not entry.attached:
                    continue
                entry.request.computed -= entry.count
                if not self._held(entry.request):
                    self.dead.remove(entry.request)
                    self.cache.free(entry.request)
        self.take_in()

    def _forget(self, failed: list[OracleStep]) -> None:
        """What ``failed`` steps should have written can be hit no longer."""
        self.pool.unpublish(failed[0].step_id)

    def _lost(self, request: OracleRequest, failed: list[OracleStep]) -> bool:
        """Whether ``request`` must start anew because those steps failed."""
        return any(step.holds(request) for step in failed)
