"""Counting weights: all of them, and those that one token is multiplied with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Weights:
    """every: weights held. active: weights that one token uses; fewer where it chooses experts."""

    every: int = 0
    active: int = 0

    @classmethod
    def dense(cls, count: int) -> Self:
        """Weights that every token uses."""
        return cls(count, count)

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.every + other.every, self.active + other.active)

    def __mul__(self, times: int) -> Weights:
        return Weights(self.every * times, self.active * times)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> int:
    """A projection."""
    return inputs * outputs + (outputs if bias else 0)


def gated_mlp(hidden: int, inner: int, *, bias: bool = False) -> int:
    """Gate, up and down projections."""
    return 2 * linear(hidden, inner, bias=bias) + linear(inner, hidden, bias=bias)


def experts(expert: int, count: int, chosen: int) -> Weights:
    """``count`` experts of ``expert`` weights, of which a token uses ``chosen``."""
    return Weights(expert * count, expert * min(chosen, count))


def language_model(layers: Weights, *, embedding: int, tied: bool) -> Weights:
    """Layers with an input embedding, which is a look-up, and an output head, which may be the same weights."""
    return layers + Weights(embedding if tied else 2 * embedding, embedding)
