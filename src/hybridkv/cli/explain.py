"""`hybridkv explain`: why tokens of one request were not found, in sentences beside a picture of its prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Final

import typer
from rich.table import Table

from hybridkv.cache import MissReason
from hybridkv.cli.gathered import gathered
from hybridkv.cli.output import console, print_facts, share
from hybridkv.cli.panels import OUTPUT
from hybridkv.cli.printable import printable
from hybridkv.cli.requests import TraceArgument
from hybridkv.cli.running import Prepared, RunOptions
from hybridkv.cli.why import RememberOption, remembered, sentence
from hybridkv.errors import ConfigError
from hybridkv.simulator import RequestSource, TraceRequest
from hybridkv.simulator.report import Explained
from hybridkv.units import format_count

_WIDTH: Final = 24
_MARKS: Final = {MissReason.EVICTED: "▒", MissReason.NO_STATE: "░"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(gathered(explain_command))


def explain_command(
    *,
    trace: TraceArgument,
    request: Annotated[int, typer.Argument(help="Its number in the trace; the first is 0.", metavar="REQUEST", min=0)],
    options: RunOptions,
    remember: RememberOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Replay requests until one begins, and say of each part of its prompt why it was found, or not."""
    run = options.prepare(trace, options.settings(remembered_losses=remembered(remember), block_times=True))
    if request >= run.summary.requests:
        raise ConfigError(
            f"{run.source.name} holds {format_count(run.summary.requests)} requests, numbered from 0: there is no "
            f"request {request}"
        )
    found: list[Explained] = []
    source = _UntilFound(run.source, found)
    run.simulation.run(
        source, summary=run.summary, on_explained=lambda one: found.append(one) if one.number == request else None
    )
    (explained,) = found
    if as_json:
        told = explained.to_dict(in_order=run.simulation.scheduler.cache.bounds.evicts_in_order)
        print(json.dumps({"machine": run.simulation.machine, **told}, indent=2))
        return
    _show(explained, run)


class _UntilFound:
    """The requests of ``source`` as long as nothing was found: no later one comes to be asked for."""

    def __init__(self, source: RequestSource, found: list[Explained]) -> None:
        self.name = source.name
        self.summary = source.summary
        self._source = source
        self._found = found

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._source:
            if self._found:
                return
            yield request


def _show(explained: Explained, run: Prepared) -> None:
    trace, tokens = explained.trace, explained.trace.num_prompt_tokens
    waited = explained.begun_s - trace.timestamp_s
    print_facts(
        {
            "machine": run.simulation.machine,
            f"request {explained.number}": f"{trace.origin}, at {trace.timestamp_s:,.3f} s; "
            f"it began {waited:,.3f} s later",
            "its prompt": f"{format_count(tokens)} tokens, {format_count(explained.hit_tokens)} of them "
            f"({share(explained.hit_tokens / tokens)}) found",
        }
    )
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name in ("tokens", "where", "why"):
        rows.add_column(name, overflow="fold", no_wrap=name != "why")
    if explained.hit_tokens:
        rows.add_row(_span(0, explained.hit_tokens), _drawn(0, explained.hit_tokens, tokens, "█"), "found")
    for miss in explained.misses:
        mark = _MARKS.get(miss.reason, "·")
        rows.add_row(
            _span(miss.first, miss.end), _drawn(miss.first, miss.end, tokens, mark), printable(sentence(miss, run))
        )
    console().print(rows)


def _span(first: int, end: int) -> str:
    """The tokens before ``end``, from ``first`` on."""
    return f"{format_count(first)} .. {format_count(end - 1)}" if end - first > 1 else format_count(first)


def _drawn(first: int, end: int, tokens: int, mark: str) -> str:
    """Where they lie in a prompt of so many ``tokens``; anything is seen."""
    begin = min(first * _WIDTH // tokens, _WIDTH - 1)
    stop = max(math.ceil(end * _WIDTH / tokens), begin + 1)
    return (" " * begin + mark * (stop - begin)).ljust(_WIDTH)
