"""Replay requests and the recording of their KV events, and compare them: a table of docs/traces.md.

python benchmarks/recorded_traces.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from hybridkv.kv_events.publisher import EventForm, Writer, attention_of
from hybridkv.kv_events.recorder import line_of
from hybridkv.models import read_model
from hybridkv.observe.prefixes import without_resume_points
from hybridkv.planner import Plan
from hybridkv.simulator import (
    H100_UNBOUNDED,
    ReplayReport,
    ReplaySettings,
    RequestSource,
    TraceFile,
    Workload,
    plan_for_trace,
    replay,
    simulation_of,
)
from hybridkv.simulator.loop import run_replicas

SHOWN = (("chat", "llama-3-8b"), ("agent", "llama-3-8b"), ("api", "llama-3-8b"), ("chat", "qwen3.5-35b-a3b"))
MEMORY = "4GiB"


def recorded(source: RequestSource, plan: Plan, path: Path, **form: bool) -> ReplayReport:
    """Return the report of ``source``; write the raw events that such an engine publishes to ``path``."""
    simulation = simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED, step_by_step=True), events=True)
    replica = simulation.replica()
    writer = Writer([attention_of(group.spec) for group in plan.config.groups], EventForm(**form))
    lines: list[str] = []

    def step(_at: int) -> None:
        if events := without_resume_points(simulation.scheduler.cache.take_events()):
            batch = writer.batch(events, 1.7e9 + replica.clock.now_s)
            lines.append(line_of(len(lines), batch, known=False)[0])

    run_replicas(source, [replica], lambda _request, _now_s: 0, on_steps=step)
    path.write_text("".join(lines), "utf-8")
    return replica.report(source.name)


def main() -> None:
    """Print the table."""
    print("| workload, model | | requests | prompt tokens | output tokens | hit rate |")
    print("|---|---|--:|--:|--:|--:|")
    with TemporaryDirectory() as folder:
        for kind, name in SHOWN:
            source, path = Workload(kind, hours=0.05), Path(folder) / "events.jsonl"
            plan = plan_for_trace(source.summary(), read_model(name), MEMORY)
            true = recorded(source, plan, path)
            for what, one in (
                ("requests", true),
                ("recording", replay(TraceFile(path), plan, ReplaySettings(hardware=H100_UNBOUNDED))),
            ):
                counts = f"{one.requests:,} | {one.prompt_tokens:,} | {one.output_tokens:,} | {one.hit_rate:.2%}"
                print(f"| {kind}, {name} | {what} | {counts} |")


if __name__ == "__main__":
    main()
