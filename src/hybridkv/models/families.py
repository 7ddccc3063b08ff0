"""Which model types are read, by which family, and what keeps the others out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hybridkv.errors import UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer
from hybridkv.models.weights import Weights
from hybridkv.units import shown

SUPPORTED_LAYERS: Final = ("full_attention", "sliding_attention", "chunked_attention")
"""Attention layers of a decoder."""

NOT_YET: Final = {
    "deepseek_v32": "sparse attention with an indexer cache",
    "gemma3n": "layers that share keys and values",
    "gemma3n_text": "layers that share keys and values",
    "gemma4": "layers that share keys and values",
    "minimax": "lightning attention states",
    "recurrent_gemma": "recurrent states inside its modules",
    "rwkv": "RWKV states",
}
"""Model types whose layers keep something that cannot be planned yet."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How layers are sized. block_size: tokens. dtype: of keys and values, canonical name.

    backend: whose state layout. state_dtype: of recurrent states, where a config names no other.
    num_speculative_tokens: drafts a step that states have room for.
    """

    block_size: int
    tp: int
    dtype: str
    backend: str
    state_dtype: str
    num_speculative_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What a family makes of a config.

    weights: of the whole model. max_encoder_tokens: as in Model. rope_scales: whether a rotary scaling of the
    config makes its positions more than ``max_position_embeddings``.
    """

    layers: tuple[Layer, ...]
    weights: Weights
    max_encoder_tokens: int = 0
    rope_scales: bool = True


class Family(Protocol):
    """A family reads the text config of its model types."""

    def __call__(self, fields: Fields, options: ReadOptions) -> FamilyFacts:
        """Layers and parameters. Raises ConfigError and UnsupportedModelError."""


def layer_name(index: int) -> str:
    """The attention module of decoder layer ``index``, as a causal language model calls it."""
    return f"model.layers.{index}.self_attn"


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
        f"model type {shown(model_type)} of {fields.name} is not supported yet{reason}; known model types: "
        f"{', '.join(known)}"
    )


def ranges(indices: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
