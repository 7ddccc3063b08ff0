"""One HTML file with everything in it: facts, charts, and the library that draws them (plotly, its minified script).

Charts are Plotly's own JSON, without colours of their own: the page gives them those of light or dark, and says what
each one shows in a sentence. Forms that charts share: lines that hold until the next one, layers that add up, bars.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.specs import Keeps

Trace = Mapping[str, Any]
"""One of Plotly's traces. ``colour``, a number, is what the page colours it by: equal ones are alike in all charts."""


@dataclass(frozen=True, slots=True)
class Chart:
    """title, and what one sees, in a sentence or two. traces, layout: Plotly's. height: pixels."""

    title: str
    said: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 320


@dataclass(frozen=True, slots=True)
class Table:
    """title and said as of a Chart. rows: texts; a short row's last cell is wide. named: columns without numbers."""

    title: str
    said: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    named: int = 1


def page(title: str, facts: Mapping[str, str], parts: Sequence[Chart | Table]) -> str:
    """The file. facts: name and value, in words. ConfigError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415  # an extra, and slow to import
    except ImportError as error:
        raise ConfigError("pages with pictures need plotly: pip install 'hybridkv[report]'") from error
    charts = [part for part in parts if isinstance(part, Chart)]
    drawn = [{"traces": [dict(one) for one in chart.traces], "layout": dict(chart.layout)} for chart in charts]
    data = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items())
    sections = "".join(
        _section(part, charts.index(part)) if isinstance(part, Chart) else _table(part) for part in parts
    )
    return _PAGE.format(
        title=html.escape(title),
        rows=rows,
        sections=sections,
        style=_STYLE,
        plotly=get_plotlyjs(),
        data=data,
        draw=_DRAW,
    )


def _section(chart: Chart, at: int) -> str:
    """Where ``chart``, the ``at``-th, is drawn."""
    return (
        f"<section><h2>{html.escape(chart.title)}</h2><p>{html.escape(chart.said)}</p>"
        f'<div class="chart" id="chart-{at}" style="height:{chart.height}px" role="img" '
        f'aria-label="{html.escape(chart.title, quote=True)}"></div></section>'
    )


def _table(table: Table) -> str:
    """As it is read."""
    head = "".join(f"<th>{html.escape(one)}</th>" for one in table.columns)
    rows = "".join(f"<tr>{_cells(row, table)}</tr>" for row in table.rows)
    return (
        f'<section class="table"><h2>{html.escape(table.title)}</h2><p>{html.escape(table.said)}</p>'
        f"<div><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _cells(row: Sequence[str], table: Table) -> str:
    kinds = ["" if at < table.named else ' class="number"' for at in range(len(row))]
    if len(row) < len(table.columns):
        kinds[-1] = f' colspan="{len(table.columns) - len(row) + 1}"'
    return "".join(f"<td{kind}>{html.escape(one)}</td>" for kind, one in zip(kinds, row, strict=True))


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><h1>{title}</h1><dl>{rows}</dl>{sections}</main>
<script>{plotly}</script>
<script type="application/json" id="charts">{data}</script>
<script>{draw}</script></body></html>
"""

_STYLE: Final = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f7f9; --text: #1c2330; --soft: #566072; --line: #dfe3ea; }
@media (prefers-color-scheme: dark) {
  :root { --back: #12161d; --card: #1a2029; --text: #e6e9ef; --soft: #a0a9b8; --line: #2c3542; }
}
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; margin: 8px 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0; }
p { margin: 2px 0 8px; color: var(--soft); }
dl { margin: 0 0 16px; columns: 220px; column-gap: 24px; }
dt { color: var(--soft); font-size: .85rem; break-after: avoid; }
dd { margin: 0 0 8px; break-inside: avoid; font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; margin: 0 0 16px; }
.chart { width: 100%; }
section.table > div { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: normal; }
td[colspan] { white-space: normal; min-width: 20em; }
.number { font-variant-numeric: tabular-nums; }
"""

_DRAW: Final = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const palettes = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#6b7280", "#7a3fb0", "#a3a9b4"],
  dark: ["#4ba3e3", "#f0b93a", "#2cc295", "#e29bc4", "#f0803c", "#8fd0f5", "#d6c64a", "#9aa3b2", "#b58be0", "#5b6472"],
};
function draw() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const colours = palettes[dark.matches ? "dark" : "light"];
  charts.forEach((chart, at) => {
    const traces = chart.traces.map((trace) => {
      const { colour, ...rest } = trace;
      if (colour === undefined) return rest;
      const with_ = colours[colour % colours.length];
      const filled = rest.stackgroup === undefined ? {} : { fillcolor: with_ };
      return { ...rest, ...filled, marker: { color: with_, ...rest.marker }, line: { color: with_, ...rest.line } };
    });
    const axis = { gridcolor: of("--line"), linecolor: of("--line"), zerolinecolor: of("--line"), automargin: true };
    const asked = chart.layout;
    const named = (axis) => ({ ...axis, ...(axis.title === undefined ? {} : { title: { text: axis.title } }) });
    const layout = {
      margin: { l: 56, r: 12, t: 8, b: 44 }, hovermode: "x unified", ...asked,
      paper_bgcolor: of("--card"), plot_bgcolor: of("--card"), font: { color: of("--text"), size: 12 },
      legend: { orientation: "h", y: -0.22, ...asked.legend },
      hoverlabel: { bgcolor: of("--back"), font: { color: of("--text") } },
      xaxis: { ...axis, ...named(asked.xaxis ?? {}) },
      yaxis: { ...axis, rangemode: "tozero", ...named(asked.yaxis ?? {}) },
    };
    Plotly.react("chart-" + at, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  });
}
draw();
dark.addEventListener("change", draw);
"""


