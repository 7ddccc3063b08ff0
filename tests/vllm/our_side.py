"""hybridkv's KVCacheManager as a side, through its public calls."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from calls import Ask, DecodeRow, Found, Ids, Keys, Slots
from cases import Case, Group, Kind

from hybridkv.cache import CacheOptions, KVCacheBlocks, KVCacheManager
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request
from hybridkv.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

ENCODER_TOKENS = 10


HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float32"}


def _spec(group: Group) -> KVCacheSpec:  # noqa: PLR0911 - a spec of each kind
    size, heads = group.block_size, {**HEADS, "dcp_sharded": not group.whole}
    match group.kind:
        case Kind.FULL:
            return FullAttentionSpec(block_size=size, **heads, tokens_per_state=group.rate)
        case Kind.MLA:
            return MLAAttentionSpec(block_size=size, **heads, tokens_per_state=group.rate)
        case Kind.SLIDING:
            window: dict[str, Any] = {"sliding_window": group.span, "extra_retained_tokens": group.retained}
            if group.replayed:
                return SlidingWindowMLASpec(block_size=size, **heads, **window, bounded_replay=True)
            return SlidingWindowSpec(block_size=size, **heads, **window)
        case Kind.RING:
            return CircularBufferSpec(block_size=size, **HEADS)
        case Kind.CHUNKED:
            return ChunkedLocalAttentionSpec(block_size=size, **HEADS, attention_chunk_size=group.span)
        case Kind.CROSS:
            return CrossAttentionSpec(block_size=size, **HEADS)
        case _:
            return MambaSpec(
                block_size=size,
                shapes=((1, 1),),
                dtypes=("float32",),
                cache_mode="align" if group.kind is Kind.ALIGN else "none",
                num_speculative_blocks=group.drafts,
            )


class OurSide:
    def __init__(self, case: Case) -> None:
        groups = tuple(
            KVCacheGroupSpec((f"layer{i}",), _spec(group), is_eagle_group=group.eagle)
            for i, group in enumerate(case.groups)
        )
        self._manager = KVCacheManager(
            KVCacheConfig(case.num_blocks, (), groups),
            case.max_model_len,
            enable_caching=case.caching,
            use_eagle=case.use_eagle,
            dcp_world_size=case.ranks,
            options=CacheOptions(retention=case.retention),
        )
        self._encoder_tokens = ENCODER_TOKENS if any(group.kind is Kind.CROSS for group in case.groups) else 0
        self._requests: dict[str, Request] = {}
        self._hits: dict[str, KVCacheBlocks] = {}

    def begin_step(self) -> None:
        """Nothing: a manager without Steps counts published as written."""

    def add(self, name: str, tokens: tuple[int, ...]) -> None:
        self._requests[name] = Request(name, tokens, hasher=self._manager.hasher)

    def append(self, name: str, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            self._requests[name].append(token)

    def advance(self, name: str, tokens: int) -> None:
        self._requests[name].num_computed_tokens += tokens

    def fly(self, name: str, tokens: int) -> None:
        self._manager.rows.in_flight[self._requests[name].row] = tokens

    def look_up(self, name: str) -> Found:
        blocks, tokens = self._manager.get_computed_blocks(self._requests[name])
        self._hits[name] = blocks
        return Found(tokens, self._ids(blocks))

    def allocate(self, name: str, ask: Ask) -> Ids | None:
        hit: dict[str, Any] = {}
        if ask.found is not None and ask.found.tokens:
            hit = {"num_new_computed_tokens": ask.found.tokens, "new_computed_blocks": self._hits[name]}
        blocks = self._manager.allocate_slots(
            self._requests[name],
            ask.chunk,
            num_lookahead_tokens=ask.lookahead,
            delay_cache_blocks=ask.delay,
            num_encoder_tokens=self._encoder_tokens,
            num_external_computed_tokens=ask.external,
            **hit,
        )
        return None if blocks is None else self._ids(blocks)

    def decode(self, rows: Sequence[DecodeRow], lookahead: int) -> Slots:
        numbers = np.array([self._requests[row.name].row for row in rows], np.int64)
        drafts = np.array([row.drafts for row in rows], np.int64)
        slots = self._manager.allocate_batch(numbers, 1 + drafts if drafts.any() else 1, lookahead)
        cells = zip(*(part.tolist() for part in slots[1:5]), strict=True)
        return Slots(slots.accepted, tuple(cells))

    def cached(self, name: str) -> tuple[tuple[bool, ...], ...]:
        request = self._requests[name]
        groups = self._manager.groups
        return tuple(
            () if group.kind.keeps_ring else tuple(group.index.get(key) is not None for key in group.keys(request))
            for group in groups
        )

    def publish(self, name: str, tokens: int) -> None:
        self._manager.cache_blocks(self._requests[name], tokens)

    def free(self, name: str) -> None:
        self._manager.free(name)
        self._requests[name].num_computed_tokens = 0

    def forget(self, name: str) -> None:
        del self._requests[name]

    def reset(self) -> bool:
        return self._manager.reset_prefix_cache()

    def table(self, name: str) -> Ids:
        if self._requests[name].row < 0:
            return ((),) * len(self._manager.groups)
        return self._ids(self._manager.get_blocks(name))

    def keys(self, ids: Ids) -> Keys:
        pool = self._manager.block_pool
        return tuple(tuple(pool.keys.key_of(block) for block in group) for group in ids)

    def num_free(self) -> int:
        return self._manager.block_pool.get_num_free_blocks()

    def free_order(self) -> tuple[int, ...]:
        return tuple(self._manager.block_pool.free_order())

    def usage(self) -> float:
        return self._manager.usage

    def check(self) -> None:
        """Raise CacheError unless every invariant of the cache holds."""
        self._manager.check()

    @staticmethod
    def _ids(blocks: KVCacheBlocks) -> Ids:
        return tuple(tuple(ids.tolist()) for ids in blocks.ids)
