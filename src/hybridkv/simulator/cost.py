"""How long a step takes: a roofline over compute and memory, and a fixed overhead.

    seconds = time_scale * (max(compute, memory) + overhead)
    compute = 2 * active parameters / tp * tokens / (FLOP/s * efficiency)
    memory  = (weights read / tp * 2 bytes + cache bytes moved) / (bytes/s * efficiency)

tokens: those the step runs. Weights read: all, once a step; of a mixture of experts no more than its tokens can
choose, ``min(parameters, active parameters * tokens)``. Cache bytes moved are those of one rank, by layer kind:
hybridkv.simulator.traffic.

Two operations per weight and token is the usual count of a forward (Kaplan et al., arXiv 2001.08361, section
2.1); the roofline is Williams, Waterman, Patterson, CACM 52(4), 2009. Left out: the operations of attention
(a tenth of the rest for a 70B model at 12k tokens) and of recurrent scans, an encoder's run, traffic between
ranks, sampling; context parallel ranks share the cache, not the operations. Durations decide only who runs
beside whom: hits, blocks and preemptions come from the real scheduler and manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Transfer
from hybridkv.errors import ConfigError
from hybridkv.planner import Plan
from hybridkv.simulator.traffic import CacheTraffic
from hybridkv.step import Copy, Step


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. Rates are peaks; the efficiencies say what share of them a forward reaches.

    overhead_s: seconds of a step that do not depend on its size (launches, scheduling, sampling).
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    compute_efficiency: float
    memory_efficiency: float
    overhead_s: float


H100: Final = Hardware("H100 SXM", 989e12, 3.35e12, 0.5, 0.8, 0.001)
"""Peaks of NVIDIA's data sheet (dense bf16, HBM3); efficiencies and overhead are round guesses."""

_WEIGHT_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a Step for one model on one kind of hardware; build it with ``of``. Parameters are one rank's."""

    parameters: float
    active_parameters: float
    traffic: CacheTraffic
    hardware: Hardware = H100
    time_scale: float = 1.0

    @classmethod
    def of(cls, plan: Plan, *, hardware: Hardware = H100, time_scale: float = 1.0) -> Self:
        """Cost of the plan's model, its tensor parallel ranks at work side by side.

        time_scale: multiplies durations; 0 is a machine that takes no time. ConfigError for a negative one, and for a
        model whose weights nobody counted.
        """
        if not 0 <= time_scale < float("inf"):
            raise ConfigError(f"the time scale must be 0 or more and finite, got {time_scale}")
        model = plan.model
        if not model.parameters and time_scale:
            raise ConfigError(
                f"nobody counted the weights of {model.name}, which take the time of a step: say --set parameters=N "
                "and --set active_parameters=N, or --time-scale 0"
            )
        parameters, active = model.parameters / model.tp, model.active_parameters / model.tp
        return cls(parameters, active, CacheTraffic.of(plan), hardware, time_scale)

    def seconds(self, step: Step) -> float:
        """Seconds of ``step``. O(rows + copies)."""
        compute_s, weight_bytes = self._bounds(step.num_tokens)
        memory_s = (weight_bytes + self.traffic.bytes_of(step)) / self._bytes_per_s
        return self.time_scale * (max(compute_s, memory_s) + self.hardware.overhead_s)

    def decode_seconds(
        self, computed: NDArray[np.int64], steps: int, copies: Sequence[Transfer | Copy] = ()
    ) -> NDArray[np.float64]:
        """Seconds of each of ``steps`` steps in which rows compute one token each, to the bit those of ``seconds``.

        float64[steps]. computed: int64[rows], tokens computed before the first. copies: of blocks, in each of the
        steps. O(rows + steps), O(rows * steps) for rows that are not as long as a window yet and for chunks.
        """
        compute_s, weight_bytes = self._bounds(len(computed))
        memory_s = (weight_bytes + self.traffic.decode_bytes(computed, steps, copies)) / self._bytes_per_s
        seconds: NDArray[np.float64] = self.time_scale * (np.maximum(compute_s, memory_s) + self.hardware.overhead_s)
        return seconds

    def _bounds(self, tokens: int) -> tuple[float, float]:
        """Seconds that ``tokens`` tokens compute, and bytes of the weights that they read."""
        machine = self.hardware
        compute_s = 2 * self.active_parameters * tokens / (machine.flops_per_s * machine.compute_efficiency)
        return compute_s, min(self.parameters, self.active_parameters * tokens) * _WEIGHT_BYTES

    @property
    def _bytes_per_s(self) -> float:
        return self.hardware.bytes_per_s * self.hardware.memory_efficiency
