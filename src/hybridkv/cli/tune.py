"""`hybridkv tune`: the cheapest setting that keeps the aims."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridkv.cli.axes import AxesOptions, JobsOption
from hybridkv.cli.gathered import gathered
from hybridkv.cli.output import console, share, table
from hybridkv.cli.pages import PageFile, checked_page, write_page
from hybridkv.cli.panels import OUTPUT, REQUESTS, RUN
from hybridkv.cli.printable import printable
from hybridkv.cli.requests import SourceOptions, TraceArgument
from hybridkv.report import tune_page
from hybridkv.simulator import Tried, processes, tune
from hybridkv.simulator.sweep import differing, in_words, machines_of
from hybridkv.simulator.tune import parse_aims, parse_prices
from hybridkv.units import format_count

_SHOWN: Final = 10
"""Settings in the table."""
_TRIALS: Final = 50


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tune")(gathered(tune_command))


def tune_command(
    *,
    trace: TraceArgument,
    trials: Annotated[int, typer.Option(help="Settings tried at most.", rich_help_panel=RUN)] = _TRIALS,
    axes: AxesOptions,
    slo: Annotated[
        str, typer.Option(help="Aims: ttft-p99=1s,tpot-p99=50ms; also mean, p50, p90.", rich_help_panel=REQUESTS)
    ],
    price: Annotated[
        str,
        typer.Option(
            help="Of one machine by hardware: h100=2.5/h,l4=0.8/h; /d and /mo, too.", rich_help_panel=REQUESTS
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The folder of the study and its cells.", metavar="DIR", rich_help_panel=OUTPUT)
    ],
    jobs: JobsOption = None,
    options: SourceOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was tried as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    page_file: PageFile = None,
) -> None:
    """Find the cheapest of many settings that keeps latency aims for a trace; started again, the search goes on."""
    page_file = checked_page(page_file)
    source = options.read(trace)
    aims, prices = parse_aims(slo), parse_prices(price)
    at_once = (os.cpu_count() or 1) if jobs is None else jobs
    with processes(at_once) as executor, _progress(trials) as on_done:
        tried = tune(
            source, axes.values(), aims, prices, out, executor=executor, trials=trials, at_once=at_once, on_done=on_done
        )
    if page_file is not None:
        write_page(page_file, tune_page(source.name, tried, aims))
    if as_json:
        documents = [{**asdict(one), "cell": one.cell.said(), "keeps_aims": one.keeps_aims} for one in tried]
        print(json.dumps(documents, indent=2))
        return
    _show(tried)


def _show(tried: Sequence[Tried]) -> None:
    """The best ones, then in words: which, and how far the next is."""
    said = [one.cell.said() for one in tried]
    differ = differing([one.cell for one in tried]) or ["model", "memory"]
    aims = list(next((one.reached for one in tried if one.reached), {}))
    rows = table(
        *(name.replace("_", " ") for name in differ), *aims, "price/h", "goodput/s", "tokens/1", "keeps",
        numbers_from=len(differ),
    )  # fmt: skip
    for one, setting in list(zip(tried, said, strict=True))[:_SHOWN]:
        named = [printable("-" if setting[name] is None else str(setting[name])) for name in differ]
        if one.reached is None:
            rows.add_row(*named, *["" for _ in aims], f"{one.price_per_h:,.2f}", "", "", "refused")
            continue
        times = [f"{seconds:.3f} s" for seconds in one.reached.values()]
        worth = f"{one.price_per_h:,.2f}", f"{one.goodput_per_s:,.2f}", f"{one.tokens:,.0f}"
        rows.add_row(*named, *times, *worth, "yes" if one.keeps_aims else "no")
    out = console()
    out.print(rows)
    if len(tried) > _SHOWN:
        out.print(f"{format_count(len(tried) - _SHOWN)} more were tried, told with --json")
    refused = list(dict.fromkeys(one.refused for one in tried if one.refused is not None))
    for why in refused[:_SHOWN]:
        out.print(printable(f"refused: {why}"), soft_wrap=True)
    if len(refused) > _SHOWN:
        out.print(f"{format_count(len(refused) - _SHOWN)} more reasons are told with --json")
    for line in _in_words(tried, differ):
        out.print(printable(line), soft_wrap=True)


def _in_words(tried: Sequence[Tried], differ: Sequence[str]) -> Iterator[str]:
    def setting(of: Tried) -> str:
        return in_words(of.cell, differ)

    best, *others = tried
    kept = sum(one.keeps_aims for one in tried)
    yield f"{format_count(len(tried))} settings tried, {format_count(kept)} keep the aims"
    yield f"times are those of {machines_of([one.cell for one in tried])}"
    if best.refused is not None:
        yield "none can serve this trace"
        return
    price, (aim, taken) = f"{best.price_per_h:,.2f} an hour", best.worst
    if not kept:
        yield f"none keeps the aims; the nearest: {setting(best)}, {price}, whose {aim} is {taken:.2f} times the aim"
        return
    yield f"cheapest: {setting(best)}, {price}; {aim} is {share(taken)} of the aim"
    for one in [one for one in others if one.refused is None][:1]:
        aim, taken = one.worst
        if one.keeps_aims:
            more = share(one.price_per_h / best.price_per_h - 1)
            yield f"runner-up: {setting(one)}, {more} dearer; {aim} is {share(taken)} of the aim"
        else:
            yield f"no other keeps them; the nearest: {setting(one)}, whose {aim} is {taken:.2f} times the aim"


def _came_of(one: Tried) -> str:
    if one.refused is not None:
        return "refused"
    return "keeps" if one.keeps_aims else "misses"


@contextmanager
def _progress(trials: int) -> Iterator[Callable[[Tried], None]]:
    """A bar on a terminal, else a line a setting, on standard error."""
    if not sys.stderr.isatty():
        yield lambda one: print(f"tune: {one.cell.name}: {_came_of(one)}", file=sys.stderr)
        return
    columns = (TextColumn("tune"), BarColumn(), MofNCompleteColumn(), TextColumn("settings,"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("tune", total=trials)
        yield lambda _: bar.advance(task)
