"""`hybridkv trace`: describe a trace, convert it to the token-exact format, record KV events as a trace."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from hybridkv.cli.options import output_option
from hybridkv.cli.output import UNKNOWN, bar, console, print_facts, say, share, sparkline, table
from hybridkv.cli.running import SourceOptions, TraceArgument, unknown_facts
from hybridkv.errors import ConfigError
from hybridkv.simulator import TraceDescription, TraceFile, convert, describe
from hybridkv.simulator.described import BLOCK_SIZES, LengthBin
from hybridkv.units import format_count, shown

json_option: Final = partial(output_option, "Print the result as JSON.", "--json", default=False)
_MOST_DIGITS: Final = 9
_SECONDS_PER_LINE: Final = 10.0


def describe_command(
    *,
    trace: TraceArgument,
    options: SourceOptions,
    block_sizes: str = output_option(
        "Block sizes, in tokens, for which the hit rate of an unlimited cache is reported.",
        default=",".join(map(str, BLOCK_SIZES)),
    ),
    as_json: bool = json_option(),
) -> None:
    """Report lengths, rates and shared prefixes of a trace, and the hit rate of an unlimited cache."""
    source = options.read(trace)
    description = describe(source, _sizes(block_sizes))
    if as_json:
        print(description.to_json(), end="")
        return
    print_facts(unknown_facts(source, tokens_known=description.shared_tokens is not None))
    _show(description, source.format_name if isinstance(source, TraceFile) else "generated")


def convert_command(
    *,
    trace: TraceArgument,
    out: Annotated[Path, typer.Argument(help="File to write; compressed with gzip if it ends in .gz.", metavar="OUT")],
    options: SourceOptions,
    as_json: bool = json_option(),
) -> None:
    """Write a trace in the token-exact format: times, lengths and equal tokens, but no text."""
    source = options.read(trace)
    summary = source.summary()
    if isinstance(source, TraceFile) and out.exists() and out.samefile(source.path):
        raise ConfigError(f"OUT {out} is the trace itself: name another file")
    requests = convert(source, out)
    if as_json:
        print(json.dumps({"out": str(out), "requests": requests, "bad_lines": summary.bad_lines}, indent=2))
        return
    print_facts(unknown_facts(source, tokens_known=summary.tokens_known))
    skipped = f", {format_count(summary.bad_lines)} bad lines skipped" if summary.bad_lines else ""
    say(f"{format_count(requests)} requests written to {out}{skipped}")


def record_command(
    *,
    endpoint: Annotated[
        str, typer.Argument(help="Endpoint that publishes the events, such as tcp://HOST:PORT.", metavar="ENDPOINT")
    ],
    out: Annotated[Path, typer.Argument(help="File to write, one line for each batch of events.", metavar="OUT")],
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Endpoint of the publisher that resends earlier events; they are recorded first.",
            show_default="no earlier events",
        ),
    ] = None,
    requests: Annotated[
        bool, typer.Option("--requests", help="Record the requests of `hybridkv serve --requests ENDPOINT` instead.")
    ] = False,
    topic: Annotated[str, typer.Option(help="Topic of the messages to record.", show_default="any")] = "",
    seconds: Annotated[
        float | None,
        typer.Option(help="Duration of the recording, in seconds.", min=0, show_default="until interrupted"),
    ] = None,
) -> None:
    """Record the KV events of a running engine, or its requests, as a trace: times and which tokens are equal."""
    if requests:
        if replay is not None or topic:
            raise ConfigError("--replay and --topic are of KV events: leave them out with --requests")
        _record_requests(endpoint, out, seconds)
        return
    from hybridkv.kv_events import Recorded, record  # noqa: PLC0415  # pyzmq is an extra

    next_s, last = time.monotonic(), Recorded()

    def show(recorded: Recorded) -> None:
        nonlocal next_s, last
        last = recorded
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _SECONDS_PER_LINE
            print(f"trace: {_recorded(recorded.batches, recorded.blocks)}", file=sys.stderr)

    try:
        record(endpoint, out, replay_endpoint=replay, topic=topic, seconds=seconds, on_batch=show)
    finally:
        if last.batches:  # also after an interrupt, which ends most recordings
            lost = f", {format_count(last.lost)} batches lost" if last.lost else ""
            say(f"{_recorded(last.batches, last.blocks)}{lost}, written to {out}")
    if not last.batches:
        say(f"no events arrived: {out} is empty")


def _record_requests(endpoint: str, out: Path, seconds: float | None) -> None:
    from hybridkv.kv_events import ended_requests  # noqa: PLC0415  # pyzmq is an extra
    from hybridkv.simulator.live import LiveRequests  # noqa: PLC0415  # same

    lost = list[int]()
    if out.exists():
        raise FileExistsError(errno.EEXIST, "the file exists", str(out))
    written = convert(LiveRequests(ended_requests(endpoint, seconds, lost.append)), out)
    more = f", {format_count(sum(lost))} lost" if lost else ""
    say(f"{format_count(written)} requests{more}, written to {out}")


def _recorded(batches: int, blocks: int) -> str:
    return f"{format_count(batches)} batches, {format_count(blocks)} blocks"


def _sizes(given: str) -> list[int]:
    sizes = [one.strip() for one in given.split(",")]
    if not all(one.isascii() and one.isdigit() and len(one) <= _MOST_DIGITS for one in sizes):
        raise ConfigError(
            f"--block-sizes {shown(given)} must be numbers of tokens with at most {_MOST_DIGITS} digits, such as 16,64"
        )
    return list(map(int, sizes))


def _show(found: TraceDescription, format_name: str) -> None:
    """Print facts, then tables of lengths, of their histogram, and of hit rates."""
    bad = f", {format_count(found.bad_lines)} bad lines skipped" if found.bad_lines else ""
    print_facts(
        {
            found.source: f"{format_name}, {format_count(found.requests)} requests{bad}",
            "time": f"{found.seconds:,.1f} s, {found.requests_per_s:,.2f} requests/s, at most "
            f"{found.busiest_per_s:,.2f}",
            "arrivals": sparkline(found.arrivals),
        }
    )
    if found.tenants:
        print_facts({"tenants": format_count(found.tenants)})
    lengths = table("tokens", "total", "mean", "p50", "p90", "p99")
    for name, total, one in (
        ("prompts", found.prompt_tokens, found.prompt_lengths),
        ("outputs", found.output_tokens, found.output_lengths),
        ("shared prefixes", found.shared_tokens, found.shared_lengths),
    ):
        if total is None or one is None:
            lengths.add_row(name, UNKNOWN)
        else:
            lengths.add_row(
                name, format_count(total), *(f"{figure:,.0f}" for figure in (one.mean, one.p50, one.p90, one.p99))
            )
    console().print(lengths)
    _show_bins({"prompts": found.prompts, "outputs": found.outputs, "shared": found.shared}, found.requests)
    if not found.hits:
        return
    hits = table("block, tokens", "hit tokens", "hit rate, unlimited cache", "")
    hits.columns[3].justify = "left"
    for hit in found.hits:
        counts = format_count(hit.block_size), format_count(hit.hit_tokens)
        hits.add_row(*counts, share(hit.hit_rate), bar(hit.hit_rate))
    console().print(hits)


def _show_bins(parts: Mapping[str, Sequence[LengthBin]], requests: int) -> None:
    """Print a histogram of the lengths, a column for each of ``parts``."""
    rows = table("length, tokens", *parts)
    for at in range(1, len(parts) + 1):
        rows.columns[at].justify = "left"
    found = {(one.least, one.most): None for bins in parts.values() for one in bins}
    counts = {name: {(one.least, one.most): one.requests for one in bins} for name, bins in parts.items()}
    for least, most in sorted(found):
        cells = []
        for of in counts.values():
            part = of.get((least, most), 0) / requests
            cells.append(f"{part:5.1%} {bar(part, 8)}" if part else "")
        rows.add_row(f"{format_count(least)} .. {format_count(most)}" if most > least else str(least), *cells)
    console().print(rows)
