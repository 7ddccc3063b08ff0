"""Attention layers: keys and values, or one latent vector, of every token or of the last ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar, Self

from hybridkv.arguments import at_least, check_fields, integer, or_none
from hybridkv.errors import ConfigError
from hybridkv.specs.base import Keeps, KVCacheSpec, RequestLimits
from hybridkv.units import ceil_div, dtype_bytes, dtype_name


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
        check_fields(self, at_least(1), "num_kv_heads", "head_size")
        check_fields(self, or_none(integer), "head_size_v")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        self._check_padding()

    @property
    def elements_per_token(self) -> int:
        """Elements of one token in one KV head: key and value."""
        value = self.head_size if self.head_size_v is None else self.head_size_v
        return self.head_size + value

    @property
    def content_bytes(self) -> int:
        """``block_size * num_kv_heads * (head_size + head_size_v) * bytes of dtype``."""
        return self.block_size * self.num_kv_heads * self.elements_per_token * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that attends to every earlier token.

    ``sliding_window`` and ``attention_chunk_size`` are remembered where a windowed or chunked layer is
    managed as full attention: all tokens are kept, the kernel still masks.
    """

    keeps: ClassVar = Keeps.TOKENS

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        super(FullAttentionSpec, self).__post_init__()
        check_fields(self, or_none(integer), "sliding_window", "attention_chunk_size")

    @property
    def uniform_key(self) -> Hashable:
        """Full attention, MLA and sink attention keep the same tokens, whatever the kernel masks."""
        return "full"

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """A window or chunk that is kept whole is masked all the same."""
        return self.sliding_window, self.attention_chunk_size

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """``ceil(max_model_len / (dcp * pcp) / block_size)``."""
        return ceil_div(ceil_div(limits.max_model_len, limits.cp), self.block_size)

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
        if len({type(spec) for spec in specs}) > 1:
            names = sorted({type(spec).__name__ for spec in specs})
            raise ConfigError(f"layers of {' and '.join(names)} differ in kind and cannot share a block table")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention behind ``sink_len`` tokens of learned keys and values that every request reads.

    The sink's blocks are never dropped and belong to the layer, not to a request, so a request's own need is
    that of full attention.
    """

    sink_len: int

    def __post_init__(self) -> None:
        super(SinkFullAttentionSpec, self).__post_init__()
        check_fields(self, integer, "sink_len")
        if self.sink_len < 1:
            raise ConfigError(
                f"sink_len must be at least 1 token, got {self.sink_len}: without a sink, use full attention"
            )

    def reserved_blocks(self, ranks: int) -> int:
        """``ceil(sink_len / (block_size * ranks))``: the sink's keys and values."""
        return ceil_div(self.sink_len, self.block_size * ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer where a token reads itself and the ``sliding_window - 1`` tokens before it; older blocks are freed."""

    keeps: ClassVar = Keeps.WINDOW

    sliding_window: int

    def __post_init__(self) -> None:
        super(SlidingWindowSpec, self).__post_init__()
        check_fields(self, at_least(1), "sliding_window")

    @property
    def uniform_key(self) -> Hashable:
        """The window."""
        return "sliding", self.sliding_window

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """The window."""
        return self.sliding_window, None

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Blocks of ``min(sliding_window - 1 + in flight, max_model_len)`` tokens, and one: windows start anywhere."""
        tokens = min(self.sliding_window - 1 + limits.max_in_flight_tokens, limits.max_model_len)
        return ceil_div(tokens, self.block_size * limits.cp) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A windowed layer that keeps one latent vector a token, as MLAAttentionSpec: a kind of its own."""

    num_kv_heads: int = 1

    @property
    def elements_per_token(self) -> int:
        """Elements of one token: the latent and its rotary part, once."""
        return self.head_size

    @property
    def uniform_key(self) -> Hashable:
        """The window; latents are not mixed with keys and values."""
        return "sliding_mla", self.sliding_window


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer where a token reads the tokens of its own chunk of ``attention_chunk_size`` up to itself."""

    keeps: ClassVar = Keeps.WINDOW

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super(ChunkedLocalAttentionSpec, self).__post_init__()
        check_fields(self, at_least(1), "attention_chunk_size")

    @property
    def uniform_key(self) -> Hashable:
        """The chunk."""
        return "chunked", self.attention_chunk_size

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """The chunk."""
        return None, self.attention_chunk_size

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Blocks of ``min(attention_chunk_size + in flight, max_model_len)`` tokens.

        Where chunks begin inside blocks, of the tokens before them in that block too.
        """
        size = self.block_size * limits.cp
        before = size - gcd(self.attention_chunk_size, size)
        tokens = before + self.attention_chunk_size + limits.max_in_flight_tokens
        return min(ceil_div(tokens, size), ceil_div(limits.max_model_len, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A decoder layer that reads the encoder's output: written once, as long as the encoder's input."""

    keeps: ClassVar = Keeps.ENCODER

    @property
    def uniform_key(self) -> Hashable:
        """All cross attention reads the same encoder output."""
        return "cross"

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """``ceil(max_encoder_tokens / block_size)``; whole on every context parallel rank."""
        return ceil_div(limits.max_encoder_tokens, self.block_size)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """The encoder's blocks."""
        return max(1, self.max_request_blocks(limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """A bidirectional layer that keeps nothing: it has a page, of which no request needs any."""

    keeps: ClassVar = Keeps.NOTHING

    @property
    def uniform_key(self) -> Hashable:
        """Nothing is kept anywhere."""
        return "encoder_only"

    def max_request_blocks(self, limits: RequestLimits) -> int:  # noqa: ARG002 - the answer of every spec
        """None."""
        return 0
