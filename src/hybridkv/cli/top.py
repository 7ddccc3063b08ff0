"""`hybridkv top`: show the metrics of a running server in a terminal as they change."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
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

from hybridkv.cli.options import key_option, output_option
from hybridkv.cli.outcome import printable
from hybridkv.cli.output import console, table
from hybridkv.errors import ConfigError
from hybridkv.units import format_bytes, format_count, shown

MOST_BYTES: Final = 16 << 20
"""Limit of the text of metrics."""
_WAIT_S: Final = 10.0
RUNNING_SUFFIX: Final = ":num_requests_running"
"""Suffix of a metric's name that every server has, of hybridkv or vLLM; the text before it is the prefix."""
_KEPT: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"
_TIMES: Final = {
    "time_to_first_token_seconds": "time to first token",
    "request_time_per_output_token_seconds": "time per output token",
    "request_queue_time_seconds": "time in queue",
    "e2e_request_latency_seconds": "whole request",
}
_NONE: Final = "-"


def top_command(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of a server: http://HOST:PORT.")],
    every: float = output_option(
        "Time between updates, in seconds.", min=0.1, max=3600, metavar="SECONDS", default=1.0
    ),
    once: bool = output_option("Print the figures once and exit.", "--once", default=False),
    api_key: str | None = key_option(),
) -> int:
    """Show the metrics of a hybridkv or vLLM server as they change: requests, hit rate, memory, latencies.

    Without a terminal, the figures are printed once.
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
    """The metrics of the server at ``url``: the latest samples, and the first one.

    Args:
        url: address of the metrics, as ``metrics_url`` returns it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen: deque[Exposition] = deque(maxlen=_KEPT + 1)
        self._first: Exposition | None = None

    def take(self, api_key: str | None) -> None:
        """Read the metrics once. Raises ConfigError if no server with metrics answers."""
        text = read_metrics(self._url, api_key)
        try:
            self.add(Exposition.parse(text, time.monotonic()))
        except ConfigError as error:
            raise ConfigError(f"{self._url}: {error}") from error

    def add(self, found: Exposition) -> None:
        """Add a sample."""
        self._first = self._first or found
        self._seen.append(found)

    def shown(self) -> RenderableType:
        """Return all tables, at most 80 columns wide."""
        now = self._seen[-1]
        before = self._seen[-2] if len(self._seen) > 1 else None
        parts: list[RenderableType] = [printable(f"{now.models} at {self._url}")]
        parts += [self._requests(now), self._tokens(now, before), self._times(now)]
        parts += [one(now) for one in (_groups, _tiers, _misses) if one(now).row_count]
        return Group(*parts)

    def _requests(self, now: Exposition) -> RenderableType:
        rows = table("requests", "now", "", numbers_from=1)
        rows.columns[2].justify = "left"
        waits = {name: count for name, count in now.by("num_requests_waiting_by_reason", "reason").items() if count}
        why = ", ".join(f"{format_count(int(count))} {name.replace('_', ' ')}" for name, count in waits.items())
        rows.add_row("running", _count(now.of("num_requests_running")), "")
        rows.add_row("waiting", _count(now.of("num_requests_waiting")), printable(why))
        usage = now.mean("kv_cache_usage_perc")
        rows.add_row("memory in use", _share(usage), "" if usage is None else _bar(usage))
        for name, of in (("preemptions", "num_preemptions_total"), ("finished", "requests_finished_total")):
            grown = now.since(self._first, of)
            rows.add_row(name, _count(now.of(of)), f"{_count(grown)} since top started" if grown is not None else "")
        return rows

    def _tokens(self, now: Exposition, before: Exposition | None) -> RenderableType:
        rows = table("tokens", "now", "total", "", numbers_from=1)
        rows.columns[3].justify = "left"
        hits = [one.hit_rate(other) for other, one in pairwise(self._seen)]
        latest = now.hit_rate(before) if before is not None else None
        line = "".join(" " if one is None else _BARS[min(int(one * len(_BARS)), len(_BARS) - 1)] for one in hits)
        rows.add_row("hit rate", _share(latest), _share(now.hit_rate()), line[-30:])
        for name, of in (("prompt", "prompt_tokens_total"), ("output", "generation_tokens_total")):
            rate = now.rate(before, of) if before is not None else None
            rows.add_row(f"{name} tokens/s", _NONE if rate is None else f"{rate:,.1f}", _count(now.of(of)), "")
        drafted, accepted = (now.of(f"spec_decode_num_{one}_tokens_total") for one in ("draft", "accepted"))
        if drafted:
            rows.add_row("drafts accepted", "", _share((accepted or 0) / drafted), "")
        return rows

    def _times(self, now: Exposition) -> RenderableType:
        """Return quantiles of requests that finished since the first sample, or of all if there are none."""
        rows = table("seconds", "p50", "p90", "p99")
        for name, said in _TIMES.items():
            since = self._first if now.since(self._first, f"{name}_count") else None
            quantiles = [now.quantile(name, share, since) for share in (0.5, 0.9, 0.99)]
            rows.add_row(said, *(_NONE if one is None else f"{one:.4g}" for one in quantiles))
        return rows


