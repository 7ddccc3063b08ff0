"""Prefixes in a store: found if, and only if, every group has what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import numpy as np
import pytest

from hybridkv.cache import BlockHasher
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import MultimodalItem
from hybridkv.request import Request
from hybridkv.stores.marks import MOST_TAILS, mark_with, tails_of
from hybridkv.tiers.prefixes import Part, Prefixes

HASH_BLOCK: Final = 4


class Store:
    """A store of keys; the blocks are marks, or nothing."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        found = []
        for key, buffer in zip(keys, into, strict=True):
            block = self.blocks.get(key)
            found.append(block is not None and len(block) == len(buffer))
            if found[-1] and block is not None:
                buffer[:] = block
        return found

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        self.blocks.update({key: bytes(block) for key, block in zip(keys, blocks, strict=True)})
        return [True] * len(keys)

    def close(self) -> None:
        pass


def full(group: int, size: int) -> Part:
    return Part(group, group, size, lambda tokens: tokens * 0, reads_all=True)


def window(group: int, size: int, tokens_read: int) -> Part:
    return Part(group, group, size, lambda tokens: max(0, tokens - tokens_read))


def state(group: int) -> Part:
    return Part(group, group, HASH_BLOCK, lambda tokens: tokens, is_state=True)


KINDS: Final = {
    "full": [full(0, 8)],
    "two sizes": [full(0, 8), full(1, 12)],
    "window": [window(0, 8, 10)],
    "full and window": [full(0, 8), window(1, 4, 6)],
    "state": [state(0)],
    "hybrid": [full(0, 8), state(1), window(2, 4, 9)],
    "full of ranks": [replace(full(0, 8), shares=3)],
    "hybrid of ranks": [
        replace(one, shares=shares)
        for one, shares in ((full(0, 8), 2), (state(1), 4), (replace(state(2), kind=1), 4), (window(3, 4, 9), 1))
    ],
}


def shares(part: Part, keys: Sequence[bytes]) -> list[bytes]:
    """What the store has for blocks: share 0 under the key itself."""
    return [key + (bytes([number, 0]) if number else b"") for key in keys for number in range(part.shares)]


def put(store: Store, prefixes: Prefixes, request: Request, tokens: int) -> None:
    """Store the prefix of ``tokens`` tokens as the worker does."""
    for part in prefixes.parts:
        for key in shares(part, prefixes.keys(request, tokens, part, part.columns(tokens))):
            store.blocks[key] = b"x"
    mark = prefixes.mark(request, tokens)
    store.blocks[mark.key] = mark_with(store.blocks.get(mark.key, b""), mark.tail, HASH_BLOCK)


