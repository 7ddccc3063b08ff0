"""Qwen3-Next, Qwen3.5, OlmoHybrid, Kimi-Linear: linear attention by the delta rule; LFM2: short convolutions.

Every fourth layer or so is full attention. Layer types and defaults of missing fields are those of transformers'
config classes (5.19).
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.models.attention import Heads, read_heads, refuse_layer_types
from hybridkv.models.deepseek import mla_parameters, mla_spec
from hybridkv.models.families import Counting, FamilyFacts, ReadOptions
from hybridkv.models.fields import Fields
from hybridkv.models.hybrids import FULL, HYBRID_TYPES, LINEAR, facts_of
from hybridkv.models.model import Layer
from hybridkv.models.states import DeltaNet, ShortConv, per_rank
from hybridkv.models.weights import Weights, experts, gated_mlp, language_model
from hybridkv.specs import KVCacheSpec


def qwen3_next(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Qwen3-Next: a mixture of experts in every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    count = fields.layers("num_hidden_layers")

    def mlps() -> Weights:
        step, dense_layers = fields.integer("decoder_sparse_step", 1), set(fields.integers("mlp_only_layers") or ())
        sparse = sum((i + 1) % step == 0 and i not in dense_layers for i in range(count)) if _experts(fields) else 0
        counted = _mixture(fields) * sparse if sparse else Weights()
        if sparse == count:
            return counted
        dense = gated_mlp(fields.integer("hidden_size"), fields.integer("intermediate_size", 5632))
        return counted + Weights.dense((count - sparse) * dense)

    return _qwen(fields, options, mlps)


def qwen35(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Qwen3.5, dense."""
    count = fields.layers("num_hidden_layers")

    def mlps() -> Weights:
        return Weights.dense(
            count * gated_mlp(fields.integer("hidden_size"), fields.integer("intermediate_size", 12288))
        )

    return _qwen(fields, options, mlps, kv_heads=4)