def _groups(now: Exposition) -> Table:
    """Return a table of each group's blocks, and the bytes of cached blocks."""
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


def _tiers(now: Exposition) -> Table:
    """Return a table with a row for each tier behind the cache, empty without tiers."""
    rows = table("tier", "in use", "of", "hit tokens", "loaded", "stored", "moving", "dropped", "lost", numbers_from=1)

    def of(tier: str, *names: str) -> float:
        return sum(now.of(f"kv_offload_tiering_{name}", tier=tier) or 0 for name in names)

    for tier in now.by("kv_offload_tiering_read_bytes_total", "tier"):
        capacity, usage = (now.of(f"kv_offload_tiering_{name}", tier=tier) for name in ("capacity_bytes", "usage_perc"))
        loaded, stored = (format_bytes(int(of(tier, f"{name}_bytes_total"))) for name in ("read", "write"))
        moving = of(tier, "active_promotion_jobs", "active_cascade_jobs", "waiting_cascade_jobs")
        lost = of(tier, "promotion_job_failures_total", "cascade_job_failures_total")
        rows.add_row(
            printable(tier),
            _share(usage),
            _NONE if capacity is None else format_bytes(int(capacity)),
            _count(now.of("kv_offload_tiering_hit_tokens_total", tier=tier)),
            loaded,
            stored,
            _count(moving),
            _count(of(tier, "promotion_allocation_failures_total", "backpressure_stores_dropped_total")),
            _count(lost),
        )
    return rows


def _misses(now: Exposition) -> Table:
    """Return a table of missed prompt tokens by reason, empty unless the server explains misses."""
    rows = table("prompt tokens missed", "tokens", "share of missed")
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


