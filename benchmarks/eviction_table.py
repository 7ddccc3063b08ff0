"""Hit rates of evictions, cell by cell; resumes where it stopped.

    python eviction_table.py run RESULTS.jsonl FOLDER [--only TEXT] [--limit N] [--replayed]
    python eviction_table.py show RESULTS.jsonl                      a table in Markdown

A cell runs its requests one after the other, each at its arrival, in a step or two and with nobody beside it: the cache
alone, as docs/design/0019 compares it with a simulation. ``--replayed``: through the scheduler, time modelled and
requests running side by side, which takes some ten times as long. A cell that stands in RESULTS, whatever commit made
it, is not run again: delete its line to do so.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from natural_table import commit, read_results

from hybridkv.cache import KVCacheManager
from hybridkv.cache.placement import EVICTIONS, eviction_named, placement_of
from hybridkv.errors import CacheError
from hybridkv.models import Model, read_model
from hybridkv.request import Request
from hybridkv.simulator import (
    ReplaySettings,
    SimulatedClock,
    TraceFile,
    TraceRequest,
    TraceSummary,
    plan_for_trace,
    simulation_of,
)

MODELS = {
    "qwen3.5-35b-a3b": "auto",
    "nemotron-3-nano-30b-a3b": "auto",
    "gemma-3-27b": "auto",
    "qwen3-next-80b-a3b": "auto",
    "nemotron-3-super-120b-a12b": "float8_e4m3fn",
    "llama-3-70b": "auto",
}
STREAMS = (
    "mix.jsonl.gz",
    "conversation_trace.jsonl",
    "think.jsonl.gz",
    "chat.jsonl.gz",
    "agent.jsonl.gz",
    "api.jsonl.gz",
)
MEMORIES = (40, 10, 20, 80, 160)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. limit: requests, 0 for all. replayed: through the scheduler."""

    stream: str
    model: str
    memory_gib: int
    eviction: str
    limit: int
    replayed: bool

    @property
    def key(self) -> tuple[object, ...]:
        """What tells cells apart."""
        return tuple(asdict(self).values())


def cells(limit: int, *, replayed: bool) -> Iterator[Cell]:
    """All of them, the most wanted first."""
    for stream in STREAMS:
        for memory in MEMORIES:
            for model in MODELS:
                for eviction in EVICTIONS:
                    yield Cell(stream, model, memory, eviction, limit, replayed)


def model_of(name: str) -> Model:
    """With the dtype of its cache."""
    return read_model(name) if MODELS[name] == "auto" else read_model(name, dtype=MODELS[name])


class Alone:
    """One request after the other in a manager of its own. hit_tokens, prompt_tokens: so far."""

    def __init__(self, cell: Cell, summary: TraceSummary) -> None:
        plan = plan_for_trace(
            summary, model_of(cell.model), f"{cell.memory_gib}GiB", token_budget=summary.longest_tokens
        )
        self.clock = SimulatedClock()
        self.cache = KVCacheManager(
            plan.config,
            plan.max_model_len,
            placement=placement_of(plan),
            eviction=eviction_named(cell.eviction),
            clock=self.clock,
        )
        self.hit_tokens = self.prompt_tokens = self.moved = self._steps = 0

    def serve(self, name: str, asked: TraceRequest) -> None:
        """A request comes, is computed and goes."""
        self.clock.now_s = asked.timestamp_s
        request = Request(name, asked.prompt.token_ids(), hasher=self.cache.hasher, marks=asked.marks)
        hit = self.cache.look_up(request)
        request.branch_tokens = hit.branch_tokens
        if not self._step(request, request.num_prompt_tokens - hit.tokens, hit.tokens):
            hit = hit._replace(tokens=0)  # what it copies is in its own way
            if not self._step(request, request.num_prompt_tokens, 0):
                raise CacheError(f"request {name} does not fit alone")
        request.first_hit_tokens = hit.tokens
        self.hit_tokens += hit.tokens
        self.prompt_tokens += request.num_prompt_tokens
        for token in asked.output.token_ids().tolist():
            request.append(token)
        if request.num_tokens - request.num_computed_tokens > 1:
            self._step(request, request.num_tokens - 1 - request.num_computed_tokens, 0)  # the last one is not run
        self.cache.cache_blocks(request, request.num_computed_tokens)
        self.cache.keep_end(request)
        self.cache.free(request)

    def _step(self, request: Request, tokens: int, hit_tokens: int) -> bool:
        """``tokens`` more of ``request`` are computed; whether there was room."""
        cache, self._steps = self.cache, self._steps + 1
        with cache.step(self._steps):
            blocks = cache.blocks_of(cache.find_hit(request)) if hit_tokens else None
            if cache.allocate_slots(request, tokens, hit_tokens, blocks) is None:
                cache.free(request)
                return False
            start = request.num_computed_tokens + hit_tokens
            rows = cache.rows.num_computed[[request.row]] * 0
            cache.store_checkpoints(rows + request.row, rows + start, rows + start + tokens)
        self.moved += sum(copy.kind == "move" for copy in cache.take_transfers().copies)
        cache.mark_written(self._steps)
        request.num_computed_tokens = start + tokens
        return True


