"""`hybridkv sweep`: one trace under many settings, each a file, in as many processes as wanted."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridkv.cli.axes import (
    DEFAULTS,
    BlockSizesOption,
    DtypesOption,
    EvictionsOption,
    JobsOption,
    LayoutsOption,
    MaxRunningOption,
    MemoriesOption,
    ModelsOption,
    PlacementsOption,
    RanksOption,
    ReplicasOption,
    RouterOption,
    TokenBudgetOption,
    axes_of,
    cells_of,
)
from hybridkv.cli.hardware import HardwareList, WeightsList
from hybridkv.cli.output import console, share, table
from hybridkv.cli.panels import OUTPUT
from hybridkv.cli.printable import printable
from hybridkv.cli.requests import (
    ArrivalsOption,
    FormatOption,
    HoursOption,
    LimitOption,
    MarksOption,
    RateOption,
    SeedOption,
    SkipBadLines,
    SourceOptions,
    TokenizerOption,
    TraceArgument,
    TraceBlockSize,
)
from hybridkv.planner.plan import DEFAULT_LAYOUT
from hybridkv.simulator import Swept, processes, sweep
from hybridkv.simulator.cost import BF16
from hybridkv.simulator.hardware import DEFAULT_HARDWARE
from hybridkv.simulator.routing import ROUND_ROBIN
from hybridkv.units import format_count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep")(sweep_command)


def sweep_command(
    *,
    trace: TraceArgument,
    model: ModelsOption,
    memory: MemoriesOption,
    out: Annotated[Path, typer.Option(help="The folder of the cells.", metavar="DIR", rich_help_panel=OUTPUT)],
    tp: RanksOption = "1",
    layout: LayoutsOption = DEFAULT_LAYOUT,
    placement: PlacementsOption = None,
    eviction: EvictionsOption = None,
    block_size: BlockSizesOption = "16",
    dtype: DtypesOption = None,
    max_running: MaxRunningOption = str(DEFAULTS.max_running),
    token_budget: TokenBudgetOption = str(DEFAULTS.token_budget),
    hardware: HardwareList = DEFAULT_HARDWARE,
    weights: WeightsList = BF16,
    replicas: ReplicasOption = "1",
    router: RouterOption = ROUND_ROBIN,
    jobs: JobsOption = None,
    format_name: FormatOption = None,
    trace_block_size: TraceBlockSize = None,
    tokenizer: TokenizerOption = None,
    arrivals: ArrivalsOption = None,
    seed: SeedOption = None,
    hours: HoursOption = None,
    rate: RateOption = None,
    marks: MarksOption = False,
    limit: LimitOption = None,
    skip_bad_lines: SkipBadLines = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all cells as JSON.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Replay one trace under all combinations of settings, lists with commas; what is there is not run again."""
    source = SourceOptions(
        format_name, trace_block_size, tokenizer, arrivals, skip_bad_lines, seed, hours, rate, marks, limit
    ).source(trace)
    axes = axes_of(
        model=model,
        memory=memory,
        tp=tp,
        layout=layout,
        placement=placement,
        eviction=eviction,
        block_size=block_size,
        dtype=dtype,
        max_running=max_running,
        token_budget=token_budget,
        hardware=hardware,
        weights=weights,
        replicas=replicas,
        router=router,
    )
    cells = cells_of(axes)
    at_once = min(os.cpu_count() or 1, len(cells)) if jobs is None else jobs
    with processes(at_once) as executor, _progress(len(cells)) as on_done:
        done = sweep(source, cells, out, executor, on_done=on_done)
    if as_json:
        print(json.dumps([one.document for one in done], indent=2))
        return
    show(done)
    again = sum(one.again for one in done)
    kept = f", {format_count(again)} of them from before" if again else ""
    console().print(printable(f"{format_count(len(done))} cells in {out}{kept}"), soft_wrap=True)


def show(done: Sequence[Swept]) -> None:
    """A row a cell: what differs between them, and what came of each."""
    settings = [asdict(one.cell) for one in done]
    differ = [name for name in settings[0] if len({of[name] for of in settings}) > 1] or ["model", "memory"]
    numbers_ = ("hit rate", "TTFT p99", "TPOT p99", "tokens/s", "preempted")
    rows = table(*(name.replace("_", " ") for name in differ), *numbers_, numbers_from=len(differ))
    refused: dict[str, None] = {}
    for one, setting in zip(done, settings, strict=True):
        named = [printable("-" if setting[name] is None else str(setting[name])) for name in differ]
        report: Any = one.document.get("report")
        if report is None:
            refused[str(one.document["refused"])] = None
            rows.add_row(*named, "refused", *[""] * (len(numbers_) - 1))
            continue
        rows.add_row(
            *named,
            share(report["hit_rate"]),
            f"{report['time_to_first_token_s']['p99']:.3f} s",
            f"{report['time_per_output_token_s']['p99'] * 1000:.1f} ms",
            f"{report['output_tokens'] / report['simulated_s'] if report['simulated_s'] else 0:,.0f}",
            format_count(report["preemptions"]),
        )
    console().print(rows)
    for why in refused:
        console().print(printable(f"refused: {why}"), soft_wrap=True)


@contextmanager
def _progress(cells: int) -> Iterator[Callable[[Swept], None]]:
    """A bar on a terminal, else a line a cell, on standard error."""
    if not sys.stderr.isatty():
        count = itertools.count(1)
        yield lambda one: print(f"sweep: {next(count)} of {cells}: {one.cell.name}", file=sys.stderr)
        return
    columns = (TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TextColumn("cells,"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("sweep", total=cells)
        yield lambda _: bar.advance(task)
