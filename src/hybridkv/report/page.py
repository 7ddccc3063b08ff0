"""Write one HTML file that holds facts, charts, tables and the library that draws them (plotly's minified script).

A chart is Plotly's JSON with numbers in place of colours. The page's script sets the colours of the light or dark
theme, and each chart has a description of one or two sentences.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.specs import Keeps

Trace = Mapping[str, Any]
"""A trace of Plotly, with the number of a colour as ``colour``: equal numbers have the same colour in all charts."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of a page.

    Attributes:
        title: heading of the chart.
        said: description, one or two sentences.
        traces: data, as Plotly has it.
        layout: axes and other settings, as Plotly has them.
        height: height in pixels.
    """

    title: str
    said: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 320


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page.

    Attributes:
        title: heading of the table.
        said: description, one or two sentences.
        columns: names of the columns.
        rows: texts of the cells. The last cell of a short row spans the remaining columns.
        named: number of leading columns that hold text; the others hold numbers.
    """

    title: str
    said: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    named: int = 1


def page(title: str, facts: Mapping[str, str], parts: Sequence[Chart | Table]) -> str:
    """Return the HTML text of a page. O(characters), with some 5 MB of plotly's script.

    Args:
        title: the page's title.
        facts: values to list at the top, by name.
        parts: charts and tables, in order.

    Raises:
        ConfigError: if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415  # an extra, and slow to import
    except ImportError as error:
        raise ConfigError("pages with pictures need plotly: pip install 'hybridkv[report]'") from error
    template, style, draw = (
        files(__package__).joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    charts = [part for part in parts if isinstance(part, Chart)]
    drawn = [{"traces": [dict(one) for one in chart.traces], "layout": dict(chart.layout)} for chart in charts]
    data = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items())
    sections = "".join(
        _section(part, charts.index(part)) if isinstance(part, Chart) else _table(part) for part in parts
    )
    texts = {"title": html.escape(title), "rows": rows, "sections": sections}
    return template.format(**texts, style=style, plotly=get_plotlyjs(), data=data, draw=draw)


def _section(chart: Chart, at: int) -> str:
    """Return the HTML of the ``at``-th chart."""
    return (
        f"<section><h2>{html.escape(chart.title)}</h2><p>{html.escape(chart.said)}</p>"
        f'<div class="chart" id="chart-{at}" style="height:{chart.height}px" role="img" '
        f'aria-label="{html.escape(chart.title, quote=True)}"></div></section>'
    )


def _table(table: Table) -> str:
    """Return the HTML of a table."""
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


Float64 = NDArray[np.float64]

PADDING, FREE, ALERT = 7, 9, 4
"""Colours of unusable memory, of free memory, and of values that need attention."""
UNKNOWN_HITS: Final = "unknown: the trace holds only lengths"
"""Text in place of a hit rate, if the trace does not say which tokens are equal."""
LOG: Final = {"type": "log", "rangemode": "normal"}
"""A logarithmic axis."""
_OF_KINDS: Final[Mapping[str, int]] = {
    Keeps.TOKENS: 0,
    Keeps.WINDOW: 5,
    Keeps.STATE: 1,
    Keeps.RING: 2,
    Keeps.ENCODER: 8,
    Keeps.NOTHING: PADDING,
}
_SAID: Final[Mapping[str, str]] = {
    Keeps.TOKENS: "keys and values",
    Keeps.WINDOW: "windows",
    Keeps.STATE: "states",
    Keeps.RING: "rings",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Groups of a plan that keep the same kind of data; every chart uses the same name and colour for them.

    Attributes:
        name: the kind and its number of layers, in words.
        colour: number of the colour.
        block_bytes: bytes of a block of each group in memory, float64[groups]; 0 for groups of other kinds.
        content_bytes: bytes of a block without padding, float64[groups]; 0 for groups of other kinds.
    """

    name: str
    colour: int
    block_bytes: Float64
    content_bytes: Float64

    @property
    def padding(self) -> float:
        """Padding as a share of the memory, if all groups of the kind have equally many blocks."""
        return 1 - float(self.content_bytes.sum() / self.block_bytes.sum())


def kinds_of(plan: Plan) -> list[Kind]:
    """Return all kinds of the plan, in the order of its groups."""
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


def numbers(values: ArrayLike) -> list[float | None]:
    """Return ``values`` for JSON, rounded to six significant digits. NaN becomes null, a gap in a chart."""
    each = np.asarray(values, np.float64).tolist()
    return [None if math.isnan(one) else float(f"{one:.6g}") for one in each]


def line(name: str, x: ArrayLike, y: ArrayLike, colour: int, **more: Any) -> Trace:  # noqa: ANN401 - Plotly's
    """Return a line."""
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
    """Return a line that holds until the next point."""
    return line(name, x, y, colour, line={"shape": "hv"})


def layers(x: ArrayLike, parts: Iterable[tuple[str, ArrayLike, int]], **more: Any) -> list[Trace]:  # noqa: ANN401 - as above
    """Return stacked areas. ``parts`` holds name, values and colour of each, the lowest area first."""
    return [line(name, x, y, colour, stackgroup="all", line={"width": 0.5}, **more) for name, y, colour in parts]


def bars(name: str, x: Sequence[str], y: ArrayLike, colour: int, **more: Any) -> Trace:  # noqa: ANN401 - Plotly's
    """Return vertical bars; ``x`` names them."""
    return {"type": "bar", "name": name, "x": list(x), "y": numbers(y), "colour": colour, **more}


def lying(name: str, y: Sequence[str], x: ArrayLike, colour: int, **more: Any) -> Trace:  # noqa: ANN401 - Plotly's
    """Return horizontal bars; ``y`` names them, the first at the bottom."""
    return {"type": "bar", "orientation": "h", "name": name, "y": list(y), "x": numbers(x), "colour": colour, **more}
