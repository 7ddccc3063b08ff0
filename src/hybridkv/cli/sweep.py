"""`hybridkv sweep` and `hybridkv tune`: one trace under many settings, all of them or those of a search."""

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
    write_page,
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
from hybridkv.simulator.loop import ACCEPTANCE
from hybridkv.simulator.sweep import differing, in_words, machines_of
from hybridkv.simulator.tune import parse_aims, parse_prices
from hybridkv.units import GiB, MiB, format_count, parse_bytes, shown

_MOST_CELLS: Final = 100_000
_DEFAULTS: Final = ReplaySettings()
_SHOWN: Final = 10
"""Settings in the table of what was tried."""
jobs_option: Final = partial(run_option, "Processes at once.", show_default="one a core")


@dataclass(frozen=True, slots=True)
class AxesOptions:
    """Settings that vary: lists as they were given."""

    model: str = model_option("Models: config.json files, folders with one, or known names.", default=...)
    memory: str = cache_option(
        "For the cache of one rank: 20GiB,40GiB, or from:to:step, as 20GiB:80GiB:20GiB.", default=...
    )
    tp: str = model_option("Tensor parallel ranks.", default="1")
    layout: str = cache_option("natural, reference.", default=DEFAULT_LAYOUT)
    placement: str | None = cache_option("Where recurrent states are kept.", show_default="that of the layout")
    eviction: str | None = cache_option("What is given up next, in the natural layout.", show_default="what suits")
    block_size: str = cache_option("Tokens of a block.", default="16")
    dtype: str | None = cache_option("Of keys and values: bf16, fp8.", "--kv-dtype", show_default="the config's")
    max_running: str = run_option("Requests at once.", default=str(_DEFAULTS.max_running))
    token_budget: str = run_option("Tokens of a step.", default=str(_DEFAULTS.token_budget))
    hardware: str = run_option(
        "Names of `hybridkv hardware`, or TOML files.", metavar="NAMES", default=DEFAULT_HARDWARE
    )
    weights: str = weights_option()
    replicas: str = run_option("Engines behind a router.", default="1")
    router: str = run_option(f"{', '.join(ROUTERS)}.", default=ROUND_ROBIN)
    drafts: str = run_option("Drafts of each row that decodes, in a step.", default="0")
    acceptance: str | None = run_option(
        "Of a draft, if those before it were accepted: 0 .. 1.", show_default=str(ACCEPTANCE)
    )

    def values(self) -> dict[str, Sequence[object]]:
        """Return the values of each option of Cell.of. Raises ConfigError for a list that cannot be read."""
        kinds = {"drafts": int, "acceptance": float, **get_type_hints(ReplaySettings), **get_type_hints(Cell)}
        readers = {int: _numbers, float: _decimals}
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
    """Every combination. ConfigError for more than anybody waits for."""
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > _MOST_CELLS:
        raise ConfigError(f"{format_count(count)} cells are more than a sweep takes ({format_count(_MOST_CELLS)})")
    chosen: Iterator[tuple[Any, ...]] = itertools.product(*axes.values())
    return list(dict.fromkeys(Cell.of(**dict(zip(axes, values, strict=True))) for values in chosen))


def _words(option: str, given: str) -> list[str]:
    """A list separated by commas, each once."""
    found = list(dict.fromkeys(one.strip() for one in given.split(",")))
    if not all(found):
        raise ConfigError(f"{option} {shown(given)} has an empty entry")
    return found


def _numbers(option: str, given: str) -> list[int]:
    """Whole numbers, separated by commas."""
    found = _words(option, given)
    for one in found:
        if not (one.isascii() and one.isdigit() and len(one) < 10):
            raise ConfigError(f"{option} {shown(one)} is no number: say {option} 1,2")
    return list(map(int, found))


def _decimals(option: str, given: str) -> list[float]:
    """Read numbers that are separated by commas."""
    found = _words(option, given)
    try:
        return list(map(float, found))
    except ValueError:
        raise ConfigError(f"{option} {shown(given)} is not a list of numbers: for example {option} 0.6,0.8") from None


def _sizes(option: str, given: str) -> list[str]:
    """Memories: each by itself, or from:to:step with both ends."""
    found: list[str] = []
    for one in _words(option, given):
        first, *more = one.split(":")
        if not more:
            parse_bytes(first)
            found.append(first)
            continue
        if len(more) != 2:
            raise ConfigError(f"{option} {shown(one)}: a range is from:to:step, as 20GiB:80GiB:20GiB")
        least, most, step = map(parse_bytes, (first, *more))
        if least > most or (most - least) // step >= _MOST_CELLS:
            raise ConfigError(f"{option} {shown(one)}: the range must ascend, in fewer than {_MOST_CELLS} steps")
        found += map(_exact, range(least, most + 1, step))
    return list(dict.fromkeys(found))


