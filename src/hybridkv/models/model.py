"""What the planner, the runner and the replay need to know of a model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from hybridkv.errors import ConfigError
from hybridkv.specs import KVCacheSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One entry in the cache: its name, its spec on one rank, and the index of the decoder layer it is part of.

    A decoder layer that keeps two things (attention and a recurrent state) gives two Layers with one index.
    """

    name: str
    spec: KVCacheSpec
    index: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its config describes it; specs are those of one of ``tp`` ranks.

    name: a known name, or what the config calls itself. model_type: the text config's.
    max_model_len: most tokens that the config allows, None where it sets no limit.
    dtype: what the cache holds. block_size: tokens. tp: tensor parallel ranks.
    parameters: weights of the whole model, multi-token prediction modules left out.
    active_parameters: the weights that one token is multiplied with: all but the input embedding (a
    look-up) and the routed experts it does not choose. A forward of one token costs about
    ``2 * active_parameters`` floating point operations besides attention; only cost models use it.
    """

    name: str
    model_type: str
    layers: tuple[Layer, ...]
    max_model_len: int | None
    vocab_size: int
    dtype: str
    parameters: int
    active_parameters: int
    block_size: int
    tp: int = 1

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"{self.name} has no layer that keeps anything in the cache")
        if len({layer.name for layer in self.layers}) != len(self.layers):
            raise ConfigError(f"{self.name} has two layers of the same name: give each its own")

    @property
    def kv_bytes_per_token(self) -> Fraction:
        """Bytes that one token takes in all layers of one rank; an integer for attention."""
        return sum((Fraction(one.spec.page_size_bytes, one.spec.block_size) for one in self.layers), Fraction())
