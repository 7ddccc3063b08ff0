"""vLLM's KVCacheManager as a side. Partial keys are off: the comparison is about hits on block edges."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.pop("PYTHONHASHSEED", None)  # vLLM would derive the root of its hashes from it

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from calls import Ask, DecodeRow, Found, Ids, Keys, Slots
from cases import Case, Group, Kind
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_manager, kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.request import Request

HASH = get_hash_fn_by_name("sha256_cbor")
ENCODER_TOKENS = 10


def _spec(group: Group) -> Any:  # noqa: ANN401, PLR0911 - vLLM is not typed for mypy; a spec of each kind
    heads = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32, "block_size": group.block_size}
    if group.whole:
        heads["dcp_sharded"] = False
    rate = {"tokens_per_state": group.rate} if group.rate > 1 else {}  # vLLM 0.32 has no such field
    match group.kind:
        case Kind.FULL:
            return interface.FullAttentionSpec(**heads, **rate)
        case Kind.MLA:
            return interface.MLAAttentionSpec(**heads, **rate)
        case Kind.SLIDING:
            kept = {"extra_retained_tokens": group.retained} if group.retained else {}
            if group.replayed:
                return interface.SlidingWindowMLASpec(**heads, sliding_window=group.span, bounded_replay=True, **kept)
            return interface.SlidingWindowSpec(**heads, sliding_window=group.span, **kept)
        case Kind.RING:
            return interface.CircularBufferSpec(**{**heads, "dcp_sharded": False})
        case Kind.CHUNKED:
            return interface.ChunkedLocalAttentionSpec(**heads, attention_chunk_size=group.span)
        case Kind.CROSS:
            return interface.CrossAttentionSpec(**heads)
        case _:
            return interface.MambaSpec(
                block_size=group.block_size,
                shapes=((1, 1),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align" if group.kind is Kind.ALIGN else "none",
                num_speculative_blocks=group.drafts,
            )


def prepare() -> None:
    """Once a process: the root of the hashes, the kinds of groups, no hits inside a block."""
    kv_cache_utils.init_none_hash(HASH)
    register_all_kvcache_specs(None)
    build = kv_cache_manager.get_kv_cache_coordinator
    kv_cache_manager.get_kv_cache_coordinator = partial(build, allow_partial_hash_hits=False)


class VllmSide:
    def __init__(self, case: Case) -> None:
        groups = [
            interface.KVCacheGroupSpec([f"layer{i}"], _spec(group), is_eagle_group=group.eagle)
            for i, group in enumerate(case.groups)
        ]
        config = interface.KVCacheConfig(
            num_blocks=case.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=case.retention,
        )
        self._manager = kv_cache_manager.KVCacheManager(
            config,
            max_model_len=case.max_model_len,
            scheduler_block_size=case.alignment,
            hash_block_size=case.hash_block,
            enable_caching=case.caching,
            # vLLM flags groups only where hits drop a block, and from 0.33 on it does not drop without this
            use_eagle=case.use_eagle or any(group.eagle for group in case.groups),
            dcp_world_size=case.ranks,
        )
        for group in self._manager.coordinator.single_type_managers:
            group._cache_partial_tail_block = lambda *_, **__: None
        self._hash_block = case.hash_block
        self._rings = [group.kind is Kind.RING for group in case.groups]
        self._hasher = kv_cache_utils.get_request_block_hasher(case.hash_block, HASH)
        self._encoder_tokens = ENCODER_TOKENS if any(group.kind is Kind.CROSS for group in case.groups) else 0
        self._sampling = SamplingParams(max_tokens=1 << 20, ignore_eos=True)
        self._sampling.update_from_generation_config({}, 1 << 20)
        self._requests: dict[str, Any] = {}
        self._hits: dict[str, Any] = {}

    def begin_step(self) -> None:
        self._manager.new_step_starts()

    def add(self, name: str, tokens: tuple[int, ...]) -> None:
        self._requests[name] = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=self._sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def append(self, name: str, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            self._requests[name].append_output_token_ids(token)

    def advance(self, name: str, tokens: int) -> None:
        self._requests[name].num_computed_tokens += tokens

    def fly(self, name: str, tokens: int) -> None:
        self._requests[name].num_in_flight_tokens = tokens

    def look_up(self, name: str) -> Found:
        blocks, tokens, _ = self._manager.get_computed_blocks(self._requests[name])
        self._hits[name] = blocks
        return Found(tokens, self._ids(blocks))

    def allocate(self, name: str, ask: Ask) -> Ids | None:
        hit: dict[str, Any] = {}
        if ask.found is not None:
            hit = {"num_new_computed_tokens": ask.found.tokens, "new_computed_blocks": self._hits[name]}
        blocks = self._manager.allocate_slots(
            self._requests[name],
            ask.chunk,
            num_lookahead_tokens=ask.lookahead,
            num_external_computed_tokens=ask.external,
            delay_cache_blocks=ask.delay,
            num_encoder_tokens=self._encoder_tokens,
            **hit,
        )
        return None if blocks is None else self._ids(blocks)

    def decode(self, rows: Sequence[DecodeRow], lookahead: int) -> Slots:
        cells: list[tuple[int, ...]] = []
        for number, row in enumerate(rows):
            new = self.allocate(row.name, Ask(1 + row.drafts, lookahead, delay=False))
            if new is None:
                return Slots(number, tuple(cells))
            for group, (table, ids) in enumerate(zip(self.table(row.name), new, strict=True)):
                first = len(table) - len(ids)
                cells += [(number, group, first + i, block) for i, block in enumerate(ids) if block]
        return Slots(len(rows), tuple(cells))

    def cached(self, name: str) -> tuple[tuple[bool, ...], ...]:
        hashes, pool = self._requests[name].block_hashes, self._manager.block_pool
        found = []
        for number, group in enumerate(self._manager.coordinator.single_type_managers):
            stride = group.block_size // self._hash_block
            if self._rings[number]:
                stride = len(hashes) + 1
            keys = hashes[stride - 1 :: stride]
            found.append(tuple(pool.get_cached_block(key, [number]) is not None for key in keys))
        return tuple(found)

    def publish(self, name: str, tokens: int) -> None:
        request = self._requests[name]
        self._manager.cache_blocks(request, min(tokens, request.num_tokens))

    def free(self, name: str) -> None:
        self._manager.free(self._requests[name])
        self._requests[name].num_computed_tokens = 0

    def forget(self, name: str) -> None:
        del self._requests[name]

    def reset(self) -> bool:
        return bool(self._manager.reset_prefix_cache())

    def table(self, name: str) -> Ids:
        return self._ids(self._manager.get_blocks(name))

    def keys(self, ids: Ids) -> Keys:
        pool = self._manager.block_pool.blocks
        return tuple(tuple(self._key(pool[block]) for block in group) for group in ids)

    def num_free(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())

    def free_order(self) -> tuple[int, ...]:
        blocks = self._manager.block_pool.free_block_queue.get_all_free_blocks()
        return tuple(block.block_id for block in blocks)

    def usage(self) -> float:
        return float(self._manager.usage)

    @staticmethod
    def _key(block: Any) -> bytes | None:  # noqa: ANN401 - as above
        return None if block.block_hash is None else bytes(kv_cache_utils.get_block_hash(block.block_hash))

    @staticmethod
    def _ids(blocks: Any) -> Ids:  # noqa: ANN401 - as above
        return tuple(tuple(group) for group in blocks.get_block_ids())
