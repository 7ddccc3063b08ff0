"""Name the evictions: frozen values that say which blocks or resume points are evicted next (docs/design/0019).

    lru      the least recently used block
    hazard   blocks that no kept resume point needs; then the resume point of least value, estimated from the hits
             of similar resume points

A value does not refer to blocks. It says how resume points are ranked; RankedResumePoints keeps and evicts them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.eviction.hazard import HazardRanking, Ranking
from hybridkv.planner import Plan
from hybridkv.planner.plan import NATURAL, REFERENCE


@dataclass(frozen=True, slots=True)
class Eviction:
    """Say how a cache chooses the next block or resume point to evict.

    Attributes:
        name: The name on the command line.
        ranking: Makes a ranking of resume points, for each tenant. Without a ranking, superseded states are evicted
            first, and then the least recently used blocks.
        prefix_multiple: A checkpoint is also kept at the last multiple of this many tokens in each prompt; 0 for no
            checkpoint. Requests that diverge after a long common beginning then find a state the first time.
    """

    name: str
    ranking: Callable[[], Ranking] | None = None
    prefix_multiple: int = 0


LRU: Final = Eviction("lru")

HAZARD: Final = Eviction("hazard", HazardRanking, 1024)
"""Its multiple of 1,024 tokens serves long documents that diverge at an unmarked token (docs/design/0019)."""

_NAMED: Final = {one.name: one for one in (LRU, HAZARD)}

EVICTIONS: Final = tuple(_NAMED)
"""The names that ``eviction_named`` accepts."""


def eviction_named(name: str) -> Eviction:
    """Return the eviction with a name.

    Args:
        name: A name in ``EVICTIONS``.

    Raises:
        ConfigError: The name is unknown. The message lists the names and the closest one.
    """
    if name in _NAMED:
        return _NAMED[name]
    close = difflib.get_close_matches(name.lower(), _NAMED, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(f"unknown eviction {name!r}: use {', '.join(EVICTIONS)}{hint}")


DEFAULT_EVICTIONS: Final[Mapping[str, Eviction]] = MappingProxyType({REFERENCE: LRU, NATURAL: HAZARD})
"""The default eviction of each layout. It does not depend on the groups (docs/design/0019)."""


def eviction_of(plan: Plan, asked: str | None = None) -> Eviction:
    """Return the eviction of a cache.

    Args:
        plan: The plan of the cache.
        asked: The name of an eviction; None for the default of the plan's layout.

    Raises:
        ConfigError: The name is unknown.
    """
    return DEFAULT_EVICTIONS[plan.layout] if asked is None else eviction_named(asked)
