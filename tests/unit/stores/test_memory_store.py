import random
import threading
from collections import OrderedDict

import pytest

from how_much import how_many
from hybridkv.errors import CacheError, ConfigError
from hybridkv.stores import MemoryStore
from hybridkv.stores.memory import Recency
from store_contract import get, put


class NaiveStore:
    """Blocks in a list, the least recently used one first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.blocks: list[tuple[bytes, bytes]] = []

    def get(self, key: bytes, length: int) -> bytes | None:
        for at, (one, block) in enumerate(self.blocks):
            if one == key and len(block) == length:
                self.blocks.append(self.blocks.pop(at))
                return block
        return None

    def put(self, blocks: dict[bytes, bytes]) -> list[bool]:
        answers, mine = [], set[bytes]()
        for key, block in blocks.items():
            own = sum(len(one) for name, one in self.blocks if name in mine)
            if own + len(block) > self.max_bytes:
                answers.append(False)
                continue
            self.blocks = [(name, one) for name, one in self.blocks if name != key]
            while sum(len(one) for _, one in self.blocks) + len(block) > self.max_bytes:
                self.blocks.pop(0)
            self.blocks.append((key, block))
            mine.add(key)
            answers.append(True)
        return answers

    def remove(self, key: bytes) -> bool:
        before = len(self.blocks)
        self.blocks = [(name, one) for name, one in self.blocks if name != key]
        return len(self.blocks) < before


@pytest.mark.parametrize("max_bytes", [1, 40, 1000, 100_000])
@pytest.mark.parametrize("seed", range(how_many(40)))
def test_random_calls_equal_a_naive_store(seed: int, max_bytes: int) -> None:
    made, store, naive = random.Random(seed), MemoryStore(max_bytes), NaiveStore(max_bytes)
    keys = [b"%d" % number for number in range(12)]
    for _ in range(300):
        chosen, act = made.sample(keys, made.choice((1, 2, 6))), made.random()
        if act < 0.5:
            blocks = {key: made.randbytes(made.choice((1, 20, 39, 40, 41, 300))) for key in chosen}
            assert put(store, blocks) == naive.put(blocks)
        elif act < 0.9:
            for key in chosen:
                length = made.choice((1, 20, 39, 40, 41, 300))
                read = naive.get(key, length)
                assert get(store, {key: length}) == ({} if read is None else {key: read})
        else:
            assert store.remove(chosen) == [naive.remove(key) for key in chosen]
        known = dict(naive.blocks)
        assert store.exists(keys) == [key in known for key in keys]
        assert len(store) == len(known)
        assert store.statistics().block_bytes == sum(map(len, known.values())) <= max_bytes
        assert [*store._recency._lengths] == [key for key, _ in naive.blocks]
        store.check()


def test_look_up_is_no_use_and_a_read_is() -> None:
    store = MemoryStore(30)
    put(store, {b"a": bytes(10), b"b": bytes(10), b"c": bytes(10)})
    store.exists([b"a"])
    get(store, {b"b": 10})
    put(store, {b"d": bytes(10), b"e": bytes(10)})
    assert store.exists([b"a", b"b", b"c", b"d", b"e"]) == [False, True, False, True, True]
    assert store.statistics().evicted == 2


def test_call_larger_than_the_store_keeps_its_first_blocks() -> None:
    store = MemoryStore(25)
    put(store, {b"old": bytes(10)})
    assert put(store, {b"%d" % number: bytes(10) for number in range(4)}) == [True, True, False, False]
    assert put(store, {b"large": bytes(26)}) == [False]
    assert store.exists([b"old", b"0", b"1", b"2", b"large"]) == [False, True, True, False, False]


def test_block_that_has_no_room_leaves_the_others() -> None:
    store = MemoryStore(25)
    put(store, {b"a": bytes(10), b"b": bytes(10)})
    assert put(store, {b"a": bytes(26)}) == [False]
    assert get(store, {b"a": 10, b"b": 10}) == {b"a": bytes(10), b"b": bytes(10)}
    assert store.statistics().evicted == 0


def test_key_twice_in_a_call_counts_once() -> None:
    store, views = MemoryStore(20), [memoryview(b"a" * 12), memoryview(b"b" * 13)]
    assert store.put([b"k", b"k"], views) == [True, True]
    assert get(store, {b"k": 13}) == {b"k": b"b" * 13}
    assert store.put([b"k", b"k"], [views[0], memoryview(bytes(21))]) == [True, False]
    assert get(store, {b"k": 12}) == {b"k": b"a" * 12}
    assert store.put([b"x", b"y", b"x"], [memoryview(bytes(10))] * 3) == [True] * 3
    store.check()


def test_evicted_key_that_the_same_call_puts_stays() -> None:
    store = MemoryStore(20)
    put(store, {b"a": bytes(10), b"b": bytes(10)})
    assert put(store, {b"c": bytes(10), b"a": b"new bytes."}) == [True, True]
    assert get(store, {b"a": 10, b"b": 10}) == {b"a": b"new bytes."}
    store.check()


def test_statistics_count_blocks_and_bytes() -> None:
    store = MemoryStore(100)
    put(store, {b"a": bytes(10), b"b": bytes(20), b"large": bytes(90)})
    get(store, {b"a": 10, b"b": 1, b"x": 5})
    made = store.statistics()
    assert (made.blocks, made.block_bytes, made.stored, made.stored_bytes, made.dropped) == (2, 30, 2, 30, 1)
    assert (made.found, made.found_bytes, made.missed, made.evicted) == (1, 10, 2, 0)


def test_close_waits_for_calls_and_gives_memory_back() -> None:
    store, results = MemoryStore(1 << 20), list[object]()

    def work() -> None:
        try:
            while True:
                assert put(store, {b"k": bytes(1000)}) == [True]
                assert get(store, {b"k": 1000}) == {b"k": bytes(1000)}
        except CacheError:
            results.append(None)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join(20)
    assert len(results) == 3
    assert (len(store), store.statistics().block_bytes) == (0, 0)
    store.check()


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, "1GiB", None, 1 << 63])
def test_size_that_is_out_of_range_is_named(max_bytes: object) -> None:
    with pytest.raises(ConfigError, match="max_bytes must"):
        MemoryStore(max_bytes)  # type: ignore[arg-type]


def test_recency_serves_without_bytes() -> None:
    """As a simulation uses it: lengths of terabytes, and no memory."""
    recency, naive = Recency(10 << 40), OrderedDict[bytes, int]()
    for number in range(100):
        kept, gone = recency.admit([b"%d" % number], [1 << 40])
        naive[b"%d" % number] = 1 << 40
        assert kept == [True]
        assert gone == ([naive.popitem(last=False)[0]] if len(naive) > 10 else [])
        if number % 3 == 0:
            oldest = next(iter(naive))
            naive.move_to_end(oldest)
            recency.touch(oldest)
    assert recency.used_bytes == 10 << 40
    assert recency.evicted == 90
    assert recency.length(b"99") == 1 << 40
    recency.check()


def test_key_that_is_admitted_is_not_among_those_that_made_room() -> None:
    recency = Recency(2)
    recency.admit([b"a", b"b"], [1, 1])
    assert recency.admit([b"c", b"a"], [1, 1]) == ([True, True], [b"b"])
