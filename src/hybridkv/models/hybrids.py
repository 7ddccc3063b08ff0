"""Families with recurrent layers: Mamba, hybrids of Mamba and attention, delta rules, short convolutions.

Config fields, layer types and defaults of missing fields are those of transformers' config classes (5.19), documented
in transformers under the name of the model. Each reader names the fields that decide about its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hybridkv.models.decoders import decoder_facts
from hybridkv.models.fields import Fields
from hybridkv.models.layers import (
    FULL,
    LINEAR,
    Counting,
    Family,
    FamilyFacts,
    Heads,
    Part,
    ReadOptions,
    Weights,
    experts,
    layers_of,
    mla_spec,
    mla_weights,
    mlp,
    read_heads,
    refuse_layer_types,
)
from hybridkv.models.states import DeltaNet, Mamba1, Mamba2, ShortConv, one_width_of_convolutions
from hybridkv.units import ceil_div, round_up

# -- Mamba alone


_MAMBA: Final = ("expand", "state_size", "conv_kernel", "time_step_rank", "use_conv_bias", "use_bias")
_MAMBA_OF_HYBRIDS: Final = (
    *("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias"),
)


def _mamba1(fields: Fields, keys: Sequence[str] = _MAMBA_OF_HYBRIDS, **own: Any) -> Mamba1:  # noqa: ANN401  # of Mamba1
    """Return the mixer that ``keys`` describe. A rank of ``auto`` is a sixteenth of the hidden size, rounded up."""
    expand, state, kernel, rank, conv_bias, bias = keys
    hidden = fields.integer("hidden_size")
    automatic = fields.values.get(rank, "auto") == "auto"
    return Mamba1(
        hidden=hidden,
        inner=fields.integer(expand, 2) * hidden,
        state=fields.integer(state, 16),
        kernel=fields.integer(kernel, 4),
        dt_rank=ceil_div(hidden, 16) if automatic else fields.integer(rank),
        conv_bias=fields.flag(conv_bias, default=True),
        bias=fields.flag(bias),
        **own,
    )


def mamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Mamba and FalconMamba. The norms of FalconMamba have no weights."""
    return _stack(fields, options, _mamba1(fields, _MAMBA), tied=True)


