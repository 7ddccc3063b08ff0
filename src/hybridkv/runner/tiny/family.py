"""What a tiny model is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

HEADS: Final[Mapping[str, Any]] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
}
"""Grouped-query attention and a gated MLP."""


@dataclass(frozen=True, slots=True, eq=False)
class TinyFamily:
    """A transformers model type and the fields of its config that a tiny model sets."""

    model_type: str
    fields: Mapping[str, Any]
