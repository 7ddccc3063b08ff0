"""`hybridkv top`: a server's figures in a terminal, as they change."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from itertools import pairwise
from typing import IO, Annotated, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from hybridkv.cli.options import output_option, request_option
from hybridkv.cli.outcome import printable
from hybridkv.cli.output import console, table
from hybridkv.errors import ConfigError
from hybridkv.units import format_bytes, format_count, shown

MOST_BYTES: Final = 16 << 20
"""Of metrics."""
_WAIT_S: Final = 10.0
EVERYBODY_HAS: Final = ":num_requests_running"
"""The end of a metric's name."""
_KEPT: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"
_TIMES: Final = {
    "time_to_first_token_seconds": "first token",
    "request_time_per_output_token_seconds": "then a token",
    "request_queue_time_seconds": "queue",
    "e2e_request_latency_seconds": "whole",
}
_NONE: Final = "-"


def top_command(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a server: http://HOST:PORT.")],
    every: float = output_option("Between two looks.", min=0.1, max=3600, metavar="SECONDS", default=1.0),
    once: bool = output_option("Print one look and end.", "--once", default=False),
    api_key: str | None = request_option(
        "Of a key without a salt; better named in the environment.", envvar="HYBRIDKV_API_KEY", show_default="none"
    ),
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


# -- what a server's /metrics say, ours or vLLM's, whatever prefix the names have

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples of one server at ``at_s``, seconds of any clock. samples: by name, without its prefix."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]]
    at_s: float

    @classmethod
    def parse(cls, text: str, at_s: float) -> Exposition:
        """ConfigError for what is no exposition, and for one of something else than a server of models."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415  # who asks servers pays

        found: list[tuple[str, Labels, float]] = []
        try:
            for family in text_string_to_metric_families(text):
                found += [(one.name, one.labels, one.value) for one in family.samples]
        except (ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"no metrics as Prometheus has them: {error}") from error
        prefix = next((name.removesuffix(EVERYBODY_HAS) for name, *_ in found if name.endswith(EVERYBODY_HAS)), None)
        if prefix is None:
            raise ConfigError(f"metrics, but none is called *{EVERYBODY_HAS}: not those of hybridkv or vLLM")
        samples: dict[str, tuple[tuple[Labels, float], ...]] = {}
        for name, labels, value in found:
            if name.startswith(f"{prefix}:"):
                short = name.removeprefix(f"{prefix}:")
                samples[short] = (*samples.get(short, ()), (labels, value))
        return cls(samples, at_s)

    @property
    def models(self) -> str:
        """Names of the models."""
        names = {labels.get("model_name", "") for labels, _ in self.samples["num_requests_running"]}
        return ", ".join(sorted(names))

    def of(self, name: str, **labels: str) -> float | None:
        """The sum of all samples of that name with ``labels``; None where there is none."""
        found = [value for has, value in self.samples.get(name, ()) if labels.items() <= has.items()]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Such sums for each value of ``label``."""
        sums: dict[str, float] = {}
        for has, value in self.samples.get(name, ()):
            sums[has.get(label, "")] = sums.get(has.get(label, ""), 0.0) + value
        return sums

    def since(self, before: Exposition | None, name: str) -> float | None:
        """By how much a counter grew; from nothing where it was set back, or there was nothing before."""
        now = self.of(name)
        return None if now is None else _grown(now, None if before is None else before.of(name))

    def rate(self, before: Exposition, name: str) -> float | None:
        """That, a second."""
        grown, seconds = self.since(before, name), self.at_s - before.at_s
        return None if grown is None or seconds <= 0 else grown / seconds

    def hit_rate(self, before: Exposition | None = None) -> float | None:
        """Share of prompt tokens found in the cache, 0 to 1, since ``before``; None where none came."""
        asked, found = self.since(before, "prefix_cache_queries_total"), self.since(before, "prefix_cache_hits_total")
        return None if not asked or found is None else found / asked

    def quantile(self, name: str, share: float, before: Exposition | None = None) -> float | None:
        """The ``share``-th quantile of a histogram since ``before``, interpolated within its bucket; None of nothing.

        Behind its last edge: that edge, as Prometheus has it.
        """
        now, then = self.by(f"{name}_bucket", "le"), {} if before is None else before.by(f"{name}_bucket", "le")
        counts = sorted((float(edge), _grown(value, then.get(edge))) for edge, value in now.items())
        if not counts or not counts[-1][1]:
            return None
        wanted, last_edge, last = share * counts[-1][1], 0.0, 0.0
        for edge, count in counts:
            if count >= wanted and count > last:
                return (
                    last_edge if math.isinf(edge) else last_edge + (edge - last_edge) * (wanted - last) / (count - last)
                )
            last_edge, last = edge, count
        return last_edge


def _grown(now: float, before: float | None) -> float:
    """From ``before``; all of it where it was set back since."""
    return now if before is None or now < before else now - before


def metrics_url(url: str) -> str:
    """Where the metrics of the server at ``url`` are. ConfigError for what is no address of one."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        there = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        there = False
    if not there or not whole.isprintable() or " " in whole:
        raise ConfigError(f"{url!r} is no address of a server: give http://HOST:PORT")
    return f"{whole.rstrip('/').removesuffix('/metrics')}/metrics"


def read_metrics(url: str, api_key: str | None) -> str:
    """What ``url`` answers. ConfigError, in one line, where it does not, or with something else.

    api_key: goes to that server alone; one that sends a request with it elsewhere is not followed.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = Request(url, headers=headers)  # noqa: S310 - http alone
        with build_opener(_KeyStays).open(request, timeout=_WAIT_S) as answer:
            read: bytes = answer.read(MOST_BYTES)
            return read.decode()
    except HTTPError as error:
        key = ": name a key without a salt in HYBRIDKV_API_KEY" if error.code in {401, 403} else ""
        raise ConfigError(f"{url} answers {error.code} {error.reason}{key}") from error
    except ConfigError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"cannot read {url}: {getattr(error, 'reason', error)}: is a server there?") from error


class _KeyStays(HTTPRedirectHandler):
    """Follows redirects, but none to another server with a key: urllib would hand it on."""

    def redirect_request(  # noqa: PLR0917 - urllib's
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """See HTTPRedirectHandler; ConfigError where a key would go elsewhere."""
        if req.has_header("Authorization") and _server_of(newurl) != _server_of(req.full_url):
            parts = urlsplit(newurl)
            other = shown(f"{parts.scheme}://{parts.netloc}")
            raise ConfigError(
                f"{req.full_url} sends on to {other}, which does not get the key: name that server itself"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _server_of(url: str) -> tuple[str, str | None, int]:
    """Scheme, host and port. ValueError for a port that is none."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