def qwen35_moe(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Qwen3.5 with a mixture of experts in every layer."""
    count = fields.layers("num_hidden_layers")
    return _qwen(fields, options, lambda: _mixture(fields) * count)


def olmo_hybrid(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """OlmoHybrid: values twice as wide as keys, norms over all heads of Q and K."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    default = [FULL if i % 4 == 3 else LINEAR for i in range(count)]
    if FULL not in default:
        default[-1] = FULL
    types = fields.layer_types("layer_types", count, default)
    heads = read_heads(fields)
    key_heads = fields.integer("linear_num_key_heads", heads.heads)
    key_dim = fields.integer("linear_key_head_dim", int(0.75 * hidden / key_heads))
    mixer = DeltaNet(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=fields.integer("linear_num_value_heads", heads.heads),
        key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", 2 * key_dim),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )
    specs = {FULL: heads.full(fields, options), LINEAR: mixer.spec(fields, options)}

    def weights() -> Weights:
        attention = heads.weights(hidden, bias=fields.flag("attention_bias"))
        attention += (heads.heads + heads.kv_heads) * heads.head_dim
        mixers = types.count(FULL) * attention + types.count(LINEAR) * mixer.weights
        return Weights.dense(mixers + count * (gated_mlp(hidden, fields.integer("intermediate_size")) + 2 * hidden))

    return _facts(fields, types, specs, weights)


def kimi_linear(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Kimi-Linear: delta attention with a decay for every channel, and MLA."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    nested = Fields(fields.mapping("linear_attn_config"), fields.name)
    types = fields.layer_types("layer_types", count, _kimi_types(nested, count))
    heads = nested.integer("num_heads", fields.integer("linear_num_heads", 32))
    width = nested.integer("head_dim", fields.integer("linear_head_dim", 128))
    kernel = nested.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4))
    mixer = DeltaNet(hidden, heads, heads, width, width, kernel, mamba_type="kda_attention")
    attention_heads = fields.integer("num_attention_heads")
    per_rank(attention_heads, options.tp, "attention heads", fields.name)
    specs: dict[str, KVCacheSpec] = {FULL: mla_spec(fields, options), LINEAR: mixer.spec(fields, options)}

    def weights() -> Weights:
        mixers = types.count(FULL) * mla_parameters(fields, attention_heads) + types.count(LINEAR) * mixer.kda_weights
        return Weights.dense(mixers + count * 2 * hidden) + _kimi_mlps(fields, count)

    return _facts(fields, types, specs, weights, linear_module="self_attn")


def lfm2(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """LFM2: attention in the layers of ``full_attn_idxs``, gated short convolutions in the others."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    attention = fields.integers("full_attn_idxs")
    default = [FULL if attention is None or i in attention else "conv" for i in range(count)]
    types = fields.layer_types("layer_types", count, default)
    heads = read_heads(fields, kv_heads=8)
    mixer = ShortConv(hidden, fields.integer("conv_L_cache", 3), bias=fields.flag("conv_bias"))
    refuse_layer_types(types, fields.name, (FULL, "conv"))
    specs: dict[str, KVCacheSpec] = {FULL: heads.full(fields, options), "conv": mixer.spec(fields, options)}
    modules = {FULL: "self_attn", "conv": "conv"}
    layers = tuple(Layer(f"model.layers.{i}.{modules[kind]}", specs[kind], i) for i, kind in enumerate(types))

    def weights() -> Weights:
        inner = fields.integer("block_ff_dim", fields.optional("intermediate_size", 12288))
        if fields.flag("block_auto_adjust_ff_dim", default=True):
            multiple = fields.integer("block_multiple_of", 256)
            inner = int((fields.number("block_ffn_dim_multiplier") or 1.0) * int(2 * inner / 3))
            inner = multiple * -(-inner // multiple)
        own = types.count(FULL) * heads.weights(hidden, qk_norm=True) + types.count("conv") * mixer.weights
        own += count * (gated_mlp(hidden, inner) + 2 * hidden) + hidden
        embedding = fields.integer("vocab_size") * hidden
        tied = fields.flag("tie_embedding", default=fields.flag("tie_word_embeddings", default=True))
        return language_model(Weights.dense(own), embedding=embedding, tied=tied)

    return FamilyFacts(layers, weights)


def _qwen(fields: Fields, options: ReadOptions, mlps: Counting, *, kv_heads: int = 2) -> FamilyFacts:
    """Layers of Qwen3-Next and Qwen3.5; mlps: the weights of all MLPs. kv_heads: where the config leaves them out."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    interval = fields.integer("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    types = fields.layer_types("layer_types", count, default)
    heads: Heads = read_heads(fields, kv_heads=kv_heads, head_dim=256)
    mixer = DeltaNet(
        hidden=hidden,
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )
    specs = {FULL: heads.full(fields, options), LINEAR: mixer.spec(fields, options)}

    def weights() -> Weights:
        attention = heads.weights(hidden, bias=fields.flag("attention_bias"), qk_norm=True, gate=True)
        mixers = types.count(FULL) * attention + types.count(LINEAR) * mixer.weights
        return Weights.dense(mixers + count * 2 * hidden) + mlps()

    return _facts(fields, types, specs, weights)


def _experts(fields: Fields) -> int:
    return fields.integer("num_experts", 512, minimum=0)


def _mixture(fields: Fields) -> Weights:
    """A router, experts, and a shared expert behind a gate."""
    hidden, total = fields.integer("hidden_size"), fields.integer("num_experts")
    shared = gated_mlp(hidden, fields.integer("shared_expert_intermediate_size", 512)) + hidden
    expert = gated_mlp(hidden, fields.integer("moe_intermediate_size", 512))
    return Weights.dense(hidden * total + shared) + experts(expert, total, fields.integer("num_experts_per_tok"))


def _kimi_types(nested: Fields, count: int) -> Sequence[str]:
    """The checkpoint counts layers from 1."""
    full, linear = nested.integers("full_attn_layers"), nested.integers("kda_layers")
    if full is None or linear is None:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    if sorted((*full, *linear)) != list(range(1, count + 1)):
        raise nested.fail(f"full_attn_layers and kda_layers must name each of the layers 1 to {count} once")
    return [FULL if i + 1 in full else LINEAR for i in range(count)]


def _kimi_mlps(fields: Fields, count: int) -> Weights:
    hidden = fields.integer("hidden_size")
    first = fields.integer("first_k_dense_replace", 1, minimum=0)
    default = ["dense" if i < first else "sparse" for i in range(count)]
    kinds = fields.layer_types("mlp_layer_types", count, default)
    total = fields.integer("num_experts", fields.integer("num_local_experts", 256))
    chosen = fields.integer("num_experts_per_token", fields.integer("num_experts_per_tok", 8))
    shared = fields.integer("num_shared_experts", fields.integer("n_shared_experts", 1))
    inner = fields.integer("moe_intermediate_size", 1024)
    latent = fields.optional("routed_expert_hidden_size")  # Kimi K3: routed experts between two projections
    always = hidden * total + shared * gated_mlp(hidden, inner) + (2 * hidden * latent if latent else 0)
    mixture = Weights.dense(always) + experts(gated_mlp(latent or hidden, inner), total, chosen)
    dense = gated_mlp(hidden, fields.integer("intermediate_size"))
    return mixture * kinds.count("sparse") + Weights.dense(kinds.count("dense") * dense)


def _facts(
    fields: Fields,
    types: Sequence[str],
    specs: dict[str, KVCacheSpec],
    own: Counting,
    *,
    linear_module: str = "linear_attn",
) -> FamilyFacts:
    """Layers of full and linear attention; own: the weights of all layers."""
    refuse_layer_types(types, fields.name, HYBRID_TYPES)
    modules = {FULL: "self_attn", LINEAR: linear_module}
    layers = tuple(Layer(f"model.layers.{i}.{modules[kind]}", specs[kind], i) for i, kind in enumerate(types))
    return facts_of(fields, layers, own)
