"""Hit rates of evictions, cell by cell; resumes where it stopped.

    python eviction_table.py run RESULTS.jsonl FOLDER [--only TEXT] [--limit N] [--replayed] [--hinted] [--seed N]
    python eviction_table.py run RESULTS.jsonl FOLDER [--only TEXT] --bounds
    python eviction_table.py show RESULTS.jsonl [NATURAL.jsonl]      the table as CSV: docs/data/evictions.csv
    python eviction_table.py never-worse RESULTS.jsonl [NATURAL.jsonl]    hazard beside the better of align and lru

A cell runs its requests one after the other, each at its arrival, in a step or two and with nobody beside it: the cache
alone, as docs/design/0019 compares it with a simulation. ``--replayed``: through the scheduler, time modelled and
requests running side by side, which takes some ten times as long; then also *align*, the reference layout with its own
placement and order. ``--hinted``: every request comes with the hints of
one who knows how the trace goes on (oracle_hints). ``--seed``: streams of that seed, drawn by `hybridkv replay
workload:NAME --seed N`, in place of those of FOLDER.

``--bounds``: of every stream, model and memory that hazard was run for, however it was run, two cells more, each
request alone. *belady*: in the same cache next goes the end that saves fewest tokens a byte and request until it is
gone on from, by whoever comes; an end, its bytes and what it saves are hazard's own (belady.py). *limit*: an endless
cache, which finds all leading tokens of a prompt but its last that any request before began with, outputs among them.

NATURAL: what natural_table.py wrote. Its whole streams, *reference align* and *natural ends*, are align and lru here.

A cell that stands in RESULTS, whatever commit made it, is not run again: delete its line to do so. Where the longest
request does not fit, it says so and goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from belady import Foreseen
from foreseen import Future
from natural_table import commit, read_results
from oracle_hints import Hinted

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import EndsPlacement, placement_of
from hybridkv.errors import CacheError, CapacityError
from hybridkv.eviction import EVICTIONS, HAZARD, LRU, Eviction, eviction_named
from hybridkv.models import Model, read_model
from hybridkv.planner.plan import NATURAL, REFERENCE
from hybridkv.request import Request
from hybridkv.simulator import H100_UNBOUNDED, ReplaySettings, SimulatedClock, TraceFile, plan_for_trace, simulation_of
from hybridkv.simulator.formats import TraceRequest
from hybridkv.simulator.trace import RequestSource, TraceSummary
from hybridkv.simulator.workloads import WORKLOADS, Workload

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
REFERENCE_ALIGN = "align"
BELADY = "belady"
LIMIT = "limit"
WAYS = (REFERENCE_ALIGN, *EVICTIONS)
BOUNDS = (BELADY, LIMIT)
SHOWN = (REFERENCE_ALIGN, LRU.name, HAZARD.name)
"""Evictions with a column."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. stream: a file, or workload:NAME:SEED. eviction: of WAYS and BOUNDS. limit: requests, 0 for all.

    replayed: by the scheduler. hinted: see oracle_hints. The limit is of no model, in no memory.
    """

    stream: str
    model: str
    memory_gib: int
    eviction: str
    limit: int
    replayed: bool
    hinted: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What tells cells apart."""
        return tuple(asdict(self).values())


def cells(streams: Sequence[str], limit: int, *, replayed: bool, hinted: bool) -> Iterator[Cell]:
    """All of them, the most wanted first."""
    for stream in streams:
        for memory in MEMORIES:
            for model in MODELS:
                for eviction in WAYS if replayed else EVICTIONS:
                    yield Cell(stream, model, memory, eviction, limit, replayed, hinted)


