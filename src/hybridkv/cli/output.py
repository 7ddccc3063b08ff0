"""How commands write: tables for people, plain text in a pipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from hybridkv.cli.printable import printable

PIPE_COLUMNS: Final = 400
UNKNOWN: Final = "unknown"
"""A figure that nobody can tell, such as hits of a trace of lengths alone."""
_NAME_COLUMNS: Final = 17
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


def print_facts(facts: Mapping[str, str]) -> None:
    """One a line: what it is, then what there is to say of it."""
    out = console()
    for name, value in facts.items():
        out.print(printable(f"{name:<{_NAME_COLUMNS}} {value}"), soft_wrap=True)
