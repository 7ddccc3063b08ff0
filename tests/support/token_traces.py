"""Small token-exact traces, and requests made by hand."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridkv.simulator import TraceFile, TraceRequest, TraceSummary
from hybridkv.simulator.trace import summarise


@dataclass
class Given:
    """Requests made by hand."""

    requests: list[TraceRequest]
    name: str = "given"

    def summary(self) -> TraceSummary:
        return summarise(self.requests, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


def trace(path: Path, *prompts: Sequence[Sequence[int]], gap_s: float = 100.0, output: int = 2) -> TraceFile:
    """Requests ``gap_s`` apart, their prompts as pieces; each says tokens that are its own."""
    lines = [
        json.dumps({"timestamp": at * gap_s * 1000, "prompt": pieces, "output": [[10_000 + at, 0, output]]})
        for at, pieces in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return TraceFile(path)
