"""Placements by the names that the command line knows."""

from __future__ import annotations

from typing import Final

from hybridkv.cache.placement.stops import (
    AlignPlacement,
    EndsPlacement,
    IntervalPlacement,
    NoStates,
    Placement,
)
from hybridkv.errors import ConfigError

DEFAULT_PLACEMENT: Final[Placement] = EndsPlacement()
"""Until a better one is built."""

_KNOWN: Final = "none, ends, interval:N, align or align:N"


def placement_named(name: str, align_tokens: int) -> Placement:
    """The placement that ``name`` says. align_tokens: what ``align`` alone means. ConfigError for another name."""
    kind, colon, number = name.partition(":")
    if not colon:
        match kind:
            case "none":
                return NoStates()
            case "ends":
                return EndsPlacement()
            case "align":
                return AlignPlacement(align_tokens)
    if kind in {"interval", "align"} and number.isascii() and number.isdigit() and int(number) > 0:
        return IntervalPlacement(int(number)) if kind == "interval" else AlignPlacement(int(number))
    if kind in {"interval", "align"}:
        raise ConfigError(f"placement {name!r} needs a number of tokens, 1 or more: write {kind}:528")
    raise ConfigError(f"unknown placement {name!r}: use {_KNOWN}")
