"""Which model types are read, by which family, and what keeps the others out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hybridkv.errors import UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer

SUPPORTED_LAYERS: Final = ("full_attention",)

NOT_YET: Final = {
    "bamba": "Mamba-2 states beside attention",
    "deepseek_v32": "sparse attention with an indexer cache",
    "falcon_h1": "attention and Mamba-2 states under one layer",
    "falcon_mamba": "Mamba states",
    "gemma2": "sliding-window attention",
    "gemma3": "sliding-window attention",
    "gemma3_text": "sliding-window attention",
    "gpt_oss": "sliding-window attention and attention sinks",
    "granitemoehybrid": "Mamba-2 states beside attention",
    "jamba": "Mamba states beside attention",
    "kimi_linear": "linear attention states",
    "lfm2": "short convolution states",
    "llama4": "chunked local attention",
    "llama4_text": "chunked local attention",
    "mamba": "Mamba states",
    "mamba2": "Mamba-2 states",
    "nemotron_h": "Mamba-2 states beside attention",
    "olmo_hybrid": "linear attention states",
    "qwen3_5": "linear attention states",
    "qwen3_5_moe": "linear attention states",
    "qwen3_5_moe_text": "linear attention states",
    "qwen3_5_text": "linear attention states",
    "qwen3_next": "linear attention states",
    "t5": "cross attention",
    "whisper": "cross attention",
    "zamba": "Mamba states beside attention",
    "zamba2": "Mamba-2 states beside attention",
}
"""Model types whose layers keep something that cannot be planned yet."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How layers are sized. block_size: tokens. dtype: canonical name. backend: whose state layout."""

    block_size: int
    tp: int
    dtype: str
    backend: str


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What a family makes of a config; the words are those of Model."""

    layers: tuple[Layer, ...]
    parameters: int
    active_parameters: int


class Family(Protocol):
    """A family reads the text config of its model types."""

    def __call__(self, fields: Fields, options: ReadOptions) -> FamilyFacts:
        """Layers and parameters. Raises ConfigError and UnsupportedModelError."""


def layer_name(index: int) -> str:
    """The attention module of decoder layer ``index``, as a causal language model calls it."""
    return f"model.layers.{index}.self_attn"


def refuse_layer_types(types: Sequence[str], name: str) -> None:
    """Raise UnsupportedModelError naming every layer whose type cannot be planned yet."""
    wrong: dict[str, list[int]] = defaultdict(list)
    for index, kind in enumerate(types):
        if kind not in SUPPORTED_LAYERS:
            wrong[kind].append(index)
    if wrong:
        named = "; ".join(f"{_ranges(indices)} ({kind})" for kind, indices in wrong.items())
        raise UnsupportedModelError(
            f"{name} has layers of types that are not supported yet: layers {named}; "
            f"supported: {', '.join(SUPPORTED_LAYERS)}, MLA"
        )


def refuse_model_type(fields: Fields, model_type: str | None, known: Sequence[str]) -> UnsupportedModelError:
    """The error for a model type that no family reads; a known reason and the layer types are named."""
    if model_type is None:
        return UnsupportedModelError(f"config of {fields.name}: model_type is missing; known: {', '.join(known)}")
    types = fields.names("layer_types") or ()
    counted = ", ".join(f"{kind} ({types.count(kind)})" for kind in dict.fromkeys(types))
    reason = f": its layers keep {NOT_YET[model_type]}" if model_type in NOT_YET else ""
    if counted:
        reason += f"; its layers are {counted}"
    return UnsupportedModelError(
        f"model type {model_type!r} of {fields.name} is not supported yet{reason}; known model types: "
        f"{', '.join(known)}"
    )


def _ranges(indices: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
