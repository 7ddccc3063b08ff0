"""`hybridkv explain`: why prompt tokens of one request missed the cache, next to a drawing of its prompt."""

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
    "no_state": "no recurrent state saved after them",
    "no_window": "window before them not cached",
    "block_edge": "in a partial block",
    "no_room": "no memory to copy them",
    "caching_off": "caching off",
    "last_token": "last token of the prompt",
}
"""Reasons of misses in words, by their name in documents."""
_SENTENCES: Final = {
    MissReason.NEVER_SEEN: "never seen: no earlier prompt starts this way",
    MissReason.OTHER_SALT: "seen only under another salt or adapter",
    MissReason.UNPUBLISHED: "seen, but not published: the request that has them still computes them, or never did",
    MissReason.NO_WINDOW: "keys and values are cached, but the window or chunk before them is not",
    MissReason.BLOCK_EDGE: "in a partial block: in this layout a hit ends at a block boundary",
    MissReason.NO_ROOM: "cached, but there was no memory to copy their partial block or state",
    MissReason.CACHING_OFF: "not looked up: caching is off for this request",
    MissReason.LAST_TOKEN: "last token of the prompt: it always runs, for its logits",
}


remember_option: Final = partial(
    output_option,
    "Number of evicted keys to remember for explaining misses; each takes some 200 bytes.",
    min=1,
    show_default=f"{REMEMBERED:,}",
)


@dataclass(frozen=True, slots=True)
class WhyOptions:
    """How misses are explained."""

    explain: bool = explain_option()
    explain_to: Path | None = output_option(
        "Write the misses of each request as JSON lines, or as Parquet if FILE ends in .parquet.", metavar="FILE"
    )
    remember: int | None = remember_option()

    @property
    def remembered_losses(self) -> int:
        """Number of evicted keys to remember, 0 if misses are not explained.

        Raises:
            ConfigError: for a number although misses are not explained.
        """
        if self.explain or self.explain_to is not None:
            return self.remember or REMEMBERED
        if self.remember is not None:
            raise ConfigError(
                "--remember has no effect without --explain or --explain-to FILE: give one of them, or drop --remember"
            )
        return 0


def explain_command(
    *,
    trace: TraceArgument,
    request: Annotated[
        int, typer.Argument(help="Number of the request in the trace; the first is 0.", metavar="REQUEST", min=0)
    ],
    options: RunOptions,
    remember: int | None = remember_option(),
    as_json: bool = output_option("Print the explanation as JSON.", "--json", default=False),
) -> None:
    """Replay a trace up to one request, and explain for each part of its prompt why it was a hit or a miss."""
    run = options.prepare(trace, options.settings(remembered_losses=remember or REMEMBERED, block_times=True))
    if request >= run.summary.requests:
        raise ConfigError(
            f"there is no request {request}: {run.source.name} holds {format_count(run.summary.requests)} requests, so "
            f"give a number in 0 .. {run.summary.requests - 1}"
        )
    found: list[Explained] = []
    source = _UntilFound(run.source, found)
    run.simulation.run(
        source, summary=run.summary, on_explained=lambda one: found.append(one) if one.number == request else None
    )
    (explained,) = found
    if as_json:
        document = explained.to_dict(in_order=run.simulation.scheduler.cache.bounds.evicts_in_order)
        print(json.dumps({"machine": run.simulation.machine, **document}, indent=2))
        return
    _show(explained, run)


class _UntilFound:
    """The requests of ``source`` up to the first one that is explained; later requests are not replayed."""

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
            f"began {waited:,.3f} s later",
            "prompt": f"{format_count(tokens)} tokens, {format_count(explained.hit_tokens)} hit tokens, "
            f"hit rate {share(explained.hit_tokens / tokens)}",
        }
    )
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name in ("tokens", "where", "why"):
        rows.add_column(name, overflow="fold", no_wrap=name != "why")
    if explained.hit_tokens:
        rows.add_row(_span(0, explained.hit_tokens), _drawn(0, explained.hit_tokens, tokens, "█"), "hit")
    for miss in explained.misses:
        mark = _MARKS.get(miss.reason, "·")
        rows.add_row(
            _span(miss.first, miss.end), _drawn(miss.first, miss.end, tokens, mark), printable(_sentence(miss, run))
        )
    console().print(rows)


def _span(first: int, end: int) -> str:
    """Return the range of tokens from ``first`` to before ``end`` as text."""
    return f"{format_count(first)} .. {format_count(end - 1)}" if end - first > 1 else format_count(first)


def _drawn(first: int, end: int, tokens: int, mark: str) -> str:
    """Draw the range of tokens within a prompt of ``tokens`` tokens; a range is at least one character wide."""
    begin = min(first * _WIDTH // tokens, _WIDTH - 1)
    stop = max(math.ceil(end * _WIDTH / tokens), begin + 1)
    return (" " * begin + mark * (stop - begin)).ljust(_WIDTH)


def _sentence(miss: Miss, run: Prepared) -> str:
    """Return the reason of ``miss`` in ``run`` as a sentence."""
    if miss.reason is MissReason.EVICTED:
        return _evicted(miss, run)
    if miss.reason is not MissReason.NO_STATE:
        return _SENTENCES[miss.reason]
    nearest = f"the nearest is at {format_count(miss.nearest_state)}" if miss.nearest_state else "there is none"
    said = f"keys and values are cached, but no recurrent state was saved here: {nearest}"
    if miss.interval_state is None:
        return said
    at = format_count(miss.interval_state)
    layout = "" if run.plan.config.slabs is not None else "--layout natural "
    return f"{said}; {layout}--placement interval:{miss.interval} would have saved one at {at} if memory allows"


def _evicted(miss: Miss, run: Prepared) -> str:
    cache, group = run.simulation.scheduler.cache, miss.group or 0
    kind = in_words(type(run.plan.config.groups[group].spec).__name__)
    evicted = f"the {'state after them' if kind == 'recurrent state' else 'blocks'} of group {group} ({kind})"
    if miss.ago_s is None or miss.more_bytes is None:
        return f"evicted: {evicted}, too long ago to be remembered (--remember)"
    reason = f"for request {miss.by}" if miss.by is not None else "for running requests"
    idle = "" if miss.idle_s is None else f", {miss.idle_s:,.1f} s after their last use"
    more = format_bytes(miss.more_bytes)
    kept = (
        f"at most {more} more memory would have kept them"
        if cache.bounds.evicts_in_order
        else f"an estimated {more} more memory would have kept them"
    )
    return f"evicted {miss.ago_s:,.1f} s before, {reason}, by {cache.eviction.name}: {evicted}{idle}; {kept}"
