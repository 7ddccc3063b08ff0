"""Attention layers of a decoder: heads, specs by layer type, weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.errors import UnsupportedModelError
from hybridkv.models.families import SUPPORTED_LAYERS, ReadOptions, ranges
from hybridkv.models.fields import Fields
from hybridkv.models.parallel import kv_heads_per_rank
from hybridkv.models.weights import linear
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads, KV heads and the width of a head, of the whole model."""

    heads: int
    kv_heads: int
    head_dim: int

    def weights(self, hidden: int, *, bias: bool = False, qk_norm: bool = False, gate: bool = False) -> int:
        """Projections Q, K, V and O. qk_norm: over each head. gate: the query projection also makes a gate."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = linear(hidden, (2 if gate else 1) * q, bias=bias) + 2 * linear(hidden, kv, bias=bias)
        return projections + linear(q, hidden, bias=bias) + (2 * self.head_dim if qk_norm else 0)

    def full(self, fields: Fields, options: ReadOptions) -> FullAttentionSpec:
        """A layer that keeps every token. ConfigError for a tp that does not fit the heads."""
        return FullAttentionSpec(
            block_size=options.block_size,
            num_kv_heads=self._per_rank(fields, options),
            head_size=self.head_dim,
            dtype=options.dtype,
        )

    def sliding(self, fields: Fields, options: ReadOptions, window: int) -> SlidingWindowSpec:
        """A layer that keeps the last ``window`` tokens."""
        return SlidingWindowSpec(
            block_size=options.block_size,
            num_kv_heads=self._per_rank(fields, options),
            head_size=self.head_dim,
            dtype=options.dtype,
            sliding_window=window,
        )

    def chunked(self, fields: Fields, options: ReadOptions, chunk: int) -> ChunkedLocalAttentionSpec:
        """A layer that keeps the present chunk."""
        return ChunkedLocalAttentionSpec(
            block_size=options.block_size,
            num_kv_heads=self._per_rank(fields, options),
            head_size=self.head_dim,
            dtype=options.dtype,
            attention_chunk_size=chunk,
        )

    def cross(self, fields: Fields, options: ReadOptions) -> CrossAttentionSpec:
        """A layer that keeps the encoder's tokens."""
        return CrossAttentionSpec(
            block_size=options.block_size,
            num_kv_heads=self._per_rank(fields, options),
            head_size=self.head_dim,
            dtype=options.dtype,
        )

    def of_type(self, kind: str, fields: Fields, options: ReadOptions, *, window: int | None = None) -> AttentionSpec:
        """The spec of a layer of type ``kind``, one of SUPPORTED_LAYERS.

        window: of a windowed layer; None for the config's ``sliding_window``.
        """
        if kind == "sliding_attention":
            return self.sliding(fields, options, fields.integer("sliding_window") if window is None else window)
        if kind == "chunked_attention":
            return self.chunked(fields, options, fields.integer("attention_chunk_size"))
        return self.full(fields, options)

    def _per_rank(self, fields: Fields, options: ReadOptions) -> int:
        return kv_heads_per_rank(self.heads, self.kv_heads, options.tp, fields.name)


def read_heads(fields: Fields, *, kv_heads: int | None = None, head_dim: int | None = None) -> Heads:
    """Heads from the usual fields; kv_heads, head_dim: defaults of fields that a config leaves out.

    Raises ConfigError where the width of a head cannot be told.
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


def refuse_layer_types(types: Sequence[str], name: str, supported: Sequence[str] = SUPPORTED_LAYERS) -> None:
    """Raise UnsupportedModelError naming every layer whose type is not one of ``supported``."""
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
