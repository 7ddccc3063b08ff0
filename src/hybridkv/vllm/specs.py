"""vLLM's groups as ours: what each keeps of a token, of a state, and in which blocks.

Kinds are told by the names of vLLM's classes. One that is not among them, or that asks for what this library does not
do, is refused at start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def spec_of(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - vLLM is not typed here
    """Ours of one of vLLM's. ConfigError for a kind that is not known, and for what it asks beyond its kind."""
    name = type(spec).__name__
    if name == "UniformTypeKVCacheSpecs":  # one table for layers whose pages differ in bytes, which are vLLM's
        return spec_of(next(iter(spec.kv_cache_specs.values())))
    if name not in _KINDS:
        raise ConfigError(
            f"vLLM's {name} is not supported by hybridkv.vllm, which knows {', '.join(sorted(_KINDS))}: leave "
            "--scheduler-cls out"
        )
    for field, what in _REFUSED.items():
        if getattr(spec, field, 0):
            raise ConfigError(f"{what} ({name}.{field}) is not supported by hybridkv.vllm: leave --scheduler-cls out")
    return _KINDS[name](spec)


_REFUSED: Final[Mapping[str, str]] = {
    "extra_retained_tokens": "a window that multi-token prediction extends",
    "prefix_replay_tokens": "bounded replay of windows",
}


def _heads(spec: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    return {
        "block_size": spec.block_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "dtype": _dtype(spec.dtype),
    }


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _full(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - as above
    """Windows and chunks that are managed as full ones keep every token."""
    return FullAttentionSpec(**_heads(spec))


def _latent(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - as above
    return MLAAttentionSpec(**_heads(spec))


def _window(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - as above
    return SlidingWindowSpec(**_heads(spec), sliding_window=spec.sliding_window)


def _chunk(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - as above
    return ChunkedLocalAttentionSpec(**_heads(spec), attention_chunk_size=spec.attention_chunk_size)


def _cross(spec: Any) -> KVCacheSpec:  # noqa: ANN401 - as above
    return CrossAttentionSpec(**_heads(spec))


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


_KINDS: Final[Mapping[str, Callable[[Any], KVCacheSpec]]] = {
    "FullAttentionSpec": _full,
    "MLAAttentionSpec": _latent,
    "SlidingWindowSpec": _window,
    "ChunkedLocalAttentionSpec": _chunk,
    "CrossAttentionSpec": _cross,
    "MambaSpec": _states,
}
