"""Families of attention alone: Llama, Mistral, Qwen, Gemma, gpt-oss and DeepSeek; Whisper and T5 with an encoder.

Config fields, layer types and defaults of missing fields are those of transformers' config classes (5.19), documented
in transformers under the name of the model. Each reader names the fields that decide about its layers.

gpt-oss's sinks are one learned logit per head, not tokens: they take no memory in the cache. DeepSeek has multi-head
latent attention, dense layers first, then mixtures of experts (DeepSeek-V2, arXiv 2405.04434, and DeepSeek-V3, arXiv
2412.19437, sections 2.1). An encoder keeps nothing between steps. A decoder layer of Whisper or T5 keeps its own tokens
and, in its cross attention, the encoder's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from hybridkv.models.fields import Fields
from hybridkv.models.layers import (
    CHUNKED,
    FULL,
    SLIDING,
    Counting,
    Family,
    FamilyFacts,
    Heads,
    Part,
    ReadOptions,
    Weights,
    experts,
    language_model,
    layers_of,
    mla_spec,
    mla_weights,
    mlp,
    read_heads,
    refuse_layer_types,
)
from hybridkv.models.model import Layer


def decoder_facts(
    fields: Fields, layers: tuple[Layer, ...], own: Counting, *, tied: bool = False, hidden: int | None = None
) -> FamilyFacts:
    """Return ``layers`` with the weights of a language model: ``own``, the last norm and the embeddings.

    Args:
        fields: fields of the config.
        layers: layers of the model.
        own: counts the weights of all layers.
        tied: default of ``tie_word_embeddings``.
        hidden: default of ``hidden_size``.
    """

    def weights() -> Weights:
        width = fields.integer("hidden_size", hidden)
        embedding = fields.integer("vocab_size") * width
        is_tied = fields.flag("tie_word_embeddings", default=tied)
        return language_model(own() + Weights.dense(width), embedding=embedding, tied=is_tied)

    return FamilyFacts(layers, weights)


def attention_layers(
    types: Sequence[str], heads: Heads, fields: Fields, options: ReadOptions, *, window: int | None = None
) -> tuple[Layer, ...]:
    """Return attention layers of ``types``. ``window``: their window; ``None`` for the field ``sliding_window``."""
    refuse_layer_types(types, fields.name)
    specs = {kind: heads.of_type(kind, fields, options, window=window) for kind in types}
    return layers_of(types, {kind: (Part("self_attn", spec),) for kind, spec in specs.items()}, fields.name)


@dataclass(frozen=True, slots=True)
class LlamaFamily:
    """Dense decoders with grouped-query attention, windowed or chunked by fields of the config.

    The fields are ``layer_types``, ``sliding_window`` and ``attention_chunk_size``.

    Attributes:
        kv_heads: default of ``num_key_value_heads``.
        head_dim: default of ``head_dim``.
        sliding_window: default of ``sliding_window``.
        window_switch: the window counts only with ``use_sliding_window``, from layer ``max_window_layers`` on.
        bias: biases of the attention's projections: never, always in Q, K and V, or in all by ``attention_bias``.
        qk_norm: whether each head of Q and K has a norm.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    window_switch: bool = False
    bias: Literal["none", "qkv", "config"] = "config"
    qk_norm: bool = False

    def __call__(self, fields: Fields, options: ReadOptions) -> FamilyFacts:
        """Return every layer by its type. Raises ConfigError, and UnsupportedModelError for an unknown type."""
        count = fields.layers("num_hidden_layers")
        types = self._layer_types(fields, count)
        refuse_layer_types(types, fields.name)
        heads = read_heads(fields, kv_heads=self.kv_heads, head_dim=self.head_dim)
        window = fields.optional("sliding_window", self.sliding_window)

        def own() -> Weights:
            hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
            bias = self.bias == "config" and fields.flag("attention_bias")
            layer = heads.weights(hidden, bias=bias, qk_norm=self.qk_norm)
            if self.bias == "qkv":
                layer += (heads.heads + 2 * heads.kv_heads) * heads.head_dim
            return Weights.dense(count * (layer + mlp(hidden, inner, bias=fields.flag("mlp_bias")) + 2 * hidden))

        return decoder_facts(fields, attention_layers(types, heads, fields, options, window=window), own)

    def _layer_types(self, fields: Fields, count: int) -> tuple[str, ...]:
        """Return the type of every layer. A window or chunk in any field decides, because files may omit the others."""
        window = fields.optional("sliding_window", self.sliding_window)
        first = 0
        if self.window_switch:
            window = window if fields.flag("use_sliding_window") else None
            first = fields.integer("max_window_layers", 28, minimum=0)
        given = fields.names("layer_types")
        if given is not None and len(given) != count:
            raise fields.fail(f"layer_types has {len(given)} entries for {count} layers: correct one of them")
        if fields.optional("attention_chunk_size") is not None:
            return (CHUNKED,) * count
        if given is not None and (window is None or self.window_switch):
            return given
        return tuple(SLIDING if window is not None and i >= first else FULL for i in range(count))


