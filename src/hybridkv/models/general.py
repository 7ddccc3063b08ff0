"""The general reader: reads a decoder by the fields that configs share, whatever its model type.

    layers, heads, KV heads, the width of a head      by their usual names
    the cache contents of each layer                  layer_types, or a rule of its config class
    latent attention with an indexer                  kv_lora_rank and qk_rope_head_dim; index_head_dim
    layers that share keys and values, cross attention

The reader never guesses: if no field gives a fact that bytes depend on, it raises a ConfigError that names the field.
For an unknown model type it rejects every field that looks like another mechanism. The rules are those of
transformers' config classes (5.19). Tests compare them with the caches of transformers' models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from hybridkv.errors import ConfigError, UnsupportedModelError
from hybridkv.models.counting import Attention, count
from hybridkv.models.fields import Fields
from hybridkv.models.layers import (
    CHUNKED,
    FULL,
    LINEAR,
    SLIDING,
    FamilyFacts,
    Heads,
    ReadOptions,
    mla_spec,
    ranges,
    refuse_layer_types,
)
from hybridkv.models.model import ASSUMED, MOST_LAYERS, Layer, ReadFact
from hybridkv.models.reading import (
    ATTENTION_CODES,
    CONFIG,
    LAYER_TYPES,
    LAYERS,
    SHARE_FACTOR,
    SHARES,
    Reading,
    class_defaults,
)
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import AttentionSpec, Keeps, KVCacheSpec, MLAAttentionSpec
from hybridkv.units import ceil_div, dtype_bytes, shown

INDEXED: Final = ("indexed_attention", "minimax_m3_sparse")
NOTHING: Final = ("mlp", "moe")
KINDS: Final = (FULL, SLIDING, CHUNKED, *INDEXED, *NOTHING)

PATTERN: Final = "hybrid_layer_pattern"
"""Field of MiMo-V2-Flash: 1 for a layer with a window."""
WINDOW: Final = ("sliding_window", "sliding_window_size", "attention_window_size")
MTP: Final = "multi-token prediction layers"
MTP_FIELDS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
"""Fields with the number of multi-token prediction layers."""
_UNSAID: Final = {"qwen3_next": 1}
"""Multi-token prediction layers of model types whose files do not count them."""
_WINDOWED: Final = ("mimo_v2_flash", "deepseek_v4", "deepseek_v41")
"""Model types with multi-token prediction layers that have the window of other layers."""
_TYPED: Final = ("step3p5", "step5")
"""Model types that give each multi-token prediction layer a type of its own, which is not read."""
HEADS: Final = (
    *("decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "n_head", "n_heads"),
    *("num_heads", "attention_heads", "num_query_heads"),
)
KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
WIDTH: Final = ("head_dim", "attention_head_dim", "kv_channels", "d_kv", "d_head", "dim_head")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "emb_dim", "model_dim")
POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "model_max_length")
SOURCES: Final = ("max_source_positions", "max_position_embeddings")
UNDERSTOOD: Final = (
    *(*LAYERS, *HEADS, *KV_HEADS, *WIDTH, *HIDDEN, *POSITIONS, *SOURCES, *LAYER_TYPES, *WINDOW),
    *("v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "indexer_types", "num_kv_shared_layers"),
    *("use_sliding_window", "max_window_layers", "attention_chunk_size", "per_layer_config", "cross_attention_layers"),
    *(SHARES, SHARE_FACTOR, *MTP_FIELDS),
)
"""Fields that mean the same in every model type."""
_OTHER_MECHANISMS: Final = re.compile(
    r"ssm|mamba|conv|rwkv|recurrent|lru|linear_|lora|latent|index|compress|retention|delta|hyena|lightning|cross_att"
    r"|shar|reuse|chunk|local|window|block_type|layer_pattern|hybrid|sparse_att|memory|mem_len|state|lsh|per_layer"
    r"|attn_layer|attention_layer|attention_type|global_|num_mem|key_value_map|kv_map|k_eq_v|mtp_|prefix|ngram|patch"
    r"|swa_|loop|param_sink"
)
_HARMLESS: Final = re.compile(
    r"expert|moe|initializ|cls_|chunk_size_feed_forward|embedding|dropout|bias|rope|position|vocab|q_lora_rank"
)
_PLACES: Final = re.compile(r"pattern|every|block_type|attn_layer|attention_layer|global_")
"""Fields that assign types to layers, as layer_types does."""


@dataclass(frozen=True, slots=True)
class _Shapes:
    """The shape of one layer, named like config fields. ``v_head_dim``: width of a value if it differs from a key's."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int | None = None
    sliding_window: int | None = None

    @property
    def heads(self) -> Heads:
        """Attention heads of the layer."""
        return Heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)


