"""The replay loop: requests of a trace drive the real scheduler; only time is modelled.

    for each request of the trace:
        until its arrival, either take one step:    schedule() -> Step;  now += cost;  update(next output tokens)
                           or several equal steps:  fast_forward(next output tokens of all rows)
        then add the request to a replica; with several replicas, a router chooses one
    until all requests are done: take steps in the same way

Simulated time advances only by steps. It jumps to the next arrival if the scheduler has no work. The scheduler reads
the same ``clock``. A request is built and hashed when it arrives, and deleted when it finishes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Transfer
from hybridkv.errors import CacheError, ConfigError
from hybridkv.extra_keys import EncoderInput
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, UniformSteps
from hybridkv.simulator.cost import StepCost
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.outputs import Live, OutputRows, Speculation
from hybridkv.simulator.report import Distribution, Explained, GroupReport, Recording, ReplayReport
from hybridkv.simulator.trace import RequestSource, TraceSummary
from hybridkv.simulator.transfers import TierTransfers
from hybridkv.step import Copy, Step, StepResult

_NO_TRANSFERS: Final = np.empty(0, np.int32)
_STEPS_PER_PROGRESS: Final = 64
"""Steps between two reports of progress, so that a report costs little compared with the steps. Chosen by hand."""
_MOST_EMPTY_STEPS: Final = 1000
"""Empty steps in a row after which a replay fails, because it would never end. Chosen by hand."""
_OWN: Final = ("requests", "prompt_tokens", "output_tokens", "longest_tokens", "steps", "moves", "moved_bytes")
_COUNTS: Final = (
    *("hit_tokens", "computed_tokens", "preemptions", "peak_usage", "misses", "drafted_tokens", "accepted_tokens"),
)
_KEPT: Final = ("ends", "missed_tokens", "missed_a_gib_more", "tenants")
"""Fields of a report that have the same name in the replica (_OWN), the scheduler (_COUNTS) and the cache (_KEPT)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a replay.

    Attributes:
        requests: finished requests.
        steps: steps so far.
        running: running requests.
        waiting: waiting requests.
        time_s: simulated seconds.
        prompt_tokens: prompt tokens of all requests that have begun.
        hit_tokens: hit tokens of these requests.
        usage: share of the blocks that requests hold, 0 to 1; with several replicas, the largest share.
        most_at_once: largest number of unfinished requests at one time so far; with several replicas, the largest.
    """

    requests: int
    steps: int
    running: int
    waiting: int
    time_s: float
    prompt_tokens: int
    hit_tokens: int
    usage: float
    most_at_once: int


class SimulatedClock:
    """Simulated seconds since the trace began. Pass it to Scheduler as ``clock``, which calls it for the time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s


class _FastForward:
    """The next steps that a fast-forward may take, and the end of each; no step begins at ``arrival_s`` or later.

    The scheduler calls ``begin`` and ``end``, which set ``clock`` to the time of the step.
    """

    def __init__(self, outputs: OutputRows, cost: StepCost, clock: SimulatedClock, arrival_s: float | None) -> None:
        self._outputs = outputs
        self._cost = cost
        self._clock = clock
        self._now_s = clock.now_s
        self._arrival_s = arrival_s
        self.rows = self._computed = np.empty(0, np.int64)
        self._ends_s = np.empty(0)

    def choose(self, uniform: UniformSteps) -> NDArray[np.int32]:
        """Return the tokens of all rows, int32[rows, steps], for the steps that may be taken.

        The steps begin before the next arrival, and before the patience of a waiting request ends.
        """
        rows, computed, most = uniform.rows, uniform.computed, uniform.steps
        self.rows, self._computed = rows, computed
        if self._arrival_s is not None:
            step_s = self._cost.decode_seconds(computed, 1).item()
            if step_s * most > self._arrival_s - self._now_s:  # an estimate, so that few tokens are made in vain
                most = int((self._arrival_s - self._now_s) / step_s) + 1
        tokens = self._outputs.next_tokens(rows, most)
        seconds = self._cost.decode_seconds(computed, tokens.shape[1])
        self._ends_s = np.cumsum(
            np.concatenate(([self._now_s], seconds))
        )  # summed in order, so that times equal those of single steps
        begins_s = self._ends_s[:-1]
        if uniform.since_s is not None:
            begins_s = begins_s[begins_s - uniform.since_s < uniform.patience_s]
        if self._arrival_s is not None:
            begins_s = begins_s[begins_s < self._arrival_s]
        return tokens[:, : len(begins_s)]

    def begin(self, step: int) -> None:
        """Set the clock to the start of ``step``."""
        self._clock.now_s = self._ends_s.item(step)

    def end(self, steps: int, copies: Sequence[Transfer]) -> None:
        """Set the clock to the end of the last of ``steps`` steps, which made ``copies``."""
        self.begin(steps if not copies else steps - 1)
        if copies:
            self._clock.now_s += self._cost.decode_seconds(self._computed + steps - 1, 1, copies).item()


