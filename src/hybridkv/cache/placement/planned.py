"""What a plan says of states and evictions: the placement it was made for, and what is given up next."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from hybridkv.cache.placement.eviction import HAZARD, LRU, Eviction, eviction_named
from hybridkv.cache.placement.named import DEFAULT_PLACEMENT, placement_named
from hybridkv.cache.placement.stops import Placement
from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.planner.pages import state_block_tokens
from hybridkv.planner.plan import NATURAL, NO_STATES, REFERENCE

DEFAULT_EVICTIONS: Final[Mapping[str, Eviction]] = MappingProxyType({REFERENCE: LRU, NATURAL: HAZARD})
"""Of each layout, whatever its groups are (docs/design/0019)."""


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


def eviction_of(plan: Plan, asked: str | None = None) -> Eviction:
    """What is given up next in a cache of ``plan``: what is ``asked`` for by name, else that of its layout.

    ConfigError for a name that is none.
    """
    return DEFAULT_EVICTIONS[plan.layout] if asked is None else eviction_named(asked)
