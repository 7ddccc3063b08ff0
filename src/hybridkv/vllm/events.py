"""Our events as vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed import kv_events as theirs
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from hybridkv.cache import BlockRemoved, BlockStored, KVCacheEvent


class Teller:
    """Of the groups of one engine. config: vLLM's KVCacheConfig."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - vLLM is not typed here
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._groups = [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]

    def __call__(self, events: Sequence[KVCacheEvent]) -> list[Any]:
        """vLLM's, in this order. What was dropped for want of takers is told as a clearing: all is to be forgotten."""
        return [self._told(event) for event in events]

    def _told(self, event: KVCacheEvent) -> Any:  # noqa: ANN401 - as above
        if isinstance(event, BlockRemoved):
            hashes = [maybe_convert_block_hash(one) for one in event.block_hashes]
            return theirs.BlockRemoved(block_hashes=hashes, medium=event.medium, group_idx=event.group_idx)
        if not isinstance(event, BlockStored):
            return theirs.AllBlocksCleared()
        parent = event.parent_block_hash
        kind, window = self._groups[event.group_idx]
        return theirs.BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in event.block_hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(event.token_ids),
            block_size=event.block_size,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=event.lora_name,
            # stock has a list always
            extra_keys=[None] * len(event.block_hashes) if event.extra_keys is None else list(event.extra_keys),
            group_idx=event.group_idx,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )
