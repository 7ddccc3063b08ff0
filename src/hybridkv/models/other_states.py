"""Decoders with other kinds of states: lightning attention, RWKV, xLSTM, RG-LRU, convolutions next to attention.

States have transformers' layout (5.19) where no other engine's is known; the readers say where one is.

A layer of lightning attention keeps one matrix of head width x head width for every head. MiniMax-Text-01 and -M1, and
Ling and Ring linear alternate it with softmax attention. Sources: MiniMax-01 (arXiv 2501.08313); the models' own code
for the type of each layer; vLLM's calculators for shape and dtype of the states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.models.counting import Attention
from hybridkv.models.fields import Fields
from hybridkv.models.general import WIDTH, WINDOW, coded_types, facts, heads_of, layer_count, spec_of
from hybridkv.models.layers import (
    FULL,
    LINEAR,
    SLIDING,
    FamilyFacts,
    Heads,
    NotingFamily,
    Part,
    ReadOptions,
    layers_of,
    mla_spec,
    per_rank,
    ranges,
    refuse_layer_types,
)
from hybridkv.models.model import Layer
from hybridkv.models.reading import ATTENTION_CODES, Reading, class_defaults
from hybridkv.models.states import DeltaNet, ShortConv, one_width_of_convolutions, state_of
from hybridkv.specs import KVCacheSpec, SlidingWindowSpec
from hybridkv.units import round_up

_F32: Final = "float32"
MINIMAX: Final = ("minimax", "minimax_m1", "minimax_text_01", "minimax_vl_01", "MiniMaxM1", "MiniMaxText01")
BAILING: Final = ("bailing_hybrid", "bailing_moe_linear")
"""Model types of transformers, of the config files, and of the classes that come with the files."""
GROUP: Final = "layer_group_size"
_SHORT_CONV: Final = "short_conv_kernel_size"
LOOPED: Final = "inkling2_loop_text"


def lfm2_moe(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read LFM2 with experts: ``layer_types`` of attention and of short convolutions with width ``conv_L_cache``."""
    reading, number = _opened(fields, options, given, splits=True)
    types = types_of(reading, number, (FULL, "conv"))
    one_width_of_convolutions(reading.fields)
    heads = heads_of(reading, options)
    mixer = ShortConv(
        reading.required("hidden size", ("hidden_size",)),
        reading.required("width of the convolution", ("conv_L_cache",)),
    )
    specs: dict[str, KVCacheSpec] = {FULL: heads.full(fields, options), "conv": mixer.spec(fields, options)}
    return facts(reading, [Layer(f"model.layers.{i}.{kind}", specs[kind], i) for i, kind in enumerate(types)])


