"""Whether a machine holds what a replay times on it: one rank's weights and its cache.

    too_large(model, memory_bytes, H100, "bf16")          why it does not, None where it does
    machine_in_words(plan, H100, "bf16", 1.0)             4 x H100 SXM: 32.86 GiB of bf16 weights + 40 GiB of cache ...

No machine is asked for without times (``time_scale`` 0), nor one whose ``memory_bytes`` is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from hybridkv.models import Model
from hybridkv.planner import Plan
from hybridkv.simulator.cost import WEIGHT_BYTES
from hybridkv.simulator.hardware import UNBOUNDED, Hardware
from hybridkv.specs import AttentionSpec
from hybridkv.units import format_bytes

_MOST_RANKS: Final = 1024
"""That a message suggests."""


def too_large(model: Model, memory_bytes: int, hardware: Hardware, weights: str) -> str | None:
    """Say why one ``hardware`` does not hold one rank's weights and cache, and what to change.

    memory_bytes: of the cache of one rank. Others as room_for_cache has them. Returns None where both fit, and where
    nobody knows.
    """
    room = room_for_cache(model, hardware, weights)
    if room is None or memory_bytes <= room:
        return None
    enough = next((ranks for ranks in _ranks(model) if memory_bytes <= _room(model, hardware, weights, ranks)), None)
    held = f"{format_bytes(round(_weight_bytes(model, weights)))} of {weights} weights"
    use = "" if enough is None else f"use --tp {enough}, or "
    narrow = _of_checkpoint(model)
    if narrow is not None and memory_bytes <= _room(model, hardware, narrow, model.tp):
        use += f"--weights {narrow} as its checkpoint, or "
    return (
        f"{model.name} does not fit: {held} and {format_bytes(memory_bytes)} of cache are more than the "
        f"{format_bytes(round(hardware.memory_bytes))} of one {hardware.name}: {use}lower --memory; for hits alone say "
        f"--hardware {UNBOUNDED}"
    )


def room_for_cache(model: Model, hardware: Hardware, weights: str) -> int | None:
    """Bytes that the weights of one rank leave on one ``hardware``, below 0 where they do not fit.

    model: read for its tensor parallel ranks. weights: a name of WEIGHT_BYTES. Returns None where the machine's memory
    has no bound (0), and where nobody counted the weights.
    """
    if not model.parameters or not hardware.memory_bytes:
        return None
    return _room(model, hardware, weights, model.tp)


def _of_checkpoint(model: Model) -> str | None:
    """The name of WEIGHT_BYTES nearest to what the model's checkpoint takes a weight; None if that is not known."""
    if not (model.parameters and model.weight_bytes):
        return None
    each = model.weight_bytes / model.parameters
    return min(WEIGHT_BYTES, key=lambda name: abs(WEIGHT_BYTES[name] - each))


def _room(model: Model, hardware: Hardware, weights: str, ranks: int) -> int:
    return math.floor(hardware.memory_bytes - _weight_bytes(model, weights) * model.tp / ranks)


def _weight_bytes(model: Model, weights: str) -> float:
    """Of one rank."""
    return (model.parameters or 0) / model.tp * WEIGHT_BYTES[weights]


def machine_in_words(plan: Plan, hardware: Hardware, weights: str, time_scale: float) -> str:
    """Name the machines of one replica, whose times a replay tells, and what each of them holds."""
    model = plan.model
    if not time_scale:
        return "no machine: steps take no time"
    held = f"{weights} weights of unknown size"
    if model.parameters:
        held = f"{format_bytes(round(_weight_bytes(model, weights)))} of {weights} weights"
    memory = f" in {format_bytes(round(hardware.memory_bytes))}" if hardware.memory_bytes else ""
    each = " each" if model.tp > 1 else ""
    return f"{model.tp} x {hardware.name}: {held} + {format_bytes(plan.memory_bytes)} of cache{memory}{each}"


def _ranks(model: Model) -> Iterator[int]:
    """More ranks than the model has that its heads can be split over: powers of two, as machines come."""
    specs = [layer.spec for layer in model.layers]
    kv_heads = {spec.num_kv_heads * model.tp for spec in specs if isinstance(spec, AttentionSpec)}
    for ranks in (1 << power for power in range(_MOST_RANKS.bit_length())):
        shared = all(heads % ranks == 0 or ranks % heads == 0 for heads in kv_heads)
        if ranks > model.tp and model.query_heads % ranks == 0 and shared:
            yield ranks