# -- the text of /metrics, of hybridkv or vLLM, with any prefix of the names

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples of one server's metrics.

    Attributes:
        samples: labels and values by the metric's name, without its prefix.
        at_s: time of the samples, in seconds of any clock.
    """

    samples: Mapping[str, tuple[tuple[Labels, float], ...]]
    at_s: float

    @classmethod
    def parse(cls, text: str, at_s: float) -> Exposition:
        """Read the Prometheus text format.

        Raises:
            ConfigError: for another format, and for metrics that no server of models has.
        """
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415  # only servers need it

        found: list[tuple[str, Labels, float]] = []
        try:
            for family in text_string_to_metric_families(text):
                found += [(one.name, one.labels, one.value) for one in family.samples]
        except (ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"not metrics in the Prometheus format: {error}: check the address") from error
        prefix = next((name.removesuffix(RUNNING_SUFFIX) for name, *_ in found if name.endswith(RUNNING_SUFFIX)), None)
        if prefix is None:
            raise ConfigError(f"no metric is named *{RUNNING_SUFFIX}: name a server of hybridkv or vLLM")
        samples: dict[str, tuple[tuple[Labels, float], ...]] = {}
        for name, labels, value in found:
            if name.startswith(f"{prefix}:"):
                short = name.removeprefix(f"{prefix}:")
                samples[short] = (*samples.get(short, ()), (labels, value))
        return cls(samples, at_s)

    @property
    def models(self) -> str:
        """Names of the served models, separated by commas."""
        names = {labels.get("model_name", "") for labels, _ in self.samples["num_requests_running"]}
        return ", ".join(sorted(names))

    def of(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples of that name with ``labels``, None if there are no such samples."""
        found = [value for has, value in self.samples.get(name, ()) if labels.items() <= has.items()]
        return sum(found) if found else None

    def mean(self, name: str) -> float | None:
        """Return the mean of the samples of that name, one of each replica; None if there are none."""
        found = [value for _, value in self.samples.get(name, ())]
        return sum(found) / len(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sum of the samples of that name for each value of ``label``."""
        sums: dict[str, float] = {}
        for has, value in self.samples.get(name, ()):
            sums[has.get(label, "")] = sums.get(has.get(label, ""), 0.0) + value
        return sums

    def since(self, before: Exposition | None, name: str) -> float | None:
        """Return the growth of a counter since ``before``; all of it if the counter was reset or ``before`` is None."""
        now = self.of(name)
        return None if now is None else _grown(now, None if before is None else before.of(name))

    def rate(self, before: Exposition, name: str) -> float | None:
        """Return the growth of a counter per second."""
        grown, seconds = self.since(before, name), self.at_s - before.at_s
        return None if grown is None or seconds <= 0 else grown / seconds

    def hit_rate(self, before: Exposition | None = None) -> float | None:
        """Return hit tokens as a share of prompt tokens since ``before``, 0 to 1; ``None`` without prompt tokens."""
        prompt, hit = self.since(before, "prefix_cache_queries_total"), self.since(before, "prefix_cache_hits_total")
        return None if not prompt or hit is None else hit / prompt

    def quantile(self, name: str, share: float, before: Exposition | None = None) -> float | None:
        """Return a quantile of a histogram, interpolated within its bucket as Prometheus does; None without samples.

        Args:
            name: name of the histogram.
            share: the quantile, 0 to 1. Above the last finite boundary, that boundary is returned.
            before: an earlier sample; only growth since then counts.
        """
        now, then = self.by(f"{name}_bucket", "le"), {} if before is None else before.by(f"{name}_bucket", "le")
        counts = sorted((float(upper), _grown(value, then.get(upper))) for upper, value in now.items())
        if not counts or not counts[-1][1]:
            return None
        wanted, lower, last = share * counts[-1][1], 0.0, 0.0
        for upper, count in counts:
            if count >= wanted and count > last:
                return lower if math.isinf(upper) else lower + (upper - lower) * (wanted - last) / (count - last)
            lower, last = upper, count
        return lower


def _grown(now: float, before: float | None) -> float:
    """Return the growth of a counter since ``before``; all of it if it was reset since."""
    return now if before is None or now < before else now - before


def metrics_url(url: str) -> str:
    """Return the address of the metrics of the server at ``url``. Raises ConfigError for an invalid address."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        there = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        there = False
    if not there or not whole.isprintable() or " " in whole:
        raise ConfigError(f"{url!r} is not the address of a server: give http://HOST:PORT")
    return f"{whole.rstrip('/').removesuffix('/metrics')}/metrics"


def read_metrics(url: str, api_key: str | None) -> str:
    """Return the text at ``url``.

    Args:
        url: address of the metrics.
        api_key: key to send. It goes to that server only: a redirect to another server is an error.

    Raises:
        ConfigError: if the server does not answer, or answers with an error.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = Request(url, headers=headers)  # noqa: S310 - http alone
        with build_opener(_KeyStays).open(request, timeout=_WAIT_S) as answer:
            read: bytes = answer.read(MOST_BYTES)
            return read.decode()
    except HTTPError as error:
        remedy = "set HYBRIDKV_API_KEY to a key without a salt" if error.code in {401, 403} else "check the address"
        error.close()  # the error holds the answer, whose socket would stay open while the error is kept
        raise ConfigError(f"{url} answers {error.code} {error.reason}: {remedy}") from error
    except ConfigError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(
            f"cannot read {url}: {getattr(error, 'reason', error)}: check that a server listens there"
        ) from error


class _KeyStays(HTTPRedirectHandler):
    """Follow redirects, but send no key to another server; urllib would pass it on."""

    def redirect_request(  # noqa: PLR0917 - urllib's
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """Follow a redirect as HTTPRedirectHandler. Raises ConfigError if a key would go to another server."""
        with ExitStack() as failing:
            failing.callback(fp.close)  # urllib closes the answer only if no error is raised here
            if req.has_header("Authorization") and _server_of(newurl) != _server_of(req.full_url):
                parts = urlsplit(newurl)
                other = shown(f"{parts.scheme}://{parts.netloc}")
                raise ConfigError(
                    f"{req.full_url} redirects to {other}, which must not get the key: give the address of that server"
                )
            failing.pop_all()
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _server_of(url: str) -> tuple[str, str | None, int]:
    """Return scheme, host and port. Raises ValueError for an invalid port."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
