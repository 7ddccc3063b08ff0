"""Llama, Mistral, Qwen2, Qwen3: dense decoders with grouped-query attention, windowed where the config says so.

Defaults of missing fields are those of transformers' config classes (5.19).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hybridkv.models.attention import Heads, read_heads, refuse_layer_types
from hybridkv.models.families import FamilyFacts, ReadOptions, layer_name
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer
from hybridkv.models.weights import Weights, gated_mlp, language_model


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
        """Every layer by its type. Raises ConfigError; UnsupportedModelError for a type that is not attention."""
        count = fields.layers("num_hidden_layers")
        types = self._layer_types(fields, count)
        refuse_layer_types(types, fields.name)
        heads = read_heads(fields, kv_heads=self.kv_heads, head_dim=self.head_dim)
        window = fields.optional("sliding_window", self.sliding_window)
        layers = tuple(
            Layer(layer_name(i), heads.of_type(kind, fields, options, window=window), i) for i, kind in enumerate(types)
        )

        def weights() -> Weights:
            hidden = fields.integer("hidden_size")
            own = Weights.dense(count * self._layer_parameters(fields, heads) + hidden)
            embedding = fields.integer("vocab_size") * hidden
            return language_model(own, embedding=embedding, tied=fields.flag("tie_word_embeddings"))

        return FamilyFacts(layers, weights)

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

    def _layer_parameters(self, fields: Fields, heads: Heads) -> int:
        """Weights of one decoder layer: projections, gated MLP, norms and biases."""
        hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
        bias = self.bias == "config" and fields.flag("attention_bias")
        weights = heads.weights(hidden, bias=bias, qk_norm=self.qk_norm)
        if self.bias == "qkv":
            weights += (heads.heads + 2 * heads.kv_heads) * heads.head_dim
        return weights + gated_mlp(hidden, inner, bias=fields.flag("mlp_bias")) + 2 * hidden


LLAMA: Final = LlamaFamily()
MISTRAL: Final = LlamaFamily(kv_heads=8, sliding_window=4096, bias="none")
QWEN2: Final = LlamaFamily(kv_heads=32, sliding_window=4096, window_switch=True, bias="qkv")
QWEN3: Final = LlamaFamily(kv_heads=32, head_dim=128, sliding_window=4096, window_switch=True, qk_norm=True)
