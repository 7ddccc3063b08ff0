"""What one layer keeps in the cache: frozen specs, sized from explicit limits.

A spec answers: how many bytes is a page (one block in this layer), how many blocks may one request need,
and which layers may share a block table (``merge``, ``UniformTypeKVCacheSpecs``).

    KVCacheSpec
    ├── AttentionSpec               a row for every token
    │   ├── FullAttentionSpec           every token
    │   │   ├── MLAAttentionSpec            one latent vector a token
    │   │   └── SinkFullAttentionSpec       behind learned sink tokens
    │   ├── SlidingWindowSpec           the last tokens
    │   │   └── SlidingWindowMLASpec        one latent vector a token
    │   ├── ChunkedLocalAttentionSpec   the tokens of the present chunk
    │   ├── CrossAttentionSpec          the encoder's tokens
    │   └── EncoderOnlyAttentionSpec    nothing
    ├── MambaSpec                   one state
    └── UniformTypeKVCacheSpecs     layers of one kind whose pages differ
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd, prod
from typing import Annotated, ClassVar, Final, Self

from hybridkv.arguments import Count, Positive, check_types, instance
from hybridkv.errors import ConfigError
from hybridkv.units import ceil_div, dtype_bytes, dtype_name, shown

__all__ = [
    "BATCHED_TOKENS",
    "CACHE_MODES",
    "MAMBA_TYPES",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
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
"""Of the largest step, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What bounds the memory of one request.

    max_model_len: tokens, prompt and output together.
    max_in_flight_tokens: tokens of all steps in flight: max_batched_tokens of a step x steps.
    dcp, pcp: decode and prefill context parallel sizes; each rank keeps 1 / (dcp * pcp) of the tokens.
    max_encoder_tokens: of an encoder-decoder model, what its cross attention reads.
    num_speculative_tokens: drafted in one step; a recurrent layer needs a block for each.
    prefill_checkpoints: states that a Mamba-2 layer writes inside a step of its prompt, besides that which it reads and
    that which it ends with: 0 where prompts are split at what is kept, as here; vLLM's mixers write 1.
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
        """Context parallel ranks: a block covers ``block_size * cp`` tokens of a request."""
        return self.dcp * self.pcp