Float64 = NDArray[np.float64]

PADDING, FREE, ALERT = 7, 9, 4
"""Colours of what nobody can use, of what nobody uses, and of what one should look at."""
_OF_KINDS: Final[Mapping[str, int]] = {
    Keeps.TOKENS: 0,
    Keeps.WINDOW: 5,
    Keeps.STATE: 1,
    Keeps.ENCODER: 8,
    Keeps.NOTHING: PADDING,
}
_SAID: Final[Mapping[str, str]] = {Keeps.TOKENS: "keys and values", Keeps.WINDOW: "windows", Keeps.STATE: "states"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What groups of a plan keep, the same in every chart.

    block_bytes, content_bytes: of each group's blocks, as they lie in memory and what of it is used, float64[groups], 0
    for groups of other kinds.
    """

    name: str
    colour: int
    block_bytes: Float64
    content_bytes: Float64

    @property
    def padding(self) -> float:
        """Share of its memory that nothing is in, where blocks of its groups are equally many."""
        return 1 - float(self.content_bytes.sum() / self.block_bytes.sum())


def kinds_of(plan: Plan) -> list[Kind]:
    """All that the plan has, in the order of its groups."""
    config, index = plan.config, {layer.name: layer.index for layer in plan.model.layers}
    keeps = [str(group.spec.keeps) for group in config.groups]
    blocks = np.array([config.block_bytes_of(at) for at in range(len(keeps))], np.float64)
    contents = np.array([group.content_bytes for group in config.groups], np.float64)
    found = []
    for kind in dict.fromkeys(keeps):
        mine = np.array([one == kind for one in keeps])
        groups = [group for group, one in zip(config.groups, mine, strict=True) if one]
        layers = {index[name] for group in groups for name in group.layer_names}
        name = f"{_SAID.get(kind, kind)} of {len(layers)} layers"
        found.append(Kind(name, _OF_KINDS[kind], blocks * mine, contents * mine))
    return found


def numbers(values: ArrayLike, digits: int = 6) -> list[float | None]:
    """``values`` for JSON, rounded to so many digits that count; None, a gap, for NaN."""
    each = np.asarray(values, np.float64).tolist()
    return [None if math.isnan(one) else float(f"{one:.{digits}g}") for one in each]


def line(name: str, x: ArrayLike, y: ArrayLike, colour: int, **more: Any) -> Trace:  # noqa: ANN401 - Plotly's
    """A line."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": numbers(x),
        "y": numbers(y),
        "colour": colour,
        **more,
    }


def steps(name: str, x: ArrayLike, y: ArrayLike, colour: int) -> Trace:
    """A line that holds until the next point."""
    return line(name, x, y, colour, line={"shape": "hv"})


def layers(x: ArrayLike, parts: Iterable[tuple[str, ArrayLike, int]], **more: Any) -> list[Trace]:  # noqa: ANN401 - as above
    """``parts``, name, values and colour, one above the other."""
    return [line(name, x, y, colour, stackgroup="all", line={"width": 0.5}, **more) for name, y, colour in parts]


def bars(name: str, x: Sequence[str], y: ArrayLike, colour: int, **more: Any) -> Trace:  # noqa: ANN401 - Plotly's
    """Bars by name."""
    return {"type": "bar", "name": name, "x": list(x), "y": numbers(y), "colour": colour, **more}


def lying(name: str, y: Sequence[str], x: ArrayLike, colour: int, **more: Any) -> Trace:  # noqa: ANN401 - Plotly's
    """Bars that lie, the first at the bottom."""
    return {"type": "bar", "orientation": "h", "name": name, "y": list(y), "x": numbers(x), "colour": colour, **more}
