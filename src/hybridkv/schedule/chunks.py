"""How a step's budget is shared, and where prefill chunks end."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.request import Request
from hybridkv.request_rows import RequestRows
from hybridkv.schedule.tokens import share_budget

Int64 = NDArray[np.int64]


class Split(Protocol):
    """See hybridkv.schedule.split."""

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is cut now."""
        ...

    def share(self, request: Request, computed: int, asked: int) -> int:
        """How many of ``asked`` tokens behind ``computed`` ones run now; 0: wait for a larger budget."""
        ...


class Chunks:
    """split: where chunks must end for states to be kept, None where they may end anywhere."""

    def __init__(self, split: Split | None) -> None:
        self._split = split

    def first(self, request: Request, computed: int, budget: int) -> int:
        """Tokens of the first chunk of ``request`` behind ``computed`` ones; 0: wait for a larger budget."""
        asked = min(request.num_tokens - computed, budget)
        return asked if self._split is None else self._split.share(request, computed, asked)

    def shares(self, columns: RequestRows, rows: Int64, wanted: Int64, budget: int) -> Int64:
        """Tokens of each of ``rows``, first come first served, int64[rows]. A Python call a row while one prefills."""
        if self._split is None or self._split.is_idle or (wanted <= 1).all():
            return share_budget(wanted, budget)
        shares = np.zeros_like(wanted)
        for place, request in enumerate(columns.owners(rows)):
            asked = min(wanted.item(place), budget)
            if asked:
                shares[place] = self._split.share(request, request.num_computed_tokens, asked)
                budget -= shares.item(place)
        return shares