LLAMA: Final = LlamaFamily()
QWEN2: Final = LlamaFamily(kv_heads=32, sliding_window=4096, window_switch=True, bias="qkv")


@dataclass(frozen=True, slots=True)
class GemmaFamily:
    """Gemma 2 and 3: every ``period``-th layer is full attention, the others have the window ``sliding_window``.

    Attributes:
        period: interval of full attention layers.
        period_field: field that gives another period.
        qk_norm: Gemma 3: norms on Q and K; its rotary scaling does not extend ``max_position_embeddings``.
    """

    period: int
    period_field: str | None = None
    qk_norm: bool = False

    def __call__(self, fields: Fields, options: ReadOptions) -> FamilyFacts:
        """Return every layer by its type. Raises ConfigError, and UnsupportedModelError for an unknown type."""
        count = fields.layers("num_hidden_layers", 26)
        period = self.period if self.period_field is None else fields.integer(self.period_field, self.period)
        types = fields.layer_types("layer_types", count, _every(period, count))
        heads = read_heads(fields, kv_heads=4, head_dim=256)
        window = fields.integer("sliding_window", 4096)
        if self.qk_norm and fields.flag("use_bidirectional_attention"):
            window = window // 2 + 1

        def own() -> Weights:
            hidden = fields.integer("hidden_size", 2304)
            attention = heads.weights(hidden, bias=fields.flag("attention_bias"), qk_norm=self.qk_norm)
            layer = attention + mlp(hidden, fields.integer("intermediate_size", 9216)) + 4 * hidden
            return Weights.dense(count * layer)

        layers = attention_layers(types, heads, fields, options, window=window)
        return replace(decoder_facts(fields, layers, own, tied=True, hidden=2304), rope_scales=not self.qk_norm)


