"""Options of how tokens are drawn, of every command that generates."""

from __future__ import annotations

from typing import Annotated

import typer

from hybridkv.cli.panels import REQUESTS
from hybridkv.request import SamplingParams
from hybridkv.units import MOST_COUNT

TemperatureOption = Annotated[float, typer.Option(help="0 draws the most probable token.", rich_help_panel=REQUESTS)]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Draw from the most probable tokens of this share.", rich_help_panel=REQUESTS)
]
SeedOption = Annotated[int, typer.Option(help="Of the draws: equal seeds, equal outputs.", rich_help_panel=REQUESTS)]
StopOption = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends an output; may be given several times.", rich_help_panel=REQUESTS),
]
SystemOption = Annotated[
    str | None, typer.Option(help="A conversation's first message, where it has none such.", rich_help_panel=REQUESTS)
]
MaxNewTokensOption = Annotated[
    int,
    typer.Option(
        max=MOST_COUNT,
        metavar="N",
        help="Of each request, unless its sampling says max_tokens.",
        rich_help_panel=REQUESTS,
    ),
]


def sampling_of(
    max_new_tokens: int, temperature: float, top_p: float, seed: int, stop: list[str] | None
) -> SamplingParams:
    """What the options say. ConfigError for values that cannot be."""
    return SamplingParams(
        max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
