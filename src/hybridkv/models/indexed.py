"""Decoders with an indexer's keys next to attention, or with heads that differ by the type of the layer.

Fields and rules are those of transformers' config classes (5.24) and of vLLM 0.33's configs and model code. Each reader
names its sources. Where both disagree, or leave a value open that bytes depend on, the config is rejected with an error
that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hybridkv.models.fields import Fields
from hybridkv.models.general import WINDOW, facts, general, layer_count
from hybridkv.models.layers import (
    FULL,
    SLIDING,
    FamilyFacts,
    Heads,
    NotingFamily,
    Part,
    ReadOptions,
    layers_of,
    refuse_layer_types,
)
from hybridkv.models.reading import Reading, class_defaults

_SPARSE: Final = "sparse_attention_config"
_OTHER: Final = "attention_other_setting"
_DRAFTS: Final = "num_nextn_predict_layers"
_COSTS: Final = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_block_size": "index_block_size",
}
"""Fields of transformers' class, which cost models read, by the fields of the files (its ``__post_init__``)."""
SPARSE: Final = "minimax_m3_sparse"
"""Type of a layer with an indexer in MiniMax-M3."""


def minimax_m3(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read MiniMax-M3: attention in all layers, with one indexer's key per token in some.

    The files give ``sparse_attention_config``: ``sparse_attention_freq`` (1 for a layer with an indexer) and
    ``sparse_index_dim`` (elements of a key). transformers turns them into ``layer_types`` and ``index_head_dim``
    (configuration_minimax_m3_vl.py); vLLM reads them as they are (models/minimax_m3/nvidia/model.py).
    """
    section = fields.mapping(_SPARSE)
    if not section:
        return general(fields, options, given)
    inner = Fields(section, fields.name)
    count = fields.layers("num_hidden_layers", 60)
    codes = _codes(inner, "sparse_attention_freq", count)
    values = dict(fields.values)
    if not inner.flag("use_sparse_attention", default=True) and any(codes):
        raise fields.fail(
            f"{_SPARSE} has use_sparse_attention false and layers with an indexer in sparse_attention_freq: correct one"
        )
    indexed = [i for i, code in enumerate(codes) if code]
    if any(not one for i, one in enumerate(_codes(inner, "sparse_disable_index_value", count, 1)) if i in indexed):
        raise fields.fail(
            f"sparse_disable_index_value of {_SPARSE} is 0 for a layer with an indexer, which would keep values, too: "
            "not supported"
        )
    made = [SPARSE if code else FULL for code in codes]
    if values.get("layer_types") not in (None, made):
        raise fields.fail(f"layer_types and sparse_attention_freq of {_SPARSE} differ: correct one of them")
    width = inner.integer("sparse_index_dim", fields.optional("index_head_dim", 128))
    values |= {"layer_types": made, "index_head_dim": width}
    values |= {key: section[own] for own, key in _COSTS.items() if section.get(own) is not None}
    found = general(replace(fields, values=values), options, given)
    said = {"layer_types": f"{_SPARSE}.sparse_attention_freq", "index_head_dim": f"{_SPARSE}.sparse_index_dim"}
    return replace(
        found, read_from=tuple(replace(one, field=said.get(one.field, one.field)) for one in found.read_from)
    )


def _codes(inner: Fields, key: str, count: int, default: int | None = None) -> Sequence[int]:
    """Return a list of 0 or 1 for each layer; ``default`` for a missing list, or an error without a default."""
    found = inner.integers(key)
    if found is None and default is not None:
        return (default,) * count
    if found is None or len(found) != count or not set(found) <= {0, 1}:
        raise inner.fail(f"{key} of {_SPARSE} must have 0 or 1 for each of {count} layers: correct it")
    return found


# -- Step-3, -3.5 and -3.7: windowed layers with more query heads, or one KV head for all

MFA: Final = "step3_text"


def step_3(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read Step-3, -3.5 and -3.7: ``num_attention_groups`` KV heads, windows by ``layer_types``.

    Windowed layers have as many KV heads as the others; only query heads differ (``num_sliding_attention_heads``, or
    ``attention_other_setting``). Step-3 has one KV head for queries that share a matrix (multi-matrix factorization
    attention), and no windows. Sources: configuration_step3p7.py of transformers, model_executor/models/step3p5.py and
    step3_text.py of vLLM.
    """
    reading = Reading(fields, class_defaults(fields.text("model_type") or "") or {}, given)
    number = layer_count(reading)
    types = step_types(reading, number)
    heads = step_heads(reading)
    if fields.text("model_type") == MFA and heads[FULL].kv_heads != 1:
        raise reading.refuse_value("num_attention_groups", heads[FULL].kv_heads)
    if heads[SLIDING].kv_heads != heads[FULL].kv_heads or heads[SLIDING].head_dim != heads[FULL].head_dim:
        raise reading.fields.fail(
            f"num_attention_groups or head_dim of {_OTHER} differs from the config's, and engines do not read it: "
            "correct one of them"
        )
    parts = {FULL: (Part("self_attn", heads[FULL].full(fields, options)),)}
    if SLIDING in types:
        window = reading.required("window", WINDOW)
        parts[SLIDING] = (Part("self_attn", heads[SLIDING].sliding(fields, options, window)),)
    return facts(reading, layers_of(types, parts, reading.name))


def step_types(reading: Reading, number: int) -> tuple[str, ...]:
    """Return the type of every layer, without those of drafting layers.

    A list may end with an entry for each of ``num_nextn_predict_layers`` drafting layers. Without a list all layers are
    full attention, as transformers' config class makes them.
    """
    key = next((one for one in _STEP_TYPES if reading.own.values.get(one) is not None), None)
    if key is None:
        reading.derive("layers", f"{number} of {FULL}", "as its config class makes them")
        return (FULL,) * number
    types = reading.fields.names(key) or ()
    drafting = reading.fields.optional(_DRAFTS, 0, minimum=0) or 0
    if len(types) not in (number, number + drafting):
        raise reading.refuse_value(key, list(types))
    types = types[:number]
    refuse_layer_types(types, reading.name, (FULL, SLIDING))
    reading.say_types(types, key)
    return types


_STEP_TYPES: Final = ("layer_types_with_mtp", "layer_types")


def step_heads(reading: Reading) -> Mapping[str, Heads]:
    """Return the heads of full and of windowed layers.

    ``attention_other_setting`` changes windowed layers: heads, KV heads (``num_attention_groups``) and width.
    ``num_sliding_attention_heads`` and ``swa_num_attention_heads`` change their query heads only.
    """
    groups = reading.required("KV heads", ("num_attention_groups", "num_key_value_heads"))
    width = reading.required("width of a head", ("head_dim",))
    heads = Heads(reading.required("attention heads", ("num_attention_heads",)), groups, width)
    other = Fields(reading.fields.mapping(_OTHER), reading.name)
    if other.values and other.text("attention_type") != SLIDING:
        raise reading.refuse_value(_OTHER, dict(other.values))
    many = other.integer("num_attention_heads", heads.heads)
    for key in ("num_sliding_attention_heads", "swa_num_attention_heads"):
        many = reading.fields.optional(key) or many
    windowed = Heads(many, other.integer("num_attention_groups", groups), other.integer("head_dim", width))
    return {FULL: heads, SLIDING: windowed}


INDEXED_DECODERS: Final[Mapping[str, NotingFamily]] = {
    "minimax_m3_vl_text": minimax_m3,
    **dict.fromkeys((MFA, "step3p5"), step_3),
}
