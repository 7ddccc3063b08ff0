"""The page of a sweep: what settings find and how long requests wait, over memory, side by side, and in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, Final

from hybridkv.report.charts import line
from hybridkv.report.page import Chart, Table, page
from hybridkv.simulator import Swept
from hybridkv.simulator.cells import differing, in_short, in_words, machines_of
from hybridkv.units import format_count, parse_bytes

_MOST_LINES: Final = 20
_MOST_ROWS: Final = 60
_MOST_CELLS: Final = 1000
_HEAT: Final = [[0, "#3b4a6b"], [0.5, "#b0578d"], [1, "#f2c14e"]]
"""Colours that are told apart on light and on dark, and without some of them."""
Report = dict[str, Any]


def sweep_page(source: str, done: Sequence[Swept]) -> str:
    """The file. source: its name. done: at least one cell. ConfigError where plotly is not installed."""
    cells = [one.cell for one in done]
    names = differing(cells) or ["model", "memory"]
    lines = _by_other_settings(done, names)
    return page(f"{source}: {format_count(len(done))} settings", _facts(done, names), list(_parts(done, names, lines)))


def _facts(done: Sequence[Swept], names: Sequence[str]) -> dict[str, str]:
    served = [one for one in done if "report" in one.document]
    facts = {"settings": format_count(len(done)), "machines": machines_of([one.cell for one in done])}
    if len(served) < len(done):
        facts["refused"] = format_count(len(done) - len(served))
    if served:
        quick = min(served, key=_first_token)
        facts |= {
            "requests": format_count(_report(quick)["requests"]),
            "prompt tokens": format_count(_report(quick)["prompt_tokens"]),
            **_most_found(served, names),
            f"99% of first tokens within {_first_token(quick):,.3f} s": in_words(quick.cell, names),
        }
    return facts


def _most_found(served: Sequence[Swept], names: Sequence[str]) -> dict[str, str]:
    """The setting that finds most, where hits are known."""
    if not _hits_known(served):
        return {"found in the cache": "unknown: the trace tells lengths alone"}
    best = max(served, key=lambda one: _report(one)["hit_rate"])
    return {f"most found, {_report(best)['hit_rate']:.1%}": in_words(best.cell, names)}


def _parts(done: Sequence[Swept], names: Sequence[str], lines: dict[str, list[Swept]]) -> Iterator[Chart | Table]:
    if any(len(one) > 1 for one in lines.values()):
        yield from _curves(lines)
    served = _served(done)
    if served and _hits_known(served):
        yield _heat(lines)
    yield _table(done, names)


def _by_other_settings(done: Sequence[Swept], names: Sequence[str]) -> dict[str, list[Swept]]:
    """By all that differs but memory, each by memory."""
    found: dict[str, list[Swept]] = {}
    others = [name for name in names if name != "memory"]
    for one in sorted(done, key=lambda one: parse_bytes(one.cell.memory)):
        found.setdefault(in_short(one.cell, others) or one.cell.model, []).append(one)
    return found


def _curves(lines: dict[str, list[Swept]]) -> Iterator[Chart]:
    """The lines that find most, where there are many."""
    shown, many = _best(lines, _MOST_LINES)
    share = {"tickformat": ".0%", "range": [0, 1]}
    log = {"type": "log", "rangemode": "normal"}
    hits: list[tuple[str, str, Callable[[Report], float | None], dict[str, Any]]] = []
    if _hits_known([one for cells in lines.values() for one in _served(cells)]):
        said = "Of all prompt tokens, how many were found."
        hits.append(("Hit rate over memory", said, lambda one: one["hit_rate"], share))
    for title, said, value, axis in (
        *hits,
        (
            "Time to the first token over memory",
            "99% of the requests had their first token within so many seconds.",
            lambda one: one["time_to_first_token_s"]["p99"] or None,
            {"title": "seconds", **log},
        ),
        (
            "Time per output token over memory",
            "99% of the requests had a token more within so many milliseconds, in the mean.",
            lambda one: one["time_per_output_token_s"]["p99"] * 1000,
            {"title": "milliseconds"},
        ),
    ):
        traces = [_curve(name, lines[name], value, colour) for colour, name in enumerate(shown)]
        yield Chart(
            title, said + many, traces, {"xaxis": {"title": "GiB for the cache of one rank"}, "yaxis": axis}, 380
        )


def _best(lines: dict[str, list[Swept]], most: int) -> tuple[list[str], str]:
    """Names of the ``most`` that find most, the best first, and what to say where there are others.

    Where hits are unknown, those whose first tokens come soonest.
    """
    known = _hits_known([one for cells in lines.values() for one in _served(cells)])
    worth = {
        name: max((_report(one)["hit_rate"] if known else -_first_token(one) for one in _served(cells)), default=-inf)
        for name, cells in lines.items()
    }
    best = "that find most" if known else "with the earliest first tokens"
    some = f" The {most} of {format_count(len(lines))} {best}." if len(lines) > most else ""
    return sorted(worth, key=lambda name: -worth[name])[:most], some


def _curve(name: str, cells: Sequence[Swept], value: Callable[[Report], float | None], colour: int) -> dict[str, Any]:
    served = _served(cells)
    sizes = [parse_bytes(one.cell.memory) / 2**30 for one in served]
    values = [float("nan") if (found := value(_report(one))) is None else found for one in served]
    dash = ("solid", "dash", "dot")[colour // 10 % 3]  # as many colours as there are, then other strokes
    return dict(line(name, sizes, values, colour, mode="lines+markers", line={"dash": dash}))


def _heat(lines: dict[str, list[Swept]]) -> Chart:
    """A row for each line, a column for each memory."""
    memories = list(dict.fromkeys(one.cell.memory for cells in lines.values() for one in cells))
    memories.sort(key=parse_bytes)
    rows = []
    best, some = _best(lines, _MOST_ROWS)
    shown = {name: cells for name, cells in lines.items() if name in best}
    for cells in shown.values():
        rates = {one.cell.memory: round(_report(one)["hit_rate"], 6) for one in _served(cells)}
        rows.append([rates.get(memory) for memory in memories])
    trace = {
        "type": "heatmap",
        "x": memories,
        "y": list(shown),
        "z": rows,
        "texttemplate": "%{z:.1%}" if len(memories) <= 8 else "",
        "hovertemplate": "%{y}, %{x}: %{z:.2%}<extra></extra>",
        "colorscale": _HEAT,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    layout = {
        "hovermode": "closest",
        "xaxis": {"type": "category", "title": "memory", "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    said = f"Share of the prompt tokens that were found; a gap is a setting that cannot serve these requests.{some}"
    return Chart("Hit rate of every setting", said, [trace], layout, 110 + 34 * len(shown))


def _table(done: Sequence[Swept], names: Sequence[str]) -> Table:
    rows = []
    for one in done[:_MOST_CELLS]:
        setting = ["-" if (value := getattr(one.cell, name)) is None else str(value) for name in names]
        if "report" not in one.document:
            rows.append([*setting, f"refused: {one.document['refused']}"])
            continue
        told = _report(one)
        first, later = told["time_to_first_token_s"], told["time_per_output_token_s"]
        seconds = told["simulated_s"] or 1.0
        rows.append(
            [
                *setting,
                "unknown" if told["hit_rate"] is None else f"{told['hit_rate']:.2%}",
                f"{first['p50']:,.3f} / {first['p99']:,.3f} s",
                f"{later['p50'] * 1000:,.1f} / {later['p99'] * 1000:,.1f} ms",
                f"{told['output_tokens'] / seconds:,.0f}",
                format_count(told["preemptions"]),
                f"{told['peak_usage']:.1%}",
            ]
        )
    columns = [
        *(name.replace("_", " ") for name in names),
        "found",
        "first token (50% / 99%)",
        "a token more (50% / 99%)",
    ]
    columns += ["output tokens/s", "preempted", "memory in use, at most"]
    first = f" The first {_MOST_CELLS} of them." if len(done) > _MOST_CELLS else ""
    return Table("All settings", f"Each was replayed by itself.{first}", columns, rows, len(names))


def _served(cells: Sequence[Swept]) -> list[Swept]:
    return [one for one in cells if "report" in one.document]


def _hits_known(served: Sequence[Swept]) -> bool:
    """Whether the trace, which is the same for all of ``served``, tells which tokens are equal."""
    return all(_report(one)["hit_rate"] is not None for one in served)


def _report(one: Swept) -> Report:
    found: Any = one.document["report"]
    return dict(found)


def _first_token(one: Swept) -> float:
    return float(_report(one)["time_to_first_token_s"]["p99"])
