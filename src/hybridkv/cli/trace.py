"""`hybridkv trace`: what a trace holds, any format as the token-exact one, and KV events as a trace."""

from __future__ import annotations

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
from hybridkv.cli.running import SourceOptions, TraceArgument, untold
from hybridkv.errors import ConfigError
from hybridkv.simulator import TraceDescription, TraceFile, convert, describe
from hybridkv.simulator.described import BLOCK_SIZES, LengthBin
from hybridkv.units import format_count, shown

json_option: Final = partial(output_option, "Print it as JSON.", "--json", default=False)
_MOST_DIGITS: Final = 9
_SECONDS_PER_LINE: Final = 10.0


def describe_command(
    *,
    trace: TraceArgument,
    options: SourceOptions,
    block_sizes: str = output_option(
        "Of the endless cache whose hits are told, in tokens.", default=",".join(map(str, BLOCK_SIZES))
    ),
    as_json: bool = json_option(),
) -> None:
    """Lengths, rates, what prompts share, and what a cache that forgets nothing would hit."""
    source = options.read(trace)
    told = describe(source, _sizes(block_sizes))
    if as_json:
        print(told.to_json(), end="")
        return
    print_facts(untold(source, tokens_known=told.shared_tokens is not None))
    _show(told, source.format_name if isinstance(source, TraceFile) else "generated")


def convert_command(
    *,
    trace: TraceArgument,
    out: Annotated[Path, typer.Argument(help="The file to write; gzip where it ends in .gz.", metavar="OUT")],
    options: SourceOptions,
    as_json: bool = json_option(),
) -> None:
    """Write a trace in the token-exact form: lengths, times and what is equal, and no text."""
    source = options.read(trace)
    summary = source.summary()
    if isinstance(source, TraceFile) and out.exists() and out.samefile(source.path):
        raise ConfigError(f"{out} is the trace itself: name another file to write")
    requests = convert(source, out)
    if as_json:
        print(json.dumps({"out": str(out), "requests": requests, "bad_lines": summary.bad_lines}, indent=2))
        return
    print_facts(untold(source, tokens_known=summary.tokens_known))
    left = f", {format_count(summary.bad_lines)} bad lines left out" if summary.bad_lines else ""
    say(f"{format_count(requests)} requests written to {out}{left}")


def record_command(
    *,
    endpoint: Annotated[str, typer.Argument(help="Where events are published: tcp://HOST:PORT.", metavar="ENDPOINT")],
    out: Annotated[Path, typer.Argument(help="The file to write, a line a batch.", metavar="OUT")],
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="The publisher's replay endpoint: asked for what it published before.",
            show_default="begin now",
        ),
    ] = None,
    topic: Annotated[str, typer.Option(help="Of messages.", show_default="any")] = "",
    seconds: Annotated[float | None, typer.Option(help="How long.", min=0, show_default="until interrupted")] = None,
) -> None:
    """Record the KV events of a running engine, ours or vLLM's: names of blocks and times, no token ids."""
    from hybridkv.kv_events import Recorded, record  # noqa: PLC0415  # pyzmq is an extra

    next_s, last = time.monotonic(), Recorded()

    def show(told: Recorded) -> None:
        nonlocal next_s, last
        last = told
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _SECONDS_PER_LINE
            print(f"trace: {_recorded(told.batches, told.blocks)}", file=sys.stderr)

    try:
        record(endpoint, out, replay_endpoint=replay, topic=topic, seconds=seconds, on_batch=show)
    finally:
        if last.batches:  # interrupted, too, as most recordings end
            lost = f", {format_count(last.lost)} batches lost" if last.lost else ""
            say(f"{_recorded(last.batches, last.blocks)}{lost}, written to {out}")
    if not last.batches:
        say(f"nothing was heard, {out} is empty")


def _recorded(batches: int, blocks: int) -> str:
    return f"{format_count(batches)} batches, {format_count(blocks)} blocks"


def _sizes(given: str) -> list[int]:
    sizes = [one.strip() for one in given.split(",")]
    if not all(one.isascii() and one.isdigit() and len(one) <= _MOST_DIGITS for one in sizes):
        raise ConfigError(f"--block-sizes {shown(given)}: say numbers of tokens, such as 16,64")
    return list(map(int, sizes))


def _show(told: TraceDescription, format_name: str) -> None:
    bad = f", {format_count(told.bad_lines)} bad lines left out" if told.bad_lines else ""
    print_facts(
        {
            told.source: f"{format_name}, {format_count(told.requests)} requests{bad}",
            "time": f"{told.seconds:,.1f} s, {told.requests_per_s:,.2f} requests a second, at most "
            f"{told.busiest_per_s:,.2f}",
            "arrivals": sparkline(told.arrivals),
        }
    )
    if told.tenants:
        print_facts({"tenants": format_count(told.tenants)})
    lengths = table("tokens", "in all", "mean", "p50", "p90", "p99")
    for name, total, one in (
        ("prompts", told.prompt_tokens, told.prompt_lengths),
        ("outputs", told.output_tokens, told.output_lengths),
        ("shared with one before", told.shared_tokens, told.shared_lengths),
    ):
        if total is None or one is None:
            lengths.add_row(name, UNKNOWN)
        else:
            lengths.add_row(
                name, format_count(total), *(f"{figure:,.0f}" for figure in (one.mean, one.p50, one.p90, one.p99))
            )
    console().print(lengths)
    _show_bins({"prompts": told.prompts, "outputs": told.outputs, "shared": told.shared}, told.requests)
    if not told.hits:
        return
    hits = table("block, tokens", "hit tokens", "hit rate of an endless cache", "")
    hits.columns[3].justify = "left"
    for found in told.hits:
        counts = format_count(found.block_size), format_count(found.hit_tokens)
        hits.add_row(*counts, share(found.hit_rate), bar(found.hit_rate))
    console().print(hits)


def _show_bins(parts: Mapping[str, Sequence[LengthBin]], requests: int) -> None:
    """Shares of requests by length, side by side."""
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
