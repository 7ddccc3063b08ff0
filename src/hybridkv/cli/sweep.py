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

from hybridkv.cli.axes import AxesOptions, JobsOption, cells_of
from hybridkv.cli.gathered import gathered
from hybridkv.cli.output import UNKNOWN, console, share, table
from hybridkv.cli.pages import PageFile, checked_page, write_page
from hybridkv.cli.panels import OUTPUT
from hybridkv.cli.printable import printable
from hybridkv.cli.requests import SourceOptions, TraceArgument
from hybridkv.report import sweep_page
from hybridkv.simulator import Swept, processes, sweep
from hybridkv.simulator.sweep import differing, machines_of
from hybridkv.units import format_count


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep")(gathered(sweep_command))


def sweep_command(
    *,
    trace: TraceArgument,
    axes: AxesOptions,
    out: Annotated[Path, typer.Option(help="The folder of the cells.", metavar="DIR", rich_help_panel=OUTPUT)],
    jobs: JobsOption = None,
    options: SourceOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print all cells as JSON.", rich_help_panel=OUTPUT)] = False,
    page_file: PageFile = None,
) -> None:
    """Replay one trace under all combinations of settings, lists with commas; what is there is not run again."""
    page_file = checked_page(page_file)
    source = options.read(trace)
    cells = cells_of(axes.values())
    at_once = min(os.cpu_count() or 1, len(cells)) if jobs is None else jobs
    with processes(at_once) as executor, _progress(len(cells)) as on_done:
        done = sweep(source, cells, out, executor, at_a_time=at_once, on_done=on_done)
    if page_file is not None:
        write_page(page_file, sweep_page(source.name, done))
    if as_json:
        print(json.dumps([one.document for one in done], indent=2))
        return
    show(done)
    again = sum(one.again for one in done)
    kept = f", {format_count(again)} of them from before" if again else ""
    said = (
        f"{format_count(len(done))} cells in {out}{kept}; times are those of {machines_of([one.cell for one in done])}"
    )
    console().print(printable(said), soft_wrap=True)


def show(done: Sequence[Swept]) -> None:
    """A row a cell: what differs between them, and what came of each."""
    settings = [asdict(one.cell) for one in done]
    differ = differing([one.cell for one in done]) or ["model", "memory"]
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
            UNKNOWN if report["hit_rate"] is None else share(report["hit_rate"]),
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
