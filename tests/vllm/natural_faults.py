"""Deliberate faults of the natural layout inside vLLM: the comparison of tokens must see each of them."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from hybridkv.vllm.natural import NaturalStep, StepWriter

NONE = np.empty((0, 3), np.int32)
Change: TypeAlias = Callable[[NaturalStep], NaturalStep]


def late() -> Change:
    """A state is kept one step after the one that passed it."""
    held = [NONE]

    def change(step: NaturalStep) -> NaturalStep:
        before, held[0] = held[0], step.keep
        return step._replace(keep=before)

    return change


def shifted() -> Change:
    """Blocks of the second class are sought one block further on than where layers have them."""
    from hybridkv.vllm.natural_worker import Arena  # noqa: PLC0415 - which imports vLLM

    make = Arena.__init__

    def init(self: Arena, arena: Any, config: Any) -> None:  # noqa: ANN401 - passed on
        make(self, arena, config)
        self._blocks[-1] = self._blocks[-1][1:]

    Arena.__init__ = init  # type: ignore[method-assign]
    return lambda step: step


FAULTS: Final[Mapping[str, Callable[[], Change]]] = {
    "a state one step late": late,
    "no state kept": lambda: lambda step: step._replace(keep=NONE),
    "copies skipped": lambda: lambda step: step._replace(copies=NONE),
    "a class one block off": shifted,
    "moves skipped": lambda: lambda step: step._replace(moves=NONE),
    "cells not rewritten": lambda: lambda step: step._replace(cells=()),
}


def commit(name: str) -> None:
    """Every step is changed so from now on."""
    write, change = StepWriter.write, FAULTS[name]()

    def wrong(self: StepWriter, output: object) -> NaturalStep:
        return change(write(self, output))

    StepWriter.write = wrong  # type: ignore[method-assign]
