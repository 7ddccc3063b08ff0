"""Pages of many settings: of a sweep and of a search.

The page of a sweep shows hit rates and latencies over memory, and a table of all settings. The page of a search shows
price and goodput of the settings, their latencies compared with the aims, and a table of all tried settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final

from hybridkv.report.page import ALERT, LOG, UNKNOWN_HITS, Chart, Table, Trace, line, lying, numbers, page
from hybridkv.simulator import Cell, Swept, Tried
from hybridkv.simulator.sweep import differing, in_short, in_words, machines_of
from hybridkv.simulator.tune import Aim
from hybridkv.units import format_count, parse_bytes

_MOST_LINES: Final = 20
_MOST_ROWS: Final = 60
_MOST_CELLS: Final = 1000
"""Limits of lines in a chart, of rows in the heat map and of rows in the table. Chosen by hand."""
_HEAT: Final = [[0, "#3b4a6b"], [0.5, "#b0578d"], [1, "#f2c14e"]]
"""Colours that differ on a light and on a dark page, and for colour-blind readers."""
Report = dict[str, Any]


def sweep_page(source: str, done: Sequence[Swept]) -> str:
    """Return the HTML page of a sweep.

    Args:
        source: name of the trace.
        done: finished cells, at least one.

    Raises:
        ConfigError: if plotly is not installed.
    """
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
            **_highest_hit_rate(served, names),
            f"lowest time to first token p99, {_first_token(quick):,.3f} s": in_words(quick.cell, names),
        }
    return facts


def _highest_hit_rate(served: Sequence[Swept], names: Sequence[str]) -> dict[str, str]:
    """Return the setting with the highest hit rate, if hits are known."""
    if not _hits_known(served):
        return {"hit rate": UNKNOWN_HITS}
    best = max(served, key=lambda one: _report(one)["hit_rate"])
    return {f"highest hit rate, {_report(best)['hit_rate']:.1%}": in_words(best.cell, names)}


def _parts(done: Sequence[Swept], names: Sequence[str], lines: dict[str, list[Swept]]) -> Iterator[Chart | Table]:
    if any(len(one) > 1 for one in lines.values()):
        yield from _curves(lines)
    served = _served(done)
    if served and _hits_known(served):
        yield _heat(lines)
    yield _table(done, names)


def _by_other_settings(done: Sequence[Swept], names: Sequence[str]) -> dict[str, list[Swept]]:
    """Return the cells by all options except memory, each list by memory."""
    found: dict[str, list[Swept]] = {}
    others = [name for name in names if name != "memory"]
    for one in sorted(done, key=lambda one: parse_bytes(one.cell.memory)):
        found.setdefault(in_short(one.cell, others) or one.cell.model, []).append(one)
    return found


def _curves(lines: dict[str, list[Swept]]) -> Iterator[Chart]:
    """Yield charts of the lines with the highest hit rates."""
    shown, many = _best(lines, _MOST_LINES)
    share = {"tickformat": ".0%", "range": [0, 1]}
    hits: list[tuple[str, str, Callable[[Report], float | None], dict[str, Any]]] = []
    if _hits_known([one for cells in lines.values() for one in _served(cells)]):
        said = "Hit tokens as a share of all prompt tokens."
        hits.append(("Hit rate over memory", said, lambda one: one["hit_rate"], share))
    for title, said, value, axis in (
        *hits,
        (
            "Time to first token over memory",
            "The p99 of all requests: 99% have their first token within this time.",
            lambda one: one["time_to_first_token_s"]["p99"] or None,
            {"title": "seconds", **LOG},
        ),
        (
            "Time per output token over memory",
            "The p99 of all requests, each with the mean time of its output tokens after the first.",
            lambda one: one["time_per_output_token_s"]["p99"] * 1000,
            {"title": "milliseconds"},
        ),
    ):
        traces = [_curve(name, lines[name], value, colour) for colour, name in enumerate(shown)]
        yield Chart(
            title, said + many, traces, {"xaxis": {"title": "GiB for the cache of one rank"}, "yaxis": axis}, 380
        )


def _best(lines: dict[str, list[Swept]], most: int) -> tuple[list[str], str]:
    """Return the names of the ``most`` best lines, best first, and a sentence if there are others.

    The best lines have the highest hit rates. If hits are unknown, they have the lowest times to first token.
    """
    known = _hits_known([one for cells in lines.values() for one in _served(cells)])
    ranks = {
        name: max((_report(one)["hit_rate"] if known else -_first_token(one) for one in _served(cells)), default=-inf)
        for name, cells in lines.items()
    }
    best = "with the highest hit rates" if known else "with the lowest times to first token"
    some = f" Only the {most} of {format_count(len(lines))} {best} are shown." if len(lines) > most else ""
    return sorted(ranks, key=lambda name: -ranks[name])[:most], some


def _curve(name: str, cells: Sequence[Swept], value: Callable[[Report], float | None], colour: int) -> dict[str, Any]:
    served = _served(cells)
    sizes = [parse_bytes(one.cell.memory) / 2**30 for one in served]
    values = [float("nan") if (found := value(_report(one))) is None else found for one in served]
    dash = ("solid", "dash", "dot")[colour // 10 % 3]  # the page has 10 colours; more lines get other strokes
    return dict(line(name, sizes, values, colour, mode="lines+markers", line={"dash": dash}))


def _heat(lines: dict[str, list[Swept]]) -> Chart:
    """Return a heat map: a row for each line, a column for each memory."""
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
    said = f"Hit tokens as a share of the prompt tokens. A gap is a setting that cannot serve the trace.{some}"
    return Chart("Hit rate of every setting", said, [trace], layout, 110 + 34 * len(shown))


def _table(done: Sequence[Swept], names: Sequence[str]) -> Table:
    rows = []
    for one in done[:_MOST_CELLS]:
        setting = _setting(one.cell, names)
        if "report" not in one.document:
            rows.append([*setting, f"refused: {one.document['refused']}"])
            continue
        report = _report(one)
        first, later = report["time_to_first_token_s"], report["time_per_output_token_s"]
        seconds = report["simulated_s"] or 1.0
        rows.append(
            [
                *setting,
                "unknown" if report["hit_rate"] is None else f"{report['hit_rate']:.2%}",
                f"{first['p50']:,.3f} / {first['p99']:,.3f} s",
                f"{later['p50'] * 1000:,.1f} / {later['p99'] * 1000:,.1f} ms",
                f"{report['output_tokens'] / seconds:,.0f}",
                format_count(report["preemptions"]),
                f"{report['peak_usage']:.1%}",
            ]
        )
    columns = [
        *(name.replace("_", " ") for name in names),
        "hit rate",
        "time to first token (p50 / p99)",
        "time per output token (p50 / p99)",
        "output tokens/s",
        "preemptions",
        "peak memory use",
    ]
    first = f" Only the first {_MOST_CELLS} are shown." if len(done) > _MOST_CELLS else ""
    return Table("All settings", f"Each setting was replayed by itself.{first}", columns, rows, len(names))


def _setting(cell: Cell, names: Sequence[str]) -> list[str]:
    """Return the values of the options ``names``, a dash for None."""
    options = cell.options()
    return ["-" if options[name] is None else str(options[name]) for name in names]


def _served(cells: Sequence[Swept]) -> list[Swept]:
    return [one for one in cells if "report" in one.document]


def _hits_known(served: Sequence[Swept]) -> bool:
    """Return whether the trace, the same for all of ``served``, has equal tokens."""
    return all(_report(one)["hit_rate"] is not None for one in served)


def _report(one: Swept) -> Report:
    found: Any = one.document["report"]
    return dict(found)


def _first_token(one: Swept) -> float:
    return float(_report(one)["time_to_first_token_s"]["p99"])


_SHOWN: Final = 20
_MEETS, _BEST, _NEXT = 2, 0, 1
"""Colours of settings that meet the aims, of the best one and of the runner-up."""


def tune_page(source: str, tried: Sequence[Tried], aims: Sequence[Aim]) -> str:
    """Return the HTML page of a search.

    Args:
        source: name of the trace.
        tried: tried settings, best first, at least one.
        aims: the limits of the search.

    Raises:
        ConfigError: if plotly is not installed.
    """
    names = differing([one.cell for one in tried]) or ["model", "memory"]
    meeting = sum(one.keeps_aims for one in tried)
    facts = {
        "machines": machines_of([one.cell for one in tried]),
        "aims": ", ".join(f"{one.name} within {one.most_s:g} s" for one in aims),
        "settings tried": format_count(len(tried)),
        "meet the aims": format_count(meeting),
        **_winners(tried, names),
    }
    parts: list[Chart | Table] = [*_charts(tried, names, aims), _table_of_tried(tried, names)]
    return page(f"{source}: the cheapest setting", facts, parts)


def _winners(tried: Sequence[Tried], names: Sequence[str]) -> Mapping[str, str]:
    best, *others = [one for one in tried if one.refused is None] or [tried[0]]
    if best.refused is not None:
        return {"no setting can serve this trace": best.refused}
    first = "cheapest" if best.keeps_aims else "no setting meets the aims; nearest"
    facts = {first: f"{in_words(best.cell, names)}: {best.price_per_h:,.2f} an hour, {_taken(best)}"}
    if others:
        other = others[0]
        dearer = f"{other.price_per_h / best.price_per_h - 1:.1%} dearer" if other.keeps_aims else "misses the aims"
        facts["runner-up"] = f"{in_words(other.cell, names)}: {dearer}, {_taken(other)}"
    return facts


def _taken(one: Tried) -> str:
    aim, share = one.worst
    return f"{aim} is {share:.1%} of the aim"


def _charts(tried: Sequence[Tried], names: Sequence[str], aims: Sequence[Aim]) -> Iterator[Chart]:
    served = [one for one in tried if one.refused is None]
    if not served:
        return
    yield _cost(served, names)
    shown = served[:_SHOWN][::-1]  # the best at the top
    labels = [in_short(one.cell, names) for one in shown]
    some = f" Labels name {', '.join(name.replace('_', ' ') for name in names)}. The best setting is at the top."
    some += f" Only the best {_SHOWN} of {len(served)} are shown." if len(served) > _SHOWN else ""
    limits = {aim.name: aim.most_s for aim in aims}
    taken = [
        lying(name, labels, [(one.reached or {})[name] / limit for one in shown], colour)
        for colour, (name, limit) in enumerate(limits.items())
    ]
    height = 150 + (16 + 12 * len(limits)) * len(shown)
    most = max(2.0, *(min(one.worst[1], 3.0) for one in shown)) if shown else 2.0
    edge = {
        "type": "line",
        "x0": 1,
        "x1": 1,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"dash": "dot", "color": "#d55e00"},
    }
    yield Chart(
        "Latencies compared with the aims",
        f"1 is the aim; a longer bar misses it.{some}",
        taken,
        _lying_layout("share of the aim", [0, most], [edge]),
        height,
    )
    tokens = [one.tokens for one in shown]
    parts = [
        lying(
            name, [label for label, one in zip(labels, shown, strict=True) if one.keeps_aims is meets], values, colour
        )
        for name, meets, colour in (("meets the aims", True, _MEETS), ("misses the aims", False, ALERT))
        if (values := [value for value, one in zip(tokens, shown, strict=True) if one.keeps_aims is meets])
    ]
    height = 130 + 24 * len(shown)
    layout = _lying_layout("output tokens", None, [])
    layout["yaxis"] = {**layout["yaxis"], "categoryorder": "array", "categoryarray": labels}
    said = f"Output tokens for one unit of the currency.{some}"
    yield Chart("Output tokens for the price", said, parts, layout, height)


def _lying_layout(title: str, span: list[float] | None, shapes: list[Trace]) -> dict[str, Any]:
    axis = {"title": title, **({} if span is None else {"range": span})}
    return {"hovermode": "closest", "xaxis": axis, "yaxis": {"type": "category"}, "shapes": shapes, "bargap": 0.25}


def _cost(served: Sequence[Tried], names: Sequence[str]) -> Chart:
    """Return a chart of price and goodput, with the cheapest setting and the runner-up highlighted."""
    best, *others = served
    parts: list[tuple[str, Sequence[Tried], int, str, int]] = [
        ("cheapest" if best.keeps_aims else "nearest", [best], _BEST, "star", 16),
        ("runner-up", others[:1], _NEXT, "diamond", 12),
        ("meet the aims", [one for one in others[1:] if one.keeps_aims], _MEETS, "circle", 9),
        ("miss the aims", [one for one in others[1:] if not one.keeps_aims], ALERT, "x", 9),
    ]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": numbers([one.price_per_h for one in some]),
            "y": numbers([one.goodput_per_s for one in some]),
            "text": [in_words(one.cell, names) for one in some],
            "hovertemplate": "%{text}<br>price/h %{x:,.2f}, goodput/s %{y:,.2f}<extra></extra>",
            "colour": colour,
            "cliponaxis": False,  # a marker at 0 is drawn whole
            "marker": {"symbol": symbol, "size": size},
        }
        for name, some, colour, symbol, size in parts
        if some
    ]
    said = "Price of each setting, and its goodput: requests per second that meet the aims with their own latencies."
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": "price per hour", "rangemode": "tozero"},
        "yaxis": {"title": "requests per second"},
    }
    return Chart("Cost and goodput", said, traces, layout, 400)


def _table_of_tried(tried: Sequence[Tried], names: Sequence[str]) -> Table:
    aims = list(next((one.reached for one in tried if one.reached), {}))
    rows = []
    for one in tried:
        setting = _setting(one.cell, names)
        if one.reached is None:
            rows.append([*setting, f"{one.price_per_h:,.2f}", f"refused: {one.refused}"])
            continue
        times = [f"{seconds:,.3f} s" for seconds in one.reached.values()]
        worth = f"{one.price_per_h:,.2f}", f"{one.goodput_per_s:,.2f}", f"{one.tokens:,.0f}"
        rows.append([*setting, worth[0], "yes" if one.keeps_aims else "no", *times, *worth[1:]])
    columns = [*(name.replace("_", " ") for name in names), "price/h", "meets aims", *aims, "goodput/s", "tokens/1"]
    return Table("All tried settings", "The best setting is first.", columns, rows, len(names))