@dataclass(frozen=True, slots=True)
class Simulation:
    """The parts that a replay drives, unused so far.

    Attributes:
        scheduler: a scheduler without requests.
        cost: cost model of its steps.
        clock: the clock that the scheduler reads.
        encoder_tokens: encoder tokens of every request; 0: the model has no encoder.
        caching_off: the reason why no request can hit; ``None`` if requests can hit.
        step_by_step: as in ReplaySettings.
        speculation: as in ReplaySettings.
        machine: the machine of the times, in words.
        transfers: transfers of the scheduler's host tier; ``None`` without one.
    """

    scheduler: Scheduler
    cost: StepCost
    clock: SimulatedClock
    encoder_tokens: int = 0
    caching_off: str | None = None
    step_by_step: bool = False
    speculation: Speculation | None = None
    machine: str = ""
    transfers: TierTransfers | None = None

    def replica(self) -> Replica:
        """Return a replica that runs these parts. Call this once: the parts keep their state."""
        return Replica(self)

    def run(
        self,
        source: RequestSource,
        *,
        summary: TraceSummary | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        recording: Recording | None = None,
        on_explained: Callable[[Explained], None] | None = None,
    ) -> ReplayReport:
        """Replay a trace and return the report. Call this once: the parts keep their state. O(steps).

        Args:
            source: the trace or workload.
            summary: counts of the trace, if you have them already.
            on_progress: called at most every 64 steps and at the end.
            recording: a Recording of ``scheduler``.
            on_explained: called as each request begins, with the reasons of its misses.

        Raises:
            TraceError: for a malformed line.
            ConfigError: for a request that can never fit; for ``on_explained`` if the cache does not explain misses.
        """
        counted = source.summary() if summary is None else summary
        replica = Replica(self, recording, on_explained)
        run_replicas(source, [replica], lambda _request, _now_s: 0, on_progress)
        return replace(with_known_hits(replica.report(source.name), counted), bad_lines=counted.bad_lines)


