"""FastForward: many steps taken as one leave what the same steps leave one by one."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridkv.cache import CacheOptions, Hit, KVCacheManager
from hybridkv.cache.fast_forward import FastForward as CacheFastForward
from hybridkv.errors import CacheError, CapacityError, ConfigError
from hybridkv.eviction import LRU
from hybridkv.eviction.hazard import HazardRanking
from hybridkv.eviction.ranked import RankedResumePoints
from hybridkv.eviction.resume_points import ResumePoint
from hybridkv.models import Layer, Model, known_models, read_model
from hybridkv.planner import Plan, plan
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Choose, Scheduler, SchedulerLimits
from hybridkv.schedule.admission import AdmissionControl, Standstill
from hybridkv.schedule.builder import StepBuilder
from hybridkv.simulator import (
    H100_UNBOUNDED,
    WORKLOADS,
    CacheTraffic,
    ReplayReport,
    ReplaySettings,
    Simulation,
    StepCost,
    UniformWorkload,
    Workload,
    plan_for_trace,
    simulation_of,
)
from hybridkv.simulator.loop import _FastForward
from hybridkv.specs import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from hybridkv.step import Cells, Copy, Csr, Step, StepResult
from hybridkv.units import MiB

Source = Workload | UniformWorkload

pytestmark = pytest.mark.filterwarnings("ignore::hybridkv.errors.AssumptionWarning")  # of some models

KINDS = ["llama-3-8b", "gemma-3-27b", "llama-4-scout", "jamba-1.5-mini", "qwen3.5-35b-a3b"]
"""Full attention, windows, chunks, states in small blocks and in large ones."""


PRESSED = ["llama-3-8b", "gemma-3-27b", "jamba-1.5-mini"]
MORE = [(kind, seed) for kind in WORKLOADS if kind != "documents" for seed in range(3, 9)]
"""Ten long documents are refused only a few times: the share for short prompts lets few wait for room."""


def thorough(*names: str) -> list[object]:
    """Of every model known by name, all but ``names`` left to the long run."""
    return [pytest.param(one.name, marks=[] if one.name in names else pytest.mark.thorough) for one in known_models()]


def tight(name: str, source: Source, layout: str, holds: float) -> Plan:
    """A plan with room for some ``holds`` of the longest requests."""
    make = partial(plan_for_trace, source.summary(), read_model(name), layout=layout, token_budget=2048)
    roomy = make("400GiB")
    needed = [group.blocks_per_request for group in roomy.capacity.groups]
    memory = holds * sum(blocks * roomy.config.block_bytes_of(at) for at, blocks in enumerate(needed))
    while True:
        try:
            return make(int(memory))
        except CapacityError:
            memory *= 1.25


def left(made: Simulation) -> tuple[object, ...]:
    """What a replay leaves: counts, and every free block in the order in which it would be taken."""
    made.scheduler.check()
    cache = made.scheduler.cache
    return (
        made.scheduler.statistics(),
        cache.statistics(),
        cache.block_pool.free_order(),
        cache.block_pool.keys.evictions,
    )


def compared(source: Source, made_of: Plan, **settings: object) -> tuple[ReplayReport, int]:
    """Replay ``source`` both ways and compare field for field; the report, and how many steps were taken singly.

    By last use unless ``settings`` say otherwise.
    """
    summary = source.summary()
    settings = {"eviction": "lru", "hardware": H100_UNBOUNDED, **settings}
    asked = [ReplaySettings(step_by_step=one, **settings) for one in (True, False)]  # type: ignore[arg-type]  # settings of this file
    ways = [simulation_of(made_of, one) for one in asked]
    singles = 0
    schedule = ways[1].scheduler.schedule

    def counted() -> Step:
        nonlocal singles
        singles += 1
        return schedule()

    ways[1].scheduler.schedule = counted  # type: ignore[method-assign]
    slow, fast = (made.run(source, summary=summary) for made in ways)
    assert asdict(fast) == asdict(slow)
    assert left(ways[1]) == left(ways[0])
    return slow, singles


# -- reports are equal


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize("kind", [*WORKLOADS, "uniform"])
def test_fast_forward_of_every_workload_gives_the_same_report(kind: str, layout: str) -> None:
    source = (
        UniformWorkload(conversations=4) if kind == "uniform" else Workload(kind, seed=4, limit=12, hours=0.02, rate=4)
    )
    report, singles = compared(source, tight("llama-3-8b", source, layout, 8))
    assert singles < report.steps / 4


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize("name", thorough(*KINDS))
def test_fast_forward_of_every_known_model_gives_the_same_report(name: str, layout: str) -> None:
    source = Workload("chat", seed=1, limit=8, hours=0.01, rate=10)
    report, singles = compared(source, tight(name, source, layout, 8))
    assert singles < report.steps


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize("name", thorough(*PRESSED))
def test_fast_forward_with_preemption_and_eviction_is_exact(name: str, layout: str) -> None:
    source = Workload("chat", seed=2, limit=7, hours=0.005, rate=40)
    report, singles = compared(source, tight(name, source, layout, 1.2), token_budget=2048)
    assert singles < report.steps
    if name in PRESSED:  # where states take most of the memory, nobody may have to give way
        assert report.preemptions
        assert any(group.evictions for group in report.groups)


@pytest.mark.parametrize("eviction", ["lru", "hazard"])
@pytest.mark.parametrize("holds", [8, 1.2])
def test_fast_forward_with_hits_inside_blocks_is_exact(eviction: str, holds: float) -> None:
    source = Workload("chat", seed=1, limit=12, hours=0.01, rate=10)
    plan = tight("qwen3.5-35b-a3b", source, "reference", holds)
    report, singles = compared(source, plan, eviction=eviction, prefix_match_unit=32)
    assert singles < report.steps
    if holds == 8:
        at_blocks, _ = compared(source, plan, eviction=eviction)
        assert (report.hit_tokens or 0) > (at_blocks.hit_tokens or 0)
    else:
        assert any(group.evictions for group in report.groups)


def test_fast_forward_with_few_running_requests_is_exact() -> None:
    source = Workload("chat", seed=1, limit=12, hours=0.005, rate=40)
    report, singles = compared(source, tight("llama-3-8b", source, "natural", 8), max_running=3)
    assert singles < report.steps / 4


def pressed(kind: str = "chat", layout: str = "natural", seed: int = 2) -> tuple[Source, Plan]:
    """Requests that wait for room most of the time, some behind a hit, and lose what is cached of them meanwhile."""
    source = Workload(kind, seed=seed, limit=10, hours=0.004, rate=40)
    return source, tight("llama-3-8b", source, layout, 1.3)


@pytest.mark.parametrize("layout", ["natural", "reference"])
@pytest.mark.parametrize(
    ("kind", "seed"), [("chat", 2), ("api", 1), *(pytest.param(*one, marks=pytest.mark.thorough) for one in MORE)]
)
def test_fast_forward_with_waiting_requests_is_exact(kind: str, seed: int, layout: str) -> None:
    report, singles = compared(*pressed(kind, layout, seed), token_budget=2048, max_running=6)
    assert report.refusals["no_space"] > 20
    assert singles < report.steps / 3


def at_what_time(monkeypatch: pytest.MonkeyPatch) -> tuple[list[object], list[object]]:
    """Return the times at which resume points were kept and evicted, step by step and with fast-forward."""
    seen: list[object] = []
    keep, evicted = RankedResumePoints.keep, HazardRanking.evicted

    def keeps(one: RankedResumePoints, request: Request, tokens: int, states: Sequence[int], *, ended: bool) -> None:
        seen.append(("kept", request.request_id, tokens, one._clock()))
        keep(one, request, tokens, states, ended=ended)

    def evicts(one: HazardRanking, end: ResumePoint, heir: ResumePoint | None, now: float, *, declined: bool) -> None:
        seen.append(("evicted", end.serial, now))
        evicted(one, end, heir, now, declined=declined)

    monkeypatch.setattr(RankedResumePoints, "keep", keeps)
    monkeypatch.setattr(HazardRanking, "evicted", evicts)
    source = Workload("chat", seed=2, limit=8, hours=0.01, rate=20)
    report, singles = compared(source, tight("llama-3-8b", source, "natural", 2), eviction="hazard")
    assert singles < report.steps / 4
    assert {what[0] for what in seen} == {"kept", "evicted"}  # type: ignore[index]  # as above
    half = len(seen) // 2
    return seen[:half], seen[half:]


def test_fast_forward_reports_the_time_to_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    step_by_step, fast_forwarded = at_what_time(monkeypatch)
    assert fast_forwarded == step_by_step


def test_fast_forward_with_unreported_step_time_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = _FastForward.begin
    monkeypatch.setattr(_FastForward, "end", lambda one, steps, copies: begin(one, steps))  # noqa: ARG005 - none is made
    monkeypatch.setattr(_FastForward, "begin", lambda *_: None)
    step_by_step, fast_forwarded = at_what_time(monkeypatch)
    assert fast_forwarded != step_by_step


def test_fast_forward_without_caching_or_time_is_exact() -> None:
    source = Workload("api", seed=2, limit=8, hours=0.01)
    compared(source, tight("llama-3-8b", source, "natural", 8), prefix_caching=False, time_scale=0)


def test_fast_forward_with_moving_blocks_is_exact() -> None:
    source = Workload("api", seed=1, hours=0.01)
    made = plan_for_trace(source.summary(), read_model("jamba-1.5-mini"), 1500 * MiB)
    compared(source, made)


# -- a fast-forward that goes too far


def test_fast_forward_past_an_arrival_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Workload("chat", seed=1, limit=8, hours=0.01, rate=10)
    made = tight("llama-3-8b", source, "natural", 8)
    compared(source, made)

    def too_long(forward: _FastForward, arrival_s: float | None) -> None:
        late = None if arrival_s is None else arrival_s + 0.01
        object.__setattr__(forward, "_late", late)

    monkeypatch.setattr(_FastForward, "_arrival_s", property(lambda one: one._late, too_long), raising=False)
    with pytest.raises(AssertionError):
        compared(source, made)


def test_fast_forward_with_short_share_and_no_overtaking_is_exact() -> None:
    """A prompt that waits too long is refused for what its whole chunk lacks, not what is left by shorter ones."""
    source = Workload("documents", limit=30, rate=1.5)
    compared(source, plan_for_trace(source.summary(), read_model("gemma-3-27b"), "12GiB"))


@pytest.mark.parametrize("fault", ["patience", "room"])
def test_fast_forward_past_a_changed_refusal_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = pressed()
    if fault == "room":  # windows give some back
        source = Workload("chat", seed=1, limit=10, hours=0.004, rate=40)
        made = tight("gpt-oss-20b", source, "natural", 1.3)
        compared(source, made, token_budget=2048)
    if fault == "patience":
        still = AdmissionControl.standstill

        def patient(one: AdmissionControl, builder: StepBuilder, now: float) -> Standstill | None:
            found = still(one, builder, now)
            return found and found._replace(since_s=None)

        monkeypatch.setattr(AdmissionControl, "standstill", patient)
    else:
        monkeypatch.setattr(CacheFastForward, "refuses", lambda *_: True)
    with pytest.raises(AssertionError):
        compared(source, made, token_budget=2048)


@pytest.mark.parametrize("name", ["lfm2-1.2b", "jamba-1.5-mini"])
def test_fast_forward_past_a_kept_state_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Workload("chat", seed=1, limit=4, hours=0.01, rate=10)
    made = tight(name, source, "reference", 8)
    compared(source, made)
    most = CacheFastForward.most_steps

    def too_many(one: CacheFastForward, rows: NDArray[np.int64], wanted: int) -> int:
        found = most(one, rows, wanted)
        return found + 1 if found < wanted else found

    monkeypatch.setattr(CacheFastForward, "most_steps", too_many)
    with pytest.raises((AssertionError, CacheError)):
        compared(source, made)


# -- the scheduler's own


def running(prompts: tuple[int, ...], outputs: int, limits: SchedulerLimits | None = None) -> Scheduler:
    """A scheduler whose requests have just prefilled, in blocks of 4 tokens."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")
    made = plan(Model("m", "m", (Layer("layer", spec, 0),), 1000, 9, "bfloat16", 1, 1, 4), "64KiB", max_model_len=64)
    scheduler = Scheduler(KVCacheManager(made, options=CacheOptions(eviction=LRU)), limits)
    for i, length in enumerate(prompts):
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
        tokens = range(100 * i, 100 * i + length)
        scheduler.add(Request(f"r{i}", list(tokens), sampling, hasher=scheduler.cache.hasher))
    sampled(scheduler)
    return scheduler


