"""Pages of a plan and of a replay.

The page of a plan shows the memory map, the memory of one request, and the number of requests that fit. The page of a
replay shows the hit rate, the content of the cache, waiting requests, latencies, and waste.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import EDGES_S, MissReason
from hybridkv.planner import Plan
from hybridkv.planner.config import blocks_needed, copies_that_fit
from hybridkv.report.page import (
    ALERT,
    FREE,
    LOG,
    PADDING,
    UNKNOWN_HITS,
    Chart,
    Kind,
    bars,
    kinds_of,
    layers,
    line,
    lying,
    page,
    steps,
)
from hybridkv.simulator import ReplayReport
from hybridkv.simulator.report import Recorded
from hybridkv.tiers import HostTierStatistics
from hybridkv.units import format_bytes, format_count

_SHORTEST: Final = 256
"""Tokens of the shortest request in charts over the length."""
_LENGTHS: Final = 24
"""Points of a line over the length."""


def plan_page(plan: Plan) -> str:
    """Return the HTML page of a plan.

    Args:
        plan: the plan to draw.

    Raises:
        ConfigError: if plotly is not installed.
    """
    title = f"{plan.model.name} in {format_bytes(plan.memory_bytes)}"
    return page(title, _plan_facts(plan), list(_plan_charts(plan)))


def _plan_facts(plan: Plan) -> dict[str, str]:
    holds, config = plan.capacity, plan.config
    return {
        "layout": plan.layout,
        f"{config.unit}s": f"{format_count(config.num_blocks)} of {format_bytes(config.unit_bytes)}",
        "longest request": f"{format_count(holds.longest_context)} tokens",
        "requests of that length": f"{holds.concurrency:.2f}",
        "tensor parallel ranks": str(plan.model.tp),
        "cache": plan.model.dtype,
    }


def _plan_charts(plan: Plan) -> Iterator[Chart]:
    kinds = kinds_of(plan)
    longest = plan.capacity.longest_context
    lengths = np.unique(np.geomspace(min(_SHORTEST, longest), longest, _LENGTHS).astype(np.int64))
    blocks = np.array([_blocks(plan, tokens) for tokens in lengths.tolist()])
    yield _map(plan, kinds, blocks[-1])
    yield _request(plan, kinds, lengths, blocks)
    yield _fitting(plan, lengths, blocks)


def _blocks(plan: Plan, tokens: int) -> tuple[int, ...]:
    """Return the blocks of a request of ``tokens`` tokens, by group."""
    return blocks_needed(plan.config.groups, replace(plan.limits, max_model_len=tokens))


def _map(plan: Plan, kinds: list[Kind], blocks: NDArray[np.int64]) -> Chart:
    """Return a chart to scale: the weights, and a cache full of longest requests, each of ``blocks``, int64[groups]."""
    config = plan.config
    copies, _ = copies_that_fit(config, plan.limits, tuple(blocks.tolist()))
    parts = [(one.name, float(copies * blocks @ one.content_bytes), one.colour) for one in kinds]
    padding = sum(float(copies * blocks @ (one.block_bytes - one.content_bytes)) for one in kinds)
    left = plan.memory_bytes - padding - sum(size for _, size, _ in parts)
    parts += [("padding", padding, PADDING), ("free, less than one more request", left, FREE)]
    traces = [lying(name, ["cache"], [size / 2**30], colour) for name, size, colour in parts if size]
    weights = plan.model.weight_bytes / plan.model.tp
    if weights:
        traces.append(lying("weights", ["weights"], [weights / 2**30], 3))
    many = f"{format_count(copies)} request{'s' if copies != 1 else ''}"
    length = f"{format_count(plan.capacity.longest_context)} tokens"
    besides = ", and the weights" if weights else ""
    said = f"The memory of one rank, drawn to scale: the cache with {many} of {length}{besides}."
    layout = {"barmode": "stack", "hovermode": "closest", "xaxis": {"title": "GiB"}}
    return Chart("Memory map", said, traces, layout, 280)


def _request(plan: Plan, kinds: list[Kind], lengths: NDArray[np.int64], blocks: NDArray[np.int64]) -> Chart:
    whole = np.array([plan.config.units_for(row) * plan.config.unit_bytes for row in blocks.tolist()])
    traces = [line(one.name, lengths, blocks @ one.block_bytes / 2**20, one.colour) for one in kinds]
    traces.append(line(f"all, in whole {plan.config.unit}s", lengths, whole / 2**20, PADDING, line={"dash": "dot"}))
    said = (
        "Cache memory of one request by its length. Attention grows with each token, a window stops growing when it is "
        "full, and a state keeps its size."
    )
    axes = {"xaxis": {"title": "tokens", "type": "log"}, "yaxis": {"title": "MiB", **LOG}}
    return Chart("One request", said, traces, axes)


def _fitting(plan: Plan, lengths: NDArray[np.int64], blocks: NDArray[np.int64]) -> Chart:
    fit = [copies_that_fit(plan.config, plan.limits, tuple(row))[1] for row in blocks.tolist()]
    said = "Requests of a length that fit in the cache at once, if they share no prefix."
    axes = {"xaxis": {"title": "tokens", "type": "log"}, "yaxis": {"title": "requests", **LOG}}
    return Chart("Requests that fit", said, [line("requests", lengths, fit, 0, mode="lines+markers")], axes)


_BINS: Final = 80
_SLOWEST: Final = 40
_TIME: Final = {"title": "seconds of the trace"}
Float64 = NDArray[np.float64]


def replay_page(plan: Plan, report: ReplayReport, recorded: Recorded) -> str:
    """Return the HTML page of a replay.

    Args:
        plan: the plan that was replayed.
        report: the report of the replay.
        recorded: the recording of the same replay.

    Raises:
        ConfigError: if plotly is not installed.
    """
    title = f"{report.source}: {plan.model.name} in {format_bytes(plan.memory_bytes)}"
    return page(title, _facts(plan, report), list(_charts(plan, report, recorded)))


def _facts(plan: Plan, report: ReplayReport) -> dict[str, str]:
    return {
        "machine": report.machine,
        "layout": f"{plan.layout}, {format_count(plan.config.num_blocks)} {plan.config.unit}s",
        "requests": format_count(report.requests),
        "prompt tokens": format_count(report.prompt_tokens),
        "hit rate": UNKNOWN_HITS if report.hit_rate is None else f"{report.hit_rate:.1%}",
        **_of_host(report),
        "preemptions": format_count(report.preemptions),
        "peak memory use": f"{report.peak_usage:.1%}",
        **_times(report),
        "requests per step": f"{report.mean_running:.1f}",
        "simulated time": f"{report.simulated_s:,.0f} s",
    }


def _of_host(report: ReplayReport) -> dict[str, str]:
    """Return the counts of the host tier as facts; empty without one."""
    host = report.host_tier
    if host is None:
        return {}
    return {
        "tokens loaded from host memory": format_count(host.loaded_tokens),
        "stored in host memory": f"{format_bytes(host.stored_bytes)}, {format_count(host.stores)} resume points",
        **of_store(host),
    }


def of_store(counts: HostTierStatistics) -> dict[str, str]:
    """Return the counts of the store behind a host tier as facts; empty without traffic.

    Args:
        counts: the counts of the tier.
    """
    if not any((counts.spills, counts.spills_dropped, counts.spills_lost, counts.fetches, counts.fetches_lost)):
        return {}
    dropped, lost = format_count(counts.spills_dropped), format_count(counts.spills_lost)
    fetched = f"{format_bytes(counts.fetched_bytes)}, {format_count(counts.fetches)} prefixes"
    return {
        "tokens fetched from the store": format_count(counts.fetched_tokens),
        "spilled to the store": f"{format_count(counts.spills)} resume points, {dropped} dropped, {lost} lost",
        "fetched from the store": f"{fetched}, {format_count(counts.fetches_lost)} lost",
    }


def _times(report: ReplayReport) -> dict[str, str]:
    """Return the latencies as facts; empty if steps take no time."""
    if not report.timed:
        return {}
    first, later = report.time_to_first_token_s, report.time_per_output_token_s
    return {
        "time to first token (p50 / p99)": f"{first.p50:,.3f} / {first.p99:,.3f} s",
        "time per output token (p50 / p99)": f"{later.p50 * 1000:,.1f} / {later.p99 * 1000:,.1f} ms",
    }


def _charts(plan: Plan, report: ReplayReport, recorded: Recorded) -> Iterator[Chart]:
    kinds = kinds_of(plan)
    if report.hit_tokens is not None:
        yield _hits(recorded)
    if report.misses:
        yield _misses(recorded)
    yield _filled(plan, kinds, recorded)
    yield _ages(kinds, recorded)
    yield _queue(recorded)
    if report.timed:
        yield from _latencies(recorded)
        yield _slowest(recorded)
    yield _waste(plan, report, kinds)


def _hits(recorded: Recorded) -> Chart:
    at, prompt, hit = _thinned(recorded.samples.time_s, recorded.samples.prompt_tokens, recorded.samples.hit_tokens)
    traces = [
        steps("since the previous point", at[:-1], _share(np.diff(hit), np.diff(prompt)), 5),
        line("total", at[1:], _share(hit[1:], prompt[1:]), 0),
    ]
    said = (
        "Hit tokens as a share of the prompt tokens of all requests that have begun. Hit tokens are not computed again."
    )
    axis = {"tickformat": ".0%", "range": [0, 1]}
    return Chart("Hit rate", said, traces, {"xaxis": _TIME, "yaxis": axis})


def _misses(recorded: Recorded) -> Chart:
    at, missed = _thinned(recorded.samples.time_s, recorded.samples.missed)
    parts = [
        (reason.value.replace("_", " "), missed[:, number], number)
        for number, reason in enumerate(MissReason)
        if missed[-1, number]
    ]
    said = "Prompt tokens that had to be computed, summed up for each reason."
    return Chart(
        "Missed prompt tokens, by reason", said, layers(at, parts), {"xaxis": _TIME, "yaxis": {"title": "tokens"}}
    )


def _filled(plan: Plan, kinds: list[Kind], recorded: Recorded) -> Chart:
    at, held, evictable = _thinned(recorded.samples.time_s, recorded.samples.held, recorded.samples.evictable)
    used = [(f"{one.name}, held", held @ one.block_bytes / 2**30, one.colour) for one in kinds]
    cached = [(f"{one.name}, cached", evictable @ one.block_bytes / 2**30, one.colour) for one in kinds]
    taken = sum((values for _, values, _ in (*used, *cached)), np.zeros(len(at)))
    left = np.maximum(plan.config.arena_bytes / 2**30 - taken, 0)
    traces = [
        *layers(at, used),
        *layers(at, cached, fillpattern={"shape": "/", "size": 5}),
        *layers(at, [("free, or unusable parts of slabs", left, FREE)]),
    ]
    said = "Memory of the cache: blocks that requests hold, cached blocks that no request holds, and free memory."
    return Chart("Memory over time", said, traces, {"xaxis": _TIME, "yaxis": {"title": "GiB"}}, 380)


def _ages(kinds: list[Kind], recorded: Recorded) -> Chart:
    counts = np.array(recorded.idle).T
    used = np.flatnonzero(counts.any(axis=1))
    names = [f"{EDGES_S[at]:g} s" if at < len(EDGES_S) else "longer" for at in used.tolist()]
    traces = [bars(one.name, names, counts[used] @ one.block_bytes / 2**30, one.colour) for one in kinds]
    said = "Cached blocks at the end of the replay, by the time since their last hit, or since they were written."
    layout = {"barmode": "stack", "xaxis": {"title": "up to", "type": "category"}, "yaxis": {"title": "GiB"}}
    return Chart("Age of cached blocks", said, traces, layout)


def _queue(recorded: Recorded) -> Chart:
    samples = recorded.samples
    traces = [
        steps("running", samples.time_s, samples.running, 0),
        steps("waiting", samples.time_s, samples.waiting, ALERT),
    ]
    said = "If many requests wait for long, memory is short, or a step takes too few requests or tokens."
    return Chart("Requests", said, traces, {"xaxis": _TIME})


def _latencies(recorded: Recorded) -> Iterator[Chart]:
    times = recorded.requests
    yield Chart(
        "Time to first token",
        "Quantiles over the requests that arrived at about the same time.",
        _quantiles(times.arrival_s, times.first_token_s - times.arrival_s),
        {"xaxis": _TIME, "yaxis": {"title": "seconds", **LOG}},
    )
    later = times.output_tokens > 1
    if later.any():
        each = (times.end_s - times.first_token_s)[later] / (times.output_tokens[later] - 1)
        yield Chart(
            "Time per output token",
            "Mean time of the tokens after the first: quantiles over the requests that arrived at about the same time.",
            _quantiles(times.arrival_s[later], each * 1000),
            {"xaxis": _TIME, "yaxis": {"title": "milliseconds"}},
        )


def _quantiles(at: Float64, values: Float64) -> list[Any]:
    """Return lines of p50, p90 and p99 over bins of time that have requests."""
    edges = np.linspace(at.min(), at.max(), min(_BINS, max(len(at) // 20, 1)) + 1)
    places = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(edges) - 2)
    bins = [place for place in range(len(edges) - 1) if (places == place).any()]
    middles = [(edges[place] + edges[place + 1]) / 2 for place in bins]
    quantiles = (("p50", 0.5, 0), ("p90", 0.9, 1), ("p99", 0.99, ALERT))
    return [
        line(
            name, middles, [np.quantile(values[places == place], share) for place in bins], colour, mode="lines+markers"
        )
        for name, share, colour in quantiles
    ]


def _slowest(recorded: Recorded) -> Chart:
    times = recorded.requests
    longest = np.argsort(times.end_s - times.arrival_s)[-_SLOWEST:]
    names = [
        f"at {times.arrival_s[i]:,.1f} s: {times.prompt_tokens[i]:,.0f} + {times.output_tokens[i]:,.0f}"
        for i in longest
    ]
    parts = (
        ("waiting", (times.begun_s - times.arrival_s)[longest], ALERT),
        ("prefill, to the first token", (times.first_token_s - times.begun_s)[longest], 1),
        ("decode", (times.end_s - times.first_token_s)[longest], 0),
    )
    said = f"The {len(names)} requests that took longest, named by their arrival time and tokens of prompt + output."
    layout = {
        "barmode": "stack",
        "hovermode": "closest",
        "xaxis": {"title": "seconds since the request arrived"},
        "yaxis": {"showticklabels": False, "title": "requests"},
    }
    traces = [lying(name, names, seconds, colour) for name, seconds, colour in parts]
    return Chart("Slowest requests", said, traces, layout, 420)


def _waste(plan: Plan, report: ReplayReport, kinds: list[Kind]) -> Chart:
    needed = report.prompt_tokens - (report.hit_tokens or 0) + report.output_tokens - report.requests
    again = max(report.computed_tokens - needed, 0)
    made = sum(one.made for one in report.ends)
    unused = sum(one.unused for one in report.ends)
    rows = [
        ("tokens computed again", again / max(report.computed_tokens, 1), ALERT),
        ("resume points never hit", unused / made if made else 0.0, 1),
        *((f"padding of {one.name}", one.padding, PADDING) for one in kinds),
        ("memory too small for a block", plan.capacity.unused_bytes / plan.memory_bytes, PADDING),
    ]
    rows.reverse()
    traces = [lying(name, [name], [share], colour, showlegend=False) for name, share, colour in rows]
    said = (
        "Tokens computed again after preemptions, of all computed tokens. Resume points evicted before a hit, of all "
        "that were made. Padding in blocks. Memory at the end in which no block fits."
    )
    most = max(0.05, *(share for _, share, _ in rows))
    layout = {"hovermode": "closest", "xaxis": {"tickformat": ".1%", "range": [0, most]}, "barmode": "stack"}
    return Chart("Waste", said, traces, layout, 120 + 34 * len(rows))


def _share(part: NDArray[Any], whole: NDArray[Any]) -> Float64:
    """Return ``part / whole``, NaN where the whole is 0."""
    shares: Float64 = np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return shares


def _thinned(at: Float64, *columns: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return samples at the ends of bins of time, the first and the last included."""
    if len(at) <= 2 * _BINS:
        return (at, *columns)
    places = np.unique(np.searchsorted(at, np.linspace(at[0], at[-1], 2 * _BINS)))
    return (at[places], *(column[places] for column in columns))
