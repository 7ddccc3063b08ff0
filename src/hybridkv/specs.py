"""The cache contents of one layer: frozen specs, sized from explicit limits.

A spec gives the bytes of a page (one block in this layer) and the most blocks that one request needs.
``merge`` and ``UniformTypeKVCacheSpecs`` decide which layers may share a block table.
Names and formulas follow ``vllm/v1/kv_cache_interface.py`` of vLLM 0.33. Compressed caches are values of these specs:
``tokens_per_state``, roles and alignments (``hybridkv.spec_fields``, docs/design/0035-compressed-caches.md).

    KVCacheSpec
    ├── AttentionSpec               a row for every token, or for every state
    │   ├── FullAttentionSpec           every token
    │   │   ├── MLAAttentionSpec            one latent vector per token
    │   │   └── SinkFullAttentionSpec       learned sink tokens before the first token
    │   ├── SlidingWindowSpec           the last tokens
    │   │   └── SlidingWindowMLASpec        one latent vector per token
    │   ├── ChunkedLocalAttentionSpec   the tokens of the current chunk
    │   ├── CircularBufferSpec          the tokens of a group that is still being compressed
    │   ├── CrossAttentionSpec          the encoder's tokens
    │   └── EncoderOnlyAttentionSpec    nothing
    ├── MambaSpec                   one state
    └── UniformTypeKVCacheSpecs     layers of one kind with pages of different sizes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import gcd, lcm, prod
from typing import Annotated, ClassVar, Final, Self

from hybridkv.arguments import Count, Positive, at_least, check_types, instance, or_none
from hybridkv.errors import ConfigError
from hybridkv.spec_fields import (
    Feature,
    KernelBlocks,
    Quantization,
    QuantizationOrNone,
    Rate,
    Role,
    SparseCacheRole,
    StrideAlignment,
)
from hybridkv.units import ceil_div, dtype_bytes, dtype_name, round_up, shown

__all__ = [
    "BATCHED_TOKENS",
    "CACHE_MODES",
    "MAMBA_TYPES",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheSpec",
    "Keeps",
    "MLAAttentionSpec",
    "MambaSpec",
    "RequestLimits",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
]

BATCHED_TOKENS: Final = 8192
"""Default for the tokens of the largest step. vLLM's ``max_num_batched_tokens`` has this default on large GPUs."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that bound the memory of one request.

    Attributes:
        max_model_len: most tokens of a request, prompt and output together.
        max_in_flight_tokens: tokens of all steps in flight: ``max_batched_tokens`` of a step times the number of steps.
        dcp: decode context parallel ranks. Each rank keeps 1 / (dcp * pcp) of the tokens.
        pcp: prefill context parallel ranks.
        max_encoder_tokens: most encoder tokens that the cross attention of an encoder-decoder model reads.
        num_speculative_tokens: tokens drafted in one step. A recurrent layer needs a block for each.
        prefill_checkpoints: states that a Mamba-2 layer writes inside a step of its prompt, besides the one it reads
            and the one it ends with. 0 where steps end at each saved state, as here. vLLM's mixers write 1.
    """

    max_model_len: Positive
    max_in_flight_tokens: Count = 0
    dcp: Positive = 1
    pcp: Positive = 1
    max_encoder_tokens: Count = 0
    num_speculative_tokens: Count = 0
    prefill_checkpoints: Count = 0

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def cp(self) -> int:
        """Context parallel ranks. A block covers ``block_size * cp`` tokens of a request."""
        return self.dcp * self.pcp


class Keeps(StrEnum):
    """The quantity that a layer's bytes grow with.

    Attributes:
        TOKENS: every token of a request.
        WINDOW: the last tokens of a request.
        ENCODER: the tokens of the encoder's input.
        STATE: nothing, a state has a fixed size.
        RING: nothing, a ring has a fixed size. It holds the raw keys of the tokens that are still being compressed.
        NOTHING: the layer keeps no bytes between steps.
    """

    TOKENS = "tokens"
    WINDOW = "window"
    ENCODER = "encoder"
    STATE = "state"
    RING = "ring"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """The base of all specs: a block size in tokens, and a page that may be padded.

    Attributes:
        keeps: the quantity that the layer's bytes grow with.
        kind: a name shared by layers that keep the same token slots if their masks agree. A subclass that leaves it
            ``None`` cannot join a uniform type.
        block_size: tokens per block.
        page_size_padded: bytes of the page where a layout needs more than ``aligned_bytes``, never less.
        block_stride_alignment: the bytes from one block to the next are a multiple of this many bytes, or of whole
            kernel blocks. ``None`` for any stride.
    """

    keeps: ClassVar[Keeps]
    kind: ClassVar[str | None] = None

    block_size: Positive
    page_size_padded: int | None = None
    block_stride_alignment: StrideAlignment = None

    def __post_init__(self) -> None:
        check_types(self)
        self._check()
        if self.page_size_padded is not None and self.page_size_padded < self.aligned_bytes:
            raise ConfigError(
                f"page_size_padded {self.page_size_padded} is smaller than the {self.aligned_bytes} bytes "
                f"of a page of {type(self).__name__}: raise it to at least that"
            )

    def _check(self) -> None:  # noqa: B027 - most specs have no more to check
        """Raise ConfigError if fields contradict each other; every field already has its type."""

    @property
    @abstractmethod
    def content_bytes(self) -> int:
        """Bytes that one block holds in this layer, without padding."""

    @property
    def aligned_bytes(self) -> int:
        """``content_bytes``, rounded up where a kernel needs aligned pages."""
        return self.content_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in this layer, padding included."""
        return self.aligned_bytes if self.page_size_padded is None else self.page_size_padded

    @property
    def stride_multiple(self) -> int:
        """The bytes of which the stride between blocks is a multiple.

        Whole kernel blocks have the bytes of a page of ``gcd(tokens, block_size)`` tokens; 1 if that is the block.
        """
        wanted = self.block_stride_alignment
        if not isinstance(wanted, KernelBlocks):
            return wanted or 1
        tokens = gcd(wanted.tokens, self.block_size)
        if tokens == self.block_size:
            return 1
        return replace(self, block_size=tokens, page_size_padded=None).page_size_bytes

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one block to the next where each layer has its own run of pages: the page, aligned."""
        return round_up(self.page_size_bytes, self.stride_multiple)

    @property
    def is_sharded(self) -> bool:
        """Whether each context parallel rank keeps only its share of the tokens. States are whole on each rank."""
        return False

    @property
    def is_cached(self) -> bool:
        """Whether prefix caching may publish the layer's blocks."""
        return True

    @property
    def features(self) -> frozenset[Feature]:
        """The features that parts of the library other than the planner may lack."""
        return frozenset()

    @property
    def rates(self) -> frozenset[int | Fraction]:
        """Every ``tokens_per_state`` of attention layers that share the spec."""
        return frozenset()

    @property
    def pooled(self) -> frozenset[int]:
        """Every ``pools`` of windows and rings that share the spec."""
        return frozenset()

    def ranks(self, limits: RequestLimits) -> int:
        """Return the context parallel ranks that a request's tokens are spread over: 1 unless ``is_sharded``.

        Args:
            limits: limits of the request.
        """
        return limits.cp if self.is_sharded else 1

    def tp_replicas(self, tp: int, limits: RequestLimits) -> int:  # noqa: ARG002 - the answer of states
        """Return how many tensor parallel ranks in a row hold equal contents; 1 where that is unknown.

        Args:
            tp: tensor parallel ranks.
            limits: limits of a request, with the context parallel ranks.
        """
        return 1

    @abstractmethod
    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Return the most blocks that one request holds at a time.

        Args:
            limits: limits of the request.
        """

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        """Return the most bytes that one request needs in this layer.

        Args:
            limits: limits of the request.
        """
        return self.max_request_blocks(limits) * self.page_size_bytes

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """Return the columns of a request's row in the block table. Freed columns keep their place, so they count.

        Args:
            limits: limits of the request.
        """
        size = self.block_size * self.ranks(limits)
        return max(ceil_div(limits.max_model_len, size), 1 + limits.num_speculative_tokens)

    def reserved_blocks(self, ranks: int) -> int:  # noqa: ARG002 - the answer of every spec
        """Return the number of blocks that belong to the layer, not to requests.

        Args:
            ranks: context parallel ranks.
        """
        return 0

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """The window and the chunk of the attention mask, in tokens. At most one of the two is not ``None``.

        The mask limits the tokens that a query reads. The layer may keep more tokens.
        """
        return None, None

    def layer_spec(self, name: str) -> KVCacheSpec:  # noqa: ARG002 - specs that hold several layers tell them apart
        """Return the spec of one layer, where this is the spec of its group.

        Args:
            name: the layer's name. Specs that hold several layers return a different spec for each.
        """
        return self

    @property
    def uniform_key(self) -> Hashable | None:
        """A key that is equal for layers that always hold the same token slots. ``None`` where ``kind`` is ``None``."""
        return None if self.kind is None else (self.kind, *self.mask)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return one spec for layers that share a block table. Equal specs merge into a copy.

        Args:
            specs: the layers' specs, at least one.

        Raises:
            ConfigError: the specs differ.
        """
        if not specs:
            raise ConfigError("merge needs at least one spec")
        first = specs[0]
        if any(spec != first for spec in specs[1:]):
            raise ConfigError(
                f"layers of {type(first).__name__} differ and cannot share a block table: put them into separate groups"
            )
        return replace(first)


