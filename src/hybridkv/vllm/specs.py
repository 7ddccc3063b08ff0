"""What vLLM was started with: settings of its cache, and its groups as ours.

Kinds of groups are told by the names of vLLM's classes. An unknown kind, or one that asks for a feature that this
library lacks, is refused at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

_STATES: Final = "MambaSpec"
_HEADS: Final = ("block_size", "num_kv_heads", "head_size")
_ATTENTION: Final[Mapping[str, tuple[Callable[..., KVCacheSpec], tuple[str, ...]]]] = {
    "FullAttentionSpec": (FullAttentionSpec, ()),  # also windows and chunks that are managed as full ones
    "MLAAttentionSpec": (MLAAttentionSpec, ()),
    "SlidingWindowSpec": (SlidingWindowSpec, ("sliding_window",)),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, ("attention_chunk_size",)),
    "CrossAttentionSpec": (CrossAttentionSpec, ()),
}
"""Of each of vLLM's kinds of attention: ours, and fields that it has beside its heads."""
_REFUSED: Final[Mapping[str, str]] = {
    "extra_retained_tokens": "a window that multi-token prediction extends",
    "prefix_replay_tokens": "bounded replay of windows",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What vLLM was started with, as far as its cache minds.

    max_in_flight_tokens: of all steps that may be scheduled and not settled. watermark: share of all blocks that stays
    free at an admission beside others. new_stats: makes an empty PrefixCacheStats of vLLM; None without statistics.
    """

    max_model_len: int
    max_in_flight_tokens: int
    hash_block_size: int
    enable_caching: bool
    use_eagle: bool
    enable_events: bool
    dcp_world_size: int = 1
    retention: int | None = None
    watermark: float = 0.0
    new_stats: Callable[[], Any] | None = None


class Group(Protocol):
    """What is read of vLLM's KVCacheGroupSpec."""

    layer_names: Sequence[str]
    kv_cache_spec: Any
    is_eagle_group: bool


class Config(Protocol):
    """What is read of vLLM's KVCacheConfig."""

    num_blocks: int
    kv_cache_groups: Sequence[Group]


def cache_config(config: Config) -> KVCacheConfig:
    """Groups and number of blocks; no tensors, which are vLLM's. ConfigError for a group that is not supported."""
    groups = tuple(
        KVCacheGroupSpec(tuple(group.layer_names), spec_of(group.kv_cache_spec), is_eagle_group=group.is_eagle_group)
        for group in config.kv_cache_groups
    )
    return KVCacheConfig(config.num_blocks, (), groups)


def layer_specs(config: Config) -> Iterator[tuple[str, Any]]:
    """Each layer's name and vLLM's spec of it, group after group."""
    for group in config.kv_cache_groups:
        several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            yield layer, group.kv_cache_spec if several is None else several[layer]


def spec_of(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - vLLM is not typed here
    """Ours of one of vLLM's. ConfigError for a kind that is not known, and for what it asks beyond its kind."""
    name = type(spec).__name__
    if name == "UniformTypeKVCacheSpecs":  # one table for layers whose pages differ in bytes, which are vLLM's
        return spec_of(next(iter(spec.kv_cache_specs.values())))
    if name not in (*_ATTENTION, _STATES):
        known = ", ".join(sorted((*_ATTENTION, _STATES)))
        raise ConfigError(
            f"vLLM's {name} is not supported by hybridkv.vllm, which knows {known}: leave --scheduler-cls out"
        )
    for field, what in _REFUSED.items():
        if getattr(spec, field, 0):
            raise ConfigError(f"{what} ({name}.{field}) is not supported by hybridkv.vllm: leave --scheduler-cls out")
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
    # as vLLM counts their bytes: what has no other of the pair is none
    states = tuple(zip(spec.shapes, spec.dtypes, strict=False))
    return MambaSpec(
        block_size=spec.block_size,
        shapes=tuple(tuple(shape) for shape, _ in states),
        dtypes=tuple(_dtype(dtype) for _, dtype in states),
        num_speculative_blocks=spec.num_speculative_blocks,
        cache_mode=spec.mamba_cache_mode,
    )
