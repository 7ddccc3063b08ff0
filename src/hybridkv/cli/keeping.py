"""Options of what the cache keeps, and for whom."""

from __future__ import annotations

from typing import Annotated

import typer

from hybridkv.cache.placement import DEFAULT_EVICTIONS, EVICTIONS
from hybridkv.cli.panels import CACHE
from hybridkv.planner.plan import NATURAL

EvictionOption = Annotated[
    str | None,
    typer.Option(
        help=f"What is given up next, in the natural layout: {', '.join(EVICTIONS)}.",
        show_default=DEFAULT_EVICTIONS[NATURAL].name,
        rich_help_panel=CACHE,
    ),
]

ShareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--share",
        metavar="TENANT=SHARE[..GREATEST]",
        help="Of what is kept, promised to a tenant or salt: team-a=30%..60%; * is all not named. Repeat it.",
        show_default="all are one tenant",
        rich_help_panel=CACHE,
    ),
]
