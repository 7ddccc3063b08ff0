"""Measure hit rates while the requests change: one stream, then another, in the same cache.

    python workload_change.py FIRST SECOND [--model qwen3.5-35b-a3b] [--memory 20GiB] [--requests 2000] [--windows 20]

FIRST and SECOND are traces for ``hybridkv replay``; ``--requests`` of each are replayed, SECOND after FIRST.
The table has a row for each policy and a column for each of ``--windows`` windows of equally many requests: the share
of prompt tokens found, replayed through the scheduler. *align* is the reference layout with its own placement and
order. The others are eviction policies of the natural layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from eviction_table import REFERENCE_ALIGN, model_of

from hybridkv.planner.plan import NATURAL, REFERENCE
from hybridkv.simulator import H100_UNBOUNDED, Progress, ReplaySettings, TraceFile, plan_for_trace, simulation_of
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.tokens import Pieces
from hybridkv.simulator.trace import RequestSource, TraceSummary, summarise

WAYS = (REFERENCE_ALIGN, "lru", "hazard")
APART = 1 << 40
"""Added to the segments of the second stream, whose numbers mean other tokens."""


class Joined:
    """``first``, then ``second``, whose requests come as far apart as there; nothing of the two begins alike."""

    def __init__(self, first: RequestSource, second: RequestSource) -> None:
        self.name = f"{first.name}, {second.name}"
        self._requests = list(first)
        behind = self._requests[-1].timestamp_s
        for one in second:
            at = behind + one.timestamp_s
            self._requests.append(replace(one, timestamp_s=at, prompt=_apart(one.prompt), output=_apart(one.output)))

    def summary(self) -> TraceSummary:
        """Of both."""
        return summarise(self._requests, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests of both workloads."""
        return iter(self._requests)


def _apart(pieces: Pieces) -> Pieces:
    return replace(pieces, pieces=tuple((segment + APART, start, length) for segment, start, length in pieces.pieces))


def curve(source: Joined, way: str, model: str, memory: str, windows: int) -> list[float]:
    """Shares found of the prompt tokens that were looked up, in each window of equally many requests that ended."""
    layout, eviction = (REFERENCE, None) if way == REFERENCE_ALIGN else (NATURAL, way)
    summary = source.summary()
    plan = plan_for_trace(summary, model_of(model), memory, layout=layout)
    simulation = simulation_of(plan, ReplaySettings(hardware=H100_UNBOUNDED, eviction=eviction))
    seen = [(0, 0)]

    def watch(progress: Progress) -> None:
        if progress.requests >= summary.requests * len(seen) // windows:
            counts = simulation.scheduler.statistics()
            seen.append((counts.prompt_tokens, counts.hit_tokens))

    simulation.run(source, summary=summary, on_progress=watch)
    return [(hit - hit_before) / (asked - before) for (before, hit_before), (asked, hit) in pairwise(seen)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--model", default="qwen3.5-35b-a3b")
    parser.add_argument("--memory", default="20GiB")
    parser.add_argument("--requests", type=int, default=2000, help="of each")
    parser.add_argument("--windows", type=int, default=20, help="of both together")
    asked = parser.parse_args()
    source = Joined(*(TraceFile(name, limit=asked.requests) for name in (asked.first, asked.second)))
    print(f"| {asked.model}, {asked.memory} | {' | '.join(map(str, range(1, asked.windows + 1)))} |")
    print(f"|---|{'--:|' * asked.windows}")
    for way in WAYS:
        rates = curve(source, way, asked.model, asked.memory, asked.windows)
        print(f"| {way} | {' | '.join(f'{rate:.3f}' for rate in rates)} |", flush=True)


if __name__ == "__main__":
    main()
