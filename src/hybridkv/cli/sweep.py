"""`hybridkv sweep`: one trace under many settings, each a file, in as many processes as wanted."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridkv.cli.hardware import HardwareList, WeightsList
from hybridkv.cli.output import console, share, table
from hybridkv.cli.panels import CACHE, MODEL, OUTPUT, RUN
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
from hybridkv.errors import ConfigError
from hybridkv.models import DTYPE_NAMES
from hybridkv.simulator import Cell, Swept, processes, sweep
from hybridkv.simulator.cost import BF16
from hybridkv.simulator.hardware import DEFAULT_HARDWARE
from hybridkv.simulator.routing import ROUND_ROBIN, ROUTERS
from hybridkv.simulator.setup import TOKEN_BUDGET
from hybridkv.units import GiB, MiB, format_count, parse_bytes, shown

_MOST_CELLS: Final = 100_000
_DEFAULTS: Final = {field.name: field.default for field in fields(Cell)}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sweep")(sweep_command)


def sweep_command(
    *,
    trace: TraceArgument,
    model: Annotated[
        str, typer.Option(help="Models: config.json files, folders with one, or known names.", rich_help_panel=MODEL)
    ],
    memory: Annotated[
        str,
        typer.Option(
            help="For the cache of one rank: 20GiB,40GiB, or from:to:step, as 20GiB:80GiB:20GiB.",
            rich_help_panel=CACHE,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the cells.", metavar="DIR", rich_help_panel=OUTPUT)],
    tp: Annotated[str, typer.Option(help="Tensor parallel ranks.", rich_help_panel=MODEL)] = "1",
    layout: Annotated[str, typer.Option(help="natural, reference.", rich_help_panel=CACHE)] = str(_DEFAULTS["layout"]),
    placement: Annotated[
        str | None,
        typer.Option(help="Where recurrent states are kept.", show_default="that of the layout", rich_help_panel=CACHE),
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            help="What is given up next, in the natural layout.", show_default="what suits", rich_help_panel=CACHE
        ),
    ] = None,
    block_size: Annotated[str, typer.Option(help="Tokens of a block.", rich_help_panel=CACHE)] = "16",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype", help="Of keys and values: bf16, fp8.", show_default="the config's", rich_help_panel=CACHE
        ),
    ] = None,
    max_running: Annotated[str, typer.Option(help="Requests at once.", rich_help_panel=RUN)] = "256",
    token_budget: Annotated[str, typer.Option(help="Tokens of a step.", rich_help_panel=RUN)] = str(TOKEN_BUDGET),
    hardware: HardwareList = DEFAULT_HARDWARE,
    weights: WeightsList = BF16,
    replicas: Annotated[str, typer.Option(help="Engines behind a router.", rich_help_panel=RUN)] = "1",
    router: Annotated[str, typer.Option(help=f"{', '.join(ROUTERS)}.", rich_help_panel=RUN)] = ROUND_ROBIN,
    jobs: Annotated[
        int | None, typer.Option(help="Processes at once.", show_default="one a core", rich_help_panel=RUN)
    ] = None,
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
    axes: dict[str, Sequence[object]] = {
        "model": words("--model", model),
        "memory": sizes(memory),
        "tp": numbers("--tp", tp),
        "layout": words("--layout", layout),
        "placement": [None] if placement is None else words("--placement", placement),
        "eviction": [None] if eviction is None else words("--eviction", eviction),
        "block_size": numbers("--block-size", block_size),
        "dtype": [None] if dtype is None else [DTYPE_NAMES.get(one, one) for one in words("--kv-dtype", dtype)],
        "max_running": numbers("--max-running", max_running),
        "token_budget": numbers("--token-budget", token_budget),
        "hardware": words("--hardware", hardware),
        "weights": words("--weights", weights),
        "replicas": numbers("--replicas", replicas),
        "router": words("--router", router),
    }
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


def cells_of(axes: Mapping[str, Sequence[object]]) -> list[Cell]:
    """Every combination. ConfigError for more than anybody waits for."""
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > _MOST_CELLS:
        raise ConfigError(f"{format_count(count)} cells are more than a sweep takes ({format_count(_MOST_CELLS)})")
    chosen: Iterator[tuple[Any, ...]] = itertools.product(*axes.values())
    cells = [Cell(**dict(zip(axes, values, strict=True))) for values in chosen]
    # before one engine all routers are alike
    return list(dict.fromkeys(one if one.replicas > 1 else replace(one, router=ROUND_ROBIN) for one in cells))


def words(option: str, given: str) -> list[str]:
    """A list separated by commas, each once."""
    found = list(dict.fromkeys(one.strip() for one in given.split(",")))
    if not all(found):
        raise ConfigError(f"{option} {shown(given)} has an empty entry")
    return found


def numbers(option: str, given: str) -> list[int]:
    """Whole numbers, separated by commas."""
    found = words(option, given)
    for one in found:
        if not (one.isascii() and one.isdigit() and len(one) < 10):
            raise ConfigError(f"{option} {shown(one)} is no number: say {option} 1,2")
    return list(map(int, found))


def sizes(given: str) -> list[str]:
    """Memories: each by itself, or from:to:step with both ends."""
    found: list[str] = []
    for one in words("--memory", given):
        first, *more = one.split(":")
        if not more:
            parse_bytes(first)
            found.append(first)
            continue
        if len(more) != 2:
            raise ConfigError(f"--memory {shown(one)}: a range is from:to:step, as 20GiB:80GiB:20GiB")
        least, most, step = map(parse_bytes, (first, *more))
        if least > most or (most - least) // step >= _MOST_CELLS:
            raise ConfigError(f"--memory {shown(one)}: the range must ascend, in fewer than {_MOST_CELLS} steps")
        found += map(_exact, range(least, most + 1, step))
    return list(dict.fromkeys(found))


def _exact(size_bytes: int) -> str:
    """As short as it can be said exactly."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


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
