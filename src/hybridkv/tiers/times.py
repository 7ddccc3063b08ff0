"""How long the transfers of a tier take: from the Step that begins one to the result that reports it."""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from typing import Final

from hybridkv.cache import TimeCounts

TRANSFER_EDGES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Inclusive upper boundaries of buckets in seconds, those of vLLM's promotion latency; one more has larger values."""


class Direction(StrEnum):
    """Where a transfer goes, in vLLM's words.

    Attributes:
        UP: Towards the device.
        DOWN: Away from it.
    """

    UP = "promotion"
    DOWN = "cascade"


class TransferTimes:
    """Histograms of the transfers of one tier, by direction and by whether they arrived."""

    def __init__(self) -> None:
        kinds = [(direction, arrived) for direction in Direction for arrived in (True, False)]
        self._counts = {kind: [0] * (len(TRANSFER_EDGES_S) + 1) for kind in kinds}
        self._sums_s = dict.fromkeys(kinds, 0.0)

    def add(self, direction: Direction, seconds: float, *, arrived: bool) -> None:
        """Count a transfer that ended. O(1).

        Args:
            direction: Where it went.
            seconds: How long it took.
            arrived: Whether its bytes arrived; otherwise it is lost.
        """
        self._counts[direction, arrived][bisect_left(TRANSFER_EDGES_S, seconds)] += 1
        self._sums_s[direction, arrived] += seconds

    def of(self, direction: Direction, *, arrived: bool) -> TimeCounts:
        """Return the histogram of the transfers that ended so far, in the buckets of TRANSFER_EDGES_S.

        Args:
            direction: Where they went.
            arrived: Whether they arrived.
        """
        return TimeCounts(tuple(self._counts[direction, arrived]), self._sums_s[direction, arrived])
