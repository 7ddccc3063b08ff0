"""`hybridkv explain`: why tokens of one request were not found, in sentences beside a picture of its prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from hybridkv.cache import Miss, MissReason
from hybridkv.cli.options import REMEMBERED, explain_option, output_option
from hybridkv.cli.outcome import printable
from hybridkv.cli.output import console, in_words, print_facts, share
from hybridkv.cli.running import Prepared, RunOptions, TraceArgument
from hybridkv.errors import ConfigError
from hybridkv.simulator import RequestSource, TraceRequest
from hybridkv.simulator.report import Explained
from hybridkv.units import format_bytes, format_count

_WIDTH: Final = 24
_MARKS: Final = {MissReason.EVICTED: "▒", MissReason.NO_STATE: "░"}
WHY: Final = {
    "never_seen": "never seen",
    "other_salt": "seen under another salt only",
    "unpublished": "seen, not published",
    "evicted": "evicted",
    "no_state": "no state kept behind them",
    "no_window": "no window kept behind them",
    "block_edge": "in a block's last part",
    "no_room": "no room to copy them",
    "caching_off": "caching off",
    "last_token": "last of a prompt",
}
"""By the name that documents have."""
_MORE: Final = {
    MissReason.NEVER_SEEN: "never seen: no prompt before began so",
    MissReason.OTHER_SALT: "seen under another salt or adapter only",
    MissReason.UNPUBLISHED: "seen, but not there yet: who has them computes them still, or never published them",
    MissReason.NO_WINDOW: "keys and values are there, but what layers with windows or chunks read before them is gone",
    MissReason.BLOCK_EDGE: "in a block's last part: in this layout hits end where blocks do",
    MissReason.NO_ROOM: "found and given up: what is copied was in the copy's way",
    MissReason.CACHING_OFF: "not looked up: caching is off for this request",
    MissReason.LAST_TOKEN: "last of the prompt: it runs for its logits",
}


remember_option: Final = partial(
    output_option,
    "Keys of evicted blocks that are remembered to explain misses, some 200 bytes each.",
    min=1,
    show_default=f"{REMEMBERED:,}",
)


@dataclass(frozen=True, slots=True)
class WhyOptions:
    """What is said of misses."""

    explain: bool = explain_option()
    explain_to: Path | None = output_option(
        "Write why, by request: a line of JSON each, or Parquet where FILE ends in .parquet.", metavar="FILE"
    )
    remember: int | None = remember_option()

    @property
    def remembered_losses(self) -> int:
        """For ReplaySettings; 0 where nothing is asked. ConfigError for so many of what nobody asks for."""
        if self.explain or self.explain_to is not None:
            return self.remember or REMEMBERED
        if self.remember is not None:
            raise ConfigError(
                "--remember is of misses explained, and none is: give --explain or --explain-to FILE, too"
            )
        return 0


def explain_command(
    *,
    trace: TraceArgument,
    request: Annotated[int, typer.Argument(help="Its number in the trace; the first is 0.", metavar="REQUEST", min=0)],
    options: RunOptions,
    remember: int | None = remember_option(),
    as_json: bool = output_option("Print it as JSON.", "--json", default=False),
) -> None:
    """Replay requests until one begins, and say of each part of its prompt why it was found, or not."""
    run = options.prepare(trace, options.settings(remembered_losses=remember or REMEMBERED, block_times=True))
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
            _span(miss.first, miss.end), _drawn(miss.first, miss.end, tokens, mark), printable(_sentence(miss, run))
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


def _sentence(miss: Miss, run: Prepared) -> str:
    """Why the tokens of ``miss`` were not found in ``run``."""
    if miss.reason is MissReason.EVICTED:
        return _evicted(miss, run)
    if miss.reason is not MissReason.NO_STATE:
        return _MORE[miss.reason]
    nearest = f"the nearest is at {format_count(miss.nearest_state)}" if miss.nearest_state else "none before them"
    said = f"keys and values are there, but no state was kept: {nearest}"
    if miss.interval_state is None:
        return said
    at = format_count(miss.interval_state)
    layout = "" if run.plan.config.slabs is not None else "--layout natural "
    return f"{said}; {layout}--placement interval:{miss.interval} would have kept one at {at}, where there is room"


def _evicted(miss: Miss, run: Prepared) -> str:
    cache, group = run.simulation.scheduler.cache, miss.group or 0
    kind = in_words(type(run.plan.config.groups[group].spec).__name__)
    of = f"the {'state behind them' if kind == 'recurrent state' else 'blocks'} of group {group} ({kind})"
    if miss.ago_s is None or miss.more_bytes is None:
        return f"evicted: {of}, so long ago that nobody remembers when"
    whom = f"for request {miss.by}" if miss.by is not None else "for requests that went on"
    idle = "" if miss.idle_s is None else f", {miss.idle_s:,.1f} s after anybody last came for them"
    more = format_bytes(miss.more_bytes)
    kept = (
        f"{more} more memory would have kept them, if not less"
        if cache.bounds.evicts_in_order
        else f"some {more} more memory would have kept them, by estimate"
    )
    return f"evicted {miss.ago_s:,.1f} s before, {whom}, by {cache.eviction.name}: {of}{idle}; {kept}"
