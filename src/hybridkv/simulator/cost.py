"""How long a step takes: a roofline over compute and memory, and a fixed overhead.

    seconds = time_scale * (max(compute, memory) + reduced + rows * seconds of a row + overhead)
    compute = (2 * active parameters / tp * tokens + attention and states) / (FLOP/s * efficiency)
    memory  = (weights read / tp * bytes of a weight + cache bytes moved) / (bytes/s * efficiency)
    reduced = 2 * decoder layers * (tokens * hidden size * 2 bytes * 2 (tp - 1) / tp / (link's bytes/s * efficiency)
              + latency)

Tensor parallel ranks add up their parts twice a decoder layer, behind its mixer and behind its MLP (Shoeybi et al.,
Megatron-LM, arXiv 1909.08053, section 3), here in bf16 and without overlap; a ring sends 2 (tp - 1) / tp of the bytes
from each rank (Patarasuk, Yuan, J. Parallel Distrib. Comput. 69, 2009).

tokens: those the step runs. A weight takes 4 bytes (fp32), 2 (bf16), 1 (fp8) or a half (int4, scales left out); fp8
computes at the rate of fp8 where the hardware has one, int4 at that of bf16, to which it is unpacked (Lin et al., AWQ,
arXiv 2306.00978, section 4). Weights read: all, once a step; of a mixture of experts no more than its tokens can
choose, ``min(parameters, active parameters * tokens)``. Cache bytes moved are those of one rank, by layer kind:
hybridkv.simulator.traffic.

Two operations per weight and token is the usual count of a forward (Kaplan et al., arXiv 2001.08361, section
2.1); those of attention and of recurrent states are in hybridkv.simulator.operations; the roofline is Williams,
Waterman, Patterson, CACM 52(4), 2009. An encoder-decoder's encoder runs in the step that begins a request with another
input: its weights, which are those that no decoder's token is multiplied with, are read once a step, and multiplied
with the tokens of each input. Left out: attention inside encoders, those of pictures and sound that a decoder reads as
tokens, sampling; context parallel ranks share the cache and attention, not the weights' operations. Durations decide
only who runs beside whom: hits, blocks and preemptions come from the real scheduler and manager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import Transfer
from hybridkv.errors import ConfigError
from hybridkv.models import Model
from hybridkv.planner import Plan
from hybridkv.simulator.hardware import H100, Hardware
from hybridkv.simulator.operations import NONE_BESIDES, Operations
from hybridkv.simulator.traffic import CacheTraffic
from hybridkv.specs import Keeps
from hybridkv.step import Copy, Step
from hybridkv.units import shown

FP32: Final = "fp32"
BF16: Final = "bf16"
FP8: Final = "fp8"
WEIGHT_BYTES: Final[Mapping[str, float]] = MappingProxyType({FP32: 4, BF16: 2, FP8: 1, "int4": 0.5})
"""Of one weight, by what weights are kept in."""


def weights_named(name: str) -> str:
    """``name``. ConfigError for what weights are not kept in."""
    if name not in WEIGHT_BYTES:
        raise ConfigError(f"weights (--weights) must be one of {', '.join(WEIGHT_BYTES)}, got {shown(name)}")
    return name


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a Step for one model on one kind of hardware; build it with ``of``. Parameters are one rank's.

    weights: what they are kept in, a name of WEIGHT_BYTES. reduced_bytes: that a rank sends to others for a token, in
    ``sums`` sums over ranks a step. encoder_parameters: of ``parameters``, those that only encoders' tokens meet.
    """

    parameters: float
    active_parameters: float
    traffic: CacheTraffic
    hardware: Hardware = H100
    time_scale: float = 1.0
    weights: str = BF16
    reduced_bytes: float = 0.0
    sums: int = 0
    operations: Operations = NONE_BESIDES
    encoder_parameters: float = 0.0

    @classmethod
    def of(cls, plan: Plan, *, hardware: Hardware = H100, time_scale: float = 1.0, weights: str = BF16) -> Self:
        """Cost of the plan's model, its tensor parallel ranks at work side by side.

        time_scale: multiplies durations; 0 is a machine that takes no time. ConfigError for a negative one, for a
        model whose weights nobody counted, and for weights of another kind.
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
        return cls(
            parameters,
            active,
            CacheTraffic.of(plan),
            hardware,
            time_scale,
            weights_named(weights),
            _reduced_bytes(model),
            _sums(model),
            Operations.of(plan),
            parameters - active if any(layer.spec.keeps is Keeps.ENCODER for layer in model.layers) else 0.0,
        )

    def seconds(self, step: Step) -> float:
        """Seconds of ``step``. O(rows + copies)."""
        weights_s, weight_bytes = self._bounds(step.num_tokens, encoded_tokens(step))
        made = self.operations.of_rows(step.num_computed.astype(np.int64), step.num_scheduled.astype(np.int64))
        compute_s = weights_s + made / self._attention_per_s
        memory_s = (weight_bytes + self.traffic.bytes_of(step)) / self._bytes_per_s
        return self.time_scale * (max(compute_s, memory_s) + self._besides_s(step.num_tokens, len(step)))

    def decode_seconds(
        self, computed: NDArray[np.int64], steps: int, copies: Sequence[Transfer | Copy] = ()
    ) -> NDArray[np.float64]:
        """Seconds of each of ``steps`` steps in which rows compute one token each, to the bit those of ``seconds``.

        float64[steps]. computed: int64[rows], tokens computed before the first. copies: of blocks, in each of the
        steps. O(rows + steps), O(rows * steps) for rows that are not as long as a window yet and for chunks.
        """
        rows = len(computed)
        weights_s, weight_bytes = self._bounds(rows)
        compute_s = weights_s + self.operations.of_decodes(computed, steps) / self._attention_per_s
        memory_s = (weight_bytes + self.traffic.decode_bytes(computed, steps, copies)) / self._bytes_per_s
        busy_s: NDArray[np.float64] = np.maximum(compute_s, memory_s) + self._besides_s(rows, rows)
        return self.time_scale * busy_s

    def work(self, tokens: int, encoded: int = 0) -> tuple[float, float]:
        """Operations of the weights for ``tokens`` tokens, ``encoded`` of encoders, and bytes of them that are read."""
        read = min(self.parameters - self.encoder_parameters, self.active_parameters * tokens)
        read += self.encoder_parameters if encoded else 0
        made = 2 * (self.active_parameters * tokens + self.encoder_parameters * encoded)
        return made, read * WEIGHT_BYTES[self.weights]

    def _bounds(self, tokens: int, encoded: int = 0) -> tuple[float, float]:
        """Seconds that such tokens compute, and bytes of the weights that they read."""
        machine = self.hardware
        peak = machine.fp8_flops_per_s if self.weights == FP8 and machine.fp8_flops_per_s else machine.flops_per_s
        flops, read = self.work(tokens, encoded)
        return flops / (peak * machine.compute_efficiency), read

    def _besides_s(self, tokens: int, rows: int) -> float:
        """Seconds of what overlaps with nothing: ranks that add up their parts, rows, the step itself."""
        machine = self.hardware
        reduced_s = self.sums * machine.link_latency_s
        if machine.link_bytes_per_s:
            reduced_s += self.reduced_bytes * tokens / (machine.link_bytes_per_s * machine.link_efficiency)
        return reduced_s + rows * machine.row_s + machine.overhead_s

    @property
    def _attention_per_s(self) -> float:
        """Operations a second: attention computes in bf16, whatever weights are kept in."""
        machine = self.hardware
        return machine.flops_per_s * (machine.attention_efficiency or machine.compute_efficiency)

    @property
    def _bytes_per_s(self) -> float:
        return self.hardware.bytes_per_s * self.hardware.memory_efficiency


def encoded_tokens(step: Step) -> int:
    """Tokens of all inputs whose encoder runs in ``step``."""
    reads = [new.encoder for new in step.new_rows if new.encoder is not None]
    return sum(read.num_tokens for read in reads if read.encodes)


def _sums(model: Model) -> int:
    """Over the ranks of ``model``, in a step."""
    return 2 * len({layer.index for layer in model.layers}) if model.tp > 1 else 0


def _reduced_bytes(model: Model) -> float:
    """That one rank of ``model`` sends for a token."""
    return _sums(model) * model.hidden_size * WEIGHT_BYTES[BF16] * 2 * (model.tp - 1) / model.tp
