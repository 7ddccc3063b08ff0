"""The placement that a plan was made for, or another one that it allows."""

from __future__ import annotations

from hybridkv.cache.placement.named import DEFAULT_PLACEMENT, placement_named
from hybridkv.cache.placement.stops import Placement
from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.planner.pages import state_block_tokens
from hybridkv.planner.plan import NATURAL, NO_STATES


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
