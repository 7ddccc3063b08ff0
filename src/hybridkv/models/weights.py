"""Counting weights: all of them, and those that one token is multiplied with."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Weights:
    """every: weights held. active: weights that one token uses; fewer where it chooses experts.

    routed: of ``every``, those in matrices of routed experts. embedded: those of embeddings and the output head.
    """

    every: int = 0
    active: int = 0
    routed: int = 0
    embedded: int = 0

    @classmethod
    def dense(cls, count: int) -> Self:
        """Weights that every token uses."""
        return cls(count, count)

    def __add__(self, other: Weights) -> Weights:
        return Weights(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Weights:
        return Weights(*(one * times for one in astuple(self)))


def linear(inputs: int, outputs: int, *, bias: bool = False) -> int:
    """A projection."""
    return inputs * outputs + (outputs if bias else 0)


def gated_mlp(hidden: int, inner: int, *, bias: bool = False) -> int:
    """Gate, up and down projections."""
    return 2 * linear(hidden, inner, bias=bias) + linear(inner, hidden, bias=bias)


def experts(expert: int, count: int, chosen: int, *, biases: int = 0) -> Weights:
    """``count`` experts with ``expert`` weights in matrices and ``biases`` besides; a token uses ``chosen`` of them."""
    each, used = expert + biases, min(chosen, count)
    return Weights(each * count, each * used, routed=expert * count)


def language_model(layers: Weights, *, embedding: int, tied: bool) -> Weights:
    """Layers with an input embedding, which is a look-up, and an output head, which may be the same weights."""
    held = embedding if tied else 2 * embedding
    return layers + Weights(held, embedding, embedded=held)
