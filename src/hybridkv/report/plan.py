"""The page of a plan: what one request takes, how many fit, and how the memory is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.planner import Plan
from hybridkv.planner.capacity import blocks_needed, copies_that_fit
from hybridkv.report.charts import FREE, PADDING, Kind, kinds_of, line, lying
from hybridkv.report.page import Chart, page
from hybridkv.units import format_bytes, format_count

_SHORTEST: Final = 256
_LENGTHS: Final = 24


def plan_page(plan: Plan) -> str:
    """The file. ConfigError where plotly is not installed."""
    title = f"{plan.model.name} in {format_bytes(plan.memory_bytes)}"
    return page(title, _facts(plan), list(_charts(plan)))


def _facts(plan: Plan) -> dict[str, str]:
    holds, config = plan.capacity, plan.config
    return {
        "layout": plan.layout,
        f"{config.unit}s": f"{format_count(config.num_blocks)} of {format_bytes(config.unit_bytes)}",
        "longest request": f"{format_count(holds.longest_context)} tokens",
        "requests of that length": f"{holds.concurrency:.2f}",
        "tensor parallel ranks": str(plan.model.tp),
        "cache": plan.model.dtype,
    }


def _charts(plan: Plan) -> Iterator[Chart]:
    kinds = kinds_of(plan)
    longest = plan.capacity.longest_context
    lengths = np.unique(np.geomspace(min(_SHORTEST, longest), longest, _LENGTHS).astype(np.int64))
    blocks = np.array([_blocks(plan, tokens) for tokens in lengths.tolist()])
    yield _map(plan, kinds, blocks[-1])
    yield _request(plan, kinds, lengths, blocks)
    yield _fitting(plan, lengths, blocks)


def _blocks(plan: Plan, tokens: int) -> tuple[int, ...]:
    """Of a request of so many tokens, by group."""
    return blocks_needed(plan.config.groups, replace(plan.limits, max_model_len=tokens))


def _map(plan: Plan, kinds: list[Kind], blocks: NDArray[np.int64]) -> Chart:
    """To scale: weights, and the cache full of requests of the longest context."""
    config = plan.config
    copies, _ = copies_that_fit(config, plan.limits, tuple(blocks.tolist()))
    parts = [(one.name, float(copies * blocks @ one.content_bytes), one.colour) for one in kinds]
    padding = sum(float(copies * blocks @ (one.block_bytes - one.content_bytes)) for one in kinds)
    left = plan.memory_bytes - padding - sum(size for _, size, _ in parts)
    parts += [("padding", padding, PADDING), ("too little for one more", left, FREE)]
    traces = [lying(name, ["cache"], [size / 2**30], colour) for name, size, colour in parts if size]
    weights = plan.model.weight_bytes / plan.model.tp
    if weights:
        traces.append(lying("weights", ["weights"], [weights / 2**30], 3))
    many = (
        f"{format_count(copies)} request{'s' if copies != 1 else ''} of {format_count(plan.capacity.longest_context)}"
    )
    said = f"The memory of one rank to scale, with {many} tokens in it" + (
        ", and what the weights take besides." if weights else "."
    )
    layout = {"barmode": "stack", "hovermode": "closest", "xaxis": {"title": "GiB"}}
    return Chart("Memory map", said, traces, layout, 280)


def _request(plan: Plan, kinds: list[Kind], lengths: NDArray[np.int64], blocks: NDArray[np.int64]) -> Chart:
    whole = np.array([plan.config.units_for(row) * plan.config.unit_bytes for row in blocks.tolist()])
    traces = [line(one.name, lengths, blocks @ one.block_bytes / 2**20, one.colour) for one in kinds]
    traces.append(line(f"all, in whole {plan.config.unit}s", lengths, whole / 2**20, PADDING, line={"dash": "dot"}))
    said = "What one request takes by its tokens: attention grows with them, windows up to a point, states not at all."
    log = {"type": "log", "rangemode": "normal"}
    axes = {"xaxis": {"title": "tokens", "type": "log"}, "yaxis": {"title": "MiB", **log}}
    return Chart("One request", said, traces, axes)


def _fitting(plan: Plan, lengths: NDArray[np.int64], blocks: NDArray[np.int64]) -> Chart:
    fit = [copies_that_fit(plan.config, plan.limits, tuple(row))[1] for row in blocks.tolist()]
    said = "How many requests of so many tokens fit at once, sharing nothing."
    axes = {
        "xaxis": {"title": "tokens", "type": "log"},
        "yaxis": {"title": "requests", "type": "log", "rangemode": "normal"},
    }
    return Chart("Requests that fit", said, [line("requests", lengths, fit, 0, mode="lines+markers")], axes)