def sampled(scheduler: Scheduler, first: int = 7) -> None:
    """One step; row i samples ``first`` + i."""
    step = scheduler.schedule()
    tokens = np.arange(first, first + len(step), dtype=np.int32)
    scheduler.update(StepResult(step.id, Csr(np.arange(len(step) + 1), tokens)))


def saying(*tokens: tuple[int, ...]) -> Choose:
    """A choice of these tokens, whatever may be chosen."""
    return lambda uniform: np.array(tokens, np.int32)  # noqa: ARG005 - as a choice


def test_fast_forward_of_equal_blocks_finds_the_first_full_one() -> None:
    def two() -> Scheduler:
        scheduler = running((), 8)
        for name, length in (("behind", 5), ("ahead", 6)):  # the same tokens, one further on
            scheduler.add(
                Request(
                    name,
                    list(range(length)),
                    SamplingParams(max_tokens=20, ignore_eos=True),
                    hasher=scheduler.cache.hasher,
                    skip_reading_prefix_cache=True,
                )
            )
        sampled(scheduler, 5)
        return scheduler

    one_by_one, as_one = two(), two()
    for step in range(10):
        sampled(one_by_one, 6 + step)
    assert as_one.fast_forward(saying(tuple(range(6, 16)), tuple(range(7, 17)))).steps == 10
    behind, ahead = (scheduler.cache.engine.resident_requests() for scheduler in (one_by_one, as_one))
    for before, now in zip(behind, ahead, strict=True):
        assert now.token_ids().tolist() == before.token_ids().tolist()
    found = [
        [scheduler.cache.block_pool.get_cached_block(key) for key in ahead[0].hashes]
        for scheduler in (one_by_one, as_one)
    ]
    assert found[0] == found[1]
    assert found[1][1:3] == as_one.cache.get_block_ids("ahead")[0][1:3]
    as_one.check()


