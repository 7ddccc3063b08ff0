"""Measure hit rates, refusals, moves and padding of layouts and placements, cell by cell; resumes after a stop.

    python natural_table.py run RESULTS.jsonl WORKLOADS_FOLDER [--jobs 2] [--only mix] [--limit N]
    python natural_table.py slabs RESULTS.jsonl WORKLOADS_FOLDER [--limit N]     slabs against an ideal pool, busy
    python natural_table.py show RESULTS.jsonl              rates by placement as CSV: docs/data/placements.csv
    python natural_table.py show-slabs RESULTS.jsonl        slabs against an ideal pool as CSV: docs/data/slabs.csv

All cells evict in order of last use; eviction_table.py compares other policies. A cell with a line in RESULTS is not
run
again, whatever commit made the line: delete the line to run the cell again.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from foreseen import Future
from ideal_space import IdealSpace

from hybridkv.cache import CacheOptions, KVCacheManager
from hybridkv.cache.placement import placement_of
from hybridkv.cache.spaces.slabs import SlabSpace
from hybridkv.eviction import LRU
from hybridkv.models import Model, read_model
from hybridkv.planner import Plan
from hybridkv.planner.plan import padding_of
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.simulator import H100_UNBOUNDED, ReplaySettings, SimulatedClock, TraceFile, plan_for_trace, simulation_of

MODELS = {
    "qwen3.5-35b-a3b": "auto",
    "qwen3-next-80b-a3b": "auto",
    "nemotron-3-nano-30b-a3b": "auto",
    "nemotron-3-super-120b-a12b": "float8_e4m3fn",
    "gemma-3-27b": "auto",
}
WAYS = (("reference", "align"), ("natural", "align"), ("natural", "interval:528"), ("natural", "ends"))
RUNNING = (32, 64)
MOST_WAITED = 0.02
"""Of the requests, for memory, in the ideal run: with more, it is no longer the slabs that cost hits."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay. memory_gib: of the cache. ideal: the ideal pool in place of slabs. limit: requests, 0 for all."""

    workload: str
    model: str
    memory_gib: int
    layout: str
    placement: str
    time_scale: float = 1.0
    ideal: bool = False
    limit: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What tells cells apart."""
        return tuple(asdict(self).values())


def cells(limit: int) -> Iterator[Cell]:
    """All cells of the big table, the most wanted first."""
    places = [("mix", 40), *((name, 40) for name in ("chat", "agent", "api", "think")), ("mix", 20), ("mix", 10)]
    for workload, memory in [*places, ("mix", 80)]:
        for model in MODELS:
            for layout, placement in WAYS:
                if model.startswith("gemma") and (layout, placement) not in {WAYS[0], WAYS[3]}:
                    continue
                yield Cell(workload, model, memory, layout, placement, limit=limit)


def model_of(cell: Cell) -> Model:
    """Return the model with the dtype of its cache."""
    dtype = MODELS[cell.model]
    return read_model(cell.model) if dtype == "auto" else read_model(cell.model, dtype=dtype)


def run(cell: Cell, folder: str) -> dict[str, Any]:
    """Replay ``cell``; its result as a line."""
    source = TraceFile(f"{folder}/{cell.workload}.jsonl.gz", limit=cell.limit or None)
    summary = source.summary()
    plan = plan_for_trace(summary, model_of(cell), f"{cell.memory_gib}GiB", layout=cell.layout)
    settings = ReplaySettings(
        hardware=H100_UNBOUNDED, time_scale=cell.time_scale, placement=cell.placement, eviction=LRU.name
    )
    begun = time.perf_counter()
    simulation = simulation_of(plan, settings)
    if cell.ideal:
        simulation = replace(simulation, scheduler=_ideal(plan, settings, simulation.clock))
    report = simulation.run(source, summary=summary)
    return {
        **asdict(cell),
        "hit_rate": round(report.hit_rate or 0.0, 6),
        "prompt_tokens": report.prompt_tokens,
        "requests": report.requests,
        "refusals": report.refusals,
        "preemptions": report.preemptions,
        "mean_running": round(report.mean_running, 2),
        "moves": report.moves,
        "moved_bytes": report.moved_bytes,
        "checkpoints": report.checkpoints,
        "declined": report.declined_checkpoints,
        "simulated_s": round(report.simulated_s, 1),
        "padding": round(float(padding_of(plan.config)), 6) if cell.layout == "natural" else round(_padding(plan), 6),
        "time_to_first_token_s": report.time_to_first_token_s.mean,
        "took_s": round(time.perf_counter() - begun, 1),
        "commit": commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def _ideal(plan: Plan, settings: ReplaySettings, clock: SimulatedClock) -> Scheduler:
    """Return a scheduler over a manager whose blocks take exactly their content."""
    slabs = plan.config.slabs
    if slabs is None:
        raise SystemExit("the ideal pool stands in for slabs: use the natural layout")
    sizes = [max(plan.config.groups[group].content_bytes for group in one.groups) for one in slabs.classes]
    classes = [slabs.classes.index(slabs.class_of(group)) for group in range(len(plan.config.groups))]
    cache = KVCacheManager(
        plan.config,
        plan.max_model_len,
        options=CacheOptions(
            placement=placement_of(plan, settings.placement),
            space=cast("SlabSpace", IdealSpace(plan.memory_bytes, sizes, classes)),
        ),
    )
    limits = SchedulerLimits(max_running=settings.max_running, max_batched_tokens=settings.token_budget)
    return Scheduler(cache, limits, clock=clock)


def _padding(plan: Plan) -> float:
    """Bytes of a page of the reference layout that hold nothing, over those that do."""
    pages = [(group.spec.page_size_bytes * len(group.layer_names), group.content_bytes) for group in plan.config.groups]
    widest = max(len(group.layer_names) for group in plan.config.groups)
    page = plan.config.groups[0].spec.page_size_bytes
    return float(Fraction(len(pages) * widest * page, sum(content for _, content in pages)) - 1)


def commit() -> str:
    """Of the code that runs."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return found.stdout.strip()


