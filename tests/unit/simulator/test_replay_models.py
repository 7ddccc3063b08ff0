"""Every known model replayed through the real scheduler and manager: exact hits, nothing lost, nothing left."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from hybridkv.cache.placement import AlignPlacement, EndsPlacement, IntervalPlacement, NoStates, Placement, placement_of
from hybridkv.errors import CapacityError, ConfigError
from hybridkv.models import read_model
from hybridkv.planner import Plan, plan
from hybridkv.simulator import (
    H100_UNBOUNDED,
    ReplayReport,
    ReplaySettings,
    Simulation,
    TraceRequest,
    TraceSummary,
    UniformWorkload,
    Workload,
    plan_for_trace,
    plan_with_length,
    replay,
    simulation_of,
)
from hybridkv.units import GiB

STATES_KEPT = 8192  # tokens of the first chunk of a prompt: the default budget of a step
LONG = UniformWorkload(templates=2, conversations=5, turns=2, system_tokens=9000, user_tokens=60, answer_tokens=20)
SHORT = UniformWorkload(templates=1, conversations=6, turns=1, system_tokens=240, user_tokens=30, answer_tokens=4)

# tokens of a state's block in the reference layout, and the hit tokens of LONG, at 40 GiB
GOLDEN = {
    "bamba-9b": (528, 71_808),
    "deepseek-v3": (None, 72_336),
    "falcon-h1-7b": (1568, 62_720),
    "gemma-3-27b": (None, 72_336),
    "gpt-oss-120b": (None, 72_336),
    "jamba-1.5-mini": (80, 70_480),
    "lfm2-1.2b": (16, 70_736),
    "llama-3-70b": (None, 72_336),
    "llama-3-8b": (None, 72_336),
    "llama-4-scout": (None, 72_336),
    "nemotron-3-nano-30b-a3b": (2096, 67_072),
    "nemotron-3-super-120b-a12b": (8320, 66_560),
    "nemotron-h-8b": (528, 71_808),
    "qwen2.5-7b": (None, 72_336),
    "qwen3-next-80b-a3b": (544, 69_632),
    "qwen3.5-35b-a3b": (1056, 67_584),
    "whisper-large-v3": (None, 0),
}
MODELS = list(GOLDEN)
"""One of every kind of plan, of those known by name."""
TWICE = {"jamba-1.5-mini", "gemma-3-27b", "whisper-large-v3"}
"""Replayed twice, where one replay says all but that another one says the same."""
MEMORY = {"lfm2-1.2b": "4GiB"}
"""Where 40 GiB are millions of blocks, each of which ``check`` looks at."""


def planned(name: str, workload: UniformWorkload | Workload, memory: int | str = "40GiB", **rules: object) -> Plan:
    """The plan of a known model; of the largest state with an fp8 cache, as it is served."""
    model = read_model(name, dtype="fp8" if name.startswith("nemotron-3-super") else None)
    rules = {"layout": "reference", **rules}
    return plan_for_trace(workload.summary(), model, memory, **rules)  # type: ignore[arg-type]  # of this file


def tight(name: str, workload: UniformWorkload | Workload, **rules: object) -> Plan:
    """A plan with room for two of the longest requests and a half."""
    holds = planned(name, workload, "200GiB").capacity
    blocks = sum(group.blocks_per_request for group in holds.groups)
    return planned(name, workload, (blocks * 5 // 2 + 2) * holds.block_bytes, **rules)


@dataclass(frozen=True)
class Marked:
    """A workload whose every request is marked."""

    workload: UniformWorkload
    marks: tuple[int, ...]
    name: str = "marked"

    def summary(self) -> TraceSummary:
        return self.workload.summary()

    def __iter__(self) -> Iterator[TraceRequest]:
        return (replace(one, marks=self.marks) for one in self.workload)


def finished(workload: UniformWorkload | Workload | Marked, made: Simulation) -> ReplayReport:
    """Replay to the end; nothing is lost and nothing left."""
    summary = workload.summary()
    report = made.run(workload, summary=summary)
    counts = made.scheduler.statistics()
    assert (report.requests, counts.requests_finished, counts.failed_steps) == (summary.requests, summary.requests, 0)
    assert (counts.prompt_tokens, report.prompt_tokens) == (summary.prompt_tokens, summary.prompt_tokens)
    # the last token of an answer is never run; a preemption makes tokens run again
    once = report.prompt_tokens - (report.hit_tokens or 0) + report.output_tokens - report.requests
    assert report.computed_tokens == once or (report.preemptions and report.computed_tokens > 0)
    made.scheduler.check()
    assert made.scheduler.drained
    assert made.scheduler.cache.usage == 0
    assert all(group.published == group.evictions + group.cached_blocks for group in report.groups)
    return report


def kept_at_chunk_ends(workload: UniformWorkload, size: int) -> int:
    """Hit tokens of ``workload`` where states are kept at multiples of ``size`` where chunks end.

    A first prompt of a template leaves states where its first chunk and its last whole block end. A second one
    finds the last of them within the shared system prompt, and leaves one where the tokens parted, which all
    after it find. The second turn goes on from its own first one.
    """

    def edge(tokens: int) -> int:
        return tokens // size * size

    first = workload.prompt_tokens(0)
    system = edge(workload.system_tokens)
    left = [at for at in (edge(STATES_KEPT), edge(first - 1)) if at <= system]
    seconds = workload.templates
    thirds = workload.conversations - 2 * workload.templates
    return seconds * max(left) + thirds * system + workload.conversations * edge(first + workload.answer_tokens - 1)


@pytest.mark.parametrize("name", MODELS)
def test_replay_of_every_known_model_hits_all_it_can(name: str) -> None:
    size, hit_tokens = GOLDEN[name]
    report = finished(LONG, simulation_of(planned(name, LONG), ReplaySettings(hardware=H100_UNBOUNDED)))
    assert report.hit_tokens == hit_tokens
    if size is not None:
        assert {group.block_size for group in report.groups} == {size}
        assert hit_tokens == kept_at_chunk_ends(LONG, size)
    elif hit_tokens:
        assert hit_tokens == LONG.hit_tokens(16)
    assert (report.preemptions, report.caching_off is None) == (0, bool(hit_tokens))


def run_to_the_end(name: str, workload: UniformWorkload, made: Plan) -> ReplayReport:
    """What a replay reports; of some models another one says the same."""
    first, *again = (
        finished(workload, simulation_of(made, ReplaySettings(hardware=H100_UNBOUNDED)))
        for _ in range(1 + (name in TWICE))
    )
    assert [one.to_json({}) for one in again] == [first.to_json({})] * len(again)
    return first


@pytest.mark.parametrize("name", MODELS)
def test_replay_of_every_known_model_runs_in_a_small_pool(name: str) -> None:
    crowd = replace(LONG, gap_s=0.05)
    plan = tight(name, crowd)
    first = run_to_the_end(name, crowd, plan)
    if name != "whisper-large-v3":
        assert 0 < (first.hit_tokens or 0) <= GOLDEN[name][1]


def test_replay_of_short_prompts_with_large_blocks_has_no_hits() -> None:
    hits = {
        name: replay(SHORT, planned(name, SHORT), ReplaySettings(hardware=H100_UNBOUNDED)).hit_tokens for name in MODELS
    }
    assert hits["qwen3.5-35b-a3b"] == 0
    assert hits["llama-3-8b"] == 5 * 240
    # the first prompt leaves its state at 240, three blocks of 80
    assert hits["jamba-1.5-mini"] == 5 * 240
    assert {name for name in MODELS if not hits[name]} == {
        "bamba-9b",
        "falcon-h1-7b",
        "nemotron-3-nano-30b-a3b",
        "nemotron-3-super-120b-a12b",
        "nemotron-h-8b",
        "qwen3-next-80b-a3b",
        "qwen3.5-35b-a3b",
        "whisper-large-v3",
    }


@pytest.mark.parametrize("name", MODELS)
def test_replay_with_placement_none_hits_no_state(name: str) -> None:
    aligned = planned(name, LONG)
    plan = planned(name, LONG, placement="none")
    if aligned.placement is None:
        assert plan == aligned
        return
    report = finished(LONG, simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED)))
    assert (aligned.placement, plan.placement) == ("align", "none")
    assert (report.hit_tokens, report.caching_off) == (0, "placement none keeps no state to resume from")
    assert not any(group.cached_blocks or group.copies for group in report.groups)


def test_replay_placement_follows_option_or_plan() -> None:
    def placed(name: str, layout: str, planned_as: str | None, asked: str | None) -> Placement | None:
        plan = planned(name, SHORT, layout=layout, placement=planned_as)
        return placement_of(plan, asked)

    hybrid, plain = "jamba-1.5-mini", "llama-3-8b"
    # the plan, unless the settings say otherwise; align is that of the reference layout
    assert placed(hybrid, "natural", None, None) == EndsPlacement()
    assert placed(hybrid, "natural", "interval:64", None) == IntervalPlacement(64)
    assert placed(hybrid, "natural", "align", None) == AlignPlacement(80)
    assert placed(hybrid, "natural", "align", "align:7") == AlignPlacement(7)
    assert placed(hybrid, "natural", "interval:64", "none") == placed(hybrid, "natural", "none", None) == NoStates()
    # the groups of a plan for none publish nothing
    with pytest.raises(ConfigError, match="the plan was made with placement 'none': plan again with 'ends' to keep"):
        placed(hybrid, "natural", "none", "ends")
    # in the reference layout the groups themselves say it
    assert placed(hybrid, "reference", None, "align") is placed(hybrid, "reference", "none", None) is None
    with pytest.raises(ConfigError, match="made with placement 'align': plan again with 'none', or with the natural"):
        placed(hybrid, "reference", None, "none")
    # without states every name is as good as another, but must be one
    assert placed(plain, "natural", None, None) == EndsPlacement()
    assert placed(plain, "reference", None, "none") is None
    with pytest.raises(ConfigError, match="unknown placement 'here'"):
        placed(plain, "natural", None, "here")


def test_replay_without_hits_reports_why() -> None:
    def why(name: str, **settings: bool) -> str | None:
        return simulation_of(planned(name, LONG), ReplaySettings(hardware=H100_UNBOUNDED, **settings)).caching_off  # type: ignore[arg-type]

    assert why("qwen3.5-35b-a3b") is None
    assert why("qwen3.5-35b-a3b", prefix_caching=False) == "as asked for"
    assert why("whisper-large-v3") == "the layers of this model cannot be resumed in this layout"


def test_replay_manager_has_the_plan_ranks() -> None:
    model = read_model("llama-3-8b")
    for dcp, pcp in ((2, 1), (1, 2), (2, 2)):
        made = plan_with_length(
            SHORT.summary(), plan(model, "1GiB", max_model_len=400, dcp=dcp, pcp=pcp, layout="reference")
        )
        simulation = simulation_of(made, ReplaySettings(hardware=H100_UNBOUNDED))
        cache = simulation.scheduler.cache
        assert (cache.dcp_world_size, cache.pcp_world_size) == (dcp, pcp)
        report = finished(SHORT, simulation)
        assert report.groups[0].block_size == 16 * dcp * pcp
        assert report.hit_tokens == SHORT.hit_tokens(16 * dcp * pcp)


def test_replay_with_windows_as_full_matches() -> None:
    plan = planned("gemma-3-27b", LONG, windows_as_full=True)
    assert len(plan.config.groups) == 1
    report = finished(LONG, simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED)))
    assert report.hit_tokens == LONG.hit_tokens(16)


def test_replay_state_copies_are_counted() -> None:
    report = finished(LONG, simulation_of(planned("qwen3.5-35b-a3b", LONG), ReplaySettings(hardware=H100_UNBOUNDED)))
    kinds = [group.kind for group in report.groups]
    assert kinds == ["MambaSpec"] * 3 + ["FullAttentionSpec"]
    *states, attention = report.groups
    assert attention.copies == 0
    # 2 cold prompts of 3 chunks, 3 + 5 hits: a state leaves its block in front of each chunk but the first
    assert {state.copies for state in states} == {2 * 2 + 8}
    assert sum(group.layers for group in report.groups) == 40


def test_replay_of_encoder_decoder_holds_encoder_tokens() -> None:
    def peak(workload: UniformWorkload) -> int:
        """Most blocks in use."""
        plan = planned("whisper-large-v3", workload)
        made = simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED))
        assert (made.encoder_tokens, plan.limits.max_encoder_tokens) == (1500, 1500)
        return round(finished(workload, made).peak_usage * (plan.config.num_blocks - 1))

    # 274 tokens and 1,500 of the encoder, the last token never runs: 18 and 94 blocks
    assert peak(SHORT) == 18 + 94
    # nobody shares an encoder's tokens: all run at once
    assert peak(replace(SHORT, gap_s=0.0)) == 6 * (18 + 94)


def test_replay_window_has_room_for_a_step() -> None:
    summary = LONG.summary()
    model = read_model("gemma-3-27b")
    most = plan_for_trace(summary, model, 40 * GiB).limits
    assert (most.max_in_flight_tokens, most.max_model_len) == (8192, summary.longest_tokens)
    little = plan_for_trace(summary, model, 40 * GiB, token_budget=256)
    need = sum(group.blocks_per_request for group in little.capacity.groups) + 1
    memory = need * little.capacity.block_bytes
    with pytest.raises(CapacityError, match="too small"):
        plan_for_trace(summary, model, memory)
    finished(
        LONG,
        simulation_of(
            plan_for_trace(summary, model, memory, token_budget=256),
            ReplaySettings(hardware=H100_UNBOUNDED, token_budget=256),
        ),
    )


def test_replay_scheduler_time_limit_uses_simulated_time() -> None:
    made = simulation_of(planned("llama-3-8b", SHORT), ReplaySettings(hardware=H100_UNBOUNDED))
    assert made.scheduler._clock is made.clock
    finished(SHORT, made)
    assert made.clock() == made.clock.now_s > 50


# -- the natural layout


def kept_at_ends(workload: UniformWorkload, *, states: bool) -> int:
    """Hit tokens of ``workload`` in the natural layout: the edge before prompts part, and ends to the token.

    With states the second prompt of a template finds the edge and leaves a state there; all after it hit.
    """
    edge = workload.system_tokens // 16 * 16
    warm = workload.conversations - workload.templates * (2 if states else 1)
    return warm * edge + workload.conversations * (workload.prompt_tokens(0) + workload.answer_tokens - 1)


@pytest.mark.parametrize("name", MODELS)
def test_replay_in_natural_layout_hits_resume_points_exactly(name: str) -> None:
    report = finished(
        LONG,
        simulation_of(
            planned(name, LONG, MEMORY.get(name, "40GiB"), layout="natural"),
            ReplaySettings(hardware=H100_UNBOUNDED, eviction="lru"),
        ),
    )
    if name == "whisper-large-v3":  # everybody has an encoder input of their own
        assert (report.hit_tokens, report.caching_off) == (0, None)
        return
    assert report.hit_tokens == kept_at_ends(LONG, states=GOLDEN[name][0] is not None)
    assert {group.block_size for group in report.groups} == {16}
    assert (report.preemptions, report.caching_off, report.refusals) == (0, None, {})


@pytest.mark.parametrize("name", MODELS)
def test_replay_of_every_known_model_runs_in_few_slabs(name: str) -> None:
    crowd = replace(LONG, gap_s=0.05)
    plan = tight(name, crowd, layout="natural")
    run_to_the_end(name, crowd, plan)


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "gemma-3-27b", "llama-4-scout", "jamba-1.5-mini"])
def test_replay_in_tight_slabs_evicts_and_moves(name: str) -> None:
    workload = Workload("api", seed=5, hours=0.01, limit=60, rate=20)
    plan = tight(name, workload, layout="natural")
    report = finished(
        workload, simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED, max_running=24, token_budget=2048))
    )
    assert any(group.evictions for group in report.groups)
    assert report.moved_bytes or name in {"llama-4-scout", "gemma-3-27b"}


@pytest.mark.parametrize(("placement", "marks"), [("ends", (240,)), ("interval:16", ()), ("align", (240,))])
def test_replay_of_short_shared_prefix_hits_later_requests(placement: str, marks: tuple[int, ...]) -> None:
    """240 tokens of a system prompt under a model whose reference block has 1,056: every request but the first."""
    plan = planned("qwen3.5-35b-a3b", SHORT, layout="natural")
    marked = Marked(SHORT, marks)
    report = finished(marked, simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED, placement=placement)))
    assert report.hit_tokens == 5 * 240
    inflated = planned("qwen3.5-35b-a3b", SHORT, layout="reference")
    assert finished(marked, simulation_of(inflated, ReplaySettings(hardware=H100_UNBOUNDED))).hit_tokens == 0
