"""Weights of decoders that the general reader reads: of the model types described here, to the last one.

    attention (its heads, or latents, with an indexer beside them), MLP or mixture of experts, norms, embeddings

What a type has beside that is one Recipe. Tests hold every one against the parameters that transformers' model (5.19)
has; a type without a recipe is not counted at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import msgspec

from hybridkv.models.layers import FULL, LINEAR, SLIDING, Heads, Weights, experts, language_model, mla_weights
from hybridkv.models.reading import MADE_BY_CLASS, Reading, table


@dataclass(frozen=True, slots=True)
class Attention:
    """Of one layer. value_dim: width of a value. kind: of the layer. kept: it has keys and values of its own.

    indexer: it has an indexer of its own.
    """

    heads: Heads
    value_dim: int
    kind: str
    kept: bool = True
    indexer: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    """Fields of a mixture of experts: how many, how many a token uses, how wide one is.

    shared: how many of that width, or the width of all of them where ``wide``. gate: a weight of the hidden size in
    front of them. first: how many layers before the first mixture, where neither file nor class says so.
    """

    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared: str | None = None
    wide: bool = False
    gate: bool = False
    first: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What differs between model types.

    norms: vectors of the hidden size in a layer; last: behind the last layer. qk_norm: over each "head", or over all
    "heads" at once; qk_if: the field that says whether there is one. bias: the field that says whether Q, K and V have
    biases (True: always); out: the same of O. matrices: of an MLP, with mlp_bias as bias.
    """

    norms: int = 2
    last: int = 1
    qk_norm: str = ""
    qk_if: str | bool = True
    bias: str | bool = "attention_bias"
    out: str | bool = "attention_bias"
    matrices: int = 3
    mlp_bias: str | bool = False
    mixture: Mixture | None = None


@cache
def recipes() -> Mapping[str, Recipe]:
    """The recipes by model type."""
    return msgspec.convert(table("types")["recipes"], dict[str, Recipe])


_BESIDE: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma3n_text": ("vocab_size_per_layer_input", "laurel_rank", "altup_num_inputs"),
    "gemma4_text": ("vocab_size_per_layer_input",),
}
"""What types with embeddings of every layer need besides."""


def count(reading: Reading, layers: Sequence[Attention]) -> Weights:
    """Count the weights of a decoder of ``layers``, those that share keys and values too.

    Weights() for no layers, for a type without a recipe, and where a field that they depend on is nowhere; ConfigError
    for one that is no number. O(layers).
    """
    recipe = recipes().get(reading.fields.text("model_type") or "")
    if not layers or recipe is None or any(reading.key((key,)) is None for key in ("hidden_size", "vocab_size")):
        return Weights()
    counting = _Counting(reading, recipe)
    mlps = counting.mlps(layers) if counting.is_whole(layers) else None
    if mlps is None:
        return Weights()
    hidden = counting.hidden
    dense = sum(counting.attention(one) for one in layers) + len(layers) * recipe.norms * hidden
    weights = mlps + Weights.dense(dense + recipe.last * hidden)
    look_ups = counting.beside(layers)
    embedding = reading.fields.integer("vocab_size") * hidden
    tied = reading.fields.flag("tie_word_embeddings", default=reading.declares(("tie_word_embeddings",)))
    return language_model(weights, embedding=embedding, tied=tied) + look_ups


