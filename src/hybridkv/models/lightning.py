"""Decoders that alternate lightning attention with softmax attention: MiniMax-Text-01 and -M1, Ling and Ring linear.

A layer of lightning attention keeps one matrix of head width x head width for every head. Sources: MiniMax-01 (arXiv
2501.08313); the models' own code for which layers are which; vLLM's calculators for shape and dtype of the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hybridkv.models.counting import Attention
from hybridkv.models.fields import Fields
from hybridkv.models.general import facts, heads_of, layer_count
from hybridkv.models.kinds import ATTENTION_CODES, coded_types
from hybridkv.models.layers import (
    FULL,
    LINEAR,
    FamilyFacts,
    Heads,
    ReadOptions,
    mla_spec,
    per_rank,
    ranges,
    refuse_layer_types,
)
from hybridkv.models.model import Layer
from hybridkv.models.other_states import state_of, types_of
from hybridkv.models.reading import Reading, class_defaults
from hybridkv.models.states import DeltaNet
from hybridkv.specs import KVCacheSpec

MINIMAX: Final = ("minimax", "minimax_m1", "minimax_text_01", "minimax_vl_01", "MiniMaxM1", "MiniMaxText01")
BAILING: Final = ("bailing_hybrid", "bailing_moe_linear")
"""Model types: of transformers, of the files, of the classes beside the files."""
GROUP: Final = "layer_group_size"
_SHORT_CONV: Final = "short_conv_kernel_size"


def minimax(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """MiniMax-Text-01 and -M1: layers as ``layer_types`` or ``attn_type_list`` (0: lightning, 1: softmax) say."""
    # the checkpoints' own code has the defaults of transformers' class
    same = replace(fields, values={**fields.values, "model_type": "minimax"})
    reading = Reading(same, class_defaults("minimax") or {}, given)
    number = layer_count(reading)
    coded = coded_types(reading, number) if reading.key((ATTENTION_CODES,)) is not None else None
    types = types_of(reading, number, (FULL, LINEAR)) if coded is None else coded
    heads = heads_of(reading, options)
    specs = {FULL: heads.full(fields, options), LINEAR: _lightning(heads, reading, options, options.state_dtype)}
    return _facts(reading, types, heads, specs)


def bailing(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Ling and Ring linear: the last of every ``layer_group_size`` layers is full attention.

    So are the layers of an unfinished last group. Full attention is MLA where the config has ``kv_lora_rank`` (2.5 and
    later). The other layers are Kimi's delta attention where the config has ``short_conv_kernel_size`` (3), else
    lightning attention.
    """
    reading = Reading(fields, {}, given)
    number = layer_count(reading)
    group = reading.required("every n-th layer is full attention", (GROUP,))
    whole = number // group * group
    types = tuple(FULL if (i + 1) % group == 0 or i >= whole else LINEAR for i in range(number))
    where = ranges([i for i, kind in enumerate(types) if kind == FULL])
    reading.say("full attention layers", where, GROUP, reading.source(GROUP))
    heads = heads_of(reading, options)
    if reading.key(("kv_lora_rank",)) is None:
        full: KVCacheSpec = heads.full(fields, options)
    else:
        full = mla_spec(fields, options, heads.heads)
    if reading.key((_SHORT_CONV,)) is None:
        # their code keeps the recurrence in float32, vLLM in the dtype of the model
        dtype = "float32" if options.backend == "transformers" else options.state_dtype
        linear = _lightning(heads, reading, options, dtype)
    else:
        kernel = reading.required("width of the convolution", (_SHORT_CONV,), minimum=2)
        own = (heads.heads, heads.heads, heads.head_dim, heads.head_dim, kernel)
        linear = DeltaNet(fields.integer("hidden_size"), *own, mamba_type="kda_attention").spec(fields, options)
    return _facts(reading, types, heads, {FULL: full, LINEAR: linear})


def _lightning(heads: Heads, reading: Reading, options: ReadOptions, dtype: str) -> KVCacheSpec:
    """One matrix for every head of one rank."""
    mine = per_rank(heads.heads, options.tp, "lightning attention heads", reading.name)
    return state_of(options, LINEAR, ((mine, heads.head_dim, heads.head_dim), dtype))


def _facts(reading: Reading, types: Sequence[str], heads: Heads, specs: dict[str, KVCacheSpec]) -> FamilyFacts:
    refuse_layer_types(types, reading.name, (FULL, LINEAR))
    layers = [Layer(f"model.layers.{i}.self_attn", specs[kind], i) for i, kind in enumerate(types)]
    attentions = [Attention(heads, heads.head_dim, kind) for kind in types]
    return facts(reading, layers, attentions)
