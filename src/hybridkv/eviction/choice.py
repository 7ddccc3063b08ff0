"""Evictions: frozen values that say what is given up next, and their names (docs/design/0019).

    lru      the block used longest ago
    hazard   blocks that no kept resume point needs; then the resume point of least value, by how soon similar ones
             were hit

A value knows no blocks: it says how resume points are ranked. RankedResumePoints keeps them and gives up blocks.
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
    """name: as it is written on the command line. ranking: makes what says which kept end goes next.

    Without a ranking, blocks go in the order of their last use, whatever they serve, superseded states before them.
    prefix_multiple: besides the checkpoints of the placement, keep a prefix of each prompt at this multiple of tokens.
    Requests that differ after a long common beginning then find a state the first time they differ; 0: none.
    """

    name: str
    ranking: Callable[[], Ranking] | None = None
    prefix_multiple: int = 0


LRU: Final = Eviction("lru")

HAZARD: Final = Eviction("hazard", HazardRanking, 1024)

_NAMED: Final = {one.name: one for one in (LRU, HAZARD)}

EVICTIONS: Final = tuple(_NAMED)
"""Names."""


def eviction_named(name: str) -> Eviction:
    """The value that ``name`` says. ConfigError, with what to write, for another name."""
    if name in _NAMED:
        return _NAMED[name]
    close = difflib.get_close_matches(name.lower(), _NAMED, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(f"unknown eviction {name!r}: use {', '.join(EVICTIONS)}{hint}")


DEFAULT_EVICTIONS: Final[Mapping[str, Eviction]] = MappingProxyType({REFERENCE: LRU, NATURAL: HAZARD})
"""Of each layout, whatever its groups are (docs/design/0019)."""


def eviction_of(plan: Plan, asked: str | None = None) -> Eviction:
    """What is given up next in a cache of ``plan``: what is ``asked`` for by name, else that of its layout.

    ConfigError for a name that is none.
    """
    return DEFAULT_EVICTIONS[plan.layout] if asked is None else eviction_named(asked)
