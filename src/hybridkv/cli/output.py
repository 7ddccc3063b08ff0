"""How commands write: tables for people, plain text in a pipe."""

from __future__ import annotations

import math
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from hybridkv.cli.printable import printable
from hybridkv.planner import KVCacheConfig
from hybridkv.units import format_bytes, format_count

PIPE_COLUMNS = 400


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


def units_of(config: KVCacheConfig) -> str:
    """What the pool gives out: 8,192 blocks of 2 MiB, or slabs."""
    unit = config.unit
    return f"{format_count(config.num_blocks)} {unit}s of {format_bytes(config.unit_bytes)}"


def exact_bytes(size_bytes: int) -> str:
    """Exact, and readable where the two differ."""
    readable = format_bytes(size_bytes)
    return readable if readable.endswith(" B") else f"{format_count(size_bytes)} B ({readable})"
