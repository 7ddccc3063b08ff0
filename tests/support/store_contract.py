"""What every store of blocks guarantees, as checks that take a store of any kind."""

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest

from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores import BlockStore

MiB: Final = 1 << 20


@dataclass(frozen=True)
class Kept:
    """Where stores of one kind keep their blocks, empty at first.

    open: a store there. flip: change one bit of what is kept for a key. move: keep what is kept for one key for another
    one. Both are None where nobody but the store reaches the bytes. is_shared: two open stores see the same blocks.
    """

    open: Callable[[], BlockStore]
    flip: Callable[[bytes], None] | None = None
    move: Callable[[bytes, bytes], None] | None = None
    is_shared: bool = True


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise AssertionError(f"it is not so after {seconds} s")
        time.sleep(0.005)


def put(store: BlockStore, blocks: Mapping[bytes, bytes]) -> list[bool]:
    return store.put([*blocks], [memoryview(block) for block in blocks.values()])


def get(store: BlockStore, lengths: Mapping[bytes, int]) -> dict[bytes, bytes]:
    """Blocks that are found, by one call."""
    buffers = [bytearray(length) for length in lengths.values()]
    found = store.get([*lengths], [memoryview(buffer) for buffer in buffers])
    assert len(found) == len(lengths)
    assert all(type(one) is bool for one in found)
    return {key: bytes(buffer) for key, buffer, one in zip(lengths, buffers, found, strict=True) if one}


def lengths_of(blocks: Mapping[bytes, bytes]) -> dict[bytes, int]:
    return {key: len(block) for key, block in blocks.items()}


def block(key: bytes, length: int, version: int = 0) -> bytes:
    """Bytes that no other key or version has."""
    return random.Random(b"%d/%d/" % (length, version) + key).randbytes(length)


def blocks_of_every_length_arrive_whole(kept: Kept) -> None:
    lengths = [1, 2, 15, 16, 17, 255, 4095, 4096, 65_536, 65_537, 300_000, 2 * MiB + 1, 8 * MiB]
    blocks = {b"%d" % length: block(b"", length) for length in lengths}
    store = kept.open()
    assert put(store, blocks) == [True] * len(blocks)
    assert store.exists([*blocks]) == [True] * len(blocks)
    assert get(store, lengths_of(blocks)) == blocks
    for key, one in reversed(blocks.items()):
        assert get(store, {key: len(one)}) == {key: one}
    store.close()


def missing_blocks_are_misses(kept: Kept) -> None:
    store, blocks = kept.open(), {b"a": b"first", b"b": b"second"}
    assert store.exists([b"a", b"b"]) == [False, False]
    assert get(store, {b"a": 5}) == {}
    put(store, blocks)
    assert store.exists([b"x", b"b", b"y", b"a"]) == [False, True, False, True]
    assert get(store, {b"x": 5, b"b": 6, b"y": 6, b"a": 5}) == blocks
    store.close()


def block_of_another_length_is_a_miss(kept: Kept) -> None:
    store = kept.open()
    put(store, {b"k": b"0123456789"})
    for length in (1, 9, 11, 10_000):
        assert get(store, {b"k": length}) == {}
    assert get(store, {b"k": 10}) == {b"k": b"0123456789"}
    store.close()


def calls_without_keys_answer_nothing(kept: Kept) -> None:
    store = kept.open()
    for call in (store.exists([]), store.get([], []), store.put([], [])):
        assert call == []
        assert put(store, {b"k": b"block"}) == [True]
    store.close()


def many_keys_in_one_call_each_get_their_block(kept: Kept) -> None:
    keys = [b"%032d" % number for number in range(2500)]
    blocks = {key: block(key, 40 + number % 90) for number, key in enumerate(keys)}
    store = kept.open()
    assert put(store, blocks) == [True] * len(blocks)
    asked = [*keys, *(b"never %d" % number for number in range(500))]
    random.Random(1).shuffle(asked)
    assert store.exists(asked) == [key in blocks for key in asked]
    assert get(store, {key: len(blocks.get(key, b"absent")) for key in asked}) == blocks
    store.close()


def keys_of_all_bytes_are_apart(kept: Kept) -> None:
    keys = [bytes([one]) for one in range(256)]
    keys += [b"a" * length for length in range(2, 65)] + [b"\0" * length for length in range(2, 65)]
    keys += [b"..", b"../a", b"a/b", b"AB", b"ab", b"*", b"a b", b"\r\n", b"%61", b"hkv", b"\xff" * 64]
    blocks = {key: block(key, 50) for key in keys}
    store = kept.open()
    assert put(store, blocks) == [True] * len(blocks)
    assert get(store, lengths_of(blocks)) == blocks
    store.close()


def block_that_is_put_again_is_one_of_both(kept: Kept) -> None:
    store, versions = kept.open(), [block(b"k", 700, version) for version in range(4)]
    for version in versions:
        store.put([b"k"], [memoryview(version)])
        assert get(store, {b"k": 700})[b"k"] in versions
    store.put([b"k", b"k"], [memoryview(versions[0]), memoryview(versions[1])])
    assert get(store, {b"k": 700})[b"k"] in versions
    store.close()


def blocks_may_change_after_the_call(kept: Kept) -> None:
    store, source = kept.open(), bytearray(block(b"k", 5000))
    before = bytes(source)
    assert store.put([b"k"], [memoryview(source)]) == [True]
    source[:] = bytes(5000)
    into = bytearray(5000)
    assert store.get([b"k"], [memoryview(into)]) == [True]
    assert into == before
    into[:] = bytes(5000)
    assert get(store, {b"k": 5000}) == {b"k": before}
    store.close()


