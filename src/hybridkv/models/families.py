"""Which model types are read, by which family, and what keeps the others out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from hybridkv.errors import UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer, ReadFact
from hybridkv.models.weights import Weights
from hybridkv.units import shown

SUPPORTED_LAYERS: Final = ("full_attention", "sliding_attention", "chunked_attention")
"""Attention layers of a decoder."""

NOT_YET: Final = {
    "blt": "bytes, patches and the hidden states of three models",
    "cpmant": "the tokens of a prompt of its own before every request's",
    "deepseek_v4": "compressed keys and values, and the tokens that are not compressed yet",
    "gemma4_assistant": "nothing: they read keys and values of the model that they draft for",
    "gemma4_unified_assistant": "nothing: they read keys and values of the model that they draft for",
    "openai-gpt": "nothing: every token is computed anew",
    "qwen4_exp_text": "an indexer's keys of which some are compressed",
    "reformer": "buckets of hidden states",
    "xlm": "nothing: every token is computed anew",
    "xlnet": "hidden states of the last tokens",
}
"""Model types whose layers keep something that cannot be planned yet."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How layers are sized. block_size: tokens. dtype: of keys and values, canonical name.

    backend: whose state layout. state_dtype: of recurrent states, where a config names no other.
    num_speculative_tokens: drafts a step that states have room for. every_state: dtype of all states, whatever a config
    says; None for what it says.
    """

    block_size: int
    tp: int
    dtype: str
    backend: str
    state_dtype: str
    num_speculative_tokens: int = 0
    every_state: str | None = None


Counting: TypeAlias = Callable[[], Weights]
"""Counts weights when called. Raises MissingFieldError for a field that only the weights need."""


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What a family makes of a config.

    weights: counts those of the whole model; Weights() where nobody can. max_encoder_tokens: as in Model.
    rope_scales: whether a rotary scaling of the config makes its positions more than ``max_position_embeddings``.
    positions: the field that says how many there are; None for the usual ones. fields: the config with the defaults of
    its class; None where the config is enough.
    read_from: as in Model. num_layers: of the model; None for what the config says.
    """

    layers: tuple[Layer, ...]
    weights: Counting
    max_encoder_tokens: int = 0
    rope_scales: bool = True
    positions: str | None = None
    fields: Fields | None = None
    read_from: tuple[ReadFact, ...] = ()
    num_layers: int | None = None


class Family(Protocol):
    """A family reads the text config of its model types."""

    def __call__(self, fields: Fields, options: ReadOptions) -> FamilyFacts:
        """Layers and parameters. Raises ConfigError and UnsupportedModelError."""


class NotingFamily(Protocol):
    """A family that notes what it read from where; given: fields that the caller said."""

    def __call__(self, fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
        """Layers, and what was read from where. Raises ConfigError and UnsupportedModelError."""


def layer_name(index: int) -> str:
    """The attention module of decoder layer ``index``, as a causal language model calls it."""
    return f"model.layers.{index}.self_attn"


def refuse_not_yet(model_type: str, name: str) -> None:
    """UnsupportedModelError for a model type whose layers keep what cannot be planned."""
    if model_type in NOT_YET:
        raise UnsupportedModelError(
            f"model type {shown(model_type)} of {name} is not supported yet: its layers keep {NOT_YET[model_type]}"
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
