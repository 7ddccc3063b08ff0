"""Convert vLLM's settings and cache groups to this library's, and reject options that it does not support.

Kinds of groups are recognized by the names of vLLM's classes. An unknown kind, or a kind with a feature that this
library lacks, is rejected at start.

``refuse`` and ``refuse_natural`` reject options of vLLM that a layout does not support, with the names of the options.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hybridkv.errors import ConfigError
from hybridkv.eviction import LRU, Eviction
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    Keeps,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from hybridkv.units import ceil_div, dtype_bytes

logger = logging.getLogger(__name__)
_STATES: Final = "MambaSpec"
_HEADS: Final = ("block_size", "num_kv_heads", "head_size", "tokens_per_state", "dcp_sharded")
_WINDOW: Final = ("sliding_window", "extra_retained_tokens")
_ATTENTION: Final[Mapping[str, tuple[Callable[..., KVCacheSpec], tuple[str, ...]]]] = {
    "FullAttentionSpec": (FullAttentionSpec, ()),  # also windows and chunks managed as full attention
    "MLAAttentionSpec": (MLAAttentionSpec, ()),
    "SlidingWindowSpec": (SlidingWindowSpec, _WINDOW),
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, (*_WINDOW, "bounded_replay")),
    "CircularBufferSpec": (CircularBufferSpec, ()),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, ("attention_chunk_size",)),
    "CrossAttentionSpec": (CrossAttentionSpec, ()),
}
"""Our class for each kind of attention in vLLM, and its fields besides those of the heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options that vLLM was started with and that concern the cache.

    Attributes:
        max_model_len: most tokens of a request.
        max_in_flight_tokens: most tokens of all steps that are scheduled and not settled.
        hash_block_size: tokens per hashed block.
        hit_unit: reference layout: hits may end inside a block, at multiples of so many tokens; ``None`` at boundaries.
        enable_caching: whether prefixes are cached.
        use_eagle: whether a draft head reads the cache.
        enable_events: whether the cache records events.
        dcp_world_size: decode context parallel ranks.
        retention: vLLM's prefix_cache_retention_interval.
        eviction: what the reference layout evicts next.
        watermark: share of all blocks that stays free when a request is admitted while others run.
        new_stats: returns an empty PrefixCacheStats of vLLM; ``None`` without statistics.
    """

    max_model_len: int
    max_in_flight_tokens: int
    hash_block_size: int
    enable_caching: bool
    use_eagle: bool
    enable_events: bool
    dcp_world_size: int = 1
    hit_unit: int | None = None
    retention: int | None = None
    eviction: Eviction = LRU
    watermark: float = 0.0
    new_stats: Callable[[], Any] | None = None


class Group(Protocol):
    """The fields that are read from vLLM's KVCacheGroupSpec."""

    layer_names: Sequence[str]
    kv_cache_spec: Any
    is_eagle_group: bool


class Config(Protocol):
    """The fields that are read from vLLM's KVCacheConfig."""

    num_blocks: int
    kv_cache_groups: Sequence[Group]


def cache_config(config: Config) -> KVCacheConfig:
    """Return groups and number of blocks, without tensors, which vLLM owns. Raises ConfigError as ``spec_of``."""
    groups = tuple(
        KVCacheGroupSpec(tuple(group.layer_names), spec_of(group.kv_cache_spec), is_eagle_group=group.is_eagle_group)
        for group in config.kv_cache_groups
    )
    return KVCacheConfig(config.num_blocks, (), groups)


