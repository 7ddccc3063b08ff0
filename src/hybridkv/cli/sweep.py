"""`hybridkv sweep` and `hybridkv tune`: replay one trace under many settings, all of them or those of a search."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, get_type_hints

from rich.table import Table

from hybridkv.cli.options import (
    as_option,
    cache_option,
    checked_page,
    model_option,
    output_option,
    page_option,
    request_option,
    run_option,
    write_file,
)
from hybridkv.cli.outcome import printable
from hybridkv.cli.output import UNKNOWN, console, progress_bar, say, share, table
from hybridkv.cli.running import SourceOptions, TraceArgument, require_drafts, weights_option
from hybridkv.errors import ConfigError
from hybridkv.models import DTYPE_NAMES
from hybridkv.planner.plan import DEFAULT_LAYOUT
from hybridkv.report import sweep_page, tune_page
from hybridkv.simulator import Cell, ReplaySettings, Swept, Tried, processes, sweep, tune
from hybridkv.simulator.fleet import ROUND_ROBIN, ROUTERS
from hybridkv.simulator.hardware import DEFAULT_HARDWARE
from hybridkv.simulator.outputs import ACCEPTANCE
from hybridkv.simulator.sweep import differing, in_words, machines_of
from hybridkv.simulator.tune import parse_aims, parse_prices
from hybridkv.units import GiB, MiB, format_count, parse_bytes, shown

_MOST_CELLS: Final = 100_000
_DEFAULTS: Final = ReplaySettings()
_SHOWN: Final = 10
"""Settings in the table of a search, so that it fits on a screen. Chosen by hand."""
jobs_option: Final = partial(run_option, "Number of processes that run replays.", show_default="one per core")


@dataclass(frozen=True, slots=True)
class AxesOptions:
    """The options that vary, each a list of values separated by commas.

    Attributes: each is the option of Cell.of with the same name.
    """

    model: str = model_option(
        "Models: config.json files, folders with one, or names of `hybridkv models`.", default=...
    )
    memory: str = cache_option(
        "Cache memory of one rank: a list such as 20GiB,40GiB, or a range from:to:step such as 20GiB:80GiB:20GiB.",
        default=...,
    )
    tp: str = model_option("Numbers of tensor parallel ranks.", default="1")
    layout: str = cache_option("Cache layouts: natural, reference.", default=DEFAULT_LAYOUT)
    placement: str | None = cache_option(
        "Positions where recurrent states are saved.", show_default="that of the layout"
    )
    eviction: str | None = cache_option("Eviction policies.", show_default="that of the layout")
    block_size: str = cache_option("Tokens in a block.", default="16")
    dtype: str | None = cache_option(
        "Dtypes of keys and values: bf16, fp8, int8_per_token_head.", "--kv-dtype", show_default="the model's"
    )
    max_running: str = run_option("Limits of requests that run at once.", default=str(_DEFAULTS.max_running))
    token_budget: str = run_option("Limits of tokens in a step.", default=str(_DEFAULTS.token_budget))
    hardware: str = run_option(
        "Machines of one rank: names of `hybridkv hardware`, or TOML files.", metavar="NAMES", default=DEFAULT_HARDWARE
    )
    weights: str = weights_option()
    replicas: str = run_option("Numbers of replicas (engines) that share the requests.", default="1")
    router: str = run_option(
        f"Policies that choose a replica for each request: {', '.join(ROUTERS)}.", default=ROUND_ROBIN
    )
    drafts: str = run_option("Drafted tokens of each decoding request in a step.", default="0")
    acceptance: str | None = run_option(
        "Probabilities that a draft is accepted if the drafts before it were, 0 to 1.", show_default=str(ACCEPTANCE)
    )

    def values(self) -> dict[str, Sequence[object]]:
        """Return the values of each option of Cell.of. Raises ConfigError for a list that cannot be read."""
        kinds = {"drafts": int, "acceptance": float, **get_type_hints(ReplaySettings), **get_type_hints(Cell)}
        readers: dict[Any, Callable[[str, str], Sequence[object]]] = {int: _numbers, float: _decimals}
        found: dict[str, Sequence[object]] = {}
        for field in fields(self):
            name, given = field.name, getattr(self, field.name)
            option = "--kv-dtype" if name == "dtype" else as_option(name)
            read = _sizes if name == "memory" else readers.get(kinds[name], _words)
            found[name] = [None] if given is None else read(option, given)
        require_drafts(any(found["drafts"]), self.acceptance)
        found["dtype"] = [DTYPE_NAMES.get(str(one), one) for one in found["dtype"]]
        return found


def _cells_of(axes: Mapping[str, Sequence[object]]) -> list[Cell]:
    """Return a cell for every combination. Raises ConfigError for more than _MOST_CELLS."""
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > _MOST_CELLS:
        raise ConfigError(
            f"these lists combine to {format_count(count)} cells, but a sweep takes at most "
            f"{format_count(_MOST_CELLS)}: shorten a list"
        )
    chosen: Iterator[tuple[Any, ...]] = itertools.product(*axes.values())
    return list(dict.fromkeys(Cell.of(**dict(zip(axes, values, strict=True))) for values in chosen))


def _words(option: str, given: str) -> list[str]:
    """Split a list at its commas, without repeated values."""
    found = list(dict.fromkeys(one.strip() for one in given.split(",")))
    if not all(found):
        raise ConfigError(f"{option} {shown(given)} has an empty entry: drop a comma")
    return found


def _numbers(option: str, given: str) -> list[int]:
    """Read whole numbers that are separated by commas."""
    found = _words(option, given)
    for one in found:
        if not (one.isascii() and one.isdigit() and len(one) < 10):
            raise ConfigError(
                f"{option} {shown(one)} is not a whole number of at most 9 digits: for example {option} 1,2"
            )
    return list(map(int, found))


def _decimals(option: str, given: str) -> list[float]:
    """Read numbers that are separated by commas."""
    found = _words(option, given)
    try:
        return list(map(float, found))
    except ValueError:
        raise ConfigError(f"{option} {shown(given)} is not a list of numbers: for example {option} 0.6,0.8") from None


def _sizes(option: str, given: str) -> list[str]:
    """Read sizes that are separated by commas; from:to:step is a range that includes both bounds."""
    found: list[str] = []
    for one in _words(option, given):
        first, *more = one.split(":")
        if not more:
            parse_bytes(first)
            found.append(first)
            continue
        if len(more) != 2:
            raise ConfigError(f"{option} {shown(one)} must be from:to:step, for example 20GiB:80GiB:20GiB")
        least, most, step = map(parse_bytes, (first, *more))
        if least > most or (most - least) // step >= _MOST_CELLS:
            raise ConfigError(
                f"{option} {shown(one)} must ascend in fewer than {format_count(_MOST_CELLS)} steps: correct the range"
            )
        found += map(_exact, range(least, most + 1, step))
    return list(dict.fromkeys(found))


def _exact(size_bytes: int) -> str:
    """Return the shortest text that ``parse_bytes`` reads as exactly this size."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def sweep_command(
    *,
    trace: TraceArgument,
    axes: AxesOptions,
    out: Path = output_option("Folder for the files of the cells.", metavar="DIR", default=...),
    jobs: int | None = jobs_option(),
    options: SourceOptions,
    as_json: bool = output_option("Print the documents of all cells as JSON.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Replay one trace under all combinations of settings.

    An option may be a list with commas. A combination whose file exists is not run again.
    """
    page_file = checked_page(page_file)
    source = options.read(trace)
    cells = _cells_of(axes.values())
    at_once = min(os.cpu_count() or 1, len(cells)) if jobs is None else jobs
    count = itertools.count(1)
    progress = _progress("sweep", len(cells), "cells,", lambda one: f"{next(count)} of {len(cells)}: {one.cell.name}")
    with processes(at_once) as executor, progress as on_done:
        done = sweep(source, cells, out, executor, at_a_time=at_once, on_done=on_done)
    if page_file is not None:
        write_file("--report", page_file, sweep_page(source.name, done))
    if as_json:
        print(json.dumps([one.document for one in done], indent=2))
        return
    _show_swept(done)
    again = sum(one.again for one in done)
    kept = f", {format_count(again)} of them from an earlier run" if again else ""
    machines = machines_of([one.cell for one in done])
    say(f"{format_count(len(done))} cells in {out}{kept}; times are those of {machines}")


def _show_swept(done: Sequence[Swept]) -> None:
    """Print a table with a row for each cell: the options that differ, then its results."""
    differ, settings = _settings([one.cell for one in done])
    figures = ("hit rate", "TTFT p99", "TPOT p99", "tokens/s", "preempted")
    rows = _table(differ, figures)
    refused: dict[str, None] = {}
    for one, setting in zip(done, settings, strict=True):
        report: Any = one.document.get("report")
        if report is None:
            refused[str(one.document["refused"])] = None
            rows.add_row(*setting, "refused", *[""] * (len(figures) - 1))
            continue
        rows.add_row(
            *setting,
            UNKNOWN if report["hit_rate"] is None else share(report["hit_rate"]),
            f"{report['time_to_first_token_s']['p99']:.3f} s",
            f"{report['time_per_output_token_s']['p99'] * 1000:.1f} ms",
            f"{report['output_tokens'] / report['simulated_s'] if report['simulated_s'] else 0:,.0f}",
            format_count(report["preemptions"]),
        )
    console().print(rows)
    for why in refused:
        say(f"refused: {why}")


def _settings(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the options that differ between ``cells``, and their values in each cell."""
    differ = differing(cells) or ["model", "memory"]
    options = [cell.options() for cell in cells]
    return differ, [[printable("-" if of[name] is None else str(of[name])) for name in differ] for of in options]


def _table(differ: Sequence[str], figures: Iterable[str]) -> Table:
    """Return a table with columns for the options that differ, then for the figures."""
    return table(*(name.replace("_", " ") for name in differ), *figures, numbers_from=len(differ))


def tune_command(
    *,
    trace: TraceArgument,
    trials: int = run_option("Limit of settings to try, with those of earlier runs.", default=50),
    axes: AxesOptions,
    slo: str = request_option(
        "Latency aims, such as ttft-p99=1s,tpot-p99=50ms; mean, p50, p90 or p99 of TTFT or TPOT.", default=...
    ),
    price: str = request_option(
        "Price of one machine of each hardware, such as h100=2.5/h,l4=0.8/h, per hour (/h), day (/d) or month (/mo).",
        default=...,
    ),
    out: Path = output_option("Folder for the files of the search and its cells.", metavar="DIR", default=...),
    jobs: int | None = jobs_option(),
    options: SourceOptions,
    as_json: bool = output_option("Print every tried setting as JSON.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Find the cheapest setting that meets latency aims for a trace.

    An option may be a list with commas. If you run the same command again, the search resumes.
    """
    page_file = checked_page(page_file)
    source = options.read(trace)
    aims, prices = parse_aims(slo), parse_prices(price)
    at_once = (os.cpu_count() or 1) if jobs is None else jobs

    def line(one: Tried) -> str:
        outcome = "meets the aims" if one.keeps_aims else "misses the aims"
        return f"{one.cell.name}: {outcome if one.refused is None else 'refused'}"

    with processes(at_once) as executor, _progress("tune", trials, "settings,", line) as on_done:
        tried = tune(
            source, axes.values(), aims, prices, out, executor=executor, trials=trials, at_once=at_once, on_done=on_done
        )
    if page_file is not None:
        write_file("--report", page_file, tune_page(source.name, tried, aims))
    if as_json:
        documents = [{**asdict(one), "cell": one.cell.to_dict(), "keeps_aims": one.keeps_aims} for one in tried]
        print(json.dumps(documents, indent=2))
        return
    _show_tried(tried)


def _show_tried(tried: Sequence[Tried]) -> None:
    """Print a table of the best settings, then sentences about the best one and the runner-up."""
    differ, settings = _settings([one.cell for one in tried])
    aims = list(next((one.reached for one in tried if one.reached), {}))
    rows = _table(differ, (*aims, "price/h", "goodput/s", "tokens/1", "meets aims"))
    for one, setting in list(zip(tried, settings, strict=True))[:_SHOWN]:
        if one.reached is None:
            rows.add_row(*setting, *["" for _ in aims], f"{one.price_per_h:,.2f}", "", "", "refused")
            continue
        times = [f"{seconds:.3f} s" for seconds in one.reached.values()]
        worth = f"{one.price_per_h:,.2f}", f"{one.goodput_per_s:,.2f}", f"{one.tokens:,.0f}"
        rows.add_row(*setting, *times, *worth, "yes" if one.keeps_aims else "no")
    console().print(rows)
    if len(tried) > _SHOWN:
        say(f"{format_count(len(tried) - _SHOWN)} more settings were tried; --json prints them")
    refused = list(dict.fromkeys(one.refused for one in tried if one.refused is not None))
    for why in refused[:_SHOWN]:
        say(f"refused: {why}")
    if len(refused) > _SHOWN:
        say(f"{format_count(len(refused) - _SHOWN)} more reasons; --json prints them")
    for line in _in_words(tried, differ):
        say(line)


def _in_words(tried: Sequence[Tried], differ: Sequence[str]) -> Iterator[str]:
    def setting(of: Tried) -> str:
        return in_words(of.cell, differ)

    best, *others = tried
    kept = sum(one.keeps_aims for one in tried)
    yield f"{format_count(len(tried))} settings tried, {format_count(kept)} meet the aims"
    yield f"times are those of {machines_of([one.cell for one in tried])}"
    if best.refused is not None:
        yield "no setting can serve this trace"
        return
    price, (aim, taken) = f"{best.price_per_h:,.2f} an hour", best.worst
    if not kept:
        yield f"no setting meets the aims; nearest: {setting(best)}, {price}; {aim} is {taken:.2f} times the aim"
        return
    yield f"cheapest: {setting(best)}, {price}; {aim} is {share(taken)} of the aim"
    for one in [one for one in others if one.refused is None][:1]:
        aim, taken = one.worst
        if one.keeps_aims:
            more = share(one.price_per_h / best.price_per_h - 1)
            yield f"runner-up: {setting(one)}, {more} dearer; {aim} is {share(taken)} of the aim"
        else:
            yield f"no other setting meets the aims; nearest: {setting(one)}; {aim} is {taken:.2f} times the aim"


@contextmanager
def _progress(command: str, total: int, what: str, line: Callable[[Any], str]) -> Iterator[Callable[[Any], None]]:
    """Yield a function to call for each finished item: it moves a bar, or prints its ``line``, on standard error."""
    if sys.stderr.isatty():
        with progress_bar(command, total, what, left=True) as advance:
            yield lambda _: advance()
    else:
        yield lambda one: print(f"{command}: {line(one)}", file=sys.stderr)