@pytest.mark.parametrize("kind", KINDS)
def test_finds_the_longest_prefix_that_was_stored_whole(kind: str) -> None:
    """A second model keeps the stored prefixes as token lists, and loses one whose key is removed."""
    random = Random(kind)
    parts, hasher = KINDS[kind], BlockHasher(HASH_BLOCK)
    any_end = all(part.reads_all for part in parts)
    for _ in range(300):
        store, prefixes = Store(), Prefixes(parts, b"i" * 16, HASH_BLOCK)
        stored: list[tuple[list[int], int]] = []
        family = [random.randrange(3) for _ in range(64)]
        for number in range(random.randint(1, 4)):
            tokens = family[: random.randint(5, 60)] + [random.randrange(3) for _ in range(random.randint(1, 20))]
            end = random.randint(HASH_BLOCK, len(tokens) - 1)
            request = Request(f"stored {number}", tokens, hasher=hasher)
            put(store, prefixes, request, end)
            stored.append((tokens[:end], end))
        asked = random.choice(stored)[0][: random.randint(5, 60)] + [random.randrange(3) for _ in range(6)]
        request = Request("asked", asked, hasher=hasher)
        whole = [end for of, end in stored if asked[:end] == of and end < len(asked)]
        if any_end:
            common = 24 if kind == "two sizes" else 8
            shared = [
                next((i for i, (a, b) in enumerate(zip(of, asked, strict=False)) if a != b), min(len(of), len(asked)))
                for of, _ in stored
            ]
            whole += [min(one, len(asked) - 1) // common * common for one in shared]
        longest = max(whole, default=0)
        least = random.choice((0, 0, random.randint(0, 40)))
        found = prefixes.find(store, request, least)
        assert found == (longest if longest > least else 0), (kind, asked, stored)
        if found:
            needed = [
                key
                for part in parts
                for key in shares(
                    part,
                    prefixes.keys(
                        request,
                        found,
                        part,
                        range(least // part.block_size, part.columns(found).stop)
                        if part.reads_all
                        else part.columns(found),
                    ),
                )
            ]
            del store.blocks[random.choice(needed)]
            assert prefixes.find(store, request, least) < found


def test_separates_salts_groups_and_identities() -> None:
    hasher, tokens = BlockHasher(HASH_BLOCK), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    plain = Request("plain", tokens, hasher=hasher)
    salted = Request("salted", tokens, hasher=hasher, cache_salt="s")
    one, other = (Prefixes([full(0, 4), full(1, 4)], identity, HASH_BLOCK) for identity in (b"1" * 16, b"2" * 16))
    keys = {
        *one.keys(plain, 8, one.parts[0], range(2)),
        *one.keys(salted, 8, one.parts[0], range(2)),
        *one.keys(plain, 8, one.parts[1], range(2)),
        *other.keys(plain, 8, one.parts[0], range(2)),
        *one.keys(plain, 7, one.parts[0], range(2)),
    }
    assert len(keys) == 9  # the first whole block of a prefix of 7 tokens is that of 8
    assert {len(key) for key in keys} == {61}


def test_separates_images_and_embeddings_after_the_last_hash_block() -> None:
    """Their tokens are alike: they stand for the content."""
    hasher, tokens, prefixes = BlockHasher(HASH_BLOCK), [1] * 8, Prefixes([full(0, 4)], b"1" * 16, HASH_BLOCK)

    def asked(name: str, **more: Any) -> Request:  # noqa: ANN401  # of a Request
        return Request(name, tokens, hasher=hasher, **more)

    same = [asked("plain"), asked("after", multimodal=[MultimodalItem("cat", 7, 1)])]
    others = [asked(name, multimodal=[MultimodalItem(name, 5, 2)]) for name in ("cat", "dog")]
    others += [asked("bird", multimodal=[MultimodalItem("cat", 6, 2)])]
    others += [asked(f"embeds {n}", prompt_embeds=np.full((8, 2), n, np.float32)) for n in range(2)]
    store = Store()
    put(store, prefixes, same[0], 7)
    assert [prefixes.find(store, one, 0) for one in same] == [7, 7]
    assert all(prefixes.find(store, one, 0) <= 4 for one in others)
    for one in others:
        put(store, prefixes, one, 7)
        assert prefixes.find(store, one, 0) == 7
    keys = {prefixes.keys(one, 7, prefixes.parts[0], [1])[0] for one in (*same, *others)}
    assert len(keys) == 1 + len(others)


def test_marks_list_the_newest_tails() -> None:
    mark = b""
    for number in range(MOST_TAILS + 3):
        tail = (
            bytes(4 * (number % 4))[:-4] + number.to_bytes(4, "little") if number % 4 else number.to_bytes(4, "little")
        )
        mark = mark_with(mark, tail, HASH_BLOCK)
    assert len(tails_of(mark, HASH_BLOCK)) == MOST_TAILS
    assert tails_of(mark_with(mark, b"", HASH_BLOCK), HASH_BLOCK)[0] == b""
    again = tails_of(mark, HASH_BLOCK)[3]
    assert tails_of(mark_with(mark, again, HASH_BLOCK), HASH_BLOCK).count(again) == 1


def test_refuses_a_short_identity() -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        Prefixes([], b"short", HASH_BLOCK)