def layer_specs(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield each layer's name and vLLM's spec of it, group by group."""
    for group in config.kv_cache_groups:
        several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            yield layer, group.kv_cache_spec if several is None else several[layer]


def spec_of(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - vLLM is not typed here
    """Return our spec for vLLM's. Raises ConfigError for an unknown kind or an unsupported feature."""
    name = type(spec).__name__
    if (
        name == "UniformTypeKVCacheSpecs"
    ):  # one block table for layers with pages of different bytes, which only vLLM uses
        return spec_of(max(spec.kv_cache_specs.values(), key=lambda one: getattr(one, "tokens_per_state", 1)))
    if name not in (*_ATTENTION, _STATES):
        known = ", ".join(sorted((*_ATTENTION, _STATES)))
        raise ConfigError(
            f"vLLM's {name} is not supported by hybridkv.vllm, which knows {known}: leave --scheduler-cls out"
        )
    if name == _STATES:
        return _states(spec)
    kind, more = _ATTENTION[name]
    return kind(**{field: getattr(spec, field) for field in (*_HEADS, *more)}, dtype=_dtype(spec.dtype))


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _states(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - as above
    if spec.mamba_cache_mode not in {"none", "align"}:
        raise ConfigError(
            f"--mamba-cache-mode {spec.mamba_cache_mode} is not supported by hybridkv.vllm: use align, or none"
        )
    # as vLLM counts bytes: a shape without a dtype, or a dtype without a shape, is ignored
    states = tuple(zip(spec.shapes, spec.dtypes, strict=False))
    return MambaSpec(
        block_size=spec.block_size,
        shapes=tuple(tuple(shape) for shape, _ in states),
        dtypes=tuple(_dtype(dtype) for _, dtype in states),
        num_speculative_blocks=spec.num_speculative_blocks,
        cache_mode=spec.mamba_cache_mode,
    )


WORKER: Final = "hybridkv.vllm.NaturalWorker"
TAKES: Final = "supports_natural_layout"
"""Attribute with which a connector's class declares that it supports the natural layout (docs/vllm.md)."""


def refuse(scheduler: Any) -> None:  # noqa: ANN401 - vLLM's Scheduler, its own manager still in it
    """Raise ConfigError for the first unsupported option of the reference layout."""
    for why in _unsupported(scheduler):
        raise ConfigError(f"hybridkv.vllm does not support {why}, or leave --scheduler-cls out")


def _unsupported(scheduler: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """Yield each unsupported option with its fix."""
    started = scheduler.vllm_config
    yield from _unsupported_connectors(scheduler)
    if hit_unit_of(scheduler) is not None:
        inside = f"hits inside a block of {scheduler.block_size} tokens, at multiples of {scheduler.hash_block_size},"
        yield from (f"{inside} with {why}: leave --prefix-match-unit out" for why in _not_inside_blocks(scheduler))
    if started.num_prefill_lookahead_tokens > 1:
        yield (
            f"drafts of {started.num_prefill_lookahead_tokens} modules that predict tokens, whose last tokens of a "
            "prompt are computed again: use one module"
        )
    if getattr(scheduler, "num_hash_lookahead_tokens", 0):
        yield (
            "hashes of blocks that cover tokens after the block, as vLLM 0.33 has them for drafts: set "
            "disable_lookahead_block_hashes in --speculative-config"
        )
    if started.observability_config.kv_cache_metrics:
        yield "--kv-cache-metrics, how long blocks live: leave it out"
    for group in scheduler.kv_cache_config.kv_cache_groups:
        if group.host_resident or group.role != "default":
            yield f"groups in two places ({group.layer_names[0]}): leave HiSparse out"


def hit_unit_of(scheduler: Any) -> int | None:  # noqa: ANN401 - vLLM's Scheduler, its own manager still in it
    """Return the tokens of which hits inside blocks are multiples; ``None`` if vLLM hits at block boundaries only."""
    theirs = scheduler.kv_cache_manager
    inside = theirs.enable_caching and theirs.coordinator.enable_partial_hash_hits
    return int(scheduler.hash_block_size) if inside else None


def copied_tokens(config: Config) -> int:
    """Return how many tokens of an attention block vLLM's worker copies for a hit inside the block.

    The worker copies layers that share their pages once, through the first layer's view
    (``copy_kv_cache_blocks_inplace`` of vLLM 0.32 and 0.33). A view of states ends before the page does if the page is
    padded, and the bytes after it are not copied. At worst they hold values of one head, in runs of one token:

        page      | keys of head 0 | values | keys of head 1 | values of tokens 0 .. |
        copied    |<------------------- bytes of a state ------------------->|

    A page with more than keys and values, such as scales at its end, counts as not copied.
    """
    specs = [(spec_of(spec), spec.real_page_size_bytes) for _, spec in layer_specs(config)]
    states = {spec.content_bytes for spec, _ in specs if spec.keeps is Keeps.STATE}
    if len(states) > 1:  # the larger state would not be copied whole
        return 0
    copied = specs[0][0].block_size
    for spec, page_bytes in specs:
        if isinstance(spec, AttentionSpec) and states and (lost := page_bytes - min(states)) > 0:
            if page_bytes != spec.content_bytes:
                return 0
            head = min(spec.head_size, spec.head_size_v or spec.head_size)
            copied = min(copied, spec.block_size - ceil_div(lost, head * dtype_bytes(spec.dtype)))
    return max(copied, 0)


def _not_inside_blocks(scheduler: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """Yield each option with which no hit may end inside a block."""
    if scheduler.connector is not None:
        yield "a connector, whose loads begin at block boundaries"
    if scheduler.vllm_config.speculative_config is not None:
        yield "drafts, whose states lie in the columns after the end of a hit"
    if scheduler.vllm_config.parallel_config.decode_context_parallel_size > 1:
        yield "context parallelism, which spreads a block over ranks"
    if len({group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups}) > 1:
        yield "blocks of several sizes"


_CAPTURES: Final[Mapping[str, str]] = {"aux_output_connector": "routed experts in the output (aux_output_config)"}
"""The option of vLLM that sets this attribute of its scheduler."""


def refuse_captured(scheduler: Any, manager: Any) -> None:  # noqa: ANN401 - vLLM's Scheduler, and its own manager
    """Raise ConfigError if an attribute of ``scheduler`` still holds vLLM's ``manager``, its coordinator or its pool.

    vLLM's constructor may hand the manager to helpers. After the replacement, such a helper reads a cache that nobody
    fills. Helpers are searched one level deep.
    """
    replaced = {id(one) for one in (manager, manager.coordinator, manager.block_pool)}
    for name, value in vars(scheduler).items():
        if any(id(one) in replaced for one in (value, *getattr(value, "__dict__", {}).values())):
            raise ConfigError(
                f"hybridkv.vllm does not support {_CAPTURES.get(name, name)}, which reads vLLM's own cache manager: "
                "leave it out, or leave --scheduler-cls out"
            )


def _unsupported_connectors(scheduler: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """Yield each unsupported connector with its fix."""
    states = any(hasattr(one.kv_cache_spec, "shapes") for one in scheduler.kv_cache_config.kv_cache_groups)
    for connector in connectors_in(scheduler.connector):
        name, kinds = type(connector).__name__, {kind.__name__ for kind in type(connector).__mro__}
        if _works_in_pool(connector):
            yield (
                f"the connector {name}, which reads and locks blocks in vLLM's own pool, and hybridkv replaces that: "
                "take one that works with the block ids that it is given, like NixlConnector"
            )
        if states and "OffloadingConnector" in kinds:
            yield (
                f"the connector {name} for models with recurrent states, because nobody compared its loads with stock: "
                "take TierConnector"
            )


def connectors_in(connector: Any) -> Iterator[Any]:  # noqa: ANN401 - as above
    """Yield ``connector``, or those that a MultiConnector combines; nothing for ``None``."""
    if connector is not None:
        inside = getattr(connector, "sub_connectors", None)
        if inside is None:
            yield connector
        else:
            for one in inside:
                yield from connectors_in(one)


def _works_in_pool(connector: Any) -> bool:  # noqa: ANN401 - as above
    """Return whether the connector's class itself handles vLLM's manager or pool; all base classes pass them on."""
    return any(
        name in vars(kind)
        for kind in type(connector).__mro__
        if not kind.__module__.endswith("kv_connector.v1.base")
        for name in ("bind_kv_cache_manager", "bind_gpu_block_pool")
    )


RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
_FOLLOW_RUNNER: Final = ("logits_processors", "return_sampling_mask", "enable_trace_replay")
"""Options of a model that vLLM checks against its choice of runner before a scheduler or worker exists."""


def choose_runner(started: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Choose vLLM's first model runner in this process if vLLM chose V2, which the natural layout does not support.

    vLLM reads the choice from the environment in each process, so workers and the scheduler call this before vLLM's
    constructor does. The user must choose where vLLM has derived other options from V2 already: with drafts, and with
    the options in ``_FOLLOW_RUNNER``.

    Raises ConfigError if the user must choose, or chose V2.
    """
    if not started.use_v2_model_runner:
        return
    follow = any(getattr(started.model_config, name, None) for name in _FOLLOW_RUNNER)
    if RUNNER not in os.environ and started.speculative_config is None and not follow:
        os.environ[RUNNER] = "0"
    if started.use_v2_model_runner:
        raise ConfigError(f"the natural layout supports vLLM's first model runner: start with {RUNNER}=0")
    started._validate_v1_model_runner()
    logger.warning("the natural layout runs on vLLM's first model runner: %s=0 is set in this process", RUNNER)


def refuse_natural(started: Any, config: Config, connector: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Raise ConfigError for the first unsupported option of the natural layout.

    ``config`` is vLLM's KVCacheConfig. ``connector`` is ``None`` without one.
    """
    for why in _not_natural(started, config, connector):
        raise ConfigError(f"NaturalScheduler {why}")


def _not_natural(started: Any, config: Config, connector: Any) -> Iterator[str]:  # noqa: ANN401 - as above
    """Yield each unsupported option with its fix."""
    if started.parallel_config.worker_cls != WORKER:
        yield f"needs --worker-cls {WORKER}, this is {started.parallel_config.worker_cls}"
    if started.cache_config.enable_prefix_caching:
        yield "caches prefixes itself: switch vLLM's own off (--no-enable-prefix-caching)"
    for name in ("data_parallel_size", "decode_context_parallel_size"):
        size = getattr(started.parallel_config, name)
        if size > 1:
            yield f"does not support {name} {size}: leave it out"
    if connector is not None and (size := started.parallel_config.pipeline_parallel_size) > 1:
        yield f"does not support connectors with pipeline_parallel_size {size}: leave one of them out"
    drafts = started.speculative_config
    states = any(hasattr(spec, "shapes") for _, spec in layer_specs(config))
    for one in connectors_in(connector):
        if not getattr(one, TAKES, False):
            yield (
                f"does not support the connector {type(one).__name__}, whose class does not say {TAKES} = True: vLLM's "
                "connectors read one number of blocks for all layers, and here each layer has its own; for NIXL, take "
                "NaturalNixlConnector (kv_connector_module_path hybridkv.vllm.nixl)"
            )
    if sum(hasattr(one, "start_natural") for one in connectors_in(connector)) > 1:
        yield "has one host memory, and several TierConnectors each want their own: leave all but one out"
    given = {
        "ec_transfer_config, connectors of encoders": started.ec_transfer_config,
        "models with an encoder and a decoder": started.model_config.is_encoder_decoder,
        # vLLM itself answers differently with drafts than without (docs/vllm.md), so results cannot be compared
        "speculative_config for models with recurrent states": drafts is not None and states,
        "speculative_config of another method than ngram": drafts is not None and drafts.method != "ngram",
    }
    yield from (f"does not support {name}: leave it out" for name, is_given in given.items() if is_given)
