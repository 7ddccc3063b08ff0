"""What one layer keeps in the cache: frozen specs, sized from explicit limits.

A spec answers three questions: how many bytes is a page (one block in this layer), how many bytes may
one request need, and which layers may share a block table (``merge``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from hybridkv.errors import ConfigError
from hybridkv.units import ceil_div, dtype_bytes, dtype_name


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What bounds the memory of one request.

    max_model_len: tokens, prompt and output together.
    max_in_flight_tokens: tokens scheduled and not yet settled (budget of a step x steps in flight).
    dcp, pcp: decode and prefill context parallel sizes; each rank keeps 1 / (dcp * pcp) of the tokens.
    """

    max_model_len: int
    max_in_flight_tokens: int = 0
    dcp: int = 1
    pcp: int = 1

    def __post_init__(self) -> None:
        for name in ("max_model_len", "dcp", "pcp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_in_flight_tokens < 0:
            raise ConfigError(f"max_in_flight_tokens must not be negative, got {self.max_in_flight_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """What every layer has: a block size in tokens."""

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1 token, got {self.block_size}")

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block in this layer."""

    @abstractmethod
    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        """Most bytes that one request needs in this layer."""

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for layers that share a block table; equal specs merge into a copy.

        Raises ConfigError when the specs differ in anything that matters.
        """
        if not specs:
            raise ConfigError("merge needs at least one spec")
        first = specs[0]
        if any(spec != first for spec in specs[1:]):
            raise ConfigError(f"layers of {type(first).__name__} differ and cannot share a block table")
        return replace(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of ``num_kv_heads`` heads, ``head_size`` wide, in ``dtype``.

    ``head_size_v`` is the width of a value where it differs from that of a key
    (config field ``v_head_dim``); None means ``head_size``.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int | None = None

    def __post_init__(self) -> None:
        super(AttentionSpec, self).__post_init__()
        for name in ("num_kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def elements_per_token(self) -> int:
        """Elements of one token in one KV head: key and value."""
        value = self.head_size if self.head_size_v is None else self.head_size_v
        return self.head_size + value

    @property
    def page_size_bytes(self) -> int:
        """``block_size * num_kv_heads * (head_size + head_size_v) * bytes of dtype``."""
        return self.block_size * self.num_kv_heads * self.elements_per_token * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that attends to every earlier token.

    ``sliding_window`` and ``attention_chunk_size`` are remembered where a windowed or chunked layer is
    managed as full attention: all tokens are kept, the kernel still masks.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        """``ceil(max_model_len / (dcp * pcp) / block_size)`` pages."""
        local_tokens = ceil_div(limits.max_model_len, limits.dcp * limits.pcp)
        return ceil_div(local_tokens, self.block_size) * self.page_size_bytes

    @staticmethod
    def merge_window_sizes(sizes: set[int]) -> int | None:
        """The one window of a set of layers: None for none; ConfigError for more than one."""
        if len(sizes) > 1:
            raise ConfigError(
                f"layers with different windows {sorted(sizes)} cannot share a block table: "
                "put them into separate groups"
            )
        return next(iter(sizes), None)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Merge specs that agree in everything but window and chunk, of which one may remain.

        Raises ConfigError for two different windows, two chunks, or a window and a chunk.
        """
        if not specs:
            raise ConfigError("merge needs at least one spec")
        window = cls.merge_window_sizes({s.sliding_window for s in specs if s.sliding_window is not None})
        chunk = cls.merge_window_sizes({s.attention_chunk_size for s in specs if s.attention_chunk_size is not None})
        if window is not None and chunk is not None:
            raise ConfigError(
                f"a window of {window} and a chunk of {chunk} cannot share a block table: "
                "put these layers into separate groups"
            )
        bare = [replace(s, sliding_window=None, attention_chunk_size=None) for s in specs]
        if any(spec != bare[0] for spec in bare[1:]):
            raise ConfigError(f"layers of {cls.__name__} differ in more than window and chunk")
        return replace(bare[0], sliding_window=window, attention_chunk_size=chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector a token, ``head_size`` wide, shared by all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; ``head_size`` is the config's
    ``kv_lora_rank + qk_rope_head_dim`` and ``num_kv_heads`` is 1.
    """

    num_kv_heads: int = 1

    @property
    def elements_per_token(self) -> int:
        """Elements of one token: the latent and its rotary part, once."""
        return self.head_size
