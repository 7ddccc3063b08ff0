"""Options of what the cache keeps, and for whom; what tenants had of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from hybridkv.cache import TenantStatistics
from hybridkv.cli.output import console, share, table
from hybridkv.cli.panels import CACHE, OUTPUT
from hybridkv.cli.printable import printable
from hybridkv.eviction import DEFAULT_EVICTIONS, EVICTIONS
from hybridkv.planner.plan import NATURAL
from hybridkv.units import format_bytes, format_count

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

ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Say why tokens were not found in the cache.", rich_help_panel=OUTPUT)
]

REMEMBERED: Final = 1 << 20
"""Keys of evicted blocks, where misses are explained: some 200 bytes each."""


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
