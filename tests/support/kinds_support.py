"""Small managers over groups of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from caches import cache_with
from hybridkv.cache import KVCacheManager
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)


def full(size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32")


def mla(size: int = 4) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=size, head_size=2, dtype="float32")


def sink(size: int = 4, tokens: int = 4) -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32", sink_len=tokens)


def window(tokens: int = 8, size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=tokens)


def chunked(tokens: int = 8, size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=1, dtype="float32", attention_chunk_size=tokens
    )


def state(size: int = 16, drafts: int = 0, mode: str = "align") -> MambaSpec:
    return MambaSpec(
        block_size=size, shapes=((2,),), dtypes=("float32",), cache_mode=mode, num_speculative_blocks=drafts
    )


def cross(size: int = 4) -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32")


def encoder_only(size: int = 4) -> EncoderOnlyAttentionSpec:
    return EncoderOnlyAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32")


def config(num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    groups = tuple(KVCacheGroupSpec((f"layer{i}",), spec) for i, spec in enumerate(specs))
    return KVCacheConfig(num_blocks, (), groups)


def cache_of(*specs: KVCacheSpec, num_blocks: int = 200, **known: Any) -> KVCacheManager:  # noqa: ANN401 - keyword arguments of the manager
    return cache_with(config(num_blocks, *specs), 1000, **known)


def flagged(*groups: tuple[KVCacheSpec, bool], num_blocks: int = 200) -> KVCacheManager:
    """A manager over (spec, whether it drops for EAGLE)."""
    specs = tuple(KVCacheGroupSpec((f"layer{i}",), one, is_eagle_group=drops) for i, (one, drops) in enumerate(groups))
    return KVCacheManager(KVCacheConfig(num_blocks, (), specs), 1000)


def start(cache: KVCacheManager, tokens: Sequence[int], chunks: Sequence[int], name: str = "a") -> Request:
    """A request that computes its tokens in ``chunks``, without a look-up."""
    request = Request(name, tokens, hasher=cache.hasher)
    for chunk in chunks:
        grow(cache, request, chunk)
    return request


def grow(cache: KVCacheManager, request: Request, new: int, **known: int) -> list[list[int]] | None:
    """Slots for ``new`` tokens, which count as computed; the new columns of each group."""
    blocks = cache.allocate_slots(request, new, **known)  # type: ignore[arg-type]  # by name
    if blocks is None:
        return None
    request.num_computed_tokens += new
    cache.check()
    return [ids.tolist() for ids in blocks.ids]


def table(cache: KVCacheManager, group: int = 0, name: str = "a") -> list[int]:
    """The row of a request in a group, 0 for null columns."""
    return cache.get_block_ids(name)[group]


def hit(cache: KVCacheManager, tokens: Sequence[int]) -> tuple[int, tuple[list[int], ...]]:
    """What a fresh request of ``tokens`` hits."""
    blocks, found = cache.get_computed_blocks(Request("probe", tokens, hasher=cache.hasher))
    return found, blocks.blocks


def hit_tokens(cache: KVCacheManager, tokens: Sequence[int]) -> int:
    return hit(cache, tokens)[0]


def published(cache: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    """Columns of ``request`` that can be hit, whatever row holds them."""
    found = cache.groups[group]
    return [column for column, key in enumerate(found.keys(request)) if found.index.get(key) is not None]


def hits(cache: KVCacheManager, lengths: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Tokens hit by the first n of 0, 1, 2 ..., and where others branched off (0: nowhere), for each n."""
    found = {n: cache.find_hit(Request("probe", range(n), hasher=cache.hasher)) for n in lengths}
    return {n: (hit.tokens, hit.branch_tokens) for n, hit in found.items()}


def evict(cache: KVCacheManager, request: Request, group: int, column: int) -> None:
    """The key of a column is lost."""
    found = cache.groups[group]
    block = found.index.get(found.keys(request)[column])
    assert block is not None
    cache.block_pool.evict_blocks(np.array([block], np.int32))
