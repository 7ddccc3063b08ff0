"""Placements: at which token counts recurrent states are kept (docs/design/0009)."""

from hybridkv.cache.placement.named import DEFAULT_PLACEMENT, placement_named, placement_of
from hybridkv.cache.placement.placements import (
    AlignPlacement,
    BoundaryPlacement,
    EndsPlacement,
    IntervalPlacement,
    NoStates,
    Placement,
)

__all__ = [
    "DEFAULT_PLACEMENT",
    "AlignPlacement",
    "BoundaryPlacement",
    "EndsPlacement",
    "IntervalPlacement",
    "NoStates",
    "Placement",
    "placement_named",
    "placement_of",
]
