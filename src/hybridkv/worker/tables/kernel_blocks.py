"""Memory blocks, which the cache manager names, and kernel blocks, which an attention kernel reads.

    memory block 3 of 32 tokens   [           3           ]
    kernel blocks of 8 tokens     [ 12  |  13  | 14  | 15 ]

A memory block b of n * k tokens is n kernel blocks of k: ids b * n .. b * n + n - 1. Block tables hold kernel ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError

KernelSize = int | Sequence[int] | None
"""Tokens of a kernel block, or the sizes that a kernel supports, best first; None, 0 or [0] for blocks left whole."""


def choose_kernel_block_size(block_size: int, kernel_block_size: KernelSize) -> int:
    """Tokens of a kernel block where a memory block has ``block_size``.

    A size must divide the block. Of a list the first positive size that divides is taken. Raises ConfigError
    for a size that does not divide, a list of which none does, and an empty list.
    """
    if kernel_block_size is None:
        return block_size
    if isinstance(kernel_block_size, Sequence):
        return _first_that_divides(block_size, kernel_block_size)
    if kernel_block_size == 0:
        return block_size
    if kernel_block_size < 0 or block_size % kernel_block_size:
        raise ConfigError(
            f"kernel_block_size {kernel_block_size} does not divide blocks of {block_size} tokens: "
            "choose a divisor, or another block_size"
        )
    return kernel_block_size


def _first_that_divides(block_size: int, supported: Sequence[int]) -> int:
    if not supported:
        raise ConfigError("the list of supported kernel block sizes is empty: give None for blocks left whole")
    if not any(supported):
        return block_size
    for size in supported:
        if size > 0 and block_size % size == 0:
            return size
    raise ConfigError(
        f"none of the supported kernel block sizes {list(supported)} divides blocks of {block_size} tokens: "
        "change block_size, or support one of its divisors"
    )


def id_limit(num_blocks: int | None, blocks_per_kv_block: int) -> int:
    """What ids of memory blocks must lie below, so that ids of kernel blocks fit int32.

    num_blocks: how many there are; None for as many as fit. Raises ConfigError for more, and for none.
    """
    limit = (1 << 31) // blocks_per_kv_block
    if num_blocks is None:
        return limit
    if not 1 <= num_blocks <= limit:
        raise ConfigError(
            f"num_blocks must lie in 1 .. {limit}, got {num_blocks}: each is {blocks_per_kv_block} kernel blocks, "
            "whose ids are int32"
        )
    return num_blocks


def map_to_kernel_blocks(
    kv_manager_block_ids: NDArray[np.integer], blocks_per_kv_block: int, kernel_block_arange: NDArray[np.integer]
) -> NDArray[np.integer]:
    """The kernel blocks of memory blocks, in order.

    kv_manager_block_ids: int[m]. kernel_block_arange: 0 .. blocks_per_kv_block - 1, of any shape. Returns
    int64[m * blocks_per_kv_block], so that no id overflows; the input itself where blocks_per_kv_block is 1.
    Raises WorkerError for an arange of another length. O(result).
    """
    if blocks_per_kv_block == 1:
        return kv_manager_block_ids
    if kernel_block_arange.size != blocks_per_kv_block:
        raise WorkerError(
            f"kernel_block_arange has {kernel_block_arange.size} numbers for {blocks_per_kv_block} kernel blocks "
            f"in a memory block: give np.arange({blocks_per_kv_block})"
        )
    first = kv_manager_block_ids.astype(np.int64)[:, None] * blocks_per_kv_block
    ids: NDArray[np.int64] = (first + kernel_block_arange.reshape(1, -1)).reshape(-1)
    return ids
