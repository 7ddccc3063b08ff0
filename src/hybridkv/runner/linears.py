"""Linear layers in steps of few tokens: rows of zeros, where this machine multiplies 16 rows faster than fewer.

MKL's product of float32 chooses another way from 16 rows on: 15 take up to twice as long. From how many rows on it pays
to add others is measured, once a process and number of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch.nn import functional

from hybridkv.runner.step_context import StandIn

_ROWS: Final = 16
"""What is filled up to."""
_LEAST_WEIGHTS: Final = 1 << 19
"""Of a layer: smaller ones stay in a processor's cache, where what is added costs more than it brings."""
_FEWEST: Final = 7
"""Fewer rows are faster than 16, whatever the library."""
_PROBED: Final = (4096, 2048)
"""Of the layer that is measured: too large for caches, as the weights of all layers together are."""
_REPEATS: Final = 3
_WORTH: Final = 0.9
"""Of the time without: what is hardly faster is left as it is."""


@lru_cache(maxsize=8)
def first_padded(threads: int) -> int:
    """From how many rows on, at most 16, 16 are multiplied faster than they. Measures for some 0.3 seconds.

    threads: of torch, as it is now.
    """
    del threads  # of the key alone
    weight, hidden = torch.zeros(_PROBED), torch.zeros(_ROWS, _PROBED[1])
    took = dict.fromkeys(range(_FEWEST, _ROWS + 1), math.inf)
    for _ in range(_REPEATS):  # turn by turn: what else the machine does meets all alike
        for rows, best in took.items():
            began = time.perf_counter()
            functional.linear(hidden[:rows], weight)
            took[rows] = min(best, time.perf_counter() - began)
    return _FEWEST - 1 + first_slower(list(took.values()))


def first_slower(took: Sequence[float]) -> int:
    """From how many rows on all up to the last take longer than it. took: seconds of 1, 2, .. rows."""
    rows = len(took)
    while rows > 1 and _WORTH * took[rows - 2] > took[-1]:
        rows -= 1
    return rows


class PaddedLinear(StandIn):
    """Takes the place of a linear layer's forward: of ``first`` rows or more, but fewer than 16, it makes 16."""

    def __init__(self, module: torch.nn.Linear, first: int) -> None:
        super().__init__(module)
        self._linear, self._first = module, first

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # as torch names it
        """[.., width] -> [.., width out]."""
        module, rows = self._linear, input.numel() // input.shape[-1]
        if not self._first <= rows < _ROWS:
            return functional.linear(input, module.weight, module.bias)
        padded = functional.pad(input.reshape(rows, -1), (0, 0, 0, _ROWS - rows))
        out = functional.linear(padded, module.weight, module.bias)[:rows]
        return out.view(*input.shape[:-1], -1)


def padded_linears(model: torch.nn.Module) -> list[PaddedLinear]:
    """One for every large linear layer of float32 on a processor whose forward nobody has changed; maybe none."""
    found = [
        one
        for one in model.modules()
        if type(one) is torch.nn.Linear
        and "forward" not in vars(one)
        and one.weight.device.type == "cpu"
        and one.weight.dtype is torch.float32
        and one.weight.numel() >= _LEAST_WEIGHTS
    ]
    first = first_padded(torch.get_num_threads()) if found else _ROWS
    return [PaddedLinear(one, first) for one in found] if first < _ROWS else []
