"""Count the weights of decoders that the general reader reads, for the model types with a recipe, to the last weight.

    attention (its heads, or latents with an indexer), MLP or mixture of experts, norms, embeddings

A Recipe holds the differences of a model type. Tests compare every recipe with the parameters of transformers' model
(5.19). Model types without a recipe are not counted at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from hybridkv.errors import MissingFieldError
from hybridkv.models.layers import FULL, LINEAR, SLIDING, Heads, Weights, experts, language_model, mla_weights
from hybridkv.models.reading import MADE_BY_CLASS, Reading, table


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer.

    Attributes:
        heads: heads and their width.
        value_dim: elements of a value in one head.
        kind: type of the layer.
        kept: whether the layer has keys and values of its own.
        indexer: whether the layer has an indexer of its own.
    """

    heads: Heads
    value_dim: int
    kind: str
    kept: bool = True
    indexer: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    """The names of the config fields of a mixture of experts.

    Attributes:
        count: field for the number of experts.
        chosen: field for the experts that a token uses.
        width: field for the inner width of one expert.
        shared: field for the number of shared experts, or for their width in total where ``wide``.
        wide: whether ``shared`` is a width.
        gate: whether a gate, a vector of the hidden size, scales the shared experts.
        first: number of dense layers before the first mixture, where neither config nor class names it.
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
    """The differences between model types.

    Attributes:
        norms: norm vectors of the hidden size in a layer.
        last: norm vectors after the last layer.
        qk_norm: norm of Q and K over each "head", or over all "heads" at once; empty for no norm.
        qk_if: field that says whether there is a ``qk_norm``, or True.
        bias: field that says whether Q, K and V have biases, or True.
        out: field that says whether the output projection has a bias, or True.
        matrices: matrices of an MLP.
        mlp_bias: field that says whether the MLP has biases, or True.
        mixture: fields of the mixture of experts; ``None`` for dense layers only.
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
    """Return the recipes by model type."""
    return msgspec.convert(table("types")["recipes"], dict[str, Recipe])


def count(reading: Reading, layers: Sequence[Attention]) -> Weights:
    """Count the weights of a decoder of ``layers``, layers that share keys and values included. O(layers).

    Returns Weights() for no layers, for a type without a recipe, and where a needed field is missing. Raises
    ConfigError for a field that is not a number.
    """
    recipe = recipes().get(reading.fields.text("model_type") or "")
    if not layers or recipe is None:
        return Weights()
    try:
        return _Counting(reading, recipe).model(layers)
    except MissingFieldError:
        return Weights()


class _Counting:
    """Counts one model. Its methods raise MissingFieldError for a missing field."""

    def __init__(self, reading: Reading, recipe: Recipe) -> None:
        self.reading, self.recipe, self.fields = reading, recipe, reading.fields
        self.hidden = reading.fields.integer("hidden_size")

    def model(self, layers: Sequence[Attention]) -> Weights:
        """Count the layers, their norms, the last norm and the embeddings."""
        embedding = self.fields.integer("vocab_size") * self.hidden
        norms = (len(layers) * self.recipe.norms + self.recipe.last) * self.hidden
        attention = sum(self.attention(one) for one in layers)
        tied = self.fields.flag("tie_word_embeddings", default=self.reading.declares(("tie_word_embeddings",)))
        weights = self.mlps(layers) + Weights.dense(attention + norms)
        return language_model(weights, embedding=embedding, tied=tied) + self.beside(layers)

    def attention(self, one: Attention) -> int:
        """Count the projections, their biases and norms."""
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

    def mlps(self, layers: Sequence[Attention]) -> Weights:
        """Count the MLPs and mixtures of all layers."""
        mixture, count = self.recipe.mixture, len(layers)
        if mixture is None or (self._type == "gemma4_text" and not self.fields.flag("enable_moe_block")):
            wide = sum(not one.kept for one in layers) if self.fields.flag("use_double_wide_mlp") else 0
            return self._dense(count + wide)
        total, width = self.fields.integer(mixture.count), self.fields.integer(mixture.width)
        each = Weights.dense(self.hidden * (total + mixture.gate))
        each += experts(3 * self.hidden * width, total, self.fields.integer(mixture.chosen))
        if mixture.shared is not None and (mixture.wide or self.reading.key((mixture.shared,)) is not None):
            shared = self.fields.integer(mixture.shared, minimum=0)
            one = self.fields.optional("moe_shared_expert_intermediate_size") or width
            each += Weights.dense(self._mlp(shared if mixture.wide else shared * one) if shared else 0)
        if self._type == "gemma4_text":
            # a mixture next to an MLP, with norms of its own, a scale for the router's input and one for every expert
            return (each + Weights.dense(4 * self.hidden + total)) * count + self._dense(count)
        sparse = self._sparse(count, mixture)
        return each * sparse + self._dense(count - sparse)

    def beside(self, layers: Sequence[Attention]) -> Weights:
        """Count the further parts of Gemma 3n and 4: per-layer embeddings, their projections, AltUp and LAuReL."""
        if self._type not in {"gemma3n_text", "gemma4_text"}:
            return Weights()
        if self.fields.values.get("vocab_size_per_layer_input") is None:
            raise MissingFieldError(f"config of {self.fields.name}: vocab_size_per_layer_input is missing: add it")
        count, hidden, found = len(layers), self.hidden, Weights()
        if width := self.fields.optional("hidden_size_per_layer_input", minimum=0):
            found += Weights(self.fields.integer("vocab_size_per_layer_input") * count * width)
            found += Weights.dense(count * width * hidden + width + count * (2 * width + 1) * hidden)
        if self._type == "gemma3n_text":
            inputs, rank = self.fields.integer("altup_num_inputs"), self.fields.integer("laurel_rank")
            altup = 2 * hidden + inputs**2 + inputs**3 + inputs * hidden
            found += Weights.dense(count * (altup + (2 * rank + 1) * hidden) + 2 * (inputs - 1) * hidden**2)
        return found

    def _sparse(self, count: int, mixture: Mixture) -> int:
        """Return how many layers are mixtures, by the config, by the rule of its class, or all."""
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

    def _dense(self, count: int) -> Weights:
        """Count the MLPs of ``count`` layers. Gemma 3n may give a width for each."""
        widths = self.fields.values.get("intermediate_size")
        if isinstance(widths, list):
            widths = self.fields.integers("intermediate_size") or ()
            if len(widths) != count:
                raise MissingFieldError(f"intermediate_size has {len(widths)} entries for {count} layers")
            return Weights.dense(sum(map(self._mlp, widths)))
        return Weights.dense(count * self._mlp(self.fields.integer("intermediate_size")) if count else 0)

    def _mlp(self, inner: int) -> int:
        biases = ((self.recipe.matrices - 1) * inner + self.hidden) * self._has(self.recipe.mlp_bias)
        return self.recipe.matrices * self.hidden * inner + biases

    def _indexer(self) -> int:
        width, heads = self.fields.integer("index_head_dim"), self.fields.integer("index_n_heads")
        return self.fields.integer("q_lora_rank") * width * heads + self.hidden * (width + heads) + 2 * width

    def _has(self, flag: str | bool) -> bool:
        return self.fields.flag(flag) if isinstance(flag, str) else flag
