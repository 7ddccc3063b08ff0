"""Code that the readers of configs share: attention heads, parts of layers, tensor parallel, counts of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, Protocol, Self, TypeAlias

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer, ReadFact
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"
SUPPORTED_LAYERS: Final = (FULL, SLIDING, CHUNKED)
"""Attention layers of a decoder."""

MOST_NAMED: Final = 1024
"""Sizes that an error message lists at most. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options that size layers.

    Attributes:
        block_size: tokens per block.
        tp: tensor parallel ranks.
        dtype: canonical name of the dtype of keys and values.
        backend: the engine with this layout of states, ``vllm`` or ``transformers``.
        state_dtype: dtype of recurrent states, where a config names no other.
        num_speculative_tokens: drafts per step that states have room for.
        every_state: dtype of all states, whatever a config names; ``None`` to follow the config.
    """

    block_size: int
    tp: int
    dtype: str
    backend: str
    state_dtype: str
    num_speculative_tokens: int = 0
    every_state: str | None = None


# -- weights


@dataclass(frozen=True, slots=True)
class Weights:
    """Counts of weights.

    Attributes:
        every: weights that the model holds.
        active: weights that one token uses. Fewer than ``every`` where a token chooses experts.
        routed: the part of ``every`` in matrices of routed experts.
        embedded: the part of ``every`` in embeddings and the output head.
    """

    every: int = 0
    active: int = 0
    routed: int = 0
    embedded: int = 0

    @classmethod
    def dense(cls, count: int) -> Self:
        """Return weights that every token uses."""
        return cls(count, count)

    def __add__(self, other: Weights) -> Weights:
        return Weights(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Weights:
        return Weights(*(one * times for one in astuple(self)))


Counting: TypeAlias = Callable[[], Weights]
"""A function that counts weights. Raises MissingFieldError for a field that only the weights need."""


def linear(inputs: int, outputs: int, *, bias: bool = False) -> int:
    """Count the weights of a projection."""
    return inputs * outputs + (outputs if bias else 0)


def mlp(hidden: int, inner: int, *, bias: bool = False, gated: bool = True) -> int:
    """Count the weights of an MLP: up and down projections, and the gate where ``gated``."""
    return (2 if gated else 1) * linear(hidden, inner, bias=bias) + linear(inner, hidden, bias=bias)


def experts(expert: int, count: int, chosen: int, *, biases: int = 0) -> Weights:
    """Count ``count`` experts of ``expert`` weights in matrices and ``biases``; a token uses ``chosen`` of them."""
    each, used = expert + biases, min(chosen, count)
    return Weights(each * count, each * used, routed=expert * count)


def language_model(layers: Weights, *, embedding: int, tied: bool) -> Weights:
    """Add to ``layers`` an input embedding, a look-up, and an output head, which shares its weights where ``tied``."""
    held = embedding if tied else 2 * embedding
    return layers + Weights(held, embedding, embedded=held)


# -- families


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """The result of reading a config by its family.

    Attributes:
        layers: layers of the cache.
        weights: counts the weights of the whole model; Weights() where the count is unknown.
        max_encoder_tokens: as in Model.
        rope_scales: whether a rotary scaling of the config extends ``max_position_embeddings``.
        positions: field with the number of positions; ``None`` for the usual ones.
        fields: the config with the defaults of its class; ``None`` where the config is enough.
        read_from: as in Model.
        num_layers: layers of the model; ``None`` to follow the config.
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
    """A reader of the text config of some model types."""

    def __call__(self, fields: Fields, options: ReadOptions) -> FamilyFacts:
        """Return layers and parameters. Raises ConfigError and UnsupportedModelError."""


