"""Placements by name, as the command line and plans write them."""

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
"""Placement of the natural layout unless another one is chosen."""

_FORMS: Final = {"none": "none", "ends": "ends", "interval": "interval:N", "align": "align or align:N"}
_NUMBERED: Final = ("interval", "align")


def placement_named(name: str, align_tokens: int) -> Placement:
    """Return the placement of a name. The ``name`` of a placement is read back as itself.

    Args:
        name: ``none``, ``ends``, ``interval:N``, ``align`` or ``align:N``.
        align_tokens: Tokens of ``align`` without a number: of a block of states in the reference layout.

    Raises:
        ConfigError: The name is unknown, or its number is out of range. The message lists the known names.
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
    """Return the number after the colon. Raises ConfigError unless it is a valid token count."""
    digits = number.lstrip("0") if number.isascii() and number.isdigit() else ""
    # int() refuses thousands of digits with an error of its own
    if not digits or len(digits) > len(str(MOST_TOKENS)) or int(digits) > MOST_TOKENS:
        raise ConfigError(f"placement {name!r} needs a number of tokens, 1 .. {MOST_TOKENS}: write {kind}:528")
    return int(digits)


def placement_of(plan: Plan, asked: str | None = None) -> Placement | None:
    """Return the placement of a plan in the natural layout; ``None`` in the reference layout, whose specs contain it.

    Args:
        plan: The plan.
        asked: A name that overrides the placement of the plan.

    Raises:
        ConfigError: The name is unknown, or the plan was made for another placement.
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
