"""What a KVCacheConfig holds. Exact: what is reported can be allocated, one more block could not.

Everything is counted in units that the pool gives out: blocks in the reference layout, slabs in the natural one,
where a class that needs n blocks takes ``ceil(n / k)`` slabs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hybridkv.arguments import instance, integer
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
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

    num_blocks: the null block included. block_bytes: what one block takes, padding included. In the natural layout
    both are of slabs. unused_bytes: memory left over, less than one block. padding_bytes: lost inside blocks while one
    request of the longest context runs. tokens_that_fit: the longest request that all blocks but the null block and
    sinks can hold; None where a request of any length fits (no layer keeps every token).
    longest_context: the same, no longer than max_model_len. concurrency: how many requests of the longest
    context fit, sharing nothing; behind the point, what is left over as a part of what one more would take.
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


def longest_that(fits: Callable[[int], bool]) -> int | None:
    """The largest n that fits where no smaller one does not; None where any fits. Doubling, then bisection."""
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


def tokens_that_fit(config: KVCacheConfig, limits: RequestLimits) -> int | None:
    """The longest request that ``config`` can hold beside its sinks, whatever ``limits.max_model_len`` says.

    None where a request of any length fits. No group's need falls as a request grows.
    """
    sinks = reserved_blocks(config.groups, limits)

    def fits(tokens: int) -> bool:
        needed = blocks_needed(config.groups, replace(limits, max_model_len=tokens))
        return config.units_for(_sum(sinks, needed)) < config.num_blocks

    return longest_that(fits)


def reserved_blocks(groups: Sequence[KVCacheGroupSpec], limits: RequestLimits) -> tuple[int, ...]:
    """Blocks of each group that belong to the layers, whoever runs: those of sinks."""
    return tuple(group.spec.reserved_blocks(limits.cp) for group in groups)


def copies_that_fit(config: KVCacheConfig, limits: RequestLimits, blocks: Sequence[int]) -> tuple[int, float]:
    """How often ``blocks[i]`` blocks of every group i fit beside the sinks.

    The second number adds what is left over, as a part of what one more takes: its floor is the first.
    Where no block is needed, every unit counts as one.
    """
    sinks = reserved_blocks(config.groups, limits)

    def units(copies: int) -> int:
        return config.units_for([own + copies * each for own, each in zip(sinks, blocks, strict=True)])

    usable = config.num_blocks - 1
    free = usable - units(0)
    if free <= 0 or not any(blocks):
        return max(free, 0), float(max(free, 0))
    most = longest_that(lambda copies: units(copies) <= usable)
    if most is None:
        raise AssertionError("a pool of blocks holds no endless number of them")
    left, more = usable - units(most), units(most + 1) - units(most)
    # one division: exact where units are blocks
    return most, (most * more + left) / more


def capacity_of(config: KVCacheConfig, memory_bytes: int, limits: RequestLimits) -> Capacity:
    """The numbers of a config planned for ``memory_bytes`` and requests within ``limits``."""
    instance("config", config, KVCacheConfig)
    memory_bytes = integer("memory_bytes", memory_bytes)
    instance("limits", limits, RequestLimits)
    fit = tokens_that_fit(config, limits)
    longest = limits.max_model_len if fit is None else min(limits.max_model_len, fit)
    # a pool without room for one token still has to be reported
    needed = blocks_needed(config.groups, replace(limits, max_model_len=max(1, longest)))
    groups = tuple(
        _group_capacity(group, config.block_bytes_of(at), blocks)
        for at, (group, blocks) in enumerate(zip(config.groups, needed, strict=True))
    )
    return Capacity(
        memory_bytes=memory_bytes,
        arena_bytes=config.arena_bytes,
        unused_bytes=memory_bytes - config.arena_bytes,
        num_blocks=config.num_blocks,
        block_bytes=config.unit_bytes,
        padding_bytes=sum(group.padding_bytes * group.blocks_per_request for group in groups),
        tokens_that_fit=fit,
        longest_context=longest,
        concurrency=copies_that_fit(config, limits, needed)[1],
        groups=groups,
    )


def _sum(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


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