def test_fast_forward_without_uniform_steps_takes_none() -> None:
    def taken(scheduler: Scheduler) -> int:
        return scheduler.fast_forward(saying(*[(1,)] * scheduler.num_running)).steps

    assert taken(running((5, 3), 8)) == 1
    assert taken(running((), 8)) == 0
    assert taken(running((5, 3), 8, SchedulerLimits(num_lookahead_tokens=1))) == 0
    assert taken(running((5, 3), 8, SchedulerLimits(num_speculative_tokens=1, num_lookahead_tokens=1))) == 0
    scheduler = running((5, 3), 8)
    scheduler.add(Request("late", [1, 2], hasher=scheduler.cache.hasher))
    assert taken(scheduler) == 0  # somebody comes in
    scheduler.schedule()
    assert taken(scheduler) == 0  # a result is out
    assert (
        taken(running((5, 3), 8, SchedulerLimits(max_running=1))) == 1
    )  # the other waits, and there is no seat for it
    scheduler = running((5, 3), 8)
    scheduler.fork("r0", 1)
    assert taken(scheduler) == 0
    scheduler = running((5, 3), 8)
    stops = SamplingParams(max_tokens=8, stop_token_ids=(3,))
    scheduler.add(Request("stops", [1, 2], stops, hasher=scheduler.cache.hasher))
    sampled(scheduler)
    assert taken(scheduler) == 0