def run(cell: Cell, folder: str) -> dict[str, Any]:
    """Its result as a line."""
    source = TraceFile(f"{folder}/{cell.stream}", limit=cell.limit or None)
    summary, begun = source.summary(), time.process_time()
    if cell.replayed:
        plan = plan_for_trace(summary, model_of(cell.model), f"{cell.memory_gib}GiB")
        report = simulation_of(plan, ReplaySettings(eviction=cell.eviction)).run(source, summary=summary)
        kept, declined = report.checkpoints, report.declined_checkpoints
        hit, requests, moved = report.hit_rate, report.requests, report.moves
    else:
        alone = Alone(cell, summary)
        for requests, asked in enumerate(source, 1):
            alone.serve(str(requests), asked)
        kept, declined = alone.cache.checkpoints.stored, alone.cache.checkpoints.declined
        hit, moved = alone.hit_tokens / alone.prompt_tokens, alone.moved
    return {
        **asdict(cell),
        "hit_rate": round(hit, 6),
        "requests": requests,
        "checkpoints": kept,
        "declined": declined,
        "moved_blocks": moved,
        "cpu_s": round(time.process_time() - begun, 1),
        "commit": commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def show(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each stream, model and memory, a column for each eviction."""
    yield f"| stream | requests | model | GiB | way | {' | '.join(EVICTIONS)} |"
    yield f"|---|--:|---|--:|---|{'--:|' * len(EVICTIONS)}"
    rows: dict[tuple[object, ...], dict[str, float]] = {}
    for line in lines:
        way = "replayed" if line["replayed"] else "alone"
        key: tuple[object, ...] = line["stream"].split(".")[0], line["requests"], line["model"], line["memory_gib"], way
        rows.setdefault(key, {})[line["eviction"]] = line["hit_rate"]
    for key, found in rows.items():
        rates = (f"{found[name]:.4f}" if name in found else "" for name in EVICTIONS)
        yield f"| {' | '.join(map(str, key))} | {' | '.join(rates)} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--only", action="append", default=[], help="cells whose text has this, and all others given")
    parser.add_argument("--limit", type=int, default=0, help="first N requests")
    parser.add_argument("--replayed", action="store_true", help="through the scheduler")
    asked = parser.parse_args()
    done = read_results(asked.results) if asked.results.exists() else []
    if asked.what == "show":
        print("\n".join(show(done)))
        return
    known = {tuple(line[name] for name in Cell.__dataclass_fields__) for line in done}
    for cell in cells(asked.limit, replayed=asked.replayed):
        if cell.key in known or not all(text in str(cell) for text in asked.only):
            continue
        line = run(cell, asked.folder)
        with asked.results.open("a", encoding="utf-8") as results:
            results.write(json.dumps(line) + "\n")
        print(f"{cell}: {line['hit_rate']:.4f}, {line['cpu_s']} s", flush=True)


if __name__ == "__main__":
    main()
