"""Output of commands: tables on a terminal, plain text in a pipe, sparklines and bars."""

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
from rich.text import Text

from hybridkv.cache import TenantStatistics
from hybridkv.cli.outcome import printable
from hybridkv.units import format_bytes, format_count

PIPE_COLUMNS: Final = 400
UNKNOWN: Final = "unknown"
"""Text of an unknown figure, such as the hits of a trace that holds only lengths."""
NAME_COLUMNS: Final = 17
"""Width of a fact's name, in characters."""
_STEPS: Final = " ▁▂▃▄▅▆▇█"
_PARTS: Final = " ▏▎▍▌▋▊▉█"
_KINDS: Final = {
    "FullAttentionSpec": "full attention",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunks",
    "SinkFullAttentionSpec": "full attention, sinks",
    "MLAAttentionSpec": "MLA",
    "SlidingWindowMLASpec": "MLA in a window",
    "CircularBufferSpec": "ring of raw keys",
    "MambaSpec": "recurrent state",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "encoder",
    "UniformTypeKVCacheSpecs": "attention, mixed widths",
}


def console() -> Console:
    """Return standard output; in a pipe it has no colours and is wide enough for every column."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, highlight=False, markup=False, emoji=False)  # a name may contain markup


def table(*columns: str, numbers_from: int = 1, title: str | None = None) -> Table:
    """Return a table without rows. Keep it within 80 characters.

    Args:
        columns: names of the columns.
        numbers_from: first column that is aligned to the right.
        title: text above the table.
    """
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
    """Return ``number`` with two decimals, rounded down: 15.998 requests are not 16."""
    return f"{math.floor(number * 100) / 100:.2f}"


def share(part: float) -> str:
    """Return a share as a percentage with two decimals."""
    return f"{part:.2%}"


def in_words(kind: str) -> str:
    """Return the name of a layer kind in words. kind: name of its spec's class, as in documents."""
    return _KINDS.get(kind, kind)


def address_of(host: str, port: int) -> str:
    """Return the URL of a server; an IPv6 address gets brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def say(text: str) -> None:
    """Print one line on standard output without wrapping it."""
    console().print(printable(text), soft_wrap=True)


def print_facts(facts: Mapping[str, str]) -> None:
    """Print a line for each fact: its name, then its value."""
    for name, value in facts.items():
        say(f"{name:<{NAME_COLUMNS}} {value}")


def show_tenants(tenants: Sequence[TenantStatistics]) -> None:
    """Print a table of each tenant's hits and cached bytes, if there are tenants."""
    if not tenants:
        return
    rows = table("tenant", "requests", "prompt tokens", "hit tokens", "hit rate", "cached", numbers_from=1)
    for one in tenants:
        counts = map(format_count, (one.requests, one.prompt_tokens, one.hit_tokens))
        rate = share(one.hit_tokens / one.prompt_tokens if one.prompt_tokens else 0.0)
        rows.add_row(printable(one.tenant), *counts, rate, format_bytes(one.kept_bytes))
    console().print(rows)


@contextmanager
def status(doing: str) -> Iterator[None]:
    """Show ``doing`` on standard error while the block runs, if that is a terminal; nothing of it stays."""
    with Console(stderr=True).status(Text(f"{printable(doing)} ...")):
        yield


def note(text: str) -> None:
    """Print one line on standard error if that is a terminal."""
    if (err := Console(stderr=True, highlight=False)).is_terminal:
        err.print(Text(printable(text)), soft_wrap=True)


@contextmanager
def progress_bar(doing: str, total: int, what: str, *, left: bool = False) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error, and yield a function that advances it by one.

    Args:
        doing: text before the bar.
        total: number of items.
        what: name of the items, after their count.
        left: whether to show the remaining time.
    """
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeElapsedColumn())
    more = (TextColumn("left"), TimeRemainingColumn()) if left else ()
    with Progress(*columns, *more, console=Console(stderr=True)) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)


# -- numbers drawn as characters


def sparkline(numbers: Sequence[float], most: float | None = None) -> str:
    """Return a character for each number, as high as its share of ``most``; a number above zero is never blank.

    Args:
        numbers: numbers of at least 0.
        most: the number of full height; None: the largest of ``numbers``.
    """
    most = max(numbers, default=0) if most is None else most
    return "".join(_STEPS[min(math.ceil(one / most * 8), 8) if most else 0] for one in numbers)


def bar(part: float, width: int = 24) -> str:
    """Return a bar of ``part``, 0 to 1, of ``width`` characters; a part above zero is never blank."""
    eighths = min(max(math.ceil(part * width * 8), 0), width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_PARTS[rest] if rest else "")
