"""DeepSeek-V2 and -V3: multi-head latent attention, dense layers first, then mixtures of experts.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, and DeepSeek-V3 (arXiv 2412.19437), section 2.1.
"""

from __future__ import annotations

from hybridkv.models.attention import refuse_layer_types
from hybridkv.models.families import FamilyFacts, ReadOptions, layer_name
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer
from hybridkv.models.parallel import kv_heads_per_rank
from hybridkv.models.weights import Weights, experts, gated_mlp, language_model
from hybridkv.specs import MLAAttentionSpec


def deepseek(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Every layer as MLA; the latent is whole on every rank. Raises ConfigError and UnsupportedModelError."""
    count, heads = fields.layers("num_hidden_layers"), fields.integer("num_attention_heads")
    # the latent is not split, but the heads that read it are
    kv_heads_per_rank(heads, heads, options.tp, fields.name)
    refuse_layer_types(fields.names("layer_types") or (), fields.name, ("full_attention",))
    spec = mla_spec(fields, options)
    layers = tuple(Layer(layer_name(i), spec, i) for i in range(count))

    def weights() -> Weights:
        hidden = fields.integer("hidden_size")
        sparse = _sparse_layers(fields, count)
        dense = gated_mlp(hidden, fields.integer("intermediate_size")) if sparse < count else 0
        shared = count * (mla_parameters(fields, heads) + 2 * hidden) + hidden + (count - sparse) * dense
        own = Weights.dense(shared) + (_mixture(fields) * sparse if sparse else Weights())
        embedding = fields.integer("vocab_size") * hidden
        return language_model(own, embedding=embedding, tied=fields.flag("tie_word_embeddings"))

    return FamilyFacts(layers, weights)


def mla_spec(fields: Fields, options: ReadOptions) -> MLAAttentionSpec:
    """The latent and its rotary part, whole on every rank."""
    return MLAAttentionSpec(
        block_size=options.block_size,
        head_size=fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"),
        dtype=options.dtype,
    )


def _sparse_layers(fields: Fields, count: int) -> int:
    """How many layers are mixtures of experts: from ``first_k_dense_replace`` on, every ``moe_layer_freq``-th."""
    if fields.optional("n_routed_experts") is None:
        return 0
    first = fields.integer("first_k_dense_replace", 0, minimum=0)
    return sum(i % fields.integer("moe_layer_freq", 1) == 0 for i in range(first, count))


def mla_parameters(fields: Fields, heads: int) -> int:
    """Weights of one MLA: queries, the latent's two projections with their norm, the output."""
    hidden, latent, rope = (fields.integer(key) for key in ("hidden_size", "kv_lora_rank", "qk_rope_head_dim"))
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    query_rank = fields.optional("q_lora_rank")
    if query_rank is None:
        query = hidden * heads * (nope + rope)
    else:
        query = hidden * query_rank + query_rank + query_rank * heads * (nope + rope)
    keys = hidden * (latent + rope) + latent + latent * heads * (nope + value)
    bias = (query_rank or 0) + latent + rope + hidden if fields.flag("attention_bias") else 0
    return query + keys + heads * value * hidden + bias


def _mixture(fields: Fields) -> Weights:
    """Count the weights of one mixture of experts: routed and shared experts, and the router."""
    hidden, total = fields.integer("hidden_size"), fields.integer("n_routed_experts")
    expert = gated_mlp(hidden, fields.integer("moe_intermediate_size"))
    chosen = fields.integer("num_experts_per_tok")
    if chosen > total:
        raise fields.fail(f"num_experts_per_tok {chosen} exceeds n_routed_experts {total}: lower it")
    always = expert * fields.integer("n_shared_experts", 0, minimum=0) + hidden * total
    return Weights.dense(always) + experts(expert, total, chosen)
