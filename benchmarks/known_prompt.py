"""Measure a known prompt from its tokens to the blocks of its hit, and the parts of this work alone.

    python known_prompt.py [OTHER_BLOCKS ...]        with this many other cached blocks: 0, 10000 and 1000000 by default

Requests of 131,072 tokens are made anew, with all but the last block known. Prints thread time, median and minimum.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable
from time import thread_time_ns
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache import BlockHasher, KVCacheManager
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request
from hybridkv.specs import FullAttentionSpec

T = TypeVar("T")
Int32 = NDArray[np.int32]

BLOCK: Final = 16
TOKENS: Final = 131_072
REQUESTS: Final = 60
VOCABULARY: Final = 50_000


class Clock:
    """Nanoseconds of each part."""

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = {}

    def timed(self, part: str, call: Callable[..., T], *arguments: object) -> T:
        """Return the result of ``call``, and record its time as ``part``."""
        before = thread_time_ns()
        given = call(*arguments)
        self.parts.setdefault(part, []).append(thread_time_ns() - before)
        return given

    def table(self) -> str:
        """Yield a line for each part, in microseconds."""
        return "\n".join(
            f"  {part:44} {np.median(spent) / 1000:8.1f} {min(spent) / 1000:8.1f}" for part, spent in self.parts.items()
        )


class Bench:
    """A cache that holds ``others`` blocks of prompts that never come again, and those of ``prompt``."""

    def __init__(self, others: int) -> None:
        self.draw = np.random.default_rng(1)
        self.hasher = BlockHasher(BLOCK)
        layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float32")
        config = KVCacheConfig(others + 3 * TOKENS // BLOCK, (), (KVCacheGroupSpec(("layer",), layer),))
        self.cache = KVCacheManager(config, 2 * TOKENS, hasher=self.hasher)
        for first in range(0, others, TOKENS // BLOCK):
            self.keep(self.tokens(min(others - first, TOKENS // BLOCK) * BLOCK))
        self.prompt = self.tokens(TOKENS)
        self.keep(self.prompt)

    def tokens(self, count: int) -> Int32:
        """As a new prompt has them."""
        return self.draw.integers(0, VOCABULARY, count).astype(np.int32)

    def keep(self, tokens: Int32) -> None:
        """``tokens`` are cached, of a request that ended."""
        request = Request("known", tokens, hasher=self.hasher)
        if self.cache.allocate_slots(request, len(tokens)) is None:
            raise AssertionError("the pool is too small")
        self.cache.free(request)

    def again(self) -> Int32:
        """Return the prompt with another last block."""
        return np.concatenate((self.prompt[:-BLOCK], self.tokens(BLOCK)))


def whole(bench: Bench) -> Clock:
    """Return the tokens as callers pass them: arrays of two widths, and lists."""
    clock = Clock()
    forms: dict[str, Callable[[Int32], Int32 | NDArray[np.int64] | list[int]]] = {
        "int32": lambda tokens: tokens,
        "int64": lambda tokens: tokens.astype(np.int64),
        "list": lambda tokens: tokens.tolist(),
    }
    for form, made in forms.items():
        for _ in range(REQUESTS):
            given = made(bench.again())
            _, hit = clock.timed(f"{form} to blocks", _found, bench, given)
            if hit != TOKENS - BLOCK:
                raise AssertionError(f"{hit} tokens hit")
    return clock


def _found(bench: Bench, tokens: Int32 | NDArray[np.int64] | list[int]) -> tuple[object, int]:
    return bench.cache.get_computed_blocks(Request("again", tokens, hasher=bench.hasher))


def parts(bench: Bench) -> Clock:
    """Primitives alone, of an int32 array."""
    clock = Clock()
    known = bytearray(bench.prompt.data)
    keys = Request("known", bench.prompt, hasher=bench.hasher).hashes
    for _ in range(REQUESTS):
        tokens = bench.again()
        clock.timed("largest token found", np.maximum.reduce, tokens.view(np.uint32))
        clock.timed("tokens copied", array("I").frombytes, tokens.view(np.uint8).data)
        clock.timed("tokens compared", known.__eq__, tokens.data)
        clock.timed("8,192 references to keys copied", keys.copy)
        clock.timed("a block hashed", bench.hasher.hash_chain, keys[-2], tokens[-BLOCK:])
        request = Request("again", tokens, hasher=bench.hasher)
        clock.timed("looked up", bench.cache.get_computed_blocks, request)
    return clock


def main() -> None:
    """See the module."""
    gc.disable()
    for others in map(int, sys.argv[1:] or ("0", "10000", "1000000")):
        bench = Bench(others)
        print(f"beside {others:,} other blocks{'us, median':>36}{'least':>9}")
        print(whole(bench).table(), parts(bench).table(), sep="\n")


if __name__ == "__main__":
    main()
