"""How many random runs a deliberate fault survives."""

from collections.abc import Callable
from random import Random

import pytest

from hybridkv.testing import ContentError, DifferenceError
from oracles import Rig, random_run


def caught(make: Callable[[Random], Rig], examples: int) -> int:
    """The number of random runs, of at most ``examples``, until one raises ContentError."""
    for seed in range(examples):
        random = Random(seed)
        try:
            random_run(make(random), random)
        except ContentError:
            return seed + 1
        except DifferenceError:  # another token was sampled before a wrong one was read
            continue
    pytest.fail(f"{examples} runs saw nothing")
