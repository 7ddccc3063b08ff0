"""How much is tried: `make test` runs a part of what `make test-all` does, each by a Hypothesis profile of its own."""

from collections.abc import Mapping
from typing import Final

from hypothesis import settings

WHOLE: Final = 100
"""Examples of the profile that runs everything; longer ones for runs by hand have more."""

COMMON: Final = 15
"""So often, by its bound, in a part of what is run: there it is met, whatever the seeds."""

SHARE: Final = settings().max_examples / WHOLE


def how_many(whole: int) -> int:
    """How many random runs are made where ``whole`` are everything; at least one."""
    return max(1, round(whole * SHARE))


def too_rare(met: Mapping[str, int], least: Mapping[str, int]) -> dict[str, int]:
    """What was met less often than ``least``, of the whole; where less is run, what is common must be met."""
    if SHARE >= 1:
        return {name: met[name] for name, bound in least.items() if met[name] < bound}
    return {name: 0 for name, bound in least.items() if bound * SHARE >= COMMON and not met[name]}
