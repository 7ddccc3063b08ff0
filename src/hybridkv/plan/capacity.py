"""What a KVCacheConfig holds. Exact: what is reported can be allocated, one more block could not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hybridkv.plan.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.specs import RequestLimits

_ANY_LENGTH: Final = 1 << 62
"""Tokens of a request that no memory holds, if any layer keeps them all."""


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """One group. kind: class of its spec. page_bytes: one block in one layer (of a uniform type: in all).

    block_bytes: what one block holds in all layers of the group. padding_bytes: what a block takes beyond that,
    in its pages and in tensors where the group has no layer. blocks_per_request: of a request of the longest context.
    """

    kind: str
    layers: int
    block_size: int
    page_bytes: int
    block_bytes: int
    padding_bytes: int
    blocks_per_request: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """A plan in numbers.

    num_blocks: the null block included. block_bytes: what one block takes, padding included.
    unused_bytes: memory left over, less than one block. padding_bytes: lost to padding while one request
    of the longest context runs. tokens_that_fit: the longest request that all blocks but the null block and
    sinks can hold; None where a request of any length fits (no layer keeps every token).
    longest_context: the same, no longer than max_model_len. concurrency: how many requests of the longest
    context fit, sharing nothing.
    """

    memory_bytes: int
    arena_bytes: int
    unused_bytes: int
    num_blocks: int
    block_bytes: int
    padding_bytes: int
    tokens_that_fit: int | None
    longest_context: int
    concurrency: float
    groups: tuple[GroupCapacity, ...]


def blocks_needed(groups: Sequence[KVCacheGroupSpec], limits: RequestLimits) -> tuple[int, ...]:
    """Most blocks that one request within ``limits`` needs in each group."""
    return tuple(group.spec.max_request_blocks(limits) for group in groups)


def tokens_that_fit(groups: Sequence[KVCacheGroupSpec], usable_blocks: int, limits: RequestLimits) -> int | None:
    """The longest request that ``usable_blocks`` can hold, whatever ``limits.max_model_len`` says.

    None where a request of any length fits. Doubling, then bisection: no group's need falls as a request grows.
    """

    def fits(tokens: int) -> bool:
        return sum(blocks_needed(groups, replace(limits, max_model_len=tokens))) <= usable_blocks

    if fits(_ANY_LENGTH):
        return None
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def capacity_of(config: KVCacheConfig, memory_bytes: int, limits: RequestLimits) -> Capacity:
    """The numbers of a config planned for ``memory_bytes`` and requests within ``limits``."""
    block_bytes = sum(tensor.block_stride_bytes for tensor in config.tensors)
    usable = config.num_blocks - 1 - sum(group.spec.reserved_blocks(limits.cp) for group in config.groups)
    fit = tokens_that_fit(config.groups, usable, limits)
    longest = limits.max_model_len if fit is None else min(limits.max_model_len, fit)
    # a pool without room for one token still has to be reported
    needed = blocks_needed(config.groups, replace(limits, max_model_len=max(1, longest)))
    groups = tuple(
        _group_capacity(group, block_bytes, blocks) for group, blocks in zip(config.groups, needed, strict=True)
    )
    return Capacity(
        memory_bytes=memory_bytes,
        arena_bytes=config.arena_bytes,
        unused_bytes=memory_bytes - config.arena_bytes,
        num_blocks=config.num_blocks,
        block_bytes=block_bytes,
        padding_bytes=sum(group.padding_bytes * group.blocks_per_request for group in groups),
        tokens_that_fit=fit,
        longest_context=longest,
        concurrency=max(usable, 0) / max(1, sum(needed)),
        groups=groups,
    )


def _group_capacity(group: KVCacheGroupSpec, block_bytes: int, blocks_per_request: int) -> GroupCapacity:
    own_bytes = group.content_bytes
    return GroupCapacity(
        kind=type(group.spec).__name__,
        layers=len(group.layer_names),
        block_size=group.spec.block_size,
        page_bytes=group.spec.page_size_bytes,
        block_bytes=own_bytes,
        padding_bytes=block_bytes - own_bytes,
        blocks_per_request=blocks_per_request,
    )