def bounds(done: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    """Of all that hazard was run for, whole streams first."""
    found = [line for line in done if line["eviction"] == HAZARD.name and not line.get("hinted")]
    found.sort(key=lambda line: (line["limit"] != 0, line["limit"]))
    for line in found:
        stream, requests = line["stream"], line["limit"]
        yield Cell(stream, "", 0, LIMIT, requests, replayed=False)
        yield Cell(stream, line["model"], line["memory_gib"], BELADY, requests, replayed=False)


def model_of(name: str) -> Model:
    """With the dtype of its cache."""
    return read_model(name) if MODELS[name] == "auto" else read_model(name, dtype=MODELS[name])


def serve_alone(cache: KVCacheManager, request: Request, outputs: Sequence[int], number: int) -> tuple[int, int]:
    """``request`` comes, is computed with ``outputs`` and goes, in steps 2 * ``number`` and the next.

    Tokens hit, and blocks moved.
    """
    hit = cache.look_up(request)
    request.branch_tokens = hit.branch_tokens
    moved, found = 0, hit.tokens
    with cache.step(2 * number):
        blocks = cache.engine.blocks_of(hit)
        if cache.allocate_slots(request, request.num_prompt_tokens - found, found, blocks) is None:
            found = 0  # what it copies is in its own way
            if cache.allocate_slots(request, request.num_prompt_tokens) is None:
                raise CacheError(f"request {request.request_id} does not fit alone")
        moved += _run(cache, request, found, request.num_prompt_tokens)
    cache.mark_written(2 * number)
    request.first_hit_tokens = found
    for token in outputs:
        request.append(token)
    missing = request.num_tokens - 1 - request.num_computed_tokens  # the last one is not run
    if missing:
        with cache.step(2 * number + 1):
            if cache.allocate_slots(request, missing) is not None:
                moved += _run(cache, request, request.num_computed_tokens, request.num_tokens - 1)
        cache.mark_written(2 * number + 1)
    cache.cache_blocks(request, request.num_computed_tokens)
    cache.keep_resume_point(request)
    cache.free(request)
    return found, moved


def _run(cache: KVCacheManager, request: Request, start: int, end: int) -> int:
    """Run the forward of tokens ``start`` .. ``end``; return the blocks moved for it."""
    row, at = np.array([request.row]), np.array([start])
    cache.store_checkpoints(row, at, at + end - start)
    request.num_computed_tokens = end
    return sum(copy.kind == "move" for copy in cache.fields.take_transfers().copies)


def alone(cell: Cell, source: RequestSource, summary: TraceSummary, eviction: Eviction) -> dict[str, Any]:
    """One request after the other, each when it arrives."""
    plan = plan_for_trace(summary, model_of(cell.model), f"{cell.memory_gib}GiB", token_budget=summary.longest_tokens)
    clock = SimulatedClock()
    cache = KVCacheManager(
        plan.config,
        plan.max_model_len,
        options=CacheOptions(placement=placement_of(plan), eviction=eviction, clock=clock),
    )
    return serve_all(cache, clock, source)


def serve_all(cache: KVCacheManager, clock: SimulatedClock, source: Iterable[TraceRequest]) -> dict[str, Any]:
    """Return the results of ``source``, each request alone in ``cache``, which reads ``clock``."""
    hit, prompt, moved = 0, 0, 0
    for number, asked in enumerate(source):
        clock.now_s = asked.timestamp_s
        request = Request(
            str(number), asked.prompt.token_ids(), hasher=cache.hasher, marks=asked.marks, hints=asked.hints
        )
        found, more = serve_alone(cache, request, asked.output.token_ids().tolist(), number)
        hit, prompt, moved = hit + found, prompt + request.num_prompt_tokens, moved + more
    return {
        "hit_rate": round(hit / prompt, 6),
        "requests": number + 1,
        "checkpoints": cache.checkpoints.stored,
        "declined": cache.checkpoints.declined,
        "moved_blocks": moved,
    }


def replayed(cell: Cell, source: RequestSource, summary: TraceSummary) -> dict[str, Any]:
    """Through the scheduler."""
    align = cell.eviction == REFERENCE_ALIGN
    layout, eviction = (REFERENCE, None) if align else (NATURAL, cell.eviction)
    plan = plan_for_trace(summary, model_of(cell.model), f"{cell.memory_gib}GiB", layout=layout)
    settings = ReplaySettings(hardware=H100_UNBOUNDED, eviction=eviction)
    report = simulation_of(plan, settings).run(source, summary=summary)
    return {
        "hit_rate": round(report.hit_rate or 0.0, 6),
        "requests": report.requests,
        "checkpoints": report.checkpoints,
        "declined": report.declined_checkpoints,
        "moved_blocks": report.moves,
        "moved_bytes": report.moved_bytes,
    }


def source_of(cell: Cell, folder: str) -> RequestSource:
    """Its requests: a file of ``folder``, or drawn."""
    if cell.stream.startswith("workload:"):
        _, kind, seed = cell.stream.split(":")
        return Workload(kind, seed=int(seed), limit=cell.limit or None)
    return TraceFile(f"{folder}/{cell.stream}", limit=cell.limit or None)


def run(cell: Cell, folder: str) -> dict[str, Any]:
    """Its result as a line."""
    source = source_of(cell, folder)
    if cell.hinted:
        source = Hinted(source, 512 if cell.stream.startswith("conversation") else 16)
    begun = time.process_time()
    return {
        **asdict(cell),
        **_found(cell, source),
        "cpu_s": round(time.process_time() - begun, 1),
        "commit": commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def _found(cell: Cell, source: RequestSource) -> dict[str, Any]:
    if cell.eviction == LIMIT:
        requests = list(source)
        return {"hit_rate": round(Future(requests).limit, 6), "requests": len(requests)}
    if cell.replayed:
        return replayed(cell, source, source.summary())
    if cell.eviction == BELADY:
        source = foreseen = Foreseen(source)
        return alone(cell, source, source.summary(), foreseen.eviction())
    return alone(cell, source, source.summary(), eviction_named(cell.eviction))


def of_natural(lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Whole streams that natural_table.py replayed, as lines of this table: align and lru."""
    ways = {(REFERENCE, "align"): REFERENCE_ALIGN, (NATURAL, EndsPlacement().name): LRU.name}
    for line in lines:
        eviction = ways.get((line.get("layout", ""), line.get("placement", "")))
        if eviction and line["time_scale"] == 1 and not line["limit"] and not line["ideal"]:
            yield {**line, "stream": line["workload"], "eviction": eviction, "replayed": True}


def show(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Yield the header, then a row for each stream, model and memory, with a column for each eviction.

    The last column is the memory that slabs moved under hazard in the whole run.
    """
    columns = (*SHOWN, *BOUNDS)
    yield ("stream", "requests", "model", "GiB", "run", *columns, "moved")
    found, moved = rows(lines, "hit_rate"), rows(lines, "moved_bytes")
    bound = {key[:4]: rates[BELADY] for key, rates in found.items() if BELADY in rates}
    limits = {key[:2]: rates[LIMIT] for key, rates in found.items() if LIMIT in rates}
    for key, run_so in found.items():
        if not run_so.keys() & set(SHOWN):
            continue
        known = {**run_so, BELADY: bound.get(key[:4]), LIMIT: limits.get(key[:2])}
        rates = (f"{rate:.4f}" if (rate := known.get(name)) is not None else "" for name in columns)
        of_hazard = moved.get(key, {}).get(HAZARD.name)
        yield (*key, *rates, "" if of_hazard is None else f"{of_hazard / 2**30:,.1f} GiB")


def rows(lines: Sequence[Mapping[str, Any]], of: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return the value ``of`` by eviction, for each stream, requests, model, memory and kind of run."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for line in lines:
        kind = ("replayed" if line["replayed"] else "alone") + (", hinted" if line.get("hinted") else "")
        key = (line["stream"].split(".")[0], line["requests"], line["model"], line["memory_gib"], kind)
        if of in line:
            found.setdefault(key, {}).setdefault(line["eviction"], line[of])
    return found


def never_worse(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Points that hazard is ahead of align, of lru, and of the better one: on average, and where it is worst."""
    whole = [
        (key, found) for key, found in rows(lines, "hit_rate").items() if {"align", "lru", "hazard"} <= found.keys()
    ]
    for name, rivals in (("align", ("align",)), ("lru", ("lru",)), ("the better of both", ("align", "lru"))):
        ahead = [(100 * (found["hazard"] - max(found[one] for one in rivals)), key) for key, found in whole]
        if ahead:
            mean, (worst, where) = sum(points for points, _ in ahead) / len(ahead), min(ahead, key=lambda one: one[0])
            yield f"ahead of {name}, {len(ahead)} cells: {mean:+.2f} points on average, at worst {worst:+.2f} ({where})"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "show", "never-worse"))
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", nargs="?", default=".", help="of the streams; else NATURAL")
    parser.add_argument("--only", action="append", default=[], help="cells whose text has this, and all others given")
    parser.add_argument("--limit", type=int, default=0, help="first N requests")
    parser.add_argument("--replayed", action="store_true", help="through the scheduler")
    parser.add_argument("--hinted", action="store_true", help="with hints of one who knows the future")
    parser.add_argument("--seed", type=int, help="of drawn streams, in place of the folder's")
    parser.add_argument("--bounds", action="store_true", help="belady and limit, where hazard is known")
    asked = parser.parse_args()
    done = read_results(asked.results) if asked.results.exists() else []
    if asked.what != "run":
        lines = [*done, *(of_natural(read_results(Path(asked.folder))) if Path(asked.folder).is_file() else ())]
        if asked.what == "show":
            csv.writer(sys.stdout, lineterminator="\n").writerows(show(lines))
        else:
            print("\n".join(never_worse(lines)))
        return
    known = {tuple(line.get(name, False) for name in Cell.__dataclass_fields__) for line in done}
    streams = STREAMS if asked.seed is None else [f"workload:{kind}:{asked.seed}" for kind in WORKLOADS]
    wanted = bounds(done) if asked.bounds else cells(streams, asked.limit, replayed=asked.replayed, hinted=asked.hinted)
    for cell in wanted:
        if cell.key in known or not all(text in str(cell) for text in asked.only):
            continue
        try:
            line = run(cell, asked.folder)
        except CapacityError as error:
            print(f"{cell}: {error}", flush=True)
            continue
        known.add(cell.key)
        with asked.results.open("a", encoding="utf-8") as results:
            results.write(json.dumps(line) + "\n")
        print(f"{cell}: {line['hit_rate']:.4f}, {line['cpu_s']} s", flush=True)


if __name__ == "__main__":
    main()
