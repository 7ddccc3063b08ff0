"""Bamba, Granite 4, Falcon-H1, Jamba, Nemotron-H: Mamba mixers with some attention.

Layer types and defaults of missing fields are those of transformers' config classes (5.19).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hybridkv.models.attention import Heads, read_heads, refuse_layer_types
from hybridkv.models.families import Counting, FamilyFacts, ReadOptions
from hybridkv.models.fields import Fields
from hybridkv.models.mamba import dt_rank
from hybridkv.models.model import Layer
from hybridkv.models.states import Mamba1, Mamba2
from hybridkv.models.weights import Weights, experts, gated_mlp, language_model, linear
from hybridkv.specs import KVCacheSpec

FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"
HYBRID_TYPES: Final = (FULL, LINEAR)
NEMOTRON_TYPES: Final = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def bamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Attention in the layers of ``attn_layer_indices``, Mamba-2 in the others."""
    count = fields.layers("num_hidden_layers")
    attention = set(fields.integers("attn_layer_indices") or ())
    types = [FULL if i in attention else LINEAR for i in range(count)]

    def rest() -> Weights:
        hidden = fields.integer("hidden_size")
        mlp = gated_mlp(hidden, fields.integer("intermediate_size"), bias=fields.flag("mlp_bias"))
        return Weights.dense(count * (mlp + 2 * hidden))

    return _decoder(fields, options, types, _mamba2(fields), rest)