def gpt_oss(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read gpt-oss: every second layer has a window, the first included. All layers are mixtures of experts."""
    count = fields.layers("num_hidden_layers")
    types = fields.layer_types("layer_types", count, _every(2, count))
    heads = read_heads(fields, kv_heads=8, head_dim=64)
    layers = attention_layers(types, heads, fields, options, window=fields.integer("sliding_window", 128))

    def own() -> Weights:
        hidden = fields.integer("hidden_size")
        inner, total = fields.integer("intermediate_size"), fields.integer("num_local_experts")
        attention = heads.weights(hidden, bias=fields.flag("attention_bias", default=True)) + heads.heads
        layer = Weights.dense(attention + 2 * hidden + (hidden + 1) * total)
        chosen = fields.integer("num_experts_per_tok", 4)
        return (layer + experts(mlp(hidden, inner), total, chosen, biases=2 * inner + hidden)) * count

    return decoder_facts(fields, layers, own, hidden=2304)


def llama4(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Llama 4: rotary layers are chunked; by default every ``no_rope_layer_interval``-th (4) is full attention."""
    count = fields.layers("num_hidden_layers")
    rotary = fields.integers("no_rope_layers") or [
        (i + 1) % fields.integer("no_rope_layer_interval", 4) for i in range(count)
    ]
    if len(rotary) < count:
        raise fields.fail(f"no_rope_layers has {len(rotary)} entries for {count} layers: correct one of them")
    types = fields.layer_types("layer_types", count, [CHUNKED if one else FULL for one in rotary[:count]])
    refuse_layer_types(types, fields.name)
    heads = read_heads(fields, kv_heads=8, head_dim=128)
    chunk, full = fields.optional("attention_chunk_size", 8192), heads.full(fields, options)
    chunked = full if chunk is None else heads.chunked(fields, options, chunk)
    parts = {kind: (Part("self_attn", full if kind == FULL else chunked),) for kind in types}

    def own() -> Weights:
        hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
        step, given = fields.integer("interleave_moe_layer_step", 1), fields.integers("moe_layers")
        sparse = len(range(step - 1, count, step)) if given is None else len(given)
        total = fields.integer("num_local_experts", 16)
        mixture = Weights.dense(hidden * total + mlp(hidden, inner))
        mixture += experts(mlp(hidden, inner), total, fields.integer("num_experts_per_tok", 1))
        dense = mlp(hidden, fields.integer("intermediate_size_mlp", 16384))
        attention = heads.weights(hidden, bias=fields.flag("attention_bias")) + 2 * hidden
        return mixture * sparse + Weights.dense(count * attention + (count - sparse) * dense)

    return decoder_facts(fields, layers_of(types, parts, fields.name), own, hidden=2304)


def deepseek(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read DeepSeek-V2 and -V3: every layer is MLA. Raises ConfigError and UnsupportedModelError."""
    count, heads = fields.layers("num_hidden_layers"), fields.integer("num_attention_heads")
    refuse_layer_types(fields.names("layer_types") or (), fields.name, (FULL,))
    layers = layers_of([FULL] * count, {FULL: (Part("self_attn", mla_spec(fields, options, heads)),)}, fields.name)

    def own() -> Weights:
        hidden, sparse = fields.integer("hidden_size"), 0
        if fields.optional("n_routed_experts") is not None:
            # mixtures: from first_k_dense_replace on, every moe_layer_freq-th
            first, step = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
            sparse = sum(i % step == 0 for i in range(first, count))
        dense = mlp(hidden, fields.integer("intermediate_size")) if sparse < count else 0
        held = Weights.dense(count * (mla_weights(fields, heads) + 2 * hidden) + (count - sparse) * dense)
        return held + _deepseek_mixture(fields) * sparse if sparse else held

    return decoder_facts(fields, layers, own)


def _deepseek_mixture(fields: Fields) -> Weights:
    """Count the weights of one mixture of experts: routed and shared experts, and the router."""
    hidden, total = fields.integer("hidden_size"), fields.integer("n_routed_experts")
    expert = mlp(hidden, fields.integer("moe_intermediate_size"))
    chosen = fields.integer("num_experts_per_tok")
    if chosen > total:
        raise fields.fail(f"num_experts_per_tok {chosen} exceeds n_routed_experts {total}: lower it")
    always = expert * fields.integer("n_shared_experts", 0, minimum=0) + hidden * total
    return Weights.dense(always) + experts(expert, total, chosen)


def _every(period: int, count: int) -> list[str]:
    """Return the types of ``count`` layers, with full attention in every ``period``-th."""
    return [SLIDING if (i + 1) % period else FULL for i in range(count)]


# -- with an encoder


def whisper(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read Whisper: every request has ``max_source_positions`` encoder tokens (1500, 30 seconds of sound)."""
    hidden, count = fields.integer("d_model"), fields.layers("decoder_layers")
    heads = fields.integer("decoder_attention_heads")
    if hidden % heads:
        raise fields.fail(f"{heads} attention heads do not divide d_model {hidden}: correct one of them")
    modules = ("self_attn", "encoder_attn")
    path, own = "model.decoder.layers", Heads(heads, heads, hidden // heads)
    layers = _crossed(count, own, fields, options, modules=modules, path=path)
    source = fields.integer("max_source_positions", 1500)

    def inner(key: str) -> int:
        return mlp(hidden, fields.integer(key), bias=True, gated=False) + 2 * hidden

    def weights() -> Weights:
        # queries, values and the output have biases, keys have none; every norm has one
        attention = 4 * hidden * hidden + 3 * hidden + 2 * hidden
        convolutions = 3 * hidden * (fields.integer("num_mel_bins", 80) + hidden) + 2 * hidden
        encoder = fields.layers("encoder_layers") * (attention + inner("encoder_ffn_dim"))
        encoder += convolutions + source * hidden + 2 * hidden
        decoder = count * (2 * attention + inner("decoder_ffn_dim")) + 2 * hidden
        look_ups = fields.integer("max_target_positions", 448) * hidden
        head = fields.integer("vocab_size") * hidden
        # one decoder token is multiplied with the decoder and the tied head
        return Weights(encoder + decoder + look_ups + head, decoder + head, embedded=look_ups + head)

    return FamilyFacts(layers, weights, max_encoder_tokens=source)


def t5(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Read T5: relative positions set no limit; the encoder was trained with ``n_positions`` (512) tokens."""
    hidden, encoder_layers = fields.integer("d_model"), fields.layers("num_layers")
    count = fields.layers("num_decoder_layers", encoder_layers)
    heads, width = fields.integer("num_heads"), fields.integer("d_kv", 64)
    modules = ("layer.0.SelfAttention", "layer.1.EncDecAttention")
    layers = _crossed(count, Heads(heads, heads, width), fields, options, modules=modules, path="decoder.block")

    def weights() -> Weights:
        attention = 4 * hidden * heads * width + hidden
        gated = (fields.text("feed_forward_proj") or "relu").startswith("gated")
        inner = mlp(hidden, fields.integer("d_ff"), gated=gated) + hidden
        positions = fields.integer("relative_attention_num_buckets", 32) * heads
        encoder = encoder_layers * (attention + inner) + positions + hidden
        decoder = count * (2 * attention + inner) + positions + hidden
        # T5's output head shares the embedding's weights, whatever tie_word_embeddings is
        head = fields.integer("vocab_size") * hidden
        return Weights(encoder + decoder + head, decoder + head, embedded=head)

    return FamilyFacts(layers, weights, max_encoder_tokens=fields.integer("n_positions", 512))


def _crossed(
    count: int, heads: Heads, fields: Fields, options: ReadOptions, *, modules: tuple[str, str], path: str
) -> tuple[Layer, ...]:
    """Return layers of self and cross attention, named by ``modules``."""
    specs = (heads.full(fields, options), heads.cross(fields, options))
    return layers_of([FULL] * count, {FULL: [*map(Part, modules, specs)]}, fields.name, path=path)


DECODERS: Final[Mapping[str, Family]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), deepseek),
    "gemma2": GemmaFamily(period=2),
    "gemma3_text": GemmaFamily(period=6, period_field="sliding_window_pattern", qk_norm=True),
    "gpt_oss": gpt_oss,
    "llama": LLAMA,
    "llama4_text": llama4,
    "mimo": QWEN2,
    "mistral": LlamaFamily(kv_heads=8, sliding_window=4096, bias="none"),
    "qwen2": QWEN2,
    "qwen3": LlamaFamily(kv_heads=32, head_dim=128, sliding_window=4096, window_switch=True, qk_norm=True),
}
ENCODER_DECODERS: Final[Mapping[str, Family]] = {"t5": t5, "whisper": whisper}
