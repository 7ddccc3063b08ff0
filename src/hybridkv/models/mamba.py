"""Mamba, FalconMamba, Mamba2: a recurrent mixer in every layer and nothing else.

Defaults of missing fields are those of transformers' config classes (5.19).
"""

from __future__ import annotations

from hybridkv.models.families import FamilyFacts, ReadOptions
from hybridkv.models.fields import Fields
from hybridkv.models.model import Layer
from hybridkv.models.states import Mamba1, Mamba2
from hybridkv.models.weights import Weights, language_model


def mamba(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Mamba and FalconMamba; the latter's norms have no weights."""
    hidden = fields.integer("hidden_size")
    mixer = Mamba1(
        hidden=hidden,
        inner=fields.integer("expand", 2) * hidden,
        state=fields.integer("state_size", 16),
        kernel=fields.integer("conv_kernel", 4),
        dt_rank=dt_rank(fields, "time_step_rank"),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias"),
    )
    return _stack(fields, options, mixer, tied=True)


def mamba2(fields: Fields, options: ReadOptions) -> FamilyFacts:
    """Mamba2."""
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


def dt_rank(fields: Fields, key: str) -> int:
    """The width of the step size's bottleneck; ``auto`` is a sixteenth of the hidden size, rounded up."""
    if fields.values.get(key, "auto") == "auto":
        return -(-fields.integer("hidden_size") // 16)
    return fields.integer(key)


def _stack(fields: Fields, options: ReadOptions, mixer: Mamba1 | Mamba2, *, tied: bool) -> FamilyFacts:
    count, hidden = fields.layers("num_hidden_layers"), fields.integer("hidden_size")
    spec = mixer.spec(fields, options)
    layers = tuple(Layer(f"backbone.layers.{i}.mixer", spec, i) for i in range(count))

    def weights() -> Weights:
        own = Weights.dense(count * (mixer.weights + hidden) + hidden)
        embedding = fields.integer("vocab_size") * hidden
        return language_model(own, embedding=embedding, tied=fields.flag("tie_word_embeddings", default=tied))

    return FamilyFacts(layers, weights)
