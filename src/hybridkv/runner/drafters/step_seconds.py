"""What a step of decoding takes, by its tokens, from those that ran."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_FADING: Final = 0.97
"""What a step counts behind the next one: half of it is gone after 23."""
_LEAST_SPREAD: Final = 0.02
"""Of the number of tokens, its standard deviation over its mean: with less the slope is not to be seen."""


class StepSeconds:
    """A line through the seconds of steps, by least squares, the newest first: a + b * tokens."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens squared, tokens * seconds
        self._slope: float | None = None

    @property
    def known(self) -> bool:
        """Whether steps of different numbers of tokens were seen."""
        return self._slope is not None

    def took(self, tokens: int, seconds: float) -> None:
        """A step did."""
        self._sums = self._sums * _FADING + (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        count, tokens_, seconds_, squares, products = self._sums
        mean = tokens_ / count
        variance = squares / count - mean * mean
        if count > 1 and variance > (_LEAST_SPREAD * mean) ** 2:
            self._slope = max(0.0, float((products / count - mean * seconds_ / count) / variance))

    def of(self, tokens: Int64) -> Float64:
        """Seconds of steps of ``tokens``, above 0; where ``known``."""
        count, tokens_, seconds, *_ = self._sums
        slope = self._slope or 0.0
        line: Float64 = seconds / count + slope * (tokens - tokens_ / count)
        return np.maximum(line, 1e-9)