class Replica:
    """A scheduler in simulated time, with its live requests and its measurements.

    Args:
        simulation: the parts to run.
        recording: samples the replay; ``None``: nothing is sampled.
        on_explained: called as each request begins, with the reasons of its misses.

    Attributes:
        scheduler: the simulation's scheduler.
        clock: the simulation's clock.
        live: unfinished requests, by request id.
        most_at_once: largest number of unfinished requests at one time so far.
        request_s: seconds from arrival to end, summed over the finished requests.
        first_token_s: time to first token of each finished request, in seconds, in the order of their ends.
        per_token_s: time per output token of these requests, in seconds; NaN for an output of one token.

    Raises:
        ConfigError: for ``on_explained`` if the cache does not explain misses.
    """

    def __init__(
        self,
        simulation: Simulation,
        recording: Recording | None = None,
        on_explained: Callable[[Explained], None] | None = None,
    ) -> None:
        if on_explained is not None and simulation.scheduler.cache.misses is None:
            raise ConfigError("this cache cannot explain misses: construct it with remembered_losses above 0")
        self._on_explained = on_explained
        self.simulation = simulation
        self.scheduler, self.cost, self.clock = simulation.scheduler, simulation.cost, simulation.clock
        self.speculation, self.recording = simulation.speculation, recording
        self.transfers = simulation.transfers
        self.step_by_step = simulation.step_by_step or simulation.speculation is not None
        self.steps = self.empty_steps = self.row_steps = self.requests = 0
        self.prompt_tokens = self.output_tokens = self.longest_tokens = 0
        self.live: dict[str, Live] = {}
        self.most_at_once = 0
        self.rows = OutputRows()
        self.copies = [0] * len(self.scheduler.cache.groups)
        self.block_bytes = [self.scheduler.cache.config.block_bytes_of(group) for group in range(len(self.copies))]
        self.moves = self.moved_bytes = 0
        self.request_s = 0.0
        self.first_token_s, self.per_token_s = array("d"), array("d")

    def advance(self, until_s: float | None, on_steps: Callable[[], None] | None = None) -> None:
        """Run every step that begins before the next arrival.

        Args:
            until_s: time of the next arrival, in seconds; ``None``: run until all requests are done.
            on_steps: called after each step, and after each fast-forward.
        """
        while not self.scheduler.drained and (until_s is None or self.clock.now_s < until_s):
            if self.recording is not None:
                self.recording.look(self.clock.now_s)
            if self.step_by_step or not self._fast_forward(until_s):
                self._step(until_s)
            if on_steps is not None:
                on_steps()
        if until_s is not None:
            self.clock.now_s = max(self.clock.now_s, until_s)
        elif self.recording is not None:
            self.recording.look(self.clock.now_s, last=True)

    def request_of(self, request_id: str, trace: TraceRequest) -> Request:
        """Return a request of the trace as a Request, hashed as the replica's cache needs it. O(prompt tokens).

        Args:
            request_id: the id of the request.
            trace: the request of the trace.

        Raises:
            ConfigError: for an invalid request.
        """
        sampling = SamplingParams(max_tokens=trace.num_output_tokens, ignore_eos=True)
        # a trace does not describe encoder inputs, so each request gets its own and shares none
        size = self.simulation.encoder_tokens
        encoder = EncoderInput(f"request {request_id}", size) if size else None
        return Request(
            request_id,
            trace.prompt.token_ids(),
            sampling,
            hasher=self.scheduler.cache.hasher,
            arrival_time=trace.timestamp_s,
            encoder=encoder,
            marks=trace.marks,
            tenant=trace.tenant,
            hints=trace.hints,
        )

    def add(self, request: Request, trace: TraceRequest) -> None:
        """Add a request that arrives now.

        Args:
            request: the request, as ``request_of`` returns it.
            trace: the same request in the trace.

        Raises:
            ConfigError: for a request that can never fit.
        """
        self.scheduler.add(request)
        self.live[request.request_id] = Live(trace)
        self.most_at_once = max(self.most_at_once, len(self.live))  # only this method adds requests
        self.prompt_tokens += trace.num_prompt_tokens
        self.output_tokens += trace.num_output_tokens
        self.longest_tokens = max(self.longest_tokens, trace.num_tokens)

    def _step(self, arrival_s: float | None) -> None:
        """Schedule a step, advance the clock by its cost, and report its sampled tokens to the scheduler.

        ``arrival_s``: time of the next arrival, which ends an empty step that waits for a transfer.
        """
        speculation = self.speculation
        if speculation is not None:
            self._propose(speculation)
        step = self.scheduler.schedule()
        if self._on_explained is not None:
            for request, hit_tokens, misses in self.scheduler.explained:
                trace = self.live[request.request_id].trace
                hit = min(hit_tokens, request.num_prompt_tokens)
                self._on_explained(Explained(int(request.request_id), trace, self.clock.now_s, hit, misses))
        for new in step.new_rows:
            live = self.live[new.request_id]
            self.rows.begin(new, live)
            live.begun_s = self.clock.now_s if live.begun_s is None else live.begun_s
        if speculation is None:
            sampled, first = self.rows.sample(step)
        else:
            sampled, first = self.rows.sample_drafted(step, speculation)
        self.clock.now_s = self._end_of(step, arrival_s)
        if first.size:
            self.rows.note_first(first, self.clock.now_s)
        self.steps += 1
        self.row_steps += len(step)
        self._count(step.copies)
        now_s, transfers = self.clock.now_s, self.transfers
        arrived, lost = (_NO_TRANSFERS, _NO_TRANSFERS) if transfers is None else transfers.ended(now_s)
        accepted = None if speculation is None else np.diff(sampled.indptr).astype(np.int32)
        result = StepResult(step.id, sampled, accepted, arrived=arrived, lost=lost)
        self._check_progress(step, result)
        for done in self.scheduler.update(result).finished:
            self._finish(done.request)

    def _end_of(self, step: Step, arrival_s: float | None) -> float:
        """Return when ``step`` ends, in seconds. An empty one waits for the next transfer, or for ``arrival_s``."""
        now_s = self.clock.now_s
        if self.transfers is not None:
            self.transfers.begin(step, now_s)
            ends_s = self.transfers.next_end_s
            if not len(step) and ends_s is not None:
                return max(now_s, ends_s if arrival_s is None else min(ends_s, arrival_s))
        return now_s + self.cost.seconds(step)

    def _propose(self, speculation: Speculation) -> None:
        """Propose drafts for all running requests; the scheduler skips those that cannot have drafts now."""
        running = self.scheduler.running_requests()
        rows = np.array([request.row for request in running], np.int64)
        drafts = self.rows.drafts(rows, speculation)
        self.scheduler.propose({one.request_id: some for one, some in zip(running, drafts, strict=True) if some})

    def _fast_forward(self, arrival_s: float | None) -> bool:
        """Take all equal steps before ``arrival_s`` at once; return False, with nothing changed, if there are none."""
        plan = _FastForward(self.rows, self.cost, self.clock, arrival_s)
        taken = self.scheduler.fast_forward(plan.choose, plan)
        if not taken.steps:
            return False
        self.rows.skip(plan.rows, taken.steps)
        self.steps += taken.steps
        self.row_steps += taken.steps * taken.rows
        self.empty_steps = 0
        self._count(taken.copies)
        for done in taken.finished:
            self._finish(done.request)
        return True

    def _count(self, copies: Sequence[Copy | Transfer]) -> None:
        """Count the moves and copies of blocks."""
        for copy in copies:
            if copy.kind == "move":
                self.moves += 1
                self.moved_bytes += self.block_bytes[copy.group]
            else:
                self.copies[copy.group] += 1

    def _check_progress(self, step: Step, result: StepResult) -> None:
        """Raise CacheError after many steps that change nothing, of a scheduler with work: the loop would never end."""
        self.empty_steps = 0 if len(step) or len(result.arrived) else self.empty_steps + 1
        if self.empty_steps > _MOST_EMPTY_STEPS:
            raise CacheError(
                f"the scheduler made {self.empty_steps} empty steps in a row with {self.scheduler.num_waiting} waiting "
                f"requests, but at most {_MOST_EMPTY_STEPS} are allowed: this is a bug of the scheduler"
            )

    def _finish(self, request: Request) -> None:
        """Record the latencies of a request that ended now."""
        live = self.live.pop(request.request_id)
        self.requests += 1
        self.request_s += self.clock.now_s - live.trace.timestamp_s
        if self.recording is not None:
            begun_s = live.first_token_s if live.begun_s is None else live.begun_s
            times = (live.trace.timestamp_s, begun_s, live.first_token_s, self.clock.now_s)
            tokens = (live.trace.num_prompt_tokens, request.first_hit_tokens or 0, live.trace.num_output_tokens)
            self.recording.end(times, tokens)
        self.first_token_s.append(live.first_token_s - live.trace.timestamp_s)
        later_tokens = live.trace.num_output_tokens - 1
        spent_s = self.clock.now_s - live.first_token_s
        self.per_token_s.append(spent_s / later_tokens if later_tokens else math.nan)

    def report(self, source: str) -> ReplayReport:
        """Return the report of this replica. O(requests * log(requests)).

        Args:
            source: name of the trace.
        """
        counts, kept = self.scheduler.statistics(), self.scheduler.cache.statistics()
        counted: dict[str, Any] = {
            name: getattr(owner, name)
            for owner, names in ((self, _OWN), (counts, _COUNTS), (kept, _KEPT))
            for name in names
        }
        return ReplayReport(
            source=source,
            bad_lines=0,
            mean_running=round(self.row_steps / self.steps, 6) if self.steps else 0.0,
            simulated_s=round(self.clock.now_s, 6),
            time_to_first_token_s=Distribution.of(self.first_token_s),
            time_per_output_token_s=Distribution.of([one for one in self.per_token_s if not math.isnan(one)]),
            timed=self.cost.time_scale > 0,
            groups=tuple(self._groups()),
            refusals=dict(sorted(counts.refusals.items())),
            checkpoints=self.scheduler.cache.checkpoints.stored,
            declined_checkpoints=self.scheduler.cache.checkpoints.declined,
            caching_off=self.simulation.caching_off,
            machine=self.simulation.machine,
            host_tier=None if self.transfers is None else self.transfers.tier.statistics(),
            **counted,
        )

    def _groups(self) -> Iterator[GroupReport]:
        cache = self.scheduler.cache
        parts = zip(cache.config.groups, cache.groups, cache.statistics().groups, self.copies, strict=True)
        for planned, group, counts, copies in parts:
            yield GroupReport(
                kind=type(planned.spec).__name__,
                layers=len(planned.layer_names),
                block_size=group.policy.block_size,
                published=counts.published,
                evictions=counts.evictions,
                cached_blocks=counts.cached_blocks,
                copies=copies,
            )


