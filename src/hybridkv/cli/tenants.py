"""The option of tenants' shares, of every command that serves several."""

from __future__ import annotations

from typing import Annotated

import typer

from hybridkv.cli.panels import CACHE

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
