"""Random models, plans, caches, schedulers and requests, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from content import Embeds, Story
from shelf import Shelf, Slow

from caches import cache_with
from hybridkv.cache import KVCacheManager
from hybridkv.cache.placement import placement_of
from hybridkv.errors import CapacityError, ConfigError, UnsupportedModelError
from hybridkv.eviction import LRU, eviction_named
from hybridkv.extra_keys import EncoderInput, LoraAdapter, MultimodalItem
from hybridkv.models import Layer, Model, read_model
from hybridkv.planner import Plan, plan, tier_plan
from hybridkv.request import Hasher, Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.spec_fields import SparseCacheRole
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from hybridkv.tiers import HostTier, Prefixes, StoreLookups, TierLimits, parts_of

VOCAB = 30
TENANTS = (None, "red", "blue")
ADAPTERS = (None, None, None, LoraAdapter("sql", "/adapters/sql"), LoraAdapter("sql", "/adapters/other"))

_TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 400,
    "torch_dtype": "bfloat16",
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 4}
_ENCODER: dict[str, Any] = {"d_model": 8, "is_encoder_decoder": True, "vocab_size": VOCAB, "torch_dtype": "bfloat16"}


def _configs(rng: random.Random) -> dict[str, dict[str, Any]]:
    """One config a family, as small as its reader takes it."""
    layers, window, chunk = rng.randint(2, 4), rng.randint(2, 20), rng.randint(3, 24)
    attention = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    families: dict[str, dict[str, Any]] = {
        "llama": {},
        "gemma3_text": {"sliding_window": window, "sliding_window_pattern": rng.randint(2, 3)},
        "gpt_oss": {"sliding_window": window, "layer_types": attention, "num_local_experts": 2, **_EXPERTS},
        "llama4_text": {
            "attention_chunk_size": chunk,
            "intermediate_size_mlp": 16,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [rng.randint(0, 1) for _ in range(layers)],
            **_EXPERTS,
        },
        "deepseek_v2": {
            "kv_lora_rank": 6,
            "q_lora_rank": None,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            **_EXPERTS,
        },
        "qwen3_next": {
            "full_attention_interval": rng.randint(2, 3),
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 4,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": rng.choice((4, 32)),
            "num_experts": 2,
            "shared_expert_intermediate_size": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **_EXPERTS,
        },
        "lfm2": {"full_attn_idxs": [rng.randrange(layers)], "conv_L_cache": 3},
        "jamba": {
            "attn_layer_offset": 1,
            "attn_layer_period": rng.randint(2, 3),
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 3,
            "mamba_d_state": rng.choice((4, 16)),
            "mamba_dt_rank": 2,
            "mamba_expand": 2,
            "num_experts": 2,
            **_EXPERTS,
        },
        "mamba2": {"state_size": 4, "conv_kernel": 3, "expand": 2, "head_dim": 8, "num_heads": 4, "n_groups": 1},
    }
    made = {name: {**_TINY, "num_hidden_layers": layers, **own, "model_type": name} for name, own in families.items()}
    made["whisper"] = _ENCODER | {
        "model_type": "whisper",
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 8,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 8,
        "encoder_layers": 2,
        "max_source_positions": 20,
        "max_target_positions": 400,
        "num_mel_bins": 4,
    }
    sizes = {"d_kv": 4, "num_heads": 2, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2, "n_positions": 20}
    made["t5"] = _ENCODER | sizes | {"model_type": "t5"}
    return made


def _mixture(rng: random.Random, block: int, drafts: int) -> Model:
    """Layers of any kinds side by side, as no config has them."""
    heads: dict[str, Any] = {"block_size": block, "num_kv_heads": 1, "head_size": 4, "dtype": "bfloat16"}
    wide: dict[str, Any] = {**heads, "head_size": 12}
    latent: dict[str, Any] = {"block_size": block, "head_size": 8, "dtype": "bfloat16"}
    width = rng.choice((16, 200, 1000))
    kinds: list[Callable[[], KVCacheSpec]] = [
        lambda: FullAttentionSpec(**rng.choice((heads, wide))),
        lambda: SlidingWindowSpec(**heads, sliding_window=rng.choice((1, 2, 5, 9, 17))),
        lambda: ChunkedLocalAttentionSpec(**heads, attention_chunk_size=rng.choice((1, 4, 10, 16))),
        lambda: MLAAttentionSpec(**latent),
        lambda: SlidingWindowMLASpec(**latent, sliding_window=rng.choice((3, 8))),
        lambda: SinkFullAttentionSpec(**heads, sink_len=rng.choice((2, 9))),
        lambda: MambaSpec(
            block_size=block, shapes=((width,), (3, 4)), dtypes=("float32", "bfloat16"), num_speculative_blocks=drafts
        ),
    ]
    chosen = rng.choices(kinds, k=rng.randint(1, 5))
    if rng.random() < 0.6:  # few small pages beside large states: what moves between slabs
        chosen = [kinds[-1], *rng.choices(kinds[:-1], k=rng.randint(1, 2))]
    layers = tuple(Layer(f"layer.{i}", spec(), i) for i, spec in enumerate(chosen))
    return Model("mixture", "mixture", layers, 400, VOCAB, "bfloat16", 1, 1, block, num_speculative_tokens=drafts)


def _compressed(rng: random.Random, block: int, drafts: int) -> Model:
    """Caches at several rates, with windows, indexers and rings beside them. A ring or window holds the raw keys."""
    size = 4 * block
    fine, coarse = rng.choice((2, 4, Fraction(1, 2), Fraction(2, 3))), rng.choice((4, 8, block))
    packed: dict[str, Any] = rng.choice(({}, {"state_content_bytes": 13}, {"state_content_bytes": 20, "alignment": 16}))
    latent: dict[str, Any] = {"block_size": size, "head_size": 8, "dtype": "uint8"}
    ring: dict[str, Any] = {"num_kv_heads": 1, "head_size": 4, "dtype": "bfloat16", "head_size_v": rng.choice((0, 4))}
    span = coarse + drafts + rng.randint(0, 5)
    kinds: list[KVCacheSpec] = [
        MLAAttentionSpec(**latent, **packed, tokens_per_state=fine),
        MLAAttentionSpec(**latent | {"head_size": 12}, tokens_per_state=fine, cache_role=SparseCacheRole.INDEXER),
        MLAAttentionSpec(**latent, tokens_per_state=coarse),
        SlidingWindowMLASpec(**latent | {"block_size": block}, **packed, sliding_window=rng.choice((3, 9, 20))),
        SlidingWindowSpec(**latent, num_kv_heads=1, sliding_window=rng.choice((5, 12)), tokens_per_state=2),
        FullAttentionSpec(**latent | {"block_size": block}, num_kv_heads=1),
        MambaSpec(block_size=block, shapes=((20,),), dtypes=("float32",), num_speculative_blocks=drafts),
    ]
    chosen = [rng.choice(kinds[:3]), *rng.choices(kinds, weights=(6, 6, 6, 4, 3, 2, 1), k=rng.randint(0, 4))]
    groups = {Fraction(spec.tokens_per_state).numerator for spec in chosen if isinstance(spec, AttentionSpec)} - {1}
    pools = {group: group * (rng.random() < 0.8) for group in groups}
    if rng.random() < 0.6:
        chosen += [CircularBufferSpec(block_size=span, **ring, pools=pools[group]) for group in groups]
    else:
        sums: dict[str, Any] = latent | {"block_size": block, "sliding_window": span}
        chosen += [SlidingWindowMLASpec(**sums, pools=pools[group]) for group in groups]
    rng.shuffle(chosen)
    layers = tuple(Layer(f"layer.{i}", spec, i) for i, spec in enumerate(chosen))
    return Model("compressed", "compressed", layers, 400, VOCAB, "bfloat16", 1, 1, block, num_speculative_tokens=drafts)


@dataclass(frozen=True, slots=True)
class World:
    """What a history runs in. options: in words, for the report of a difference.

    start: begins a process, with a cache, a scheduler and host memory, if there is any. shelf: a store behind that, if
    there is any. slow: answers look-ups there; None if they are answered at once.
    """

    plan: Plan
    start: Callable[[], Process]
    interleave: int
    options: str
    shelf: Shelf | None = None
    slow: Slow | None = None


class Process(NamedTuple):
    """What a process has, and loses when it ends."""

    cache: KVCacheManager
    scheduler: Scheduler
    tier: HostTier | None


def random_world(
    rng: random.Random,
    eviction: str = LRU.name,
    family: str | None = None,
    *,
    layout: str | None = None,
    tiered: bool = False,
    stored: bool = False,
) -> World:
    """A model, a plan that is tight, a cache and a scheduler. Draws again what the library refuses by name.

    family: of the model, of which "compressed" is drawn on request alone; None for any other. layout: None for either.
    tiered: with host memory. stored: with a store behind that.
    """
    while True:
        try:
            return _world(rng, eviction, family, layout, tiered=tiered, stored=stored)
        except (ConfigError, UnsupportedModelError):
            continue


def _world(
    rng: random.Random, eviction: str, wanted: str | None, layout: str | None, *, tiered: bool, stored: bool
) -> World:
    block = rng.choice((2, 4, 4, 8, 16))
    drafts = rng.choice((0, 0, 1, 2, 3))
    families = _configs(rng)
    family = wanted or rng.choice((*families, *["mixture"] * 6))
    if family in {"mixture", "compressed"}:
        model = (_mixture if family == "mixture" else _compressed)(rng, block, drafts)
    else:
        model = read_model(families[family], block_size=block, num_speculative_tokens=drafts)
    layout = layout or rng.choice(("natural", "natural", "reference"))
    names = ("align", "none") if layout == "reference" else ("ends", "ends", "align:8", "interval:5", "none")
    placement = rng.choice(names)
    limits = SchedulerLimits(
        max_running=rng.randint(1, 8),
        max_batched_tokens=rng.choice((3, 8, 20, 64)),
        max_in_flight=rng.choice((1, 1, 2, 3)),
        watermark=rng.choice((0.0, 0.0, 0.1)),
        policy=rng.choice(("fcfs", "priority")),
        max_overtaken=rng.choice((2, 64)),
        num_lookahead_tokens=rng.choice((0, 0, 2)),
        num_speculative_tokens=drafts,
        segments=rng.random() < 0.7,
    )
    ranks: dict[str, int] = rng.choice(({}, {}, {}, {"dcp": 2}, {"dcp": 2, "pcp": 2}))
    plan_options: dict[str, Any] = {
        "max_model_len": rng.randint(24, 120),
        "max_batched_tokens": limits.max_batched_tokens + limits.num_lookahead_tokens,
        "max_in_flight": limits.max_in_flight,
        "layout": layout,
        "placement": placement,
        "windows_as_full": rng.random() < 0.1,
        **ranks,
    }
    if layout == "natural" and rng.random() < 0.3:
        plan_options["kernel_block_size"] = 2
    plan = _tight_plan(rng, model, plan_options, (1, 1.05, 1.3) if tiered else (1, 1.05, 1.3, 2, 4))
    world = ranks.get("dcp", 1) * ranks.get("pcp", 1)
    cache_options: dict[str, Any] = {
        "enable_caching": rng.random() < 0.95,
        "use_eagle": rng.random() < 0.15,
        "dcp_world_size": ranks.get("dcp", 1),
        "pcp_world_size": ranks.get("pcp", 1),
        "retention": rng.choice((None, None, 0, 16)),
        "max_moved_bytes": rng.choice((None, None, 1, 4096)),
        "partial_block_hits": rng.random() < 0.85,
    }
    ticks = iter(range(10**9))
    of_both: dict[str, Any] = {"eviction": eviction_named(eviction), "clock": lambda: next(ticks) * 0.05}
    interleave = rng.choice([size for size in (1, 2, 4) if block % size == 0]) if world > 1 else 1
    below = _Below(rng, plan, stored=stored) if tiered else None

    def start() -> Process:
        cache = cache_with(
            plan.config,
            plan.max_model_len,
            **cache_options,
            **of_both,
            placement=placement_of(plan),
            log_resume_points=tiered,
        )
        tier = None if below is None else below.tier(cache, cache_options, of_both)
        return Process(cache, Scheduler(cache, limits, clock=lambda: next(ticks) * 0.05, tier=tier), tier)

    start()  # what the library refuses, it refuses now
    options = f"{family}, {plan_options}, {limits}, {cache_options}" + (f", {below.limits}" if below else "")
    shelf, slow = (None, None) if below is None else (below.shelf, below.slow)
    return World(plan, start, interleave, options, shelf, slow)


class _Below:
    """Host memory of a slab or of several times the device's, and perhaps a store of some blocks or of many."""

    def __init__(self, rng: random.Random, plan: Plan, *, stored: bool) -> None:
        config = plan.config
        self._plan = plan
        sizes = (2, config.num_blocks, 3 * config.num_blocks)
        self._config = tier_plan(plan, config.unit_bytes * rng.choice(sizes)).config
        self.limits = TierLimits(rng.choice((1, 2, 8)), rng.choice((1, 4, 16)))
        self.shelf, self.slow = None, None
        if stored:
            self.limits = replace(
                self.limits,
                least_tokens=rng.choice((1, 4)),
                max_fetches=rng.choice((1, 4)),
                max_spills=rng.choice((1, 4)),
                patience_s=rng.choice((0.3, 10.0)),
            )
            ranks = plan.limits.cp
            self.shelf = Shelf(ranks * config.arena_bytes * rng.choice((1, 8, 64)), rng)
            self.slow = Slow(rng) if rng.random() < 0.5 else None

    def tier(self, cache: KVCacheManager, options: dict[str, Any], of_both: dict[str, Any]) -> HostTier:
        """Below ``cache``."""
        ours = {name: options[name] for name in ("enable_caching", "use_eagle", "dcp_world_size", "pcp_world_size")}
        host = cache_with(
            self._config,
            self._plan.max_model_len,
            **ours,
            **of_both,
            hasher=cache.hasher,
            max_moved_bytes=options["max_moved_bytes"],
        )
        lookups = None
        if self.shelf is not None and cache.hasher is not None:
            prefixes = Prefixes(parts_of(host), b"the only model..", cache.hasher.block_size)
            lookups = StoreLookups(self.shelf, prefixes, self.slow, patience_s=self.limits.patience_s)
        return HostTier(cache, host, self.limits, lookups)


