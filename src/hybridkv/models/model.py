"""What the planner, the runner and the replay need to know of a model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Final

from hybridkv.arguments import check_types, text
from hybridkv.errors import ConfigError
from hybridkv.specs import Keeps, KVCacheSpec

MOST_LAYERS: Final = 4096
"""Of one model: 20 times the deepest there is. Reading and planning take about 0.1 ms a layer."""


ASSUMED: Final = "assumed"
"""The source of a fact that nobody said."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One entry in the cache: its name, its spec on one rank, and the index of the decoder layer it is part of.

    A decoder layer that keeps two things (attention and a recurrent state) gives two Layers with one index.
    """

    name: Annotated[str, text]
    spec: KVCacheSpec
    index: int

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, slots=True)
class ReadFact:
    """One thing that a plan's bytes depend on, and what says it.

    what: in words. value: as text. field: of the config; of an assumption, the reason. source: the config, the default
    of its class, the caller, or an assumption.
    """

    what: str
    value: str
    field: str
    source: str

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its config describes it; specs are those of one of ``tp`` ranks.

    name: a known name, or what the config calls itself. model_type: the text config's.
    max_model_len: most tokens that the config allows, None where it sets no limit.
    dtype: what the cache holds. dtype_from: what of a quantized checkpoint says so; None where the dtype was asked for
    or is that of the weights. block_size: tokens. tp: tensor parallel ranks.
    max_encoder_tokens: most tokens that the encoder of an encoder-decoder model hands over, 0 without one.
    num_speculative_tokens: drafts a step that the recurrent layers have room for.
    read_from: what was read from where and what was assumed.
    parameters: weights of the whole model, multi-token prediction modules left out; 0 where nobody counted them.
    weight_bytes: what the checkpoint takes, as far as ``parameters`` counts it; 0 where that is not known.
    active_parameters: the weights that one token is multiplied with: all but the input embedding (a
    look-up) and the routed experts it does not choose. A forward of one token costs about
    ``2 * active_parameters`` floating point operations besides attention; only cost models use it.
    hidden_size: elements of what layers hand on for a token, 0 where the config does not say; for cost models, too.
    query_heads: of an attention layer of the whole model, 0 where the config does not say; for cost models, too.
    num_layers: decoder layers, whatever they keep; 0 for as many as keep something.
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
            raise ConfigError(f"{self.name} has {len(self.layers)} layers: at most {2 * MOST_LAYERS} are planned")
        if len({layer.name for layer in self.layers}) != len(self.layers):
            raise ConfigError(f"{self.name} has two layers of the same name: give each its own")

    @property
    def depth(self) -> int:
        """Decoder layers of the model: one that keeps two things counts once, one that keeps nothing counts, too."""
        return self.num_layers or len({layer.index for layer in self.layers})

    @property
    def assumptions(self) -> tuple[ReadFact, ...]:
        """What of ``read_from`` nobody said."""
        return tuple(fact for fact in self.read_from if fact.source == ASSUMED)

    @property
    def kv_bytes_per_token(self) -> Fraction:
        """Bytes that one token takes on one rank as long as its request lives: full attention, MLA and sinks."""
        return self._token_bytes(Keeps.TOKENS)

    @property
    def window_bytes_per_token(self) -> Fraction:
        """Bytes that one token takes besides while it is in the window or chunk of the layers that have one."""
        return self._token_bytes(Keeps.WINDOW)

    @property
    def encoder_bytes_per_token(self) -> Fraction:
        """Bytes that one token of the encoder's input takes in cross attention."""
        return self._token_bytes(Keeps.ENCODER)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states after one token, of all layers of one rank."""
        return sum(one.spec.content_bytes for one in self.layers if one.spec.keeps is Keeps.STATE)

    def _token_bytes(self, keeps: Keeps) -> Fraction:
        specs = [one.spec for one in self.layers if one.spec.keeps is keeps]
        return sum((Fraction(spec.content_bytes, spec.block_size) for spec in specs), Fraction())
