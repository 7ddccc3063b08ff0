"""Placements by the names that the command line knows: the only place that reads them.

What a plan says of states and evictions: the placement it was made for, and what is given up next.
"""

from __future__ import annotations

import difflib
from typing import Final

from hybridkv.cache.placement.placements import (
    MOST_TOKENS,
    AlignPlacement,
    EndsPlacement,
    IntervalPlacement,
    NoStates,
    Placement,
)
from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.planner.plan import NATURAL, NO_STATES
from hybridkv.planner.reference import state_block_tokens

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


def placement_of(plan: Plan, asked: str | None = None) -> Placement | None:
    """Where states are kept in the natural layout; None in the reference layout, whose groups say it themselves.

    asked: by name, instead of what the plan says. Raises ConfigError for a name that is none, and for one that the plan
    was not made for.
    """
    planned = plan.placement
    if plan.config.slabs is None:
        if planned is not None and asked not in (None, planned):
            raise ConfigError(
                f"the plan is of the reference layout, made with placement {planned!r}: plan again with {asked!r}, or "
                f"with the {NATURAL} layout, which leaves it open"
            )
        return None
    if planned is None:
        return placement_named(asked or DEFAULT_PLACEMENT.name, align_tokens=1)
    layers = [(layer.name, layer.spec) for layer in plan.model.layers]
    placement = placement_named(asked or planned, state_block_tokens(layers))
    if planned == NO_STATES and placement.keeps_states:
        raise ConfigError(f"the plan was made with placement {NO_STATES!r}: plan again with {asked!r} to keep states")
    return placement
