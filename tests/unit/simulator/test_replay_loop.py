"""The replay loop around the real scheduler and manager: exact hits, the trace's own outputs, simulated time."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.models import Model, read_model
from hybridkv.planner import Plan
from hybridkv.request import Request
from hybridkv.schedule import Outcome, Scheduler, SchedulerLimits
from hybridkv.simulator import (
    CacheTraffic,
    Hardware,
    Pieces,
    Progress,
    ReplayReport,
    ReplaySettings,
    StepCost,
    TraceRequest,
    UniformWorkload,
    Workload,
    plan_for_trace,
    plan_with_length,
    replay,
    replay_through,
    simulation_of,
)
from hybridkv.simulator.loop import run_replicas
from hybridkv.step import Step, StepResult
from hybridkv.units import GiB, MiB
from token_traces import Given

# every step takes exactly a second
SECOND = StepCost(0, 0, CacheTraffic(), Hardware("second", 1, 1, 1, 1, 1.0))
MODEL = read_model("llama-3-8b")
BLOCK_BYTES = int(MODEL.kv_bytes_per_token) * 16


@dataclass
class Watched(Scheduler):
    """A scheduler that remembers what it handed out and what its requests said."""

    cache: KVCacheManager
    limits: SchedulerLimits
    steps: list[Step] = field(default_factory=list)
    said: dict[str, list[int]] = field(default_factory=dict)
    marks: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.cache, self.limits)

    def schedule(self) -> Step:
        step = super().schedule()
        self.steps.append(step)
        return step

    def update(self, result: StepResult) -> Outcome:
        outcome = super().update(result)
        for done in outcome.finished:
            self.said[done.request.request_id] = done.request.output_token_ids
            self.marks[done.request.request_id] = done.request.marks
        return outcome


def request(time_s: float, prompt: int, output: int | tuple[tuple[int, int, int], ...], segment: int) -> TraceRequest:
    outputs = ((segment, 10_000, output),) if isinstance(output, int) else output
    return TraceRequest(time_s, Pieces(0, ((segment, 0, prompt),)), Pieces(0, outputs), origin=f"request {segment}")


def watched(
    source: Given | Workload, blocks: int, *, max_running: int = 8, budget: int = 512
) -> tuple[ReplayReport, Watched]:
    plan = plan_for_trace(source.summary(), MODEL, (blocks + 1) * BLOCK_BYTES)
    cache = KVCacheManager(plan.config, plan.max_model_len)
    scheduler = Watched(cache, SchedulerLimits(max_running=max_running, max_batched_tokens=budget))
    return replay_through(source, scheduler, SECOND, step_by_step=True), scheduler


def endless(
    source: UniformWorkload | Workload, model: Model = MODEL, layout: str = "reference", **settings: object
) -> ReplayReport:
    """A replay with memory for everything."""
    plan = plan_for_trace(source.summary(), model, 16 * GiB, layout=layout)
    return replay(source, plan, ReplaySettings(**settings))  # type: ignore[arg-type]  # settings of this file


# -- hits


@pytest.mark.parametrize("layout", ["reference", "natural"])
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("time_scale", [0.0, 1.0])
def test_replay_of_uniform_workload_matches_the_closed_form(block_size: int, time_scale: float, layout: str) -> None:
    workload = UniformWorkload()
    report = endless(workload, read_model("llama-3-8b", block_size=block_size), layout, time_scale=time_scale)
    assert report.hit_tokens == workload.hit_tokens(block_size, exact=layout == "natural")
    assert report.prompt_tokens == 40 * 187 + 10 * 58 * 6
    # all but the hits ran once, and every output token but the last of its answer
    assert report.computed_tokens == report.prompt_tokens - report.hit_tokens + 40 * 20
    assert (report.requests, report.preemptions, report.output_tokens) == (40, 0, 840)
    assert report.hit_rate == report.hit_tokens / report.prompt_tokens


def test_replay_closed_form_depends_on_the_gap() -> None:
    workload = UniformWorkload(templates=1, conversations=2, turns=2)
    assert endless(workload).hit_tokens == 16 * 33
    assert 0 < (endless(replace(workload, gap_s=0.0)).hit_tokens or 0) < 16 * 33  # answers are not there yet


# -- tokens


def test_replay_with_preemptions_keeps_the_outputs() -> None:
    source = Given([request(0, 40 + at, ((at, 500, 3 + at), (at, 700, 2), (at, 900, 50)), at) for at in range(12)])
    report, scheduler = watched(source, 14)
    assert report.preemptions > 3
    assert scheduler.said == {str(at): one.output.token_ids().tolist() for at, one in enumerate(source)}
    # recomputation counts as computed, not as prompt or hit
    assert report.prompt_tokens == sum(40 + at for at in range(12))
    assert report.hit_tokens == 0
    assert report.computed_tokens > report.prompt_tokens + sum(54 + at for at in range(12))
    assert 0.8 < report.peak_usage <= 1


def test_replay_passes_resume_marks_to_requests() -> None:
    source = Given([request(0, 20, 7, 1), replace(request(1, 20, 7, 2), marks=(16, 27))])
    _, scheduler = watched(source, 100)
    assert scheduler.marks == {"0": (), "1": (16, 27)}


def test_replay_with_many_requests_grows_its_columns() -> None:
    source = Given([request(0, 3, 2 + at % 3, at) for at in range(300)])
    report, scheduler = watched(source, 1000, max_running=200, budget=4096)
    assert max(len(step) for step in scheduler.steps) == 200
    assert scheduler.said == {str(at): one.output.token_ids().tolist() for at, one in enumerate(source)}
    assert report.mean_running == round(sum(map(len, scheduler.steps)) / len(scheduler.steps), 6)


# -- time


def test_replay_time_advances_by_steps_and_skips_idle() -> None:
    # 20 tokens at 16 a step: 2 steps to the first token, 2 more; then nothing until 100.5
    source = Given([request(0.5, 20, 3, 1), request(100.5, 4, 1, 2)])
    report, scheduler = watched(source, 100, budget=16)
    assert len(scheduler.steps) == report.steps == 5
    assert report.simulated_s == 101.5
    assert report.time_to_first_token_s.p99 == 2
    assert report.time_to_first_token_s.mean == 1.5
    # only the first request has a token after its first
    assert report.time_per_output_token_s.mean == 1
    assert report.mean_running == 1


def test_replay_arrivals_are_independent_of_progress() -> None:
    # the second arrives while the first runs and joins at the next step: at 1, not at 0.25
    source = Given([request(0, 4, 10, 1), request(0.25, 4, 2, 2)])
    report, scheduler = watched(source, 100)
    assert [len(step) for step in scheduler.steps] == [1, 2, 2] + [1] * 7
    assert report.time_to_first_token_s.p90 == 1.75
    assert report.simulated_s == 10


def test_replay_queue_time_is_in_time_to_first_token() -> None:
    source = Given([request(0, 4, 2, at) for at in range(3)])
    report, scheduler = watched(source, 100, max_running=1)
    assert [len(step) for step in scheduler.steps] == [1] * 6
    assert (report.time_to_first_token_s.mean, report.time_to_first_token_s.p99) == (3, 5)


def test_replay_time_scale_changes_time_only() -> None:
    slow, fast = (endless(UniformWorkload(gap_s=1000), time_scale=scale) for scale in (2.0, 1.0))
    assert slow.time_per_output_token_s.p50 == pytest.approx(2 * fast.time_per_output_token_s.p50, abs=1e-6)
    assert slow.hit_tokens == fast.hit_tokens


# -- limits


def test_replay_with_request_that_never_fits_names_it() -> None:
    source = Given([request(0, 4, 2, 1), request(1, 90, 10, 7)])
    plan = plan_for_trace(Given(source.requests[:1]).summary(), MODEL, GiB)
    with pytest.raises(
        ConfigError, match=r"given, request 7: request '1' has 90 tokens, but the limit is max_model_len - 1, 5"
    ):
        replay(source, plan, ReplaySettings())


def test_replay_plan_uses_the_longest_request() -> None:
    summary = Given([request(0, 9000, 100, 1), request(0, 5, 5, 2)]).summary()
    assert plan_for_trace(summary, MODEL, 4 * GiB).max_model_len == 9100
    assert plan_for_trace(summary, MODEL, 4 * GiB, 10_000).max_model_len == 10_000
    with pytest.raises(
        ConfigError, match=r"9000 is below the 9100 tokens of the longest request \(request 1\): raise it"
    ):
        plan_for_trace(summary, MODEL, 4 * GiB, 9000)
    with pytest.raises(
        CapacityError, match=r"needs 1\.11 GiB .*raise memory.*request 1, sets the maximum length"
    ) as caught:
        plan_for_trace(summary, MODEL, GiB)
    assert "lower max_model_len" not in str(caught.value)
    with pytest.raises(CapacityError, match="lower max_model_len"):
        plan_for_trace(summary, MODEL, GiB, 9200)


def test_replay_plan_with_another_length_is_checked() -> None:
    summary = Given([request(0, 9000, 100, 1)]).summary()
    small = plan_for_trace(Given([request(0, 5, 5, 2)]).summary(), MODEL, 2 * GiB)
    changed = plan_with_length(summary, small)
    assert isinstance(changed, Plan)
    assert (changed.max_model_len, changed.config) == (9100, small.config)
    assert plan_with_length(summary, small, 9500).max_model_len == 9500
    with pytest.raises(ConfigError, match="max_model_len 12 is below"):
        plan_with_length(summary, small, 12)
    tight = plan_for_trace(Given([request(0, 5, 5, 2)]).summary(), MODEL, 100 * MiB)
    with pytest.raises(CapacityError, match=r"50 slabs \(100 MiB\) hold one request of 784 tokens, but .* 9,100"):
        plan_with_length(summary, tight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_running": 0}, r"max_running \(--max-running\) must be at least 1, got 0"),
        ({"token_budget": -3}, r"token_budget \(--token-budget\) must be at least 1, got -3"),
        (
            {"short_share": 1.0},
            r"short_share \(--short-share\) must be a share of a step, 0 or more and below 1, got 1",
        ),
        ({"time_scale": -1.0}, r"time_scale \(--time-scale\) must be 0 or more"),
        ({"time_scale": float("nan")}, r"time_scale \(--time-scale\) must be 0 or more"),
    ],
)
def test_replay_settings_with_invalid_values_are_rejected(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplaySettings(**settings)  # type: ignore[arg-type]  # wrong on purpose


# -- who is not admitted, and what moves


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (512, "no_space"),  # 3 blocks of the one that is left
        (16, "admission_limit"),  # the last 8 tokens of a step's budget are one block, but more must follow
    ],
)
def test_replay_counts_a_refusal_once_per_step_and_request(budget: int, reason: str) -> None:
    # 43 tokens each: 3 blocks of 4, so one runs and the other is looked at in each of its last 3 steps
    source = Given([request(0, 40, 3, at) for at in range(2)])
    report, scheduler = watched(source, 4, budget=budget)
    assert report.refusals == scheduler.statistics().refusals == {reason: 3}
    assert report.preemptions == 0
    roomy, _ = watched(source, 6, budget=budget)
    assert (roomy.refusals, roomy.moves, roomy.moved_bytes) == ({}, 0, 0)


def test_replay_limits_of_requests_and_tokens_are_no_refusals() -> None:
    # who is not looked at is not refused
    report, _ = watched(Given([request(0, 40, 3, at) for at in range(4)]), 100, max_running=1)
    assert report.refusals == {}


def natural_plan(source: Workload) -> Plan:
    # two classes of several blocks a slab, of different bytes, in memory that is soon full
    return plan_for_trace(source.summary(), read_model("jamba-1.5-mini"), 1500 * MiB, layout="natural")


def test_replay_moves_match_the_steps() -> None:
    source = Workload("api", seed=1, hours=0.02)
    plan = natural_plan(source)
    cache = KVCacheManager(plan)
    scheduler = Watched(cache, SchedulerLimits(max_running=256, max_batched_tokens=8192))
    report = replay_through(source, scheduler, StepCost.of(plan), step_by_step=True)
    slabs = plan.config.slabs
    assert slabs is not None
    copies = [copy for step in scheduler.steps for copy in step.copies]
    moved = [slabs.class_of(copy.group).block_bytes for copy in copies if copy.kind == "move"]
    assert (report.moves, report.moved_bytes) == (len(moved), sum(moved))
    assert len(set(moved)) == 2
    # what is copied to be written to is another thing
    assert sum(group.copies for group in report.groups) == len(copies) - len(moved) > 0


# -- the rest


@pytest.mark.parametrize("step_by_step", [True, False])
def test_replay_peak_requests_are_counted_at_every_arrival(step_by_step: bool) -> None:
    source = Workload("chat", seed=5, limit=24)
    plan = plan_for_trace(source.summary(), MODEL, 3 * GiB)
    replica = simulation_of(plan, ReplaySettings(max_running=2, step_by_step=step_by_step)).replica()
    counted: list[int] = []

    def choose(_request: Request, _now_s: float) -> int:
        counted.append(replica.scheduler.num_running + replica.scheduler.num_waiting + 1)
        return 0

    told: list[Progress] = []
    run_replicas(source, [replica], choose, told.append)
    assert told[-1].most_at_once == max(counted) > 1
    assert (told[-1].running, told[-1].waiting) == (0, 0)


def test_replay_reports_progress() -> None:
    told: list[Progress] = []
    source = UniformWorkload(conversations=4)
    plan = plan_for_trace(source.summary(), MODEL, GiB)
    report = replay(source, plan, ReplaySettings(step_by_step=True), on_progress=told.append)
    assert [one.steps for one in told] == [*range(64, report.steps + 1, 64), report.steps]
    found = report.prompt_tokens, report.hit_tokens or 0
    assert told[-1] == Progress(16, report.steps, 0, 0, told[-1].time_s, *found, 0.0, told[-1].most_at_once)
    assert all(a.requests <= b.requests for a, b in pairwise(told))
    fast_forwarded: list[Progress] = []
    assert replay(source, plan, ReplaySettings(), on_progress=fast_forwarded.append) == report
    assert fast_forwarded[-1] == told[-1]
    assert len({one.steps // 64 for one in fast_forwarded[:-1]}) == len(fast_forwarded) - 1 <= len(told)