def _exact(size_bytes: int) -> str:
    """As short as it can be said exactly."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def sweep_command(
    *,
    trace: TraceArgument,
    axes: AxesOptions,
    out: Path = output_option("The folder of the cells.", metavar="DIR", default=...),
    jobs: int | None = jobs_option(),
    options: SourceOptions,
    as_json: bool = output_option("Print all cells as JSON.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Replay one trace under all combinations of settings, lists with commas; what is there is not run again."""
    page_file = checked_page(page_file)
    source = options.read(trace)
    cells = _cells_of(axes.values())
    at_once = min(os.cpu_count() or 1, len(cells)) if jobs is None else jobs
    count = itertools.count(1)
    progress = _progress("sweep", len(cells), "cells,", lambda one: f"{next(count)} of {len(cells)}: {one.cell.name}")
    with processes(at_once) as executor, progress as on_done:
        done = sweep(source, cells, out, executor, at_a_time=at_once, on_done=on_done)
    if page_file is not None:
        write_page(page_file, sweep_page(source.name, done))
    if as_json:
        print(json.dumps([one.document for one in done], indent=2))
        return
    _show_swept(done)
    again = sum(one.again for one in done)
    kept = f", {format_count(again)} of them from before" if again else ""
    machines = machines_of([one.cell for one in done])
    say(f"{format_count(len(done))} cells in {out}{kept}; times are those of {machines}")


def _show_swept(done: Sequence[Swept]) -> None:
    """A row a cell: what differs between them, and what came of each."""
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
    """The names of what differs between ``cells``, and what it is in each."""
    differ = differing(cells) or ["model", "memory"]
    options = [cell.options() for cell in cells]
    return differ, [[printable("-" if of[name] is None else str(of[name])) for name in differ] for of in options]


def _table(differ: Sequence[str], figures: Iterable[str]) -> Table:
    """Columns of what differs, then of figures."""
    return table(*(name.replace("_", " ") for name in differ), *figures, numbers_from=len(differ))


def tune_command(
    *,
    trace: TraceArgument,
    trials: int = run_option("Settings tried at most.", default=50),
    axes: AxesOptions,
    slo: str = request_option("Aims: ttft-p99=1s,tpot-p99=50ms; also mean, p50, p90.", default=...),
    price: str = request_option("Of one machine by hardware: h100=2.5/h,l4=0.8/h; /d and /mo, too.", default=...),
    out: Path = output_option("The folder of the study and its cells.", metavar="DIR", default=...),
    jobs: int | None = jobs_option(),
    options: SourceOptions,
    as_json: bool = output_option("Print what was tried as JSON.", "--json", default=False),
    page_file: Path | None = page_option(),
) -> None:
    """Find the cheapest of many settings that keeps latency aims for a trace; started again, the search goes on."""
    page_file = checked_page(page_file)
    source = options.read(trace)
    aims, prices = parse_aims(slo), parse_prices(price)
    at_once = (os.cpu_count() or 1) if jobs is None else jobs

    def line(one: Tried) -> str:
        came_of = "keeps" if one.keeps_aims else "misses"
        return f"{one.cell.name}: {came_of if one.refused is None else 'refused'}"

    with processes(at_once) as executor, _progress("tune", trials, "settings,", line) as on_done:
        tried = tune(
            source, axes.values(), aims, prices, out, executor=executor, trials=trials, at_once=at_once, on_done=on_done
        )
    if page_file is not None:
        write_page(page_file, tune_page(source.name, tried, aims))
    if as_json:
        documents = [{**asdict(one), "cell": one.cell.to_dict(), "keeps_aims": one.keeps_aims} for one in tried]
        print(json.dumps(documents, indent=2))
        return
    _show_tried(tried)


def _show_tried(tried: Sequence[Tried]) -> None:
    """The best ones, then in words: which, and how far the next is."""
    differ, settings = _settings([one.cell for one in tried])
    aims = list(next((one.reached for one in tried if one.reached), {}))
    rows = _table(differ, (*aims, "price/h", "goodput/s", "tokens/1", "keeps"))
    for one, setting in list(zip(tried, settings, strict=True))[:_SHOWN]:
        if one.reached is None:
            rows.add_row(*setting, *["" for _ in aims], f"{one.price_per_h:,.2f}", "", "", "refused")
            continue
        times = [f"{seconds:.3f} s" for seconds in one.reached.values()]
        worth = f"{one.price_per_h:,.2f}", f"{one.goodput_per_s:,.2f}", f"{one.tokens:,.0f}"
        rows.add_row(*setting, *times, *worth, "yes" if one.keeps_aims else "no")
    console().print(rows)
    if len(tried) > _SHOWN:
        say(f"{format_count(len(tried) - _SHOWN)} more were tried, told with --json")
    refused = list(dict.fromkeys(one.refused for one in tried if one.refused is not None))
    for why in refused[:_SHOWN]:
        say(f"refused: {why}")
    if len(refused) > _SHOWN:
        say(f"{format_count(len(refused) - _SHOWN)} more reasons are told with --json")
    for line in _in_words(tried, differ):
        say(line)


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


@contextmanager
def _progress(command: str, total: int, what: str, line: Callable[[Any], str]) -> Iterator[Callable[[Any], None]]:
    """What to call for each that is done: a bar on a terminal, else its ``line``, on standard error."""
    if sys.stderr.isatty():
        with progress_bar(command, total, what, left=True) as advance:
            yield lambda _: advance()
    else:
        yield lambda one: print(f"{command}: {line(one)}", file=sys.stderr)
