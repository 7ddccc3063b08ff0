"""How soon ends of a class are hit: rates by age, learned while ends wait, and what waiting for one is worth.

class    any > kind > kind, hits > kind, hits, gap       a class with little seen leans on the one before it, one of
                                                        ends of which hints promise something on that promise
age      [0, 1) s, then each bucket 1.5 times as far as the last
rate     (hits + 4 w * rate of the class before) / (seconds at risk + 4 w), w the bucket's seconds
worth    the greatest, over what one might wait for, of P(hit by then) / E[seconds waited] (a Gittins index)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache.placement.promises import is_promised, promised_rate

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]

BUCKETS: Final = 23
_STARTS: Final = [0.0, *(1.5**k for k in range(BUCKETS - 1))]
_LOWER: Final = np.array(_STARTS)
_WIDTH: Final = np.diff([*_STARTS, 1.5 ** (BUCKETS - 1)])
_AT_RISK: Final = np.array([*_WIDTH[:-1], np.inf])
"""Seconds that an end can wait in each bucket: in the last one without end."""

_PRIOR: Final = 1e-6
_LEAN: Final = 4.0


NEXT: Final = [*_STARTS[1:], math.inf]
"""The age at which an end passes from each bucket into another."""


def bucket_of(age: float) -> int:
    """The bucket of ``age`` seconds, 0 or more."""
    return bisect_right(_STARTS, age) - 1


class HazardTable:
    """Classes are numbers, 0 the class of all; those of other keys are made when they are first asked for.

    For reading: worth, a list of BUCKETS numbers, hits a second, for each class; as of the last ``learn``, of
    which there were ``learned``.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._chains = [np.array([0])]
        self._levels: list[list[int]] = [[0], [], [], []]
        self._parents = [0]
        self._kinds: list[int] = []
        self.hits: Float = np.zeros((16, BUCKETS))
        self._at_risk: Float = np.zeros((16, BUCKETS))
        self._waited: list[tuple[int, float, float]] = []
        self.worth: list[list[float]] = [[]]
        self.learned = 0
        self.learn()

    def __len__(self) -> int:
        return len(self._parents)

    def class_of(self, *key: int) -> int:
        """The number of kind, hits, gap, or of the first few of them. O(1)."""
        number = self._numbers.get(key)
        if number is not None:
            return number
        parent = self.class_of(*key[:-1])
        number = self._numbers[key] = len(self._parents)
        self._parents.append(parent)
        self._chains.append(np.append(self._chains[parent], number))
        self._levels[len(key)].append(number)
        self.worth.append(self.worth[parent])
        if len(key) == 1:
            self._kinds += key
        if number == len(self.hits):
            more = np.zeros_like(self.hits)
            self.hits, self._at_risk = np.concatenate((self.hits, more)), np.concatenate((self._at_risk, more))
        if len(key) == 1 and is_promised(key[0]):
            self.learn()  # it counts from the first end on
        return number

    def note_hit(self, of: int, age: float) -> None:
        """An end of class ``of`` was hit at ``age`` seconds; those before it in the chain, too."""
        self.hits[self._chains[of], bucket_of(age)] += 1.0

    def wait(self, of: int, start: float, end: float) -> None:
        """An end of class ``of`` was at risk between two ages. O(1): it is added up when somebody asks."""
        self._waited.append((of, start, end))

    @property
    def at_risk(self) -> Float:
        """Seconds that ends of each class waited in each bucket, float64[classes or more, BUCKETS]."""
        if self._waited:
            of, start, end = zip(*self._waited, strict=True)
            self._waited = []
            self.wait_all(np.array(of), np.array(start), np.array(end))
        return self._at_risk

    def wait_all(self, of: Int64, start: Float, end: Float) -> None:
        """``wait`` of many ends at once, in array operations. O(ends), x buckets for those that pass into another."""
        size, added = len(self), np.zeros((len(self), BUCKETS))
        first, last = (_LOWER.searchsorted(age, "right") - 1 for age in (start, end))
        stay = first == last  # as nearly all
        places = of[stay] * BUCKETS + first[stay]
        added += np.bincount(places, (end - start)[stay], size * BUCKETS).reshape(size, BUCKETS)
        if not stay.all():
            of, times = of[~stay], _between(start[~stay], end[~stay])
            added += np.stack([np.bincount(of, times[:, b], size) for b in range(BUCKETS)], axis=1)
        for level in (3, 2, 1):
            for number in self._levels[level]:
                added[self._parents[number]] += added[number]
        self._at_risk[:size] += added

    def decay(self, factor: float) -> None:
        """All that was seen counts ``factor`` times as much."""
        self.hits *= factor
        self.at_risk[:] *= factor

    def rates(self) -> Float:
        """Hits a second of each class and bucket, float64[classes, BUCKETS]."""
        size, at_risk = len(self), self.at_risk
        rates = np.empty((size, BUCKETS))
        lean = _LEAN * _WIDTH
        rates[0] = (self.hits[0] + _PRIOR * lean) / (at_risk[0] + lean)
        for level in self._levels[1:]:
            before = rates[[self._parents[number] for number in level]]
            if level is self._levels[1]:
                self._lean_on_promises(before)
            rates[level] = (self.hits[level] + before * lean) / (at_risk[level] + lean)
        return rates

    def _lean_on_promises(self, usual: Float) -> None:
        """``usual``, one row a class of kinds, becomes what hints promise of those of which they do."""
        for place, kind in enumerate(self._kinds):
            if is_promised(kind):
                usual[place] = [promised_rate(kind, *one) for one in zip(usual[place], _STARTS, strict=True)]

    def learn(self) -> None:
        """Work out what each class is worth at each age. O(classes x buckets squared) in array operations."""
        rates = self.rates()
        risk = rates * _WIDTH
        waits = -np.expm1(-risk) / rates  # seconds spent in a bucket by who enters it
        best, waited, passed = (np.zeros_like(rates) for _ in range(3))
        for further in range(BUCKETS):
            upto = BUCKETS - further
            waited[:, :upto] += np.exp(-passed[:, :upto]) * waits[:, further:]
            passed[:, :upto] += risk[:, further:]
            np.maximum(best[:, :upto], -np.expm1(-passed[:, :upto]) / waited[:, :upto], out=best[:, :upto])
        self.worth = best.tolist()
        self.learned += 1


def _between(start: Float, end: Float) -> Float:
    """Seconds in each bucket between two ages, float64[ends, BUCKETS]."""
    before, after = (np.clip(age[:, None] - _LOWER, 0.0, _AT_RISK) for age in (start, end))
    spent: Float = after - before
    return spent