class _Counting:
    """One model."""

    def __init__(self, reading: Reading, recipe: Recipe) -> None:
        self.reading, self.recipe, self.fields = reading, recipe, reading.fields
        self.hidden = reading.fields.integer("hidden_size")

    def is_whole(self, layers: Sequence[Attention]) -> bool:
        """Whether latents, an indexer and all else that a type has say how wide they are."""
        latent = self.reading.key(("kv_lora_rank",)) is not None
        needed = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim") if latent else ()
        indexer = ("index_n_heads", "q_lora_rank") if any(one.indexer for one in layers) else ()
        return all(self.reading.key((key,)) is not None for key in (*needed, *indexer, *_BESIDE.get(self._type, ())))

    def attention(self, one: Attention) -> int:
        """Projections, their biases and norms."""
        recipe, hidden = self.recipe, self.hidden
        if self.reading.key(("kv_lora_rank",)) is not None and one.kind != LINEAR:
            return mla_weights(self.fields, one.heads.heads) + (self._indexer() if one.indexer else 0)
        if one.kind == LINEAR:  # lightning attention: Q, K, V, an output gate and the output, and a norm
            norms = 2 * one.heads.head_dim if recipe.qk_norm and self._has(recipe.qk_if) else 0
            return (5 * hidden + 1) * one.heads.heads * one.heads.head_dim + norms
        q, k = one.heads.heads * one.heads.head_dim, one.heads.kv_heads * one.heads.head_dim
        own = k + one.heads.kv_heads * one.value_dim
        if one.kind == FULL and self.fields.flag("attention_k_eq_v"):
            own = k  # keys are values, too
        own = own if one.kept else 0
        weights = hidden * (q + own) + one.heads.heads * one.value_dim * hidden
        weights += (q + own) * self._has(recipe.bias) + hidden * self._has(recipe.out)
        if recipe.qk_norm and self._has(recipe.qk_if):
            queries, keys = (q, k) if recipe.qk_norm == "heads" else (one.heads.head_dim,) * 2
            weights += queries + (keys if one.kept else 0)
        if self._type == "mimo_v2_flash" and one.kind == SLIDING:
            weights += one.heads.heads  # a learned sink for each
        return weights

    def mlps(self, layers: Sequence[Attention]) -> Weights | None:
        """MLPs and mixtures of all layers."""
        mixture, count = self.recipe.mixture, len(layers)
        if mixture is None or (self._type == "gemma4_text" and not self.fields.flag("enable_moe_block")):
            wide = sum(not one.kept for one in layers) if self.fields.flag("use_double_wide_mlp") else 0
            return self._dense(range(count + wide))
        keys = (mixture.count, mixture.chosen, mixture.width, *([mixture.shared] if mixture.wide else []))
        if any(self.reading.key((key,)) is None for key in keys if key):
            return None
        total, width = self.fields.integer(mixture.count), self.fields.integer(mixture.width)
        each = Weights.dense(self.hidden * total) + experts(
            3 * self.hidden * width, total, self.fields.integer(mixture.chosen)
        )
        if mixture.shared is not None and self.reading.key((mixture.shared,)) is not None:
            shared = self.fields.integer(mixture.shared, minimum=0)
            one = self.fields.optional("moe_shared_expert_intermediate_size") or width
            each += Weights.dense(self._mlp(shared if mixture.wide else shared * one) if shared else 0)
        each += Weights.dense(self.hidden if mixture.gate else 0)
        if self._type == "gemma4_text":
            # beside an MLP, behind norms of its own, with a scale for the router's input and one for every expert
            each += Weights.dense(4 * self.hidden + total)
            sparse, dense = count, self._dense(range(count))
        else:
            sparse = self._sparse(count, mixture)
            dense = self._dense(range(count - sparse))
        return None if dense is None else each * sparse + dense

    def beside(self, layers: Sequence[Attention]) -> Weights:
        """Of Gemma 3n and 4: embeddings of every layer, which are look-ups, and what brings them in; and more."""
        width = self.fields.optional("hidden_size_per_layer_input", minimum=0) or 0
        found = Weights()
        if self._type in _BESIDE and width:
            every = len(layers) * width
            table = self.fields.integer("vocab_size_per_layer_input") * every
            found += Weights(table) + Weights.dense(
                every * self.hidden + width + len(layers) * (2 * width + 1) * self.hidden
            )
        if self._type == "gemma3n_text":
            inputs, rank = self.fields.integer("altup_num_inputs"), self.fields.integer("laurel_rank")
            altup = self.hidden + inputs**2 + inputs**3 + inputs * self.hidden + self.hidden
            laurel = (2 * rank + 1) * self.hidden
            found += Weights.dense(len(layers) * (altup + laurel) + 2 * (inputs - 1) * self.hidden**2)
        return found

    def _sparse(self, count: int, mixture: Mixture) -> int:
        """How many layers are mixtures: as the file says, as its class makes them, or all."""
        given = self.reading.own.names("mlp_layer_types")
        if given is not None:
            return given.count("sparse")
        only = self.fields.integers("mlp_only_layers") or ()
        if self.reading.declares(("decoder_sparse_step",)):
            step = self.fields.integer("decoder_sparse_step", 1)
            return sum((i + 1) % step == 0 and i not in only for i in range(count))
        made = self.reading.defaults.get("mlp_layer_types") == MADE_BY_CLASS
        if self.reading.declares(("first_k_dense_replace",)) and not (made and mixture.first):
            return count - min(count, self.fields.optional("first_k_dense_replace", 0, minimum=0) or 0)
        return count - min(count, mixture.first)

    @property
    def _type(self) -> str:
        return self.fields.text("model_type") or ""

    def _dense(self, layers: Sequence[int]) -> Weights | None:
        """MLPs of so many layers; Gemma 3n may give a width for each. None where their width is nowhere."""
        given = self.fields.values.get("intermediate_size")
        if given is None and layers:
            return None
        if isinstance(given, list):
            widths = self.fields.integers("intermediate_size") or ()
            return Weights.dense(sum(self._mlp(one) for one in widths)) if len(widths) == len(layers) else None
        return Weights.dense(len(layers) * self._mlp(self.fields.integer("intermediate_size")) if layers else 0)

    def _mlp(self, inner: int) -> int:
        biases = ((self.recipe.matrices - 1) * inner + self.hidden) * self._has(self.recipe.mlp_bias)
        return self.recipe.matrices * self.hidden * inner + biases

    def _indexer(self) -> int:
        width, heads = self.fields.integer("index_head_dim"), self.fields.integer("index_n_heads")
        return self.fields.integer("q_lora_rank") * width * heads + self.hidden * (width + heads) + 2 * width

    def _has(self, flag: str | bool) -> bool:
        return self.fields.flag(flag) if isinstance(flag, str) else flag
