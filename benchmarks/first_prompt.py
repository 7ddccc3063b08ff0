"""Measure a prompt without hits from its tokens to its blocks, hashed with arrays and compiled, in alternation.

    python first_prompt.py [TOKENS ...]        131072 and 4096 by default

Requests are made, looked up, given blocks, published and freed. Prints medians of thread time in microseconds.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from time import thread_time_ns
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BlockHasher, KVCacheManager
from hybridkv.cache.hashing import ArrayDigests, CompiledDigests, compiled_module
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request
from hybridkv.specs import FullAttentionSpec

BLOCK: Final = 16
ROUNDS: Final = 40
VOCABULARY: Final = 150_000


def served(digests: ArrayDigests | CompiledDigests, tokens: NDArray[np.int32], *, as_list: bool) -> float:
    """Microseconds from ``tokens`` to their blocks, in a cache of their own."""
    hasher = BlockHasher(BLOCK)
    hasher._digests = digests
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float32")
    cache = KVCacheManager(
        KVCacheConfig(len(tokens) // BLOCK + 2, (), (KVCacheGroupSpec(("layer",), layer),)), 1 << 20, hasher=hasher
    )
    given = tokens.tolist() if as_list else tokens
    begun = thread_time_ns()
    request = Request("new", given, hasher=hasher)
    cache.get_computed_blocks(request)
    if cache.allocate_slots(request, len(tokens)) is None:
        raise AssertionError("the pool is too small")
    spent = thread_time_ns() - begun
    cache.free(request)
    return spent / 1000


def main() -> None:
    """See the module."""
    gc.disable()
    module = compiled_module()
    ways: dict[str, ArrayDigests | CompiledDigests] = {"arrays": ArrayDigests(BLOCK, hashlib.sha256, 32)}
    if module is not None:
        ways["compiled"] = CompiledDigests(BLOCK, module)
    draw = np.random.default_rng(1)
    print(f"{'':22}" + "".join(f"{way:>12}" for way in ways))
    for count in map(int, sys.argv[1:] or ("131072", "4096")):
        for form in ("list", "int32"):
            spent: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                tokens = draw.integers(0, VOCABULARY, count).astype(np.int32)
                for way, digests in ways.items():
                    spent[way].append(served(digests, tokens, as_list=form == "list"))
            print(f"{count:>8} tokens, {form:6}" + "".join(f"{np.median(spent[way]):12.0f}" for way in ways))


if __name__ == "__main__":
    main()
