"""Gemma 2 and 3, gpt-oss, Llama 4: layers with a window or chunk between layers of full attention.

Layer types and defaults of missing fields are those of transformers' config classes (5.19).
gpt-oss's sinks are one learned logit a head, not tokens: they take no memory in the cache.
"""

from __future__ import annotations

from functools import partial

from hybridkv.models.attention import Heads, read_heads, refuse_layer_types
from hybridkv.models.families import Counting, FamilyFacts, ReadOptions, layer_name
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer
from hybridkv.models.weights import Weights, experts, gated_mlp, language_model


def gemma2(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Every second layer is windowed, the first one too."""
    count = fields.layers("num_hidden_layers", 26)
    types = fields.layer_types("layer_types", count, _pattern(count, "sliding_attention", 2))
    heads = read_heads(fields, kv_heads=4, head_dim=256)
    window = fields.integer("sliding_window", 4096)
    return _gemma(fields, _layers(types, heads, fields, options, window), heads, window_norms=False)


def gemma3(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Every ``sliding_window_pattern``-th layer (6) is full attention. Rotary scaling does not lengthen positions."""
    count = fields.layers("num_hidden_layers", 26)
    pattern = _pattern(count, "sliding_attention", fields.integer("sliding_window_pattern", 6))
    types = fields.layer_types("layer_types", count, pattern)
    heads = read_heads(fields, kv_heads=4, head_dim=256)
    window = fields.integer("sliding_window", 4096)
    if fields.flag("use_bidirectional_attention"):
        window = window // 2 + 1
    return _gemma(fields, _layers(types, heads, fields, options, window), heads, window_norms=True)


def gpt_oss(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Every second layer is windowed, the first one too; every layer is a mixture of experts with biases."""
    count = fields.layers("num_hidden_layers")
    types = fields.layer_types("layer_types", count, _pattern(count, "sliding_attention", 2))
    heads = read_heads(fields, kv_heads=8, head_dim=64)
    layers = _layers(types, heads, fields, options, fields.integer("sliding_window", 128))

    def weights() -> Weights:
        hidden = fields.integer("hidden_size")
        inner, total = fields.integer("intermediate_size"), fields.integer("num_local_experts")
        attention = heads.weights(hidden, bias=fields.flag("attention_bias", default=True)) + heads.heads
        layer = Weights.dense(attention + 2 * hidden + (hidden + 1) * total)
        chosen = fields.integer("num_experts_per_tok", 4)
        layer += experts(gated_mlp(hidden, inner), total, chosen, biases=2 * inner + hidden)
        return layer * count + Weights.dense(hidden)

    return _decoder(fields, layers, weights)


def llama4(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Layers with rotary positions are chunked; every ``no_rope_layer_interval``-th (4) has none and is full."""
    count = fields.layers("num_hidden_layers")
    rotary = fields.integers("no_rope_layers") or tuple(
        int((i + 1) % fields.integer("no_rope_layer_interval", 4) != 0) for i in range(count)
    )
    if len(rotary) < count:
        raise fields.fail(f"no_rope_layers has {len(rotary)} entries for {count} layers: correct one of them")
    types = fields.layer_types(
        "layer_types", count, ["chunked_attention" if one else "full_attention" for one in rotary[:count]]
    )
    refuse_layer_types(types, fields.name)
    heads = read_heads(fields, kv_heads=8, head_dim=128)
    chunk = fields.optional("attention_chunk_size", 8192)
    layers = tuple(
        Layer(
            layer_name(i),
            heads.full(fields, options)
            if kind == "full_attention" or chunk is None
            else heads.chunked(fields, options, chunk),
            i,
        )
        for i, kind in enumerate(types)
    )
    return _decoder(fields, layers, partial(_llama4_weights, fields, heads, count))


def _llama4_weights(fields: Fields, heads: Heads, count: int) -> Weights:
    hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    step = fields.integer("interleave_moe_layer_step", 1)
    given = fields.integers("moe_layers")
    sparse = len(range(step - 1, count, step)) if given is None else len(given)
    total = fields.integer("num_local_experts", 16)
    mixture = Weights.dense(hidden * total + gated_mlp(hidden, inner))
    mixture += experts(gated_mlp(hidden, inner), total, fields.integer("num_experts_per_tok", 1))
    dense = gated_mlp(hidden, fields.integer("intermediate_size_mlp", 16384))
    attention = heads.weights(hidden, bias=fields.flag("attention_bias")) + 2 * hidden
    return mixture * sparse + Weights.dense(count * attention + (count - sparse) * dense + hidden)


def _pattern(count: int, other: str, period: int) -> list[str]:
    """Every ``period``-th layer is full attention."""
    return [other if (i + 1) % period else "full_attention" for i in range(count)]


def _layers(
    types: tuple[str, ...], heads: Heads, fields: Fields, options: ReadOptions, window: int
) -> tuple[Layer, ...]:
    refuse_layer_types(types, fields.name)
    return tuple(
        Layer(layer_name(i), heads.of_type(kind, fields, options, window=window), i) for i, kind in enumerate(types)
    )


def _gemma(fields: Fields, layers: tuple[Layer, ...], heads: Heads, *, window_norms: bool) -> FamilyFacts:
    def weights() -> Weights:
        hidden = fields.integer("hidden_size", 2304)
        attention = heads.weights(hidden, bias=fields.flag("attention_bias"), qk_norm=window_norms)
        layer = attention + gated_mlp(hidden, fields.integer("intermediate_size", 9216)) + 4 * hidden
        return Weights.dense(len(layers) * layer + hidden)

    return _decoder(fields, layers, weights, tied=True, rope_scales=not window_norms)


def _decoder(
    fields: Fields, layers: tuple[Layer, ...], own: Counting, *, tied: bool = False, rope_scales: bool = True
) -> FamilyFacts:
    """own: the weights of everything but the embeddings."""

    def weights() -> Weights:
        embedding = fields.integer("vocab_size") * fields.integer("hidden_size", 2304)
        return language_model(own(), embedding=embedding, tied=fields.flag("tie_word_embeddings", default=tied))

    return FamilyFacts(layers, weights, rope_scales=rope_scales)
