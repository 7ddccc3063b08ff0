"""A replay in strides beside one step by step: processor time of both in one process, and that their reports are equal.

    python strides.py workload:chat --model llama-3-8b --memory 40GiB
    python strides.py TRACE --model gemma-3-27b --memory 40GiB --limit 500

Prints a Markdown row a layout: steps, how many of them strides took, how many strides there were, seconds of each way,
their quotient, whether the reports are the same field for field. ``--strides-only`` leaves the slow way out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from hybridkv.models import read_model
from hybridkv.planner import Plan
from hybridkv.schedule import Choose, FastForward, FastForwardClock
from hybridkv.simulator import (
    H100_UNBOUNDED,
    ReplayReport,
    ReplaySettings,
    RequestSource,
    Simulation,
    TraceFile,
    TraceSummary,
    Workload,
    plan_for_trace,
    simulation_of,
)

HEAD = "| source, model, memory, layout | steps | in strides | strides | step by step, s | in strides, s | x | same |"


def main() -> None:
    """One row a layout."""
    asked = arguments()
    print(HEAD + "\n|---|--:|--:|--:|--:|--:|--:|---|", flush=True)
    source = source_of(asked)
    summary = source.summary()
    for layout in asked.layout:
        plan = plan_for_trace(summary, read_model(asked.model), asked.memory, layout=layout)
        print(row(source, summary, plan, asked), flush=True)


def row(source: RequestSource, summary: TraceSummary, plan: Plan, asked: argparse.Namespace) -> str:
    """Both ways, and what came of them."""
    settings = {"max_running": asked.max_running, "eviction": asked.eviction}
    made = simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED, **settings))
    counted = Counted(made)
    report, seconds = timed(made, source, summary)
    what = f"{source.name}, {asked.model}, {asked.memory}, {plan.layout}"
    taken = f"| {what} | {report.steps:,} | {counted.steps / report.steps:.1%} | {counted.strides:,} "
    if asked.strides_only:
        return f"{taken}| | {seconds:.1f} | | |"
    by_step = simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED, step_by_step=True, **settings))
    slow, slow_seconds = timed(by_step, source, summary)
    same = asdict(report) == asdict(slow)
    return f"{taken}| {slow_seconds:.1f} | {seconds:.1f} | {slow_seconds / seconds:.1f} | {same} |"


def timed(made: Simulation, source: RequestSource, summary: TraceSummary) -> tuple[ReplayReport, float]:
    """Run a replay, and return its report and its processor time."""
    begun = time.process_time()
    report = made.run(source, summary=summary)
    return report, time.process_time() - begun


class Counted:
    """How many strides a simulation takes, and how many steps they are."""

    def __init__(self, made: Simulation) -> None:
        self.strides = self.steps = 0
        self._stride = made.scheduler.fast_forward
        made.scheduler.fast_forward = self.stride  # type: ignore[method-assign]

    def stride(self, choose: Choose, times: FastForwardClock | None = None) -> FastForward:
        """Count fast-forwards and pass them to the scheduler."""
        stride = self._stride(choose, times)
        self.strides += stride.steps > 0
        self.steps += stride.steps
        return stride


def source_of(asked: argparse.Namespace) -> RequestSource:
    """Return the workload or trace."""
    name: str = asked.source
    if name.startswith("workload:"):
        return Workload(name.removeprefix("workload:"), hours=asked.hours, rate=asked.rate, limit=asked.limit)
    return TraceFile(name, limit=asked.limit)


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a trace, or workload:NAME")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--memory", default="40GiB")
    parser.add_argument("--layout", nargs="+", default=["natural"], choices=["natural", "reference"])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--eviction", default="lru")
    parser.add_argument("--strides-only", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