_Dtype = Annotated[str, lambda _, value: dtype_name(value)]
_PositiveOrNone = Annotated[int | None, or_none(at_least(1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of attention heads.

    Attributes:
        num_kv_heads: KV heads on one rank.
        head_size: elements of a key in one head.
        dtype: canonical name of the dtype of keys and values.
        head_size_v: elements of a value in one head, where it differs from ``head_size`` (config field ``v_head_dim``).
        tokens_per_state: tokens that one stored state covers. 1 for plain attention; an integer above 1 where keys are
            compressed; a Fraction below 1 where a token has several states. It divides ``block_size``.
        alignment: bytes of which a page is a multiple, where a kernel needs that. The rest of the page is padding.
        num_head_slots: heads of a page where a kernel packs several KV heads into one; ``None`` for ``num_kv_heads``.
        state_content_bytes: bytes of one state in one head slot where they do not follow from head size and dtype, as
            in packed formats with scales; ``None`` where they do.
        dcp_sharded: whether each context parallel rank keeps only its share of the tokens.
        max_tp_shards: distinct parts of the cache over all tensor parallel ranks. Further ranks hold copies.
            ``None`` where that is unknown.
        quantization: the form of codes and scales; ``None`` for elements of ``dtype``. ``dtype`` is then that of codes.
    """

    is_latent: ClassVar[bool] = False

    num_kv_heads: Positive
    head_size: Positive
    dtype: _Dtype
    head_size_v: int | None = None
    tokens_per_state: Rate = 1
    alignment: _PositiveOrNone = None
    num_head_slots: _PositiveOrNone = None
    state_content_bytes: _PositiveOrNone = None
    dcp_sharded: bool = True
    max_tp_shards: _PositiveOrNone = None
    quantization: QuantizationOrNone = None

    def _check(self) -> None:
        if self.quantization is not None:
            self._check_quantization(self.quantization)
        if Fraction(self.block_size) % self.tokens_per_state:
            raise ConfigError(
                f"block_size {self.block_size} is not a multiple of tokens_per_state {self.tokens_per_state}, so a "
                "block would not hold whole states: give a block_size that is a multiple"
            )
        multiple = self.alignment or 1
        if self.page_size_padded is not None and self.page_size_padded % multiple:
            raise ConfigError(
                f"page_size_padded {self.page_size_padded} is not a multiple of the alignment of {multiple} bytes: "
                f"raise it to {round_up(self.page_size_padded, multiple)}"
            )

    def _check_quantization(self, quantization: Quantization) -> None:
        """Raise ConfigError unless codes and scales determine the bytes of a state."""
        if self.dtype != quantization.dtype:
            raise ConfigError(f"codes of {quantization} are {quantization.dtype}, not {self.dtype}: correct the dtype")
        if self.state_content_bytes is not None or self.num_head_slots is not None:
            raise ConfigError(
                f"{quantization} sets the bytes of a state itself: drop state_content_bytes and num_head_slots, or it"
            )
        if self.is_latent and quantization is Quantization.NVFP4:
            raise ConfigError(f"{quantization} is for keys and values, and this layer keeps latents: leave it out here")
        widths = (self.head_size, self.elements_per_token - self.head_size)
        if wrong := [width for width in widths if width % quantization.multiple]:
            raise ConfigError(
                f"{quantization} needs heads of a multiple of {quantization.multiple} elements, got {wrong[0]}: use "
                "another quantization, or none in this layer"
            )

    @property
    def num_states(self) -> int:
        """States in a block: ``block_size / tokens_per_state``."""
        return int(self.block_size / Fraction(self.tokens_per_state))

    @property
    def rates(self) -> frozenset[int | Fraction]:
        """``tokens_per_state``."""
        return frozenset({self.tokens_per_state})

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in one head slot."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        if self.quantization is not None:
            return self.quantization.state_bytes(self.elements_per_token)
        return self.elements_per_token * dtype_bytes(self.dtype)

    @property
    def is_sharded(self) -> bool:
        """``dcp_sharded``."""
        return self.dcp_sharded

    @property
    def features(self) -> frozenset[Feature]:
        """The features of attention that parts of the library other than the planner may lack."""
        needed = {
            Feature.RATE: self.tokens_per_state != 1,
            Feature.PACKED: self.state_content_bytes is not None or self.num_head_slots is not None,
            Feature.REPLICATED: not self.dcp_sharded and self.keeps in {Keeps.TOKENS, Keeps.WINDOW},
            Feature.QUANTIZED: self.quantization is not None,
        }
        return frozenset(feature for feature, is_needed in needed.items() if is_needed)

    def tp_replicas(self, tp: int, limits: RequestLimits) -> int:
        """Return ``tp // max_tp_shards``, at least 1; 1 where shards are unknown, or where ranks share the tokens."""
        if self.max_tp_shards is None or (self.dcp_sharded and limits.dcp > 1):
            return 1
        return max(1, tp // self.max_tp_shards)

    @property
    def elements_per_token(self) -> int:
        """Elements of one state in one KV head: key and value, or one latent vector with its rotary part."""
        if self.is_latent:
            return self.head_size
        return self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)

    @property
    def content_bytes(self) -> int:
        """``num_states * heads * state_bytes``. For plain attention, these are the key and the value of each token."""
        heads = self.num_kv_heads if self.num_head_slots is None else self.num_head_slots
        return self.num_states * heads * self.state_bytes

    @property
    def aligned_bytes(self) -> int:
        """``content_bytes``, rounded up to a multiple of ``alignment``."""
        return round_up(self.content_bytes, self.alignment or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that keeps every token.

    A windowed or chunked layer may be managed as full attention: the cache keeps all tokens, the kernel still masks.

    Attributes:
        sliding_window: window of the mask in tokens, where the layer has one.
        attention_chunk_size: chunk of the mask in tokens, where the layer has one.
    """

    keeps: ClassVar = Keeps.TOKENS

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    @property
    def uniform_key(self) -> Hashable:
        """One key for full, MLA and sink attention: they keep the same tokens, whatever their masks."""
        return "full"

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """The window and the chunk that the kernel masks although the cache keeps all tokens."""
        return self.sliding_window, self.attention_chunk_size

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Return ``ceil(max_model_len / (dcp * pcp) / block_size)``; without the ranks unless ``dcp_sharded``."""
        return ceil_div(ceil_div(limits.max_model_len, self.ranks(limits)), self.block_size)

    @staticmethod
    def merge_window_sizes(sizes: set[int]) -> int | None:
        """Return the window that a set of layers shares, or ``None`` for an empty set.

        Args:
            sizes: the windows of the layers in tokens.

        Raises:
            ConfigError: the layers have several windows.
        """
        if len(sizes) > 1:
            raise ConfigError(
                f"layers with different windows {sorted(sizes)} cannot share a block table: "
                "put them into separate groups"
            )
        return next(iter(sizes), None)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Merge specs that agree in all fields except window and chunk.

        Args:
            specs: the layers' specs, at least one.

        Returns:
            The common spec, with the one window or the one chunk that a layer has.

        Raises:
            ConfigError: two windows, two chunks, a window and a chunk, or specs that differ in more.
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
    """Multi-head latent attention: one latent vector per token, or per compressed group of tokens, for all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. ``head_size`` is the config's
    ``kv_lora_rank + qk_rope_head_dim`` and ``num_kv_heads`` is 1.

    Attributes:
        cache_role: the latents that attention reads, or the keys of an indexer.
        is_index_group_leader: whether the layer computes the indexer's choice of tokens, which later layers of its
            group reuse.
    """

    is_latent: ClassVar = True

    num_kv_heads: Positive = 1
    cache_role: Role = SparseCacheRole.SPARSE
    is_index_group_leader: bool = False

    def _check(self) -> None:
        super(MLAAttentionSpec, self)._check()
        if self.quantization is not None and self.cache_role is SparseCacheRole.INDEXER:
            raise ConfigError("keys of an indexer have a form of their own: drop quantization")

    @property
    def features(self) -> frozenset[Feature]:
        """The features of attention, and the role of an indexer."""
        role = {Feature.INDEXER} if self.cache_role is SparseCacheRole.INDEXER else set()
        return super(MLAAttentionSpec, self).features | role


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention in which every request also reads learned keys and values of sink tokens.

    The sink's blocks belong to the layer and are never freed. A request needs as many blocks as in full attention.

    Attributes:
        sink_len: sink tokens.
    """

    sink_len: Positive

    def reserved_blocks(self, ranks: int) -> int:
        """Return ``ceil(sink_len / (block_size * ranks))``, the blocks of the sink's keys and values."""
        return ceil_div(self.sink_len, self.block_size * (ranks if self.dcp_sharded else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer where a token reads itself and the ``sliding_window - 1`` tokens before it. Older blocks are freed.

    Attributes:
        sliding_window: window in tokens.
        extra_retained_tokens: tokens before the window that are kept but not read. Drafts of several modules compute
            the last tokens of a request again, so blocks are freed later.
        pools: tokens of a state that a compressor makes of these rows, which attention does not read. 0 where attention
            reads them. The window covers them, so a prefix that ends inside a state can be resumed.
    """

    keeps: ClassVar = Keeps.WINDOW
    kind: ClassVar = "sliding"

    sliding_window: Positive
    extra_retained_tokens: Count = 0
    pools: Count = 0

    def _check(self) -> None:
        super(SlidingWindowSpec, self)._check()
        if self.sliding_window < self.pools:
            raise ConfigError(
                f"a window of {self.sliding_window} tokens lacks rows of a state of {self.pools} tokens (pools): give "
                f"a window of at least {self.pools}"
            )

    @property
    def pooled(self) -> frozenset[int]:
        """``pools``."""
        return frozenset({self.pools})

    @property
    def uniform_key(self) -> tuple[Hashable, ...]:
        """The kind, the window and the further tokens that are kept."""
        return self.kind, self.sliding_window, self.extra_retained_tokens

    @property
    def features(self) -> frozenset[Feature]:
        """The features of attention, and tokens that are kept before the window."""
        retained = {Feature.RETAINED} if self.extra_retained_tokens else set()
        return super(SlidingWindowSpec, self).features | retained

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """The window."""
        return self.sliding_window, None

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Return the blocks of ``min(sliding_window - 1 + more, max_model_len)`` tokens, and one more.

        ``more`` is ``extra_retained_tokens + max_in_flight_tokens``. A window may start inside a block, so its tokens
        may touch one more block than they fill.
        """
        kept = self.sliding_window - 1 + self.extra_retained_tokens + limits.max_in_flight_tokens
        return ceil_div(min(kept, limits.max_model_len), self.block_size * self.ranks(limits)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A windowed layer that keeps one latent vector per token, as MLAAttentionSpec does.

    Attributes:
        bounded_replay: whether prefix caching leaves the window out. A hit needs the other layers only, and the
            tokens of the window before its end are computed again.
    """

    kind: ClassVar = "sliding_mla"
    is_latent: ClassVar = True

    num_kv_heads: Positive = 1
    bounded_replay: bool = False

    @property
    def is_cached(self) -> bool:
        """Whether the window is kept for hits."""
        return not self.bounded_replay

    @property
    def uniform_key(self) -> tuple[Hashable, ...]:
        """The kind, the window, the further tokens that are kept, and whether hits leave the window out."""
        return *super(SlidingWindowMLASpec, self).uniform_key, self.bounded_replay

    @property
    def features(self) -> frozenset[Feature]:
        """The features of a window, and bounded replay."""
        replay = {Feature.REPLAY} if self.bounded_replay else set()
        return super(SlidingWindowMLASpec, self).features | replay


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer where a token reads itself and the earlier tokens of its own chunk.

    Attributes:
        attention_chunk_size: chunk in tokens.
    """

    keeps: ClassVar = Keeps.WINDOW
    kind: ClassVar = "chunked"

    attention_chunk_size: Positive

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """The chunk."""
        return None, self.attention_chunk_size

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Return the blocks of ``min(attention_chunk_size + max_in_flight_tokens, max_model_len)`` tokens.

        Where chunks start inside blocks, the tokens before the chunk in its first block count too.
        """
        size = self.block_size * self.ranks(limits)
        before = size - gcd(self.attention_chunk_size, size)
        tokens = before + self.attention_chunk_size + limits.max_in_flight_tokens
        return min(ceil_div(tokens, size), ceil_div(limits.max_model_len, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class CircularBufferSpec(AttentionSpec):
    """A ring of raw keys of the group of tokens that is still being compressed: one block of each request.

    ``block_size`` is the capacity of the ring in tokens. It must exceed the group by the drafts of a step, because a
    step writes its drafts before it knows which of them stay. Each context parallel rank keeps the whole ring.

    Attributes:
        pools: tokens of the group. The ring is empty after each multiple of them; a copy of the ring resumes a prefix
            that ends between two. 0 where that is unknown.
    """

    keeps: ClassVar = Keeps.RING
    kind: ClassVar = "ring"

    dcp_sharded: bool = False
    pools: Count = 0

    def _check(self) -> None:
        super(CircularBufferSpec, self)._check()
        if self.block_size < self.pools - 1:
            raise ConfigError(
                f"a ring of {self.block_size} tokens does not hold the open group of up to {self.pools - 1} (pools "
                f"{self.pools}): give a block_size of at least that"
            )
        if self.dcp_sharded:
            raise ConfigError("a ring is whole on each context parallel rank: drop dcp_sharded")
        if self.quantization is not None:
            raise ConfigError("a ring holds raw keys, which are compressed later: drop quantization")

    @property
    def pooled(self) -> frozenset[int]:
        """``pools``."""
        return frozenset({self.pools})

    @property
    def is_cached(self) -> bool:
        """False: a ring is overwritten while its request runs."""
        return False

    @property
    def features(self) -> frozenset[Feature]:
        """The features of attention, and the ring."""
        return super(CircularBufferSpec, self).features | {Feature.RING}

    def max_request_blocks(self, limits: RequestLimits) -> int:  # noqa: ARG002 - the answer of every ring
        """Return 1."""
        return 1

    def max_row_blocks(self, limits: RequestLimits) -> int:  # noqa: ARG002 - the answer of every ring
        """Return 1."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A decoder layer that reads the encoder's output. Its keys and values are written once, one per encoder token."""

    keeps: ClassVar = Keeps.ENCODER
    kind: ClassVar = "cross"

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Return ``ceil(max_encoder_tokens / block_size)``: each context parallel rank keeps all of them."""
        return ceil_div(limits.max_encoder_tokens, self.block_size)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """Return the encoder's blocks, at least 1."""
        return max(1, self.max_request_blocks(limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """A bidirectional layer that keeps nothing. It has a page size, but no request needs a block."""

    keeps: ClassVar = Keeps.NOTHING
    kind: ClassVar = "encoder_only"

    def max_request_blocks(self, limits: RequestLimits) -> int:  # noqa: ARG002 - the answer of every spec
        """Return 0."""
        return 0


MAMBA_TYPES: Final = ("mamba1", "mamba2", "short_conv", "linear_attention", "gdn_attention", "kda_attention")
CACHE_MODES: Final = ("none", "align")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer with one or more state tensors: Mamba, gated delta rule, KDA or short convolution.

    Each context parallel rank keeps the whole state.

    Attributes:
        shapes: shape of each state tensor on one rank, in the order in which they lie in a page.
        dtypes: canonical dtype name of each state tensor.
        block_size: tokens per block. In ``align`` the state may be saved after each full block; ``none`` ignores it.
        mamba_type: name of the recurrence, one of MAMBA_TYPES; tells the worker which tensor is the state.
        cache_mode: ``none``: one state, rewritten in place. ``align``: states are saved where chunks end.
        num_speculative_blocks: blocks for the states of drafted tokens.
    """

    keeps: ClassVar = Keeps.STATE

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[_Dtype, ...]
    mamba_type: str = "mamba2"
    num_speculative_blocks: Count = 0
    cache_mode: str = "none"

    def _check(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ConfigError(
                f"{len(self.shapes)} state shapes and {len(self.dtypes)} dtypes: give one dtype for each shape"
            )
        if any(size < 1 for shape in self.shapes for size in (len(shape), *shape)):
            raise ConfigError(f"state shapes must have sizes of at least 1, got {self.shapes}")
        for name, known in (("mamba_type", MAMBA_TYPES), ("cache_mode", CACHE_MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(known)}")

    @property
    def content_bytes(self) -> int:
        """The sum over the state tensors of ``prod(shape) * bytes of dtype``, whatever the block size."""
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def uniform_key(self) -> Hashable:
        """A key of the number of states that a request holds; the sizes of the states may differ."""
        return "mamba", self.num_speculative_blocks, self.cache_mode

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Return the most state blocks that one request holds.

        ``none``: the state and one per draft. ``align``: also the state that the step reads, and the checkpoints.
        """
        self._check_drafts(limits)
        if self.cache_mode == "none":
            return 1 + self.num_speculative_blocks
        return 2 + self.num_speculative_blocks + (limits.prefill_checkpoints if self.mamba_type == "mamba2" else 0)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """Return the columns of a request's row.

        ``none``: the blocks that a request holds. ``align``: a column for every block of the request, and the drafts'.
        """
        self._check_drafts(limits)
        if self.cache_mode == "none":
            return 1 + self.num_speculative_blocks
        return ceil_div(limits.max_model_len, self.block_size) + self.num_speculative_blocks

    def _check_drafts(self, limits: RequestLimits) -> None:
        if limits.num_speculative_tokens > self.num_speculative_blocks:
            raise ConfigError(
                f"{limits.num_speculative_tokens} speculative tokens need as many speculative state blocks, "
                f"but the layer has {self.num_speculative_blocks}: read the model with num_speculative_tokens="
            )


def _named_spec(name: str, given: object) -> tuple[str, KVCacheSpec]:
    """Return a layer's name and its spec."""
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ConfigError(f"{name} must be pairs of a name and a spec, got {shown(given)}")
    return instance(name, given[0], str), instance(name, given[1], KVCacheSpec)  # type: ignore[type-abstract]


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that always hold the same token slots, so that one block table serves them all.

    A block is a page in every layer, so its bytes are the sum of the layers' pages.

    Attributes:
        layers: the name and the spec of each layer.
    """

    layers: tuple[Annotated[tuple[str, KVCacheSpec], _named_spec], ...]

    def _check(self) -> None:
        if self.page_size_padded is not None:
            raise ConfigError("the pages of a uniform type are padded layer by layer: drop page_size_padded")
        if self.block_stride_alignment is not None:
            raise ConfigError("the blocks of a uniform type are aligned layer by layer: drop block_stride_alignment")
        if not self.is_uniform_type(self.kv_cache_specs) or self.block_size != self.layers[0][1].block_size:
            raise ConfigError("these layers are not of one type with one block size: put them into separate groups")

    @property
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The specs by layer name."""
        return dict(self.layers)

    @property
    def keeps(self) -> Keeps:  # type: ignore[override]  # of the layers, so known only here
        """The quantity that the layers' bytes grow with."""
        return self.layers[0][1].keeps

    @property
    def content_bytes(self) -> int:
        """The sum of the layers' contents in bytes."""
        return sum(spec.content_bytes for _, spec in self.layers)

    @property
    def page_size_bytes(self) -> int:
        """The sum of the layers' pages in bytes."""
        return sum(spec.page_size_bytes for _, spec in self.layers)

    @property
    def stride_multiple(self) -> int:
        """The least common multiple of the layers' multiples."""
        return lcm(*(spec.stride_multiple for _, spec in self.layers))

    @property
    def is_sharded(self) -> bool:
        """Whether the layers are."""
        return self.layers[0][1].is_sharded

    @property
    def is_cached(self) -> bool:
        """Whether the layers are."""
        return all(spec.is_cached for _, spec in self.layers)

    @property
    def features(self) -> frozenset[Feature]:
        """The features of all layers."""
        return frozenset[Feature]().union(*(spec.features for _, spec in self.layers))

    @property
    def rates(self) -> frozenset[int | Fraction]:
        """The rates of all layers."""
        return frozenset[int | Fraction]().union(*(spec.rates for _, spec in self.layers))

    @property
    def pooled(self) -> frozenset[int]:
        """The ``pools`` of all layers."""
        return frozenset[int]().union(*(spec.pooled for _, spec in self.layers))

    def tp_replicas(self, tp: int, limits: RequestLimits) -> int:
        """Return the greatest common divisor of the layers' copies."""
        return gcd(*(spec.tp_replicas(tp, limits) for _, spec in self.layers))

    @property
    def uniform_key(self) -> Hashable | None:
        """The key of the layers."""
        return self.layers[0][1].uniform_key

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Return the most blocks that any layer needs."""
        return max(spec.max_request_blocks(limits) for _, spec in self.layers)

    def reserved_blocks(self, ranks: int) -> int:
        """Return the most blocks that any layer reserves: the layers share a block table."""
        return max(spec.reserved_blocks(ranks) for _, spec in self.layers)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """Return the widest row of any layer."""
        return max(spec.max_row_blocks(limits) for _, spec in self.layers)

    def layer_spec(self, name: str) -> KVCacheSpec:
        """Return the layer's own spec. O(layers).

        Raises:
            ConfigError: no layer has this name.
        """
        for one, spec in self.layers:
            if one == name:
                return spec
        raise ConfigError(f"layer {name!r} is not one of {', '.join(one for one, _ in self.layers)}")

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Return whether the layers have one kind, one window, chunk or number of drafts, and one block size.

        Full, MLA and sink attention count as one kind, at any rates. Layers that context parallel ranks share are
        another kind than layers that are whole on each rank.

        Args:
            kv_cache_specs: specs by layer name.

        Raises:
            ConfigError: there are no layers, or the ``uniform_key`` of a layer is ``None``.
        """
        if not isinstance(kv_cache_specs, Mapping):
            raise ConfigError(f"layers must be specs by name, got {shown(kv_cache_specs)}")
        if not kv_cache_specs:
            raise ConfigError("a uniform type needs at least one layer")
        for name, spec in kv_cache_specs.items():
            if instance(f"layer {name}", spec, KVCacheSpec).uniform_key is None:  # type: ignore[type-abstract]
                raise ConfigError(
                    f"layer {name}: {type(spec).__name__} is not a known kind of spec: give it a uniform_key"
                )
        return len({(spec.uniform_key, spec.block_size, spec.is_sharded) for spec in kv_cache_specs.values()}) == 1

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """Return the layers as one spec, or ``None`` if they are not of one type.

        Args:
            kv_cache_specs: specs by layer name.

        Raises:
            ConfigError: as ``is_uniform_type``.
        """
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, layers=tuple(kv_cache_specs.items()))


def inner_of(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the spec of one of the layers of which ``spec`` was merged."""
    return spec.layers[0][1] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
