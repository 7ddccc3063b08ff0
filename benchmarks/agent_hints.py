"""Hit rates of a trace of agents without hints, with hints, and of an offline bound, as CSV. Seven minutes.

    python benchmarks/agent_hints.py RESULT.csv TRACE [--model NAME] [--memory-gib N] [--limit N]

Each request runs alone, when it arrives. Of each request, hints say

    none      nothing
    key       its session continues: all that `prompt_cache_key` could tell
    24h       it is needed again within a day: `prompt_cache_retention`
    gaps      when its session continues, as recorded, or that it is over
    gaps and places    also where the session continues, and how many tokens all begin with (oracle_hints.py)

belady knows all later requests (belady.py); limit is an endless cache.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from belady import Foreseen
from eviction_table import Cell, alone
from foreseen import Future
from oracle_hints import hinted

from hybridkv.eviction import HAZARD
from hybridkv.request import Hints
from hybridkv.simulator import TraceFile
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.trace import TraceSummary

BLOCK = 64
"""Tokens of a recorded block: the unit in which requests are compared."""

GIVEN: dict[str, Callable[[TraceRequest, TraceRequest], TraceRequest]] = {
    "none": lambda asked, _: asked,
    "key": lambda asked, _: replace(asked, hints=Hints(goes_on=True)),
    "24h": lambda asked, _: replace(asked, hints=Hints(within_s=86400.0)),
    "gaps": lambda asked, known: replace(asked, hints=replace(known.hints, shared_tokens=0)),
    "gaps and places": lambda _, known: known,
}
"""A request as recorded, and as one who knows the trace hints it -> the request that runs."""


class Given:
    """``trace`` with its requests replaced."""

    def __init__(self, trace: TraceFile, requests: Sequence[TraceRequest]) -> None:
        self.name, self.summary = trace.name, trace.summary
        self._requests = requests

    def __iter__(self) -> Iterator[TraceRequest]:
        """Its requests."""
        return iter(self._requests)


def rates(trace: TraceFile, summary: TraceSummary, cell: Cell) -> Iterator[tuple[str, float]]:
    """Yield the hit rate of each kind of hints, then of the bounds."""
    requests = list(trace)
    known = hinted(requests, BLOCK)
    for name, given in GIVEN.items():
        yield name, alone(cell, Given(trace, list(map(given, requests, known))), summary, HAZARD)["hit_rate"]
    foreseen = Foreseen(trace)
    yield "belady", alone(cell, foreseen, summary, foreseen.eviction())["hit_rate"]
    yield "limit", Future(requests).limit


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("trace")
    parser.add_argument("--model", default="qwen3.5-35b-a3b")
    parser.add_argument("--memory-gib", type=int, default=40)
    parser.add_argument("--limit", type=int, default=0, help="first N requests")
    asked = parser.parse_args()
    trace = TraceFile(asked.trace, limit=asked.limit or None)
    summary = trace.summary()
    cell = Cell(trace.name, asked.model, asked.memory_gib, HAZARD.name, asked.limit, replayed=False)
    with asked.result.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("model", "GiB", "requests", "hints", "hit rate"))
        for name, rate in rates(trace, summary, cell):
            row = (asked.model, asked.memory_gib, summary.requests, name, f"{rate:.4f}")
            table.writerow(row)
            file.flush()
            print(*row, sep="\t", flush=True)


if __name__ == "__main__":
    main()
