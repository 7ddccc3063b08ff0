"""Compare a replay with fast-forward and one that takes each step by itself: processor time, and equal reports.

    python fast_forward.py workload:chat --model llama-3-8b --memory 40GiB
    python fast_forward.py TRACE --model gemma-3-27b --memory 40GiB --limit 500

Prints a Markdown row for each layout: steps, the share of them in fast-forwards, the number of fast-forwards, seconds
of both replays, their quotient, and whether the reports are equal field for field. ``--fast-forward-only`` skips the
replay that takes each step by itself.
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

HEAD = (
    "| source, model, memory, layout | steps | in fast-forwards | fast-forwards | step by step, s | fast-forward, s "
    "| x | same |"
)


def main() -> None:
    """Print a row for each layout."""
    asked = arguments()
    print(HEAD + "\n|---|--:|--:|--:|--:|--:|--:|---|", flush=True)
    source = source_of(asked)
    summary = source.summary()
    for layout in asked.layout:
        plan = plan_for_trace(summary, read_model(asked.model), asked.memory, layout=layout)
        print(row(source, summary, plan, asked), flush=True)


def row(source: RequestSource, summary: TraceSummary, plan: Plan, asked: argparse.Namespace) -> str:
    """Return the Markdown row of one layout."""
    settings = {"max_running": asked.max_running, "eviction": asked.eviction}
    made = simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED, **settings))
    counted = Counted(made)
    report, seconds = timed(made, source, summary)
    what = f"{source.name}, {asked.model}, {asked.memory}, {plan.layout}"
    taken = f"| {what} | {report.steps:,} | {counted.steps / report.steps:.1%} | {counted.fast_forwards:,} "
    if asked.fast_forward_only:
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
    """Counts the fast-forwards of a simulation, and their steps."""

    def __init__(self, made: Simulation) -> None:
        self.fast_forwards = self.steps = 0
        self._fast_forward = made.scheduler.fast_forward
        made.scheduler.fast_forward = self.fast_forward  # type: ignore[method-assign]

    def fast_forward(self, choose: Choose, times: FastForwardClock | None = None) -> FastForward:
        """Count fast-forwards and pass them to the scheduler."""
        taken = self._fast_forward(choose, times)
        self.fast_forwards += taken.steps > 0
        self.steps += taken.steps
        return taken


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
    parser.add_argument("--fast-forward-only", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