def mamba2(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Mamba2: ``num_heads`` heads of ``head_dim`` channels with ``state_size`` values each."""
    mixer = Mamba2(
        hidden=fields.integer("hidden_size"),
        heads=fields.integer("num_heads", 128),
        head_dim=fields.integer("head_dim", 64),
        state=fields.integer("state_size", 128),
        kernel=fields.integer("conv_kernel", 4),
        groups=fields.integer("n_groups", 8),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias"),
    )
    return _stack(fields, options, mixer, tied=False)


def _stack(fields: Fields, options: ReadOptions, mixer: Mamba1 | Mamba2, *, tied: bool) -> FamilyFacts:
    count = fields.layers("num_hidden_layers")
    parts = {LINEAR: (_mixer(fields, options, mixer, "mixer"),)}
    return _hybrid(fields, [LINEAR] * count, parts, _norms(fields, count), tied=tied, path="backbone.layers")


def _norms(fields: Fields, count: int) -> Counting:
    """Count the weights of ``count`` layers with one norm each, mixers left out."""
    return lambda: Weights.dense(count * fields.integer("hidden_size"))


def _hybrid(
    fields: Fields,
    types: Sequence[str],
    parts: Mapping[str, Sequence[Part]],
    rest: Counting,
    *,
    tied: bool = False,
    path: str = "model.layers",
) -> FamilyFacts:
    """Return layers of ``types`` with the parts of their type. ``rest`` counts all weights outside the parts."""
    mixers = sum(part.weights for kind in types for part in parts.get(kind, ()))
    layers = layers_of(types, parts, fields.name, path=path)
    return decoder_facts(fields, layers, lambda: rest() + Weights.dense(mixers), tied=tied)


# -- Mamba and attention


def bamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Bamba: attention in the layers of ``attn_layer_indices``, Mamba-2 in the others."""
    count = fields.layers("num_hidden_layers")
    attention = set(fields.integers("attn_layer_indices") or ())
    types = [FULL if i in attention else LINEAR for i in range(count)]
    return _with_mamba(fields, options, types, _mamba2(fields), _dense_mlps(fields, count))


def granite_hybrid(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Granite 4: ``layer_types``, each layer with a shared MLP and, where there are experts, also a mixture."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    default = fields.layer_types("layers_block_type", count, [LINEAR] * count)
    types = fields.layer_types("layer_types", count, default)

    def rest() -> Weights:
        total = fields.integer("num_local_experts", 8, minimum=0)
        each = Weights.dense(mlp(hidden, fields.integer("shared_intermediate_size", 1024)) + 2 * hidden)
        if total:
            expert = mlp(hidden, fields.integer("intermediate_size"))
            each += Weights.dense(hidden * total) + experts(expert, total, fields.integer("num_experts_per_tok", 2))
        return each * count

    return _with_mamba(fields, options, types, _mamba2(fields), rest)


def falcon_h1(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Falcon-H1: attention and Mamba-2 in every layer, so two entries in the cache under one index."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    inner = fields.optional("mamba_d_ssm", 1024) or fields.integer("mamba_expand", 2) * hidden
    mixer = replace(_mamba2(fields, inner), out_bias=fields.flag("projectors_bias"), norm=fields.flag("mamba_rms_norm"))
    parts = (_attention(fields, options, read_heads(fields, kv_heads=8)), _mixer(fields, options, mixer))
    return _hybrid(fields, ["hybrid"] * count, {"hybrid": parts}, _dense_mlps(fields, count))


def jamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Jamba: attention every ``attn_layer_period`` layers, else Mamba; experts by ``expert_layer_period``."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    period, offset = fields.integer("attn_layer_period", 8), fields.integer("attn_layer_offset", 4, minimum=0)
    types = [FULL if i % period == offset else LINEAR for i in range(count)]

    def rest() -> Weights:
        total, inner = fields.integer("num_experts", 16), mlp(hidden, fields.integer("intermediate_size"))
        sparse = 0
        if total > 1:
            step, start = fields.integer("expert_layer_period", 2), fields.integer("expert_layer_offset", 1, minimum=0)
            sparse = sum(i % step == start for i in range(count))
        mixture = Weights.dense(hidden * total) + experts(inner, total, fields.integer("num_experts_per_tok", 2))
        return mixture * sparse + Weights.dense((count - sparse) * inner + count * 2 * hidden)

    return _with_mamba(fields, options, types, _mamba1(fields, norms=True), rest)


_NEMOTRON_TYPES: Final = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def nemotron_h(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Nemotron-H: ``hybrid_override_pattern`` has a letter per layer: M Mamba-2, * attention, - MLP, E experts."""
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
    parts: dict[str, Sequence[Part]] = {
        LINEAR: [_mixer(fields, options, mixer, "mixer")],
        FULL: [_attention(fields, options, heads, "mixer")],
        "mlp": [],
        "moe": [],
    }

    def rest() -> Weights:
        bias = fields.flag("mlp_bias")
        counted = Weights.dense(len(types) * hidden)
        if "mlp" in types:
            inner = mlp(hidden, fields.integer("intermediate_size"), bias=bias, gated=False)
            counted += Weights.dense(types.count("mlp") * inner)
        return counted + _nemotron_mixture(fields) * types.count("moe") if "moe" in types else counted

    return replace(_hybrid(fields, types, parts, rest), num_layers=len(types))


def _nemotron_types(fields: Fields) -> tuple[str, ...]:
    pattern = fields.text("hybrid_override_pattern")
    given = fields.names("layers_block_type") or fields.names("layer_types")
    if given is None and pattern is None:
        raise fields.fail("hybrid_override_pattern is missing: add it")
    if given is None:
        types = tuple(_NEMOTRON_TYPES.get(one, one) for one in pattern or "")
        fields.of_layers("hybrid_override_pattern", types)
    else:
        key = "layers_block_type" if "layers_block_type" in fields else "layer_types"
        types = fields.layer_types(key, len(given), ())
    refuse_layer_types(types, fields.name, tuple(_NEMOTRON_TYPES.values()))
    return types


def _nemotron_mixture(fields: Fields) -> Weights:
    """Count experts of two projections, in a narrower latent space if the config has one, and a shared expert."""
    hidden, total = fields.integer("hidden_size"), fields.integer("n_routed_experts", 8)
    latent = fields.optional("moe_latent_size")
    shared = fields.integer("n_shared_experts", 1) and fields.integer("moe_shared_expert_intermediate_size", 7688)
    expert = 2 * (latent or hidden) * fields.integer("moe_intermediate_size", 7688)
    always = hidden * total + mlp(hidden, shared, bias=fields.flag("mlp_bias"), gated=False)
    chosen = fields.integer("num_experts_per_tok", 2)
    return Weights.dense(always + (2 * hidden * latent if latent else 0)) + experts(expert, total, chosen)


def _mamba2(fields: Fields, inner: int | None = None) -> Mamba2:
    """Return the mixer of Bamba, Granite and Falcon-H1. ``inner``: channels; ``None`` for ``mamba_expand`` x hidden."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("mamba_n_heads", 128)
    channels = fields.integer("mamba_expand", 2) * hidden if inner is None else inner
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
    )


def _with_mamba(
    fields: Fields, options: ReadOptions, types: Sequence[str], mixer: Mamba1 | Mamba2, rest: Counting
) -> FamilyFacts:
    """Return layers of attention or ``mixer``. ``rest`` counts all other weights in the layers."""
    refuse_layer_types(types, fields.name, (FULL, LINEAR))
    parts = {
        FULL: (_attention(fields, options, read_heads(fields, kv_heads=8)),),
        LINEAR: (_mixer(fields, options, mixer),),
    }
    return _hybrid(fields, types, parts, rest)


def _attention(fields: Fields, options: ReadOptions, heads: Heads, module: str = "self_attn") -> Part:
    """Return full attention, with biases by ``attention_bias``."""
    weights = heads.weights(fields.integer("hidden_size"), bias=fields.flag("attention_bias"))
    return Part(module, heads.full(fields, options), weights)


def _mixer(
    fields: Fields, options: ReadOptions, mixer: Mamba1 | Mamba2 | DeltaNet | ShortConv, module: str = "mamba"
) -> Part:
    return Part(module, mixer.spec(fields, options), mixer.weights)


def _dense_mlps(fields: Fields, count: int) -> Counting:
    """Count the weights of ``count`` gated MLPs with two norms each."""

    def rest() -> Weights:
        hidden, bias = fields.integer("hidden_size"), fields.flag("mlp_bias")
        return Weights.dense(count * (mlp(hidden, fields.integer("intermediate_size"), bias=bias) + 2 * hidden))

    return rest


# -- Zamba: Mamba in every layer, and before some layers a shared attention block of twice the hidden size


def zamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Zamba: one shared block; by default the third layer is the first hybrid layer."""
    count = fields.layers("num_hidden_layers")
    period, offset = fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4, minimum=0)
    rest = ["hybrid" if i % period == offset else LINEAR for i in range(count - 3)]
    types = fields.layer_types("layers_block_type", count, [LINEAR, LINEAR, "hybrid", *rest])
    mixer = _mamba1(fields, heads=fields.integer("n_mamba_heads", 2))
    heads = _zamba_heads(fields, fields.optional("attention_head_dim"), kv_heads=16)

    def shared() -> int:
        return _shared_block(fields, heads, fields.integer("intermediate_size"))

    return _zamba(fields, options, types, heads, mixer=mixer, shared=shared, block="shared_transf")


def zamba2(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Zamba2: ``num_mem_blocks`` shared blocks in turn. Each hybrid layer has low-rank adapters of its own."""
    given = fields.names("layers_block_type")
    if given is None:
        raise fields.fail("layers_block_type is missing: add it, one entry per layer")
    types = fields.layer_types("layers_block_type", len(given), ())
    hidden, count = fields.integer("hidden_size"), fields.integer("n_mamba_heads", 8)
    mixer = Mamba2(
        hidden=hidden,
        heads=count,
        head_dim=fields.integer("mamba_expand", 2) * hidden // count,
        state=fields.integer("mamba_d_state", 64),
        kernel=fields.integer("mamba_d_conv", 4),
        groups=fields.integer("mamba_ngroups", 1),
        bias=fields.flag("add_bias_linear"),
    )
    heads = _zamba_heads(fields)

    def shared() -> int:
        inner = fields.optional("intermediate_size") or 4 * hidden
        hybrid, blocks = types.count("hybrid"), fields.integer("num_mem_blocks", 1)
        bias = (2 * inner + hidden) if fields.flag("add_bias_linear") else 0
        rank = fields.integer("adapter_rank", 128)
        adapters = rank * (hidden + 2 * inner)
        if fields.flag("use_shared_attention_adapter"):
            adapters += 3 * rank * (2 * hidden + heads.heads * heads.head_dim)
        # with fewer hybrid layers than blocks the last blocks are never built
        return min(blocks, hybrid) * (_shared_block(fields, heads, inner) + bias) + hybrid * adapters

    return _zamba(fields, options, types, heads, mixer=mixer, shared=shared, block="shared_transformer")


def _zamba_heads(fields: Fields, head_dim: int | None = None, *, kv_heads: int | None = None) -> Heads:
    count = fields.integer("num_attention_heads")
    width = head_dim or 2 * fields.integer("hidden_size") // count
    return Heads(count, fields.optional("num_key_value_heads", kv_heads) or count, width)


def _shared_block(fields: Fields, heads: Heads, inner: int) -> int:
    """Count attention from twice the hidden size back to it, a gated MLP and two norms."""
    hidden = fields.integer("hidden_size")
    wide, q, kv = 2 * hidden, heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    return wide * (q + 2 * kv) + q * hidden + mlp(hidden, inner) + wide + hidden


def _zamba(
    fields: Fields,
    options: ReadOptions,
    types: Sequence[str],
    heads: Heads,
    *,
    mixer: Mamba1 | Mamba2,
    shared: Callable[[], int],
    block: str,
) -> FamilyFacts:
    """Return layers with a norm and a mixer, and a projection after shared blocks, which ``shared`` counts."""
    hidden = fields.integer("hidden_size")
    refuse_layer_types(types, fields.name, (LINEAR, "hybrid"))
    attention = Part(f"{block}.self_attn", heads.full(fields, options))
    parts = {
        LINEAR: (_mixer(fields, options, mixer),),
        "hybrid": (attention, _mixer(fields, options, mixer, "mamba_decoder.mamba")),
    }

    def rest() -> Weights:
        return Weights.dense(shared() + len(types) * hidden + types.count("hybrid") * hidden * hidden)

    return _hybrid(fields, types, parts, rest, tied=True)


# -- linear attention by the delta rule; short convolutions. Every fourth layer or so is full attention


def qwen3_next(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Qwen3-Next: experts in every ``decoder_sparse_step``-th layer, except ``mlp_only_layers``."""
    count = fields.layers("num_hidden_layers")

    def mlps() -> Weights:
        step, dense_layers = fields.integer("decoder_sparse_step", 1), set(fields.integers("mlp_only_layers") or ())
        total = fields.integer("num_experts", 512, minimum=0)
        sparse = sum((i + 1) % step == 0 and i not in dense_layers for i in range(count)) if total else 0
        counted = _qwen_mixture(fields) * sparse if sparse else Weights()
        if sparse == count:
            return counted
        dense = mlp(fields.integer("hidden_size"), fields.integer("intermediate_size", 5632))
        return counted + Weights.dense((count - sparse) * dense)

    return _qwen(fields, options, mlps)


def qwen35(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read dense Qwen3.5."""
    count = fields.layers("num_hidden_layers")

    def mlps() -> Weights:
        return Weights.dense(count * mlp(fields.integer("hidden_size"), fields.integer("intermediate_size", 12288)))

    return _qwen(fields, options, mlps, kv_heads=4)


def qwen35_moe(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Qwen3.5 with a mixture of experts in every layer."""
    count = fields.layers("num_hidden_layers")
    return _qwen(fields, options, lambda: _qwen_mixture(fields) * count)


def _qwen(fields: Fields, options: ReadOptions, mlps: Counting, *, kv_heads: int = 2) -> FamilyFacts:
    """Read Qwen3-Next and Qwen3.5. ``mlps`` counts all MLPs; ``kv_heads`` is the default of ``num_key_value_heads``."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    interval = fields.integer("full_attention_interval", 4)
    types = fields.layer_types("layer_types", count, [LINEAR if (i + 1) % interval else FULL for i in range(count)])
    heads = read_heads(fields, kv_heads=kv_heads, head_dim=256)
    weights = heads.weights(hidden, bias=fields.flag("attention_bias"), qk_norm=True, gate=True)
    mixer = DeltaNet(
        hidden=hidden,
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )
    parts = {
        FULL: (Part("self_attn", heads.full(fields, options), weights),),
        LINEAR: (_mixer(fields, options, mixer, "linear_attn"),),
    }
    return _hybrid(fields, types, parts, lambda: Weights.dense(count * 2 * hidden) + mlps())


def _qwen_mixture(fields: Fields) -> Weights:
    """Count a router, experts, and a shared expert with a gate."""
    hidden, total = fields.integer("hidden_size"), fields.integer("num_experts")
    shared = mlp(hidden, fields.integer("shared_expert_intermediate_size", 512)) + hidden
    expert = mlp(hidden, fields.integer("moe_intermediate_size", 512))
    return Weights.dense(hidden * total + shared) + experts(expert, total, fields.integer("num_experts_per_tok"))


def olmo_hybrid(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read OlmoHybrid: values twice as wide as keys, norms over all heads of Q and K."""
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
    attention = _attention(fields, options, heads)
    norms = (heads.heads + heads.kv_heads) * heads.head_dim
    parts = {
        FULL: (replace(attention, weights=attention.weights + norms),),
        LINEAR: (_mixer(fields, options, mixer, "linear_attn"),),
    }

    def rest() -> Weights:
        return Weights.dense(count * (mlp(hidden, fields.integer("intermediate_size")) + 2 * hidden))

    return _hybrid(fields, types, parts, rest)


def kimi_linear(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Kimi-Linear and Kimi K3: ``linear_attn_config`` with delta attention that has a decay per channel, and MLA.

    K3 keeps the same and has further weights: gates of full rank, and residual attention over blocks of layers. Source:
    transformers_utils/configs/kimi_linear.py and models/kimi_k3/nvidia/{model,kda,mla}.py of vLLM 0.33.
    """
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    nested = Fields(fields.mapping("linear_attn_config"), fields.name)
    types = fields.layer_types("layer_types", count, _kimi_types(nested, count))
    refuse_layer_types(types, fields.name, (FULL, LINEAR))
    heads = nested.integer("num_heads", fields.integer("linear_num_heads", 32))
    width = nested.integer("head_dim", fields.integer("linear_head_dim", 128))
    kernel = nested.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4))
    full_gate = nested.flag("use_full_rank_gate")
    mixer = DeltaNet(hidden, heads, heads, width, width, kernel, mamba_type="kda_attention", full_gate=full_gate)
    attention_heads = fields.integer("num_attention_heads")
    parts = {
        FULL: (Part("self_attn", mla_spec(fields, options, attention_heads)),),
        LINEAR: (_mixer(fields, options, mixer, "self_attn"),),
    }

    def rest() -> Weights:
        gate = hidden * attention_heads * fields.integer("v_head_dim") if fields.flag("mla_use_output_gate") else 0
        attention = types.count(FULL) * (mla_weights(fields, attention_heads) + gate)
        residuals = (4 * count + 2) * hidden if fields.optional("attn_res_block_size") else 0
        return Weights.dense(attention + count * 2 * hidden + residuals) + _kimi_mlps(fields, count)

    return _hybrid(fields, types, parts, rest)


def _kimi_types(nested: Fields, count: int) -> Sequence[str]:
    """Return the types by ``full_attn_layers`` and ``kda_layers``, which count layers from 1."""
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
    always = hidden * total + shared * mlp(hidden, inner) + (2 * hidden * latent if latent else 0)
    always += latent if latent and fields.flag("latent_moe_use_norm") else 0
    mixture = Weights.dense(always) + experts(mlp(latent or hidden, inner), total, chosen)
    dense = mlp(hidden, fields.integer("intermediate_size"))
    return mixture * kinds.count("sparse") + Weights.dense(kinds.count("dense") * dense)


def lfm2(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read LFM2: attention in the layers of ``full_attn_idxs``, gated short convolutions in the others."""
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    attention = fields.integers("full_attn_idxs")
    default = [FULL if attention is None or i in attention else "conv" for i in range(count)]
    types = fields.layer_types("layer_types", count, default)
    heads = read_heads(fields, kv_heads=8)
    one_width_of_convolutions(fields)
    mixer = ShortConv(hidden, fields.integer("conv_L_cache", 3), bias=fields.flag("conv_bias"))
    parts = {
        FULL: (Part("self_attn", heads.full(fields, options), heads.weights(hidden, qk_norm=True)),),
        "conv": (_mixer(fields, options, mixer, "conv"),),
    }

    def rest() -> Weights:
        inner = fields.integer("block_ff_dim", fields.optional("intermediate_size", 12288))
        if fields.flag("block_auto_adjust_ff_dim", default=True):
            inner = int((fields.number("block_ffn_dim_multiplier") or 1.0) * int(2 * inner / 3))
            inner = round_up(inner, fields.integer("block_multiple_of", 256))
        return Weights.dense(count * (mlp(hidden, inner) + 2 * hidden))

    if (said := fields.values.get("tie_embedding")) is not None:
        fields = replace(fields, values={**fields.values, "tie_word_embeddings": said})
    return _hybrid(fields, types, parts, rest, tied=True)


HYBRIDS: Final[Mapping[str, Family]] = {
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "falcon_mamba": mamba,
    "granitemoehybrid": granite_hybrid,
    "jamba": jamba,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "mamba": mamba,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "olmo_hybrid": olmo_hybrid,
    "qwen3_5_moe_text": qwen35_moe,
    "qwen3_5_text": qwen35,
    "qwen3_next": qwen3_next,
    "zamba": zamba,
    "zamba2": zamba2,
}
