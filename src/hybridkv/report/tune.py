"""The page of a search: what settings cost and serve, how much of the aims they take, and how far the runner-up is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hybridkv.report.charts import ALERT, lying, numbers
from hybridkv.report.page import Chart, Table, Trace, page
from hybridkv.simulator import Tried
from hybridkv.simulator.aims import Aim
from hybridkv.simulator.cells import differing, in_short, in_words, machines_of
from hybridkv.units import format_count

_SHOWN: Final = 20
_BELOW: Final = 80
"""Pixels of an axis with its title, below which the legend lies."""
_KEEPS, _BEST, _NEXT = 2, 0, 1


def tune_page(source: str, tried: Sequence[Tried], aims: Sequence[Aim]) -> str:
    """The file. tried: the best first, at least one. ConfigError where plotly is not installed."""
    names = differing([one.cell for one in tried]) or ["model", "memory"]
    kept = sum(one.keeps_aims for one in tried)
    facts = {
        "machines": machines_of([one.cell for one in tried]),
        "aims": ", ".join(f"{one.name} within {one.most_s:g} s" for one in aims),
        "settings tried": format_count(len(tried)),
        "keep the aims": format_count(kept),
        **_winners(tried, names),
    }
    parts: list[Chart | Table] = [*_charts(tried, names, aims), _table(tried, names)]
    return page(f"{source}: the cheapest setting", facts, parts)


def _winners(tried: Sequence[Tried], names: Sequence[str]) -> Mapping[str, str]:
    best, *others = [one for one in tried if one.refused is None] or [tried[0]]
    if best.refused is not None:
        return {"none can serve this trace": best.refused}
    first = "cheapest" if best.keeps_aims else "none keeps them; the nearest"
    facts = {first: f"{in_words(best.cell, names)}: {best.price_per_h:,.2f} an hour, {_taken(best)}"}
    if others:
        other = others[0]
        dearer = f"{other.price_per_h / best.price_per_h - 1:.1%} dearer" if other.keeps_aims else "misses the aims"
        facts["runner-up"] = f"{in_words(other.cell, names)}: {dearer}, {_taken(other)}"
    return facts


def _taken(one: Tried) -> str:
    aim, share = one.worst
    return f"{aim} at {share:.1%} of the aim"


def _charts(tried: Sequence[Tried], names: Sequence[str], aims: Sequence[Aim]) -> Iterator[Chart]:
    served = [one for one in tried if one.refused is None]
    if not served:
        return
    yield _cost(served, names)
    shown = served[:_SHOWN][::-1]  # the best at the top
    labels = [in_short(one.cell, names) for one in shown]
    some = f" Named by {', '.join(name.replace('_', ' ') for name in names)}, the best at the top"
    some += f": {_SHOWN} of {len(served)}." if len(served) > _SHOWN else "."
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
        "How much of the aims is taken",
        f"1 is the aim; what reaches beyond misses it.{some}",
        taken,
        _lying_layout("of the aim", height, [0, most], [edge]),
        height,
    )
    tokens = [one.tokens for one in shown]
    parts = [
        lying(
            name, [label for label, one in zip(labels, shown, strict=True) if one.keeps_aims is keeps], values, colour
        )
        for name, keeps, colour in (("keeps the aims", True, _KEEPS), ("misses them", False, ALERT))
        if (values := [value for value, one in zip(tokens, shown, strict=True) if one.keeps_aims is keeps])
    ]
    height = 130 + 24 * len(shown)
    layout = _lying_layout("output tokens", height, None, [])
    layout["yaxis"] = {**layout["yaxis"], "categoryorder": "array", "categoryarray": labels}
    said = f"Output tokens for one of the currency.{some}"
    yield Chart("What the money buys", said, parts, layout, height)


def _lying_layout(title: str, height: int, span: list[float] | None, shapes: list[Trace]) -> dict[str, Any]:
    axis = {"title": title, **({} if span is None else {"range": span})}
    return {
        "hovermode": "closest",
        "xaxis": axis,
        "yaxis": {"type": "category"},
        "shapes": shapes,
        "bargap": 0.25,
        "legend": {"y": -_BELOW / (height - _BELOW)},
    }


def _cost(served: Sequence[Tried], names: Sequence[str]) -> Chart:
    """Price and goodput; the cheapest and the runner-up by themselves."""
    best, *others = served
    parts: list[tuple[str, Sequence[Tried], int, str, int]] = [
        ("cheapest" if best.keeps_aims else "nearest", [best], _BEST, "star", 16),
        ("runner-up", others[:1], _NEXT, "diamond", 12),
        ("keep the aims", [one for one in others[1:] if one.keeps_aims], _KEEPS, "circle", 9),
        ("miss them", [one for one in others[1:] if not one.keeps_aims], ALERT, "x", 9),
    ]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": numbers([one.price_per_h for one in some]),
            "y": numbers([one.goodput_per_s for one in some]),
            "text": [in_words(one.cell, names) for one in some],
            "hovertemplate": "%{text}<br>%{x:,.2f} an hour, %{y:,.2f} a second<extra></extra>",
            "colour": colour,
            "cliponaxis": False,  # nothing at all is drawn whole, too
            "marker": {"symbol": symbol, "size": size},
        }
        for name, some, colour, symbol, size in parts
        if some
    ]
    said = "Each setting by its price, and by how many requests a second keep the aims by their own times."
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": "price an hour", "rangemode": "tozero"},
        "yaxis": {"title": "requests a second"},
    }
    return Chart("Cost and goodput", said, traces, layout, 400)


def _table(tried: Sequence[Tried], names: Sequence[str]) -> Table:
    aims = list(next((one.reached for one in tried if one.reached), {}))
    rows = []
    for one in tried:
        said = one.cell.said()
        setting = ["-" if said[name] is None else str(said[name]) for name in names]
        if one.reached is None:
            rows.append([*setting, f"{one.price_per_h:,.2f}", f"refused: {one.refused}"])
            continue
        times = [f"{seconds:,.3f} s" for seconds in one.reached.values()]
        worth = f"{one.price_per_h:,.2f}", f"{one.goodput_per_s:,.2f}", f"{one.tokens:,.0f}"
        rows.append([*setting, worth[0], "yes" if one.keeps_aims else "no", *times, *worth[1:]])
    columns = [*(name.replace("_", " ") for name in names), "price/h", "keeps", *aims, "goodput/s", "tokens/1"]
    return Table("All that was tried", "The best first.", columns, rows, len(names))