# -- the limit


def limit_of(source: TraceFile) -> float:
    """Hit rate of an endless cache that hits to the token, everything before a request being finished."""
    return Future(list(source)).limit


# -- running


def read_results(path: Path) -> list[dict[str, Any]]:
    """Lines made so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _by_key(lines: Sequence[dict[str, Any]]) -> dict[tuple[object, ...], dict[str, Any]]:
    """Lines of cells by ``Cell.key``."""
    names = [field.name for field in fields(Cell)]
    return {tuple(line[name] for name in names): line for line in lines if "layout" in line}


def run_all(wanted: Sequence[Cell], path: Path, folder: str, jobs: int) -> None:
    """Every cell that has no line yet."""
    done = _by_key(read_results(path))
    left = [cell for cell in wanted if cell.key not in done]
    print(f"{len(wanted) - len(left)} cells are done, {len(left)} to go")
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, cell, folder) for cell in left]
        for future in as_completed(futures):
            line = future.result()
            with path.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print({name: line[name] for name in ("workload", "model", "memory_gib", "layout", "placement", "hit_rate")})


def run_limits(path: Path, folder: str, limit: int, names: Sequence[str]) -> None:
    """Measure the limit of every workload that has no limit yet."""
    known = {(line["workload"], line["limit"]) for line in read_results(path) if "endless" in line}
    for name in names:
        if (name, limit) not in known:
            endless = limit_of(TraceFile(f"{folder}/{name}.jsonl.gz", limit=limit or None))
            with path.open("a") as out:
                out.write(json.dumps({"workload": name, "limit": limit, "endless": round(endless, 6)}) + "\n")


def run_busy(path: Path, folder: str, limit: int, jobs: int) -> None:
    """Run the ideal pool on mix, at time scales that keep about 32 and 64 requests running.

    Then run slabs where few requests waited for memory, so that a loss is caused by slabs.
    """
    alone = {line["model"]: line["mean_running"] for line in read_results(path) if _is_plain(line)}
    cells = [
        Cell("mix", model, memory, "natural", "ends", round(running / alone[model], 3), ideal=True, limit=limit)
        for model in MODELS
        for running in RUNNING
        for memory in (10, 20, 40, 80)
    ]
    run_all(cells, path, folder, jobs)
    waited = {key: _waited(line) for key, line in _by_key(read_results(path)).items()}
    run_all([replace(cell, ideal=False) for cell in cells if waited[cell.key] < MOST_WAITED], path, folder, jobs)


def _is_plain(line: Mapping[str, Any]) -> bool:
    """Return whether a line is a run in enough memory.

    Its number of running requests grows with the time scale (Little's law).
    """
    wanted = {"workload": "mix", "memory_gib": 80, "placement": "ends", "time_scale": 1.0, "ideal": False}
    return all(line.get(name) == value for name, value in wanted.items())


def _waited(line: Mapping[str, Any]) -> float:
    """Refusals for want of memory a request."""
    for_memory = sum(count for reason, count in line["refusals"].items() if reason != "prefix_not_written")
    return float(for_memory / line["requests"])


# -- tables


def show(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Yield the header and a row for each cell that was not run against the ideal pool."""
    limits = {(line["workload"], line["limit"]): line["endless"] for line in lines if "endless" in line}
    plain = [line for line in lines if line.get("time_scale") == 1.0 and not line["ideal"]]
    yield (
        "workload",
        "GiB",
        "model",
        "layout and placement",
        "hit rate",
        "share of align to limit",
        "refusals",
        "moved",
        "padding",
    )
    base = {
        (line["workload"], line["memory_gib"], line["model"], line["limit"]): line["hit_rate"]
        for line in plain
        if line["layout"] == "reference"
    }
    for line in sorted(plain, key=_place):
        align = base.get((line["workload"], line["memory_gib"], line["model"], line["limit"]))
        limit = limits.get((line["workload"], line["limit"]))
        share = ""
        if align is not None and limit is not None and limit > align:
            share = f"{(line['hit_rate'] - align) / (limit - align):.2f}"
        yield (
            _named(line["workload"], line["limit"]),
            line["memory_gib"],
            line["model"],
            f"{line['layout']} {line['placement']}",
            f"{line['hit_rate']:.4f}",
            share,
            ", ".join(f"{name} {count:,}" for name, count in line["refusals"].items()),
            f"{line['moved_bytes'] / 2**20 / max(line['simulated_s'], 1):.1f} MiB/s",
            f"{line['padding']:.2%}",
        )


def _named(workload: str, limit: int) -> str:
    return f"{workload}, first {limit:,}" if limit else workload


def _place(line: Mapping[str, Any]) -> tuple[object, ...]:
    """Where a line stands: streams, memories, models, then ways."""
    way = WAYS.index((line["layout"], line["placement"]))
    return line["workload"], line["memory_gib"], line["limit"], line["model"], way


def show_slabs(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Yield the header and a row for each cell that was run on slabs and on the ideal pool."""
    pairs: dict[tuple[object, ...], dict[bool, Mapping[str, Any]]] = {}
    for line in lines:
        if line.get("time_scale", 1.0) != 1.0:
            pairs.setdefault((line["model"], line["memory_gib"], line["time_scale"]), {})[line["ideal"]] = line
    yield ("model", "GiB", "running", "waited (ideal)", "ideal", "slabs", "loss, points", "moved")
    for (model, memory, _), pair in sorted(pairs.items(), key=str):
        if len(pair) < 2:
            continue
        ideal, slabs = pair[True], pair[False]
        yield (
            model,
            memory,
            f"{ideal['mean_running']:.0f}",
            f"{_waited(ideal):.1%}",
            f"{ideal['hit_rate']:.4f}",
            f"{slabs['hit_rate']:.4f}",
            f"{100 * (ideal['hit_rate'] - slabs['hit_rate']):+.2f}",
            f"{slabs['moved_bytes'] / 2**20 / slabs['simulated_s']:.1f} MiB/s",
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "slabs", "show", "show-slabs"))
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="cells whose text has this")
    parser.add_argument("--limit", type=int, default=0, help="first N requests")
    asked = parser.parse_args()
    if asked.what.startswith("show"):
        shown = (show if asked.what == "show" else show_slabs)(read_results(asked.results))
        csv.writer(sys.stdout, lineterminator="\n").writerows(shown)
        return
    if asked.what == "slabs":
        run_busy(asked.results, asked.folder, asked.limit, asked.jobs)
        return
    wanted = [cell for cell in cells(asked.limit) if asked.only in str(cell)]
    run_limits(asked.results, asked.folder, asked.limit, sorted({cell.workload for cell in wanted}))
    run_all(wanted, asked.results, asked.folder, asked.jobs)


if __name__ == "__main__":
    main()
