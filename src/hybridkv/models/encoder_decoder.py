"""Whisper and T5: a decoder layer keeps its own tokens and, in its cross attention, the encoder's.

The encoder itself keeps nothing between steps. Field names are transformers' (5.19).
"""

from __future__ import annotations

from hybridkv.models.attention import Heads
from hybridkv.models.families import FamilyFacts, ReadOptions
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer
from hybridkv.models.weights import Weights, linear


def whisper(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Whisper: ``max_source_positions`` encoder tokens (1500, 30 seconds of sound) for every request."""
    hidden = fields.integer("d_model")
    count = fields.layers("decoder_layers")
    heads = _heads(fields, fields.integer("decoder_attention_heads"), hidden)
    module = "model.decoder.layers.{}"
    layers = _layers(count, heads, fields, options, own=f"{module}.self_attn", cross=f"{module}.encoder_attn")
    source = fields.integer("max_source_positions", 1500)

    def mlp(key: str) -> int:
        inner = fields.integer(key)
        return linear(hidden, inner, bias=True) + linear(inner, hidden, bias=True) + 2 * hidden

    def weights() -> Weights:
        # queries, values and the output have biases, keys have none; every norm has one
        attention = 4 * hidden * hidden + 3 * hidden + 2 * hidden
        convolutions = 3 * hidden * (fields.integer("num_mel_bins", 80) + hidden) + 2 * hidden
        encoder = fields.layers("encoder_layers") * (attention + mlp("encoder_ffn_dim"))
        encoder += convolutions + source * hidden + 2 * hidden
        decoder = count * (2 * attention + mlp("decoder_ffn_dim")) + 2 * hidden
        look_ups = fields.integer("max_target_positions", 448) * hidden
        head = fields.integer("vocab_size") * hidden
        # one decoder token is multiplied with the decoder and the tied head
        return Weights(encoder + decoder + look_ups + head, decoder + head, embedded=look_ups + head)

    return FamilyFacts(layers, weights, max_encoder_tokens=source)


def t5(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """T5: relative positions set no limit; ``n_positions`` (512) is what the encoder was trained with."""
    hidden, encoder_layers = fields.integer("d_model"), fields.layers("num_layers")
    count = fields.layers("num_decoder_layers", encoder_layers)
    heads = _heads(fields, fields.integer("num_heads"), hidden, fields.integer("d_kv", 64))
    module = "decoder.block.{}.layer"
    layers = _layers(
        count, heads, fields, options, own=f"{module}.0.SelfAttention", cross=f"{module}.1.EncDecAttention"
    )

    def weights() -> Weights:
        attention = 4 * hidden * heads.heads * heads.head_dim + hidden
        gated = (fields.text("feed_forward_proj") or "relu").startswith("gated")
        mlp = (3 if gated else 2) * hidden * fields.integer("d_ff") + hidden
        positions = fields.integer("relative_attention_num_buckets", 32) * heads.heads
        encoder = encoder_layers * (attention + mlp) + positions + hidden
        decoder = count * (2 * attention + mlp) + positions + hidden
        # the output head is tied to the embedding whatever the config says
        head = fields.integer("vocab_size") * hidden
        return Weights(encoder + decoder + head, decoder + head, embedded=head)

    return FamilyFacts(layers, weights, max_encoder_tokens=fields.integer("n_positions", 512))


def _heads(fields: Fields, count: int, hidden: int, width: int | None = None) -> Heads:
    if width is None:
        if hidden % count:
            raise fields.fail(f"{count} attention heads do not divide d_model {hidden}: correct one of them")
        width = hidden // count
    return Heads(count, count, width)


def _layers(
    count: int, heads: Heads, fields: Fields, options: ReadOptions, *, own: str, cross: str
) -> tuple[Layer, ...]:
    """own, cross: names of the two attention modules of decoder layer {}."""
    full, encoder = heads.full(fields, options), heads.cross(fields, options)
    layers: list[Layer] = []
    for i in range(count):
        layers += [Layer(own.format(i), full, i), Layer(cross.format(i), encoder, i)]
    return tuple(layers)