def replay_through(
    source: RequestSource,
    scheduler: Scheduler,
    cost: StepCost,
    *,
    clock: SimulatedClock | None = None,
    encoder_tokens: int = 0,
    summary: TraceSummary | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    step_by_step: bool = False,
    speculation: Speculation | None = None,
    recording: Recording | None = None,
    on_explained: Callable[[Explained], None] | None = None,
) -> ReplayReport:
    """Replay a trace through your own scheduler, which must have no requests, and return the report. O(steps).

    Args:
        source: the trace or workload.
        scheduler: the scheduler to drive.
        cost: cost model of its steps.
        clock: the clock of the scheduler. Without it, the scheduler measures patience in wall time.
        encoder_tokens: encoder tokens of every request; 0: the model has no encoder.
        summary: counts of the trace, if you have them already.
        on_progress: called at most every 64 steps and at the end.
        step_by_step: as in ReplaySettings.
        speculation: as in ReplaySettings.
        recording: a Recording of the scheduler.
        on_explained: called as each request begins, with the reasons of its misses.

    Raises:
        TraceError: for a malformed line.
        ConfigError: for a request that can never fit; the message names it.
    """
    simulation = Simulation(
        scheduler,
        cost,
        SimulatedClock() if clock is None else clock,
        encoder_tokens,
        step_by_step=step_by_step,
        speculation=speculation,
    )
    return simulation.run(
        source, summary=summary, on_progress=on_progress, recording=recording, on_explained=on_explained
    )