def lfm3(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read LFM3: full attention, windows, and short convolutions with width ``conv_L_cache`` (transformers 5.24).

    Without ``layer_types``, layers 2, 6, 10, ... are full attention, layers 4, 8, 12, ... have the window, and the
    others are convolutions.
    """
    reading, number = _opened(fields, options, given)
    if reading.is_made_by_class("layer_types"):
        types = tuple("conv" if not i or i % 2 else SLIDING if i % 4 == 0 else FULL for i in range(number))
        reading.derive("layers", f"{', '.join(types[:5])}, ...", "as its config class makes them")
    else:
        types = types_of(reading, number, (FULL, SLIDING, "conv"))
    heads = heads_of(reading, options)
    width = reading.required("width of the convolution", ("conv_L_cache",))
    channels = reading.required("hidden size", ("hidden_size",))
    state = state_of(options, "short_conv", ((channels, width), options.state_dtype))
    specs: dict[str, KVCacheSpec] = {FULL: heads.full(fields, options), "conv": state}
    if SLIDING in types:
        specs[SLIDING] = heads.sliding(fields, options, reading.required("window", WINDOW))
    return facts(reading, [Layer(f"model.layers.{i}.{kind}", specs[kind], i) for i, kind in enumerate(types)])


def recurrent_gemma(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read RecurrentGemma (arXiv 2404.07839): ``block_types`` of windows and RG-LRU layers, each with a convolution."""
    reading, number = _opened(fields, options, given)
    pattern = reading.fields.names("block_types")
    if not pattern:
        raise reading.missing("what each layer is", "block_types", '["recurrent", "recurrent", "attention"]')
    refuse_layer_types(pattern, reading.name, ("recurrent", "attention"))
    reading.say("layers", f"{' '.join(pattern)} in turn", "block_types", reading.source("block_types"))
    heads = heads_of(reading, options)
    width = reading.integer("width of the recurrence", ("lru_width",)) or reading.required(
        "hidden size", ("hidden_size",)
    )
    columns = reading.required("width of the convolution", ("conv1d_width",), minimum=2) - 1
    window = reading.required("window", WINDOW)
    specs: dict[str, KVCacheSpec] = {
        "attention": heads.sliding(fields, options, window),
        "recurrent": state_of(options, LINEAR, ((width, columns), options.state_dtype), ((width,), _F32)),
    }
    kinds = [pattern[i % len(pattern)] for i in range(number)]
    return facts(reading, [Layer(f"model.layers.{i}.temporal_block", specs[kind], i) for i, kind in enumerate(kinds)])


def rwkv(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read RWKV-4: the last input of both blocks, and three sums of the attention in float32."""
    reading, number = _opened(fields, options, given)
    hidden = reading.required("hidden size", ("hidden_size",))
    inner = reading.integer("width of the attention", ("attention_hidden_size",)) or hidden
    inputs = ((hidden,), options.state_dtype)
    state = state_of(options, LINEAR, inputs, inputs, *[((inner,), _F32)] * 3)
    return facts(reading, [Layer(f"rwkv.blocks.{i}", state, i) for i in range(number)])


def xlstm(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read the xLSTM (arXiv 2405.04517): a matrix memory, its normalizer and a running maximum for every head."""
    reading, number = _opened(fields, options, given)
    hidden, heads = (reading.required(what, (what,)) for what in ("hidden_size", "num_heads"))
    widths = [round_up(int(hidden * (fields.number(key) or default)), 64) for key, default in _FACTORS.items()]
    if any(width % heads for width in widths):
        raise fields.fail(
            f"{heads} heads do not divide keys of {widths[0]} and values of {widths[1]}: correct one of them"
        )
    keys, values = (width // heads for width in widths)
    shapes = ((heads, keys, values), (heads, keys), (heads, 1))
    state = state_of(options, LINEAR, *[(shape, options.state_dtype) for shape in shapes])
    return facts(reading, [Layer(f"backbone.blocks.{i}", state, i) for i in range(number)])


_FACTORS: Final = {"qk_dim_factor": 0.5, "v_dim_factor": 1.0}


def zaya(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read ZAYA1: queries and keys pass convolutions, and half of each value comes from the previous token."""
    reading, number = _opened(fields, options, given)
    types = types_of(reading, number, ("hybrid", "hybrid_sliding"))
    heads = heads_of(reading, options)
    first, second = (reading.required("width of a convolution", (key,)) for key in ("cca_time0", "cca_time1"))
    own = heads.kv_heads * heads.head_dim
    conv = (own + heads.heads * heads.head_dim, first + second - 2)
    state = state_of(options, "short_conv", (conv, options.state_dtype), ((own // 2,), options.state_dtype))
    return facts(reading, _hybrids(reading, types, dict.fromkeys(types, heads), dict.fromkeys(types, state), options))


def inkling(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read Inkling and Inkling 2: float32 convolutions over keys, values and after both blocks.

    Windowed layers have other heads. ``local_layer_ids`` names them where ``layer_types`` is missing; without
    either, every 6th layer is full attention. In ``inkling2_loop`` the layers from
    ``loop_layer_index_start`` up to ``loop_layer_index_end`` run ``loop_num_passes`` times, each time with caches of
    their own (``loop_config`` in the files: core_start, core_end, num_passes).

    vLLM keeps the convolutions' inputs of Inkling as a window of ``conv_kernel_size`` tokens, so a prefix can be
    resumed wherever its blocks are (models/inkling/nvidia/sconv_swa_attn.py).
    """
    in_window = options.backend == "vllm" and fields.text("model_type") == "inkling_text"
    reading, number = _opened(fields, options, given, splits=in_window)
    types = _looped(reading, _inkling_types(reading, number))
    hidden = reading.required("hidden_size", ("hidden_size",))
    kernel = reading.required("conv_kernel_size", ("sconv_kernel_size", "conv_kernel_size"))
    heads = {"hybrid": heads_of(reading, options)}
    heads["hybrid_sliding"] = Heads(
        reading.required("attention heads of windowed layers", ("swa_num_attention_heads",)),
        reading.required("KV heads of windowed layers", ("swa_num_key_value_heads",)),
        reading.required("width of a head of windowed layers", ("swa_head_dim", *WIDTH)),
    )
    states: dict[str, KVCacheSpec] = {}
    for kind, of in heads.items():
        if in_window:
            states[kind] = _convolution_window(reading, of, hidden, kernel, options)
            continue
        own = ((of.kv_heads * of.head_dim, kernel), _F32)
        block = ((hidden, kernel), _F32)
        states[kind] = state_of(options, "short_conv", own, own, block, block)
    return facts(reading, _hybrids(reading, types, heads, states, options))


def _convolution_window(
    reading: Reading, of: Heads, hidden: int, kernel: int, options: ReadOptions
) -> SlidingWindowSpec:
    """Return the window of Inkling's four convolutions in vLLM: one bfloat16 row per token and KV head.

    A row has the head's key and value and its share of the hidden size, twice, and is padded to a power of two. A block
    has as many tokens as the window.
    """
    share = per_rank(hidden, of.kv_heads, "elements of the hidden size by KV heads", reading.name)
    row = 2 * of.head_dim + 2 * share
    return SlidingWindowSpec(
        block_size=kernel,
        num_kv_heads=per_rank(of.kv_heads, options.tp, "KV heads with convolutions", reading.name),
        head_size=reading.derive(
            "row of a convolution's window", 1 << (row - 1).bit_length(), f"{row} elements, padded"
        ),
        head_size_v=0,
        dtype="bfloat16",
        sliding_window=kernel,
    )


def _inkling_types(reading: Reading, number: int) -> tuple[str, ...]:
    """Return the type of every layer by ``layer_types``, ``local_layer_ids`` or the rule of the config classes."""
    local = reading.fields.integers("local_layer_ids")
    if reading.own.values.get("layer_types") is None and local is not None:
        if any(index >= number for index in local):
            raise reading.refuse_value("local_layer_ids", list(local))
        reading.say("windowed layers", ranges(sorted(set(local))), "local_layer_ids", reading.source("local_layer_ids"))
        return tuple("hybrid_sliding" if i in local else "hybrid" for i in range(number))
    if reading.is_made_by_class("layer_types"):
        reading.derive("layers", "every 6th of hybrid, others of hybrid_sliding", "as its config class makes them")
        return tuple("hybrid_sliding" if (i + 1) % 6 else "hybrid" for i in range(number))
    return types_of(reading, number, ("hybrid", "hybrid_sliding"))


def _looped(reading: Reading, types: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of all caches: those of the layers, then those of each further pass over looped layers."""
    if reading.fields.text("model_type") != LOOPED:
        return types
    loop = Fields(reading.fields.mapping("loop_config"), reading.name)
    start, end, passes = (
        loop.integer(short, reading.required(key, (key,), minimum=1))
        for key, short in (
            ("loop_layer_index_start", "core_start"),
            ("loop_layer_index_end", "core_end"),
            ("loop_num_passes", "num_passes"),
        )
    )
    if not start < end <= len(types):
        raise reading.fields.fail(
            f"layers {start} to {end - 1} loop, but the model has layers 0 to {len(types) - 1}: correct "
            "loop_layer_index_start, loop_layer_index_end or num_hidden_layers"
        )
    more = types[start:end] * (passes - 1)
    reading.derive("caches of further passes", len(more), f"layers {start} to {end - 1} run {passes} times")
    return (*types, *more)


def _hybrids(
    reading: Reading,
    types: Sequence[str],
    heads: dict[str, Heads],
    states: dict[str, KVCacheSpec],
    options: ReadOptions,
) -> tuple[Layer, ...]:
    """Return layers with attention and a state each."""
    specs: dict[str, KVCacheSpec] = {}
    for kind in dict.fromkeys(types):
        if kind == "hybrid_sliding":
            specs[kind] = heads[kind].sliding(reading.fields, options, reading.required("window", WINDOW))
        else:
            specs[kind] = spec_of(FULL, heads[kind], reading, options)
    parts = {kind: (Part("self_attn", spec), Part("conv", states[kind])) for kind, spec in specs.items()}
    return layers_of(types, parts, reading.name)


def _opened(fields: Fields, options: ReadOptions, given: Sequence[str], *, splits: bool = False) -> tuple[Reading, int]:
    """Return a reading with the defaults of the class, and the number of layers.

    ``splits`` says that the states' split over ranks is known. Otherwise raises ConfigError for several ranks.
    """
    reading = Reading(fields, class_defaults(fields.text("model_type") or "") or {}, given)
    if options.tp != 1 and not splits:
        raise ConfigError(
            f"how the states of {reading.name} are split over tp={options.tp} ranks is not known: use tp=1"
        )
    return reading, layer_count(reading)


def types_of(reading: Reading, number: int, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return ``layer_types``, for which the config class has no default."""
    key = reading.key(("layer_types", "layers_block_type"))
    if key is None:
        raise reading.missing("what each layer is", "layer_types", f'["{kinds[0]}", "{kinds[1]}", ...]')
    types = reading.fields.layer_types(key, number, ())
    refuse_layer_types(types, reading.name, kinds)
    for kind in dict.fromkeys(types):
        reading.say(f"{kind} layers", str(types.count(kind)), key, reading.source(key))
    return types


# -- lightning attention


def minimax(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read MiniMax-Text-01 and -M1: ``layer_types`` or ``attn_type_list`` (0: lightning, 1: softmax)."""
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
    """Read Ling and Ring linear: the last of every ``layer_group_size`` layers is full attention.

    Full attention is MLA where the config has ``kv_lora_rank`` (2.5 and later). The other layers are Kimi's delta
    attention where the config has ``short_conv_kernel_size`` (3), else lightning attention. ``layer_types`` comes
    first. In a file that transformers 5.24 saved, ``head_dim`` is the rotary width and ``linear_head_dim`` the width of
    a head.
    """
    reading = Reading(fields, {}, given)
    number = layer_count(reading)
    types = _bailing_types(reading, number)
    heads = heads_of(reading, options)
    if reading.key(("kv_lora_rank",)) is None:
        full: KVCacheSpec = heads.full(fields, options)
    else:
        full = mla_spec(fields, options, heads.heads)
    width = reading.integer("width of a head of linear layers", ("linear_head_dim",)) or heads.head_dim
    many = reading.integer("heads of linear layers", ("linear_num_heads",)) or heads.heads
    if reading.key((_SHORT_CONV,)) is None:
        # their code keeps the recurrence in float32, vLLM in the dtype of the model
        dtype = "float32" if options.backend == "transformers" else options.state_dtype
        linear = _lightning(Heads(many, many, width), reading, options, dtype)
    else:
        kernel = reading.required("width of the convolution", (_SHORT_CONV,), minimum=2)
        own = (many, many, width, width, kernel)
        linear = DeltaNet(fields.integer("hidden_size"), *own, mamba_type="kda_attention").spec(fields, options)
    return _facts(reading, types, heads, {FULL: full, LINEAR: linear})


def _bailing_types(reading: Reading, number: int) -> tuple[str, ...]:
    """Return the type of every layer. Raises ConfigError where two engines read ``layer_group_size`` differently."""
    if reading.key(("layer_types",)) is not None:
        return types_of(reading, number, (FULL, LINEAR))
    group = reading.required("every n-th layer is full attention", (GROUP,))
    whole = number // group * group
    if whole < number and reading.fields.text("model_type") == "bailing_hybrid":
        # full attention in the models' own code and vLLM 0.33, linear attention in transformers 5.24
        raise reading.missing(f"what layers {whole} to {number - 1} are", "layer_types", '["full_attention", ...]')
    types = tuple(FULL if (i + 1) % group == 0 or i >= whole else LINEAR for i in range(number))
    where = ranges([i for i, kind in enumerate(types) if kind == FULL])
    reading.say("full attention layers", where, GROUP, reading.source(GROUP))
    return types


def _lightning(heads: Heads, reading: Reading, options: ReadOptions, dtype: str) -> KVCacheSpec:
    """Return the spec of one matrix for every head of one rank."""
    mine = per_rank(heads.heads, options.tp, "lightning attention heads", reading.name)
    return state_of(options, LINEAR, ((mine, heads.head_dim, heads.head_dim), dtype))


def _facts(reading: Reading, types: Sequence[str], heads: Heads, specs: dict[str, KVCacheSpec]) -> FamilyFacts:
    parts = {kind: (Part("self_attn", spec),) for kind, spec in specs.items()}
    layers = layers_of(types, parts, reading.name)
    return facts(reading, layers, [Attention(heads, heads.head_dim, kind) for kind in types])


OTHER_STATES: Final[Mapping[str, NotingFamily]] = {
    **dict.fromkeys(BAILING, bailing),
    **dict.fromkeys(MINIMAX, minimax),
    **dict.fromkeys(("inkling_text", "inkling2_text", LOOPED), inkling),
    "lfm2_moe": lfm2_moe,
    "lfm3": lfm3,
    "recurrent_gemma": recurrent_gemma,
    "rwkv": rwkv,
    "xlstm": xlstm,
    "zaya": zaya,
}
