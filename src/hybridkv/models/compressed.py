"""Decoders with compressed caches: DeepSeek-V4 and -V4.1, GLM-5 next, Qwen4-exp and Step-5.

A layer keeps several caches at different rates (docs/design/0035-compressed-caches.md). For DeepSeek-V4 at a rate of 4:

    swa_cache              latents of the last tokens                 | | | | | | | |
    attention              a latent for every 4 tokens                |       |
    indexer.k_cache        an indexer's key for every 4 tokens        |       |
    compressor states      float32 sums of the last 8 tokens          | | | | | | | |

Shapes, dtypes and sizes of blocks are those of vLLM 0.33. transformers' layout, in the model's dtype, has two of them:
DeepSeek-V4 keeps, of the tokens that a compressor may still read, what its projections return; Qwen4-exp keeps the raw
key of every token. The others are rejected there.
Fields and their defaults are those of transformers' config classes (5.24) and of vLLM's configs. A field whose value
leaves the caches open is rejected with an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any, Final

from hybridkv.errors import UnsupportedModelError
from hybridkv.models.fields import Fields
from hybridkv.models.general import facts, heads_of, layer_count
from hybridkv.models.indexed import step_heads, step_types
from hybridkv.models.layers import (
    FULL,
    LINEAR,
    SLIDING,
    FamilyFacts,
    Heads,
    NotingFamily,
    ReadOptions,
    Weights,
    experts,
    kv_heads_per_rank,
    language_model,
    ranges,
    refuse_layer_types,
)
from hybridkv.models.model import Layer
from hybridkv.models.reading import Reading, class_defaults
from hybridkv.models.states import DeltaNet, state_of
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import CircularBufferSpec, FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from hybridkv.units import ceil_div, dtype_bytes, round_up

INDEXED: Final = "indexed_attention"
CSA: Final = "compressed_sparse_attention"
HCA: Final = "heavily_compressed_attention"
RATES: Final[Mapping[str, int]] = {CSA: 4, HCA: 128}
"""Tokens in a latent by the type of the layer in DeepSeek-V4, where the config gives no others."""
_RATIOS: Final = {0: SLIDING, 4: CSA, 128: HCA}
"""Types of layers by the number for them in ``compress_ratios``."""
PACKED: Final = 584
"""Bytes of a latent in 8 bits: 448 numbers, 64 rotary elements in bfloat16 and 8 bytes of scales."""
_PACKED_PAGE, _PLAIN_PAGE = 576, 512
"""Bytes of which a page is a multiple, for packed and for plain latents (vLLM)."""
_WINDOW_BLOCK: Final = {"deepseek_v4": 64, "deepseek_v41": 32}
"""Tokens in a block of windowed latents (vLLM's DeepseekV4SWACache)."""
_STATE_BLOCK: Final = {4: 4, 128: 8}
"""Tokens in a block of the compressor's states, by rate (vLLM's CompressorStateCache)."""
_INDEXER: Final = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
"""Fields of Qwen4-exp that a config has all of, or none of."""


def _opened(
    fields: Fields, options: ReadOptions, given: Sequence[str], backends: Sequence[str] = ("vllm",)
) -> tuple[Reading, int]:
    """Return a reading with the defaults of the class, and the number of layers. Rejects layouts of other backends."""
    if options.backend not in backends:
        raise UnsupportedModelError(
            f"{fields.name} keeps compressed keys and values, which the {options.backend} layout of this library does "
            "not have: only plan this model (hybridkv plan)"
        )
    reading = Reading(fields, class_defaults(fields.text("model_type") or "") or {}, given)
    return reading, layer_count(reading)


def _whole_groups(reading: Reading, options: ReadOptions, rates: Sequence[int]) -> int:
    """Return the tokens of a block: a multiple of every rate, because a block holds whole states."""
    size = lcm(options.block_size, *rates)
    if size != options.block_size:
        reading.derive("tokens of a block", size, f"a block of {options.block_size} holds no whole states")
    return size


def _indexer_key(reading: Reading) -> int:
    """Return the bytes of an indexer's key: 8 bits an element, and a float32 scale for each 128."""
    width = reading.required("key of the indexer", ("index_head_dim",))
    return reading.derive(
        "keys of the indexer", width + width // 128 * 4, "bytes: 8-bit floats with scales, as in vLLM"
    )


# -- DeepSeek-V4 and -V4.1


class _DeepSeek:
    """The caches that layers of DeepSeek-V4 and -V4.1 share.

    Sources: models/deepseek_v4/attention.py and compressor.py of vLLM, and DeepseekV4SWACache in its sparse_swa.py.

    Attributes:
        head_dim: elements of a latent, the rotary part included.
        packed: whether latents have 8 bits, in DeepSeek's own format.
        alignment: bytes of which every page is a multiple; None in transformers' layout.
        top: latents that an indexer chooses for a query (``index_topk``); 0 where no field says it.
        index_heads: query heads of an indexer (``index_n_heads``); 0 where no field says it.
    """

    def __init__(self, reading: Reading, options: ReadOptions) -> None:
        self.reading, self.options = reading, options
        self.head_dim = reading.required("latent", ("head_dim",))
        heads = reading.required("attention heads", ("num_attention_heads",))
        kv_heads_per_rank(heads, heads, options.tp, reading.name)  # latents are whole on each rank, heads are split
        self.vllm = options.backend == "vllm"
        self.packed = self.vllm and dtype_bytes(options.dtype) == 1
        self.alignment = (_PACKED_PAGE if self.packed else _PLAIN_PAGE) if self.vllm else None
        self.window = reading.required("window", ("sliding_window",))
        self.top = reading.fields.optional("index_topk") or 0
        self.index_heads = reading.fields.optional("index_n_heads") or 0
        if self.packed:
            rotary = reading.fields.integer("qk_rope_head_dim", 64)
            if (self.head_dim, rotary) != (512, 64):
                raise reading.fields.fail(
                    f"latents of {self.head_dim} with {rotary} rotary elements (head_dim, qk_rope_head_dim) have no "
                    "8-bit format, which is for 512 and 64: use another dtype"
                )
            reading.derive("latents", f"{PACKED} bytes", "8-bit floats with scales and a rotary part, as in vLLM")

    def windowed(self) -> SlidingWindowMLASpec:
        """Return the latents of the last tokens."""
        return SlidingWindowMLASpec(
            block_size=_WINDOW_BLOCK[self.reading.fields.text("model_type") or ""]
            if self.vllm
            else self.options.block_size,
            head_size=self.head_dim,
            dtype=self._dtype,
            sliding_window=self.window,
            alignment=self.alignment,
            state_content_bytes=PACKED if self.packed else None,
            max_tp_shards=1,
        )

    def compressed(self, rate: int, block: int) -> MLAAttentionSpec:
        """Return a latent for each ``rate`` tokens."""
        return MLAAttentionSpec(
            block_size=block,
            head_size=self.head_dim,
            dtype=self._dtype,
            tokens_per_state=rate,
            alignment=self.alignment,
            state_content_bytes=PACKED if self.packed else None,
            max_tp_shards=1,
        )

    def keys(self, rate: int, block: int) -> MLAAttentionSpec:
        """Return an indexer's key for each ``rate`` tokens."""
        return MLAAttentionSpec(
            block_size=block,
            head_size=_indexer_key(self.reading) if self.vllm else self.reading.fields.integer("index_head_dim"),
            dtype="uint8" if self.vllm else self.options.dtype,
            tokens_per_state=rate,
            alignment=self.alignment,
            cache_role=SparseCacheRole.INDEXER,
            max_tp_shards=1,
        )

    def sums(self, kind: str, rate: int, width: int) -> SlidingWindowMLASpec:
        """Return the compressor's sums and scores of ``width`` elements, for the tokens it may still read.

        In layers of ``kind`` CSA groups overlap: each token has two of both, and the window is two groups. vLLM keeps
        float32.
        """
        overlap = 2 if kind == CSA else 1
        return SlidingWindowMLASpec(
            block_size=_STATE_BLOCK[rate] if self.vllm else self.options.block_size,
            head_size=2 * overlap * width,
            dtype="float32" if self.vllm else self.options.dtype,
            sliding_window=overlap * rate,
            pools=rate,
            alignment=self.alignment,
            max_tp_shards=1,
        )

    @property
    def _dtype(self) -> str:
        return "uint8" if self.packed else self.options.dtype


def deepseek_v4(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read DeepSeek-V4: a window of latents in each layer, and latents for each 4 or 128 tokens in most.

    ``layer_types`` or ``compress_ratios`` (0, 4 or 128 for each layer) says which. Layers at a rate of 4 also keep an
    indexer's keys at that rate. Source: configuration_deepseek_v4.py of transformers, _DeepSeek.
    """
    reading, number = _opened(fields, options, given, ("vllm", "transformers"))
    types = _deepseek_types(reading, number)
    rates = _deepseek_rates(reading, options)
    kept = _DeepSeek(reading, options)
    block = _whole_groups(reading, options, [rates[kind] for kind in set(types) - {SLIDING}])
    index_width = reading.required("key of the indexer", ("index_head_dim",)) if CSA in types else 0
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        name = f"model.layers.{i}.self_attn"
        layers.append(Layer(f"{name}.swa_cache", kept.windowed(), i))
        if kind == SLIDING:
            continue
        rate = rates[kind]
        layers.append(Layer(name, kept.compressed(rate, block), i, top_states=kept.top if kind == CSA else 0))
        layers.append(Layer(f"{name}.compressor.state_cache", kept.sums(kind, rate, kept.head_dim), i))
        if kind == CSA:
            layers.append(Layer(f"{name}.indexer.k_cache", kept.keys(rate, block), i, index_heads=kept.index_heads))
            sums = kept.sums(kind, rate, index_width)
            layers.append(Layer(f"{name}.indexer.compressor.state_cache", sums, i))
    return replace(facts(reading, layers), weights=partial(_deepseek_weights, reading.fields, types, rates))


def _deepseek_weights(fields: Fields, types: Sequence[str], rates: Mapping[str, int]) -> Weights:
    """Count the weights of DeepSeek-V4 by the parameters of transformers' model (5.19).

    Attention has low-rank queries, one latent, outputs in groups and a sink for each head. Each compressor projects
    its values and their gates. Hyper-connections mix ``hc_mult`` streams before and after both blocks.
    """
    hidden, heads, latent = (fields.integer(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    rank, groups, group_rank = (fields.integer(key) for key in ("q_lora_rank", "o_groups", "o_lora_rank"))
    streams, width = fields.integer("hc_mult"), fields.integer("moe_intermediate_size")
    total, chosen = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")

    def compressor(kind: str, channels: int) -> int:
        wide = channels * (2 if kind == CSA else 1)  # groups overlap there
        return (rates[kind] + 2 * hidden) * wide + channels

    attention = hidden * (rank + latent) + rank + latent + rank * heads * latent + heads
    attention += group_rank * (heads * latent + groups * hidden)
    mixes = streams * (streams + 2)
    hyper = 2 * (mixes * (streams * hidden + 1) + 3)
    shared = 3 * hidden * width * fields.integer("n_shared_experts")
    weights = Weights.dense(attention + 2 * hidden + hyper + shared + total * hidden) * len(types)
    weights += experts(3 * hidden * width, total, chosen) * len(types)
    for kind in types:
        if kind == SLIDING:
            continue
        weights += Weights.dense(compressor(kind, latent))
        if kind == CSA:
            key, queries = fields.integer("index_head_dim"), fields.integer("index_n_heads")
            weights += Weights.dense(compressor(kind, key) + queries * (rank * key + hidden))
    weights += Weights.dense(hidden + streams * (streams * hidden + 1) + 1)
    embedding = fields.integer("vocab_size") * hidden
    return language_model(weights, embedding=embedding, tied=fields.flag("tie_word_embeddings"))


def _deepseek_types(reading: Reading, number: int) -> tuple[str, ...]:
    """Return the type of every layer by ``layer_types``, ``compress_ratios`` or the rule of the config class."""
    if reading.own.values.get("layer_types") is not None:
        types = (reading.fields.names("layer_types") or ())[:number]
        if len(types) < number:
            raise reading.refuse_value("layer_types", list(types))
        refuse_layer_types(types, reading.name, (SLIDING, CSA, HCA))
        reading.say_types(types, "layer_types")
        return types
    ratios = reading.fields.integers("compress_ratios")
    if ratios is not None:
        # the list may go on with drafting layers
        if len(ratios) < number or not set(ratios) <= _RATIOS.keys():
            raise reading.refuse_value("compress_ratios", list(ratios))
        types = tuple(_RATIOS[one] for one in ratios[:number])
        reading.say_types(types, "compress_ratios")
        return types
    types = tuple(CSA if i % 2 and i > 1 else HCA for i in range(number))
    reading.derive("layers", f"0, 1, 2, 4, 6, ... of {HCA}, others of {CSA}", "as its config class makes them")
    return types


def _deepseek_rates(reading: Reading, options: ReadOptions) -> Mapping[str, int]:
    """Return the tokens in a latent by the type of the layer. Rejects rates for which vLLM has no block."""
    rates = {**RATES, **reading.fields.mapping("compress_rates")}
    for kind, key in ((CSA, "compress_rate_csa"), (HCA, "compress_rate_hca")):
        rates[kind] = reading.fields.integer(key, rates[kind])
    if options.backend == "vllm" and rates != RATES:
        raise reading.fields.fail(
            f"compress_rates {rates} differ from {dict(RATES)}: no engine says which states such compressors keep"
        )
    return rates


def deepseek_v41(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read DeepSeek-V4.1: a window of latents in each layer; few layers keep latents that later layers read.

    ``compress_ratios`` has 0 (window only), 1 or 2 for each layer. Layers of ``kv_source_layer_ids`` keep latents at
    their rate and, if they are in ``index_source_layer_ids``, an indexer's keys; layers after them read both. At a rate
    of 2 a ring keeps the open group. Source: models/deepseek_v41/attention.py and compressor.py of vLLM.
    """
    reading, number = _opened(fields, options, given)
    kept = _DeepSeek(reading, options)
    if kept.packed:
        reading.assume("latents", f"{PACKED} bytes", "Blackwell's kernels keep 528, those of other GPUs this many")
    ratios = _v41_ratios(reading, number)
    sources = _sources(reading, "kv_source_layer_ids", number)
    indexes = _sources(reading, "index_source_layer_ids", number)
    owner = _owners(reading, ratios, sources)
    block = _whole_groups(reading, options, [one for one in ratios if one])
    layers: list[Layer] = []
    for i, rate in enumerate(ratios):
        name = f"model.layers.{i}.self_attn"
        layers.append(Layer(f"{name}.swa_cache", kept.windowed(), i))
        if i not in sources:
            continue
        readers = [j for j, source in owner.items() if source == i and j != i]
        read_by = tuple(f"model.layers.{j}.self_attn" for j in readers)
        layers.append(Layer(name, kept.compressed(rate, block), i, read_by=read_by, top_states=kept.top))
        if i in indexes:
            keys = tuple(f"model.layers.{j}.self_attn.indexer.k_cache" for j in readers if j in indexes)
            heads = kept.index_heads
            layers.append(Layer(f"{name}.indexer.k_cache", kept.keys(rate, block), i, read_by=keys, index_heads=heads))
        if rate > 1:
            ring = _pooling_ring(rate, 2 * kept.head_dim, options)
            layers.append(Layer(f"{name}.compressor.state_cache", ring, i))
    reading.say(
        "layers that keep latents", ranges(sources), "kv_source_layer_ids", reading.source("kv_source_layer_ids")
    )
    return facts(reading, layers)


def _v41_ratios(reading: Reading, number: int) -> tuple[int, ...]:
    ratios = reading.fields.integers("compress_ratios")
    if ratios is None:
        raise reading.missing("the rate of each layer", "compress_ratios", "[0, 1, 2, ...]")
    if len(ratios) < number or not set(ratios) <= {0, 1, 2}:
        raise reading.refuse_value("compress_ratios", list(ratios))
    for rate in sorted(set(ratios[:number])):
        where = ranges([i for i, one in enumerate(ratios[:number]) if one == rate])
        reading.say(f"layers at a rate of {rate}", where, "compress_ratios", reading.source("compress_ratios"))
    return ratios[:number]


def _sources(reading: Reading, key: str, number: int) -> tuple[int, ...]:
    """Return the sorted indices of layers in a list. Indices of drafting layers are left out."""
    found = reading.fields.integers(key)
    if not found:
        raise reading.missing("layers that keep a cache for others", key, "[0, 1, ...]")
    return tuple(sorted({one for one in found if one < number}))


def _owners(reading: Reading, ratios: Sequence[int], sources: Sequence[int]) -> dict[int, int]:
    """Return the layer whose latents a compressed layer reads: the last one of ``sources`` up to it."""
    owner: dict[int, int] = {}
    for i, rate in enumerate(ratios):
        before = [one for one in sources if one <= i]
        if not rate:
            if i in sources:
                raise reading.fields.fail(
                    f"layer {i} of kv_source_layer_ids has rate 0 in compress_ratios: correct one"
                )
            continue
        if not before:
            raise reading.fields.fail(f"layer {i} has no layer of kv_source_layer_ids up to it: correct the list")
        if ratios[before[-1]] != rate:
            raise reading.fields.fail(
                f"layer {i} has rate {rate} in compress_ratios, but reads latents of layer {before[-1]} at rate "
                f"{ratios[before[-1]]}: correct compress_ratios or kv_source_layer_ids"
            )
        owner[i] = before[-1]
    return owner


def _pooling_ring(rate: int, width: int, options: ReadOptions) -> CircularBufferSpec:
    """Return a ring of float32 rows: the drafts of a step, its next token and the row before, as a power of two."""
    rows = options.num_speculative_tokens + 2
    return CircularBufferSpec(
        block_size=max(8, 1 << (rows - 1).bit_length()),
        num_kv_heads=1,
        head_size=width,
        head_size_v=0,
        dtype="float32",
        pools=rate,
    )


# -- GLM-5 next


def glm5_next(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read GLM-5 next: delta attention, and latents with an indexer's key for each ``index_kpool`` tokens.

    A ring keeps raw keys and gates of the open group. ``linear_attn_config`` comes before ``linear_head_dim``,
    ``linear_num_heads`` and ``linear_conv_kernel_dim``. Sources: configuration_glm5_next.py of transformers,
    models/glm5next/common/attention.py and kda.py of vLLM.
    """
    reading, number = _opened(fields, options, given)
    types = _alternating(reading, number, 4)
    nested = Fields(reading.fields.mapping("linear_attn_config"), reading.name)
    heads, width, kernel = (
        nested.integer(own, reading.required(key, (key,)))
        for key, own in (
            ("linear_num_heads", "num_heads"),
            ("linear_head_dim", "head_dim"),
            ("linear_conv_kernel_dim", "short_conv_kernel_size"),
        )
    )
    hidden = reading.required("hidden size", ("hidden_size",))
    delta = DeltaNet(hidden, heads, heads, width, width, kernel, mamba_type="kda_attention").spec(fields, options)
    pool = reading.required("tokens in an indexer's key", ("index_kpool",), minimum=2)
    if "shared" in (reading.fields.names("indexer_types") or ()) or _shares_indexers(reading):
        raise reading.fields.fail(
            "indexer_types names layers that share an indexer (index_topk_freq, index_topk_pattern): vLLM keeps keys "
            "for them, transformers keeps none: say --set indexer_types=null where every layer has its own"
        )
    many = reading.required("attention heads", ("num_attention_heads",))
    kv_heads_per_rank(many, many, options.tp, reading.name)
    block = _whole_groups(reading, options, [pool])
    latent = reading.required("latent", ("kv_lora_rank",))
    latent += reading.required("its rotary part", ("qk_rope_head_dim",), minimum=0)
    specs: dict[str, KVCacheSpec] = {
        "": MLAAttentionSpec(
            block_size=block, head_size=latent, dtype=options.dtype, is_index_group_leader=True, max_tp_shards=1
        ),
        ".indexer.k_cache": MLAAttentionSpec(
            block_size=block,
            head_size=_indexer_key(reading),
            dtype="uint8",
            tokens_per_state=pool,
            cache_role=SparseCacheRole.INDEXER,
            max_tp_shards=1,
        ),
        ".indexer.tail_cache": _tail(reading, pool, options),
    }
    top, index_heads = (reading.fields.optional(key) for key in ("index_topk", "index_n_heads"))
    costs = _indexer_costs(top, index_heads, ".indexer.k_cache")
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        name = f"model.layers.{i}.self_attn"
        if kind == LINEAR:
            layers.append(Layer(name, delta, i))
            continue
        layers += [Layer(name + part, spec, i, **costs.get(part, {})) for part, spec in specs.items()]
    return facts(reading, layers)


def _indexer_costs(top: int | None, heads: int | None, keys: str) -> dict[str, dict[str, Any]]:
    """Return the facts for cost models by the end of a layer's name: those of attention, and of the indexer's keys.

    Args:
        top: most states that an indexer chooses for a query. The open group, which queries read too, is left out.
        heads: query heads of the indexer.
        keys: the end of the name of its keys.
    """
    return {"": {"top_states": top or 0}, keys: {"index_heads": heads or 0}}


def _alternating(reading: Reading, number: int, every: int) -> tuple[str, ...]:
    """Return ``layer_types`` of linear and indexed layers; without it each ``every``-th layer is indexed.

    Files write ``full_attention`` for layers with an indexer, and config classes read it so.
    """
    key = reading.key(("layer_types",))
    if key is None or reading.is_made_by_class("layer_types"):
        reading.derive("layers", f"every {every}th of {INDEXED}, others of {LINEAR}", "as its config class makes them")
        return tuple(LINEAR if (i + 1) % every else INDEXED for i in range(number))
    found = reading.fields.layer_types(key, number, ())
    types = tuple(INDEXED if one in {FULL, "qwen_sparse_attention"} else one for one in found)
    refuse_layer_types(types, reading.name, (LINEAR, INDEXED))
    reading.say_types(types, key)
    return types


def _shares_indexers(reading: Reading) -> bool:
    """Return whether a schedule of indexers leaves layers without their own."""
    if reading.own.values.get("indexer_types") is not None:
        return False
    pattern = reading.fields.values.get("index_topk_pattern")
    shared = isinstance(pattern, str | list | tuple) and any(one in {"S", "shared"} for one in pattern)
    return shared or reading.fields.integer("index_topk_freq", 1, minimum=0) > 1


def _tail(reading: Reading, pool: int, options: ReadOptions) -> CircularBufferSpec:
    """Return the ring of the open group: raw keys and gates, each as wide as an indexer's key, in bfloat16."""
    span = pool + options.num_speculative_tokens
    groups = 1 << (ceil_div(span, pool) - 1).bit_length()
    return CircularBufferSpec(
        block_size=pool * groups,
        pools=pool,
        num_kv_heads=2,
        head_size=reading.fields.integer("index_head_dim"),
        head_size_v=0,
        dtype="bfloat16",
    )


# -- Qwen4-exp


def qwen4_exp(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read Qwen4-exp: the gated delta rule, and attention with an indexer's key for each group of tokens.

    ``indexer_compress_ratio`` tokens make a key; a ring keeps the open group's raw keys, with three 64-bit positions
    where ``rope_parameters`` has ``mrope_section``. Layers of ``ple_layer_ids``, counted from 1, also keep a dilated
    convolution over ``hc_count`` streams, whole on each rank. Sources: configuration_qwen4_exp.py of transformers,
    models/qwen4_exp/common/qsa_cache.py and nvidia/model.py of vLLM. transformers keeps a raw key of every token.
    """
    reading, number = _opened(fields, options, given, ("vllm", "transformers"))
    types = _alternating(reading, number, reading.fields.integer("full_attention_interval", 4))
    heads = heads_of(reading, options)
    hidden = reading.required("hidden size", ("hidden_size",))
    key_heads, value_heads, key_dim, value_dim, kernel = (
        reading.required(key, (key,))
        for key in (
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
            "linear_conv_kernel_dim",
        )
    )
    delta = DeltaNet(hidden, key_heads, value_heads, key_dim, value_dim, kernel).spec(fields, options)
    attention = _indexed_attention(reading, heads, options)
    top, index_heads = (reading.fields.optional(key) for key in ("indexer_budget", "indexer_n_heads"))
    costs = _indexer_costs(top, index_heads, ".indexer.compressed_key_cache")
    costs[".indexer"] = {"index_heads": index_heads or 0}
    embedded = set(reading.fields.integers("ple_layer_ids") or ())
    if embedded and options.backend == "transformers":
        raise reading.fields.fail(
            "ple_layer_ids names layers that keep token ids of n-grams, which transformers' layout does not have here: "
            "only plan this model for vLLM"
        )
    if any(not 1 <= one <= number or types[one - 1] != LINEAR for one in embedded):
        raise reading.refuse_value("ple_layer_ids", sorted(embedded))
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        name = f"model.layers.{i}"
        if kind == INDEXED:
            full = f"{name}.self_attn"
            layers += [Layer(full + part, spec, i, **costs.get(part, {})) for part, spec in attention.items()]
            continue
        layers.append(Layer(f"{name}.linear_attn", delta, i))
        if i + 1 in embedded:
            layers.append(Layer(f"{name}.ple", _embedding_state(reading, hidden, options), i))
    return facts(reading, layers)


def _indexed_attention(reading: Reading, heads: Heads, options: ReadOptions) -> dict[str, KVCacheSpec]:
    """Return the caches of an attention layer by the end of their name: keys and values, and those of its indexer."""
    there = [key for key in _INDEXER if reading.fields.values.get(key) is not None]
    full = heads.full(reading.fields, options)
    own = options.backend == "transformers"
    if not there and not own:
        reading.derive("indexer", "no", f"{_INDEXER[0]} is missing")
        return {"": full}
    if len(there) < len(_INDEXER):
        raise reading.missing("indexer", next(key for key in _INDEXER if key not in there))
    if reading.fields.integer("indexer_kv_heads") != 1:
        raise reading.refuse_value("indexer_kv_heads", reading.fields.values["indexer_kv_heads"])
    width = reading.required("key of the indexer", ("indexer_head_dim",))
    rate = reading.required("tokens in an indexer's key", ("indexer_compress_ratio",))
    if own:
        keys = MLAAttentionSpec(
            block_size=options.block_size, head_size=width, dtype=options.dtype, cache_role=SparseCacheRole.INDEXER
        )
        return {"": full, ".indexer": keys}
    block = _whole_groups(reading, options, [rate])
    positions = Fields(reading.fields.mapping("rope_parameters"), reading.name).values.get("mrope_section") is not None
    raw = round_up(width, 4) + 3 * 4 if positions else width
    return {
        "": replace(full, block_size=block),
        ".indexer.raw_key_cache": CircularBufferSpec(
            block_size=round_up(rate + options.num_speculative_tokens, rate),
            pools=rate,
            num_kv_heads=1,
            head_size=raw,
            head_size_v=0,
            dtype="bfloat16",
        ),
        ".indexer.compressed_key_cache": MLAAttentionSpec(
            block_size=block,
            head_size=width,
            dtype="bfloat16",
            tokens_per_state=rate,
            cache_role=SparseCacheRole.INDEXER,
        ),
    }


def _embedding_state(reading: Reading, hidden: int, options: ReadOptions) -> KVCacheSpec:
    """Return the inputs of the n-gram embedding's convolution."""
    kernel = reading.required("width of the embedding's convolution", ("ple_conv_kernel_size",))
    dilation = reading.required("dilation of the embedding's convolution", ("ngram_size",))
    streams = reading.required("residual streams", ("hc_count",))
    columns = (kernel - 1) * dilation + options.num_speculative_tokens
    return state_of(options, "short_conv", ((columns, hidden * streams), options.state_dtype))


# -- Step-5


def step_5(fields: Fields, options: ReadOptions, given: Sequence[str] = ()) -> FamilyFacts:
    """Read Step-5: windows, and full attention with a summary of 256 bytes for each 8 tokens.

    A ring keeps raw rows of 1,024 bytes for the open group. ``sparse_config`` says whether layers have summaries.
    Sources: transformers_utils/configs/step5.py and models/step5/nvidia of vLLM: config.py, model.py,
    sparse_summary_cache.py, csa_tail_ring.py.
    """
    reading, number = _opened(fields, options, given)
    if reading.own.values.get("layer_types") is None and reading.own.values.get("layer_types_with_mtp") is None:
        # without them vLLM gives every second layer a window, and every layer summaries
        raise reading.missing("what each layer is", "layer_types", '["full_attention", ...]')
    types = step_types(reading, number)
    heads = step_heads(reading)
    block = _whole_groups(reading, options, [_REGION])
    specs: dict[str, KVCacheSpec] = {"": replace(heads[FULL].full(fields, options), block_size=block)}
    costs: dict[str, dict[str, Any]] = {}
    if _has_summaries(reading):
        specs[".sparse_summary_cache"] = FullAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=_SUMMARY, head_size_v=0, dtype="uint8", tokens_per_state=_REGION
        )
        specs[".csa_tail_ring"] = CircularBufferSpec(
            block_size=_REGION - 1 + options.num_speculative_tokens,
            pools=_REGION,
            num_kv_heads=1,
            head_size=2 * _SUMMARY,
            head_size_v=0,
            dtype="bfloat16",
            block_stride_alignment=2 * _SUMMARY * 2,
        )
        section = Fields(reading.fields.mapping("sparse_config"), reading.name)
        top, index_heads = section.integer("topk", 512), section.integer("sparse_indexer_num_heads", 16)
        costs = _indexer_costs(top * _REGION, index_heads, ".sparse_summary_cache")
    layers: list[Layer] = []
    for i, kind in enumerate(types):
        name = f"model.layers.{i}.self_attn"
        if kind == SLIDING:
            window = reading.required("window", ("sliding_window",))
            spec = replace(heads[SLIDING].sliding(fields, options, window), block_size=block)
            layers.append(Layer(name, spec, i))
        else:
            layers += [Layer(name + part, spec, i, **costs.get(part, {})) for part, spec in specs.items()]
    return facts(reading, layers)


_REGION, _SUMMARY = 8, 256
"""Tokens in a summary and its elements: the only values of ``region_block_size`` and ``proxy_dim`` that vLLM runs."""


def _has_summaries(reading: Reading) -> bool:
    """Return whether full layers have summaries. Raises ConfigError for sizes that vLLM does not have."""
    for key in ("step5_sparse_config", "step3p5_sparse_config"):
        if reading.fields.mapping(key):
            raise reading.fields.fail(f"{key} is not read: engines read the sparse layout from sparse_config")
    section = Fields(reading.fields.mapping("sparse_config"), reading.name)
    if not section.values:
        raise reading.missing("what layers keep next to keys and values", "sparse_config", '{"enabled": false}')
    if not section.flag("enabled", default=True):
        return False
    applied = section.names("apply_to_layer_types") or (FULL,)
    sizes = {"proxy_dim": _SUMMARY, "region_block_size": _REGION, "sparse_indexer_num_k_heads": 1}
    wrong = [key for key, size in sizes.items() if section.integer(key, size) != size]
    if wrong or applied != (FULL,) or section.text("compression_method") not in (None, "", "csa_block_compress"):
        key = next(iter(wrong), "apply_to_layer_types" if applied != (FULL,) else "compression_method")
        raise section.fail(f"{key} {section.values[key]!r} of sparse_config is not supported: engines have one value")
    reading.say(
        "summaries", f"{_SUMMARY} bytes for each {_REGION} tokens", "sparse_config", reading.source("sparse_config")
    )
    return True


COMPRESSED: Final[Mapping[str, NotingFamily]] = {
    "deepseek_v4": deepseek_v4,
    "deepseek_v41": deepseek_v41,
    "glm5_next_text": glm5_next,
    "qwen4_exp_text": qwen4_exp,
    "step5": step_5,
}