def with_known_hits(report: ReplayReport, summary: TraceSummary) -> ReplayReport:
    """Return ``report``, without its hits if the trace holds only lengths, so that equal tokens are unknown.

    Args:
        report: the report of a replay.
        summary: summary of the replayed trace.
    """
    return report if summary.tokens_known else report.without_hits()


def run_replicas(
    source: RequestSource,
    replicas: Sequence[Replica],
    choose: Callable[[Request, float], int],
    on_progress: Callable[[Progress], None] | None = None,
    on_steps: Callable[[int], None] | None = None,
) -> None:
    """Run every request of ``source`` in one of ``replicas`` until all requests are done.

    Args:
        source: the trace or workload.
        replicas: replicas whose caches hash requests in the same way.
        choose: called with each request and its arrival time in seconds, after all earlier steps; returns the index of
            its replica.
        on_progress: called at most every 64 steps and at the end.
        on_steps: called with a replica's index after its steps.

    Raises:
        TraceError: for a malformed line.
        ConfigError: for a request that can never fit; the message names it.
    """
    reported = 0

    def stepped(at: int) -> None:
        nonlocal reported
        if on_steps is not None:
            on_steps(at)
        if on_progress is not None and (now := sum(one.steps for one in replicas) // _STEPS_PER_PROGRESS) > reported:
            reported = now
            on_progress(_progress(replicas))

    watch = [partial(stepped, at) for at in range(len(replicas))]
    for number, trace in enumerate(source):
        for at, replica in enumerate(replicas):
            replica.advance(trace.timestamp_s, watch[at])
        try:
            request = replicas[0].request_of(str(number), trace)
            replicas[choose(request, trace.timestamp_s)].add(request, trace)
        except ConfigError as error:
            raise ConfigError(f"{source.name}, {trace.origin}: {error}") from error
    for at, replica in enumerate(replicas):
        replica.advance(None, watch[at])
    if on_progress is not None:
        on_progress(_progress(replicas))


def _progress(replicas: Sequence[Replica]) -> Progress:
    """Return the progress of the whole replay: sums over the replicas, and their largest usage."""
    schedulers = [one.scheduler for one in replicas]
    found = [one.prompt_tokens_found for one in schedulers]
    return Progress(
        sum(one.requests for one in replicas),
        sum(one.steps for one in replicas),
        sum(one.num_running for one in schedulers),
        sum(one.num_waiting for one in schedulers),
        max(one.clock.now_s for one in replicas),
        sum(prompt for prompt, _ in found),
        sum(hit for _, hit in found),
        max(one.cache.usage for one in schedulers),
        max(one.most_at_once for one in replicas),
    )
