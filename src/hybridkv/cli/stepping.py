"""Options of an engine's steps, of every command that makes one."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from hybridkv.cli.panels import RUN
from hybridkv.schedule.limits import SHORT_SHARE
from hybridkv.units import MOST_COUNT

MOST_RUNNING: Final = 1 << 16
"""Requests at once: rows are columns of memory."""

MaxRunningOption = Annotated[
    int, typer.Option(max=MOST_RUNNING, metavar="N", help="Requests at once.", rich_help_panel=RUN)
]
TokenBudgetOption = Annotated[
    int, typer.Option(max=MOST_COUNT, metavar="N", help="Tokens of a step.", rich_help_panel=RUN)
]
ShortShareOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Of a step, what short prompts and decoding requests take before long prompts: 0 or more, below 1.",
        show_default=f"{SHORT_SHARE}; of the reference layout 0",
        rich_help_panel=RUN,
    ),
]
NoPrefixCachingOption = Annotated[bool, typer.Option("--no-prefix-caching", help="Share nothing.", rich_help_panel=RUN)]
AttentionOption = Annotated[
    str, typer.Option(metavar="NAME", help="gather, eager, triton or torch.", rich_help_panel=RUN)
]
