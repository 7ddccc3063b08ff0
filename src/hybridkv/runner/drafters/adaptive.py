"""As many of somebody's drafts as make decoding faster: a rejected one costs a step nearly what a token does.

    a step of 32 rows    [ 32 tokens: a + 32 b seconds ]
    with two drafts      [ 32 tokens | draft, right 9 times in 10 | draft, right every other time ]
                           32 tokens in a + 32 b       32.9 in a + 33 b            33.4 in a + 34 b

The number of drafts is that of the most tokens a second, from what steps took and how often drafts were right (goodput:
Liu et al., "Optimizing Speculative Decoding for Large Language Models Serving Using Goodput", 2024). Alone, a row runs
all of them; beside many others only what is all but sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.arguments import each, integer, one_of, real
from hybridkv.request import Request
from hybridkv.runner.drafters.drafter import Drafter
from hybridkv.runner.drafters.step_seconds import StepSeconds
from hybridkv.runner.inputs import require_drafter
from hybridkv.units import MOST_COUNT

if TYPE_CHECKING:
    from hybridkv.runner.load import LoadedModel

Float64 = NDArray[np.float64]

_LONGEST_RUN: Final = 8
"""Right drafts in a row before the next: from here on as one class."""
_REMEMBERED: Final = 500.0
"""Drafts of a class: older ones count less."""
_UNKNOWN: Final = (1.0, 2.0)
"""Right ones, and all, before any was seen."""
_LEAST_GAIN: Final = 1.05
"""Times as fast: less is not known so well, and not had where rows end together, for the slowest of them says when."""
_KEPT: Final = 4096
"""Requests of which is known what was proposed; more are forgotten, but for those that decode now."""


@dataclass(slots=True)
class _Proposed:
    """What was proposed for ``request`` behind ``known`` tokens; ``run`` of the drafts before these were right."""

    request: Request
    known: int
    drafts: list[int]
    run: int


class AdaptiveDrafter:
    """Those drafts of ``drafter`` that are worth their place in a step; for drafters that cost next to nothing.

    It learns from what it did not hand out, too: what a request had instead shows whether it was right. How often that
    is depends on how many drafts before it were right. Until steps of more and of fewer tokens were seen, it hands out
    all. Which drafts there are depends on the clock, the tokens of requests do not.
    Raises ConfigError for what is no drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        require_drafter("drafter", drafter)
        self._drafter = drafter
        self._seconds = StepSeconds()
        self._right = np.full(_LONGEST_RUN + 1, _UNKNOWN[0])
        self._tried = np.full(_LONGEST_RUN + 1, _UNKNOWN[1])
        self._proposed: dict[str, _Proposed] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """Of ``drafter``."""
        return self._drafter.num_speculative_tokens

    def require(self, target: LoadedModel) -> None:
        """As ``drafter``."""
        self._drafter.require(target)

    def close(self) -> None:
        """As ``drafter``."""
        self._drafter.close()

    def took(self, tokens: int, seconds: float) -> None:
        """A step of rows that all decode, ``tokens`` with their drafts, took so long. ConfigError for other numbers."""
        self._seconds.took(integer("tokens", tokens, 1, MOST_COUNT), real("seconds", seconds))

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """The first drafts of each of ``requests``, maybe none. O(log) of all drafts beside ``drafter``."""
        requests = each(one_of(Request))("requests", requests)
        proposed = self._drafter.propose(requests)
        if len(self._proposed) > _KEPT:
            mine = {one.request_id for one in requests}
            self._proposed = {name: one for name, one in self._proposed.items() if name in mine}
        runs = [self._follow(request, drafts) for request, drafts in zip(requests, proposed, strict=True)]
        counts = self._worthwhile(runs, [len(one) for one in proposed])
        return [drafts[:count] for drafts, count in zip(proposed, counts, strict=True)]

    def _follow(self, request: Request, drafts: list[int]) -> int:
        """``drafts`` are proposed for ``request`` now; how many right ones lead to them."""
        known = request.num_tokens
        before, run = self._proposed.get(request.request_id), 0
        if before is not None and before.request is request and before.known <= known:
            run = self._learn(before, request.token_ids(before.known).tolist())
        self._proposed[request.request_id] = _Proposed(request, known, list(drafts), run)
        return run

    def _learn(self, before: _Proposed, came: list[int]) -> int:
        """``came`` behind what was proposed; how many right drafts lead to the next token."""
        run = before.run
        for draft, token in zip(before.drafts, came, strict=False):
            place = min(run, _LONGEST_RUN)
            if self._tried[place] > _REMEMBERED:
                self._right[place] /= 2
                self._tried[place] /= 2
            self._tried[place] += 1
            if draft != token:
                return 0
            self._right[place] += 1
            run += 1
        return run if len(came) <= len(before.drafts) else 0

    def _worthwhile(self, runs: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """How many drafts of each request to hand out, of ``lengths``."""
        most = max(lengths, default=0)
        cost = self._seconds
        if not most or not cost.known:
            return list(lengths)
        places = np.minimum(np.array(runs)[:, None] + np.arange(most), _LONGEST_RUN)
        accepted = np.cumprod((self._right / self._tried)[places], axis=1)
        accepted[np.arange(most) >= np.array(lengths)[:, None]] = 0
        # best first: the drafts of a request stand in their order, for each is less sure than the one before it
        order = np.argsort(-accepted, axis=None, kind="stable")[: sum(lengths)]
        tokens = len(runs) + np.arange(1, len(order) + 1)
        speed = (len(runs) + np.cumsum(accepted.reshape(-1)[order])) / cost.of(tokens)
        best = int(np.argmax(speed))
        if speed[best] < _LEAST_GAIN * len(runs) / float(cost.of(np.array(len(runs)))):
            return [0] * len(runs)
        counts: list[int] = np.bincount(order[: best + 1] // most, minlength=len(runs)).tolist()
        return counts
