"""Placements by the names that the command line knows: the only place that reads them."""

from __future__ import annotations

import difflib
from typing import Final

from hybridkv.cache.placement.stops import (
    MOST_TOKENS,
    AlignPlacement,
    EndsPlacement,
    IntervalPlacement,
    NoStates,
    Placement,
)
from hybridkv.errors import ConfigError

DEFAULT_PLACEMENT: Final[Placement] = EndsPlacement()
"""Until a better one is built."""

_FORMS: Final = {"none": "none", "ends": "ends", "interval": "interval:N", "align": "align or align:N"}
_NUMBERED: Final = ("interval", "align")


def placement_named(name: str, align_tokens: int) -> Placement:
    """The placement that ``name`` says; its own ``name`` is read back as itself.

    align_tokens: what ``align`` alone means: the tokens of a block of states in the reference layout.
    Raises ConfigError, with what to write, for an unknown name and for a number that cannot be.
    """
    kind, colon, number = name.partition(":")
    if not colon:
        match kind:
            case "none":
                return NoStates()
            case "ends":
                return EndsPlacement()
            case "align":
                return AlignPlacement(align_tokens)
    if kind in _NUMBERED:
        tokens = _tokens(name, kind, number)
        return IntervalPlacement(tokens) if kind == "interval" else AlignPlacement(tokens)
    close = difflib.get_close_matches(kind.lower(), _FORMS, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(_FORMS[one] for one in close)}?)" if close else ""
    raise ConfigError(f"unknown placement {name!r}: use {', '.join(_FORMS.values())}{hint}")


def _tokens(name: str, kind: str, number: str) -> int:
    """The number behind the colon. ConfigError unless it is one of tokens."""
    digits = number.lstrip("0") if number.isascii() and number.isdigit() else ""
    # int() refuses thousands of digits with an error of its own
    if not digits or len(digits) > len(str(MOST_TOKENS)) or int(digits) > MOST_TOKENS:
        raise ConfigError(f"placement {name!r} needs a number of tokens, 1 .. {MOST_TOKENS}: write {kind}:528")
    return int(digits)
