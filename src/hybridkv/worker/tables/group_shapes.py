"""How wide the block table of each group is, how its blocks are split, and whether they hold the request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hybridkv.errors import ConfigError
from hybridkv.specs import KVCacheSpec
from hybridkv.specs.base import Keeps
from hybridkv.specs.limits import RequestLimits
from hybridkv.units import ceil_div
from hybridkv.worker.tables.kernel_blocks import KernelSize

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One group's table.

    block_size: tokens of a memory block. kernel_block_size: how it is split. width: columns, in memory blocks.
    num_blocks: ids lie below it, None for no bound. holds_tokens: whether the blocks hold tokens of the request itself,
    which context parallel ranks share and slots point to: not those of recurrent states or of an encoder's output.
    """

    block_size: int
    kernel_block_size: KernelSize
    width: int
    num_blocks: int | None
    holds_tokens: bool


def group_shapes(  # noqa: PLR0917  # in the order of MultiGroupBlockTable's arguments, its only caller
    block_sizes: Sequence[int],
    kernel_block_sizes: Sequence[KernelSize] | None,
    max_num_blocks: Sequence[int] | None,
    num_blocks: int | Sequence[int] | None,
    specs: Sequence[KVCacheSpec] | None,
    limits: RequestLimits,
) -> tuple[GroupShape, ...]:
    """The shape of every group; arguments are those of MultiGroupBlockTable.

    Raises ConfigError for a number of entries that does not fit the groups, and for block sizes below 1.
    """
    groups = len(block_sizes)
    if not groups or min(block_sizes) < 1:
        raise ConfigError(
            f"block_sizes must name at least one group, each of at least 1 token, got {list(block_sizes)}"
        )
    if kernel_block_sizes is None or len(kernel_block_sizes) == 1:
        kernels = list(kernel_block_sizes or [None]) * groups
    else:
        kernels = _one_a_group("kernel_block_sizes", kernel_block_sizes, groups)
    kinds = [None] * groups if specs is None else _one_a_group("specs", specs, groups)
    for number, (size, spec) in enumerate(zip(block_sizes, kinds, strict=True)):
        if spec is not None and spec.block_size != size:
            raise ConfigError(f"group {number}: block size {size}, but its spec has {spec.block_size}: give the same")
    if max_num_blocks is None:
        widths = [_row_blocks(size, spec, limits) for size, spec in zip(block_sizes, kinds, strict=True)]
    else:
        widths = _one_a_group("max_num_blocks", max_num_blocks, groups)
    if isinstance(num_blocks, Sequence):
        ids: list[int | None] = [*_one_a_group("num_blocks", num_blocks, groups)]
    else:
        ids = [num_blocks] * groups
    return tuple(
        GroupShape(size, None if _keeps(spec) is Keeps.STATE else kernel, width, limit, _holds_tokens(spec))
        for size, kernel, width, limit, spec in zip(block_sizes, kernels, widths, ids, kinds, strict=True)
    )


def _one_a_group(name: str, values: Sequence[T], groups: int) -> list[T]:
    if len(values) != groups:
        raise ConfigError(f"{len(values)} entries in {name} for {groups} groups: give one a group")
    return list(values)


def _row_blocks(block_size: int, spec: KVCacheSpec | None, limits: RequestLimits) -> int:
    """Columns of a row; without a spec those of attention (docs/contracts.md, 7)."""
    if spec is not None:
        return spec.max_row_blocks(limits)
    return max(ceil_div(limits.max_model_len, block_size * limits.cp), 1 + limits.num_speculative_tokens)


def _keeps(spec: KVCacheSpec | None) -> Keeps:
    return Keeps.TOKENS if spec is None else spec.keeps


def _holds_tokens(spec: KVCacheSpec | None) -> bool:
    return _keeps(spec) in {Keeps.TOKENS, Keeps.WINDOW}