def general(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read the layers of the model type in ``fields``. ``given`` names the fields that the caller set.

    Raises ConfigError for a fact that cannot be read, with a field that supplies it. Raises UnsupportedModelError for
    layers that keep something else than attention does.
    """
    model_type = fields.text("model_type") or ""
    known = class_defaults(model_type)
    reading = Reading(fields, known or {}, given)
    if known is None:
        if reading.key(LAYERS) is None:
            raise UnsupportedModelError(
                f"model type {shown(model_type)} of {fields.name} is not known, and nothing like num_hidden_layers "
                "says how many layers it has"
            )
        _refuse_other_mechanisms(fields, model_type)
        reading.assume("layers", "an ordinary decoder", f"no model type {model_type!r} is known here, its fields are")
    if fields.flag("add_cross_attention") and not fields.flag("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{fields.name} has cross attention (add_cross_attention), but no field says what it reads: not supported"
        )
    if fields.values.get("is_decoder") is False and not fields.flag("is_encoder_decoder"):
        reading.assume("use", "a decoder", "is_decoder is false, where the model might read both ways and keep nothing")
    number = layer_count(reading)
    types = layer_types(reading, number, known=known is not None)
    shapes = _shapes(reading, types, options, known=known is not None)
    owners = _owners(reading, types)
    images = set(fields.integers("cross_attention_layers") or ())
    layers = [
        _read_by(layer, [j for j in readers if j != i])
        for i, readers in owners.items()
        for layer in _layers_of(reading, i, types[i], shapes[i], options)
    ]
    layers = [_cross(one, shapes[one.index], reading, options) if one.index in images else one for one in layers]
    longest = _image_tokens(reading) if images else 0
    if fields.flag("is_encoder_decoder"):
        layers = [one for layer in layers for one in (layer, _cross(layer, shapes[layer.index], reading, options))]
        longest = reading.required("tokens of the encoder", SOURCES)
    indexers = {one.index for one in layers if one.name.endswith(".indexer")}
    attentions = [
        Attention(shape.heads, shape.v_head_dim or shape.head_dim, kind, kept=i in owners, indexer=i in indexers)
        for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
    ]
    plain = known is not None and not images and not longest
    return facts(reading, layers, attentions if plain else (), max_encoder_tokens=longest)


def facts(
    reading: Reading, layers: Sequence[Layer], attentions: Sequence[Attention] = (), *, max_encoder_tokens: int = 0
) -> FamilyFacts:
    """Return the result of reading, with all notes. ``attentions``: of every layer, if weights can be counted."""
    drafting, left_out = mtp_layers(reading.fields)
    if left_out:
        reading.assume(MTP, f"{left_out} left out", f"{drafting}: they draft, where they run")
    key = reading.key(POSITIONS)
    if key is None:
        reading.derive("longest request", "no limit", f"there is none of {', '.join(POSITIONS[:3])}")
    return FamilyFacts(
        tuple(layers),
        partial(count, reading, attentions),
        max_encoder_tokens=max_encoder_tokens,
        positions=key,
        fields=reading.fields,
        read_from=tuple(reading.facts),
    )


def layer_count(reading: Reading) -> int:
    """Return the number of layers in the cache."""
    model_type = reading.fields.text("model_type")
    if model_type == "longcat_flash":
        return 2 * reading.required("layers, of two attentions each", ("num_layers",), most=MOST_LAYERS // 2)
    if not any(reading.own.values.get(key) is not None for key in LAYERS):
        # the one fact without which a config describes no model: no default of a class stands for it
        raise reading.missing("number of layers", "num_hidden_layers")
    count = reading.required("layers", LAYERS, most=MOST_LAYERS)
    if model_type == "hrm_text" and reading.fields.values.get("num_layers_per_stack") is None:
        high, low = (reading.required(what, (what,)) for what in ("H_cycles", "L_cycles"))
        why = f"{count} layers run {high} * ({low} + 1) times, each with a cache"
        return reading.derive("layers", count * high * (low + 1), why)
    return count


def heads_of(reading: Reading, options: ReadOptions, *, known: bool = True) -> Heads:
    """Return the attention heads, KV heads and head width of ordinary layers."""
    fields = reading.fields
    heads = reading.required("attention heads", HEADS)
    kv_heads = _kv_heads(reading, heads, options, known=known)
    width = reading.integer("width of a head", WIDTH)
    if width is None:
        hidden = reading.required("hidden size", HIDDEN)
        if hidden % heads:
            raise fields.fail(
                f"{heads} attention heads do not divide the hidden size {hidden}: say the width of a head with "
                "--set head_dim=N (fields=)"
            )
        width = reading.derive("width of a head", hidden // heads, "hidden size / attention heads")
    return Heads(heads, kv_heads, width)


def _kv_heads(reading: Reading, heads: int, options: ReadOptions, *, known: bool) -> int:
    fields = reading.fields
    model_type = fields.text("model_type")
    if model_type in {"falcon", "gpt_bigcode"}:
        many = model_type == "falcon" and fields.flag("new_decoder_architecture")
        if many and options.backend == "transformers":
            return reading.derive("KV heads", heads, "transformers' Falcon keeps a copy for every attention head")
        if not many and reading.flag("multi-query attention", "multi_query"):
            return reading.derive("KV heads", 1, "multi_query")
        if model_type == "gpt_bigcode":
            return reading.derive("KV heads", heads, "one for each attention head")
    if model_type == "dbrx":
        inner = Reading(Fields(fields.mapping("attn_config"), fields.name), {"kv_n_heads": 1})
        return reading.note("KV heads", inner.required("KV heads", ("kv_n_heads",)), "attn_config")
    found = reading.integer("KV heads", KV_HEADS)
    if found is not None:
        return found
    if not known and not reading.declares(KV_HEADS):
        raise reading.missing("KV heads", KV_HEADS[0])
    return reading.derive("KV heads", heads, "one for each attention head: no field says otherwise")


_PER_LAYER: Final = ("head_dim", "num_key_value_heads", "num_attention_heads", "v_head_dim", "sliding_window")


def _shapes(reading: Reading, types: Sequence[str], options: ReadOptions, *, known: bool) -> list[_Shapes]:
    """Return the shape of every layer. Latent attention has a placeholder."""
    fields = reading.fields
    if reading.key(("kv_lora_rank",)) is not None:
        count = reading.required("attention heads", HEADS)
        return [_Shapes(count, count, 1)] * len(types)
    heads = heads_of(reading, options, known=known)
    value = reading.integer("width of a value", ("v_head_dim",))
    window = _layer_window(reading) if SLIDING in types else None
    value = None if value == heads.head_dim else value
    common = _Shapes(heads.heads, heads.kv_heads, heads.head_dim, value, window)
    shapes = [common] * len(types)
    if fields.text("model_type") == "mimo_v2_flash":
        twice = 2 * heads.kv_heads
        if fields.integer("swa_num_key_value_heads", twice) != twice:
            raise reading.refuse_value("swa_num_key_value_heads", fields.values["swa_num_key_value_heads"])
        reading.derive("KV heads of windowed layers", twice, "twice those of the others, as its class has them")
        wide = replace(common, num_key_value_heads=twice)
        shapes = [wide if kind == SLIDING else common for kind in types]
    for index, change in _changes(reading, types).items():
        shapes[index] = replace(shapes[index], **change)
    return shapes


def _layer_window(reading: Reading) -> int:
    """Return the window of windowed layers in tokens."""
    # ModernBERT's decoder says a window, or else a span of which it is half
    if reading.own.values.get(WINDOW[0]) is None and reading.key(("local_attention",)) is not None:
        span = reading.required("local attention", ("local_attention",), minimum=2)
        return reading.derive("window", span // 2, "half of local_attention")
    window = reading.required("window", WINDOW)
    both_ways = reading.fields.values.get("use_bidirectional_attention") == "all"
    if both_ways and str(reading.fields.text("model_type")).startswith("gemma4"):
        return reading.derive("window", window // 2 + 1, "half, as attention goes both ways")
    return window


def _changes(reading: Reading, types: Sequence[str]) -> dict[int, dict[str, int]]:
    """Return the differing fields of layers by index: ``per_layer_config``, lists, Gemma 4's global layers."""
    fields = reading.fields
    changes: dict[int, dict[str, int]] = {}
    given = fields.mapping("per_layer_config")
    for key, value in given.items():
        if not key.isdecimal() or int(key) >= len(types) or not isinstance(value, dict) or value.get("skip"):
            raise reading.refuse_value("per_layer_config", {key: value})
        inner = Fields(value, fields.name)
        changes[int(key)] = {one: inner.integer(one) for one in _PER_LAYER if value.get(one) is not None}
    if given:
        reading.say(
            "layers that differ", ranges(sorted(changes)), "per_layer_config", reading.source("per_layer_config")
        )
    elif str(fields.text("model_type")).startswith("gemma4"):
        width = fields.integer("global_head_dim", 512)
        own: dict[str, int] = {"head_dim": width}
        kv_heads = fields.optional("num_global_key_value_heads")
        if kv_heads is not None and (fields.text("model_type") != "gemma4_text" or fields.flag("attention_k_eq_v")):
            own["num_key_value_heads"] = kv_heads
        changes = {i: own for i, kind in enumerate(types) if kind == FULL}
        source = reading.source("global_head_dim")
        reading.say(f"width of a head in {FULL} layers", str(width), "global_head_dim", source)
    return changes


def _owners(reading: Reading, types: Sequence[str]) -> dict[int, range]:
    """Return the layers that keep something, each with the layers that read it, itself included.

    The last ``num_kv_shared_layers`` read the keys and values of others. With ``use_cla`` (Hunyuan, arXiv 2405.12981),
    each ``cla_share_factor`` neighbours read those of the first, as in vLLM's hunyuan_v1.py.
    """
    count, fields = len(types), reading.fields
    shared = reading.integer(
        "last layers that read other layers' keys and values", ("num_kv_shared_layers",), minimum=0
    )
    if shared and shared >= count:
        raise fields.fail(f"num_kv_shared_layers {shared} leaves none of {count} layers a cache: correct one of them")
    if not fields.flag(SHARES):
        return {i: range(i, i + 1) for i in range(count - (shared or 0))}
    factor = reading.required("neighbouring layers that share keys and values", (SHARE_FACTOR,))
    owners = {i: range(i, min(i + factor, count)) for i in range(0, count, factor)}
    if shared or any(types[i] != types[j] for i, readers in owners.items() for j in readers):
        raise fields.fail(
            f"{SHARES} lets layers of different types share keys and values, which is not supported: correct "
            f"{SHARE_FACTOR}, layer_types or num_kv_shared_layers"
        )
    return owners


def _read_by(layer: Layer, readers: Sequence[int]) -> Layer:
    """Return ``layer`` as an entry that layers ``readers`` read, too."""
    prefix = f"model.layers.{layer.index}."
    return replace(layer, read_by=tuple(layer.name.replace(prefix, f"model.layers.{j}.", 1) for j in readers))


def _layers_of(reading: Reading, index: int, kind: str, shapes: _Shapes, options: ReadOptions) -> list[Layer]:
    """Return the cache entries of layer ``index``: zero, one, or two where an indexer keeps keys of its own."""
    name = f"model.layers.{index}.self_attn"
    if kind in NOTHING:
        return []
    if reading.key(("kv_lora_rank",)) is None:
        layers = [Layer(name, spec_of(kind, shapes.heads, reading, options, shapes), index)]
    else:
        if kind in {SLIDING, CHUNKED}:
            refuse_layer_types([kind], reading.name, (FULL, *INDEXED))
        for what, key in (("latent", "kv_lora_rank"), ("its rotary part", "qk_rope_head_dim")):
            reading.required(what, (key,))  # notes where mla_spec's fields come from
        layers = [Layer(name, mla_spec(reading.fields, options, shapes.heads.heads), index)]
    if kind in INDEXED:
        layers = [replace(one, top_states=_top_tokens(reading)) for one in layers]
    if kind in INDEXED and _has_indexer(reading, index):
        heads = _index_heads(reading, options)
        layers.append(Layer(f"{name}.indexer", _indexer(reading, options), index, index_heads=heads))
    return layers


def _top_tokens(reading: Reading) -> int:
    """Return the most tokens that an indexer chooses for a query; 0 where no field says it.

    Latent attention has ``index_topk`` tokens. MiniMax-M3 has ``index_topk_blocks`` blocks of ``index_block_size``.
    """
    blocks = reading.fields.optional("index_topk_blocks") or 0
    return reading.fields.optional("index_topk") or blocks * (reading.fields.optional("index_block_size") or 0)


def _index_heads(reading: Reading, options: ReadOptions) -> int:
    """Return the indexer's query heads on one rank: all of them next to latents, else split as query heads are."""
    heads = reading.fields.optional("index_n_heads") or 0
    return heads if reading.key(("kv_lora_rank",)) is not None else ceil_div(heads, options.tp)


def spec_of(
    kind: str, heads: Heads, reading: Reading, options: ReadOptions, shapes: _Shapes | None = None
) -> AttentionSpec:
    """Return the spec of a layer of ``kind``."""
    window = None if shapes is None else shapes.sliding_window
    spec = heads.of_type(kind if kind in {SLIDING, CHUNKED} else FULL, reading.fields, options, window=window)
    value = None if shapes is None else shapes.v_head_dim
    return spec if value is None else replace(spec, head_size_v=value)


def _has_indexer(reading: Reading, index: int) -> bool:
    """Return whether layer ``index`` keeps an indexer's keys, or reads those of an earlier layer."""
    if reading.is_made_by_class("indexer_types"):
        if reading.fields.text("model_type") != "glm_moe_dsa":
            raise reading.missing("which layers have an indexer", "indexer_types", '["full", "shared", ...]')
        if reading.own.values.get("index_topk_pattern") is not None:
            return _pattern_has_indexer(reading, index)
        every, first = (reading.fields.integer(key, most, minimum=0) for key, most in _INDEXERS.items())
        reading.derive(
            "layers with an indexer", f"every {max(every, 1)} from {first} on", "as its config class makes them"
        )
        return max(index - first + 1, 0) % max(every, 1) == 0
    types = reading.fields.names("indexer_types")
    if types is None:
        return True
    if index >= len(types) or types[index] not in {"full", "shared"}:
        raise reading.refuse_value("indexer_types", list(types))
    return types[index] == "full"


def _pattern_has_indexer(reading: Reading, index: int) -> bool:
    """Read ``index_topk_pattern`` of GLM-5: a letter (F, S) or a word (full, shared) for each layer."""
    pattern = reading.own.values["index_topk_pattern"]
    kind = pattern[index] if isinstance(pattern, str | list | tuple) and index < len(pattern) else None
    if kind not in (("F", "S") if isinstance(pattern, str) else ("full", "shared")):
        raise reading.refuse_value("index_topk_pattern", pattern)
    return kind in {"F", "full"}


_INDEXERS: Final = {"index_topk_freq": 1, "index_skip_topk_offset": 2}
"""Fields of GLM-5 with defaults: the interval of layers with their own indexer, and the first such layer."""


def _indexer(reading: Reading, options: ReadOptions) -> KVCacheSpec:
    """Return the spec of an indexer's keys, one per token.

    Next to latents, vLLM stores 8 bits and a float32 scale per 128 of them. Those of MiniMax-M3 are bfloat16 in vLLM,
    whatever the dtype of keys and values.
    """
    width, dtype = reading.required("key of the indexer", ("index_head_dim",)), options.dtype
    if options.backend == "vllm" and dtype_bytes(dtype) == 1:
        dtype = reading.derive("keys of the indexer", "bfloat16", "as vLLM keeps them beside 8-bit keys and values")
    if options.backend == "vllm" and reading.key(("kv_lora_rank",)) is not None:
        width, dtype = width + width // 128 * 4, "uint8"
        reading.derive("keys of the indexer", f"{width} bytes", "8-bit floats with scales, as vLLM keeps them")
    return MLAAttentionSpec(
        block_size=options.block_size, head_size=width, dtype=dtype, cache_role=SparseCacheRole.INDEXER
    )


def _cross(layer: Layer, shapes: _Shapes, reading: Reading, options: ReadOptions) -> Layer:
    """Return the cross attention of ``layer``, which keeps the encoder's tokens in the same number of heads."""
    return Layer(f"{layer.name}.cross", shapes.heads.cross(reading.fields, options), layer.index)


def _image_tokens(reading: Reading) -> int:
    """Return the tokens of an image that cross attention reads: all patches of all tiles, plus one per tile."""
    images = Fields(reading.fields.mapping("vision_config"), reading.name)
    if "image_size" not in images or "patch_size" not in images:
        return reading.required("tokens that cross attention reads", ("max_source_positions",))
    patches = (images.integer("image_size") // images.integer("patch_size")) ** 2
    tokens = (patches + 1) * images.integer("max_num_tiles", 1)
    reading.assume("tokens that cross attention reads", tokens, "one image of as many tiles as vision_config allows")
    return tokens


def _refuse_other_mechanisms(fields: Fields, model_type: str) -> None:
    """Raise UnsupportedModelError for an unknown model type with fields of another mechanism than attention."""
    placed = fields.values.get(LAYER_TYPES[0]) is not None
    odd = [
        key
        for key, value in fields.values.items()
        if value not in (None, False, 0, "", [], {})
        and key not in UNDERSTOOD
        and _OTHER_MECHANISMS.search(key.lower())
        and not _HARMLESS.search(key.lower())
        and not (placed and _PLACES.search(key.lower()))
        and not (key in {"index_topk", "index_n_heads"} and "index_head_dim" in fields)
    ]
    if odd:
        raise UnsupportedModelError(
            f"model type {shown(model_type)} of {fields.name} is not known, and {', '.join(odd[:4])} look like "
            "something that its layers keep beside keys and values: not supported yet"
        )


# -- the type of each layer, from the config or by the rule of its config class (transformers 5.19)


def layer_types(reading: Reading, count: int, *, known: bool) -> tuple[str, ...]:
    """Return the type of every layer, one of KINDS.

    Raises UnsupportedModelError for other types, and ConfigError where no field and no rule gives the types.
    """
    key = reading.key(LAYER_TYPES)
    if key is not None:
        found = reading.fields.layer_types(key, count, ())
        refuse_layer_types(found, reading.name, KINDS)
        reading.say_types(found, key)
        return _last_is_full(reading, found)
    if reading.key((ATTENTION_CODES,)) is not None:
        coded = coded_types(reading, count)
        refuse_layer_types(coded, reading.name, KINDS)
        return coded
    pattern = reading.fields.integers(PATTERN)
    if pattern is not None and reading.fields.text("model_type") == "mimo_v2_flash":
        if len(pattern) != count or not set(pattern) <= {0, 1}:
            raise reading.refuse_value(PATTERN, list(pattern))
        reading.say("windowed layers", ranges([i for i, one in enumerate(pattern) if one]), PATTERN, CONFIG)
        return tuple(SLIDING if one else FULL for one in pattern)
    if any(reading.is_made_by_class(one) for one in LAYER_TYPES):
        return _last_is_full(reading, _made_by_class(reading, count))
    window = window_of(reading)
    if window is not None and not known:
        raise reading.missing("which layers have the window", "layer_types", '["sliding_attention", ...]')
    kind = FULL if window is None else SLIDING
    if window is None and reading.key(("attention_chunk_size",)) is not None:
        kind = CHUNKED
    if reading.key(("index_head_dim",)) is not None and reading.key(("kv_lora_rank",)) is not None:
        kind = INDEXED[0]
    reading.derive("layers", f"{count} of {kind}", "there are no layer_types")
    return (kind,) * count


def coded_types(reading: Reading, count: int) -> tuple[str, ...]:
    """Read ``attn_type_list``: FULL or LINEAR for each of ``count`` layers. Raises ConfigError for any other list."""
    codes = reading.fields.integers(ATTENTION_CODES) or ()
    if len(codes) != count or not set(codes) <= {0, 1}:
        raise reading.refuse_value(ATTENTION_CODES, list(codes))
    types = tuple(FULL if code else LINEAR for code in codes)
    reading.say_types(types, ATTENTION_CODES)
    return types


def _last_is_full(reading: Reading, types: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types with full attention in Gemma 4's last layer, whatever its config says."""
    if str(reading.fields.text("model_type")).startswith("gemma4") and types[-1] != FULL:
        return (*types[:-1], reading.derive("last layer", FULL, "as its config class makes it"))
    return types


_PERIODS: Final[Mapping[str, tuple[str, int]]] = {
    "afmoe": ("global_attn_every_n_layers", 4),
    "cohere2": ("sliding_window_pattern", 4),
    "exaone4": ("sliding_window_pattern", 4),
    "exaone_moe": ("sliding_window_pattern", 4),
    "gemma3n_text": ("", 5),
    "gemma4_text": ("", 6),
    "gemma4_unified_text": ("", 6),
    "olmo3": ("", 4),
    "vaultgemma": ("", 2),
}
"""Config classes with full attention in every n-th layer, by a field or a constant, without layer_types."""
_SWITCHED: Final = ("qwen2_moe", "smollm3")
"""Config classes that have windows only with use_sliding_window."""
_FROM_A_LAYER: Final = ("dots1", "qwen2_vl_text", "qwen2_5_vl_text")
"""Config classes with windows from layer max_window_layers on, if they have any."""
_ALL_OF: Final[Mapping[str, str]] = {
    **dict.fromkeys(("laguna", "minimax_m3_vl_text", *_FROM_A_LAYER, *_SWITCHED), FULL),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), INDEXED[0]),
}
"""Config classes that give all layers one type."""


def _made_by_class(reading: Reading, count: int) -> tuple[str, ...]:
    """Return layer types that the config leaves to its class. Raises ConfigError if the rule is not known here."""
    model_type = reading.fields.text("model_type") or ""
    if model_type in _PERIODS:
        field, period = _PERIODS[model_type]
        if field and field in reading.fields:
            period = reading.required("every n-th layer is full", (field,))
        reading.derive("layers", f"every {period}th of {FULL}, others of {SLIDING}", "as its config class makes them")
        return tuple(SLIDING if (i + 1) % period else FULL for i in range(count))
    if model_type == "mimo_v2_flash":
        reading.derive(
            "layers", f"the first and every 6th of {FULL}, others of {SLIDING}", "as its config class has it"
        )
        return tuple(SLIDING if i and (i + 1) % 6 else FULL for i in range(count))
    if model_type in _FROM_A_LAYER and (window := window_of(reading)) is not None:
        first = reading.required("first layer with a window", ("max_window_layers",), minimum=0)
        reading.derive("layers", f"windows of {window} from layer {first} on", "as its config class makes them")
        return tuple(SLIDING if i >= first else FULL for i in range(count))
    kind = _ALL_OF.get(model_type)
    if kind is not None and not (model_type in _SWITCHED and reading.fields.flag("use_sliding_window")):
        reading.derive("layers", f"{count} of {kind}", "as its config class makes them")
        return (kind,) * count
    raise reading.missing("what each layer is", "layer_types", '["full_attention", ...]')


def window_of(reading: Reading) -> int | None:
    """Return the window in tokens; ``None`` without a window, or if ``use_sliding_window`` turns it off."""
    key = reading.key(WINDOW)
    if key is None or (reading.declares(("use_sliding_window",)) and not reading.fields.flag("use_sliding_window")):
        return None
    return reading.integer("window", (key,))


# -- multi-token prediction: layers after the model that draft tokens, each with keys and values of its own


def mtp_layers(fields: Fields) -> tuple[str | None, int]:
    """Return the field with the number of multi-token prediction layers, and the number; ``None`` and 0 without one."""
    key = next((one for one in MTP_FIELDS if fields.values.get(one) is not None), None)
    if key is None:
        return None, _UNSAID.get(fields.text("model_type") or "", 0)
    each = fields.integer("mtp_transformer_layers", 1) if key == "num_mtp_modules" else 1
    return key, each * fields.layers(key, minimum=0)


def with_mtp(layers: Sequence[Layer], fields: Fields, asked: int) -> tuple[tuple[Layer, ...], ReadFact]:
    """Append ``asked`` multi-token prediction layers to ``layers``; also return what was assumed of them.

    Each is like the last attention layer that keeps every token, its indexer included. In MiMo-V2-Flash and DeepSeek-V4
    it is like the last windowed layer. Raises ConfigError where the config has fewer, and for model types that give
    each a type of its own.
    """
    if fields.text("model_type") in _TYPED:
        raise fields.fail(
            "its multi-token prediction layers have types of their own, which are not read: leave mtp_layers= "
            "(--mtp-layers) out"
        )
    key, there = mtp_layers(fields)
    if asked > there:
        said = f"{key} says {there}" if key else "no field says that it has any (num_nextn_predict_layers)"
        raise fields.fail(
            f"{asked} multi-token prediction layers were asked for (mtp_layers=), and {said}: "
            "ask for fewer, or say --set num_nextn_predict_layers=N (fields=)"
        )
    keeps = {Keeps.WINDOW} if fields.text("model_type") in _WINDOWED else {Keeps.TOKENS, Keeps.RING}
    # the states of DeepSeek-V4's compressors are windows, too, but drafting layers do not compress
    like = [one for one in layers if one.spec.keeps in keeps and not one.name.endswith(".state_cache")]
    if not like:
        raise ConfigError(f"{fields.name} has no attention layer that a multi-token prediction layer could be like")
    entries = Counter(one.index for one in like)
    last = max(index for index, many in entries.items() if many == max(entries.values()))
    first = max(max(one.index for one in layers) + 1, fields.layers("num_hidden_layers", 1))
    added = [
        replace(one, name=f"mtp.layers.{i}.self_attn{one.name.partition('.self_attn')[2]}", index=first + i, read_by=())
        for i in range(asked)
        for one in like
        if one.index == last
    ]
    fact = ReadFact(MTP, f"{asked}, each as layer {last}", key or "its model type has them", ASSUMED)
    return (*layers, *added), fact