def _tight_plan(rng: random.Random, model: Model, options: dict[str, Any], times: tuple[float, ...]) -> Plan:
    """Memory for one request, about, or ``times`` as much."""
    # a reference plan is for one step in flight: each further one holds another state besides
    more = options["layout"] == "reference" and any(layer.spec.keeps is Keeps.STATE for layer in model.layers)
    memory = 2048.0
    while True:
        try:
            plan(model, int(memory), **options)
        except CapacityError:
            memory *= 1.2
        else:
            return plan(model, int(memory * (rng.choice((2, 4)) if more else rng.choice(times))), **options)


@dataclass(slots=True)
class Seen:
    """A conversation that requests go on from."""

    tokens: list[int]
    items: list[MultimodalItem]
    embeds: Embeds | None


class Writer:
    """Writes requests that have much in common."""

    def __init__(self, rng: random.Random, world: World) -> None:
        self._rng, self._world = rng, world
        self._seen: list[Seen] = []
        self._names = 0
        self._encoder_tokens = world.plan.limits.max_encoder_tokens
        self._earlier: list[Request] = []
        self.tenants_of_prompts: dict[tuple[int, ...], set[object]] = {}

    def begin(self, hasher: Hasher | None) -> None:
        """Write for a process with ``hasher`` from now on."""
        self._hasher = hasher
        self._earlier.clear()

    def write(self) -> Story:
        """Write the next request, and note in ``tenants_of_prompts`` which tenants sent its prompt."""
        rng = self._rng
        seen = self._prompt()
        self._names += 1
        sampling = SamplingParams(
            seed=rng.randrange(3),
            max_tokens=rng.choice((1, 3, 8, 20, 60)),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 1)))),
            ignore_eos=rng.random() < 0.5,
            n=rng.choice((1, 1, 1, 1, 2, 3)),
        )
        tenant, lora = rng.choice(TENANTS), rng.choice(ADAPTERS)
        if self._world.shelf is not None and rng.random() < 0.7:  # else a shelf rarely has what is asked for
            tenant, lora = None, None
        encoder = None
        if self._encoder_tokens and rng.random() < 0.95:
            number = rng.randrange(4)
            encoder = EncoderInput(f"sound {number}", 1 + number * (self._encoder_tokens - 1) // 3)
        request = Request(
            f"r{self._names}",
            seen.tokens,
            sampling,
            hasher=self._hasher,
            cache_salt=tenant,
            lora=lora,
            multimodal=seen.items,
            prompt_embeds=seen.embeds,
            encoder=encoder,
            eos_token_ids=(VOCAB - 1,),
            continues=rng.choice(self._earlier) if self._earlier and rng.random() < 0.2 else None,
            priority=rng.randrange(3),
            skip_reading_prefix_cache=rng.random() < 0.04,
            skip_writing_prefix_cache=rng.random() < 0.04,
            marks=rng.sample(range(1, 60), rng.choice((0, 0, 2))),
        )
        self._earlier.append(request)
        self.tenants_of_prompts.setdefault(tuple(seen.tokens), set()).add(tenant)
        return Story(request, VOCAB, seen.embeds)

    def remember(self, story: Story) -> None:
        """Others may go on from ``story``."""
        tokens = story.request.token_ids().tolist()
        self._seen.append(Seen(tokens, list(story.request.multimodal), story.embeds))

    def _prompt(self) -> Seen:
        rng, longest = self._rng, self._world.plan.max_model_len - 1
        if self._seen and rng.random() < 0.8:
            old = rng.choice(self._seen[-8:] if self._world.shelf is None else self._seen[:3])
            kept = rng.choice((len(old.tokens), rng.randint(1, len(old.tokens))))
            if self._world.shelf is not None and rng.random() < 0.6:
                kept = len(old.tokens)
            more = rng.choice((0, 0, 1, rng.randint(0, 12)))
        else:
            old, kept, more = Seen([], [], None), 0, rng.randint(1, 40)
        tokens = (old.tokens[:kept] + [rng.randrange(VOCAB) for _ in range(more)])[:longest]
        kept = min(kept, len(tokens))
        items = [item for item in old.items if item.offset + item.length <= kept]
        end = items[-1].offset + items[-1].length if items else 0
        if rng.random() < 0.15 and end + 5 < len(tokens):
            name = rng.choice(("cat", "dog", "bird"))
            items.append(MultimodalItem(name, rng.randint(end, len(tokens) - 5), len(name)))
        embeds = None if old.embeds is None else old.embeds[:kept]
        if embeds is None and not kept and rng.random() < 0.08:
            embeds = np.full((rng.randint(1, len(tokens)), 2), rng.randrange(2), np.float32)
        seen = Seen(tokens, items, embeds)
        self._seen.append(replace(seen))
        return seen