def test_fast_forward_keeps_hits_of_waiting_requests() -> None:
    scheduler = running((9,), 2)
    sampled(scheduler)  # ends; two blocks of it are cached, and one that was begun
    cache = scheduler.cache
    runs = Request("runs", range(500, 505), SamplingParams(max_tokens=12, ignore_eos=True), hasher=cache.hasher)
    scheduler.add(runs)
    sampled(scheduler, 505)
    rows = np.array([runs.row])

    def alike(steps: int, hit: Hit, *takes: int) -> bool:
        return cache.fast_forward.refuses(rows, steps, [takes] if takes else [], [hit])

    again = cache.find_hit(Request("again", range(9), hasher=cache.hasher))
    assert again.tokens == 8
    assert alike(7, again)  # takes a block: what was begun behind these is older
    assert not alike(8, again)  # takes two
    follows = cache.find_hit(Request("follows", range(500, 510), hasher=cache.hasher))
    assert follows.tokens == 4
    assert alike(2, follows)
    assert not alike(3, follows)  # fills a block that it would find
    none = cache.find_hit(Request("none", range(900, 910), hasher=cache.hasher))
    free = cache.block_pool.num_usable - 2
    assert alike(3, none, free)
    assert not alike(4, none, free)  # there is one block less
    scheduler.add(Request("holds", range(9), SamplingParams(max_tokens=12, ignore_eos=True), hasher=cache.hasher))
    scheduler.schedule()
    assert alike(8, again)


