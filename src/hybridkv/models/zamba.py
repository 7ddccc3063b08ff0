"""Zamba and Zamba2: Mamba in every layer, and shared attention blocks in front of some.

A hybrid layer keeps attention and a state under one index. The shared blocks work on twice the hidden size.
Source of defaults: transformers' config classes (5.19).
"""

from __future__ import annotations

from hybridkv.models.attention import Heads, refuse_layer_types
from hybridkv.models.families import Counting, FamilyFacts, ReadOptions
from hybridkv.models.fields import Fields
from hybridkv.models.mamba import dt_rank
from hybridkv.models.model import Layer
from hybridkv.models.states import Mamba1, Mamba2
from hybridkv.models.weights import Weights, gated_mlp, language_model

_TYPES = ("linear_attention", "hybrid")


def zamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Zamba: one shared block, the first hybrid layer is the third."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    period, offset = fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4, minimum=0)
    rest = ["hybrid" if i % period == offset else "linear_attention" for i in range(count - 3)]
    default = ["linear_attention", "linear_attention", "hybrid", *rest]
    types = fields.layer_types("layers_block_type", count, default)
    mixer = Mamba1(
        hidden=hidden,
        inner=fields.integer("mamba_expand", 2) * hidden,
        state=fields.integer("mamba_d_state", 16),
        kernel=fields.integer("mamba_d_conv", 4),
        dt_rank=dt_rank(fields, "mamba_dt_rank"),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias"),
        heads=fields.integer("n_mamba_heads", 2),
    )
    heads = _heads(fields, fields.optional("attention_head_dim"), default_kv_heads=16)
    layers = _layers(types, heads, mixer, fields, options, block="shared_transf")

    def shared() -> Weights:
        return Weights.dense(_shared_block(fields, heads, fields.integer("intermediate_size")))

    return _facts(fields, layers, types, mixer, shared)


def zamba2(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Zamba2: ``num_mem_blocks`` shared blocks in turn, with low-rank adapters of each hybrid layer's own."""
    types = fields.names("layers_block_type")
    if types is None:
        raise fields.fail("layers_block_type is missing: add it")
    types = fields.layer_types("layers_block_type", len(types), ())
    hidden, heads_count = fields.integer("hidden_size"), fields.integer("n_mamba_heads", 8)
    channels = fields.integer("mamba_expand", 2) * hidden
    mixer = Mamba2(
        hidden=hidden,
        heads=heads_count,
        head_dim=channels // heads_count,
        state=fields.integer("mamba_d_state", 64),
        kernel=fields.integer("mamba_d_conv", 4),
        groups=fields.integer("mamba_ngroups", 1),
        bias=fields.flag("add_bias_linear"),
    )
    heads = _heads(fields, None, default_kv_heads=None)
    layers = _layers(types, heads, mixer, fields, options, block="shared_transformer")

    def held() -> Weights:
        inner = fields.optional("intermediate_size") or 4 * hidden
        hybrid, blocks = types.count("hybrid"), fields.integer("num_mem_blocks", 1)
        bias = (2 * inner + hidden) if fields.flag("add_bias_linear") else 0
        shared = _shared_block(fields, heads, inner) + bias
        rank = fields.integer("adapter_rank", 128)
        adapters = rank * (hidden + 2 * inner)
        if fields.flag("use_shared_attention_adapter"):
            adapters += 3 * rank * (2 * hidden + heads.heads * heads.head_dim)
        # with fewer hybrid layers than blocks the last blocks are never built
        return Weights.dense(min(blocks, hybrid) * shared + hybrid * adapters)

    return _facts(fields, layers, types, mixer, held)


def _heads(fields: Fields, head_dim: int | None, *, default_kv_heads: int | None) -> Heads:
    count = fields.integer("num_attention_heads")
    width = head_dim or 2 * fields.integer("hidden_size") // count
    return Heads(count, fields.optional("num_key_value_heads", default_kv_heads) or count, width)


def _shared_block(fields: Fields, heads: Heads, inner: int) -> int:
    """Attention from twice the hidden size back to it, a gated MLP and two norms."""
    hidden = fields.integer("hidden_size")
    wide, q, kv = 2 * hidden, heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    return wide * (q + 2 * kv) + q * hidden + gated_mlp(hidden, inner) + wide + hidden


def _layers(
    types: tuple[str, ...], heads: Heads, mixer: Mamba1 | Mamba2, fields: Fields, options: ReadOptions, *, block: str
) -> tuple[Layer, ...]:
    refuse_layer_types(types, fields.name, _TYPES)
    full, state = heads.full(fields, options), mixer.spec(fields, options)
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        if kind == "hybrid":
            layers.append(Layer(f"model.layers.{i}.{block}.self_attn", full, i))
        inside = "mamba_decoder.mamba" if kind == "hybrid" else "mamba"
        layers.append(Layer(f"model.layers.{i}.{inside}", state, i))
    return tuple(layers)


def _facts(
    fields: Fields, layers: tuple[Layer, ...], types: tuple[str, ...], mixer: Mamba1 | Mamba2, shared: Counting
) -> FamilyFacts:
    """A norm and a mixer a layer, a projection behind every shared block, the last norm, the embeddings."""

    def weights() -> Weights:
        hidden = fields.integer("hidden_size")
        own = len(types) * (mixer.weights + hidden) + types.count("hybrid") * hidden * hidden + hidden
        embedding = fields.integer("vocab_size") * hidden
        tied = fields.flag("tie_word_embeddings", default=True)
        return language_model(shared() + Weights.dense(own), embedding=embedding, tied=tied)

    return FamilyFacts(layers, weights)