class Keeps(StrEnum):
    """What the bytes of a layer grow with.

    tokens: every token of a request. window: its last tokens. encoder: the encoder's input.
    state: nothing, a state has one size. nothing: no bytes are kept between steps.
    """

    TOKENS = "tokens"
    WINDOW = "window"
    ENCODER = "encoder"
    STATE = "state"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec(ABC):
    """What every layer has: a block size in tokens, and a page that may be padded.

    page_size_padded: bytes of the page where a layout wants more than the content takes; not less.
    kind: names layers that always hold the same token slots, with their mask; None for a kind that nobody described.
    """

    keeps: ClassVar[Keeps]
    kind: ClassVar[str | None] = None

    block_size: Positive
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        self._check()
        if self.page_size_padded is not None and self.page_size_padded < self.content_bytes:
            raise ConfigError(
                f"page_size_padded {self.page_size_padded} is smaller than the {self.content_bytes} bytes "
                f"of a page of {type(self).__name__}: raise it"
            )

    def _check(self) -> None:  # noqa: B027 - most specs have no more to check
        """Raise ConfigError for fields, each of its type, that do not go together."""

    @property
    @abstractmethod
    def content_bytes(self) -> int:
        """Bytes that one block holds in this layer."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in this layer, padding included."""
        return self.content_bytes if self.page_size_padded is None else self.page_size_padded

    @abstractmethod
    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Most blocks that one request holds at a time."""

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        """Most bytes that one request needs in this layer."""
        return self.max_request_blocks(limits) * self.page_size_bytes

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """Columns of a request's row in the block table: null columns count, they keep their place."""
        return max(-(-limits.max_model_len // (self.block_size * limits.cp)), 1 + limits.num_speculative_tokens)

    def reserved_blocks(self, ranks: int) -> int:  # noqa: ARG002 - the answer of every spec
        """Blocks that belong to the layers, whoever runs, on ``ranks`` context parallel ranks."""
        return 0

    @property
    def mask(self) -> tuple[int | None, int | None]:
        """Beyond which window or chunk, in tokens, a query reads nothing, whatever is kept; at most one of the two."""
        return None, None

    def layer_spec(self, name: str) -> KVCacheSpec:  # noqa: ARG002 - specs that hold several layers tell them apart
        """What layer ``name`` keeps, where this is the spec of its group."""
        return self

    @property
    def uniform_key(self) -> Hashable | None:
        """Equal for layers that always hold the same token slots; None for a kind that nobody described."""
        return None if self.kind is None else (self.kind, *self.mask)

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


_Dtype = Annotated[str, lambda _, value: dtype_name(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of ``num_kv_heads`` heads, ``head_size`` wide, in ``dtype``.

    ``head_size_v`` is the width of a value where it differs from that of a key
    (config field ``v_head_dim``); None means ``head_size``.
    """

    is_latent: ClassVar[bool] = False

    num_kv_heads: Positive
    head_size: Positive
    dtype: _Dtype
    head_size_v: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Elements of one token in one KV head: key and value, or one latent and its rotary part."""
        if self.is_latent:
            return self.head_size
        return self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)

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

    is_latent: ClassVar = True

    num_kv_heads: Positive = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention behind ``sink_len`` tokens of learned keys and values that every request reads.

    The sink's blocks are never dropped and belong to the layer, not to a request, so a request's own need is
    that of full attention.
    """

    sink_len: Positive

    def reserved_blocks(self, ranks: int) -> int:
        """``ceil(sink_len / (block_size * ranks))``: the sink's keys and values."""
        return ceil_div(self.sink_len, self.block_size * ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer where a token reads itself and the ``sliding_window - 1`` tokens before it; older blocks are freed."""

    keeps: ClassVar = Keeps.WINDOW
    kind: ClassVar = "sliding"

    sliding_window: Positive

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

    kind: ClassVar = "sliding_mla"
    is_latent: ClassVar = True

    num_kv_heads: Positive = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer where a token reads the tokens of its own chunk of ``attention_chunk_size`` up to itself."""

    keeps: ClassVar = Keeps.WINDOW
    kind: ClassVar = "chunked"

    attention_chunk_size: Positive

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
    kind: ClassVar = "cross"

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
    kind: ClassVar = "encoder_only"

    def max_request_blocks(self, limits: RequestLimits) -> int:  # noqa: ARG002 - the answer of every spec
        """None."""
        return 0


MAMBA_TYPES: Final = ("mamba1", "mamba2", "short_conv", "linear_attention", "gdn_attention", "kda_attention")
CACHE_MODES: Final = ("none", "align")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer with one or more state tensors: Mamba, gated delta rule, KDA, short convolution.

    shapes, dtypes: of each state tensor, in the order in which they lie in a page.
    block_size: in ``align``, a state may be kept after every so many tokens; in ``none`` it bounds nothing.
    mamba_type: which recurrence, for the worker. num_speculative_blocks: states kept for drafted tokens.
    cache_mode: ``none``: one state, rewritten in place. ``align``: states are kept where chunks end.
    A state is whole on every context parallel rank.
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
        """Sum over the state tensors of ``prod(shape) * bytes of dtype``, whatever the block size."""
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def uniform_key(self) -> Hashable:
        """The states that a request holds; their sizes may differ."""
        return "mamba", self.num_speculative_blocks, self.cache_mode

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """``none``: the state and one a draft. ``align``: one more, that which the step reads, and checkpoints."""
        self._check_drafts(limits)
        if self.cache_mode == "none":
            return 1 + self.num_speculative_blocks
        return 2 + self.num_speculative_blocks + (limits.prefill_checkpoints if self.mamba_type == "mamba2" else 0)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """``none``: as many as are held. ``align``: a column for every block of the request, and the drafts'."""
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

    layers: name and spec of each. A block is a page in every layer: its bytes are their sum.
    """

    layers: tuple[Annotated[tuple[str, KVCacheSpec], _named_spec], ...]

    def _check(self) -> None:
        if self.page_size_padded is not None:
            raise ConfigError("the pages of a uniform type are padded layer by layer: drop page_size_padded")
        if not self.is_uniform_type(self.kv_cache_specs) or self.block_size != self.layers[0][1].block_size:
            raise ConfigError("these layers are not of one type with one block size: put them into separate groups")

    @property
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The layers by name."""
        return dict(self.layers)

    @property
    def keeps(self) -> Keeps:  # type: ignore[override]  # of the layers, so known only here
        """What the layers keep."""
        return self.layers[0][1].keeps

    @property
    def content_bytes(self) -> int:
        """The contents of all layers."""
        return sum(spec.content_bytes for _, spec in self.layers)

    @property
    def page_size_bytes(self) -> int:
        """The pages of all layers."""
        return sum(spec.page_size_bytes for _, spec in self.layers)

    @property
    def uniform_key(self) -> Hashable | None:
        """That of the layers."""
        return self.layers[0][1].uniform_key

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """The most that any layer needs."""
        return max(spec.max_request_blocks(limits) for _, spec in self.layers)

    def reserved_blocks(self, ranks: int) -> int:
        """The most that any layer reserves: they share a block table."""
        return max(spec.reserved_blocks(ranks) for _, spec in self.layers)

    def max_row_blocks(self, limits: RequestLimits) -> int:
        """The widest row of any layer."""
        return max(spec.max_row_blocks(limits) for _, spec in self.layers)

    def layer_spec(self, name: str) -> KVCacheSpec:
        """The layer's own spec. Raises ConfigError for a name that is not here. O(layers)."""
        for one, spec in self.layers:
            if one == name:
                return spec
        raise ConfigError(f"layer {name!r} is not one of {', '.join(one for one, _ in self.layers)}")

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether the layers are of one kind, with one window, chunk or number of drafts, and one block size.

        Full attention, MLA and sink attention count as one kind. Raises ConfigError for no layers and for a
        kind that nobody described (``uniform_key`` is None).
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
        return len({(spec.uniform_key, spec.block_size) for spec in kv_cache_specs.values()}) == 1

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """The layers as one spec, None when they are not of one type."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, layers=tuple(kv_cache_specs.items()))
