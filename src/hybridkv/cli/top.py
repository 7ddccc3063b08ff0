"""`hybridkv top`: a server's figures in a terminal, as they change."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from hybridkv.cli.output import console, table
from hybridkv.cli.panels import OUTPUT, REQUESTS
from hybridkv.cli.printable import printable
from hybridkv.cli.scrape import metrics_url, read_metrics
from hybridkv.errors import ConfigError
from hybridkv.units import format_bytes, format_count

if TYPE_CHECKING:  # prometheus_client is loaded once the command runs
    from hybridkv.cli.exposition import Exposition

_KEPT: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"
_TIMES: Final = {
    "time_to_first_token_seconds": "first token",
    "request_time_per_output_token_seconds": "then a token",
    "request_queue_time_seconds": "queue",
    "e2e_request_latency_seconds": "whole",
}
_NONE: Final = "-"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top")(top_command)


def top_command(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a server: http://HOST:PORT.")],
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Between two looks.", rich_help_panel=OUTPUT)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.", rich_help_panel=OUTPUT)] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HYBRIDKV_API_KEY",
            help="Of a key without a salt; better named in the environment.",
            show_default="none",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
) -> int:
    """A server's figures as they change: who runs and waits, hits, memory, times. Of hybridkv, and what vLLM has too.

    Without a terminal: one look.
    """
    out, view = console(), View(metrics_url(url))
    view.take(api_key)
    if once or not out.is_terminal:
        out.print(view.shown())
        return 0
    with Live(view.shown(), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            view.take(api_key)
            live.update(view.shown(), refresh=True)


class View:
    """The server at ``url`` as it was looked at: now, the time before, and the first time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen: deque[Exposition] = deque(maxlen=_KEPT + 1)
        self._first: Exposition | None = None

    def take(self, api_key: str | None) -> None:
        """Look once more. ConfigError where nothing of the kind answers."""
        from hybridkv.cli.exposition import Exposition  # noqa: PLC0415  # prometheus_client: only this command pays

        text = read_metrics(self._url, api_key)
        try:
            self.add(Exposition.parse(text, time.monotonic()))
        except ConfigError as error:
            raise ConfigError(f"{self._url} answers {error}") from error

    def add(self, found: Exposition) -> None:
        """What was seen."""
        self._first = self._first or found
        self._seen.append(found)

    def shown(self) -> RenderableType:
        """All of it, at most 80 columns wide."""
        now = self._seen[-1]
        before = self._seen[-2] if len(self._seen) > 1 else None
        parts: list[RenderableType] = [printable(f"{now.models} at {self._url}")]
        parts += [self._requests(now), self._tokens(now, before), self._times(now)]
        parts += [one(now) for one in (_groups, _misses) if one(now).row_count]
        return Group(*parts)

    def _requests(self, now: Exposition) -> RenderableType:
        rows = table("requests", "now", "", numbers_from=1)
        rows.columns[2].justify = "left"
        waits = {name: count for name, count in now.by("num_requests_waiting_by_reason", "reason").items() if count}
        why = ", ".join(f"{format_count(int(count))} {name.replace('_', ' ')}" for name, count in waits.items())
        rows.add_row("running", _count(now.of("num_requests_running")), "")
        rows.add_row("waiting", _count(now.of("num_requests_waiting")), printable(why))
        usage = now.of("kv_cache_usage_perc")
        rows.add_row("memory held", _share(usage), "" if usage is None else _bar(usage))
        for name, of in (("preemptions", "num_preemptions_total"), ("ended", "requests_finished_total")):
            grown = now.since(self._first, of)
            rows.add_row(name, _count(now.of(of)), f"{_count(grown)} since this began" if grown is not None else "")
        return rows

    def _tokens(self, now: Exposition, before: Exposition | None) -> RenderableType:
        rows = table("tokens", "now", "so far", "", numbers_from=1)
        rows.columns[3].justify = "left"
        hits = [one.hit_rate(other) for other, one in pairwise(self._seen)]
        latest = now.hit_rate(before) if before is not None else None
        line = "".join(" " if one is None else _BARS[min(int(one * len(_BARS)), len(_BARS) - 1)] for one in hits)
        rows.add_row("found in the cache", _share(latest), _share(now.hit_rate()), line[-30:])
        for name, of in (("prompt", "prompt_tokens_total"), ("output", "generation_tokens_total")):
            rate = now.rate(before, of) if before is not None else None
            rows.add_row(f"{name}, a second", _NONE if rate is None else f"{rate:,.1f}", _count(now.of(of)), "")
        drafted, accepted = (now.of(f"spec_decode_num_{one}_tokens_total") for one in ("draft", "accepted"))
        if drafted:
            rows.add_row("drafts accepted", "", _share((accepted or 0) / drafted), "")
        return rows

    def _times(self, now: Exposition) -> RenderableType:
        """Of what ended since this began; of all where nothing has."""
        rows = table("seconds", "half", "9 of 10", "99 of 100")
        for name, said in _TIMES.items():
            since = self._first if now.since(self._first, f"{name}_count") else None
            quantiles = [now.quantile(name, share, since) for share in (0.5, 0.9, 0.99)]
            rows.add_row(said, *(_NONE if one is None else f"{one:.4g}" for one in quantiles))
        return rows


def _groups(now: Exposition) -> Table:
    """What each group of layers keeps: blocks, and bytes of those that have keys."""
    rows = table("group", "keeps", "held", "cached", "evictable", "cached bytes", "evictions", numbers_from=2)
    kinds = {labels["group"]: labels["kind"] for labels, _ in now.samples.get("kv_group_blocks", ())}
    for group, kind in kinds.items():
        held, cached, evictable = (
            now.of("kv_group_blocks", group=group, state=state) or 0 for state in ("held", "cached", "evictable")
        )
        size = now.of("kv_group_block_bytes", group=group) or 0
        lost = now.of("kv_group_evictions_total", group=group)
        counts = _count(held), _count(cached), _count(evictable), format_bytes(int(cached * size)), _count(lost)
        rows.add_row(printable(group), printable(kind), *counts)
    return rows


def _misses(now: Exposition) -> Table:
    """Prompt tokens not found, by reason, where the server explains them."""
    rows = table("not found", "tokens", "of all")
    reasons = now.by("prompt_tokens_missed_total", "reason")
    for reason, tokens in sorted(reasons.items(), key=lambda one: -one[1]):
        rows.add_row(printable(reason.replace("_", " ")), _count(tokens), _share(tokens / (sum(reasons.values()) or 1)))
    return rows


def _count(value: float | None) -> str:
    return _NONE if value is None else format_count(int(value))


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _bar(share: float, width: int = 30) -> str:
    full = min(max(round(share * width), 0), width)
    return "█" * full + "░" * (width - full)
