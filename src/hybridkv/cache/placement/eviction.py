"""What is given up next: frozen values beside the placement, and the names they go by (docs/design/0019).

    lru      what nobody used for longest
    hazard   what no kept end needs; then the end of least value, by how soon its like were hit

An *end* is a token count at which a prefix is kept to be resumed. A value knows nothing of blocks: it says how ends are
ranked, and who keeps them (hybridkv.cache.slots) gives up blocks by it. The free order and the slabs carry it out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hybridkv.cache.placement.ends import Ranking
from hybridkv.cache.placement.hazard import HazardRanking
from hybridkv.cache.placement.stops import CornerPlacement, Placement
from hybridkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Eviction:
    """name: as it is written on the command line. ranking: makes what says which kept end goes next.

    Without a ranking, blocks go in the order of their last use, whatever they serve, superseded states before them.
    corner: a prefix of each prompt is kept at its last multiple of so many tokens besides; 0: none.
    """

    name: str
    ranking: Callable[[], Ranking] | None = None
    corner: int = 0

    def placed(self, placement: Placement) -> Placement:
        """``placement`` and the corners of prompts, where any states are kept."""
        return CornerPlacement(placement, self.corner) if self.corner and placement.keeps_states else placement


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
