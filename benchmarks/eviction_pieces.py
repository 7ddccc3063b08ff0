"""Replay pieces of one trace into empty caches, to show how much a policy's hit rate varies between runs.

    python eviction_pieces.py TRACE [--model llama-3-70b] [--memory 10GiB] [--pieces 10] [--requests 600]

The pieces begin at equally distant requests. The table has a row for each policy, a column for each piece, and the
mean.
For a model without states or windows, *align* (the reference layout) and *lru* both evict in order of last use. So the
difference of these two shows the effect of other block ids, other steps and other requests running together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from eviction_table import WAYS, model_of

from hybridkv.planner.plan import NATURAL, REFERENCE
from hybridkv.simulator import H100_UNBOUNDED, ReplaySettings, TraceFile, plan_for_trace, simulation_of
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.trace import TraceSummary, summarise


class Piece:
    """``requests``, at least one, as a trace."""

    def __init__(self, name: str, requests: Sequence[TraceRequest]) -> None:
        self.name = name
        self._requests = requests

    def summary(self) -> TraceSummary:
        """Of the piece."""
        return summarise(self._requests, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        """Iterate over the requests of the piece."""
        return iter(self._requests)


def pieces(trace: TraceFile, count: int, requests: int) -> list[Piece]:
    """``count`` of them, of ``requests`` requests each."""
    whole = list(trace)
    apart = max(len(whole) - requests, 0) // max(count - 1, 1)
    return [Piece(f"{trace.name} {at}", whole[at : at + requests]) for at in range(0, count * apart, apart)]


def hit_rate(piece: Piece, way: str, model: str, memory: str) -> float:
    """Of the piece's prompt tokens, in a cache that was empty."""
    summary = piece.summary()
    plan = plan_for_trace(summary, model_of(model), memory, layout=REFERENCE if way == "align" else NATURAL)
    settings = ReplaySettings(hardware=H100_UNBOUNDED, eviction=None if way == "align" else way)
    return simulation_of(plan, settings).run(piece, summary=summary).hit_rate or 0.0


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--memory", default="10GiB")
    parser.add_argument("--pieces", type=int, default=10)
    parser.add_argument("--requests", type=int, default=600)
    asked = parser.parse_args()
    parts = pieces(TraceFile(asked.trace), asked.pieces, asked.requests)
    print(f"| {asked.model}, {asked.memory} | {' | '.join(map(str, range(1, len(parts) + 1)))} | mean |")
    print(f"|---|{'--:|' * (len(parts) + 1)}")
    for way in WAYS:
        rates = [hit_rate(part, way, asked.model, asked.memory) for part in parts]
        cells = [*rates, sum(rates) / len(rates)]
        print(f"| {way} | {' | '.join(f'{rate:.4f}' for rate in cells)} |", flush=True)


if __name__ == "__main__":
    main()
