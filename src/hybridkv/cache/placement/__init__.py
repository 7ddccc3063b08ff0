"""Where recurrent states are kept: a policy of its own, which only says at which token counts (docs/design/0009)."""

from hybridkv.cache.placement.named import DEFAULT_PLACEMENT, placement_named
from hybridkv.cache.placement.planned import placement_of
from hybridkv.cache.placement.stops import (
    AlignPlacement,
    EndsPlacement,
    IntervalPlacement,
    NoStates,
    Placement,
)

__all__ = [
    "DEFAULT_PLACEMENT",
    "AlignPlacement",
    "EndsPlacement",
    "IntervalPlacement",
    "NoStates",
    "Placement",
    "placement_named",
    "placement_of",
]
