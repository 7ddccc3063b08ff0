"""Making layers ready for one page size: the reference's rules, before layers are grouped.

attention and states   the attention block grows, in multiples of 16 tokens, until its page covers the largest
                       state; states are padded to that page and may be kept at the ends of such blocks
smaller pages          the block grows by a whole factor; a page that does not divide the largest is padded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Final

from hybridkv.errors import ConfigError
from hybridkv.planner.config import NamedSpec
from hybridkv.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

GROWTH_TOKENS: Final = 16
"""An attention block that has to cover a state is a multiple of this, or of its own size where that is larger."""


def with_placement(layers: Sequence[NamedSpec], placement: str) -> list[NamedSpec]:
    """States kept as ``placement`` says, one of hybridkv.specs.CACHE_MODES. Raises ConfigError for another."""
    return [(n, replace(s, cache_mode=placement) if isinstance(s, MambaSpec) else s) for n, s in layers]


def windows_as_full(layers: Sequence[NamedSpec]) -> list[NamedSpec]:
    """Windowed and chunked layers managed as full attention: every token is kept, the kernel still masks."""
    return [(name, _as_full(spec)) for name, spec in layers]


def unify_pages(layers: Sequence[NamedSpec]) -> list[NamedSpec]:
    """The layers with equal page bytes: by larger blocks where that is enough, else by padding. O(layers)."""
    layers = _cover_states(layers)
    largest = max(spec.page_size_bytes for _, spec in layers)
    return [(name, _with_page(spec, largest)) for name, spec in layers]


def state_block_tokens(layers: Sequence[NamedSpec]) -> int:
    """Tokens of the block that the reference layout gives to states: of which an aligned state's count is a multiple.

    ConfigError without recurrent layers.
    """
    covered = _cover_states(layers)
    found = [spec.block_size for _, spec in covered if isinstance(spec, MambaSpec)]
    if not found:
        raise ConfigError("the model has no recurrent layers: there is no block of states")
    return found[0]


def _cover_states(layers: Sequence[NamedSpec]) -> list[NamedSpec]:
    """Attention blocks large enough for the largest state, states padded to their page. Without both: unchanged."""
    attention = [spec for _, spec in layers if isinstance(spec, AttentionSpec)]
    states = [spec.page_size_bytes for _, spec in layers if isinstance(spec, MambaSpec)]
    if not attention or not states:
        return list(layers)
    widest = max(attention, key=_token_bytes)
    unit = max(GROWTH_TOKENS, widest.block_size)
    needed = unit * ceil(Fraction(max(states)) / (unit * _token_bytes(widest)))
    block_size = max(needed, *(spec.block_size for spec in attention), 1)
    return [(name, _with_block_size(spec, block_size)) for name, spec in layers]


def _with_block_size(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """Larger blocks; padding, where there is some, grows with them. A state has no more bytes for it."""
    if spec.page_size_padded is None or isinstance(spec, MambaSpec):
        return replace(spec, block_size=block_size)
    padded = ceil(_token_bytes(spec) * block_size)
    return replace(spec, block_size=block_size, page_size_padded=padded)


def _token_bytes(spec: KVCacheSpec) -> Fraction:
    return Fraction(spec.page_size_bytes, spec.block_size)


def _with_page(spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec:
    if spec.page_size_bytes == page_bytes:
        return spec
    factor, rest = divmod(page_bytes, spec.page_size_bytes)
    if rest or isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=page_bytes)
    return _with_block_size(spec, spec.block_size * factor)


def _as_full(spec: KVCacheSpec) -> KVCacheSpec:
    match spec:
        case SlidingWindowMLASpec():
            return MLAAttentionSpec(
                block_size=spec.block_size,
                head_size=spec.head_size,
                dtype=spec.dtype,
                sliding_window=spec.sliding_window,
            )
        case SlidingWindowSpec():
            return _full(spec, sliding_window=spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return _full(spec, attention_chunk_size=spec.attention_chunk_size)
        case _:
            return spec


def _full(spec: AttentionSpec, **remembered: int) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        page_size_padded=spec.page_size_padded,
        **remembered,
    )
