"""Llama, Mistral, Qwen2, Qwen3: dense decoders with grouped-query attention in every layer.

Defaults of missing fields are those of transformers' config classes (5.19).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hybridkv.models.families import FamilyFacts, ReadOptions, layer_name, refuse_layer_types
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer
from hybridkv.models.parallel import kv_heads_per_rank
from hybridkv.specs import FullAttentionSpec


@dataclass(frozen=True, slots=True)
class LlamaFamily:
    """What differs between the members.

    kv_heads, head_dim, sliding_window: defaults of fields that a config leaves out.
    window_switch: the window counts only with ``use_sliding_window``, from layer ``max_window_layers`` on.
    bias: of the attention's projections: none, always in Q, K and V, or in all where ``attention_bias`` says so.
    qk_norm: a norm over each head of Q and K.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    window_switch: bool = False
    bias: Literal["none", "qkv", "config"] = "config"
    qk_norm: bool = False

    def __call__(self, fields: Fields, options: ReadOptions) -> FamilyFacts:
        """Every layer as full attention. Raises ConfigError; UnsupportedModelError for a windowed layer."""
        count = fields.integer("num_hidden_layers")
        refuse_layer_types(self._layer_types(fields, count), fields.name)
        heads, kv_heads, head_dim = self._heads(fields)
        spec = FullAttentionSpec(
            block_size=options.block_size,
            num_kv_heads=kv_heads_per_rank(heads, kv_heads, options.tp, fields.name),
            head_size=head_dim,
            dtype=options.dtype,
        )
        layers = tuple(Layer(layer_name(i), spec, i) for i in range(count))
        per_layer = self._layer_parameters(fields, heads, kv_heads, head_dim)
        embedding = fields.integer("vocab_size") * fields.integer("hidden_size")
        active = count * per_layer + fields.integer("hidden_size") + embedding
        tied = fields.flag("tie_word_embeddings")
        return FamilyFacts(layers, active if tied else active + embedding, active)

    def _heads(self, fields: Fields) -> tuple[int, int, int]:
        """Attention heads, KV heads, width of a head."""
        heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        head_dim = fields.optional("head_dim", self.head_dim)
        if head_dim is None:
            if hidden % heads:
                raise fields.fail(
                    f"{heads} attention heads do not divide hidden_size {hidden}: add head_dim or correct one of them"
                )
            head_dim = hidden // heads
        return heads, fields.optional("num_key_value_heads", self.kv_heads) or heads, head_dim

    def _layer_types(self, fields: Fields, count: int) -> tuple[str, ...]:
        """The type of every layer; one sign of a window or chunk is enough to call a layer by it."""
        window = fields.optional("sliding_window", self.sliding_window)
        first = 0
        if self.window_switch:
            window = window if fields.flag("use_sliding_window") else None
            first = fields.integer("max_window_layers", 28, minimum=0)
        given = fields.names("layer_types")
        if given is not None and len(given) != count:
            raise fields.fail(f"layer_types has {len(given)} entries for {count} layers: correct one of them")
        if fields.optional("attention_chunk_size") is not None:
            return ("chunked_attention",) * count
        if given is not None and (window is None or self.window_switch):
            return given
        return tuple(
            "sliding_attention" if window is not None and i >= first else "full_attention" for i in range(count)
        )

    def _layer_parameters(self, fields: Fields, heads: int, kv_heads: int, head_dim: int) -> int:
        """Weights of one decoder layer: projections, gated MLP, norms and biases."""
        hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
        q, kv = heads * head_dim, kv_heads * head_dim
        weights = 2 * hidden * (q + kv) + 3 * hidden * inner + 2 * hidden
        if self.bias == "qkv":
            weights += q + 2 * kv
        elif self.bias == "config" and fields.flag("attention_bias"):
            weights += q + 2 * kv + hidden
        if fields.flag("mlp_bias"):
            weights += 2 * inner + hidden
        return weights + (2 * head_dim if self.qk_norm else 0)


LLAMA: Final = LlamaFamily()
MISTRAL: Final = LlamaFamily(kv_heads=8, sliding_window=4096, bias="none")
QWEN2: Final = LlamaFamily(kv_heads=32, sliding_window=4096, window_switch=True, bias="qkv")
QWEN3: Final = LlamaFamily(kv_heads=32, head_dim=128, sliding_window=4096, window_switch=True, qk_norm=True)