def test_fast_forward_with_wrong_token_shape_changes_nothing() -> None:
    scheduler = running((5, 3), 4)
    before = scheduler.statistics()
    for tokens in (np.zeros((1, 2)), np.zeros((2, 4)), np.zeros(2)):
        with pytest.raises(ConfigError, match=r"int32 tokens .* must be int32, with a row for each of the 2 "):
            scheduler.fast_forward(lambda *_, chosen=tokens: chosen.astype(np.int32))
    with pytest.raises(ConfigError, match="float64"):
        scheduler.fast_forward(lambda *_: np.zeros((2, 1)))  # type: ignore[arg-type]  # refused
    assert scheduler.fast_forward(saying((), ())).steps == 0
    assert scheduler.statistics() == before
    scheduler.check()


def test_fast_forward_with_unhashable_tokens_takes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = running((5, 3), 12)
    requests = scheduler.cache.engine.resident_requests()
    before = [(one.token_ids().tolist(), list(one.hashes)) for one in requests]
    hasher, hashed = scheduler.cache.hasher, []

    def fails(parents: list[bytes], *_: object) -> list[bytes]:
        hashed.append(len(parents))
        if len(hashed) > 1:
            raise ValueError("no more")
        return [b"key"] * len(parents)

    monkeypatch.setattr(hasher, "hash_rows", fails)
    assert scheduler.fast_forward(saying((0,) * 9, (0,) * 9)).steps == 0
    assert len(hashed) > 1
    assert [(one.token_ids().tolist(), list(one.hashes)) for one in requests] == before
    scheduler.check()


# -- what they cost


HEADS = {"block_size": 4, "num_kv_heads": 1, "head_size": 9, "dtype": "bfloat16"}
SPECS = [
    FullAttentionSpec(**HEADS),  # type: ignore[arg-type]  # of this file
    SlidingWindowSpec(**HEADS, sliding_window=10),  # type: ignore[arg-type]
    ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=12),  # type: ignore[arg-type]
]


def test_fast_forward_cost_equals_its_steps_exactly() -> None:
    layers = tuple(Layer(f"layers.{i}", spec, i) for i, spec in enumerate(SPECS))
    traffic = CacheTraffic.of(plan(Model("m", "m", layers, 1000, 9, "bfloat16", 1, 1, 4), "1MiB", max_model_len=128))
    rng = np.random.default_rng(1)
    copies = (Copy("before", 0, 1, 2, "block"), Copy("before", 1, 3, 4, "block"))
    for parameters in (0.1, 1e3, 1e9):
        cost = StepCost(parameters, parameters / 3, traffic, time_scale=0.7)
        for rows in (1, 2, 9):
            computed = rng.integers(1, 40, rows)
            for made in ((), copies):
                one_by_one = [cost.seconds(decoding(computed + step, made)) for step in range(30)]
                assert cost.decode_seconds(computed, 30, made).tolist() == one_by_one


def decoding(computed: NDArray[np.int64], copies: tuple[Copy, ...]) -> Step:
    """A Step of one token a row."""
    rows = len(computed)
    return Step(
        id=0,
        after=-1,
        rows=np.arange(rows, dtype=np.int32),
        num_computed=computed.astype(np.int32),
        num_scheduled=np.ones(rows, np.int32),
        samples=np.ones(rows, np.bool_),
        token_ids=Csr(np.arange(rows + 1), np.zeros(rows, np.int32)),
        drafts=Csr.empty(rows),
        cells=Cells.empty(),
        finished_rows=np.empty(0, np.int32),
        copies=copies,
    )
