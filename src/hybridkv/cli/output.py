"""How commands write: tables for people, plain text in a pipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hybridkv.cache import TenantStatistics
from hybridkv.cli.outcome import printable
from hybridkv.units import format_bytes, format_count

PIPE_COLUMNS: Final = 400
UNKNOWN: Final = "unknown"
"""A figure that nobody can tell, such as hits of a trace of lengths alone."""
NAME_COLUMNS: Final = 17
"""Of a fact."""
_STEPS: Final = " ▁▂▃▄▅▆▇█"
_PARTS: Final = " ▏▎▍▌▋▊▉█"
_KINDS: Final = {
    "FullAttentionSpec": "full attention",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunks",
    "SinkFullAttentionSpec": "full attention, sinks",
    "MLAAttentionSpec": "MLA",
    "SlidingWindowMLASpec": "MLA in a window",
    "MambaSpec": "recurrent state",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "encoder",
    "UniformTypeKVCacheSpecs": "attention, mixed widths",
}


def console() -> Console:
    """Standard output; in a pipe without colours and so wide that no column is cut or wrapped."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, highlight=False, markup=False, emoji=False)  # names hold what they hold


def table(*columns: str, numbers_from: int = 1, title: str | None = None) -> Table:
    """A table whose columns from ``numbers_from`` on hold numbers. Keep it within 80 columns."""
    made = Table(
        title=None if title is None else printable(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for at, name in enumerate(columns):
        made.add_column(printable(name), justify="right" if at >= numbers_from else "left", overflow="fold")
    return made


def floor(number: float) -> str:
    """Two decimals, never rounded up: 15.998 requests are not 16."""
    return f"{math.floor(number * 100) / 100:.2f}"


def share(part: float) -> str:
    """Of a whole, in percent."""
    return f"{part:.2%}"


def in_words(kind: str) -> str:
    """A kind of layer for people. kind: the name of its spec's class, as documents have it."""
    return _KINDS.get(kind, kind)


def say(text: str) -> None:
    """A line on standard output, as long as it is."""
    console().print(printable(text), soft_wrap=True)


def print_facts(facts: Mapping[str, str]) -> None:
    """One a line: what it is, then what there is to say of it."""
    for name, value in facts.items():
        say(f"{name:<{NAME_COLUMNS}} {value}")


def show_tenants(tenants: Sequence[TenantStatistics]) -> None:
    """What each found, and has at the end; nothing without any."""
    if not tenants:
        return
    rows = table("tenant", "requests", "prompt tokens", "hit tokens", "hit rate", "kept", numbers_from=1)
    for one in tenants:
        counts = map(format_count, (one.requests, one.prompt_tokens, one.hit_tokens))
        rate = share(one.hit_tokens / one.prompt_tokens if one.prompt_tokens else 0.0)
        rows.add_row(printable(one.tenant), *counts, rate, format_bytes(one.kept_bytes))
    console().print(rows)


@contextmanager
def progress_bar(doing: str, total: int, what: str, *, left: bool = False) -> Iterator[Callable[[], None]]:
    """A bar on standard error, and what moves it on by one. left: with the time that is left."""
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeElapsedColumn())
    more = (TextColumn("left"), TimeRemainingColumn()) if left else ()
    with Progress(*columns, *more, console=Console(stderr=True)) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)


# -- small pictures of numbers, in characters


def sparkline(numbers: Sequence[float], most: float | None = None) -> str:
    """A character a number, its height that over ``most``, by default the greatest; anything above zero is seen."""
    most = max(numbers, default=0) if most is None else most
    return "".join(_STEPS[min(math.ceil(one / most * 8), 8) if most else 0] for one in numbers)


def bar(part: float, width: int = 24) -> str:
    """``part`` of ``width`` characters, 0 .. 1; anything above zero is seen."""
    eighths = min(max(math.ceil(part * width * 8), 0), width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_PARTS[rest] if rest else "")
