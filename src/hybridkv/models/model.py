"""The facts of a model that the planner, the runner and the replay need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from hybridkv.arguments import Count, check_types, text
from hybridkv.errors import ConfigError
from hybridkv.specs import Keeps, KVCacheSpec

MOST_LAYERS: Final = 4096
"""Layers of one model: 20 times the deepest known model. Reading and planning take about 0.1 ms per layer."""


ASSUMED: Final = "assumed"
"""The ``source`` of a fact that no field states."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One entry in the cache. A decoder layer with attention and a recurrent state gives two Layers with one index.

    Attributes:
        name: name of the entry, unique in its model.
        spec: cache contents on one rank.
        index: index of the decoder layer.
        is_draft: whether a draft model owns the layer. Layers of a draft model may share groups with other layers.
        read_by: names of further layers that read this entry and keep nothing of their own. They take no bytes.
        top_states: most states that a query reads, as an indexer chooses them; 0 for all that its mask shows. For cost
            models.
        index_heads: query heads on one rank of the indexer that reads the entry; 0 where attention reads it.
            For cost models.
    """

    name: Annotated[str, text]
    spec: KVCacheSpec
    index: int
    is_draft: bool = False
    read_by: tuple[Annotated[str, text], ...] = ()
    top_states: Count = 0
    index_heads: Count = 0

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def pools(self) -> int:
        """Tokens of a state that a compressor makes of the entry's rows, in a window; 0 where attention reads them."""
        return max(self.spec.pooled, default=0) if self.spec.keeps is Keeps.WINDOW else 0


@dataclass(frozen=True, slots=True)
class ReadFact:
    """One fact that a plan's bytes depend on, and its source.

    Attributes:
        what: the fact, in words.
        value: its value as text.
        field: field of the config; for an assumption, the reason.
        source: the config, the default of its class, the caller, or an assumption.
    """

    what: str
    value: str
    field: str
    source: str

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its config describes it. Specs are for one of ``tp`` ranks.

    Attributes:
        name: known name, or the name in the config.
        model_type: ``model_type`` of the text config.
        layers: entries in the cache.
        max_model_len: most tokens that the config allows; ``None`` where it sets no limit.
        vocab_size: tokens in the vocabulary.
        dtype: dtype of keys and values.
        parameters: weights of the whole model without multi-token prediction modules; 0 where they were not counted.
        active_parameters: weights that one token is multiplied with: all but the input embedding (a look-up) and the
            routed experts that the token does not choose. A forward pass of one token costs about
            ``2 * active_parameters`` floating point operations and its attention. Only cost models use it.
        block_size: tokens per block.
        tp: tensor parallel ranks.
        max_encoder_tokens: most encoder tokens of an encoder-decoder model; 0 without an encoder.
        num_speculative_tokens: drafts per step that the recurrent layers have room for.
        hidden_size: elements of a token between layers; 0 where the config does not say. For cost models.
        query_heads: query heads of an attention layer in the whole model; 0 where unknown. For cost models.
        dtype_from: the field of a quantized checkpoint that sets ``dtype``; ``None`` if the caller or the weights set
            it.
        read_from: the source of each value, and the assumptions.
        num_layers: decoder layers, also those that keep nothing; 0 for as many as keep something.
        weight_bytes: bytes of the counted ``parameters`` in the checkpoint; 0 where unknown.
    """

    name: str  # a config may call itself anything: what is printed is escaped
    model_type: Annotated[str, text]
    layers: tuple[Layer, ...]
    max_model_len: int | None
    vocab_size: int
    dtype: Annotated[str, text]
    parameters: int
    active_parameters: int
    block_size: int
    tp: int = 1
    max_encoder_tokens: int = 0
    num_speculative_tokens: int = 0
    hidden_size: int = 0
    query_heads: int = 0
    dtype_from: Annotated[str, text] | None = None
    read_from: tuple[ReadFact, ...] = ()
    num_layers: int = 0
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if not self.layers:
            raise ConfigError(f"{self.name} has no layer that keeps anything in the cache")
        if len(self.layers) > 2 * MOST_LAYERS:  # a decoder layer may keep two things
            raise ConfigError(f"{self.name} has {len(self.layers)} layers: at most {2 * MOST_LAYERS} can be planned")
        if len({layer.name for layer in self.layers}) != len(self.layers):
            raise ConfigError(f"{self.name} has two layers of the same name: give each its own")
        owners = {layer.name for layer in self.layers}
        for reader, times in Counter(name for layer in self.layers for name in layer.read_by).items():
            if reader in owners:
                raise ConfigError(f"layer {reader!r} keeps its own entry, so it cannot read another layer's: drop one")
            if times > 1:
                raise ConfigError(f"layer {reader!r} reads {times} entries: only one owner may name it in read_by")

    @property
    def depth(self) -> int:
        """Decoder layers of the model, whether they keep one thing, two things or nothing."""
        return self.num_layers or len({layer.index for layer in self.layers})

    @property
    def assumptions(self) -> tuple[ReadFact, ...]:
        """The facts of ``read_from`` that no field states."""
        return tuple(fact for fact in self.read_from if fact.source == ASSUMED)

    @property
    def kv_bytes_per_token(self) -> Fraction:
        """Bytes per token on one rank while its request lives: full attention, MLA and sink attention."""
        return self._token_bytes(Keeps.TOKENS)

    @property
    def window_bytes_per_token(self) -> Fraction:
        """Further bytes per token while it is in the window or chunk of windowed and chunked layers."""
        return self._token_bytes(Keeps.WINDOW)

    @property
    def encoder_bytes_per_token(self) -> Fraction:
        """Bytes per token of the encoder's input in cross attention."""
        return self._token_bytes(Keeps.ENCODER)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all layers on one rank."""
        return sum(one.spec.content_bytes for one in self.layers if one.spec.keeps is Keeps.STATE)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the rings of raw keys of all layers on one rank, for one request."""
        return sum(one.spec.content_bytes for one in self.layers if one.spec.keeps is Keeps.RING)

    def _token_bytes(self, keeps: Keeps) -> Fraction:
        specs = [one.spec for one in self.layers if one.spec.keeps is keeps]
        return sum((Fraction(spec.content_bytes, spec.block_size) for spec in specs), Fraction())
