"""Events as messages: MessagePack of vLLM's schema, as tagged maps or as positional arrays.

    batch   [seconds, [event, ...], rank]
    event   {"type": "BlockStored", "block_hashes": [...], ...}        or ["BlockStored", [...], ...]

A salt stands in both places where consumers look: among the extra keys of a prompt's first block, as its hash has it,
and, in maps, as ``cache_salt`` of every event of such a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hybridkv.arguments import check_fields, flag
from hybridkv.cache.journal import BlockRemoved, BlockStored, KVCacheEvent
from hybridkv.planner.config import KVCacheConfig
from hybridkv.specs import KVCacheSpec, UniformTypeKVCacheSpecs

_LAST_64_BITS: Final = (1 << 64) - 1
_KINDS: Final = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SinkFullAttentionSpec": "sink_full_attention",
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window_mla",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
    "CrossAttentionSpec": "cross_attention",
}
_STORED: Final = "BlockStored"
_REMOVED: Final = "BlockRemoved"
_CLEARED: Final = "AllBlocksCleared"


@dataclass(frozen=True, slots=True)
class EventForm:
    """How events are written. as_arrays: by position, without ``cache_salt``. whole_hashes: bytes, not 64 bits of them.

    Integers are the last 64 bits of a hash, which is what most routers take.
    """

    as_arrays: bool = False
    whole_hashes: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flag, "as_arrays", "whole_hashes")

    def hash(self, key: bytes | None) -> int | bytes | None:
        """``key`` as it is told."""
        if key is None or self.whole_hashes:
            return key
        return int.from_bytes(key[-8:], "big") & _LAST_64_BITS


class Writer:
    """Batches of one cache's events. config: of its plan, whose groups are told by number, kind and window."""

    def __init__(self, config: KVCacheConfig, form: EventForm) -> None:
        self._form = form
        self._groups = [_described(group.spec) for group in config.groups]
        self._encoder = msgspec.msgpack.Encoder()

    def batch(self, events: Sequence[KVCacheEvent], seconds: float) -> bytes:
        """One message. O(blocks)."""
        return self._encoder.encode([seconds, [self._written(one) for one in events], 0])

    def _written(self, event: KVCacheEvent) -> object:
        """By name, in the order of positions."""
        match event:
            case BlockStored():
                fields = self._stored(event)
            case BlockRemoved():
                fields = {
                    "type": _REMOVED,
                    "block_hashes": [self._form.hash(key) for key in event.block_hashes],
                    "medium": event.medium,
                    "group_idx": event.group_idx,
                }
            case _:  # cleared, or unknown what was lost: who forgets all believes in nothing that is not there
                fields = {"type": _CLEARED}
        return list(fields.values()) if self._form.as_arrays else fields

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        kind, window = self._groups[event.group_idx]
        fields: dict[str, Any] = {
            "type": _STORED,
            "block_hashes": [self._form.hash(key) for key in event.block_hashes],
            "parent_block_hash": self._form.hash(event.parent_block_hash),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": event.lora_id,
            "medium": event.medium,
            "lora_name": event.lora_name,
            "extra_keys": event.extra_keys,
            "group_idx": event.group_idx,
            "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": window,
        }
        if not self._form.as_arrays and event.cache_salt is not None:
            fields["cache_salt"] = event.cache_salt
        return fields


def _described(spec: KVCacheSpec) -> tuple[str, int | None]:
    """Kind and window of a group."""
    one = spec.layers[0][1] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return _KINDS.get(type(one).__name__, "unknown"), getattr(one, "sliding_window", None)
