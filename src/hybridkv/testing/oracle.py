"""Manager and scheduler in plain Python, one request and one block at a time.

``counts`` has the statistics of the scheduler, and how often something rare happened: requests that ended with steps
in flight ("dead"), tokens for requests that had been preempted meanwhile ("late").

No hashes (a key is the salt and all tokens up to the block's end), no arrays, no batches. It foretells every Step,
every block id, every hit, victim, admission, sampled token and reason to finish.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from hybridkv.schedule import SchedulerLimits
from hybridkv.testing.model import DigestModel
from hybridkv.testing.oracle_pool import OraclePool, Prefix


@dataclass(eq=False, slots=True)
class OracleRequest:
    """A request and what is known of it. tables: per group its blocks. published: per group, columns that were."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    limit: int
    stops: frozenset[int]
    salt: str | None
    tables: list[list[int]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    computed: int = 0
    preemptions: int = 0
    first_hit: int | None = None


@dataclass(eq=False, slots=True)
class Entry:
    """A row of a step. tokens: -1 where the token is not known yet. cells: (group, column, block) that are new."""

    request: OracleRequest
    computed: int
    count: int
    samples: bool
    tokens: list[int]
    cells: list[tuple[int, int, int]]
    admitted: bool
    attached: bool = True


@dataclass(eq=False, slots=True)
class OracleStep:
    """A step in flight."""

    step_id: int
    entries: list[Entry] = field(default_factory=list)

    def holds(self, request: OracleRequest) -> bool:
        """Whether ``request`` runs in it and was not preempted since."""
        return any(entry.request is request and entry.attached for entry in self.entries)


class Oracle:
    """block_sizes: one a group. model: what samples."""

    def __init__(
        self,
        num_blocks: int,
        block_sizes: tuple[int, ...],
        max_model_len: int,
        limits: SchedulerLimits,
        model: DigestModel,
        *,
        caching: bool = True,
    ) -> None:
        self.pool = OraclePool(num_blocks)
        self.sizes = block_sizes
        self.max_model_len = max_model_len
        self.limits = limits
        self.model = model
        self.caching = caching
        self.waiting: list[OracleRequest] = []
        self.running: list[OracleRequest] = []
        self.dead: list[OracleRequest] = []
        self.in_flight: list[OracleStep] = []
        self.finished: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.peak_usage = 0.0

    # -- requests come and go

    def fits_alone(self, prompt: int, max_tokens: int) -> bool:
        """Whether such a request could ever run."""
        if prompt >= self.max_model_len:
            return False
        most = min(prompt + max_tokens, self.max_model_len) - 1
        return sum(math.ceil(most / size) for size in self.sizes) <= self.pool.num_blocks - 1

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int, stops: frozenset[int], salt: str | None
    ) -> OracleRequest:
        """A request joins the queue."""
        limit = min(len(prompt) + max_tokens, self.max_model_len)
        request = OracleRequest(request_id, list(prompt), len(prompt), limit, stops, salt)
        self.waiting.append(request)
        return request

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
        if any(step.holds(request) for step in self.in_flight):
            self.dead.append(request)
            self.counts["dead"] += 1
        else:
            self._publish(request, request.computed, None)
            self._free(request)

    # -- blocks

    def columns(self, tokens: int) -> list[int]:
        """Blocks that ``tokens`` tokens fill, per group."""
        return [math.ceil(tokens / size) for size in self.sizes]

    def hit(self, tokens: list[int], salt: str | None) -> tuple[int, list[list[int]]]:
        """The longest cached prefix, never all tokens, and its blocks."""
        if not self.caching:
            return 0, [[] for _ in self.sizes]
        runs = []
        for group, size in enumerate(self.sizes):
            run: list[int] = []
            while (len(run) + 1) * size < len(tokens):
                block = self.pool.find(group, _prefix(tokens, salt, (len(run) + 1) * size))
                if block is None:
                    break
                run.append(block)
            runs.append(run)
        shortest = min(len(run) * size for run, size in zip(runs, self.sizes, strict=True))
        agreed = shortest // math.lcm(*self.sizes) * math.lcm(*self.sizes)
        return agreed, [run[: agreed // size] for run, size in zip(runs, self.sizes, strict=True)]

    def _take(self, request: OracleRequest, tokens: int) -> list[tuple[int, int, int]] | None:
        """Blocks for the first ``tokens`` tokens; the new cells, None when they do not fit."""
        missing = [max(n - len(table), 0) for n, table in zip(self.columns(tokens), request.tables, strict=True)]
        if sum(missing) > len(self.pool.free):
            return None
        cells = []
        for group, (n, table) in enumerate(zip(missing, request.tables, strict=True)):
            for block in self.pool.take(n):
                cells.append((group, len(table), block))
                table.append(block)
        return cells

    def _publish(self, request: OracleRequest, computed: int, step: int | None) -> None:
        """Full blocks of known, computed tokens can be hit."""
        if not self.caching:
            return
        for group, size in enumerate(self.sizes):
            for column in range(request.published[group], min(computed, len(request.tokens)) // size):
                prefix = _prefix(request.tokens, request.salt, (column + 1) * size)
                self.pool.publish(group, request.tables[group][column], prefix, step)
                request.published[group] = column + 1

    def _free(self, request: OracleRequest) -> None:
        """All of its blocks, last first."""
        for table in request.tables:
            self.pool.release(table[::-1])
        request.tables = []

    # -- schedule

    def schedule(self) -> OracleStep:
        """The next step."""
        step, budget, preempted = OracleStep(self.counts["steps"]), self.limits.max_batched_tokens, False
        for request in list(self.running):
            if request not in self.running:
                break  # preempted, and with it all behind it
            pending = self._pending(request)
            count = min(len(request.tokens) + pending, request.limit - 1) - request.computed
            count = min(count, budget)
            if count == 0:
                continue
            while request in self.running:
                cells = self._take(request, request.computed + count)
                if cells is not None:
                    step.entries.append(self._entry(request, count, pending, cells, admitted=False))
                    budget -= count
                    break
                self._preempt(self.running[-1])
                preempted = True
        while not preempted and budget and self._seat_free() and self.waiting:
            entry = self._admit(self.waiting[0], budget)
            if entry is None:
                break
            step.entries.append(entry)
            budget -= entry.count
        for entry in step.entries:
            entry.request.computed += entry.count
        self.in_flight.append(step)
        self.counts["steps"] += 1
        self.peak_usage = max(self.peak_usage, self.pool.usage)
        return step

    def _entry(
        self, request: OracleRequest, count: int, pending: int, cells: list[tuple[int, int, int]], *, admitted: bool
    ) -> Entry:
        """A row of the step; what it fills can be hit from now on."""
        computed = request.computed
        known = request.tokens[computed : computed + count]
        samples = computed + count == len(request.tokens) + pending
        self._publish(request, computed + count, self.counts["steps"])
        return Entry(request, computed, count, samples, known + [-1] * (count - len(known)), cells, admitted)

    def _pending(self, request: OracleRequest) -> int:
        """Tokens that steps in flight sample for it."""
        return sum(
            entry.samples and entry.attached and entry.request is request
            for step in self.in_flight
            for entry in step.entries
        )

    def _seat_free(self) -> bool:
        return len(self.running) + len(self.dead) < self.limits.max_running

    def _admit(self, request: OracleRequest, budget: int) -> Entry | None:
        """Its first chunk, if all of its tokens fit and the reserve is left; None otherwise."""
        if any(entry.request is request for step in self.in_flight for entry in step.entries):
            return None  # results of an earlier life are still to come
        hit, blocks = self.hit(request.tokens, request.salt)
        everything = sum(self.columns(len(request.tokens))) - sum(len(run) for run in blocks)
        unheld = sum(self.pool.refs[block] == 0 for run in blocks for block in run)
        someone = self.running or self.dead
        reserve = int(self.limits.watermark * (self.pool.num_blocks - 1)) if someone else 0
        if everything + unheld + reserve > len(self.pool.free):
            return None
        self.waiting.remove(request)
        self.running.append(request)
        for run in blocks:
            self.pool.touch(run)
        request.tables = [list(run) for run in blocks]
        request.published = [len(run) for run in blocks]
        request.computed = hit
        if request.first_hit is None:
            request.first_hit = hit
            self.counts["prompt"] += request.num_prompt_tokens
            self.counts["hit"] += hit
        count = min(len(request.tokens) - hit, budget)
        self._take(request, hit + count)
        cells = [(g, column, block) for g, table in enumerate(request.tables) for column, block in enumerate(table)]
        return self._entry(request, count, 0, cells, admitted=True)

    def _preempt(self, request: OracleRequest) -> None:
        self.counts["preempted"] += 1
        request.preemptions += 1
        self._send_back([request])

    def _send_back(self, requests: list[OracleRequest]) -> None:
        """Running requests lose their blocks and wait at the front, in this order."""
        for request in requests:
            self._free(request)
            request.computed = 0
            self.running.remove(request)
            for step in self.in_flight:
                for entry in step.entries:
                    entry.attached &= entry.request is not request
        self.waiting = requests + self.waiting

    # -- results

    def update(self) -> tuple[list[list[int]], list[tuple[str, str]]]:
        """The oldest step ran: tokens appended to each of its rows, and who ended since the update before."""
        step = self.in_flight.pop(0)
        self.counts["computed"] += sum(entry.count for entry in step.entries)
        self.pool.step = {block: at for block, at in self.pool.step.items() if at != step.step_id}
        appended: dict[int, list[int]] = {}
        for late in (False, True):  # rows first, then requests that were preempted meanwhile
            for i, entry in enumerate(step.entries):
                alive = entry.request in (self.waiting if late else self.running)
                if alive and entry.samples and entry.attached != late:
                    appended[i] = [self._append(entry.request)]
                    self.counts["late"] += late
        for entry in step.entries:
            if entry.request in self.dead and entry.attached and not self._held(entry.request):
                self.dead.remove(entry.request)
                self._publish(entry.request, entry.request.computed, None)
                self._free(entry.request)
        finished, self.finished = self.finished, []
        return [appended.get(i, []) for i in range(len(step.entries))], finished

    def _held(self, request: OracleRequest) -> bool:
        return any(step.holds(request) for step in self.in_flight)

    def _append(self, request: OracleRequest) -> int:
        token = self.model.next_token(request.tokens)
        request.tokens.append(token)
        if token in request.stops:
            self.end(request, "stop")
        elif len(request.tokens) >= request.limit:
            self.end(request, "length")
        return token

    def fail(self, step_id: int) -> None:
        """That step and all behind it never happened."""
        failed = [step for step in self.in_flight if step.step_id >= step_id]
        self.in_flight = [step for step in self.in_flight if step.step_id < step_id]
        self.counts["failed"] += len(failed)
        self.pool.unpublish(step_id)
        self._send_back([request for request in self.running if any(step.holds(request) for step in failed)])
        for step in failed:
            for entry in step.entries:
                if entry.request in self.dead and entry.attached and not self._held(entry.request):
                    self.dead.remove(entry.request)
                    self._free(entry.request)


def _prefix(tokens: list[int], salt: str | None, end: int) -> Prefix:
    return salt, tuple(tokens[:end])
