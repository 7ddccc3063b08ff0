"""Speculation in a replay: how many drafts a step has, and which of them come true.

Each draft is accepted with one probability if those before it were, the model of Leviathan, Kalman, Matias (arXiv
2211.17192, section 3.1): a step of n drafts and acceptance a gives (1 - a**(n + 1)) / (1 - a) tokens on average.
Whether one comes true is a function of the request's output and the position alone: a replay is the same every time.
Drafts run as tokens of the step, and take their time there; what proposes them takes none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import check_fields, integer, real
from hybridkv.errors import ConfigError
from hybridkv.simulator.tokens import UInt64, chances_at
from hybridkv.units import shown

MOST_DRAFTS: Final = 64
ACCEPTANCE: Final = 0.7
"""Of a draft, where nobody says."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """drafts: of each row that decodes, in a step. acceptance: of a draft whose forerunners were accepted, 0 .. 1.

    ConfigError for values out of range.
    """

    drafts: int
    acceptance: float

    def __post_init__(self) -> None:
        check_fields(self, partial(integer, least=1, most=MOST_DRAFTS), "drafts")
        if not 0 <= real("acceptance", self.acceptance) <= 1:
            raise ConfigError(f"acceptance (--acceptance) must lie in 0 .. 1, got {shown(self.acceptance)}")

    def accepted(self, starts: UInt64, positions: UInt64) -> NDArray[np.int64]:
        """How many of its drafts each row would accept, int64[n]. starts, positions: of its next token. O(n)."""
        if self.acceptance in {0, 1}:
            return np.full(len(starts), self.drafts * int(self.acceptance))
        run = np.log(np.maximum(chances_at(starts, positions), 2.0**-60)) / math.log(self.acceptance)
        return np.minimum(run.astype(np.int64), self.drafts)