class NotingFamily(Protocol):
    """A reader that notes the source of each value. ``given`` names the fields that the caller set."""

    def __call__(self, fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
        """Return the layers and the source of each value. Raises ConfigError and UnsupportedModelError."""


@dataclass(frozen=True, slots=True)
class Part:
    """An entry of a decoder layer in the cache.

    Attributes:
        module: name of the module in its layer.
        spec: cache contents of the module.
        weights: weights of the module, where it has its own.
    """

    module: str
    spec: KVCacheSpec
    weights: int = 0


def layers_of(
    types: Sequence[str], parts: Mapping[str, Sequence[Part]], name: str, *, path: str = "model.layers"
) -> tuple[Layer, ...]:
    """Return layers of ``types``, each with the parts of its type.

    Args:
        types: type of each layer.
        parts: parts by type. Raises UnsupportedModelError for a type without an entry.
        name: name of the model.
        path: path of the list of layers in the model.
    """
    refuse_layer_types(types, name, tuple(parts))
    return tuple(
        Layer(f"{path}.{i}.{part.module}", part.spec, i) for i, kind in enumerate(types) for part in parts[kind]
    )


def refuse_layer_types(types: Sequence[str], name: str, supported: Sequence[str] = SUPPORTED_LAYERS) -> None:
    """Raise UnsupportedModelError with every layer that has a type outside ``supported``."""
    wrong: dict[str, list[int]] = defaultdict(list)
    for index, kind in enumerate(types):
        if kind not in supported:
            wrong[kind].append(index)
    if wrong:
        named = "; ".join(f"{ranges(indices)} ({kind})" for kind, indices in wrong.items())
        raise UnsupportedModelError(
            f"{name} has layers of types that its family does not have: layers {named}; "
            f"supported: {', '.join(supported)}"
        )


def ranges(indices: Sequence[int]) -> str:
    """Return indices as text: 0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# -- attention


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads, KV heads and the width of a head, of the whole model."""

    heads: int
    kv_heads: int
    head_dim: int

    def weights(self, hidden: int, *, bias: bool = False, qk_norm: bool = False, gate: bool = False) -> int:
        """Count the projections Q, K, V and O. ``qk_norm``: a norm over each head. ``gate``: Q also makes a gate."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = linear(hidden, (2 if gate else 1) * q, bias=bias) + 2 * linear(hidden, kv, bias=bias)
        return projections + linear(q, hidden, bias=bias) + (2 * self.head_dim if qk_norm else 0)

    def full(self, fields: Fields, options: ReadOptions) -> FullAttentionSpec:
        """Return the spec of a layer that keeps every token. Raises ConfigError for a tp that does not fit."""
        return FullAttentionSpec(**self._sizes(fields, options))

    def sliding(self, fields: Fields, options: ReadOptions, window: int) -> SlidingWindowSpec:
        """Return the spec of a layer that keeps the last ``window`` tokens."""
        return SlidingWindowSpec(**self._sizes(fields, options), sliding_window=window)

    def chunked(self, fields: Fields, options: ReadOptions, chunk: int) -> ChunkedLocalAttentionSpec:
        """Return the spec of a layer that keeps the current chunk of ``chunk`` tokens."""
        return ChunkedLocalAttentionSpec(**self._sizes(fields, options), attention_chunk_size=chunk)

    def cross(self, fields: Fields, options: ReadOptions) -> CrossAttentionSpec:
        """Return the spec of a layer that keeps the encoder's tokens."""
        return CrossAttentionSpec(**self._sizes(fields, options))

    def of_type(
        self, kind: str, fields: Fields, options: ReadOptions, *, window: int | None = None
    ) -> FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec:
        """Return the spec of a layer of type ``kind``, one of SUPPORTED_LAYERS.

        ``window`` is the window of a windowed layer; ``None`` for the config's ``sliding_window``.
        """
        if kind == SLIDING:
            return self.sliding(fields, options, fields.integer("sliding_window") if window is None else window)
        if kind == CHUNKED:
            return self.chunked(fields, options, fields.integer("attention_chunk_size"))
        return self.full(fields, options)

    def _sizes(self, fields: Fields, options: ReadOptions) -> dict[str, Any]:
        kv_heads = kv_heads_per_rank(self.heads, self.kv_heads, options.tp, fields.name)
        sizes = {"block_size": options.block_size, "num_kv_heads": kv_heads, "head_size": self.head_dim}
        return {**sizes, "dtype": options.dtype}


def read_heads(fields: Fields, *, kv_heads: int | None = None, head_dim: int | None = None) -> Heads:
    """Return the heads from ``num_attention_heads``, ``num_key_value_heads`` and ``head_dim``.

    ``kv_heads`` and ``head_dim`` are defaults for missing fields. Without ``head_dim`` a head has ``hidden_size /
    num_attention_heads`` elements; raises ConfigError where that is not an integer.
    """
    heads = fields.integer("num_attention_heads")
    width = fields.optional("head_dim", head_dim)
    if width is None:
        hidden = fields.integer("hidden_size")
        if hidden % heads:
            raise fields.fail(
                f"{heads} attention heads do not divide hidden_size {hidden}: add head_dim or correct one of them"
            )
        width = hidden // heads
    return Heads(heads, fields.optional("num_key_value_heads", kv_heads) or heads, width)


def mla_spec(fields: Fields, options: ReadOptions, heads: int) -> MLAAttentionSpec:
    """Return the spec of MLA: the latent and its rotary part, whole on every rank.

    Reads ``kv_lora_rank`` and ``qk_rope_head_dim``. Raises ConfigError for a tp that does not divide ``heads``.
    """
    # the latent is not split, but the heads that read it are
    kv_heads_per_rank(heads, heads, options.tp, fields.name)
    return MLAAttentionSpec(
        block_size=options.block_size,
        head_size=fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"),
        dtype=options.dtype,
    )


def mla_weights(fields: Fields, heads: int) -> int:
    """Count the weights of one MLA: queries, the latent's two projections with their norm, and the output."""
    hidden, latent, rope = (fields.integer(key) for key in ("hidden_size", "kv_lora_rank", "qk_rope_head_dim"))
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    rank, queries = fields.optional("q_lora_rank"), heads * (nope + rope)
    query = hidden * queries if rank is None else (hidden + 1 + queries) * rank
    keys = hidden * (latent + rope) + latent + latent * heads * (nope + value)
    bias = (rank or 0) + latent + rope + hidden if fields.flag("attention_bias") else 0
    return query + keys + heads * value * hidden + bias


def kv_heads_per_rank(heads: int, kv_heads: int, tp: int, name: str) -> int:
    """Return the KV heads on one rank: ``kv_heads / tp``, and at least one (ranks then hold copies).

    As in vLLM, tp must divide the attention heads, and either tp or the KV heads must divide the other. Raises
    ConfigError with the sizes that work, at most MOST_NAMED.
    """
    if heads % kv_heads:
        raise ConfigError(
            f"config of {name}: {heads} attention heads cannot share {kv_heads} KV heads evenly: "
            "num_key_value_heads must divide num_attention_heads"
        )
    if not _fits(heads, kv_heads, tp):
        valid = ", ".join(str(one) for one in range(1, min(heads, MOST_NAMED) + 1) if _fits(heads, kv_heads, one))
        raise ConfigError(
            f"tp={tp} does not divide the {heads} attention heads and {kv_heads} KV heads of {name}: use one of {valid}"
        )
    return max(1, kv_heads // tp)


def _fits(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def per_rank(count: int, tp: int, what: str, name: str) -> int:
    """Return ``count / tp``. Raises ConfigError with the sizes that work where it is not an integer."""
    if count % tp:
        valid = ", ".join(str(one) for one in range(1, min(count, MOST_NAMED) + 1) if count % one == 0)
        raise ConfigError(f"tp={tp} does not divide the {count} {what} of {name}: use one of {valid}")
    return count // tp