def views_of_arrays_are_blocks(kept: Kept) -> None:
    store, pages = kept.open(), np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    assert store.put([b"0", b"1"], [pages[0].data, memoryview(pages.tobytes())[80:160]]) == [True, True]
    into = np.zeros_like(pages)
    assert store.get([b"1", b"0"], [into[2].data, into[1].data]) == [True, True]
    assert np.array_equal(into, np.stack([np.zeros((4, 5)), pages[0], pages[1]]))
    store.close()


def wrong_arguments_are_named(kept: Kept) -> None:
    store, view = kept.open(), memoryview(bytearray(10))
    for key in (b"", b"k" * 65, "text", None):
        with pytest.raises(ConfigError, match="a key must be bytes, 1 to 64 of them"):
            store.exists([key])  # type: ignore[list-item]
        for call in (store.get, store.put):
            with pytest.raises(ConfigError, match="a key must be bytes, 1 to 64 of them"):
                call([key], [view])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="keys must be a list"):
        store.exists(b"key")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="blocks must be a list"):
        store.put([b"k"], view)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 keys came with 2 blocks"):
        store.get([b"k"], [view, view])
    with pytest.raises(ConfigError, match="each of into must be writable"):
        store.get([b"k"], [memoryview(bytes(10))])
    with pytest.raises(ConfigError, match="a contiguous buffer"):
        store.put([b"k"], [view[::2]])
    with pytest.raises(ConfigError, match="at least 1 byte"):
        store.put([b"k"], [memoryview(b"")])
    assert store.exists([b"k"]) == [False]
    store.close()


def closed_store_raises(kept: Kept) -> None:
    store, view = kept.open(), memoryview(bytearray(3))
    store.close()
    store.close()
    with pytest.raises(CacheError, match="is closed: open it again"):
        store.exists([b"k"])
    with pytest.raises(CacheError, match="is closed: open it again"):
        store.get([b"k"], [view])
    with pytest.raises(CacheError, match="is closed: open it again"):
        store.put([b"k"], [view])


def versioned(key: int, version: int) -> bytes:
    """A block that says its key and version in each 17 bytes."""
    return (b"%8d/%8d" % (key, version)) * ((4096 if key % 3 else 12_000) // 17)


def put_and_get_at_random(store: BlockStore, seed: int) -> int:
    """Put and read blocks that other threads use, too. Return how many were found; each has one of its contents."""
    made, found = random.Random(seed), 0
    for version in range(40):
        keys = made.sample(range(20), 4)
        if made.random() < 0.5:
            put(store, {b"%d" % key: versioned(key, version) for key in keys})
            continue
        for name, read in get(store, {b"%d" % key: len(versioned(key, 0)) for key in keys}).items():
            found += 1
            if read != versioned(int(name), int(read[9:17])):
                raise AssertionError(f"key {name!r} has {read[:40]!r}")
    return found


def threads_never_read_other_bytes(kept: Kept) -> None:
    store = kept.open()
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(put_and_get_at_random, [store] * 4, range(4))) > 50
    store.close()


def flipped_bit_is_a_miss(kept: Kept) -> None:
    if kept.flip is None:
        return
    store = kept.open()
    for length in (1, 100, 70_000):
        bad, good = b"bad %d" % length, b"good %d" % length
        blocks = {key: block(key, length) for key in (bad, good)}
        for _ in range(8):
            assert put(store, blocks) == [True, True]
            kept.flip(bad)
            assert get(store, lengths_of(blocks)) == {good: blocks[good]}
            assert store.exists([bad, good]) == [False, True]
    store.close()


def block_of_another_key_is_a_miss(kept: Kept) -> None:
    if kept.move is None:
        return
    store = kept.open()
    assert put(store, {b"from": b"0123456789"}) == [True]
    kept.move(b"from", b"to")
    assert get(store, {b"to": 10, b"from": 10}) == {b"from": b"0123456789"}
    store.close()


def open_stores_share_blocks(kept: Kept) -> None:
    if not kept.is_shared:
        return
    one, other = kept.open(), kept.open()
    assert put(one, {b"k": b"by one", b"l": b"by one"}) == [True, True]
    assert get(other, {b"k": 6}) == {b"k": b"by one"}
    assert put(other, {b"m": b"by other"}) == [True]
    one.close()
    after = kept.open()
    assert get(after, {b"k": 6, b"l": 6, b"m": 8}) == {b"k": b"by one", b"l": b"by one", b"m": b"by other"}
    other.close()
    after.close()


CONTRACT: Final[tuple[Callable[[Kept], None], ...]] = (
    blocks_of_every_length_arrive_whole,
    missing_blocks_are_misses,
    block_of_another_length_is_a_miss,
    calls_without_keys_answer_nothing,
    many_keys_in_one_call_each_get_their_block,
    keys_of_all_bytes_are_apart,
    block_that_is_put_again_is_one_of_both,
    blocks_may_change_after_the_call,
    views_of_arrays_are_blocks,
    wrong_arguments_are_named,
    closed_store_raises,
    threads_never_read_other_bytes,
    flipped_bit_is_a_miss,
    block_of_another_key_is_a_miss,
    open_stores_share_blocks,
)