def granite_hybrid(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Layers as ``layer_types`` says; every layer has a shared MLP and, with experts, a mixture besides."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    default = fields.layer_types("layers_block_type", count, [LINEAR] * count)
    types = fields.layer_types("layer_types", count, default)

    def rest() -> Weights:
        total = fields.integer("num_local_experts", 8, minimum=0)
        each = Weights.dense(gated_mlp(hidden, fields.integer("shared_intermediate_size", 1024)) + 2 * hidden)
        if total:
            expert = gated_mlp(hidden, fields.integer("intermediate_size"))
            each += Weights.dense(hidden * total) + experts(expert, total, fields.integer("num_experts_per_tok", 2))
        return each * count

    return _decoder(fields, options, types, _mamba2(fields), rest)


def falcon_h1(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Attention and Mamba-2 side by side in every layer: two entries in the cache under one index."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    inner = fields.optional("mamba_d_ssm", 1024) or fields.integer("mamba_expand", 2) * hidden
    mixer = _mamba2(fields, inner=inner)
    heads = read_heads(fields, kv_heads=8)
    full, state = heads.full(fields, options), mixer.spec(fields, options)
    layers = []
    for i in range(count):
        layers += [Layer(f"model.layers.{i}.self_attn", full, i), Layer(f"model.layers.{i}.mamba", state, i)]

    def weights() -> Weights:
        mlp = gated_mlp(hidden, fields.integer("intermediate_size"), bias=fields.flag("mlp_bias"))
        attention = heads.weights(hidden, bias=fields.flag("attention_bias"))
        return Weights.dense(count * (attention + mixer.weights + mlp + 2 * hidden))

    return facts_of(fields, tuple(layers), weights)


def jamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Attention every ``attn_layer_period`` layers, Mamba in the others; experts every ``expert_layer_period``."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    period, offset = fields.integer("attn_layer_period", 8), fields.integer("attn_layer_offset", 4, minimum=0)
    types = [FULL if i % period == offset else LINEAR for i in range(count)]
    mixer = Mamba1(
        hidden=hidden,
        inner=fields.integer("mamba_expand", 2) * hidden,
        state=fields.integer("mamba_d_state", 16),
        kernel=fields.integer("mamba_d_conv", 4),
        dt_rank=dt_rank(fields, "mamba_dt_rank"),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias"),
        norms=True,
    )

    def rest() -> Weights:
        total, mlp = fields.integer("num_experts", 16), gated_mlp(hidden, fields.integer("intermediate_size"))
        sparse = 0
        if total > 1:
            step, start = fields.integer("expert_layer_period", 2), fields.integer("expert_layer_offset", 1, minimum=0)
            sparse = sum(i % step == start for i in range(count))
        mixture = Weights.dense(hidden * total) + experts(mlp, total, fields.integer("num_experts_per_tok", 2))
        return mixture * sparse + Weights.dense((count - sparse) * mlp + count * 2 * hidden)

    return _decoder(fields, options, types, mixer, rest)


def nemotron_h(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """One thing a layer, as ``hybrid_override_pattern`` says: M Mamba-2, * attention, - MLP, E experts."""
    types = _nemotron_types(fields)
    hidden = fields.integer("hidden_size")
    mixer = Mamba2(
        hidden=hidden,
        heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        state=fields.integer("ssm_state_size", 128),
        kernel=fields.integer("mamba_d_conv", fields.integer("conv_kernel", 4)),
        groups=fields.integer("mamba_n_groups", fields.integer("n_groups", 8)),
        conv_bias=fields.flag("mamba_conv_bias", default=fields.flag("use_conv_bias", default=True)),
        bias=fields.flag("use_bias"),
    )
    heads = read_heads(fields, kv_heads=8, head_dim=fields.integer("attention_head_dim", 128))
    specs: dict[str, KVCacheSpec] = {FULL: heads.full(fields, options), LINEAR: mixer.spec(fields, options)}
    layers = tuple(Layer(f"model.layers.{i}.mixer", specs[kind], i) for i, kind in enumerate(types) if kind in specs)

    def weights() -> Weights:
        counted = Weights.dense(
            types.count(FULL) * heads.weights(hidden, bias=fields.flag("attention_bias"))
            + types.count(LINEAR) * mixer.weights
            + len(types) * hidden
        )
        if "mlp" in types:
            mlp = _up_down(hidden, fields.integer("intermediate_size"), bias=fields.flag("mlp_bias"))
            counted += Weights.dense(types.count("mlp") * mlp)
        if "moe" in types:
            counted += _nemotron_mixture(fields) * types.count("moe")
        return counted

    return replace(facts_of(fields, layers, weights), num_layers=len(types))


def _nemotron_types(fields: Fields) -> tuple[str, ...]:
    pattern = fields.text("hybrid_override_pattern")
    given = fields.names("layers_block_type") or fields.names("layer_types")
    if given is None and pattern is None:
        raise fields.fail("hybrid_override_pattern is missing: add it")
    if given is not None:
        types = fields.layer_types(
            "layers_block_type" if "layers_block_type" in fields else "layer_types", len(given), ()
        )
    else:
        types = fields.of_layers("hybrid_override_pattern", [NEMOTRON_TYPES.get(one, one) for one in pattern or ""])
    refuse_layer_types(types, fields.name, tuple(NEMOTRON_TYPES.values()))
    return types


def _nemotron_mixture(fields: Fields) -> Weights:
    """Experts of two projections, in a narrower latent space where the config has one, and a shared expert."""
    hidden, total = fields.integer("hidden_size"), fields.integer("n_routed_experts", 8)
    latent = fields.optional("moe_latent_size")
    shared = fields.integer("n_shared_experts", 1) and fields.integer("moe_shared_expert_intermediate_size", 7688)
    bias = fields.flag("mlp_bias")
    expert = 2 * (latent or hidden) * fields.integer("moe_intermediate_size", 7688)
    always = hidden * total + _up_down(hidden, shared, bias=bias) + (2 * hidden * latent if latent else 0)
    return Weights.dense(always) + experts(expert, total, fields.integer("num_experts_per_tok", 2))


def _up_down(hidden: int, inner: int, *, bias: bool) -> int:
    return linear(hidden, inner, bias=bias) + linear(inner, hidden, bias=bias)


def _mamba2(fields: Fields, *, inner: int | None = None) -> Mamba2:
    """The fields that Bamba, Granite and Falcon-H1 share; inner: channels, where not ``mamba_expand`` x hidden."""
    hidden, falcon = fields.integer("hidden_size"), inner is not None
    channels = fields.integer("mamba_expand", 2) * hidden if inner is None else inner
    heads = fields.integer("mamba_n_heads", 128)
    automatic = fields.values.get("mamba_d_head", "auto") in ("auto", None)
    return Mamba2(
        hidden=hidden,
        heads=heads,
        head_dim=channels // heads if automatic else fields.integer("mamba_d_head"),
        state=fields.integer("mamba_d_state", 256),
        kernel=fields.integer("mamba_d_conv", 4),
        groups=fields.integer("mamba_n_groups", 1),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias"),
        out_bias=fields.flag("projectors_bias") if falcon else None,
        norm=fields.flag("mamba_rms_norm") if falcon else True,
    )


def _decoder(
    fields: Fields, options: ReadOptions, types: Sequence[str], mixer: Mamba1 | Mamba2, rest: Counting
) -> FamilyFacts:
    """Layers of attention or ``mixer``; rest: the weights of everything else in all layers."""
    refuse_layer_types(types, fields.name, HYBRID_TYPES)
    heads: Heads = read_heads(fields, kv_heads=8)
    specs: dict[str, KVCacheSpec] = {FULL: heads.full(fields, options), LINEAR: mixer.spec(fields, options)}
    modules = {FULL: "self_attn", LINEAR: "mamba"}
    layers = tuple(Layer(f"model.layers.{i}.{modules[kind]}", specs[kind], i) for i, kind in enumerate(types))

    def weights() -> Weights:
        attention = heads.weights(fields.integer("hidden_size"), bias=fields.flag("attention_bias"))
        return rest() + Weights.dense(types.count(FULL) * attention + types.count(LINEAR) * mixer.weights)

    return facts_of(fields, layers, weights)


def facts_of(fields: Fields, layers: tuple[Layer, ...], own: Counting) -> FamilyFacts:
    """Return ``layers`` with the weights of a language model: ``own``, the last norm and the embeddings.

    fields: of the config. layers: of the model. own: counts the weights of all layers.
    """

    def weights() -> Weights:
        hidden = fields.integer("hidden_size")
        embedding = fields.integer("vocab_size") * hidden
        tied = fields.flag("tie_word_embeddings")
        return language_model(own() + Weights.dense(hidden), embedding=embedding, tied=tied)

    return FamilyFacts(layers, weights)
