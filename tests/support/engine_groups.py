"""Requests and groups as vLLM has them, by the names of their fields, and hybridkv.vllm's manager of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from math import prod
from typing import Any

from hybridkv.vllm.manager import CacheManager, reference_cache
from hybridkv.vllm.specs import Settings

SIZE = 4
"""Tokens of a block that it hashes."""


@dataclass
class Sampling:
    extra_args: dict[str, Any] | None = None


class Asked:
    """By the names that hybridkv.vllm reads.

    finished: whether it ended. stale: tokens in flight from before it was preempted.
    """

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.request_id, self.all_token_ids = name, list(prompt)
        self.num_prompt_tokens, self.num_computed_tokens, self.num_in_flight_tokens = len(prompt), 0, 0
        self.num_preemptions = self.shared_prefix_boundary = self.num_output_placeholders = 0
        self.drafts, self.max_tokens, self.is_prefill_chunk = 0, 1000, False
        self.finished, self.stale = False, 0
        self.skip_reading_prefix_cache = False
        self.cache_salt: str | None = None
        self.lora_request = None
        self.prompt_embeds: Any = None
        self.sampling_params: Sampling | None = None
        self.mm_features: list[Any] = []
        self.block_hashes: list[bytes] = []
        self.append()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + self.drafts

    def append(self, *tokens: int) -> None:
        self.all_token_ids += tokens
        for end in range(SIZE * (len(self.block_hashes) + 1), self.num_tokens + 1, SIZE):
            self.block_hashes.append(sha256(bytes(self.all_token_ids[:end])).digest())


PROMPT = list(range(1, 15))


@dataclass(frozen=True)
class FullAttentionSpec:
    """more_bytes: of a page, beside those that its heads and dtype say."""

    block_size: int = SIZE
    num_kv_heads: int = 1
    head_size: int = 8
    dtype: str = "torch.float32"
    page_size_padded: int | None = None
    more_bytes: int = 0
    tokens_per_state: int | Fraction = 1
    dcp_sharded: bool = True
    prefix_cacheable: bool = True

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * 2 * 4 + self.more_bytes


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 6
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    bounded_replay: bool = False


@dataclass(frozen=True)
class CircularBufferSpec(FullAttentionSpec):
    dcp_sharded: bool = False


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = SIZE
    shapes: tuple[tuple[int, ...], ...] = ((2, 2),)
    dtypes: tuple[str, ...] = ("torch.float32",)
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    page_size_padded: int | None = None

    @property
    def real_page_size_bytes(self) -> int:
        return 4 * sum(prod(shape) for shape in self.shapes)


@dataclass
class Group:
    kv_cache_spec: Any
    layer_names: Sequence[str] = ("layer",)
    is_eagle_group: bool = False


@dataclass
class Config:
    kv_cache_groups: Sequence[Any]
    num_blocks: int = 20
    kv_cache_tensors: Sequence[Any] = ()


def manager(*specs: Any, num_blocks: int = 20, **changed: Any) -> CacheManager:  # noqa: ANN401 - of vLLM's kinds
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "max_in_flight_tokens": 64,
        "hash_block_size": SIZE,
        "enable_caching": True,
        "use_eagle": False,
        "enable_events": False,
    }
    groups = [Group(spec, (f"layer{number}",)) for number, spec in enumerate(specs)]
    config, made = Config(groups, num_blocks), Settings(**(settings | changed))
    return CacheManager(reference_cache(config, made), config, made)


def run(cache: CacheManager, request: Asked, tokens: int) -> Any:  # noqa: ANN401 - Blocks or None
    """A step of ``request`` alone, which is executed at once; what it was given."""
    with cache.step():
        hit: dict[str, Any] = {}
        if not request.num_computed_tokens:
            blocks, hits, request.shared_prefix_boundary = cache.get_computed_blocks(request)
            hit = {"num_new_computed_tokens": hits, "new_computed_blocks": blocks}
            tokens -= hits
        new = cache.allocate_slots(request, tokens, **hit)
    if new is not None:
        request.num_computed_tokens += tokens + hit.get("num_new_computed_tokens", 0)
    output = object()
    cache.scheduled(output)
    cache.executed(output)
    return new
